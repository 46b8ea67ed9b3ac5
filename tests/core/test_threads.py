"""Between blocking code and an event loop."""

import asyncio
import os
import signal
import threading

import pytest

from ckpt_async import threads


def test_ctrl_c_just_before_the_loop_waits() -> None:
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


def test_run_hands_over_what_the_work_returns_and_raises() -> None:
    async def value() -> int:
        return 3

    async def wrong() -> None:
        raise ValueError("no")

    assert threads.run(value()) == 3
    with pytest.raises(ValueError, match="no"):
        threads.run(wrong())
