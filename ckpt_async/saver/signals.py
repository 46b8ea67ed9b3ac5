"""Triggers from outside the training loop: signal handlers, and a thread that calls a function periodically."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ckpt_async.errors import SettingsError


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

    try:
        for number in numbers:
            before[number] = signal.signal(number, handle)
    except (OSError, ValueError, TypeError) as error:
        for number, earlier in before.items():
            signal.signal(number, earlier)
        raise SettingsError(f"save_signals={list(numbers)!r}: {error}") from None

    def undo() -> None:
        if threading.current_thread() is threading.main_thread():
            for number, earlier in before.items():
                if signal.getsignal(number) is handle:
                    signal.signal(number, earlier)

    return undo


def watch(action: Callable[[], None], period_s: float) -> Callable[[], None]:
    """Call `action` every `period_s` seconds on a thread. Returns a function that stops this after one last call."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(period_s):
            action()
        action()

    thread = threading.Thread(target=work, name="ckpt-async-watch", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return stop
