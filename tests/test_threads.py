"""`threads.run`, between blocking code and an event loop: results, errors and Ctrl-C."""

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
    """Run it without `asyncio.run`, which has a SIGINT handler of its own."""

    async def main() -> None:
        threads.run(work)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        task = loop.create_task(main())
        try:
            loop.run_until_complete(task)
        finally:
            task.exception()  # marks it as retrieved


def test_ctrl_c_just_before_the_loop_waits_is_raised() -> None:
    """The signal does not interrupt a system call of the main thread, as if it had come a moment earlier."""
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
    striking.start()  # a thread that takes the signal, which the main thread blocks
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with pytest.raises(KeyboardInterrupt):
            threads.run(endless())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        striking.join()
    assert not has_slept_on


def test_ctrl_c_in_a_running_loop_is_raised() -> None:
    """As in a notebook. The work must not continue unattended in its thread. And the interrupt must not be raised
    inside a finalizer or a lock, which would swallow it.
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
    """The work may take its time to end, so the user must be able to give up on it."""
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
