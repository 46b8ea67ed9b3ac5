"""Fetches are byte-identical, take only the wanted files from the nearest good copy,
and never overwrite other files.
"""

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_async import Uploader, cli, restore
from ckpt_async.cli.output import Exit
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, InvalidNameError, NoSpaceError, SettingsError, StoreError
from ckpt_async.restore import destination, sources
from ckpt_async.restore import destination as destinations
from ckpt_async.restore.session import Pace, Session
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.progress import Progress
from tests.restore.runs import Run, content, files_of, is_whole, left_in, shard_key
from tests.stores.memory import MemoryStore


def _committed(run: Run, step: int = 10, **options: Any) -> restore.Checkpoint:
    run.commit(step, **options)
    checkpoint = restore.find(run.url, step=step)
    assert checkpoint is not None
    return checkpoint


@pytest.fixture
def num_gets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The key of every range that is read from a folder's store."""
    asked: list[str] = []
    get_range = DirectoryStore.get_range

    async def counted(self: DirectoryStore, key: str, *rest: Any) -> Any:
        asked.append(key)
        return await get_range(self, key, *rest)

    monkeypatch.setattr(DirectoryStore, "get_range", counted)
    return asked


def test_fetched_files_are_byte_identical(
    any_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes empty files, and files of many ranges with a short last one. No lease
    and no partial file may be left.
    """
    monkeypatch.setattr(destinations, "RANGE_BYTES", 1000)
    files = files_of(10) | {2: {"empty.pt": b"", "exact.pt": content(1, "x", 2000)}}
    checkpoint = _committed(any_run, files=files)
    seen: list[tuple[int, int]] = []
    report = restore.fetch(checkpoint, tmp_path / "there", on_progress=lambda *now: seen.append(now))
    assert is_whole(report, files)
    assert left_in(tmp_path / "there") == sorted(checkpoint.files)
    assert report.bytes_from == {"remote": checkpoint.size_bytes} == {"remote": report.size_bytes}
    assert seen == sorted(seen)
    assert seen[-1] == (checkpoint.size_bytes, checkpoint.size_bytes)
    assert any_run.leases() == []


def test_only_selected_files_are_fetched(run_: Run, tmp_path: Path, num_gets: list[str]) -> None:
    """Files can be selected by rank, by glob, or by both; a typing error raises, and nothing is created."""
    checkpoint = _committed(run_)
    fetch = lambda **which: sorted(restore.fetch(checkpoint, tmp_path / str(which), **which).paths)  # noqa: E731
    assert fetch(ranks=[1]) == ["optim/rank-1.pt", "rank-1.pt"]
    assert fetch(files=["rank-*"]) == ["rank-0.pt", "rank-1.pt"]
    assert fetch(ranks=[0], files=["optim/*"]) == ["optim/rank-0.pt"]
    assert sorted(num_gets) == sorted(
        shard_key(10, name)
        for name in ("optim/rank-1.pt", "rank-1.pt", "rank-0.pt", "rank-1.pt", "optim/rank-0.pt")
    )
    assert fetch(files=(each for each in ["rank-0.pt"])) == ["rank-0.pt"]
    wrong = [{"files": "rank-1.pt"}, {"files": "*"}, {"files": ["nothing"]}]
    for which in (*wrong, {"ranks": [2]}, {"ranks": [0], "files": ["rank-1.pt"]}):
        with pytest.raises(InvalidNameError):
            fetch(**which)
        assert not (tmp_path / str(which)).exists()
    with pytest.raises(InvalidNameError, match=r"it has optim/rank-1\.pt, rank-1\.pt"):
        fetch(ranks=[1], files=["nothing"])
    for number in (0, 1025, 1.5):
        with pytest.raises(SettingsError, match=rf"num_concurrent_reads={number} must be .* 1 to 1024"):
            fetch(num_concurrent_reads=number)


def test_what_is_fetched_has_one_time(run_: Run, tmp_path: Path) -> None:
    """A marker that came before the files for which it stands would be taken for one that is out of date."""
    checkpoint = _committed(run_, files={0: {f"{number}.pt": b"1" for number in range(8)}})
    report = restore.fetch(checkpoint, tmp_path / "there")
    assert len({path.stat().st_mtime_ns for path in report.paths.values()}) == 1


@pytest.mark.fault("O16")
def test_fetching_none_is_rejected_with_an_explanation(tmp_path: Path) -> None:
    """In a run's first launch `find` returns None, which callers may forget."""
    with pytest.raises(
        SettingsError, match=r"'file:///run' is not a checkpoint \(pass what `find` returns\)"
    ):
        restore.fetch("file:///run", tmp_path / "there")  # type: ignore[arg-type]
    checkpoint: Any = restore.find(f"file://{tmp_path}/run")
    for take in (lambda: restore.fetch(checkpoint, tmp_path / "there"), lambda: restore.open(checkpoint)):
        with pytest.raises(SettingsError, match=r"None is not a checkpoint .*a fresh start"):
            take()
    assert not (tmp_path / "there").exists()


def test_existing_files_are_not_fetched_again(run_: Run, tmp_path: Path, num_gets: list[str]) -> None:
    checkpoint = _committed(run_)
    restore.fetch(checkpoint, tmp_path / "there")
    num_gets.clear()
    assert restore.fetch(checkpoint, tmp_path / "there").bytes_from == {"there": checkpoint.size_bytes}
    assert num_gets == []


@pytest.mark.parametrize(
    "other", ["another", "another of its size", "a folder", "a link to it", "a dead link"]
)
def test_a_different_file_at_the_destination_is_left_alone(run_: Run, tmp_path: Path, other: str) -> None:
    """With `overwrite` the file is replaced: a link itself, not its target, and never a folder."""
    checkpoint = _committed(run_)
    there = tmp_path / "there"
    target, mine = there / "rank-0.pt", tmp_path / "mine"
    there.mkdir()
    mine.write_bytes(content(10, "rank-0.pt"))
    match other:
        case "another":
            target.write_bytes(b"precious")
        case "another of its size":
            target.write_bytes(bytes(3000))
        case "a folder":
            target.mkdir()
        case "a link to it":
            target.symlink_to(mine)
        case "a dead link":
            target.symlink_to(tmp_path / "nothing")
    before = os.lstat(target)
    with pytest.raises(restore.DestinationError, match=r"rank-0\.pt"):
        restore.fetch(checkpoint, there)
    assert os.lstat(target) == before
    if other == "a folder":
        with pytest.raises(restore.DestinationError):
            restore.fetch(checkpoint, there, overwrite=True)
        return
    assert is_whole(restore.fetch(checkpoint, there, overwrite=True), files_of(10))
    assert not target.is_symlink()
    assert mine.read_bytes() == content(10, "rank-0.pt")


def test_a_symlink_in_the_destination_is_not_followed(run_: Run, tmp_path: Path) -> None:
    """Nothing may be created or written outside the destination, although the destination itself may be a link."""
    checkpoint = _committed(run_, files={0: {"a/b/c.pt": b"x" * 100}})
    outside = tmp_path / "outside"
    for link in ("a", destination.PARTIAL_FOLDER):
        there = tmp_path / f"there-{link}"
        there.mkdir()
        outside.mkdir()
        (there / link).symlink_to(outside)
        with pytest.raises(restore.DestinationError, match="symbolic link"):
            restore.fetch(checkpoint, there)
        assert list(outside.iterdir()) == []
        outside.rmdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert is_whole(restore.fetch(checkpoint, tmp_path / "link"), {0: {"a/b/c.pt": b"x" * 100}})


def test_the_remote_itself_is_no_destination(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    with Uploader(tmp_path / "node", f"file://{remote}", rank=0, world_size=1) as uploader:
        (tmp_path / "node/step-1").mkdir()
        (tmp_path / "node/step-1/a.pt").write_bytes(b"x")
        uploader.enqueue(tmp_path / "node/step-1", 1)
        uploader.seal(1)
    before = sorted(remote.rglob("*"))
    with pytest.raises(restore.DestinationError, match="the remote itself"):
        restore.fetch_latest(f"file://{remote}", remote)
    assert sorted(remote.rglob("*")) == before


def test_names_that_escape_the_destination_are_rejected(run_: Run, tmp_path: Path) -> None:
    """A Checkpoint may come from anywhere, so its names must be checked where they become paths."""
    checkpoint = _committed(run_)
    file = next(iter(checkpoint.files.values()))
    for name in ("../escaped", "/etc/escaped", "a/../../escaped", "a//b"):
        hostile = restore.Checkpoint(
            checkpoint.remote,
            checkpoint.id,
            "x",
            1,
            {name: restore.RemoteFile(name, file.key, file.size_bytes, file.checksum)},
        )
        with pytest.raises(InvalidNameError):
            restore.fetch(hostile, tmp_path / "a" / "there")
    assert [path for path in left_in(tmp_path) if "escaped" in path] == []


@pytest.mark.parametrize("place", ["usual", "beside", "spool"])
def test_a_local_copy_is_used(run_: Run, tmp_path: Path, num_gets: list[str], place: str) -> None:
    """Wherever the copy is, it is used only if its bytes are right; a damaged one of the right size is skipped."""
    checkpoint = _committed(run_)
    folder = tmp_path / "folder"
    at = {
        "usual": folder / checkpoint.name / "rank-0.pt",
        "beside": folder / "rank-0.pt",
        "spool": folder / keys.PRIVATE / keys.spool_checkpoint(checkpoint.id, 0) / "rank-0.pt",
    }[place]
    at.parent.mkdir(parents=True)
    at.write_bytes(content(10, "rank-0.pt"))
    report = restore.fetch(checkpoint, tmp_path / "there", folder=folder)
    assert is_whole(report, files_of(10))
    assert report.bytes_from == {"local": 3000, "remote": 9000}
    assert shard_key(10, "rank-0.pt") not in num_gets
    at.write_bytes(content(9, "rank-0.pt"))
    for verify in (True, False):
        report = restore.fetch(checkpoint, tmp_path / f"again-{verify}", folder=folder, verify=verify)
        assert is_whole(report, files_of(10))
        assert report.bytes_from == {"remote": 12000}


def test_a_local_copy_known_from_the_journal_is_used(run_: Run, tmp_path: Path) -> None:
    """The trainer's own file may have a name that only the journal knows."""
    folder = tmp_path / "folder"
    place = folder / "odd" / "place"
    with Uploader(folder, run_.url, rank=0, world_size=1, latest_filename="") as uploader:
        place.mkdir(parents=True)
        (place / "model.pt").write_bytes(content(1, "model"))
        uploader.enqueue(place, 1)
        uploader.seal(1)
        uploader.wait(1, timeout_s=60)
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    report = restore.fetch(checkpoint, tmp_path / "there", folder=folder)
    assert report.bytes_from == {"local": 3000}
    assert (tmp_path / "there" / "model.pt").read_bytes() == content(1, "model")


def test_a_flipped_bit_is_detected(any_run: Run, tmp_path: Path) -> None:
    """Nothing of the damaged checkpoint may stay; it is marked, and the next older one is fetched instead."""
    any_run.commit(10)
    checkpoint = _committed(any_run, 20)
    any_run.flip(shard_key(20, "rank-1.pt"))
    with pytest.raises(restore.DamagedCheckpointError, match=r"rank-1\.pt .*checksum"):
        restore.fetch(checkpoint, tmp_path / "there")
    assert left_in(tmp_path / "there") == []
    assert "checksum" in any_run.damages()[CheckpointId(1, 20)]
    any_run.delete(*any_run.keys(keys.DAMAGED))
    found = restore.fetch_latest(any_run.url, tmp_path / "there")
    assert found is not None
    assert found[0].step == 10
    (tmp_path / "there").rename(tmp_path / found[0].name)
    cached = restore.fetch_latest(any_run.url, tmp_path / "there", local_cache=tmp_path)
    assert cached is not None
    assert cached[1].bytes_from == {"local": found[0].size_bytes}
    with pytest.raises(InvalidNameError, match=r"ranks=0 is a single rank: pass a list, \[0\]"):
        restore.fetch(found[0], tmp_path / "one", ranks=0)  # type: ignore[arg-type]
    assert [each.id.step for each in found[0].rejected] == [20]
    assert is_whole(found[1], files_of(10))
    assert left_in(tmp_path / "there") == sorted(found[0].files)
    assert any_run.leases() == []
    report = restore.fetch(checkpoint, tmp_path / "unverified", verify=False)
    assert report.bytes_from == {"remote": checkpoint.size_bytes}


def test_damage_takes_nothing_from_a_process_that_fetches_the_same(run_: Run, tmp_path: Path) -> None:
    """Ranks of a node share a folder, so a process that still writes a file publishes
    it and finds the damage itself.
    """
    checkpoint = _committed(run_)
    run_.flip(shard_key(10, "rank-1.pt"))
    there, file = tmp_path / "there", checkpoint.files["rank-0.pt"]
    shared = destination.Destination(there, checkpoint, is_verified=True, may_overwrite=False)
    shared.make()
    assert file.checksum is not None
    with destinations.locked_now(shared.partial_path(file), file.size_bytes, file.checksum.algorithm) as held:
        assert held is not None
        held.prepare()
        with pytest.raises(restore.DamagedCheckpointError):
            restore.fetch(checkpoint, there)
        held.publish(there / "rank-0.pt", modified_ns=0)
    assert left_in(there) == ["rank-0.pt"]


@pytest.mark.fault("F79")
@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_damage_after_find_is_detected(any_run: Run, tmp_path: Path, damage: str) -> None:
    """When a range is refused, the object itself is checked, because damage must not be
    reported as a failure of the store.
    """
    checkpoint = _committed(any_run)
    any_run.delete(shard_key(10, "rank-0.pt"))
    if damage == "cut short":
        any_run.put(shard_key(10, "rank-0.pt"), content(10, "rank-0.pt")[:1000])
    with pytest.raises(restore.DamagedCheckpointError, match=r"is missing|has 1000 bytes instead of 3000"):
        restore.fetch(checkpoint, tmp_path / "there")
    assert list(any_run.damages()) == [checkpoint.id]


def test_an_error_is_raised_if_all_checkpoints_are_damaged(run_: Run, tmp_path: Path) -> None:
    for step in (10, 20):
        run_.commit(step)
        run_.flip(shard_key(step, "rank-0.pt"))
    with pytest.raises(restore.NoUsableCheckpointError):
        restore.fetch_latest(run_.url, tmp_path / "there")
    with pytest.raises(restore.DamagedCheckpointError):
        restore.fetch_latest(run_.url, tmp_path / "there", step=10)
    assert cli.main(["pull", run_.url, str(tmp_path / "there")]) == Exit.INCOMPLETE
    assert left_in(tmp_path / "there") == []


@pytest.mark.fault("F79")
@pytest.mark.parametrize("reason", [FailureReason.OTHER, FailureReason.NOT_FOUND])
def test_a_read_refused_on_the_way_is_retried_if_the_store_has_the_object(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: FailureReason
) -> None:
    """Something between us and the store may send half a range, a login page, a redirect or a 404."""
    checkpoint = _committed(run_, files={0: {"a.pt": content(1, "a")}})
    get_range, num_calls = DirectoryStore.get_range, 0

    async def refused(self: DirectoryStore, *args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise StoreError("asked for bytes 0+3000, but got 39 of 0-38/39", reason=reason)
        return await get_range(self, *args)

    monkeypatch.setattr(DirectoryStore, "get_range", refused)
    report = restore.fetch(checkpoint, tmp_path / "there")
    assert is_whole(report, {0: {"a.pt": content(1, "a")}})
    assert num_calls > 1
    assert not run_.damages()


def test_a_byte_corrupted_in_transit_is_not_damage(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corruption is gone when the range is read again."""
    checkpoint = _committed(run_, files={0: {"a.pt": content(1, "a")}})
    get_range, num_calls = DirectoryStore.get_range, 0

    async def spoilt(self: DirectoryStore, key: str, offset: int, size_bytes: int, sink: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        bad = num_calls == 1
        return await get_range(
            self,
            key,
            offset,
            size_bytes,
            lambda piece: sink(memoryview(bytes(len(piece)))) if bad else sink(piece),
        )

    monkeypatch.setattr(DirectoryStore, "get_range", spoilt)
    report = restore.fetch(checkpoint, tmp_path / "there")
    assert is_whole(report, {0: {"a.pt": content(1, "a")}})
    assert (num_calls, report.bytes_from) == (2, {"remote": 3000})
    assert run_.damages() == {}


def test_missing_space_is_reported_before_the_fetch(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gets: list[str]
) -> None:
    """The required space is compared with what the file system reports as free, less what
    an earlier fetch already holds.
    """
    checkpoint = _committed(run_)
    statvfs = os.statvfs

    def small(path: Any) -> os.statvfs_result:
        facts = list(statvfs(path))
        facts[1], facts[4] = 1, 11_999  # f_frsize, f_bavail
        return os.statvfs_result(facts)

    monkeypatch.setattr(os, "statvfs", small)
    with pytest.raises(NoSpaceError, match="11999 bytes free, but 12000 are needed"):
        restore.fetch(checkpoint, tmp_path / "there")
    assert num_gets == []
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there", ranks=[0]), {0: files_of(10)[0]})


def test_a_disk_that_runs_full_raises(run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up in the middle of the fetch; when called again, the fetch continues."""
    checkpoint = _committed(run_)
    write, is_full = destinations.PartialFile.write, True

    def full(self: destinations.PartialFile, piece: memoryview, offset: int) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        write(self, piece, offset)

    monkeypatch.setattr(destinations.PartialFile, "write", full)
    with pytest.raises(NoSpaceError, match="filled up"):
        restore.fetch(checkpoint, tmp_path / "there")
    is_full = False
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there"), files_of(10))


def test_fetch_works_inside_a_running_event_loop(run_: Run, tmp_path: Path) -> None:
    """Notebooks run their cells in an event loop."""
    _committed(run_)

    async def main() -> Any:
        return restore.fetch_latest(run_.url, tmp_path / "there")

    assert is_whole(asyncio.run(main())[1], files_of(10))


def test_a_failure_leaves_no_thread_writing_to_a_closed_file(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a file fails while another is being prepared, the other's descriptor must stay open until the thread is done
    with it; otherwise the next file opened would get the same descriptor number.
    """
    checkpoint = _committed(run_)
    preparing, failed, used = threading.Event(), threading.Event(), []
    prepare, get_range = destinations.PartialFile.prepare, DirectoryStore.get_range

    def slowly(self: destinations.PartialFile) -> int:
        if self._size_bytes and not preparing.is_set():
            preparing.set()
            assert failed.wait(30)
            threading.Event().wait(0.2)  # long enough for a loop that did not wait to close the descriptor
            used.append(os.fstat(self._descriptor).st_ino == os.stat(self._path).st_ino)
        return prepare(self)

    async def failing(self: DirectoryStore, key: str, *rest: Any) -> Any:
        await asyncio.to_thread(preparing.wait, 30)
        failed.set()
        raise StoreError("no", reason=FailureReason.PRECONDITION, operation="get")

    monkeypatch.setattr(destinations.PartialFile, "prepare", slowly)
    monkeypatch.setattr(DirectoryStore, "get_range", failing)
    with pytest.raises(StoreError):
        restore.fetch(checkpoint, tmp_path / "there")
    assert used == [True]
    monkeypatch.setattr(DirectoryStore, "get_range", get_range)


def test_no_descriptor_or_thread_leaks(any_run: Run, tmp_path: Path) -> None:
    """This must hold after successes and after failures."""
    checkpoint = _committed(any_run)
    restore.fetch(checkpoint, tmp_path / "warm-up")
    num_descriptors, num_threads = _in_use()
    for number in range(3):
        restore.fetch(checkpoint, tmp_path / f"there-{number}")
        with restore.open(checkpoint) as reader:
            reader.read("rank-0.pt", 5, 10)
    any_run.flip(shard_key(10, "rank-1.pt"))
    with pytest.raises(restore.DamagedCheckpointError):
        restore.fetch(checkpoint, tmp_path / "damaged")
    # There may be fewer if something from an earlier test was released in between.
    now = _in_use()
    assert now[0] <= num_descriptors
    assert now[1] <= num_threads


def _in_use() -> tuple[int, int]:
    """Return how many descriptors and threads are in use. The library does not wait for
    receiving threads to end, so this does.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("ckpt-async-http"):
            thread.join(30)
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_concurrent_fetches_in_one_process(run_: Run, tmp_path: Path, num_gets: list[str]) -> None:
    """Threads that fetch into the same place wait for each other, as processes do."""
    checkpoint = _committed(run_)
    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(lambda _: restore.fetch(checkpoint, tmp_path / "there"), range(4)))
    assert all(is_whole(report, files_of(10)) for report in reports)
    assert len(num_gets) == len(set(num_gets)) == 4
    assert left_in(tmp_path / "there") == sorted(checkpoint.files)


def test_every_slice_is_reported_to_the_watchdog(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice counts once it is in place. `Progress` makes sure that this costs next to nothing."""
    events: list[str] = []
    monkeypatch.setattr(Progress, "moved_in_thread", lambda _: events.append("told"))

    class Trickle(MemoryStore):
        async def get_range(self, key: str, offset: int, size_bytes: int, sink: Any) -> Any:
            for _ in range(size_bytes):
                sink(memoryview(b"x"))

    async def main() -> None:
        store = PatientStore(Trickle(), Settings())
        source: Any = sources.StoreSource(
            Session("memory://test", None, store, store, Pace()),
            SimpleNamespace(check=lambda: None),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            SimpleNamespace(key="a"),  # type: ignore[arg-type]
        )
        async with source.turn() as turn:
            await turn.get_range(0, 3, lambda: lambda _: events.append("taken"))

    run(main())
    assert events == ["taken", "told"] * 3


# --- durable on return -------------------------------------------------------------------------------------


class Disk:
    """Records fsyncs and renames in order; fsync of anything that `fails` accepts ends in EIO."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []  # each with the inode concerned
        self.fails: Callable[[os.stat_result], bool] = lambda _: False
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)

    def fsync(self, descriptor: int) -> None:
        facts = os.fstat(descriptor)
        if self.fails(facts):
            raise OSError(errno.EIO, "Input/output error")
        self._fsync(descriptor)
        self.events.append(("fsync", facts.st_ino))

    def replace(self, source: Any, target: Any) -> None:
        self.events.append(("replace", os.stat(source).st_ino))
        self._replace(source, target)


MIXED = {0: {"large.pt": content(10, "large.pt", 700_000), **{f"deep/er/{n}": b"x" * 99 for n in range(9)}}}


@pytest.mark.fault("F64")
def test_files_and_folders_are_durable_on_return(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file must be fsynced before it gets its name, and each folder after the last name is added, including the
    parents of newly created folders.
    """
    checkpoint = _committed(run_, files=MIXED)
    (tmp_path / "was").mkdir()
    disk, there = Disk(monkeypatch), tmp_path / "was" / "new" / "there"
    report = restore.fetch(checkpoint, there)
    assert is_whole(report, MIXED)
    for path in report.paths.values():
        inode = path.stat().st_ino
        assert disk.events.index(("fsync", inode)) < disk.events.index(("replace", inode))
    last = max(at for at, (what, _) in enumerate(disk.events) if what == "replace")
    for folder in (there / "deep" / "er", there / "deep", there, there.parent, tmp_path / "was"):
        assert ("fsync", folder.stat().st_ino) in disk.events[last:], folder


@pytest.mark.fault("F64")
def test_a_file_whose_fsync_failed_is_fetched_again(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole file is fetched again: correct bytes in memory prove nothing about the disk, nor does another fsync."""
    monkeypatch.setattr(destinations, "RANGE_BYTES", 1000)
    checkpoint = _committed(run_, files={0: {"a.pt": content(1, "a")}})
    disk = Disk(monkeypatch)
    disk.fails = lambda facts: stat.S_ISREG(facts.st_mode)
    with pytest.raises(restore.DestinationError, match="fsync failed"):
        restore.fetch(checkpoint, tmp_path / "there")
    assert left_in(tmp_path / "there") == []
    disk.fails = lambda _: False
    assert restore.fetch(checkpoint, tmp_path / "there").bytes_from == {"remote": 3000}


@pytest.mark.fault("F64")
def test_names_whose_fsync_failed_are_removed(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise these files would look as if they were safely there."""
    checkpoint = _committed(run_, files=MIXED)
    disk = Disk(monkeypatch)
    disk.fails = lambda facts: stat.S_ISDIR(facts.st_mode)
    with pytest.raises(restore.DestinationError, match="fsync failed"):
        restore.fetch(checkpoint, tmp_path / "there")
    assert left_in(tmp_path / "there") == []
    disk.fails = lambda _: False
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there"), MIXED)
