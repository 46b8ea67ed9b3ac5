"""Ctrl-C within the trainer's calls, at every point where CPython delivers signals: nothing stays locked, half recorded
or waited for.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import JournalError, UploadFailedError
from ckpt_async.local.journal import Journal
from ckpt_async.trainer import at_exit, handle
from tests.ctrl_c import interrupted
from tests.stores.misbehaving import Meddled, Slow
from tests.trainer.uploads import Open, decisions, save, wait_until, write

PATIENCE_S = 5.0

# A descriptor that was opened just before is closed by the garbage collector, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Another thread: a reentrant lock looks free to the one that holds it."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def held(uploader: Uploader, other: ThreadPoolExecutor) -> list[str]:
    """Return the locks that no running call can be holding any more, and what else is left open."""
    engine = uploader._engine
    locks: dict[str, Any] = {
        "journal": engine.journal._lock,
        "uploader": uploader._lock,
        "engine": engine._lock,
    }

    def is_held(lock: Any) -> bool:
        if lock.acquire(timeout=PATIENCE_S):
            lock.release()
            return False
        return True

    found = [name for name, lock in locks.items() if other.submit(is_held, lock).result()]
    private = uploader.folder / keys.PRIVATE
    for name, path in (("append", private / keys.journal_name(0)), ("removals", private)):
        if not is_free(path):
            found.append(name)
    return found


def is_free(path: Path) -> bool:
    """Return whether nobody holds the flock for long: the engine appends, too."""
    deadline = time.monotonic() + PATIENCE_S
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            else:
                return True
    finally:
        os.close(descriptor)


def interrupt_everywhere(
    call: Callable[[int], object],
    uploader: Uploader,
    other: ThreadPoolExecutor,
    prepare: Callable[[int], object] = lambda _: None,
) -> tuple[set[str], int]:
    """Interrupt `call(1)` at its first point, `call(2)` at its second, and so on, until one is not interrupted, or
    leaves something held. Returns what, and the number of the last call.
    """
    found: set[str] = set()
    for number in range(1, 10_000):
        prepare(number)
        error = interrupted(partial(call, number), number)
        if error is None:
            return found, number
        if not isinstance(error, KeyboardInterrupt):
            found.add(repr(error))
        found.update(held(uploader, other))  # while the traceback is alive, as in `__exit__`
        del error
        if found:
            return found, number
    raise AssertionError("it never ended by itself")


def test_an_interrupted_enqueue_has_recorded_and_linked_all_or_nothing(
    opened: Open, other: ThreadPoolExecutor
) -> None:
    """The journal's lock stayed with a suspended generator, so that `close` hung. Rows that were already there lost
    their links: the checkpoint was given up once the trainer had deleted the files.
    """
    store = Meddled()
    with opened(store, num_checkpoints_to_keep=None) as uploader:

        def enqueue(step: int) -> None:
            uploader.enqueue(uploader.folder / f"step-{step}", step)

        def prepare(step: int) -> None:
            for name in ("a", "b"):
                write(uploader, f"step-{step}/{name}")

        found, last = interrupt_everywhere(enqueue, uploader, other, prepare)
        unlinked = list(rows_without_link(uploader))
        for step in range(1, last + 1):
            enqueue(step)
            uploader.seal(step)
        uploader.wait(last, timeout_s=30)
    assert (found, unlinked) == (set(), [])
    assert list(decisions(store).values()) == ["commit"] * last


def rows_without_link(uploader: Uploader) -> Iterator[tuple[int, str]]:
    for id_, checkpoint in uploader._engine.view().fresh_local().checkpoints.items():
        assert len(checkpoint.shards) == 2, "half of the files were enqueued"
        spool = uploader.folder / keys.PRIVATE / keys.spool_checkpoint(id_, uploader.rank)
        for name in checkpoint.shards:
            if not (spool / name).exists():
                yield id_.step, name


@pytest.mark.parametrize("name", ["seal", "give_up", "wait", "flush", "wait_for_predecessor", "open"])
def test_an_interrupted_call_leaves_nothing_locked(
    opened: Open, other: ThreadPoolExecutor, name: str
) -> None:
    """A transaction that a suspended generator had begun stayed open: what was appended later was never committed.
    After an interrupted flush, `close` waited for ever. `wait` raised RuntimeError instead of KeyboardInterrupt.
    """
    store = Meddled()
    with opened(store, num_checkpoints_to_keep=None, on_error="warn") as uploader:
        save(uploader, 0)
        uploader.wait(0, timeout_s=10)
        calls: dict[str, Callable[[int], object]] = {
            "seal": uploader.seal,
            "give_up": lambda step: uploader.give_up(step, "by the test"),
            "wait": lambda _: uploader.wait(0, timeout_s=10),
            "flush": lambda _: uploader.flush(10),
            "wait_for_predecessor": lambda _: uploader.wait_for_predecessor(10),
            "open": lambda step: uploader.open(step, "a").close(),
        }
        found, _ = interrupt_everywhere(calls[name], uploader, other)
        assert found == set()
        engine: Any = uploader._engine.view()
        wait_until(lambda: not engine.state.is_hurried, uploader)
        save(uploader, 20_000)
        closing = threading.Thread(target=uploader.close, args=(20,), daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
    assert decisions(store)[CheckpointId(1, 20_000)] == "commit"


def test_an_enqueue_that_is_interrupted_once_its_row_is_there_keeps_the_link(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link was undone, and `close` said that the shard had been deleted before it was uploaded."""
    append = Journal.append

    def interrupted_append(self: Journal, events: Any) -> None:
        append(self, events)
        raise KeyboardInterrupt

    store = Meddled()
    with opened(store) as uploader:
        path = write(uploader, "step-1/a")
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append", interrupted_append)
            with pytest.raises(KeyboardInterrupt):
                uploader.enqueue(path, 1)
        assert path.stat().st_nlink == 2
        uploader.enqueue(path, 1)  # changes nothing
        path.unlink()
        uploader.seal(1)
    assert decisions(store) == {CheckpointId(1, 1): "commit"}


def test_a_flush_that_is_interrupted_as_it_begins_does_not_hold_up_close(opened: Open) -> None:
    """It counted as a flush in progress for ever."""

    def interrupted_call(*_: object) -> None:
        raise KeyboardInterrupt

    with opened(Meddled()) as uploader:
        engine = uploader._engine.view()
        engine.turn_to_newest, original = interrupted_call, engine.turn_to_newest
        try:
            uploader.flush(10)
        except KeyboardInterrupt as error:
            interruption = error  # with its traceback
        engine.turn_to_newest = original
        closing = threading.Thread(target=uploader.close, args=(10,), daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive(), interruption


def test_close_waits_no_longer_than_a_flush_may_take(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has become of its thread: `close` waited for it without any limit."""
    monkeypatch.setattr(handle, "REPORT_S", 0.1)
    has_begun, may_end = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        has_begun.set()
        may_end.wait(30)

    def flush() -> None:
        with contextlib.suppress(JournalError):  # it is closed
            uploader.flush(0.1)

    with opened(Meddled()) as uploader:
        with monkeypatch.context() as patch:
            patch.setattr("ckpt_async.trainer.waits.drain", hang)
            flushing = threading.Thread(target=flush)
            flushing.start()
            assert has_begun.wait(10)
        closing = threading.Thread(target=uploader.close, args=(0.1,), daemon=True)
        closing.start()
        closing.join(15)
        has_closed = not closing.is_alive()
        may_end.set()
        flushing.join(10)
        assert has_closed


def test_an_interrupted_close_lets_the_next_uploader_in(opened: Open, tmp_path: Path) -> None:
    """The folder stayed locked by this very process, and the next `close` did nothing."""
    for number in range(1, 2_000, 3):  # every third point: it takes long
        with opened(Meddled(), tmp_path / f"{number}", on_error="warn") as uploader:
            save(uploader, 1)
            error = interrupted(uploader.close, number)
            assert error is None or type(error) is KeyboardInterrupt
            if not uploader._is_closed:  # it had not begun
                uploader.close()
            assert not uploader._engine._rank_lock.is_held, number
            assert not uploader._engine.runner.is_alive
            assert uploader not in at_exit._open
        if error is None:
            break
    assert number > 300


def test_the_close_after_an_interrupted_one_says_what_is_not_committed(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It did nothing, without an error, as if the upload that Ctrl-C had ended was in the store."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    store = Slow()
    told = pytest.raises(UploadFailedError, match="interrupted before step 1 was committed")
    with told, opened(store) as uploader:  # which closes it again
        save(uploader, 1)
        assert store.has_come.wait(PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr("ckpt_async.trainer.waits.drain", interrupt)
            with pytest.raises(KeyboardInterrupt):
                uploader.close()
        assert "closed_with_unfinished steps=[1]" in caplog.text
        uploader.close(timeout_s=0)  # does not claim that all is there


def test_a_file_whose_close_was_interrupted_is_whole(opened: Open) -> None:
    """Its end was lost with the buffer; the file that is left may be passed to `enqueue`."""
    with opened(Meddled()) as uploader:
        writer = uploader.open(1, "a")
        writer.write(b"whole")

        def interrupt() -> None:
            del writer.flush
            raise KeyboardInterrupt

        writer.flush = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            writer.close()
        assert writer.closed
        assert writer.path.read_bytes() == b"whole"
        uploader.enqueue(writer.path, 1)
        uploader.seal(1)
