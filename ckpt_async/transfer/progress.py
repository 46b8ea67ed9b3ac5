"""How the requests that carry shard bytes get on: the stall watchdog (rule R14), and what a series of them has done."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ckpt_async.transfer.budgets import Bandwidth

T = TypeVar("T")

# An attempt that is late goes on if it has moved this part of its bytes in the time that would do for all of them: on a
# thin link that many requests share, to begin them all again would be to begin for ever.
GETS_ON = 1 / 8
# How often what is queued is looked at, once all has moved and it takes long.
LOOK_S = 5.0


class Progress:
    """Told of every byte that moves; keeps the attempt's stall deadline ahead of it. Around the attempt.

    A worker thread tells it without the event loop, whose every awakening takes the interpreter's lock from training:
    only to end earlier than the timer does is the loop woken.
    """

    def __init__(
        self,
        scope: asyncio.Timeout,
        size_bytes: int,
        allowed_s: float,
        stall_timeout_s: float,
        bandwidth: Bandwidth,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._size_bytes, self._allowed_s = size_bytes, allowed_s
        self._deadline = self._loop.time() + allowed_s
        # When to end; and a timer of that time or earlier. A new one for every byte that moves would cost more than the
        # bytes.
        self._ends_at = min(self._deadline, self._loop.time() + stall_timeout_s)
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self.moved_at: float | None = None
        self.moved_bytes = 0  # to or from the kernel
        # Of these: how many have not reached the other side yet. A link that many requests share empties the kernel's
        # buffers of one in minutes.
        self.queued_bytes: Callable[[], int] = lambda: 0
        self._queued_bytes = 0  # as last seen, once all have moved
        self.began_s = self._loop.time()
        self._arrived_bytes_then = 0  # by the deadline before
        self._is_all_moved = self.is_too_slow = self.is_late = False
        self._scope, self._stall_timeout_s = scope, stall_timeout_s
        self._bandwidth, self._is_over = bandwidth, False
        self._ahead_s = self._loop.time() - time.monotonic()

    def __enter__(self) -> None:
        self._set_timer()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    async def may_send(self, size_bytes: int) -> None:
        """Wait until the bandwidth cap lets this many more bytes go. Being held back is not a stall."""
        held_s = self._bandwidth.reserve(size_bytes, self._loop.time())
        if held_s > 0:
            self._held(held_s)
            try:
                await asyncio.sleep(held_s)
            except BaseException:
                self._bandwidth.give_back(size_bytes)  # or those that go on would pay for it
                raise

    def may_send_in_thread(self, size_bytes: int, wait: Callable[[float], None]) -> None:
        """`may_send`, for a worker thread that waits by `wait`."""
        self.moved_bytes += size_bytes
        held_s = self._bandwidth.reserve(size_bytes, self._now_in_thread())
        if held_s > 0:
            self._loop.call_soon_threadsafe(self._held, held_s)
            try:
                wait(held_s)
            except BaseException:
                self._bandwidth.give_back(size_bytes)
                raise

    def not_sent(self, size_bytes: int) -> None:
        """So much less than `may_send` allowed."""
        self.moved_bytes -= size_bytes
        self._bandwidth.give_back(size_bytes)

    def _held(self, held_s: float) -> None:
        self._deadline += held_s
        self._ends_at = min(self._deadline, self._loop.time() + held_s + self._stall_timeout_s)
        if self._ends_at < self._rings_at:
            self._set_timer()

    def moved_in_thread(self, *, is_last: bool = False) -> None:
        """`moved`, for a worker thread."""
        self._moved(self._now_in_thread(), is_last)
        if self._ends_at < self._rings_at:
            self._loop.call_soon_threadsafe(self._set_timer)

    def moved(self, *, is_last: bool = False) -> None:
        """Bytes moved. After the last one the store has as long to answer as there was for all of it: what the kernel
        has taken may still be on its way.
        """
        self._moved(self._loop.time(), is_last)
        if self._ends_at < self._rings_at:
            self._set_timer()

    def _moved(self, now: float, is_last: bool) -> None:
        self.moved_at, self._is_all_moved = now, is_last
        stalls_at, answers_by = now + self._stall_timeout_s, now + self._allowed_s
        self._ends_at = max(self._deadline, answers_by) if is_last else min(self._deadline, stalls_at)

    def _now_in_thread(self) -> float:
        """By the loop's clock: uvloop's stands still while it sleeps, a simulated one leaps."""
        return max(self._loop.time(), time.monotonic() + self._ahead_s)

    def begin_again(self) -> None:
        """End the attempt, for another connection will be faster."""
        self.is_too_slow = True
        self._end()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_over:
            looks_at = self._loop.time() + LOOK_S if self._queued_bytes else math.inf
            self._rings_at = min(self._ends_at, looks_at)  # once: a thread may move it
            self._timer = self._loop.call_at(self._rings_at, self._ring)

    def _ring(self) -> None:
        if self._is_all_moved:
            self._look_at_queue(self._loop.time())
        if self._ends_at > self._rings_at:
            self._set_timer()
            return
        self.is_late = self._ends_at >= self._deadline and self.moved_bytes > 0
        has_arrived = self._is_all_moved and not self._queued_bytes
        if self.is_late and not has_arrived and self._gets_on():
            self._arrived_bytes_then = self._arrived_bytes()
            self._deadline = max(self._deadline, self._rings_at) + self._allowed_s
            self._ends_at = min(self._deadline, (self.moved_at or self.began_s) + self._stall_timeout_s)
            self._set_timer()
        else:
            self._end()

    def _look_at_queue(self, now: float) -> None:
        """Of what has all moved: once it has arrived the store has its time to answer; until then it still moves."""
        before, self._queued_bytes = self._queued_bytes, self.queued_bytes()
        if self._queued_bytes and self._queued_bytes != before:
            self.moved_at = now
        if self._queued_bytes:
            assert self.moved_at is not None
            self._ends_at = min(self._deadline, self.moved_at + self._stall_timeout_s)
        elif before:
            self._ends_at = now + self._allowed_s

    def _arrived_bytes(self) -> int:
        return self.moved_bytes - self.queued_bytes()

    def _gets_on(self) -> bool:
        return self._arrived_bytes() - self._arrived_bytes_then >= GETS_ON * self._size_bytes

    def how_far(self) -> str:
        """It came, for an error; "" if no byte has moved."""
        took_s, moved_bytes = self._loop.time() - self.began_s, self.moved_bytes - self._queued_bytes
        moved = f"only {moved_bytes} of {self._size_bytes} bytes moved within {took_s:.1f} s"
        return moved if 0 < moved_bytes < self._size_bytes else ""

    def _end(self) -> None:
        if not self._is_over and not self._scope.expired():
            self._scope.reschedule(self._loop.time())


class Silence:
    """Since when no byte of one request has moved, over all its attempts."""

    def __init__(self) -> None:
        self.since: float | None = None

    async def attempted(self, attempt: Callable[[Progress], Awaitable[T]], progress: Progress) -> T:
        """Make an attempt. What it waited for before is no silence of the store."""
        began = asyncio.get_running_loop().time()
        self.since = began if self.since is None else self.since
        try:
            return await attempt(progress)
        finally:
            self.since = self.since if progress.moved_at is None else progress.moved_at


class Series:
    """Requests that are made one after the other, as whoever makes them tells, in any thread."""

    def __init__(self, progress: Progress, durations_s: list[float]) -> None:
        self._progress, self._durations_s = progress, durations_s
        self._began_s: float | None = None

    def begins(self) -> None:
        self._began_s = time.monotonic()

    def answered(self) -> None:
        """One got its answer; the next begins."""
        self._ended()
        self._progress.moved_in_thread()

    def broke(self) -> None:
        """The one under way, if any, was refused or broken off."""
        if self._began_s is not None:
            self._ended()

    def _ended(self) -> None:
        assert self._began_s is not None
        now = time.monotonic()
        self._durations_s.append(now - self._began_s)
        self._began_s = now
