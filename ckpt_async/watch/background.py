"""Waits for the store while other work goes on, since the trainer rotates its checkpoints whether the store answers or
not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

# How often the work that cannot wait is done while we wait for the store.
EVERY_S = 0.5
# After a scan, the trainer has the core and the disk to itself for this many times as long.
REST = 4.0


class OutOfTimeError(Exception):
    """The watcher was told to end, and its time for finishing is over."""


class Stop(threading.Event):
    """Set when a watcher is to end; it remembers when."""

    def __init__(self) -> None:
        super().__init__()
        self._since_s: float | None = None
        self._until_s: float | None = None

    def set(self) -> None:
        if self._since_s is None:
            self._since_s = time.monotonic()
        super().set()

    def shorten(self, timeout_s: float) -> None:
        """End at most this long from now."""
        self._until_s = time.monotonic() + timeout_s

    @property
    def is_shortened(self) -> bool:
        return self._until_s is not None

    def is_over(self, timeout_s: float) -> bool:
        """Return whether it was set at least this long ago, or its shortened time is over."""
        return self._since_s is not None and self.left_s(timeout_s) <= 0

    def left_s(self, timeout_s: float) -> float:
        """Return how much time is left until then."""
        now = time.monotonic()
        left_s = timeout_s if self._since_s is None else self._since_s + timeout_s - now
        return left_s if self._until_s is None else min(left_s, self._until_s - now)


def attend(future: Future[T], do: Callable[[], None]) -> T:
    """Wait for a future, calling `do` periodically. An exception from `do` ends the waiting."""
    pause_s = EVERY_S
    while not wait({future}, timeout=pause_s).done:
        began_s = time.monotonic()
        do()
        pause_s = max(EVERY_S, REST * (time.monotonic() - began_s))
    return future.result()


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` on a thread of its own, for which nobody has to wait, not even the process at its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
