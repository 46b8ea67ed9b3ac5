"""How much comes from the store at once: little while the cores bound it, more while it waits for the network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Protocol

# A lane that brings less than this per second waits for the network rather than for a core.
SLOW_BYTES_PER_S = 200 << 20
# So much time, of all lanes together, says something of their rate: connecting alone takes each some 10 ms.
LOOK_S = 0.5
# A request takes as much CPU as so many bytes, whatever it brings.
REQUEST_BYTES = 400 << 10
# How often a lane tells.
TELL_S = 0.005


class Brought(Protocol):
    """Takes the size of every slice, in the thread that receives it, and REQUEST_BYTES for every answer."""

    def __call__(self, size_bytes: int, *, is_last: bool = False) -> None: ...


class Lanes:
    """Admits ranges, and series of small files; `most` is the caller's limit. Belongs to the loop in which it was made.

    Threads beyond one more than there are cores only take the interpreter's lock and the caches from each other:
    measured on two cores, with eight a download takes a sixth longer than with three, over TLS a third, and many small
    files take twice as long.
    """

    def __init__(self, most: int) -> None:
        self.limit = min(most, _num_cores() + 1)
        self._most = most
        self._free = asyncio.Semaphore(self.limit)
        self._loop = asyncio.get_running_loop()
        self._size_bytes = 0
        self._took_s = 0.0

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        async with self._free:
            yield

    def watch(self) -> Brought:
        """Begins a range, or a series of small files."""
        told_at, brought_bytes = time.monotonic(), 0

        def brought(size_bytes: int, *, is_last: bool = False) -> None:
            nonlocal told_at, brought_bytes
            brought_bytes += size_bytes
            took_s = time.monotonic() - told_at
            if took_s >= TELL_S or is_last:
                self._loop.call_soon_threadsafe(self.note, brought_bytes, took_s)
                told_at, brought_bytes = told_at + took_s, 0

        return brought

    def note(self, size_bytes: int, took_s: float) -> None:
        """A lane has brought this much in this time."""
        self._size_bytes += size_bytes
        self._took_s += took_s
        if self._took_s < LOOK_S:
            return
        if self._size_bytes < SLOW_BYTES_PER_S * self._took_s:
            limit, self.limit = self.limit, min(self._most, 2 * self.limit)
            for _ in range(limit, self.limit):
                self._free.release()
        self._size_bytes, self._took_s = 0, 0.0


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
