"""Waiting for the store, and going on meanwhile: the trainer rotates its checkpoints whether it answers or not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

# How often what cannot wait is done while the store is waited for.
EVERY_S = 0.5
# After a look at the folder the trainer has the core, and the disk, for so many times as long.
REST = 4.0


class OutOfTimeError(Exception):
    """The watcher was told to end, and the time for finishing is over."""


class Stop(threading.Event):
    """Set when a watcher is to end, with the time since."""

    def __init__(self) -> None:
        super().__init__()
        self._since_s: float | None = None
        self._until_s: float | None = None

    def set(self) -> None:
        if self._since_s is None:
            self._since_s = time.monotonic()
        super().set()

    def shorten(self, timeout_s: float) -> None:
        """It is over after so long from now, at the latest."""
        self._until_s = time.monotonic() + timeout_s

    @property
    def is_shortened(self) -> bool:
        return self._until_s is not None

    def is_over(self, timeout_s: float) -> bool:
        """Whether it was set so long ago."""
        return self._since_s is not None and self.left_s(timeout_s) <= 0

    def left_s(self, timeout_s: float) -> float:
        """Until then."""
        now = time.monotonic()
        left_s = timeout_s if self._since_s is None else self._since_s + timeout_s - now
        return left_s if self._until_s is None else min(left_s, self._until_s - now)


def attend(future: Future[T], do: Callable[[], None]) -> T:
    """Wait for it, and `do` something now and then. What that raises ends the waiting."""
    pause_s = EVERY_S
    while not wait({future}, timeout=pause_s).done:
        began_s = time.monotonic()
        do()
        pause_s = max(EVERY_S, REST * (time.monotonic() - began_s))
    return future.result()


def keep_on(do: Callable[[], None], duration_s: float, stopping: Stop) -> None:
    """Do something now and then, though something else has failed: that is what is raised, whatever comes of this."""
    until_s, pause_s = time.monotonic() + duration_s, 0.0
    while (left_s := until_s - time.monotonic()) > 0 and not stopping.wait(min(left_s, pause_s)):
        began_s = time.monotonic()
        with contextlib.suppress(Exception):
            do()
        pause_s = max(EVERY_S, REST * (time.monotonic() - began_s))


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Work on a thread of its own, which nobody has to wait for, not even the process at its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
