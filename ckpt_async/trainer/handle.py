"""The trainer's end of its engine: tells it what to do, through the journal, and waits for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ckpt_async.core import arguments
from ckpt_async.core.failures import Failure, fenced, to_raise
from ckpt_async.core.model import CheckpointId, Event, Retried, Shard
from ckpt_async.core.observe import Observer
from ckpt_async.errors import UploaderClosedError, UploadFailedError
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.runners import EngineView, MakeRunner, Start
from ckpt_async.threads import Bell

# A predecessor that was just killed, or a sweeper that is finishing its work, releases the lock soon.
LOCK_WAIT_S = 15.0
# How long after its own deadline a flush may still be reading the journal for its report.
REPORT_S = 5.0

T = TypeVar("T")


def deadline_in(timeout_s: float) -> float:
    """Return the deadline that is `timeout_s` from now; a negative timeout is over at once. NaN is rejected,
    because it would never be over, and long timeouts are cut to what a lock can wait for.
    """
    return time.monotonic() + min(arguments.seconds(timeout_s, "timeout_s"), threading.TIMEOUT_MAX / 2)


class EngineHandle:
    """One rank's engine, wherever it runs, with the journal that tells it what to do and the lock that keeps others
    away.

    Opening blocks until the engine has agreed on the generation. If the engine cannot start, it raises the reason
    and holds nothing.
    """

    def __init__(self, start: Start, folder: Folder, observer: Observer) -> None:
        self.changed = Bell()  # rings at every change that the engine makes
        self._lock = threading.Lock()
        # A mark for each call in progress, and for each flush its deadline. Marks are removed by single calls into C,
        # which Ctrl-C cannot leave half done.
        self._waiting: set[object] = set()
        self._flushing: dict[object, float] = {}
        self._is_strict = start.settings.on_error == "raise"
        self.has_ended = False
        self.cut_short: UploadFailedError | None = None  # what an interrupted `close` has left
        self.on_change: Callable[[], None] = lambda: None  # called on every change, too; must not block
        self.told: set[CheckpointId] = set()  # given-up checkpoints whose waiters have been told
        self._rank_lock = RankLock(folder, start.rank)
        with contextlib.ExitStack() as undo:
            undo.callback(self._rank_lock.release)
            self._rank_lock.acquire(wait_s=LOCK_WAIT_S, is_trainer=True)
            self.journal = Journal(folder, start.rank)
            undo.callback(self.journal.close)
            self.runner = _runner_of(start.settings.runner)(
                start, folder, self.journal, self._rank_lock, observer, self._notify
            )
            self.generation = self.runner.start()
            undo.pop_all()

    def view(self) -> EngineView:
        engine = self.runner.engine
        if engine is None:
            raise UploaderClosedError("the uploader's engine has ended")
        return engine

    def record(self, event: Event) -> None:
        """Record an event for the engine to act on; on return it survives SIGKILL."""
        self.journal.append([event])
        self.view().wake()

    def has_recorded(self, id_: CheckpointId, shards: Sequence[Shard]) -> bool:
        """Return whether the journal has these shards, of which it has all or none."""
        recorded = self.view().fresh_local().checkpoints.get(id_)
        if recorded is None or not shards:
            return False
        first = recorded.shards.get(shards[0].name)
        return first is not None and first.shard == shards[0]

    def retry_failed(self, *only: CheckpointId) -> None:
        """Have failed uploads, of these or of all checkpoints, tried again; under `hurried` that happens at once."""
        local = self.view().fresh_local()
        failed = [id_ for id_, each in local.checkpoints.items() if each.may_be_retried]
        if events := [Retried(id_) for id_ in failed if id_ in only or not only]:
            self.journal.append(events)

    def take_failure(self) -> UploadFailedError | None:
        """Return, in strict mode, one error for all final failures since the last call; otherwise None."""
        view = self.view()
        if not view.failures or not self._is_strict:
            return None
        found: list[Failure] = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(view.failures.popleft())
        return to_raise(found, view.fresh_local(), view.failing, self.told)

    def raise_cut_short(self, *, is_late_an_error: bool) -> None:
        """Raise, in strict mode, what an interrupted `close` has left."""
        if self.cut_short is not None and is_late_an_error and self._is_strict:
            raise self.cut_short

    def check_alive(self) -> None:
        death = self.runner.death
        if death is not None:
            raise UploadFailedError(f"the uploader's engine has died: {death!r}") from death

    def check_not_fenced(self) -> None:
        fenced_by = self.view().fenced_by
        if fenced_by is not None:
            raise fenced(self.generation, fenced_by)

    def end(self, deadline: float = 0.0) -> None:
        """Stop the engine once nobody is flushing any more; from then on, nothing new is started. Idempotent.

        It waits until the deadline, or that of the flush if it is later.
        """
        while not self.has_ended:
            with self._lock:
                until = max([deadline, *(each + REPORT_S for each in list(self._flushing.values()))])
                self.has_ended = not self._flushing or time.monotonic() >= until
            if not self.has_ended:
                self.changed.wait(until - time.monotonic(), unless=lambda: not self._flushing)
        self.runner.end()

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[contextlib.ExitStack]:
        """End and release the engine if the block raises, after what the block adds to the stack: with no owner, it
        would keep the folder locked.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.release)
            undo.callback(self.end)
            yield undo
            undo.pop_all()

    def release(self) -> None:
        """Release the journal and the rank for the next launch. Idempotent."""
        try:
            self.journal.close()
        finally:
            self._rank_lock.release()

    # --- waiting -------------------------------------------------------------------------------------------

    def wait_until(
        self, is_over: Callable[[EngineView], bool], deadline: float, *, poll_s: float = threading.TIMEOUT_MAX
    ) -> None:
        """Wait until `is_over` holds, the deadline has passed or the engine has died. Set `poll_s` for conditions
        that can change without a notification from the engine.
        """

        def is_settled() -> bool:
            return self.runner.death is not None or is_over(self.view())

        left_s = deadline - time.monotonic()
        while not self.changed.wait(min(left_s, poll_s), unless=is_settled) and left_s > 0:
            left_s = deadline - time.monotonic()

    def hurried(self, wait: Callable[[], T]) -> T:
        """Call `wait`, and tell the engine meanwhile that somebody waits: for other ranks, or for failed uploads, which
        are then retried at once.
        """
        mark = object()
        try:
            with self._lock:
                self._waiting.add(mark)
                self.view().hurry(True)
            return wait()
        finally:
            self._waiting.discard(mark)
            with self._lock:
                if not self._waiting:
                    self.view().hurry(False)

    def flushing(self, flush: Callable[[], T], deadline: float) -> T:
        """Call `flush`, which keeps this deadline, and have the newest checkpoint uploaded next; `end` waits for it."""
        mark = object()
        try:
            with self._lock:
                if self.has_ended:
                    raise UploaderClosedError("the uploader is closed")
                self._flushing[mark] = deadline
                self.view().turn_to_newest()
            return flush()
        finally:
            self._flushing.pop(mark, None)
            self._notify()

    def _notify(self) -> None:
        self.changed.ring()
        self.on_change()


def _runner_of(name: str) -> MakeRunner:
    """Return the runner class that the setting `runner` names, imported on demand."""
    if name == "process":
        from ckpt_async.runners.process import ProcessRunner

        return ProcessRunner
    from ckpt_async.runners.thread import ThreadRunner

    return ThreadRunner
