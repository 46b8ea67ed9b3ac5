"""Processes that can be killed at any await: none of their code runs on, and nothing they hold stays held.

They share one event loop whose time jumps. What a thread would do happens at one virtual moment.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

from tests.virtual_time import VirtualTimeLoop

_current: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


def current() -> "Process":
    process = _current.get()
    assert process is not None
    return process


class KilledError(BaseException):
    """A dead process tried to have an effect: while its coroutines are closed, their `finally` blocks run."""


class Process:
    """A process. Its code is recognised by context, and so are the tasks that it creates. It is killed after
    `awaits_left` awaits, if that is given.
    """

    def __init__(self, name: str, *, clock_offset_s: float = 0.0) -> None:
        self.name, self.clock_offset_s = name, clock_offset_s
        self.is_dead = False
        self.awaits_left: int | None = None
        self.on_kill: Callable[[Process], None] = lambda _: None
        self.main: asyncio.Task[Any] | None = None
        self.coroutines: list[Coroutine[Any, Any, Any]] = []
        self._context = contextvars.copy_context()
        self._context.run(_current.set, self)
        self._tasks: list[asyncio.Task[Any]] = []
        self._handles: list[Callable[[], None]] = []

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Process":
        self.main = self._context.run(asyncio.get_running_loop().create_task, coroutine)
        return self

    @property
    def is_running(self) -> bool:
        return self.main is not None and not self.main.done() and not self.is_dead

    def in_flight(self) -> Iterator[FrameType]:
        """Yield the frames that are being executed, outermost first, coroutine by coroutine."""
        for coroutine in self.coroutines:
            each: Any = coroutine
            while getattr(each, "cr_frame", None) is not None:
                yield each.cr_frame
                each = each.cr_await

    def now_in(self) -> list[str]:
        return [frame.f_code.co_qualname for frame in self.in_flight()]

    def hold(self, close: Callable[[], None]) -> None:
        """Register what the kernel closes when the process is gone."""
        self._handles.append(close)

    def check_alive(self) -> None:
        if self.is_dead:
            raise KilledError

    def make_task(self, coroutine: Coroutine[Any, Any, Any], loop: Any, **more: Any) -> asyncio.Task[Any]:
        if self.is_dead:
            coroutine.close()
            return asyncio.Task(asyncio.sleep(0), loop=loop, **more)
        task = asyncio.Task(_Steps(coroutine, self), loop=loop, **more)
        self.coroutines.append(coroutine)
        self._tasks.append(task)
        return task

    def count_await(self) -> None:
        if self.awaits_left is not None and not self.is_dead:
            self.awaits_left -= 1
            if self.awaits_left <= 0:
                self.kill()

    def kill(self) -> None:
        """Send SIGKILL: no coroutine is ever resumed. Each is closed, as the kernel frees descriptors and locks."""
        if not self.is_running:
            return
        self.on_kill(self)
        self.is_dead = True
        for close in self._handles:
            close()
        contextvars.copy_context().run(self._close_all)
        for task in self._tasks:
            task.cancel()
        self.coroutines.clear()
        self._tasks.clear()

    def _close_all(self) -> None:
        _current.set(self)
        for coroutine in self.coroutines:
            while getattr(coroutine, "cr_frame", None) is not None:
                with contextlib.suppress(KilledError, RuntimeError):  # "ignored GeneratorExit": it awaited
                    coroutine.close()


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine of a process that may be killed at each of its awaits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], process: Process) -> None:
        self._coroutine, self._process = coroutine, process

    def send(self, value: Any) -> Any:
        if self._process.is_dead:
            raise asyncio.CancelledError
        waits_for = self._coroutine.send(value)
        self._process.count_await()
        return waits_for

    def throw(self, *error: Any) -> Any:
        if self._process.is_dead:
            raise asyncio.CancelledError
        waits_for = self._coroutine.throw(*error)
        self._process.count_await()
        return waits_for

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self


class SimulatedLoop(VirtualTimeLoop):
    """A loop on which `delay_s` says how long the next disk operation takes."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        super().__init__()
        self._delay_s = delay_s
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(_report)

    def _make_task(self, loop: Any, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        process = _current.get()
        if process is None:
            return asyncio.Task(coroutine, loop=loop, **more)
        return process.make_task(coroutine, loop, **more)

    def run_in_executor(self, _: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run the function. As in a thread, it continues if its caller stops waiting, but not if its process is
        killed.
        """
        process, future = current(), self.create_future()

        def work() -> None:
            if process.is_dead:
                return
            try:
                result = function(*arguments)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
                return
            if not future.done():
                future.set_result(result)
            elif hasattr(result, "close"):
                result.close()

        self.call_later(self._delay_s(), work)
        return future


def _report(loop: asyncio.AbstractEventLoop, facts: dict[str, Any]) -> None:
    """Ignore one error: an asynchronous generator that was killed midway cannot be closed before Python 3.13."""
    if "asynchronous generator" not in str(facts.get("exception")):
        loop.default_exception_handler(facts)
