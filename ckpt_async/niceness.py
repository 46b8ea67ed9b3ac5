"""The niceness of a runner process: it takes the cores that training leaves, and any while somebody waits for it.

A thread that has made itself nice cannot take that back (setpriority(2): RLIMIT_NICE), and whoever must answer at once
never is: so only the threads that carry bytes are nice, and others take their place when there is no time to be.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_priority: int | None = None  # of threads that carry bytes and begin from now on; None: as the process has it


def set_niceness(niceness: int, *, is_waited_for: bool) -> bool:
    """Add this to the niceness of `BulkThreads`, from their next piece of work on, unless somebody waits. Call it from
    the thread that runs the event loop, which is not nice. False if not all of it could be set, which may be so for a
    tenth of a second.

    The kernel derives the priority of disk reads from it (ioprio_set(2), IOPRIO_CLASS_NONE).
    """
    global _priority  # noqa: PLW0603  the process has one
    own = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = 0 if is_waited_for else niceness
    _priority = own + niceness if niceness else None
    with contextlib.suppress(
        OSError
    ):  # to be woken must not push a trainer off its core, in the middle of `enqueue`
        how = os.SCHED_OTHER if is_waited_for else os.SCHED_BATCH
        os.sched_setscheduler(0, how, os.sched_param(0))
    try:  # where sessions compete as groups (sched(7)), the group's counts
        Path("/proc/self/autogroup").write_text(str(own + niceness))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def enter_bulk_thread() -> None:
    """What a thread that carries bytes does first."""
    if _priority is not None:
        with contextlib.suppress(OSError):  # where niceness is the process's, as POSIX has it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _priority)


class BulkThreads(ThreadPoolExecutor):
    """At most so many threads for work that carries bytes, as nice as is wanted when the work begins.

    With `starts_at_once` all of them are there from the beginning: where memory or the number of threads is limited,
    one that is started in the middle of the work fails, or is waited for for ever (`threading.Thread.start`).

    Raises OSError if they cannot be started.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str, *, starts_at_once: bool = False) -> None:
        super().__init__(max_workers, thread_name_prefix)  # for the type only: it never starts a thread
        self._arguments = max_workers, thread_name_prefix
        self._starts_at_once = starts_at_once
        self._now_lock = threading.Lock()
        self._now, self._now_priority = self._new(), _priority

    def _new(self) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(*self._arguments, initializer=enter_bulk_thread)
        if self._starts_at_once:
            are_all_there = threading.Event()
            try:
                for _ in range(self._arguments[0]):
                    pool.submit(are_all_there.wait)  # none is idle, so each starts another
            except RuntimeError as error:
                pool.shutdown(wait=False)
                raise OSError(
                    errno.EAGAIN, "no threads can be started: too little memory, or too many"
                ) from error
            finally:
                are_all_there.set()
        return pool

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with self._now_lock:
            if self._now_priority != _priority:
                self._now_priority = _priority
                with contextlib.suppress(OSError):  # better at another's priority than not at all
                    before, self._now = self._now, self._new()
                    before.shutdown(wait=False)  # what they have begun they end
            return self._now.submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, **more: Any) -> None:
        self._now.shutdown(wait, **more)
