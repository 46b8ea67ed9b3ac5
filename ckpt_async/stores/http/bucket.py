"""What every store in a bucket does alike, whichever service has it: open and close, read, list, delete, complete.

A service's own store says where a request goes, what authorizes it, and what an answer or a refusal means.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from ckpt_async.core.model import Checksum
from ckpt_async.errors import ObjectNotFoundError, StoreError
from ckpt_async.stores.checks import check_key, check_prefix, check_size
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.http.failures import telling_failures_of
from ckpt_async.stores.http.location import BucketLocation
from ckpt_async.stores.http.messages import MalformedResponseError, Response, total_of_range
from ckpt_async.stores.http.pools import Pools
from ckpt_async.stores.interface import (
    REQUEST_TIMEOUT_S,
    Capabilities,
    Enough,
    Listing,
    Moved,
    ObjectInfo,
    Sink,
    SmallGet,
    StoredPart,
)
from ckpt_async.stores.options import StoreOptions

T = TypeVar("T")
L = TypeVar("L", bound=BucketLocation)
S = TypeVar("S", bound="BucketSession[Any]")

# Small requests of one call that run concurrently.
_AT_ONCE = 16


class BucketSession(Generic[L]):
    """The connections to one bucket. Belongs to the event loop that opened it."""

    pools: Pools  # made by `connect`

    def __init__(self, location: L, options: StoreOptions) -> None:
        self.location, self.options = location, options
        self._exit_stack = contextlib.AsyncExitStack()

    async def open(self, *, is_read_only: bool) -> None:
        raise NotImplementedError

    def connect(self, ca_file: str | None) -> None:
        """Make the pools. `ca_file`: None for the system's certificates."""
        self.pools = Pools(self.options, ca_file)
        self._exit_stack.callback(self.pools.close)

    async def close(self) -> None:
        await self._exit_stack.aclose()

    def name(self, key: str, operation: str) -> str:
        """Return the name of an object in its bucket. Raises StoreError for a key that could lead out of the root."""
        return self.location.root + check_key(key, operation)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing. Its objects have their names in the bucket as keys."""

    objects: Iterable[ObjectInfo]
    server_time: float
    is_last: bool


@dataclass(frozen=True, slots=True)
class Way:
    """How to read: the URL of each key, all at the host of `origin`, and the headers."""

    origin: str
    url_of: Callable[[str], str]
    headers: Mapping[str, str]


class BucketStore(ABC, Generic[S]):
    """Objects below `prefix` of one bucket. Belongs to the event loop that opened it."""

    get_operation: ClassVar[str]  # the service's names, for errors
    list_operation: ClassVar[str]
    has_order = True  # each page has all keys up to its last one

    def __init__(self, session: S, url: str) -> None:
        self._session, self._location, self._url = session, session.location, url
        self._root: str = session.location.root
        self._capabilities: Capabilities | None = None

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "open() first"
        return self._capabilities

    def moved(self) -> Moved | None:
        return self._session.pools.traffic.read()

    async def open(self, *, is_read_only: bool = False, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Connect; for writing, also find out what the store enforces."""
        try:
            await self._session.open(is_read_only=is_read_only)
            self._capabilities = self._unproven()
            if not is_read_only:
                self._capabilities = await self._find_out(request_timeout_s)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    # --- of each service -----------------------------------------------------------------------------------

    @abstractmethod
    def _unproven(self) -> Capabilities:
        """Return what is declared before anything was tried: nothing that a writer would rely on."""

    @abstractmethod
    async def _find_out(self, request_timeout_s: float) -> Capabilities:
        """Return what the store was seen to enforce."""

    @abstractmethod
    async def _way(self) -> Way:
        """Return how to read now."""

    async def _way_to(self, key: str) -> tuple[str, Mapping[str, str]]:
        """Return the URL and the headers to read one object."""
        way = await self._way()
        return way.url_of(key), way.headers

    def _check_origin(self, answer: Response) -> None:
        """Raise MalformedResponseError if an answer shows that it is not from the service."""

    @abstractmethod
    def _info_of_part(self, key: str, answer: Response, size_bytes: int) -> ObjectInfo:
        """Return what the answer with a part of an object says about the whole, which has `size_bytes`."""

    @abstractmethod
    async def _read_refused(self, key: str, answer: Response) -> StoreError:
        """Return what the refusal of a read means."""

    @abstractmethod
    def _pages(self, prefix: str, start_after: str) -> AsyncIterator[Page]:
        """Yield the pages of a listing, which may begin before `start_after` and hold more than what has the prefix."""

    @abstractmethod
    async def _complete(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        """Complete an upload. Raises ObjectNotFoundError if there is none."""

    @abstractmethod
    async def head(self, key: str) -> ObjectInfo: ...

    async def _delete_one(self, key: str) -> None:
        raise NotImplementedError

    # --- reading -------------------------------------------------------------------------------------------

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        if size_bytes == 0:
            return await self.head(key)  # HTTP cannot express an empty range
        url, headers = await self._way_to(key)
        found: list[ObjectInfo] = []

        def check(answer: Response) -> None:
            self._check_origin(answer)
            found.append(self._info_of_part(key, answer, total_of_range(answer, offset, size_bytes)))

        with telling_failures_of(sink) as guarded, self._translating(self.get_operation, key):
            answer = await self._session.pools.downloads.get_range(
                url, offset, size_bytes, guarded, check, headers
            )
        if not found:
            raise await self._read_refused(key, answer)
        return found[0]

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        way = await self._way()

        def check(get: SmallGet, answer: Response) -> None:
            with self._translating(self.get_operation, get.key):
                self._check_origin(answer)
                check_size(total_of_range(answer, 0, get.size_bytes), get)

        with telling_failures_of(got) as guarded, self._translating(self.get_operation, ""):
            refused = await self._session.pools.small_downloads.get_many(
                way.origin, ((each, way.url_of(each.key)) for each in gets), check, guarded, way.headers
            )
        if refused is not None:
            get, answer = refused
            raise await self._read_refused(get.key, answer)

    def _check_data(self, key: str, data: bytes, info: ObjectInfo) -> None:
        """Raise IntegrityError unless the bytes have the checksum that came with them, if one did."""
        if info.checksum is not None and checksum_of(data, info.checksum.algorithm) != info.checksum:
            raise self._location.spoilt(
                f"its bytes do not match {info.checksum}", operation=self.get_operation, key=key
            )

    # --- listing, deleting, completing ---------------------------------------------------------------------

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        check_prefix(prefix, self.list_operation)
        found: dict[str, ObjectInfo] = {}
        server_time, is_whole = 0.0, False
        async for page in self._pages(prefix, start_after):
            # Take the time of the first page: measured against a later one, ages would come out too large.
            server_time = server_time or page.server_time
            with self._translating(self.list_operation, prefix):
                for each in page.objects:
                    key = each.key.removeprefix(self._root)
                    if key in found:
                        raise MalformedResponseError(f"the listing has {key!r} twice")
                    if key.startswith(prefix) and key > start_after:
                        found[key] = replace(each, key=key)
            is_whole = page.is_last
            may_do = not is_whole and enough is not None and self.has_order and _is_sorted(found)
            if may_do and enough is not None and enough(tuple(found.values())):
                break
        return Listing(tuple(found[key] for key in sorted(found)), server_time, is_whole)

    async def delete(self, keys: Sequence[str]) -> None:
        """Send one request per key, several at a time."""
        for key in keys:
            check_key(key, "delete")
        await at_once(self._delete_one, keys)

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        """As specified. A store forgets an upload that it has completed; then the object itself must show whether it is
        what this call would have made.
        """
        try:
            return await self._complete(key, upload_id, parts, checksum, size_bytes)
        except ObjectNotFoundError:
            with contextlib.suppress(ObjectNotFoundError):
                info = await self.head(key)
                if info.size_bytes == size_bytes and info.checksum == checksum:
                    return info
            raise

    def _translating(self, operation: str, key: str) -> contextlib.AbstractContextManager[None]:
        location: BucketLocation = self._location
        return location.translating(operation, key)


async def at_once(request: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """Make a request for each item, several at a time; raise the first failure once all have ended. What is not found
    is no failure.
    """
    left = iter(items)

    async def work() -> None:
        for each in left:
            with contextlib.suppress(ObjectNotFoundError):
                await request(each)

    for outcome in await asyncio.gather(*(work() for _ in range(_AT_ONCE)), return_exceptions=True):
        if outcome is not None:
            raise outcome


def _is_sorted(keys: Iterable[str]) -> bool:
    return all(one < other for one, other in itertools.pairwise(keys))
