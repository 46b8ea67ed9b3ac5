"""A store with patience: every request is admitted, timed, retried and counted here, and nowhere else.

The SDK's own retries are off, because two layers of retries would multiply.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, TypeVar

from ckpt_async.core.model import Checksum
from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import (
    BytesBody,
    Capabilities,
    Condition,
    Enough,
    Listing,
    MultipartInfo,
    ObjectInfo,
    Sink,
    SmallGet,
    Store,
    StoredPart,
)
from ckpt_async.stores.opening import in_time
from ckpt_async.transfer.attempts import Admitted, Metered
from ckpt_async.transfer.budgets import CONTROL_REQUESTS, Budgets
from ckpt_async.transfer.concurrency import Concurrency
from ckpt_async.transfer.patience import Health, Patience
from ckpt_async.transfer.progress import Answers, Progress, Series, Silence

logger = logging.getLogger(__name__)

T = TypeVar("T")

# To open a store takes fewer requests than this one after the other, each of which has its own deadline. All together
# have this many times that: whatever falls silent would otherwise block for ever (R14).
OPENING_REQUESTS = 10
# Keys per delete request, so that the deadline of an attempt covers a single S3 request.
DELETE_BATCH = 1000

Receiver = Callable[[], AbstractAsyncContextManager[Sink]]
Got = Callable[[SmallGet, memoryview], None]


def connect(
    url: str,
    options: StoreOptions | None,
    settings: Settings,
    observer: Observer | None = None,
    *,
    is_patient: bool = True,
    silence_s: float = math.inf,
    budgets: Budgets | None = None,
) -> PatientStore:
    """Return the store of a run, not open yet, with enough connections for all requests that may be under way at once.

    Its requests share `budgets`; if none are given, the store has its own. Raises SettingsError.
    """
    options = options or StoreOptions()
    needed = max(settings.num_concurrent_uploads, settings.max_concurrent_uploads) + CONTROL_REQUESTS
    options = replace(options, max_connections=max(options.max_connections, needed))
    return PatientStore(
        open_store(url, options),
        settings,
        observer,
        is_patient=is_patient,
        silence_s=silence_s,
        budgets=budgets,
    )


class PatientStore:
    """A store whose requests are retried until they succeed, for one engine or command. Belongs to one event loop.

    A request passes through `Patience`, which makes it again, `Metered`, which accounts for each attempt, and, if it
    carries shard bytes, `Admitted`, which has it wait for its turn and watches over it.

    Every method raises the last StoreError once `upload_timeout_s` has passed, or immediately if a retry cannot help.
    `is_patient`: whether to retry refused credentials and a full or read-only disk, because new credentials may be
    rotated in and space may be freed; not where someone is waiting for the answer. `silence_s`: for how long a request
    that carries shard bytes is retried while none of its bytes move.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        observer: Observer | None = None,
        *,
        is_patient: bool = True,
        silence_s: float = math.inf,
        budgets: Budgets | None = None,
        owner: Hashable = 0,
    ) -> None:
        health = Health(store.url)
        patience = Patience(settings, health, is_patient=is_patient, silence_s=silence_s)
        admitted = Admitted(budgets or Budgets(settings), settings, owner)
        self._made_of(store, health, patience, admitted, observer or Observer())

    def _made_of(
        self, store: Store, health: Health, patience: Patience, admitted: Admitted, observer: Observer
    ) -> None:
        self._store, self._health, self._patience, self._admitted = store, health, patience, admitted
        self._metered, self._observer = Metered(observer, health, patience), observer
        self._settings, self._budgets, self._owner = admitted.settings, admitted.budgets, admitted.owner

    # The same store within the same budgets, used differently.

    def of(self, owner: Hashable, observer: Observer) -> PatientStore:
        """Return the store for another owner, whose observer is told of its own requests. Owners take turns."""
        return self._like(self._settings, observer, is_patient=self._patience.is_patient, owner=owner)

    def pausing_at_most(self, pause_s: float) -> PatientStore:
        """Return the store with a shorter back-off, for the few requests whose silence others would misinterpret."""
        settings = replace(self._settings, retry_max_s=min(pause_s, self._settings.retry_max_s))
        return self._like(settings, self._observer, is_patient=self._patience.is_patient, owner=self._owner)

    def answering_within(self, timeout_s: float) -> PatientStore:
        """Return the store without patience and giving up sooner, for requests whose answer someone is waiting for."""
        settings = replace(self._settings, upload_timeout_s=min(timeout_s, self._settings.upload_timeout_s))
        return self._like(settings, self._observer, is_patient=False, owner=self._owner)

    def _like(
        self, settings: Settings, observer: Observer, *, is_patient: bool, owner: Hashable
    ) -> PatientStore:
        return PatientStore(
            self._store,
            settings,
            observer,
            is_patient=is_patient,
            silence_s=self._patience.silence_s,
            budgets=self._budgets,
            owner=owner,
        )

    def _with(self, patience: Patience, admitted: Admitted) -> PatientStore:
        """Return the store over these wrappers, of the same health."""
        made = PatientStore.__new__(PatientStore)
        made._made_of(self._store, self._health, patience, admitted, self._observer)  # noqa: SLF001  ours
        return made

    async def from_the_start(self, attempt: Callable[[PatientStore], Awaitable[T]]) -> T:
        """Make requests, the last of which is right only while what the others have found out holds.

        `attempt` is given a store whose requests are made only once; if one of them fails, all of `attempt` is retried.
        """
        once = self._with(self._patience.once(), self._admitted)
        return await self._patience.persist(functools.partial(attempt, once))

    # --- the store -----------------------------------------------------------------------------------------

    @property
    def last_error(self) -> str:
        """The answer to the last attempt that failed; its request may have succeeded since. "": none has failed."""
        return self._health.last_error

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """The store's capabilities, known once it is open."""
        return self._store.capabilities

    async def open(self, timeout_s: float = 0.0, *, is_read_only: bool = False) -> None:
        """Open the store, waiting up to `timeout_s` for an outage to end.

        Errors that waiting cannot heal are raised immediately. See `Store.open`.
        """
        if self._store.moved not in self._budgets.bulk.movers:  # it may be opened again after a failure
            self._budgets.bulk.movers.append(self._store.moved)
        patient = {FailureReason.THROTTLED, FailureReason.TRANSIENT, FailureReason.TIMEOUT}
        timeout_each_s = self._settings.request_timeout_s
        deadline = time.monotonic() + timeout_s
        pause_s, has_warned = 0.2, False
        while True:
            try:
                opening = functools.partial(
                    self._store.open, is_read_only=is_read_only, request_timeout_s=timeout_each_s
                )
                return await in_time(opening, OPENING_REQUESTS * timeout_each_s, is_answer=False)
            except StoreError as error:
                if error.reason not in patient or time.monotonic() + pause_s > deadline:
                    raise
                if not has_warned:
                    has_warned = True
                    logger.warning(
                        "store_not_opened url=%s trying_for_s=%.0f error=%s; retrying",
                        self.url,
                        timeout_s,
                        error,
                    )
            await asyncio.sleep(pause_s)
            pause_s = min(5.0, pause_s * 2)

    async def close(self) -> None:
        """Release connections. Idempotent."""
        with contextlib.suppress(ValueError):
            self._budgets.bulk.movers.remove(self._store.moved)
        await self._store.close()

    # --- small requests: see `Store` -----------------------------------------------------------------------

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        return await self.control("get", lambda: self._store.get(key, max_size_bytes=max_size_bytes))

    async def put(self, key: str, data: bytes, condition: Condition = None) -> ObjectInfo:
        body, checksum = BytesBody(data), checksum_of(data, self.capabilities.checksum_algorithm)
        return await self.control("put", lambda: self._store.put(key, body, checksum, condition=condition))

    async def head(self, key: str) -> ObjectInfo:
        return await self.control("head", lambda: self._store.head(key))

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        return await self.control(
            "list", lambda: self._store.list(prefix, start_after=start_after, enough=enough)
        )

    async def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETE_BATCH):
            once = functools.partial(self._store.delete, keys[start : start + DELETE_BATCH])
            await self.control("delete", once)

    async def delete_if(self, key: str, etag: str) -> None:
        await self.control("delete", lambda: self._store.delete_if(key, etag))

    async def create_multipart(self, key: str) -> str:
        return await self.control("create_multipart", lambda: self._store.create_multipart(key))

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        return await self.control("list_parts", lambda: self._store.list_parts(key, upload_id))

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        return await self.control(
            "complete", lambda: self._store.complete_multipart(key, upload_id, parts, checksum, size_bytes)
        )

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        await self.control("abort_multipart", lambda: self._store.abort_multipart(key, upload_id))

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        return await self.control("list_multiparts", lambda: self._store.list_multiparts(prefix))

    async def control(self, operation: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make a small request, with retries. Small requests never wait behind shard bytes."""

        async def once() -> T:
            async with self._budgets.control, asyncio.timeout(self._settings.request_timeout_s):
                return await attempt()

        return await self._persist(operation, once)

    async def by_itself(self, operation: str, size_bytes: int, attempt: Callable[[Store], Awaitable[T]]) -> T:
        """Make a request for which the store itself moves `size_bytes`: nothing is seen of them until it answers."""
        timeout_s = self._settings.request_timeout_s + size_bytes / self._settings.minimum_rate_bytes_per_s

        async def once() -> T:
            async with asyncio.timeout(timeout_s):
                return await attempt(self._store)

        return await self._persist(operation, once)

    # --- requests that carry shard bytes -------------------------------------------------------------------

    @property
    def concurrency(self) -> int:
        """How many requests may presently carry shard bytes at once."""
        return self._budgets.bulk.concurrency.limit

    @property
    def series_length(self) -> int:
        """How many small requests should presently be assigned to one series."""
        return self._budgets.bulk.series_length()

    @property
    def longest_series(self) -> int:
        """How many small requests should at most be made in one series that takes each when its turn comes."""
        return self._budgets.bulk.longest_series()

    @property
    def link(self) -> Concurrency:
        """What is known about the link."""
        return self._budgets.bulk.concurrency

    def has_more(self, ask: Callable[[], None] | None) -> None:
        """Note whether the owner would make more requests if allowed: only then does `concurrency` limit the rate.

        `ask` is called when `concurrency` has grown; None means that the owner has no more requests.
        """
        if ask is not None:
            self._budgets.bulk.have_more[self._owner] = ask
        else:
            self._budgets.bulk.have_more.pop(self._owner, None)

    def within(self, group: Hashable) -> PatientStore:
        """Return the store for requests that carry shard bytes of this group; see `set_urgency`."""
        return self._with(self._patience, replace(self._admitted, group=group))

    def is_moving(self, group: Hashable) -> bool:
        """Return whether a request of this group is under way, or waits for its turn."""
        return self._budgets.bulk.is_moving(self._owner, group)

    def set_urgency(self, place_of: Callable[[Any], int]) -> None:
        """Have the owner's waiting requests admitted in the order of the places of their groups."""
        self._budgets.bulk.urgency[self._owner] = place_of

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[PatientStore]:
        """Take a place among the requests that carry shard bytes.

        The store that this yields makes requests in that place, one after the other; the caller can decide what to ask
        for once it has its turn.
        """
        async with self._budgets.bulk.hold(self._owner, is_for_many=True):
            yield self._with(self._patience, replace(self._admitted, has_place=True))

    async def get_range(self, key: str, offset: int, size_bytes: int, receive: Receiver) -> ObjectInfo:
        """Read a range.

        Each attempt enters a new `receive()` and hands slices to it as `Store.get_range` does. The receiver's context
        manager sees why an attempt failed, and may raise another exception.
        """

        async def attempt(once: Store, progress: Progress) -> ObjectInfo:
            async with receive() as sink:

                def told(piece: memoryview) -> None:
                    sink(piece)
                    progress.moved_bytes += len(piece)
                    progress.moved_in_thread()

                return await once.get_range(key, offset, size_bytes, told)

        return await self.bulk("get", size_bytes, attempt)

    async def get_many(
        self, gets: Iterable[SmallGet], got: Got, *, num_requests: int, most_bytes: int
    ) -> None:
        """Read up to `num_requests` objects of at most `most_bytes` each in a `series`; see `Store.get_many`."""

        async def attempt(once: Store, _: Progress, series: Series) -> None:
            def told(get: SmallGet, data: memoryview) -> None:
                got(get, data)
                series.answered(get.size_bytes)

            series.begins()
            await once.get_many(gets, told)

        await self.series("get", num_requests, most_bytes, attempt)

    async def bulk(
        self, operation: str, size_bytes: int, attempt: Callable[[Store, Progress], Awaitable[T]]
    ) -> T:
        """Make a request that carries shard bytes, within the budgets of requests and bytes: see `Admitted`."""
        silence = Silence()
        request = functools.partial(silence.attempted, functools.partial(attempt, self._store))
        return await self._persist(operation, lambda: self._admitted.attempt(size_bytes, request), silence)

    async def series(
        self,
        operation: str,
        num_requests: int,
        size_bytes: int,
        attempt: Callable[[Store, Progress, Series], Awaitable[None]],
    ) -> None:
        """Make small requests one after the other, which count as one request of `size_bytes` of the budgets.

        The series is not retried: the caller makes separate requests for whatever was not answered.

        Raises the StoreError that ended the series.
        """
        answers = Answers()

        async def once(progress: Progress) -> None:
            series = Series(progress, answers)
            try:
                await attempt(self._store, progress, series)
            except BaseException:
                series.broke()
                raise

        try:
            await self._metered.classified(
                operation, lambda: self._admitted.attempt(size_bytes, once, num_requests)
            )
        finally:
            self._observer.requests_finished(operation, answers.durations_s)
            self._budgets.bulk.took_each(answers.durations_s, answers.moved_bytes)

    async def _persist(
        self, operation: str, attempt: Callable[[], Awaitable[T]], silence: Silence | None = None
    ) -> T:
        return await self._patience.persist(
            functools.partial(self._metered.timed, operation, attempt), silence
        )
