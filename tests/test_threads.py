"""Between blocking code and an event loop."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from ckpt_async import threads


def run_in_a_running_loop(work: Coroutine[Any, Any, None]) -> None:
    """Without `asyncio.run`, which has a handler of its own."""

    async def main() -> None:
        threads.run(work)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        task = loop.create_task(main())
        try:
            loop.run_until_complete(task)
        finally:
            task.exception()  # seen


def test_ctrl_c_just_before_the_loop_waits_is_raised() -> None:
    """The signal interrupts no system call of the main thread: as if it had come a moment before."""
    old_mask = signal.pthread_sigmask(signal.SIG_SETMASK, [])
    waits = threading.Event()
    has_slept_on: list[bool] = []

    async def endless() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(waits.set)
        loop.call_later(30, has_slept_on.append, True)
        await asyncio.Event().wait()

    def strike() -> None:
        waits.wait()
        os.kill(os.getpid(), signal.SIGINT)

    striking = threading.Thread(target=strike)
    striking.start()  # a thread that takes the signal, which the main thread does not
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with pytest.raises(KeyboardInterrupt):
            threads.run(endless())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        striking.join()
    assert not has_slept_on


def test_ctrl_c_in_a_running_loop_is_raised() -> None:
    """A notebook's: the work does not go on in its thread without anybody, and nothing interrupts the middle of a
    finalizer or of a lock, which would keep the interrupt to itself.
    """
    ended, handlers = threading.Event(), []

    async def endless() -> None:
        handlers.append(signal.getsignal(signal.SIGINT))
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_in_a_running_loop(endless())
    assert ended.is_set()
    assert signal.default_int_handler not in handlers
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_ctrl_c_is_raised_at_once() -> None:
    """The work may be one that takes its time to end."""
    go_on = threading.Event()

    async def stubborn() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait()

    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_a_running_loop(stubborn())
    finally:
        go_on.set()


def test_run_returns_the_result_and_raises_the_error() -> None:
    async def value() -> int:
        return 3

    async def wrong() -> None:
        raise ValueError("no")

    assert threads.run(value()) == 3
    with pytest.raises(ValueError, match="no"):
        threads.run(wrong())
