"""SIGTERM with a budget: the node goes away soon, and the newest complete checkpoint should not go with it.

Uploading goes on by itself while the process lives. What a handler can add is the order (the newest complete
checkpoint first) and, where nobody else handles the signal, staying alive until the budget is used.
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

logger = logging.getLogger(__name__)

# A main thread in native code (a collective, say) runs no signal handler: then the process is ended without it.
END_ANYWAY_S = 1.0


Flush = Callable[[float], Any]


def flush_on_sigterm(flush: Flush, budget_s: float) -> Callable[[], None]:
    """Install a SIGTERM handler that calls `flush` with the budget, and return what puts the old one back. The
    uploaders of a process, one for each kind of checkpoints, share a handler and are flushed at the same time.

    A handler of the user's own runs at once, as before; the flush goes on beside it, and the process ends when the
    user's code ends it. Without one, the process stays alive for at most `budget_s` (less if everything is in the
    store sooner) and is then ended by the same signal.

    The handler itself takes no lock and waits for nothing: it may interrupt the main thread anywhere. Call from the
    main thread; what is returned may be called from any.
    """
    handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if not isinstance(handler, _Handler) or not handler.may_take_more:
        handler = _Handler()
        signal.signal(signal.SIGTERM, handler.handle)
    return handler.add(flush, budget_s)


class _Handler:
    """What was there `before`, and what is flushed beside it."""

    def __init__(self) -> None:
        self._before = signal.getsignal(signal.SIGTERM)
        # None: C code's handler, which cannot be called from here
        self._ends_process = self._before in (signal.SIG_DFL, None)
        self._pid = os.getpid()
        self._flushed: dict[object, tuple[Flush, float]] = {}
        self._has_begun, self._has_ended = threading.Event(), threading.Event()

    @property
    def may_take_more(self) -> bool:
        return self._pid == os.getpid() and not self._has_begun.is_set()

    def add(self, flush: Flush, budget_s: float) -> Callable[[], None]:
        """Flush it too; returns what leaves it out again."""
        token = object()
        self._flushed[token] = flush, budget_s
        return lambda: self._remove(token)

    def _remove(self, token: object) -> None:
        if self._has_begun.is_set():
            return  # the process is ending
        self._flushed.pop(token, None)
        is_main = threading.current_thread() is threading.main_thread()  # only it may set signal handlers
        if not self._flushed and is_main and signal.getsignal(signal.SIGTERM) == self.handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def handle(self, number: int, frame: FrameType | None) -> None:
        # A dataloader worker inherits the handler when it is forked, but has nothing to flush.
        is_over = self._has_ended.is_set() or not self._flushed or os.getpid() != self._pid
        if is_over and self._ends_process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if not is_over and not self._has_begun.is_set():
            self._has_begun.set()
            threading.Thread(target=self._work, name="ckpt-async-sigterm", daemon=True).start()
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
        pass  # a moment ago: what was left then is said
    except Exception:
        logger.exception("sigterm_flush_failed; the journal has what is left")
