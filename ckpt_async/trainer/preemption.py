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
from typing import Any, Protocol

from ckpt_async.errors import UploaderClosedError

logger = logging.getLogger(__name__)

# A main thread in native code (a collective, say) runs no signal handler: then the process is ended without it.
END_ANYWAY_S = 1.0


class Flushes(Protocol):
    """What is flushed: an `Uploader`."""

    def flush(self, timeout_s: float) -> Any: ...


def flush_on_sigterm(uploader: Flushes, budget_s: float) -> Callable[[], None]:
    """Install a SIGTERM handler that flushes `uploader`, and return what puts the old one back.

    A handler of the user's own runs at once, as before; the flush goes on beside it, and the process ends when the
    user's code ends it. Without one, the process stays alive for at most `budget_s` (less if everything is in the
    store sooner) and is then ended by the same signal.

    The handler itself takes no lock and waits for nothing: it may interrupt the main thread anywhere. Call from the
    main thread; what is returned may be called from any.
    """
    before = signal.getsignal(signal.SIGTERM)
    ends_process = before in (
        signal.SIG_DFL,
        None,
    )  # None: C code's handler, which cannot be called from here
    pid = os.getpid()
    has_begun, has_ended, is_undone = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        try:
            report = uploader.flush(budget_s)
            logger.warning("sigterm_flushed report=%s", report)
        except UploaderClosedError:
            pass  # a moment ago: what was left then is said
        except Exception:
            logger.exception("sigterm_flush_failed; the journal has what is left")
        has_ended.set()
        if ends_process:
            os.kill(os.getpid(), signal.SIGTERM)  # `handle` ends the process, unless the main thread is stuck
            threading.Event().wait(END_ANYWAY_S)
            os._exit(128 + signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        # A dataloader worker inherits the handler when it is forked, but has nothing to flush.
        is_over = has_ended.is_set() or is_undone.is_set() or os.getpid() != pid
        if is_over and ends_process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if not is_over and not has_begun.is_set():
            has_begun.set()
            threading.Thread(target=work, name="ckpt-async-sigterm", daemon=True).start()
        if callable(before):
            before(number, frame)

    def undo() -> None:
        if has_begun.is_set():
            return  # the process is ending
        is_undone.set()
        is_main = threading.current_thread() is threading.main_thread()  # only it may set signal handlers
        if is_main and signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    signal.signal(signal.SIGTERM, handle)
    return undo
