"""Checkpoints of many small files: each is requested once, whatever happens to the others, and
they share the cost of requests.
"""

import asyncio
import contextlib
import dataclasses
import os
import re
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import restore
from ckpt_async.errors import NoSpaceError
from ckpt_async.local import durable
from ckpt_async.restore import destination as destinations
from ckpt_async.restore import session, small_files
from ckpt_async.restore.destination import PARTIAL_FOLDER, Destination
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.stores.http import connections
from ckpt_async.stores.http.small_downloads import SmallDownloads
from ckpt_async.stores.interface import SmallGet
from ckpt_async.stores.s3.client import S3Store
from ckpt_async.stores.tree import Tree
from ckpt_async.transfer.upload import SMALL_BYTES
from tests.faults.proxy import Fault, FaultProxy
from tests.restore import plays
from tests.restore.runs import Run, content, is_whole, left_in, shard_key

NUM, SIZE_BYTES = 100, 1200
NAMES = [f"layer-{number // 10}/{number:02}.bin" for number in range(NUM)]
FILES = {0: {name: content(10, name, SIZE_BYTES) for name in NAMES}}
ALL_BYTES = NUM * SIZE_BYTES
# One read at a time makes two series, one after the other: the first 64 names in order, and the rest.
ONE: dict[str, Any] = {"num_concurrent_reads": 1}


def _committed(run: Run, files: dict[int, dict[str, bytes]] | None = None) -> restore.Checkpoint:
    run.commit(10, FILES if files is None else files)
    checkpoint = restore.find(run.url)
    assert checkpoint is not None
    return checkpoint


def _name(key: str) -> str:
    return "/".join(key.rsplit("/", 2)[1:])


@dataclasses.dataclass
class Counted:
    """A run in either kind of store. `asked()` returns how often each file was requested since it was last called;
    `together` lists the names that were requested in a series.
    """

    run: Run
    asked: Callable[[], Counter[str]]
    together: list[str]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for kind in (DirectoryStore, S3Store):
        get_many: Any = kind.get_many

        async def noted(self: Any, gets: Any, got: Any, *, get_many: Any = get_many) -> None:
            def named() -> Iterator[SmallGet]:
                for get in gets:
                    found.append(_name(get.key))
                    yield get

            await get_many(self, named(), got)

        monkeypatch.setattr(kind, "get_many", noted)
    return found


@pytest.fixture
def on_disk(tmp_path: Path, together: list[str], monkeypatch: pytest.MonkeyPatch) -> Counted:
    keys: list[str] = []
    opened = Tree.open

    def noted(self: Tree, key: str) -> int:
        keys.append(key)
        return opened(self, key)

    def asked() -> Counter[str]:
        found = Counter(_name(key) for key in keys if key.startswith("ckpt/"))
        keys.clear()
        return found

    monkeypatch.setattr(Tree, "open", noted)
    return Counted(Run(f"file://{tmp_path / 'remote'}"), asked, together)


@pytest.fixture
def in_s3(proxy: FaultProxy, s3_url: str, together: list[str], monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setenv("CKPT_ASYNC_RETRY_INITIAL_S", "0.01")

    def asked() -> Counter[str]:
        found = Counter(
            _name(each.key) for each in proxy.exchanges if each.method == "GET" and "/ckpt/step-" in each.key
        )
        proxy.exchanges.clear()
        return found

    return Counted(Run(s3_url), asked, together)


@pytest.fixture(params=["on_disk", "in_s3"])
def counted(request: pytest.FixtureRequest) -> Counted:
    found: Counted = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["fast disk", "slow disk"])
def _disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish files where they are received, or in threads."""
    monkeypatch.setattr(small_files, "SLOW_S", 1e9 if request.param == "fast disk" else -1.0)


@pytest.mark.usefixtures("_disk")
def test_each_small_file_is_requested_once(counted: Counted, tmp_path: Path) -> None:
    """Few series run at once, one in each place; the report and the progress must add up, and nothing else is left."""
    checkpoint = _committed(counted.run)
    counted.asked()
    seen: list[tuple[int, int]] = []
    report = restore.fetch(checkpoint, tmp_path / "there", on_progress=lambda *now: seen.append(now))
    assert is_whole(report, FILES)
    assert counted.asked() == dict.fromkeys(NAMES, 1)
    assert sorted(counted.together) == NAMES
    assert report.bytes_from == {"remote": ALL_BYTES}
    assert seen == [(number * SIZE_BYTES, ALL_BYTES) for number in range(1, NUM + 1)]
    assert left_in(tmp_path / "there") == NAMES
    assert counted.run.leases() == []
    counted.asked()
    assert restore.fetch(checkpoint, tmp_path / "there").bytes_from == {"there": ALL_BYTES}
    assert counted.asked() == {}


def test_files_are_reported_before_their_series_is_over(
    on_disk: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of a series is not read until others have been reported: far away, that may take long."""
    checkpoint, is_reported, opened = _committed(on_disk.run), threading.Event(), Tree.open
    last = NAMES[63]

    def when_reported(self: Tree, key: str) -> int:
        assert _name(key) != last or is_reported.wait(60)
        return opened(self, key)

    monkeypatch.setattr(Tree, "open", when_reported)
    restore.fetch(checkpoint, tmp_path / "there", on_progress=lambda *_: is_reported.set(), **ONE)
    assert on_disk.together == NAMES  # none by itself


def _spoil(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Corrupt one byte of this file, on the wire, in the first response only."""
    is_first, get_many = True, SmallDownloads.get_many

    async def spoilt(self: SmallDownloads, url: str, gets: Any, check: Any, got: Any, *more: Any) -> Any:
        def told(get: SmallGet, data: memoryview) -> None:
            nonlocal is_first
            if get.key.endswith(f"/{name}") and is_first:
                data, is_first = memoryview(bytearray(data)), False
                data[1000] ^= 1
            got(get, data)

        return await get_many(self, url, gets, check, told, *more)

    monkeypatch.setattr(SmallDownloads, "get_many", spoilt)


def test_only_failed_small_files_are_fetched_again(
    in_s3: Counted, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = _committed(in_s3.run)
    faults = {
        NAMES[number]: proxy.add(
            Fault(kind, "GET", f"/{re.escape(NAMES[number])}$", times=1, after_bytes=after)
        )
        for number, kind, after in (
            (3, "unavailable", 0),
            (21, "expired", 0),
            (35, "cut_reply", 12),
            (50, "cut_reply", 1000),
            (64, "drop_reply", 0),
            (99, "denied", 0),
        )
    }
    _spoil(monkeypatch, NAMES[0])  # comes first in its series, which a refused request would end
    in_s3.asked()
    report = restore.fetch(checkpoint, tmp_path / "there", num_concurrent_reads=8)
    assert is_whole(report, FILES)
    assert {name: fault.num_hits for name, fault in faults.items()} == dict.fromkeys(faults, 1)
    assert in_s3.asked() == {name: 2 if name in faults or name == NAMES[0] else 1 for name in NAMES}
    assert report.bytes_from == {"remote": ALL_BYTES}
    assert left_in(tmp_path / "there") == NAMES
    assert in_s3.run.damages() == {}


def test_an_outage_is_waited_out_with_one_file_of_a_series(
    in_s3: Counted, proxy: FaultProxy, tmp_path: Path
) -> None:
    """The others are not asked for in vain."""
    checkpoint = _committed(in_s3.run)
    proxy.add(Fault("unavailable", "GET", "/ckpt/step-", times=4))
    in_s3.asked()
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there", **ONE), FILES)
    assert in_s3.asked() == {name: 5 if name == NAMES[0] else 1 for name in NAMES}


def test_series_that_cannot_begin_leave_the_files_to_patient_requests(
    in_s3: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a store that is gone would be dialled for ever, without a pause, and nothing would ever be raised. Each
    refusal costs a series one file, unless others have taken the last ones in the meantime.
    """
    checkpoint = _committed(in_s3.run)
    dial, num_refused = SmallDownloads._dial, 0

    def refused(self: SmallDownloads, connection: Any) -> Any:
        nonlocal num_refused
        num_refused += 1
        if num_refused > 2 * NUM:
            return dial(self, connection)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(SmallDownloads, "_dial", refused)
    in_s3.asked()
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there", num_concurrent_reads=8), FILES)
    assert in_s3.asked() == dict.fromkeys(NAMES, 1)
    assert num_refused <= NUM + 8


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("on_disk", "flipped"),
        ("on_disk", "gone"),
        ("on_disk", "cut short"),
        ("in_s3", "flipped"),
        ("in_s3", "gone"),
    ],
)
def test_a_damaged_small_file_is_detected(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, damage: str
) -> None:
    """The error names the file; nothing of any file is left, and files that existed before stay."""
    counted: Counted = request.getfixturevalue(kind)
    checkpoint = _committed(counted.run)
    key = shard_key(10, NAMES[70])
    match damage:
        case "flipped":
            counted.run.flip(key)
        case "gone":
            counted.run.delete(key)
        case "cut short":
            counted.run.put(key, FILES[0][NAMES[70]][:1000])
    there = tmp_path / "there"
    restore.fetch(checkpoint, there, files=["layer-0/*"])
    with pytest.raises(restore.DamagedCheckpointError, match=re.escape(NAMES[70])):
        restore.fetch(checkpoint, there)
    assert left_in(there) == NAMES[:10]
    assert list(counted.run.damages()) == [checkpoint.id]
    assert counted.run.leases() == []


def test_a_damaged_small_file_is_accepted_without_verification(on_disk: Counted, tmp_path: Path) -> None:
    checkpoint = _committed(on_disk.run)
    on_disk.run.flip(shard_key(10, NAMES[70]))
    report = restore.fetch(checkpoint, tmp_path / "there", verify=False)
    bad = bytearray(FILES[0][NAMES[70]])
    bad[100] ^= 1
    assert is_whole(report, {0: FILES[0] | {NAMES[70]: bytes(bad)}})
    assert report.bytes_from == {"remote": ALL_BYTES}


def test_concurrent_processes_fetch_each_small_file_once(
    in_s3: Counted, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Four processes want the same files in the same place, and none finishes before all have started."""
    checkpoint = _committed(in_s3.run)
    in_s3.asked()
    held = proxy.add(Fault("hold", "GET", re.escape(NAMES[5]), times=1))
    with contextlib.ExitStack() as stack:
        pipes = [
            stack.enter_context(plays.playing(plays.fetches, checkpoint, str(tmp_path / "there"), {}))[1]
            for _ in range(4)
        ]
        for pipe in pipes:
            assert plays.told(pipe) == "ready"
            pipe.send("go")
        proxy.wait_for(lambda: held.num_hits == 1 and len(proxy.sent("/leases/")) == 4)
        proxy.release()
        reports = [plays.told(pipe) for pipe in pipes]
    assert in_s3.asked() == dict.fromkeys(NAMES, 1)
    assert sum(report.get("remote", 0) for report in reports) == ALL_BYTES
    assert [sum(report.values()) for report in reports] == [ALL_BYTES] * 4
    assert left_in(tmp_path / "there") == NAMES
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there"), FILES)


@pytest.mark.usefixtures("_disk")
def test_concurrent_threads_fetch_each_small_file_once(on_disk: Counted, tmp_path: Path) -> None:
    checkpoint = _committed(on_disk.run)
    on_disk.asked()
    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(lambda _: restore.fetch(checkpoint, tmp_path / "there"), range(4)))
    assert all(is_whole(report, FILES) for report in reports)
    assert on_disk.asked() == dict.fromkeys(NAMES, 1)
    assert sum(report.bytes_from.get("remote", 0) for report in reports) == ALL_BYTES
    assert left_in(tmp_path / "there") == NAMES


def test_a_fetch_of_small_files_killed_in_the_middle_resumes(
    in_s3: Counted, proxy: FaultProxy, tmp_path: Path
) -> None:
    """After a SIGKILL, a second call completes the fetch without fetching published files again."""
    checkpoint = _committed(in_s3.run)
    there = tmp_path / "there"
    held = proxy.add(Fault("hold", "GET", re.escape(NAMES[30])))
    with plays.playing(plays.fetches, checkpoint, str(there), ONE) as (process, pipe):
        plays.told(pipe)
        pipe.send("go")
        proxy.wait_for(lambda: held.num_hits == 1)
        while not all((there / name).exists() for name in NAMES[:30]):
            assert process.is_alive()
            process.join(0.01)  # the last one may still be on its way to its place
        process.kill()
        process.join(plays.PATIENCE_S)
    assert [path for path in left_in(there) if not path.startswith(PARTIAL_FOLDER)] == NAMES[:30]
    proxy.heal()
    in_s3.asked()
    report = restore.fetch(checkpoint, there, **ONE)
    assert is_whole(report, FILES)
    assert in_s3.asked() == dict.fromkeys(NAMES[30:], 1)
    assert report.bytes_from == {"there": 30 * SIZE_BYTES, "remote": 70 * SIZE_BYTES}
    assert left_in(there) == NAMES


def test_an_expired_lease_stops_a_series(
    on_disk: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It expires in the middle of a series: after the files under way nothing is requested, and nothing is left."""
    checkpoint = _committed(on_disk.run)
    publish, keep, held = destinations.PartialFile.publish, session.HeldLease.keep, []
    num_published = 0

    async def noted(self: session.HeldLease) -> None:
        held.append(self)
        await keep(self)

    def then_it_runs_out(self: destinations.PartialFile, target: Path, **options: int) -> None:
        nonlocal num_published
        publish(self, target, **options)
        num_published += 1
        if num_published == 3:
            held[0]._good_until = 0.0

    monkeypatch.setattr(session.HeldLease, "keep", noted)
    monkeypatch.setattr(destinations.PartialFile, "publish", then_it_runs_out)
    on_disk.asked()
    with pytest.raises(restore.CheckpointGoneError, match="expired"):
        restore.fetch(checkpoint, tmp_path / "there", **ONE)
    asked = on_disk.asked()
    assert set(NAMES[:3]) <= asked.keys() < set(NAMES)
    assert set(asked.values()) == {1}
    assert left_in(tmp_path / "there") == []
    assert on_disk.run.damages() == {}


@pytest.mark.usefixtures("_disk")
def test_a_disk_that_runs_full_stops_a_series(
    on_disk: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised; when called again, the fetch continues where it was."""
    checkpoint = _committed(on_disk.run)
    write, left = destinations.PartialFile.write, 20

    def full(self: destinations.PartialFile, piece: memoryview, offset: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        write(self, piece, offset)

    monkeypatch.setattr(destinations.PartialFile, "write", full)
    with pytest.raises(NoSpaceError, match="filled up"):
        restore.fetch(checkpoint, tmp_path / "there", **ONE)
    left = NUM
    on_disk.asked()
    report = restore.fetch(checkpoint, tmp_path / "there", **ONE)
    assert is_whole(report, FILES)
    assert report.bytes_from == {"there": 20 * SIZE_BYTES, "remote": 80 * SIZE_BYTES}
    assert on_disk.asked() == dict.fromkeys(NAMES[20:], 1)


@pytest.mark.usefixtures("_disk")
@pytest.mark.parametrize("has_room", [True, False])
def test_a_file_that_cannot_be_published_is_an_error(
    on_disk: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """Its sync fails, with or without room for the threads that do it; then the fetch continues where it was."""
    checkpoint = _committed(on_disk.run)
    start, fsync, bad = threading.Thread.start, durable.fsync_descriptor, [f"/{NAMES[70]}"]

    def failing(descriptor: int, path: Any) -> None:
        if bad and os.fspath(path).endswith(bad[0]):
            raise durable.FsyncError(5, "fsync failed", os.fspath(path))
        fsync(descriptor, path)

    def no_room(self: threading.Thread) -> None:
        if self.name == "ckpt-async-publish":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(destinations, "fsync_descriptor", failing)
    if not has_room:
        monkeypatch.setattr(threading.Thread, "start", no_room)
    with pytest.raises(restore.DestinationError, match=re.escape(NAMES[70])):
        restore.fetch(checkpoint, tmp_path / "there", **ONE)
    bad.clear()
    there = len([path for path in left_in(tmp_path / "there") if path in NAMES])
    report = restore.fetch(checkpoint, tmp_path / "there", **ONE)
    assert is_whole(report, FILES)
    assert report.bytes_from == {"there": there * SIZE_BYTES, "remote": (NUM - there) * SIZE_BYTES}


@pytest.mark.usefixtures("_disk")
@pytest.mark.timeout(60)
def test_memory_that_runs_out_while_a_file_is_published_ends_the_fetch(
    on_disk: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only thread for this had gone, and the fetch waited for it for ever."""
    checkpoint = _committed(on_disk.run)

    def failing(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(small_files, "MAX_THREADS", 1)
        patch.setattr(Destination, "publish", failing)
        with pytest.raises(MemoryError):
            restore.fetch(checkpoint, tmp_path / "there", **ONE)
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there", **ONE), FILES)


def test_existing_small_files_are_kept_or_replaced(on_disk: Counted, tmp_path: Path) -> None:
    """An existing file counts if it is right. A wrong one is left alone, or replaced if the caller asks for that."""
    checkpoint = _committed(on_disk.run)
    there = tmp_path / "there"
    restore.fetch(checkpoint, there, files=["layer-0/*"])
    for name in NAMES[:2]:
        (there / name).write_bytes(bytes(SIZE_BYTES))
    on_disk.asked()
    with pytest.raises(restore.DestinationError, match=r"layer-0/0[01]\.bin.*left alone"):
        restore.fetch(checkpoint, there)
    assert on_disk.asked() == {}
    report = restore.fetch(checkpoint, there, overwrite=True)
    assert is_whole(report, FILES)
    assert report.bytes_from == {"there": 8 * SIZE_BYTES, "remote": 92 * SIZE_BYTES}
    assert on_disk.asked() == dict.fromkeys([*NAMES[:2], *NAMES[10:]], 1)


def test_a_symlink_in_the_destination_is_not_followed(on_disk: Counted, tmp_path: Path) -> None:
    checkpoint = _committed(on_disk.run)
    there, outside = tmp_path / "there", tmp_path / "outside"
    there.mkdir()
    outside.mkdir()
    (there / "layer-4").symlink_to(outside)
    with pytest.raises(restore.DestinationError, match="symbolic link"):
        restore.fetch(checkpoint, there)
    assert list(outside.iterdir()) == []


def test_files_that_are_not_fetched_in_series(on_disk: Counted, tmp_path: Path) -> None:
    """Empty files, files that are too large, and files without a checksum are fetched one by one."""
    files = {0: {"a/empty": b"", "a/large": content(1, "x", SMALL_BYTES + 1), **FILES[0]}}
    checkpoint = _committed(on_disk.run, files)
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there"), files)
    assert sorted(on_disk.together) == NAMES
    on_disk.together.clear()
    foreign = dataclasses.replace(
        checkpoint,
        files={name: dataclasses.replace(file, checksum=None) for name, file in checkpoint.files.items()},
    )
    assert is_whole(restore.fetch(foreign, tmp_path / "foreign"), files)
    assert on_disk.together == []


def test_local_copies_take_precedence(on_disk: Counted, tmp_path: Path) -> None:
    """Good local copies are used; a file whose copy is damaged comes from the store."""
    checkpoint = _committed(on_disk.run)
    folder = tmp_path / "folder"
    for name in NAMES[:50]:
        path = folder / checkpoint.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(FILES[0][name] if name != NAMES[7] else bytes(SIZE_BYTES))
    on_disk.asked()
    report = restore.fetch(checkpoint, tmp_path / "there", folder=folder)
    assert is_whole(report, FILES)
    assert report.bytes_from == {"local": 49 * SIZE_BYTES, "remote": 51 * SIZE_BYTES}
    assert on_disk.asked() == dict.fromkeys([NAMES[7], *NAMES[50:]], 1)
    assert sorted(on_disk.together) == NAMES[50:]


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Allow only as many more descriptors, beyond those open now, as some systems allow in all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 220, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_descriptors_suffice(on_disk: Counted, tmp_path: Path, few_descriptors: None) -> None:
    """Every file being fetched is locked and therefore open, so their number at any time must be limited."""
    files = {0: {f"{number // 20}/{number}": b"%d" % number for number in range(400)}}
    checkpoint = _committed(on_disk.run, files)
    on_disk.asked()
    report = restore.fetch(checkpoint, tmp_path / "there")
    assert is_whole(report, files)
    assert on_disk.asked() == dict.fromkeys(files[0], 1)
    assert len(on_disk.together) == 400


@contextlib.contextmanager
def _few_left() -> Iterator[None]:
    """The process, like many a trainer, has most of the descriptors open that it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in opened:
            os.close(each)


@pytest.mark.usefixtures("_disk")
@pytest.mark.parametrize("size_bytes", [10, 0], ids=["in series", "alone"])
def test_the_descriptors_that_are_left_suffice(s3_url: str, tmp_path: Path, size_bytes: int) -> None:
    """Also where files are fetched one by one, and where synced files wait for a slow disk."""
    files = {0: {f"{number:03}": b"%010d" % number if size_bytes else b"" for number in range(300)}}
    checkpoint = _committed(Run(s3_url), files)
    with _few_left():
        report = restore.fetch(checkpoint, tmp_path / "there")
    assert is_whole(report, files)


def test_the_folder_of_partial_files_may_vanish_at_any_time(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process that finishes removes this folder, so it may vanish again and again."""
    folder, mkdir, num_made = tmp_path / PARTIAL_FOLDER, Path.mkdir, 0

    def vanishing(self: Path, *options: Any, **more: Any) -> None:
        nonlocal num_made
        mkdir(self, *options, **more)
        num_made += 1
        if num_made < 4:
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", vanishing)

    async def main() -> None:
        async with asyncio.timeout(30), destinations.locked(folder / "a", 1, "crc64nvme") as found:
            assert found.prepare() == 0

    run(main())
    assert num_made == 4


def test_proxy_settings_are_not_looked_up_per_file(
    in_s3: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lookup searches the whole environment, which takes as much CPU as everything else about a small file."""
    checkpoint = _committed(in_s3.run)
    looked: list[str] = []

    def noted(url: str) -> str:
        looked.append(url)
        return ""

    monkeypatch.setattr(connections, "proxy_url", noted)
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there"), FILES)
    assert 1 <= len(looked) <= 3  # one of them is for the lease
