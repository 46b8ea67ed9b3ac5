"""The niceness of a runner process: it uses the cores that training leaves idle, or any core while somebody waits
for it.

A thread cannot lower its own niceness again (setpriority(2): RLIMIT_NICE), and threads that must answer immediately
are never niced. So only the threads that carry bytes are niced, and fresh ones replace them when the work becomes
urgent.
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

_priority: int | None = None  # of byte threads started from now on; None: the process's own priority


def set_niceness(niceness: int, *, is_waited_for: bool) -> bool:
    """Add `niceness` to that of the `BulkThreads`, from their next piece of work on, unless somebody is waiting.
    Call it from the thread that runs the event loop, which is never niced. Returns False if part of it could not be
    set, which may happen for a tenth of a second at a time.

    The kernel derives the priority of disk reads from the niceness (ioprio_set(2), IOPRIO_CLASS_NONE).
    """
    global _priority  # noqa: PLW0603  the process has one
    own = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = 0 if is_waited_for else niceness
    _priority = own + niceness if niceness else None
    # Waking this thread must not push a trainer off its core in the middle of `enqueue`.
    with contextlib.suppress(OSError):
        how = os.SCHED_OTHER if is_waited_for else os.SCHED_BATCH
        os.sched_setscheduler(0, how, os.sched_param(0))
    # Where sessions are scheduled as groups (sched(7)), the niceness of the group is what counts.
    try:
        Path("/proc/self/autogroup").write_text(str(own + niceness))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def enter_bulk_thread() -> None:
    """Set up a thread that carries bytes, as its first action."""
    if _priority is not None:
        with contextlib.suppress(OSError):  # where niceness belongs to the whole process, as in POSIX
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _priority)


class BulkThreads(ThreadPoolExecutor):
    """A thread pool for work that carries bytes; its threads have the niceness in force when the work begins.

    With `starts_at_once` all threads are started immediately. Where memory or the number of threads is limited, a
    thread that is started in the middle of the work may fail, or its start may block forever
    (`threading.Thread.start`).

    Raises OSError if the threads cannot be started.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str, *, starts_at_once: bool = False) -> None:
        # Only for its type: this base pool never starts a thread.
        super().__init__(max_workers, thread_name_prefix)
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
                    pool.submit(are_all_there.wait)  # no thread is idle, so each call starts another one
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
                with contextlib.suppress(OSError):  # running at the old priority is better than not at all
                    before, self._now = self._now, self._new()
                    before.shutdown(wait=False)  # the old threads finish what they have begun
            return self._now.submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, **more: Any) -> None:
        self._now.shutdown(wait, **more)
