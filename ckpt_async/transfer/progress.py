"""The progress of requests that carry shard bytes: the stall watchdog (rule R14), and the progress of a series."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from ckpt_async.core.settings import Settings
from ckpt_async.stores.interface import BodyWriter
from ckpt_async.transfer.budgets import Budgets

T = TypeVar("T")

# A late attempt goes on if this fraction of its bytes has arrived in the time allowed for all of them. On a thin link
# shared by many requests, restarting all of them would mean restarting for ever.
GETS_ON = 1 / 8
# How many times the time allowed for its own bytes a request may wait for its answer while others' bytes are under way.
# The limit is for a store that takes all bytes and then falls silent.
LONGEST_ANSWER = 4
# How often what the kernel knows of the bytes is checked, if an attempt takes long; four times per stall at least.
LOOK_S = 5.0


class Progress:
    """The watchdog of one attempt, as a context manager around it, which ends it by a TimeoutError.

    It is told of every byte that moves, and puts off the attempt's stall deadline accordingly.

    A worker thread reports without waking the event loop, because every wake-up takes the GIL from training. The loop
    is woken only if the attempt must end earlier than the timer is set for.
    """

    def __init__(self, size_bytes: int, num_requests: int, settings: Settings, budgets: Budgets) -> None:
        self._loop = asyncio.get_running_loop()
        self._size_bytes, self._settings, self._budgets = size_bytes, settings, budgets
        self._stall_timeout_s = settings.stall_timeout_s
        self._allowed_s = num_requests * settings.request_timeout_s
        self._allowed_s += size_bytes / settings.minimum_rate_bytes_per_s
        self.began_s = self._loop.time()
        self._deadline = self.began_s + self._allowed_s
        # When to end. The timer is set for that time or earlier: a new timer for every byte that moves would cost more
        # than the bytes.
        self._ends_at = min(self._deadline, self.began_s + self._stall_timeout_s)
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self.moved_at: float | None = None
        self.moved_bytes = 0  # to or from the kernel
        self._writer: BodyWriter | None = None
        self._acknowledged_before: int | None = None  # by its peer, when the body began
        self._queued_bytes = 0  # as last seen, once all have moved
        # `moved_at` and the acknowledged bytes, when last checked.
        self._seen: tuple[float | None, int | None] = (-math.inf, None)
        self._arrived_s = math.inf  # when the last byte arrived
        self._arrived_bytes_then = 0  # at the previous deadline
        self._is_all_moved = self.is_too_slow = self.is_late = False
        self._scope, self._is_over = asyncio.timeout(None), False
        self._ahead_s = self._loop.time() - time.monotonic()

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._set_timer()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, traceback)

    def sends_through(self, writer: BodyWriter) -> None:
        """Note what the body is written to. Called in the worker thread, before the first byte."""
        self._acknowledged_before, self._writer = writer.acknowledged_bytes(), writer

    def _acknowledged_bytes(self) -> int | None:
        """Return how many of the body's bytes have reached the other side; None if that is not known."""
        before = self._acknowledged_before
        now = self._writer.acknowledged_bytes() if self._writer is not None else None
        return None if before is None or now is None else now - before

    def _bytes_in_queue(self) -> int:
        """Return how many have not reached the other side yet. On a link that many requests share, it takes minutes to
        empty the kernel's buffers of one.
        """
        return self._writer.queued_bytes() if self._writer is not None else 0

    def _all_answered_s(self) -> float:
        """Return how long the store may take for the bytes of all requests under way. A proxy may have accepted all of
        them at once and be forwarding them slowly.
        """
        all_s = self._budgets.bytes.held_bytes / self._settings.minimum_rate_bytes_per_s
        return self._settings.request_timeout_s + all_s

    async def may_send(self, size_bytes: int) -> None:
        """Wait until the bandwidth cap lets this many more bytes go. Being held back is not a stall."""
        held_s = self._budgets.bandwidth.reserve(size_bytes, self._loop.time())
        if held_s > 0:
            self._held(held_s)
            try:
                await asyncio.sleep(held_s)
            except BaseException:
                self._budgets.bandwidth.give_back(size_bytes)  # otherwise the other requests would pay for it
                raise

    def may_send_in_thread(self, size_bytes: int, wait: Callable[[float], None]) -> None:
        """Do the same as `may_send`, in a worker thread that waits by calling `wait`."""
        self.moved_bytes += size_bytes
        held_s = self._budgets.bandwidth.reserve(size_bytes, self._now_in_thread())
        if held_s > 0:
            self._loop.call_soon_threadsafe(self._held, held_s)
            try:
                wait(held_s)
            except BaseException:
                self._budgets.bandwidth.give_back(size_bytes)
                raise

    def not_sent(self, size_bytes: int) -> None:
        """Report that so much less was sent than `may_send` allowed."""
        self.moved_bytes -= size_bytes
        self._budgets.bandwidth.give_back(size_bytes)

    def _held(self, held_s: float) -> None:
        self._deadline += held_s
        self._ends_at = min(self._deadline, self._loop.time() + held_s + self._stall_timeout_s)
        if self._ends_at < self._rings_at:
            self._set_timer()

    def moved_in_thread(self, *, is_last: bool = False) -> None:
        """Do the same as `moved`, in a worker thread."""
        self._moved(self._now_in_thread(), is_last)
        if self._ends_at < self._rings_at:
            self._loop.call_soon_threadsafe(self._set_timer)

    def moved(self, *, is_last: bool = False) -> None:
        """Report that bytes have moved.

        After the last one, the store has at least as long to answer as was allowed for the whole attempt, because what
        the kernel has taken may still be on its way.
        """
        self._moved(self._loop.time(), is_last)
        if self._ends_at < self._rings_at:
            self._set_timer()

    def _moved(self, now: float, is_last: bool) -> None:
        self.moved_at, self._is_all_moved = now, is_last
        self._arrived_s = now if is_last else math.inf
        stalls_at, answers_by = now + self._stall_timeout_s, now + self._allowed_s
        self._ends_at = max(self._deadline, answers_by) if is_last else min(self._deadline, stalls_at)

    def _now_in_thread(self) -> float:
        """Return the time by the loop's clock.

        uvloop's clock stands still while the loop sleeps; a simulated one jumps.
        """
        return max(self._loop.time(), time.monotonic() + self._ahead_s)

    def begin_again(self) -> None:
        """End the attempt, because another connection will be faster."""
        self.is_too_slow = True
        self._end()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_over:
            may_look = self._queued_bytes or not self._is_all_moved
            looks_at = self._loop.time() + min(LOOK_S, self._stall_timeout_s / 4) if may_look else math.inf
            self._rings_at = min(self._ends_at, looks_at)  # read once: a thread may change `_ends_at`
            self._timer = self._loop.call_at(self._rings_at, self._ring)

    def _ring(self) -> None:
        now = self._loop.time()
        if self._is_all_moved:
            self._look_at_queue(now)
        else:
            self._look_amid_body(now)
        if self._ends_at > self._rings_at:
            self._set_timer()
            return
        self.is_late = self._ends_at >= self._deadline and self.moved_bytes > 0
        has_arrived = self._is_all_moved and not self._queued_bytes
        answers_s = min(LONGEST_ANSWER * self._allowed_s, self._all_answered_s())
        if has_arrived and self._arrived_s + answers_s > self._rings_at:
            self._ends_at = self._arrived_s + answers_s
            self._set_timer()
        elif self.is_late and not has_arrived and self._gets_on():
            self._arrived_bytes_then = self.arrived_bytes()
            self._deadline = max(self._deadline, self._rings_at) + self._allowed_s
            self._ends_at = min(self._deadline, (self.moved_at or self.began_s) + self._stall_timeout_s)
            self._set_timer()
        else:
            self._end()

    def _look_at_queue(self, now: float) -> None:
        """Check the kernel's queue after all bytes have been handed over.

        As long as it shrinks, bytes still move; once all have arrived, the store's time to answer begins.
        """
        before, self._queued_bytes = self._queued_bytes, self._bytes_in_queue()
        if self._queued_bytes and self._queued_bytes != before:
            self.moved_at = now
        if self._queued_bytes:
            self._arrived_s = math.inf
            assert self.moved_at is not None
            self._ends_at = min(self._deadline, self.moved_at + self._stall_timeout_s)
        elif before:
            self._arrived_s, self._ends_at = now, now + self._allowed_s

    @property
    def waited_s(self) -> float:
        """How long the request has waited for its answer since all its bytes have arrived."""
        return max(0.0, self._loop.time() - self._arrived_s)

    def _look_amid_body(self, now: float) -> None:
        """Check whether bytes still arrive although nothing is reported: on a slow link, one system call may take long
        to hand over a large piece. (The length of the kernel's queue does not tell: it is filled up to the same length
        again.)
        """
        (moved_at, before), acknowledged = self._seen, self._acknowledged_bytes()
        is_known = before is not None and acknowledged is not None
        if is_known and moved_at == self.moved_at and acknowledged != before:
            self.moved_at = now
            self._ends_at = min(self._deadline, now + self._stall_timeout_s)
        self._seen = self.moved_at, acknowledged

    def arrived_bytes(self) -> int:
        """Return how many bytes have reached the other side (or this one), as far as known."""
        acknowledged = self._acknowledged_bytes()
        if acknowledged is None:
            return self.moved_bytes - self._bytes_in_queue()
        return min(acknowledged, self.moved_bytes)  # over TLS, somewhat more is sent than the body has

    def _gets_on(self) -> bool:
        return self.arrived_bytes() - self._arrived_bytes_then >= GETS_ON * self._size_bytes

    def how_far(self) -> str:
        """Return, for an error message, how far the attempt came; "" if no bytes have moved, or all of them."""
        took_s, moved_bytes = self._loop.time() - self.began_s, self.moved_bytes - self._queued_bytes
        moved = f"only {moved_bytes} of {self._size_bytes} bytes moved within {took_s:.1f} s"
        return moved if 0 < moved_bytes < self._size_bytes else ""

    def _end(self) -> None:
        if not self._is_over and not self._scope.expired():
            self._scope.reschedule(self._loop.time())


class Silence:
    """The time since when no byte of one request has moved, over all its attempts."""

    def __init__(self) -> None:
        self.since: float | None = None

    async def attempted(self, attempt: Callable[[Progress], Awaitable[T]], progress: Progress) -> T:
        """Make an attempt. The time that the request waited before its first attempt does not count as silence."""
        began = asyncio.get_running_loop().time()
        self.since = began if self.since is None else self.since
        try:
            return await attempt(progress)
        finally:
            self.since = self.since if progress.moved_at is None else progress.moved_at


@dataclass
class Answers:
    """How long each request of a series took, the last of which may have failed, and the bytes of those answered."""

    durations_s: list[float] = field(default_factory=list)
    moved_bytes: int = 0


class Series:
    """The progress of requests that are made one after the other, as reported by their maker, in any thread."""

    def __init__(self, progress: Progress, answers: Answers) -> None:
        self._progress, self._answers = progress, answers
        self._began_s: float | None = None

    def begins(self) -> None:
        self._began_s = time.monotonic()

    def answered(self, size_bytes: int) -> None:
        """Report that a request for this many bytes got its answer and the next one begins."""
        self._ended()
        self._answers.moved_bytes += size_bytes
        self._progress.moved_in_thread()

    def broke(self) -> None:
        """Report that the request under way, if any, was refused or broken off."""
        if self._began_s is not None:
            self._ended()

    def _ended(self) -> None:
        assert self._began_s is not None
        now = time.monotonic()
        self._answers.durations_s.append(now - self._began_s)
        self._began_s = now
