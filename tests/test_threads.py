"""`threads.run`, between blocking code and an event loop: results, errors and Ctrl-C. `promptly`: turns at the GIL."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, threads
from ckpt_async.errors import InvalidShardError
from ckpt_async.local.journal import Journal
from ckpt_async.torch import SnapshotBuffers


def test_stop_iteration_in_a_worker_thread_is_raised_and_waited_for_by_nobody_for_ever() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        threads.run(asyncio.wait_for(threads.in_thread(next, iter(())), 10))


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


@pytest.fixture
def patience() -> Iterator[float]:
    """How long a thread waits for the GIL, as a user has set it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.02)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def test_calls_that_block_training_do_not_wait_long_for_the_gil(
    patience: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of their system calls gives it up, to a data loader's thread that keeps it for 5 ms. What the user has set
    holds again afterwards, also after an error.
    """
    seen: list[float] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                seen.append(sys.getswitchinterval())
            return function(*args, **kwargs)

        return noting

    class Noting:
        def __deepcopy__(self, _: dict[int, Any]) -> "Noting":
            seen.append(sys.getswitchinterval())
            return self

    def was_prompt() -> bool:
        last, seen[:] = seen[-1], []
        return last < 0.001 and sys.getswitchinterval() == patience

    with Uploader(tmp_path / "folder", f"file://{tmp_path}/remote", rank=0, world_size=1) as uploader:
        monkeypatch.setattr(Journal, "append", noted(Journal.append))
        monkeypatch.setattr(os, "link", noted(os.link))
        (tmp_path / "folder/shard").write_bytes(b"shard")
        uploader.enqueue(tmp_path / "folder/shard", 1)
        assert was_prompt()
        with uploader.open(1, "opened") as file:
            file.write(b"shard")
        assert was_prompt()
        uploader.seal(1)
        assert was_prompt()
        with pytest.raises(InvalidShardError):
            uploader.enqueue(tmp_path / "folder/missing", 2)
        assert sys.getswitchinterval() == patience
    SnapshotBuffers().take({"other": Noting()})
    assert was_prompt()


@pytest.mark.parametrize("is_first_out", [True, False])
def test_several_threads_that_are_prompt_leave_the_interval_as_it_was(
    patience: float, is_first_out: bool
) -> None:
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    for each in (first, second):
        each.enter_context(threads.promptly())
    for each in (first, second) if is_first_out else (second, first):
        each.close()
    assert sys.getswitchinterval() == patience


def test_a_shorter_interval_is_left_alone(patience: float) -> None:
    sys.setswitchinterval(1e-5)
    with threads.promptly():
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    assert sys.getswitchinterval() == pytest.approx(1e-5)
