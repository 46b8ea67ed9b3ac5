"""How every store request is made: admission, deadline, stall watchdog, retries, accounting.

The one place for each of these rules. The SDK's own retries are off: two layers would multiply.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import tenacity

from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.interface import Store
from ckpt_async.transfer import concurrency
from ckpt_async.transfer.concurrency import Concurrency

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Receipts, decisions and latest never queue behind shards: a lane of their own (restic exempts its lock
# files from the connection limit for the same reason).
CONTROL_REQUESTS = 16
# A wrong checksum is a broken wire or a broken client; a few attempts tell which.
MAX_CHECKSUM_ATTEMPTS = 5
# A probe is a handful of small requests; without a deadline a peer that falls silent holds them for ever (rule R14).
OPEN_ATTEMPT_S = 30.0
# How often at most a thread tells the event loop that it gets on: seldom enough to cost nothing.
TELL_S = 0.1
# A store that fails for less than this is not worth a line in the log.
QUIET_OUTAGE_S = 5.0


async def open_patiently(store: Store, timeout_s: float, *, is_read_only: bool = False) -> None:
    """Open the store, waiting out a short outage; what waiting cannot heal is raised at once."""
    patient = {FailureReason.THROTTLED, FailureReason.TRANSIENT, FailureReason.TIMEOUT}
    deadline = time.monotonic() + timeout_s
    pause_s, has_warned = 0.2, False
    while True:
        try:
            async with asyncio.timeout(OPEN_ATTEMPT_S):
                return await store.open(is_read_only=is_read_only)
        except (StoreError, TimeoutError) as error:
            if not isinstance(error, StoreError):
                message = f"no answer within {OPEN_ATTEMPT_S:.0f} s"
                error = StoreError(message, reason=FailureReason.TIMEOUT, operation="open")
            if error.reason not in patient or time.monotonic() + pause_s > deadline:
                raise error from None
            if not has_warned:
                has_warned = True
                logger.warning(
                    "store_not_opened url=%s trying_for_s=%.0f error=%s; it is tried again",
                    store.url,
                    timeout_s,
                    error,
                )
        await asyncio.sleep(pause_s)
        pause_s = min(5.0, pause_s * 2)


class Bandwidth:
    """A token bucket that may go into debt: whoever takes more than is there waits until it is paid back, so one
    slice larger than the bucket needs no special case. It holds a tenth of a second's worth.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s  # 0: no cap
        self._free = self._burst = bytes_per_s / 10
        self._counted_at = float("-inf")

    @property
    def is_capped(self) -> bool:
        return self._bytes_per_s > 0

    def reserve(self, size_bytes: int, now: float) -> float:
        """Take `size_bytes` and return for how many seconds the taker must wait before it sends them."""
        if not self._bytes_per_s:
            return 0.0
        self._free = min(self._burst, self._free + max(0.0, now - self._counted_at) * self._bytes_per_s)
        self._counted_at = now
        self._free -= size_bytes
        return max(0.0, -self._free / self._bytes_per_s)

    def give_back(self, size_bytes: int) -> None:
        """What was reserved is not sent after all."""
        self._free = min(self._burst, self._free + size_bytes)


class Progress:
    """Told of every byte that moves; keeps the attempt's stall deadline ahead of it."""

    def __init__(
        self, scope: asyncio.Timeout, deadline: float, stall_timeout_s: float, bandwidth: Bandwidth
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.moved_at: float | None = None
        self._scope, self._deadline, self._stall_timeout_s = scope, deadline, stall_timeout_s
        self._bandwidth = bandwidth
        self._tell_every_s = min(TELL_S, stall_timeout_s / 4)
        self._tell_at = time.monotonic() + self._tell_every_s

    async def may_send(self, size_bytes: int) -> None:
        """Wait until the bandwidth cap lets this many more bytes go. Being held back is not a stall."""
        held_s = self._bandwidth.reserve(size_bytes, self._loop.time())
        if held_s > 0 and not self._scope.expired():
            self._deadline += held_s
            self._scope.reschedule(min(self._deadline, self._loop.time() + held_s + self._stall_timeout_s))
            try:
                await asyncio.sleep(held_s)
            except BaseException:
                self._bandwidth.give_back(size_bytes)  # or those that go on would pay for it
                raise

    @property
    def is_paced(self) -> bool:
        """Whether a bandwidth cap may make `may_send` wait."""
        return self._bandwidth.is_capped

    def moved_in_thread(self, *, is_last: bool = False) -> None:
        """`moved`, for a worker thread, which may call it for every slice: the event loop is told now and then, and of
        the last one.
        """
        now = time.monotonic()
        if is_last or now >= self._tell_at:
            self._tell_at = now + self._tell_every_s
            self._loop.call_soon_threadsafe(functools.partial(self.moved, is_last=is_last))

    def moved(self, *, is_last: bool = False) -> None:
        """Bytes moved. After the last one only the overall deadline counts: the store may need time."""
        self.moved_at = self._loop.time()
        if not self._scope.expired():
            stalled_at = self.moved_at + self._stall_timeout_s
            self._scope.reschedule(self._deadline if is_last else min(self._deadline, stalled_at))


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


class Lane:
    """Admission by number. The number adapts (see `concurrency`); owners take turns, so that a rank with 10,000 shards
    does not keep those that share its engine waiting.
    """

    def __init__(self, start: int, most: int) -> None:
        self.concurrency = Concurrency(limit=start, most=max(start, most))
        self._running = 0
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}  # in the order of their turns
        self.have_more: set[int] = set()  # owners that would ask for more if more were let in

    @asynccontextmanager
    async def hold(self, owner: int) -> AsyncIterator[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def finished(self, size_bytes: int, began_s: float, now_s: float) -> None:
        self.concurrency = concurrency.finished(
            self.concurrency,
            size_bytes=size_bytes,
            is_waited_for=bool(self._waiting or self.have_more),
            began_s=began_s,
            now_s=now_s,
        )

    def throttled(self, began_s: float, now_s: float) -> None:
        self.concurrency = concurrency.throttled(self.concurrency, began_s=began_s, now_s=now_s)

    def _leave(self) -> None:
        self._running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._running < self.concurrency.limit:
            owner, turns = next(iter(self._waiting.items()))
            del self._waiting[owner]
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind the others
            if not turn.done():
                self._running += 1
                turn.set_result(None)


class ByteBudget:
    """Admission by bytes. One item larger than the whole budget is let in when nothing else is."""

    def __init__(self, size_bytes: int) -> None:
        self._free = self._size_bytes = size_bytes
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        size_bytes = min(size_bytes, self._size_bytes)
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= size_bytes)
            self._free -= size_bytes
        try:
            yield
        finally:
            self._free += size_bytes
            async with self._changed:
                self._changed.notify_all()


class Requests:
    """Makes requests of one store for one engine. Belongs to one event loop.

    `is_patient`: whether refused credentials and a full or read-only disk are tried again, because they may be rotated
    in and freed. Where someone waits for the answer they are rather wrong. `silence_s`: how long a bulk request is
    tried again while not a byte of it moves; `upload_timeout_s` bounds it in any case.
    """

    def __init__(
        self,
        settings: Settings,
        observer: Observer,
        store_url: str,
        *,
        is_patient: bool = True,
        silence_s: float = math.inf,
    ) -> None:
        self._is_patient, self._silence_s = is_patient, silence_s
        self._settings, self._observer, self._store_url = settings, observer, store_url
        self._control = asyncio.Semaphore(CONTROL_REQUESTS)
        self._bulk = Lane(settings.num_concurrent_uploads, settings.max_concurrent_uploads)
        self._owner = 0
        self._bytes = ByteBudget(settings.max_inflight_bytes)
        self._bandwidth = Bandwidth(settings.max_bytes_per_s)
        self._failing_since: float | None = None
        self._answered_at = -math.inf
        self._has_warned = False

    def of(self, owner: int, observer: Observer) -> Requests:
        """The same budgets for another owner, who is told of its own requests: they take turns."""
        other = copy.copy(self)
        other._owner, other._observer = owner, observer  # noqa: SLF001  its own
        return other

    def pausing_at_most(self, pause_s: float) -> Requests:
        """The same budgets, with shorter back-off: for the few requests whose silence others read something into."""
        other = copy.copy(self)
        retry_max_s = min(pause_s, self._settings.retry_max_s)
        other._settings = replace(self._settings, retry_max_s=retry_max_s)  # noqa: SLF001  its own
        return other

    @property
    def concurrency(self) -> int:
        """How many requests may carry shard bytes at once, now."""
        return self._bulk.concurrency.limit

    def has_more(self, has_more: bool) -> None:
        """Whether the owner would make more requests at once: only then is `concurrency` what bounds the rate."""
        (self._bulk.have_more.add if has_more else self._bulk.have_more.discard)(self._owner)

    async def control(self, operation: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make a small request, again and again until it succeeds or `upload_timeout_s` is over.

        Raises the last StoreError; at once if it is not one that another attempt may heal.
        """

        async def once() -> T:
            async with self._control, asyncio.timeout(self._settings.request_timeout_s):
                return await attempt()

        return await self._persist(operation, once)

    async def bulk(self, operation: str, size_bytes: int, attempt: Callable[[Progress], Awaitable[T]]) -> T:
        """Make a request that carries shard bytes, within the budgets of requests and bytes.

        Each attempt has a deadline that grows with its size and ends early when no byte moves (rule R14:
        aiobotocore's own read timeout is not armed while a body is being written).
        """
        silence = Silence()
        once = functools.partial(silence.attempted, attempt)
        return await self._persist(operation, lambda: self._admitted(size_bytes, once), silence)

    async def bulk_many(
        self,
        operation: str,
        num_requests: int,
        size_bytes: int,
        attempt: Callable[[Progress, Series], Awaitable[None]],
    ) -> None:
        """Make a series of small requests one after the other, `size_bytes` in all, as one within the budgets. Once:
        for what was not answered, the caller makes requests of their own.

        Raises the StoreError that has ended the series.
        """
        durations_s: list[float] = []

        async def once(progress: Progress) -> None:
            series = Series(progress, durations_s)
            try:
                await attempt(progress, series)
            except BaseException:
                series.broke()
                raise

        try:
            await self._heeded(operation, lambda: self._admitted(size_bytes, once, num_requests))
        finally:
            self._observer.requests_finished(operation, durations_s)

    async def _admitted(
        self, size_bytes: int, attempt: Callable[[Progress], Awaitable[T]], num_requests: int = 1
    ) -> T:
        settings, loop = self._settings, asyncio.get_running_loop()
        async with self._bulk.hold(self._owner), self._bytes.hold(size_bytes):
            began = loop.time()
            deadline = began + num_requests * settings.request_timeout_s
            deadline += size_bytes / settings.minimum_rate_bytes_per_s
            try:
                async with asyncio.timeout_at(min(deadline, began + settings.stall_timeout_s)) as scope:
                    progress = Progress(scope, deadline, settings.stall_timeout_s, self._bandwidth)
                    result = await attempt(progress)
            except StoreError as error:
                if error.reason is FailureReason.THROTTLED:
                    self._bulk.throttled(began, loop.time())
                raise
            self._bulk.finished(size_bytes, began, loop.time())
            return result

    async def _persist(
        self, operation: str, once: Callable[[], Awaitable[T]], silence: Silence | None = None
    ) -> T:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.upload_timeout_s
        backoff = tenacity.wait_random_exponential(
            multiplier=self._settings.retry_initial_s, max=self._settings.retry_max_s
        )

        def is_final(state: tenacity.RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, StoreError) and error.reason is FailureReason.CHECKSUM:
                return state.attempt_number >= MAX_CHECKSUM_ATTEMPTS
            now = loop.time()
            next_at = now + state.upcoming_sleep
            return now >= give_up_at or (silence is not None and self._is_silent(silence, error, next_at))

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(self._may_heal),
            wait=backoff,
            stop=is_final,
            sleep=asyncio.sleep,
            reraise=True,
        )
        return await retrying(self._observed, operation, once)

    def _is_silent(self, silence: Silence, error: BaseException | None, next_at: float) -> bool:
        """Whether a request will have been without a byte for too long when it is made again. A store that is busy with
        others will come to it; one that refuses just this one will not.
        """
        if silence.since is None:
            return False
        is_refused = isinstance(error, StoreError) and error.reason in (
            FailureReason.AUTH,
            FailureReason.DISK,
        )
        since = silence.since if is_refused else max(silence.since, self._answered_at)
        return next_at - since >= self._silence_s

    def _may_heal(self, error: BaseException) -> bool:
        if not isinstance(error, StoreError) or not error.reason.is_retryable:
            return False
        return self._is_patient or error.reason not in (FailureReason.AUTH, FailureReason.DISK)

    async def _observed(self, operation: str, once: Callable[[], Awaitable[T]]) -> T:
        """One attempt, its time measured."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            return await self._heeded(operation, once)
        finally:
            self._observer.requests_finished(operation, [loop.time() - started])

    async def _heeded(self, operation: str, once: Callable[[], Awaitable[T]]) -> T:
        """Its error is classified, the store's health noted."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            result = await once()
        except TimeoutError:
            error = StoreError(
                f"no answer or no progress within {loop.time() - started:.1f} s",
                reason=FailureReason.TIMEOUT,
                operation=operation,
            )
            self._failed(error)
            raise error from None
        except StoreError as error:
            self._failed(error)
            raise
        self._succeeded()
        return result

    def _failed(self, error: StoreError) -> None:
        if error.reason in {FailureReason.PRECONDITION, FailureReason.NOT_FOUND}:
            return  # an answer, not a failure; who asked decides
        self._observer.attempt_failed(error.reason)
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            self._failing_since = now
        elif not self._has_warned and now - self._failing_since >= QUIET_OUTAGE_S:
            self._has_warned = True
            logger.warning(
                "store_failing url=%s for_s=%.0f error=%s; it is tried again",
                self._store_url,
                now - self._failing_since,
                error,
            )

    def _succeeded(self) -> None:
        if self._has_warned and self._failing_since is not None:
            failed_s = asyncio.get_running_loop().time() - self._failing_since
            logger.info("store_recovered url=%s after_s=%.0f", self._store_url, failed_s)
        self._failing_since, self._has_warned = None, False
        self._answered_at = asyncio.get_running_loop().time()
