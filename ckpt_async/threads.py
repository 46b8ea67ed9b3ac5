"""Threads: what waits for them, what they wait for, and blocking code beside an event loop."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# How long a thread waits for the GIL before it asks the holder for it: Python's default is 5 ms.
PROMPT_S = 1e-4
# A signal that arrives just before a thread begins to wait is noticed only when that wait ends.
CTRL_C_S = 0.5


@contextlib.contextmanager
def promptly() -> Iterator[None]:
    """Let threads that wait for the GIL have it sooner (PROMPT_S) until the block ends.

    For calls that block training: each of their system calls gives the GIL up, and then waits for as long as another
    thread that runs Python (a data loader, the engine) may keep it. The interval is that of the whole process. No lock
    is needed if several threads do this: only one that finds the long interval changes it, and puts back what it found.
    """
    found_s = sys.getswitchinterval()
    if found_s <= PROMPT_S:
        yield
        return
    try:
        sys.setswitchinterval(PROMPT_S)
        yield
    finally:
        sys.setswitchinterval(found_s)


class Bell:
    """Wakes all who wait for it. It takes the place of a condition, within which Ctrl-C may leave a lock held for
    ever, or come out as RuntimeError: all that counts here are single calls into C.
    """

    def __init__(self) -> None:
        self._waiting: set[_thread.LockType] = set()

    def ring(self) -> None:
        with contextlib.suppress(KeyError):
            while True:
                self._waiting.pop().release()

    def wait(self, timeout_s: float | None = None, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Block until it rings, at most `timeout_s`; not at all if `unless` holds. Return whether it held.

        No ring is missed: `unless` is called when those that come are heard already.
        """
        told = threading.Lock()
        told.acquire()
        self._waiting.add(told)
        try:
            if unless():
                return True
            limit_s = -1.0 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
            told.acquire(timeout=limit_s)
            return False
        finally:
            self._waiting.discard(told)


class Latch:
    """Like `threading.Event`, but Ctrl-C does no harm within it: see `Bell`."""

    def __init__(self) -> None:
        self._is_set, self._bell = False, Bell()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._bell.ring()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is set, at most `timeout_s`. Return whether it is."""
        return self._bell.wait(timeout_s, unless=self.is_set) or self._is_set


class LoopThread:
    """An event loop that runs on a thread of its own until it is closed."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop, whatever still runs on it, and release its descriptors."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def start(work: Callable[[], object], name: str) -> None:
    """Run `work` on a thread, for whose end the interpreter waits at exit.

    If this is interrupted by Ctrl-C, the thread may run or not. (Ctrl-C within `Thread.start` may leave a lock held
    that the new thread waits for.)
    """
    started, errors = Latch(), list[BaseException]()

    def begin() -> None:
        try:
            threading.Thread(target=work, name=name, daemon=False).start()
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)
        started.set()

    _thread.start_new_thread(begin, ())
    started.wait()
    if errors:
        raise errors[0]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in its own event loop, even if the calling thread already runs one (notebooks).
    Ctrl-C cancels it within CTRL_C_S, and KeyboardInterrupt is raised once it has ended; a second Ctrl-C raises it
    immediately. This does not apply if somebody else handles SIGINT (as `asyncio.run` does around a loop of the
    caller's).
    """
    return _run_beside(work) if _has_running_loop() else asyncio.run(_awake(work))


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _awake(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` with a loop that wakes up regularly: asyncio alone would sleep until its next timeout when a
    signal arrives just before it blocks.
    """
    loop = asyncio.get_running_loop()

    def tick() -> None:
        loop.call_later(CTRL_C_S, tick)

    tick()
    return await work


def _run_beside(work: Coroutine[Any, Any, T]) -> T:
    is_unwanted = False
    running: list[Callable[[], object]] = []

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        running.append(partial(loop.call_soon_threadsafe, task.cancel))
        if is_unwanted:
            task.cancel()
        return await work

    def cancel() -> None:
        nonlocal is_unwanted
        is_unwanted = True
        for each in running:
            with contextlib.suppress(RuntimeError):  # it has ended, and its loop is closed
                each()

    def interrupt(_: int, __: FrameType | None) -> None:
        if is_unwanted:
            raise KeyboardInterrupt
        cancel()

    thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-async-run")
    with _on_ctrl_c(interrupt):
        try:
            done = thread.submit(asyncio.run, cancellable())
            while not wait({done}, timeout=CTRL_C_S).done:
                pass
        # The work must not continue once the caller is gone.
        except BaseException:
            cancel()
            raise
        finally:
            thread.shutdown(wait=False)
    try:
        return done.result()
    except asyncio.CancelledError:
        if is_unwanted:
            raise KeyboardInterrupt from None
        raise


@contextlib.contextmanager
def _on_ctrl_c(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` on SIGINT instead of raising KeyboardInterrupt, as asyncio's runner does.

    KeyboardInterrupt could otherwise be raised at any point of the thread, including in a finalizer (which swallows
    it) or while a lock is half acquired.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def outcome(future: Future[T]) -> T:
    """Wait for what another thread returns or raises, as `Future.result` does, but notice Ctrl-C within CTRL_C_S."""
    while not future.done():
        with contextlib.suppress(TimeoutError):  # if it is the future's own, it is raised below
            return future.result(CTRL_C_S)
    return future.result()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a worker thread. If cancelled, still wait for the thread before returning: it uses
    descriptors and buffers, and the number of a closed descriptor is soon reused for another file.
    """
    work = asyncio.to_thread(answering(function), *args, **kwargs)
    return await result_of(asyncio.ensure_future(work), lambda: True)


def answering(function: Callable[P, T]) -> Callable[P, T]:
    """Make StopIteration a RuntimeError, as in a generator: no future of asyncio takes one, and whoever waits for it
    would wait for ever.
    """

    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("StopIteration in a worker thread") from error

    return answer


async def result_of(work: asyncio.Future[T], cancel: Callable[[], bool]) -> T:
    """Return or raise what `work` in a thread returns or raises. If cancelled, call `cancel`, which tells whether
    the thread still holds the resources it was given; if so, wait until the thread has finished.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if cancel():
            while not work.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
        if not work.cancel() and not work.cancelled():
            work.exception()  # mark as retrieved: only the cancellation counts
        raise
