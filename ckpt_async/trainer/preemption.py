"""SIGTERM with a time budget: the node is about to go away, and the newest complete checkpoint should not go with
it.

While the process lives, uploading continues by itself. A handler can add two things: the order (newest complete
checkpoint first) and, if nobody else handles the signal, keeping the process alive until the budget is used up.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ckpt_async.errors import UploaderClosedError
from ckpt_async.trainer import at_exit

logger = logging.getLogger(__name__)

# A main thread that is in native code (a collective, for example) runs no signal handler; the process is then
# ended without it.
END_ANYWAY_S = 1.0


Flush = Callable[[float], Any]


def flush_on_sigterm(flush: Flush, budget_s: float) -> Callable[[], None]:
    """Install a SIGTERM handler that calls `flush` with the budget, and return a function that restores the old
    handler. The uploaders of a process, one for each kind of checkpoints, share a handler and are flushed at the
    same time.

    A handler of the user's own runs at once, as before; the flush runs beside it, and the process ends when the
    user's code ends it. Without one, the process stays alive for at most `budget_s` (less if everything is in the
    store sooner) and is then ended by the same signal.

    The handler itself takes no lock and waits for nothing, because it may interrupt the main thread anywhere. Call
    this from the main thread; the returned function may be called from any thread.
    """
    handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if not isinstance(handler, _Handler) or not handler.may_take_more:
        handler = _Handler()
        signal.signal(signal.SIGTERM, handler.handle)
    return handler.add(flush, budget_s)


class _Handler:
    """The handler that was installed before, and what is flushed beside it."""

    def __init__(self) -> None:
        self._before = signal.getsignal(signal.SIGTERM)
        # None: a handler of C code, which cannot be called from here.
        self._ends_process = self._before in (signal.SIG_DFL, None)
        self._pid = os.getpid()
        self._flushed: dict[object, tuple[Flush, float]] = {}
        self._has_begun, self._has_ended = threading.Event(), threading.Event()

    @property
    def may_take_more(self) -> bool:
        return self._pid == os.getpid() and not self._has_begun.is_set()

    def add(self, flush: Flush, budget_s: float) -> Callable[[], None]:
        """Add something to flush, and return a function that removes it again."""
        token = object()
        self._flushed[token] = flush, budget_s
        return lambda: self._remove(token)

    def _remove(self, token: object) -> None:
        if self._has_begun.is_set():
            return  # the process is ending
        self._flushed.pop(token, None)
        # Only the main thread may set signal handlers.
        is_main = threading.current_thread() is threading.main_thread()
        if not self._flushed and is_main and signal.getsignal(signal.SIGTERM) == self.handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def handle(self, number: int, frame: FrameType | None) -> None:
        # A forked dataloader worker inherits the handler but has nothing to flush.
        is_over = self._has_ended.is_set() or not self._flushed or os.getpid() != self._pid
        if not is_over and not self._has_begun.is_set():
            self._has_begun.set()
            try:
                threading.Thread(target=self._work, name="ckpt-async-sigterm", daemon=True).start()
            except RuntimeError:  # there are too many, or none may start at exit (Python 3.12.0 and 3.12.1)
                self._has_ended.set()
                is_over = not at_exit.is_closing()  # which uploads the same, in another order
        if is_over and self._ends_process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if callable(self._before):
            self._before(number, frame)

    def _work(self) -> None:
        flushing = [
            threading.Thread(target=_flush, args=each, daemon=True) for each in self._flushed.values()
        ]
        for each in flushing:
            each.start()
        for each in flushing:
            each.join()
        self._has_ended.set()
        if self._ends_process:
            os.kill(os.getpid(), signal.SIGTERM)  # `handle` ends the process, unless the main thread is stuck
            threading.Event().wait(END_ANYWAY_S)
            os._exit(128 + signal.SIGTERM)


def _flush(flush: Flush, budget_s: float) -> None:
    try:
        report = flush(budget_s)
        logger.warning("sigterm_flushed report=%s", report)
    except UploaderClosedError:
        pass  # it was closed a moment ago, and has logged what was left
    except Exception:
        logger.exception("sigterm_flush_failed; the journal keeps what is left")
