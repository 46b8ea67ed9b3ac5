"""The engine on a thread of the trainer's process. All kinds of checkpoints of one rank share one thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from ckpt_async.core.observe import Observer
from ckpt_async.errors import RunnerError
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.runners import EngineView, Start
from ckpt_async.runners.host import Backends, Host
from ckpt_async.runners.loop import new_loop
from ckpt_async.threads import Latch, outcome

logger = logging.getLogger(__name__)


class ThreadRunner:
    """A `Runner` on a background thread with an event loop, which it shares with the other kinds of its rank, so
    that their limits are common too. An engine that dies does not affect the others.
    """

    def __init__(
        self,
        start: Start,
        folder: Folder,
        journal: Journal,
        lock: RankLock,  # noqa: ARG002  this process holds it
        observer: Observer,
        on_change: Callable[[], None],
    ) -> None:
        self.death: BaseException | None = None
        self._place = start.folder, start.rank
        self._on_change = on_change
        self._new_host = functools.partial(Host, start, folder, journal, observer, on_change)
        self._host: Host | None = None
        self._thread: _LoopThread | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: Future[int] = Future()
        self._ended = Latch()
        self._has_left = False

    @property
    def engine(self) -> EngineView | None:
        return self._host.engine if self._host is not None else None

    @property
    def is_alive(self) -> bool:
        return self._host is not None and not self._ended.is_set()

    def start(self) -> int:
        thread = self._thread = _join(self._place)
        self._host = self._new_host(thread.backends)
        try:
            thread.begin(self)
            return outcome(self._started)
        except BaseException:
            if self._started.cancel():  # interrupted while waiting, perhaps for a store that does not respond
                thread.cancel(self)
            self.end()
            raise

    def expect_end(self) -> None:
        if self._host is not None:
            self._host.is_end_expected = True

    def end(self) -> None:
        if self._thread is None or self._host is None:
            return
        self._host.stop()
        if self._thread.has(self):
            self._ended.wait()
        if not self._has_left:
            self._has_left = True
            _leave(self._place, self._thread)

    # --- on the loop ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the engine."""
        self._task = asyncio.get_running_loop().create_task(self._live())
        self._task.add_done_callback(self._finished)

    def cancel(self) -> None:
        """End an engine that has not started, and has perhaps not even begun."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._end()

    async def _live(self) -> None:
        assert self._host is not None
        assert self._thread is not None
        try:
            await self._host.run(self._has_started)
        except BaseException as error:  # noqa: BLE001  handed to the trainer, at start or at its next call
            self._die(self._thread.error or error)

    def _finished(self, task: asyncio.Task[None]) -> None:
        assert self._thread is not None
        if task.cancelled():  # before it had run at all
            self._die(self._thread.error or asyncio.CancelledError())
        self._end()

    def lost(self, error: BaseException) -> None:
        """Fail this runner, because its event loop has ended."""
        if not self._ended.is_set():
            self._die(error)
            self._end()

    def _die(self, error: BaseException) -> None:
        if not self._started.done():
            self._started.set_exception(error)
        elif not self._started.cancelled():
            logger.critical("uploader_died error=%r", error)
            self.death = error

    def _end(self) -> None:
        self._ended.set()
        self._on_change()

    def _has_started(self, generation: int) -> bool:
        if not self._started.set_running_or_notify_cancel():
            return False
        self._started.set_result(generation)
        return True


# --- the thread --------------------------------------------------------------------------------------------


class _LoopThread:
    """An event loop on a thread, and the stores that its engines share."""

    def __init__(self, name: str) -> None:
        self.backends = Backends()
        self.num_users = 0
        self.error: BaseException | None = None  # the error that ended the loop
        self.has_ended = False
        self._lock = threading.Lock()
        self._runners: set[ThreadRunner] = set()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._is_over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, runner: ThreadRunner) -> None:
        """Have the runner begin, or learn that it is lost. Raises what keeps the loop from starting."""
        loop = self._loop.result()
        with self._lock:
            if self.has_ended:
                raise RunnerError(f"the engine's event loop has ended: {self.error!r}") from self.error
            self._runners.add(runner)
        with contextlib.suppress(RuntimeError):  # the loop was closed a moment ago
            loop.call_soon_threadsafe(runner.begin)

    def cancel(self, runner: ThreadRunner) -> None:
        """Have a runner end that has not started."""
        if self.has(runner):
            with contextlib.suppress(RuntimeError):  # the loop was closed a moment ago
                self._loop.result().call_soon_threadsafe(runner.cancel)

    def has(self, runner: ThreadRunner) -> bool:
        return runner in self._runners

    def stop(self) -> None:
        """End the loop because no runner is left, and wait for its end."""
        with contextlib.suppress(RuntimeError, RunnerError, OSError):  # it has ended, or never began
            self._loop.result().call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                try:
                    runner.run(self._live())
                except BaseException as error:  # noqa: BLE001  the engines are cancelled next, and say why
                    self.error = error
        except BaseException as error:  # noqa: BLE001  told to all
            self.error = self.error or error
        lost = self.error or RunnerError("the engine's event loop has ended")
        if not self._loop.done():
            self._loop.set_exception(lost)
        with self._lock:
            self.has_ended = True
            left = list(self._runners)
        for each in left:
            each.lost(lost)

    async def _live(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._is_over.wait()


_Place = tuple[str, int]  # folder and rank

_threads: dict[_Place, _LoopThread] = {}
_lock = threading.Lock()


def _join(place: _Place) -> _LoopThread:
    """Return the thread of this folder and rank, or a new one if none is working. Pass it to `_leave` in the end."""
    with _lock:
        thread = _threads.get(place)
        if thread is None or thread.has_ended:
            thread = _threads[place] = _LoopThread(f"ckpt-async-rank-{place[1]}")
        thread.num_users += 1
        return thread


def _leave(place: _Place, thread: _LoopThread) -> None:
    """Leave the thread; the last runner to leave ends it."""
    with _lock:
        thread.num_users -= 1
        is_last = not thread.num_users
        if is_last and _threads.get(place) is thread:
            del _threads[place]
    if is_last:
        thread.stop()


def _forget_parents() -> None:
    global _lock  # noqa: PLW0603  a thread that is not here any more may hold it
    _lock = threading.Lock()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_parents)
