"""The log under kills, full and failing disks, and several processes at once: what was acknowledged stays, in order."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.errors import JournalDamagedError, JournalError, NoSpaceError
from ckpt_async.local import log as logs
from ckpt_async.local.durable import FsyncError
from ckpt_async.local.log import Log, Parts, Place, Record, look
from tests.ctrl_c import interrupted


def needed(records: list[Record]) -> Iterator[tuple[float, Parts]]:
    """Keep what was not marked as of no use."""
    for each in records:
        if each.parts["x"] != "of no use":
            yield each.written_at, {"x": json.dumps(each.parts["x"])}


def opened(path: Path) -> Log:
    return Log(path, "x", needed)


def put(log: Log, *values: object) -> None:
    for value in values:
        log.write(1.5, {"x": json.dumps(value)})


def values(path: Path, after: Place | None = None) -> list[Any]:
    found = look(path, after)
    return [each.parts["x"] for each in found.records("x")] if found else []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.log"


@pytest.fixture
def log(path: Path) -> Iterator[Log]:
    with contextlib.closing(opened(path)) as log:
        yield log


@pytest.fixture
def always_compacts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "COMPACT_BYTES", 0)


# --- torn and damaged files -----------------------------------------------------------------------------------


@pytest.mark.fault("F4a")
def test_a_file_torn_at_any_byte_keeps_whole_records(path: Path, log: Log) -> None:
    put(log, "first", "zwölf", ["last"])
    whole = path.read_bytes()
    ends = [end + 1 for end, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        num_whole = max(0, sum(end <= size for end in ends) - 1)
        assert values(path) == ["first", "zwölf", ["last"]][:num_whole], "a reader leaves out what is torn"
        assert path.stat().st_size == size, "and changes nothing"
        with contextlib.closing(opened(path)) as again:
            put(again, "next")
        assert values(path) == [*["first", "zwölf", ["last"]][:num_whole], "next"]


def test_an_append_after_another_process_s_torn_one_is_whole(path: Path, log: Log) -> None:
    put(log, "first")
    with path.open("ab") as file:
        file.write(b'0123abcd x [1.5,"of a process that was ki')
    put(log, "second")
    assert values(path) == ["first", "second"]


@pytest.mark.fault("F4a")
def test_a_change_of_any_byte_is_noticed(path: Path) -> None:
    with contextlib.closing(opened(path)) as log:
        put(log, "first", "second", "last")
    whole = path.read_bytes()
    end_of_second = whole.rindex(b"\n", 0, -1)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 0x14
        path.write_bytes(changed)
        if at >= end_of_second:  # what is wrong is the last line: it may have been torn by a power cut
            assert values(path) == ["first", "second"][: 1 + (at > end_of_second)]
            continue
        with pytest.raises(JournalDamagedError):
            values(path)
        with pytest.raises(JournalDamagedError):
            opened(path)
        assert path.read_bytes() == changed


def test_a_damaged_file_is_moved_aside_with_its_bytes(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(b"garbage\n" * 100)
    left = path.with_name(f"{path.name}.0123.new")
    left.write_bytes(b"of a killed compaction")
    with contextlib.closing(Log(path, "x", needed, loss="a pity")) as log:
        put(log, "anew")
    [aside] = path.parent.glob("*.damaged-*")
    assert aside.read_bytes() == b"garbage\n" * 100
    assert str(aside) in caplog.text
    assert values(path) == ["anew"]
    assert not left.exists()


# --- disks that are full or fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("num_written", [0, 1, 20])
def test_an_append_that_does_not_fit_leaves_nothing(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, number: int, num_written: int
) -> None:
    put(log, "first")
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if num_written and len(data) > 40:
            return write(descriptor, data[:num_written])  # a short one; the rest fails
        raise OSError(number, os.strerror(number))

    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(NoSpaceError):
            put(log, "x" * 40 if num_written else "y")
    if num_written < 20:
        assert path.read_bytes() == before
    put(log, "second")
    assert values(path) == ["first", "second"]


@pytest.mark.usefixtures("always_compacts")
def test_a_compaction_that_does_not_fit_changes_nothing(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(log, *["of no use"] * 50, "kept")
    write, num_fitting, before = os.write, 0, path.read_bytes()

    def full(descriptor: int, data: bytes) -> int:
        nonlocal num_fitting
        num_fitting -= 1
        if num_fitting < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:100])

    monkeypatch.setattr(os, "write", full)
    for number in range(2):
        num_fitting = number
        with pytest.raises(NoSpaceError):
            log.compact()
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [path.name]


@pytest.mark.fault("F4")
@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_after_a_failed_fsync_nothing_is_durable_before_it_was_written_anew(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    """Nobody can tell which bytes of the old file have reached the disk."""
    put(log, "first")
    log.sync()
    inode, fsync, num_left = path.stat().st_ino, os.fsync, num_failures

    def failing(descriptor: int) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left >= 0:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    num_refused = 0
    put(log, "second")
    for _ in range(5):
        try:
            log.sync()
        except (FsyncError, JournalError):
            num_refused += 1
            put(log, f"after {num_refused}")
    assert 1 <= num_refused <= num_failures
    assert path.stat().st_ino != inode
    assert values(path)[:3] == ["first", "second", "after 1"]
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.fault("F4")
def test_what_cannot_be_read_back_after_a_failed_fsync_is_not_given_up(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(log, "first", "last")

    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(FsyncError):
            log.sync()
    content = path.read_bytes()
    path.write_bytes(content[:-5] + bytes(5))  # the page was dropped
    for _ in range(2):
        with pytest.raises(JournalDamagedError):
            log.sync()
    assert values(path) == ["first"]


def test_an_append_does_not_wait_for_a_sync(log: Log, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_disk, go_on, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        at_disk.set()
        assert go_on.wait(30)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    syncing = threading.Thread(target=log.sync)
    syncing.start()
    assert at_disk.wait(30)
    put(log, "meanwhile")
    assert values(path) == ["meanwhile"]
    go_on.set()
    syncing.join()


@pytest.mark.usefixtures("always_compacts")
def test_an_append_beside_a_compaction_waits_for_no_disk(
    log: Log, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(log, *["of no use"] * 9, "first")
    fsync, num_syncs = os.fsync, 0

    def appending(descriptor: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        if num_syncs <= logs.CATCH_UPS:
            put(log, f"beside {num_syncs}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", appending)
    log.compact()
    expected = ["first", *(f"beside {number}" for number in range(1, logs.CATCH_UPS + 1))]
    assert values(path) == expected
    put(log, "after")
    assert values(path) == [*expected, "after"]


# --- kills and interrupts ---------------------------------------------------------------------------------------


def child(work: Callable[[], object]) -> int:
    """Do work in a forked process, and return its exit status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        work()
    finally:
        os._exit(0)


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do work in a process that is killed at its `number`th call; return whether there were as many."""

    def run() -> None:
        left = number

        def on_event(_: object, event: str, __: object) -> None:
            nonlocal left
            left -= event in ("call", "c_call")
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(on_event)
        work()
        sys.setprofile(None)

    return child(run) == signal.SIGKILL


@pytest.mark.fault("F4b")
@pytest.mark.usefixtures("always_compacts")
def test_a_compaction_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    """Another process appends before and after; the next one that has the log to itself leaves nothing over."""
    number, num_kills = 0, 0
    while True:
        path = tmp_path / f"{number}.log"
        with contextlib.closing(opened(path)) as trainer:
            put(trainer, *["of no use"] * 5, "first", "second")
            place = look(path).place  # type: ignore[union-attr]

            def compact(path: Path = path) -> None:
                runner = opened(path)
                put(runner, "third")
                runner.compact()

            was_killed = killed_at(number, compact)
            put(trainer, "last")
            trainer.sync()
            kept = [each for each in values(path) if each != "of no use"]
            assert kept in (["first", "second", "last"], ["first", "second", "third", "last"])
            assert values(path, place)[-1] == "last"
        with contextlib.closing(Log(path, "x", needed, loss="a pity")) as log:
            assert [each.parts["x"] for each in log.read().records("x")][-len(kept) :] == kept
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        path.unlink()
        if not was_killed:
            break
        num_kills += 1
        number += 1 if os.environ.get("CKPT_ASYNC_SOAK_MINUTES") else 3
    assert num_kills > 30


def test_ctrl_c_anywhere_in_an_append_leaves_all_of_it_or_nothing(path: Path, log: Log) -> None:
    """And frees the lock, for which other processes wait."""
    for at in range(1, 1000):
        before = values(path)
        error = interrupted(lambda: put(log, "x"), at)
        assert values(path) in (before, [*before, "x"])
        assert child(lambda: put(opened(path), "of another process")) == 0
        assert values(path)[-1] == "of another process"
        if error is None:
            break
    assert at > 10


# --- several processes ------------------------------------------------------------------------------------------


@pytest.mark.fault("F4b")
@pytest.mark.usefixtures("always_compacts")
def test_processes_that_append_and_compact_at_once_lose_nothing(path: Path) -> None:
    """A reader beside them never sees an error, nor fewer records than before, nor another order."""
    num_writers, num_values = 3, 700
    pids = []
    for writer in range(num_writers + 1):
        pid = os.fork()
        if pid == 0:
            try:
                log = opened(path)
                for number in range(num_values):
                    put(log, [writer, number])
                    if writer == num_writers:
                        put(log, *["of no use"] * 5)
                        log.compact()
                        if number % 10 == 0:
                            log.sync()
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    seen: list[Any] = []
    place: Place | None = None
    num_compactions, is_over = 0, False
    while not is_over:
        is_over = all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids)
        found = look(path, place)
        if found is not None:
            new = [each.parts["x"] for each in found.records("x") if each.parts["x"] != "of no use"]
            if found.is_whole:
                assert new[: len(seen)] == seen
                num_compactions += place is not None
                new = new[len(seen) :]
            seen += new
            place = found.place
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
    for writer in range(num_writers + 1):
        assert [number for each, number in seen if each == writer] == list(range(num_values))
    assert len(seen) == (num_writers + 1) * num_values
    assert [each for each in values(path) if each != "of no use"] == seen
    assert os.listdir(path.parent) == [path.name]


def test_an_append_waits_for_another_process_that_appends(path: Path, log: Log) -> None:
    """Otherwise it would take for torn, and cut off, what the other one is writing."""
    with path.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        whole = logs._record(1.5, {"x": '"first"'})
        other.write(whole[:20])
        appending = threading.Thread(target=put, args=(log, "second"))
        appending.start()
        appending.join(0.2)
        other.write(whole[20:])
        fcntl.flock(other, fcntl.LOCK_UN)
        appending.join(30)
    assert values(path) == ["first", "second"]


@pytest.mark.usefixtures("always_compacts")
def test_positions_grow_through_compaction(path: Path, log: Log) -> None:
    """A reader continues where it was, and reads all again only if what it has not read was compacted."""
    put(log, *["of no use"] * 50, "first")
    behind = look(path)
    put(log, "second")
    ahead = look(path)
    assert behind is not None
    assert ahead is not None
    log.compact()
    put(log, "third")
    found = look(path, ahead.place)
    assert found is not None
    assert (found.is_whole, values(path, ahead.place)) == (False, ["third"])
    assert found.place.position > ahead.place.position > behind.place.position
    again = look(path, behind.place)
    assert again is not None
    assert (again.is_whole, values(path, behind.place)) == (True, ["first", "second", "third"])


def test_a_file_that_is_deleted_or_replaced_is_reported(path: Path, log: Log) -> None:
    """Nothing appended after that could ever be found again."""
    put(log, "first")
    path.unlink()
    for use in (lambda: put(log, "x"), log.sync, log.check_there, log.compact):
        with pytest.raises(JournalError, match="was deleted"):
            use()
    assert log.read().place.position, "what was there can still be read"
    with contextlib.closing(opened(path)):
        for use in (lambda: put(log, "x"), log.read, log.sync, log.check_there, log.compact):
            with pytest.raises(JournalError, match="was deleted"):
                use()
    assert values(path) == []


@pytest.mark.fault("F4b")
def test_a_forked_child_can_use_only_a_handle_of_its_own(path: Path, tmp_path: Path) -> None:
    from ckpt_async.core.model import CheckpointId, ReceiptStored
    from ckpt_async.errors import JournalError as Refused
    from ckpt_async.local.folder import Folder
    from ckpt_async.local.journal import Journal

    folder, id_ = Folder(tmp_path / "folder"), CheckpointId(1, 1)
    with contextlib.closing(Journal(folder, 0)) as journal:

        def use() -> None:
            for refused in (journal.rows, journal.sync, lambda: journal.append([ReceiptStored(id_)])):
                with contextlib.suppress(Refused):
                    refused()
                    os._exit(1)
            journal.close()
            with contextlib.closing(Journal(folder, 0)) as own:
                own.append([ReceiptStored(id_)])
            os._exit(7)

        assert os.waitstatus_to_exitcode(child(use)) == 7
        journal.append([ReceiptStored(id_)])
        assert len(journal.rows()) == 2


@pytest.mark.fault("F4b")
def test_a_fork_does_not_keep_the_lock_of_a_killed_parent(path: Path, tmp_path: Path) -> None:
    """A dataloader worker may have been forked while another thread was appending."""
    from ckpt_async.local.folder import Folder
    from ckpt_async.local.journal import Journal

    folder = Folder(tmp_path / "folder")
    read, write = os.pipe()

    def parent() -> None:
        journal = Journal(folder, 0)
        journal._take()
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        os.write(write, b"%d" % worker)
        os.kill(os.getpid(), signal.SIGKILL)

    assert child(parent) == signal.SIGKILL
    worker = int(os.read(read, 20))
    try:
        opening = threading.Thread(target=lambda: Journal(folder, 0).close(), daemon=True)
        opening.start()
        opening.join(30)
        assert not opening.is_alive()
    finally:
        os.kill(worker, signal.SIGKILL)
