"""Unusable folders, full disks and mounts in the wrong place each cause a clear error."""

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import textwrap
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import CheckpointAbortedError, CommitTimeoutError, StoreError, Uploader, restore
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Event, Failed, MadeDurable
from ckpt_async.errors import FailureReason, JournalError
from ckpt_async.local import folder as files
from ckpt_async.local.journal import Journal
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.stores.interface import ObjectInfo
from tests.faults.oracle import Oracle
from tests.faults.small_disk import disk_image, on_small_disk


@pytest.mark.fault("F21")
@pytest.mark.parametrize("kind", ["not writable", "a file", "network"])
def test_an_unusable_folder_is_rejected_at_open(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user must learn this before the first step, not after the first checkpoint."""
    folder = tmp_path / "folder"
    match kind:
        case "not writable":
            folder, match = Path("/proc/checkpoints"), "cannot be used: .*writable"
        case "a file":
            folder.write_text("")
            match = "is not a folder"
        case _:
            monkeypatch.setattr(files, "filesystem_of", lambda *_: "nfs4")
            match = r"file system \(nfs4\) that is not known to be local.*local disk"
    before = threading.active_count()
    with pytest.raises(JournalError, match=match):
        Uploader(folder, f"file://{tmp_path}/remote", allow_unknown_filesystem=kind == "not writable")
    assert threading.active_count() == before
    assert not (tmp_path / "remote").exists()


@pytest.mark.fault("F5")
def test_a_disk_that_became_read_only_is_reported_with_a_hint(tmp_path: Path) -> None:
    """ext4 remounts itself read-only after an error."""
    done = on_small_disk(
        tmp_path,
        """
        import subprocess
        Uploader(disk / "folder", remote).close()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        command = [sys.executable, "-m", "ckpt_async", "drain", disk / "folder"]
        print(subprocess.run(command, capture_output=True, text=True).stderr)
        """,
    )
    assert (
        "cannot be used: Read-only file system (it must exist or be creatable, and writable)" in done.stdout
    )


def test_an_unwritable_remote_folder_is_rejected_at_open(tmp_path: Path) -> None:
    """The same must hold for the remote, and nothing may stay locked or running."""
    before = threading.active_count()
    with pytest.raises(StoreError) as caught:
        Uploader(tmp_path / "folder", "file:///proc/checkpoints")
    assert caught.value.reason is not FailureReason.TRANSIENT
    assert threading.active_count() == before
    with Uploader(tmp_path / "folder", f"file://{tmp_path}/remote") as uploader:
        assert uploader.generation == 1


@pytest.mark.fault("F5")
def test_a_full_disk_raises_and_recovers_when_there_is_space(tmp_path: Path) -> None:
    """A full disk is the most common accident of all. The trainer gets an error, loses nothing, and
    continues when there is space again.
    """
    done = on_small_disk(
        tmp_path,
        """
        with Uploader(disk / "folder", remote) as uploader:
            write_shards(disk / "folder", 1, 1, 0, 2)
            write_shards(disk / "folder", 1, 2, 0, 2)
            uploader.enqueue(disk / "folder/step-1/rank-0", 1)
            uploader.seal(1)
            uploader.wait(1, 30)
            fill(disk)
            refused = 0
            for _ in range(3):
                try:
                    uploader.enqueue(disk / "folder/step-2/rank-0", 2)
                    uploader.seal(2)
                    break
                except NoSpaceError as error:
                    assert "is full (free space" in str(error)
                    assert "enqueued" not in str(error), "the journal's own rows fail with the same words"
                    refused += 1
            os.unlink(disk / "ballast")
            if refused:
                uploader.enqueue(disk / "folder/step-2/rank-0", 2)
                uploader.seal(2)
            uploader.wait(2, 30)
            print("refused", refused)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused 3\n"
    assert "Traceback" not in done.stderr
    assert Oracle(f"file://{tmp_path}/remote", 1).look() == {CheckpointId(1, 1), CheckpointId(1, 2)}


@pytest.mark.fault("F111")
@pytest.mark.parametrize("make", ["mkfs.btrfs -q -f", "mkfs.ext4 -q -b 1024"])
def test_no_full_disk_kills_a_trainer_with_a_journal(tmp_path: Path, make: str) -> None:
    """A page of a mapping needs space when it is written, always (btrfs) or at first (small blocks): a SIGBUS."""
    image = disk_image(tmp_path, make)
    done = on_small_disk(
        tmp_path,
        """
        from ckpt_async.core.model import CheckpointId, Sealed
        from ckpt_async.local import log
        from ckpt_async.local.folder import Folder
        from ckpt_async.local.journal import Journal
        from ckpt_async.local import journals
        log.COMPACT_BYTES = 0
        journal, num_kept, num_refused = Journal(Folder(disk / "folder"), 0), 0, 0
        for number in range(2000):
            if number % 500 == 100:
                fill(disk)
            try:
                journal.append([Sealed(CheckpointId(1, number), "x" * 200, 1)])
                num_kept += 1
                if number % 100 == 0:
                    journal.sync()
                    journal.compact()
            except (NoSpaceError, OSError):
                num_refused += 1
        assert num_refused > 100, num_refused
        assert len(journals.read(disk / "folder")[0].rows) in (num_kept, num_kept + 1)  # that of compaction
        os.unlink(disk / "ballast")
        journal.append([Sealed(CheckpointId(1, 9999), "after", 1)])
        """,
        image=image,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.fault("F5")
def test_an_upload_waits_for_space_when_the_disk_runs_full(tmp_path: Path) -> None:
    """Uploading what is enqueued needs no more space than the journal's rows, and those
    are written as soon as possible.
    """
    done = on_small_disk(
        tmp_path,
        """
        from ckpt_async.stores.directory import DirectoryStore
        put, gate = DirectoryStore.put, threading.Event()
        has_come = threading.Event()
        async def slow(self, key, *args, **kwargs):
            if key.startswith("ckpt/"):
                has_come.set()
                import asyncio
                while not gate.is_set():
                    await asyncio.sleep(0.01)
            return await put(self, key, *args, **kwargs)
        DirectoryStore.put = slow
        with Uploader(disk / "folder", remote, on_error="warn") as uploader:
            write_shards(disk / "folder", 1, 1, 0, 2)
            uploader.enqueue(disk / "folder/step-1/rank-0", 1)
            uploader.seal(1)
            assert has_come.wait(30)
            fill(disk)
            gate.set()
            try:
                uploader.wait(1, 3)
            except CommitTimeoutError as error:
                print("full")
            os.unlink(disk / "ballast")
            uploader.wait(1, 30)
            print("committed")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("committed\n")
    assert "engine_failed" not in done.stderr
    assert Oracle(f"file://{tmp_path}/remote", 1).look() == {CheckpointId(1, 1)}


FILLING = """
    import asyncio, hashlib, logging, os, signal, sys, threading
    from pathlib import Path
    from ckpt_async import Uploader
    from ckpt_async.stores.directory import DirectoryStore

    logging.basicConfig(level=logging.WARNING)
    gate, put = threading.Event(), DirectoryStore.put

    async def held(self, key, *args, **kwargs):
        while key.startswith("ckpt/") and not gate.is_set():
            await asyncio.sleep(0.01)
        return await put(self, key, *args, **kwargs)

    DirectoryStore.put = held
    folder = Path(sys.argv[1]) / "folder"
    uploader = Uploader(folder, sys.argv[2], num_checkpoints_to_keep=1, min_free_bytes=0)
    try:
        for step in range(1, 1000):
            shard = folder / f"step-{step}" / "rank-0"
            shard.parent.mkdir()
            content = os.urandom(5_000_000)
            shard.write_bytes(content)
            uploader.enqueue(shard, step)
            uploader.seal(step)
            print("sealed", step, hashlib.sha256(content).hexdigest(), flush=True)
    except OSError:
        pass
    try:
        with open(shard.with_name("and the rest"), "wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
    except OSError:
        pass
    if sys.argv[3] == "True":
        os.kill(os.getpid(), signal.SIGKILL)
    gate.set()
    uploader.close(timeout_s=60)
"""


@pytest.mark.fault("F5")
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "alive"])
def test_a_disk_that_only_checkpoints_fill_is_emptied_by_committing_them(
    tmp_path: Path, is_killed: bool
) -> None:
    """Committing needs space for records. Unless some is set aside, neither the
    trainer nor any restart can continue.
    """
    trainer = tmp_path / "trainer.py"
    trainer.write_text(textwrap.dedent(FILLING))
    done = on_small_disk(
        tmp_path,
        f"""
        import subprocess
        def free():
            facts = os.statvfs(disk)
            return facts.f_bavail * facts.f_frsize
        ended = subprocess.run([sys.executable, {str(trainer)!r}, disk, remote, "{is_killed}"])
        if {is_killed}:
            assert (ended.returncode, free()) == (-9, 0)
            subprocess.run([sys.executable, "-m", "ckpt_async", "drain", disk / "folder"], check=True)
        assert free() > 60 << 20, free()
        """,
        size="80m",
    )
    assert done.returncode == 0, done.stderr
    if is_killed:
        assert "the disk is full" in done.stderr or "folder' is full" in done.stderr
    sealed = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("sealed ")]
    assert len(sealed) > 5
    there = {
        hashlib.sha256(each.read_bytes()).hexdigest() for each in (tmp_path / "remote/ckpt").rglob("rank-0")
    }
    assert {digest for _, digest in sealed} <= there
    newest = restore.find(f"file://{tmp_path}/remote")
    assert newest is not None
    assert newest.step == int(sealed[-1][0])


@pytest.mark.fault("F5")
@pytest.mark.parametrize(
    ("make", "has_quota"), [("mkfs.btrfs -q -f", True), ("mkfs.btrfs -q -f --mixed", False)]
)
def test_what_fills_a_quota_or_a_btrfs_is_emptied_by_committing_it(
    tmp_path: Path, make: str, has_quota: bool
) -> None:
    """Of both, statvfs says that there is space: nothing of the reserve was ever released."""
    image, trainer = disk_image(tmp_path, make), tmp_path / "trainer.py"
    trainer.write_text(textwrap.dedent(FILLING))
    done = on_small_disk(
        tmp_path,
        f"""
        import subprocess
        place = disk / "trainers"
        if {has_quota}:
            limit = ["qgroup", "limit", "80M", place]
            for command in (["quota", "enable", disk], ["subvolume", "create", place], limit):
                subprocess.run(["btrfs", *command], check=True, stdout=subprocess.DEVNULL)
        else:
            place.mkdir()
        ended = subprocess.run([sys.executable, {str(trainer)!r}, place, remote, "True"])
        assert ended.returncode == -9, ended
        subprocess.run([sys.executable, "-m", "ckpt_async", "drain", place / "folder"], check=True)
        """,
        image=image,
    )
    assert done.returncode == 0, done.stderr
    sealed = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("sealed ")]
    assert len(sealed) > 5
    remote = tmp_path / "remote/ckpt"
    assert {*sealed} <= {hashlib.sha256(each.read_bytes()).hexdigest() for each in remote.rglob("rank-0")}


EATING = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from ckpt_async import Uploader
    from ckpt_async.stores.directory import DirectoryStore

    put = DirectoryStore.put

    async def held(self, key, *args, **kwargs):
        if key.startswith("ckpt/"):
            await asyncio.Event().wait()
        return await put(self, key, *args, **kwargs)

    DirectoryStore.put = held
    folder = Path(sys.argv[1]) / "folder"
    uploader = Uploader(folder, sys.argv[2], num_checkpoints_to_keep=1, min_free_bytes=0)
    for step in (1, 2):
        shard = folder / f"step-{step}" / "rank-0"
        shard.parent.mkdir()
        shard.write_bytes(os.urandom(5_000_000))
        uploader.enqueue(shard, step)
        uploader.seal(step)
    shard = folder / "does-not-fit"
    shard.touch()
    uploader.enqueue(shard, 3)

    with open(folder / "whatever the trainer writes", "wb", buffering=0) as file:
        for is_last in (False, True):
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                pass
            if not is_last:
                uploader.give_up(3, "does not fit")  # which releases some
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.fault("F5")
def test_a_trainer_that_takes_what_was_released_for_commits_does_not_get_it_all(tmp_path: Path) -> None:
    """All of the reserve was released at once, to a trainer that was writing its next checkpoint. It died, and no drain
    could commit anything on the full disk.
    """
    trainer = tmp_path / "trainer.py"
    trainer.write_text(textwrap.dedent(EATING))
    done = on_small_disk(
        tmp_path,
        f"""
        import subprocess
        ended = subprocess.run([sys.executable, {str(trainer)!r}, disk, remote])
        assert ended.returncode == -9, ended
        with open(disk / "whatever was released last", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                pass
        assert os.statvfs(disk).f_bavail == 0
        subprocess.run([sys.executable, "-m", "ckpt_async", "drain", disk / "folder"], check=True)
        """,
        size="80m",
    )
    assert done.returncode == 0, done.stderr
    newest = restore.find(f"file://{tmp_path}/remote")
    assert newest is not None
    assert newest.step == 2


MANY = """
    import asyncio, os, signal, sys, time
    from pathlib import Path
    from ckpt_async import Uploader
    from ckpt_async.stores.directory import DirectoryStore

    async def never(self, *args, **kwargs):
        await asyncio.Event().wait()

    uploader = Uploader(Path(sys.argv[1]) / "folder", sys.argv[2])
    DirectoryStore.put = DirectoryStore.put_many = never
    for step in range(1, 81):
        shard = Path(sys.argv[1]) / "folder" / f"step-{step}" / "rank-0"
        shard.parent.mkdir()
        shard.write_bytes(bytes(step))
        uploader.enqueue(shard, step)
        uploader.seal(step)
    spool = Path(sys.argv[1]) / "folder" / ".ckpt-async" / "spool"
    while len([*spool.glob("*/*.json")]) < 80:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.fault("F5")
def test_a_drain_finishes_on_a_disk_that_commits_do_not_empty(tmp_path: Path) -> None:
    """The user's files stay, so that only the reserve is there for the records of all commits. The journal once took
    all of it, and `latest` was moved to a commit that could not be recorded yet, which crashed the engine.
    """
    trainer = tmp_path / "trainer.py"
    trainer.write_text(textwrap.dedent(MANY))
    done = on_small_disk(
        tmp_path,
        f"""
        import subprocess
        ended = subprocess.run([sys.executable, {str(trainer)!r}, disk, remote])
        assert ended.returncode == -9
        fill(disk)
        drain = [sys.executable, "-m", "ckpt_async", "drain", disk / "folder", "--timeout", "60"]
        drained = subprocess.run(drain)
        assert drained.returncode == 0
        """,
        size="80m",
    )
    assert done.returncode == 0, done.stderr
    newest = restore.find(f"file://{tmp_path}/remote")
    assert newest is not None
    assert newest.step == 80


def test_a_folder_that_finds_no_space_at_fsync_is_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full btrfs, which refuses before it writes anything: no name is dropped."""
    original, refused = os.fsync, set[str]()

    def full_at_first(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.startswith(f"{tmp_path}/folder") and os.path.isdir(name) and name not in refused:
            refused.add(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    shard = tmp_path / "folder" / "step-1" / "a"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"1")
    with Uploader(tmp_path / "folder", f"file://{tmp_path}/remote", rank=0, world_size=1) as uploader:
        monkeypatch.setattr(os, "fsync", full_at_first)
        uploader.enqueue(shard, 1)
        uploader.seal(1)
        uploader.wait(1, timeout_s=60.0)
    assert refused


@pytest.mark.fault("F5")
def test_a_full_remote_disk_is_retried_until_there_is_space(tmp_path: Path) -> None:
    """If a shared file system fills up overnight, that night's checkpoints must not be lost."""
    done = on_small_disk(
        tmp_path,
        """
        with Uploader(tmp / "folder", f"file://{disk}/remote", retry_max_s=0.3) as uploader:
            fill(disk)
            uploader.enqueue(write_shards(tmp / "folder", 1, 1, 0, 2), 1)
            uploader.seal(1)
            try:
                uploader.wait(1, 1)
            except CommitTimeoutError:
                print("full")
            os.unlink(disk / "ballast")
            uploader.wait(1, 30)
            print("committed")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "full\ncommitted\n"


@pytest.mark.fault("F5")
@pytest.mark.parametrize("make", ["", "mkfs.ext4 -q", "mkfs.btrfs -q -f", "mkfs.xfs -q -f"])
def test_a_full_remote_is_freed_by_pruning_it(tmp_path: Path, make: str) -> None:
    """Both commands wrote first, and failed: nothing but deleting by hand was left."""
    done = on_small_disk(
        tmp_path,
        """
        import subprocess
        remote = f"file://{disk}/remote"
        with Uploader(tmp / "folder", remote) as uploader:
            for step in range(1, 9):
                (tmp / f"folder/{step}.pt").write_bytes(os.urandom(1 << 20))
                uploader.enqueue(tmp / f"folder/{step}.pt", step)
                uploader.seal(step)
        def last(command, number):
            fill(disk)
            command = [sys.executable, "-m", "ckpt_async", *command, "--keep", f"last={number}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            print(len([*(disk / "remote/ckpt").iterdir()]))
            os.unlink(disk / "ballast")
        last(["prune", remote, "--yes"], 4)
        last(["sweep", "--remote", remote, "--once"], 2)
        """,
        size="40m",
        image=disk_image(tmp_path, make) if make else None,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4", "2"]


def test_a_trainer_that_fills_the_remote_can_be_pruned_beside(tmp_path: Path) -> None:
    """Its uploads took each byte that was freed, and for minutes there was none for the records of a prune."""
    done = on_small_disk(
        tmp_path,
        """
        import subprocess
        remote = f"file://{disk}/remote"
        uploader = Uploader(tmp / "folder", remote, retry_max_s=0.2, on_error="warn")
        for step in range(1, 40):
            for part, size_bytes in enumerate((1 << 18, 1 << 12, 1 << 12)):
                shard = tmp / f"folder/{step}-{part}.pt"
                shard.write_bytes(os.urandom(size_bytes))
                uploader.enqueue(shard, step)
            uploader.seal(step)
        decisions, seen, since = disk / "remote/.ckpt-async/decisions", 0, time.monotonic()
        while not seen or time.monotonic() - since < 1:  # until nothing more fits
            if (number := len([*decisions.glob("*")])) != seen:
                seen, since = number, time.monotonic()
            time.sleep(0.05)
        room = os.statvfs(disk)
        print(room.f_bavail * room.f_frsize > 500_000)
        prune = [sys.executable, "-m", "ckpt_async", "prune", remote, "--keep", "last=2", "--yes"]
        subprocess.run(prune, check=True, stdout=subprocess.DEVNULL, timeout=30)
        uploader.close(0.1)
        """,
        size="10m",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]


@pytest.mark.fault("F154")
@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EHOSTDOWN, errno.ESTALE, errno.EREMOTEIO])
def test_a_file_server_that_is_away_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The daemon of a mount dies and is started again: it is an outage like one of S3."""
    remote, real, away = f"{tmp_path}/remote", os.open, threading.Event()
    num_refused = 0

    def open_(path: Any, *args: Any, **kwargs: Any) -> int:
        nonlocal num_refused
        if away.is_set() and str(path).startswith(remote):
            num_refused += 1
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    with Uploader(tmp_path / "folder", f"file://{remote}", retry_max_s=0.3) as uploader:
        for step in range(1, 6):
            if step == 2:
                away.set()
            if step == 5:
                away.clear()
            shard = tmp_path / f"folder/step-{step}/a.pt"
            shard.parent.mkdir()
            shard.write_bytes(b"shard")
            uploader.enqueue(shard, step)
            uploader.seal(step)
            if step == 2:
                with pytest.raises(CommitTimeoutError):
                    uploader.wait(2, 1)
                assert num_refused > 1
        for step in range(1, 6):
            uploader.wait(step, 30)


def test_shards_on_another_mount_inside_the_folder_are_uploaded_without_a_link(tmp_path: Path) -> None:
    """Hard links do not cross mounts, so the user's own file is read, and no other copy of the bytes exists."""
    done = on_small_disk(
        tmp_path,
        """
        with Uploader(tmp, remote) as uploader:
            (disk / "a.pt").write_bytes(b"x" * 5000)
            uploader.enqueue(disk / "a.pt", 1)
            uploader.seal(1)
            uploader.wait(1, 30)
        assert (tmp / "remote/ckpt/step-1.g1/a.pt").read_bytes() == b"x" * 5000
        """,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.fault("F4")
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("shard", r"spool/.*0001/a\.pt$"),
        ("the trainer's folder", r"/folder/step-1$"),
        ("spool", r"spool/rank-00000/[^/]*1$"),
        ("folder", r"/folder$"),
        ("manifest", r"\.json\.[0-9]+\.tmp$"),
        ("the manifest's entry", r"spool/rank-00000$"),
        ("journal", r"journal-00000\.log$"),
        ("the journal's entry", r"/\.ckpt-async$"),
    ],
)
def test_a_failed_fsync_is_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, path: str
) -> None:
    """After EIO the kernel may show other bytes than were written, and the next fsync succeeds, so retrying
    it would lose data silently. Whichever part of the checkpoint is affected, it is given up with an error,
    and the next one is committed.
    """
    original, append = os.fsync, Journal.append
    hits: list[str] = []
    recorded: list[Event] = []
    is_over = threading.Event()

    def broken(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.startswith(f"{tmp_path}/folder") and re.search(path, name) and not hits:
            hits.append(name)
            raise OSError(errno.EIO, "Input/output error")
        original(descriptor)

    def recording(self: Journal, events: Iterable[Event]) -> None:
        recorded.extend(events := list(events))
        append(self, events)
        if any(isinstance(each, Failed | MadeDurable) for each in events):
            is_over.set()

    put = DirectoryStore.put

    async def held(self: DirectoryStore, key: str, *args: Any, **kwargs: Any) -> ObjectInfo:
        if key.startswith("ckpt/"):
            assert await asyncio.to_thread(is_over.wait, 30)
        return await put(self, key, *args, **kwargs)

    monkeypatch.setattr(os, "fsync", broken)
    monkeypatch.setattr(Journal, "append", recording)
    monkeypatch.setattr(DirectoryStore, "put", held)
    uploader = Uploader(tmp_path / "folder", f"file://{tmp_path}/remote", on_error="warn")
    with contextlib.closing(uploader):
        for step in (1, 2):
            shard = tmp_path / f"folder/step-{step}/a.pt"
            shard.parent.mkdir()
            shard.write_bytes(b"shard")
            uploader.enqueue(shard, step)
            if step == 1:
                uploader.seal(1)
                with pytest.raises(CheckpointAbortedError, match="cannot be trusted"):
                    uploader.wait(1, timeout_s=20)
        uploader.seal(2)
        uploader.wait(2, timeout_s=20)
    assert len(hits) == 1
    assert {each.checkpoint.step for each in recorded if isinstance(each, MadeDurable)} == {2}
    decisions = {each.name: each.read_text() for each in (tmp_path / "remote" / keys.DECISIONS).iterdir()}
    assert [re.search('"outcome": *"(.*?)"', each)[1] for _, each in sorted(decisions.items())] == [  # type: ignore[index]
        "abort",
        "commit",
    ]


@pytest.mark.fault("F5")
def test_a_step_that_did_not_fit_can_be_given_up_while_the_disk_is_full(tmp_path: Path) -> None:
    """It held what had been enqueued of it, on a disk too full to note that it was given up."""
    done = on_small_disk(
        tmp_path,
        """
        with Uploader(disk / "folder", remote) as uploader:
            (disk / "folder/a.pt").write_bytes(bytes(1 << 20))
            uploader.enqueue(disk / "folder/a.pt", 1)
            (disk / "folder/a.pt").unlink()
            (disk / "folder/b.pt").write_bytes(b"b")
            fill(disk)
            try:
                uploader.enqueue(disk / "folder/b.pt", 1)
            except NoSpaceError as error:
                assert "give_up" in str(error), error
                uploader.give_up(1, "the disk is full")
            try:
                uploader.wait(1, 30)
            except CheckpointAbortedError as error:
                print(error)
        assert not list((disk / "folder/.ckpt-async/spool").rglob("a.pt"))
        """,
        size="80m",
    )
    assert done.returncode == 0, done.stderr
    assert "the disk is full" in done.stdout


def test_where_there_is_no_reserve_the_hint_says_that_giving_up_needs_space(tmp_path: Path) -> None:
    """It said that `give_up` helps, as the error of `give_up` itself did."""
    done = on_small_disk(
        tmp_path,
        """
        needs_space = "release an incomplete step with `give_up`: that, too, needs some free space"
        with Uploader(disk / "folder", remote, kind="weights") as uploader:
            for name in ("a.pt", "b.pt"):
                (disk / "folder" / name).write_bytes(b"shard")
            uploader.enqueue(disk / "folder/a.pt", 1)
            fill(disk)
            for call in (lambda: uploader.enqueue(disk / "folder/b.pt", 1), lambda: uploader.give_up(1, "full")):
                try:
                    call()
                except NoSpaceError as error:
                    assert error.hint.startswith("free space") and needs_space in error.hint, error
                    assert f"{str(disk / 'folder')!r} is full" in str(error), error
                    print("refused")
            os.unlink(disk / "ballast")
            uploader.give_up(1, "the disk was full")
            try:
                uploader.wait(1, 30)
            except CheckpointAbortedError as error:
                print(error)
        """,
        size="16m",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["refused", "refused"]
    assert "the disk was full" in done.stdout


@pytest.mark.fault("F5")
@pytest.mark.parametrize(("size", "has_reserve"), [("80m", True), ("16m", False)])
def test_a_saver_gives_up_what_did_not_fit(tmp_path: Path, size: str, has_reserve: bool) -> None:
    """A save that failed between two calls kept its links, and their space, until the end of the process."""
    done = on_small_disk(
        tmp_path,
        f"""
        import torch
        from ckpt_async.saver import CheckpointSaver
        seal = Uploader.seal
        def on_a_full_disk(self, step, **options):
            if step == 1:
                fill(disk)
            seal(self, step, **options)
        Uploader.seal = on_a_full_disk
        saver = CheckpointSaver(disk / "folder", remote, save_interval="1ba", filename="ba{{batch}}.pt",
                                blocking=True, on_error="warn",
                                on_failed=lambda _, error: print(error, getattr(error, "hint", "")))
        saver.step({{"weight": torch.zeros(1 << 18)}}, 1)
        if not {has_reserve}:
            os.unlink(disk / "ballast")
            saver.step({{"weight": torch.zeros(1 << 18)}}, 2)
        try:
            saver.uploader.wait(1, 30)
        except CheckpointAbortedError as error:
            print(error)
        saver.close()
        assert not list((disk / "folder/.ckpt-async/spool").rglob("ba1.pt"))
        """,
        size=size,
    )
    assert done.returncode == 0, done.stderr
    assert "is full" in done.stdout
    assert "free space, lower num_checkpoints_to_keep" in done.stdout
    assert "give_up" not in done.stdout  # it has done that itself
    found = restore.find(f"file://{tmp_path}/remote")
    assert (found and found.step) == (None if has_reserve else 2)


def test_a_disk_with_space_but_without_inodes_is_told_as_that(tmp_path: Path) -> None:
    done = on_small_disk(
        tmp_path,
        """
        with Uploader(disk / "folder", remote) as uploader:
            (disk / "folder/a.pt").write_bytes(b"shard")
            try:
                for number in range(200):
                    (disk / f"ballast-{number}").touch()
            except OSError:
                pass
            try:
                uploader.enqueue(disk / "folder/a.pt", 1)
            except NoSpaceError as error:
                print(error)
            for ballast in disk.glob("ballast-*"):
                ballast.unlink()
            uploader.enqueue(disk / "folder/a.pt", 1)
            uploader.seal(1)
            uploader.wait(1, 30)
            print("committed")
        """,
        size="16m,nr_inodes=100",
    )
    assert done.returncode == 0, done.stderr
    refusal, *_, committed = done.stdout.splitlines()
    assert "it has space, but no inode for another file (`df -i`)" in refusal
    assert committed == "committed"
