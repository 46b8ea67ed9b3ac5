"""Between blocking code and an event loop: neither outlives whoever asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# A signal that arrives just before a thread begins to wait is not seen until that wait ends.
CTRL_C_S = 0.5


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a loop of its own, also where the calling thread already runs one (notebooks).
    Ctrl-C cancels it within CTRL_C_S, and is raised when it has ended, the second one at once, unless somebody else
    handles SIGINT (as `asyncio.run` does around a loop of the caller's).
    """
    return _run_beside(work) if _has_running_loop() else asyncio.run(_awake(work))


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _awake(work: Coroutine[Any, Any, T]) -> T:
    """By itself, asyncio sleeps on until its next timeout when a signal has just missed it."""
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
            with contextlib.suppress(RuntimeError):  # it has ended, and its loop with it
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
        except BaseException:  # the work must not go on without who wanted it
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
    """As asyncio's runner does: where KeyboardInterrupt would be raised wherever the thread happens to be, a finalizer
    (which swallows it) and the middle of a lock included, `handler` is called instead.
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


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a worker thread; when cancelled, wait for it all the same before leaving: descriptors and
    buffers are in use, and a closed descriptor's number is soon another file's.
    """
    return await result_of(asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs)), lambda: True)


async def result_of(work: asyncio.Future[T], cancel: Callable[[], bool]) -> T:
    """What `work` in a thread returns or raises. Cancelled, calls `cancel`, which says whether the thread still has
    hold of what it was given: then waits until it has not.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if cancel():
            while not work.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
        if not work.cancel() and not work.cancelled():
            work.exception()  # seen: the cancellation is what counts
        raise
