"""Triggers from outside the training loop: signal handlers, and a thread that calls a function periodically."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ckpt_async.errors import SettingsError

logger = logging.getLogger(__name__)


def on_signals(numbers: Sequence[int], action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` when one of these signals arrives, and then the handler that was installed before.

    Returns a function that restores the previous handlers, if called in the main thread. Raises SettingsError if called
    in any other thread, or if a number is not a signal.
    """
    if not numbers:
        return lambda: None
    if threading.current_thread() is not threading.main_thread():
        raise SettingsError("save_signals require that the saver is created in the main thread")
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        action()
        earlier = before[number]
        if callable(earlier):
            earlier(number, frame)

    def undo() -> None:
        if threading.current_thread() is threading.main_thread():
            for number, earlier in before.items():
                if signal.getsignal(number) is handle:
                    signal.signal(number, earlier)

    try:
        for number in numbers:
            before[number] = signal.getsignal(number)  # first: the signal may come at once
            signal.signal(number, handle)
    except (OSError, ValueError, TypeError) as error:
        undo()
        raise SettingsError(f"save_signals={list(numbers)!r}: {error}") from None
    return undo


def watch(action: Callable[[], None], period_s: float) -> Callable[[], None]:
    """Call `action` every `period_s` seconds on a thread. Returns a function that stops this after one last call.

    An exception is logged, once until another one comes, and the next call is made nevertheless.
    """
    over = threading.Event()
    logged = ""

    def act() -> None:
        nonlocal logged
        try:
            action()
        except Exception as error:  # noqa: BLE001  the next call may succeed
            if repr(error) != logged:
                logged = repr(error)
                logger.warning("saver_watch_failed error=%r", error)

    def work() -> None:
        while not over.wait(period_s):
            act()
        act()

    thread = threading.Thread(target=work, name="ckpt-async-watch", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return stop
