"""The object-store protocol, its declared capabilities, and the values that cross it.

A store speaks keys relative to the run's root: no key outside the prefix can be named (invariant I10).
Every method makes exactly one attempt (retries and deadlines belong to the engine), raises only
`StoreError`, and may be cancelled at any await.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt_async.core.model import Checksum


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store was found (by `probe`) or is known to do. Callers branch on these, never on a name."""

    conditional_put: bool  # If-None-Match and If-Match on PUT are enforced and atomic
    multipart: bool
    checksum_algorithm: str  # "crc64nvme" or "crc32c": verified by the store over the whole object
    min_part_size_bytes: int = 5 << 20  # S3: every part but the last
    max_parts: int = 10_000  # S3 user guide, multipart upload limits
    finds_checksums: bool = False  # `put_part` may find a part's checksum itself
    copies: bool = True  # `copy`
    copies_parts: bool = True  # `copy_part`, where it has `multipart`
    max_copy_bytes: int = 5 << 30  # S3: more goes part by part (S3 API reference, CopyObject)
    lists: bool = True  # else only what has a known name is found
    reads_back: bool = False  # the store compares nothing: what has arrived is read again, and compared here
    remarks: tuple[str, ...] = ()  # what it does not do that others do, and what follows, for people


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store itself says of one object. `checksum` is None where it was not asked for or not kept."""

    key: str
    size_bytes: int
    etag: str
    checksum: Checksum | None = None
    last_modified: float | None = None  # by the store's clock, seconds since the epoch


@dataclass(frozen=True, slots=True)
class Listing:
    """A listing in key order, complete unless whoever asked for it said that it was enough: one that the store has cut
    short is never returned, it raises (rule R8).
    """

    objects: tuple[ObjectInfo, ...]
    server_time: float  # the store's own clock when it answered: ages are measured against this
    is_whole: bool = True


Enough = Callable[[Sequence[ObjectInfo]], bool]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of a multipart upload as the store answered or listed it."""

    number: int  # from 1
    size_bytes: int
    etag: str
    checksum: Checksum | None


@dataclass(frozen=True, slots=True)
class MultipartInfo:
    """An unfinished multipart upload."""

    key: str
    upload_id: str
    initiated_at: float  # by the store's clock


@dataclass(frozen=True, slots=True)
class Moved:
    """What has moved over a store's connections since it was opened, either way, as the other side has acknowledged it;
    and how long that takes.
    """

    size_bytes: int
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Create:
    """Condition: only if no object is at the key (`If-None-Match: *`)."""


@dataclass(frozen=True, slots=True)
class Match:
    """Condition: only if the object at the key still has this ETag (`If-Match`)."""

    etag: str


Condition = Create | Match | None


class BodyWriter(Protocol):
    """Where a body writes itself to. All of it blocks; what is raised ends the attempt."""

    @property
    def takes_files(self) -> bool:
        """Whether `send_file` may be used."""
        ...

    def write(self, piece: memoryview) -> None:
        """Send all of it; it may be reused when this returns."""
        ...

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> int:
        """Have the kernel send a range of a file; how much it took, 0 at the file's end. Raises ConnectionError or
        TimeoutError for trouble of the connection, any other OSError for trouble of the file.
        """
        ...

    def wait(self, duration_s: float) -> None:
        """Hold back for a bandwidth cap. Raises as soon as the attempt is over."""
        ...

    def queued_bytes(self) -> int:
        """Of what was sent: how much has not reached the other side yet, as far as known. Any thread may ask."""
        ...


class Body(Protocol):
    """Bytes to send."""

    @property
    def size_bytes(self) -> int: ...

    def send(self, writer: BodyWriter) -> None:
        """Write all of it in order; for another attempt again from the beginning. Blocks: a store calls it in a worker
        thread. Raises SourceError when the file beneath is no longer the one that was enqueued.
        """
        ...


Sink = Callable[[memoryview], None]


class PartBody(Body, Protocol):
    """A body that can be read before it is sent."""

    def read(self, sink: Sink, check: Callable[[], None]) -> None:
        """Give all of it to `sink`, in order; the slices are reused. Blocks, as `send` does. `check` is called now and
        then, and ends it by raising.
        """
        ...


@dataclass(frozen=True, slots=True)
class BytesBody:
    """A small body held in memory."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def send(self, writer: BodyWriter) -> None:
        writer.write(memoryview(self.data))

    def read(self, sink: Sink, check: Callable[[], None]) -> None:
        check()
        sink(memoryview(self.data))


@dataclass(frozen=True, slots=True)
class SmallPut:
    """A small object to be stored beside others."""

    key: str
    data: bytes
    checksum: Checksum


@dataclass(frozen=True, slots=True)
class SmallGet:
    """A small object to be read whole beside others. It has at least one byte."""

    key: str
    size_bytes: int


class Store(Protocol):
    """An object store under one prefix."""

    @property
    def url(self) -> str:
        """The remote as the user wrote it, without credentials: for messages and `status`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Known after `open`. Only `finds_checksums` may change."""
        ...

    def moved(self) -> Moved | None:
        """What has moved since `open`; None where nobody counts: then nobody looks for a better concurrency."""
        ...

    async def open(self, *, is_read_only: bool = False) -> None:
        """Connect and probe: checks that the bucket or folder exists and may be written, and finds out the
        capabilities by writing, comparing and deleting one small object. Raises StoreError with a hint.

        Read-only: nothing is made or written, and nothing is claimed that a writer would rely on.
        """
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        """Store one object whole, or nothing. On return it is durable in the store, and the returned size
        and checksum are the store's own answer (None if it gave none: then ask `head`).

        Raises PreconditionFailedError if the condition does not hold *or a lost reply makes it look so*;
        IntegrityError if the bytes that arrived do not have `checksum`.
        """
        ...

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        """Store small objects in this order, each as by `put`, up to the first that fails: what is raised for it is
        raised, as is what `puts` raises. From `puts` each is taken when it is to be sent, and `stored` is called for
        each one that is durable, both perhaps in a worker thread; `stored` never again once this has returned, raised
        or been cancelled.
        """
        ...

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        """Read a small object whole. ObjectTooLargeError if it has more than `max_size_bytes`: then none is read."""
        ...

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        """Read a range, handing slices to `sink` in order as they arrive: one at a time, as a rule from a worker
        thread, each valid only until it returns. What it raises is raised here; after this has returned, raised or
        been cancelled it is not called again.
        """
        ...

    async def get_many(self, gets: Sequence[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        """Read small objects in this order, up to the first that fails or is not of its size: what is raised for
        it is raised, as is what `got` raises. `got` is called with the bytes of each, valid until it returns, perhaps
        in a worker thread; never again once this has returned, raised or been cancelled.
        """
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Size, ETag, time and checksum of an object."""
        ...

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        """Every object whose key starts with `prefix`, past `start_after`, in key order. Pages inside; before the next
        one `enough` may say that those so far, the first ones in key order, will do.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete exactly these keys; a missing one counts as deleted. Raises if any could not be."""
        ...

    async def delete_if(self, key: str, etag: str) -> None:
        """Delete the object if it still has this ETag. Where the store does not take such a condition it is compared
        just before.

        Raises PreconditionFailedError if the object is another or missing *or a lost reply makes it look so*.
        """
        ...

    async def copy(self, source: str, etag: str, key: str) -> None:
        """Have the store copy an object of at most `max_copy_bytes` that has this ETag to another key, over whatever is
        there: no byte of it leaves the store. Its checksum is kept. Whoever needs to be sure asks `head`: what is
        no S3 may take this for a `put` of nothing.

        Raises PreconditionFailedError if the source has changed, ObjectNotFoundError if it is missing.
        """
        ...

    async def create_multipart(self, key: str) -> str:
        """Begin a multipart upload and return its id."""
        ...

    async def put_part(
        self, key: str, upload_id: str, number: int, body: PartBody, checksum: Checksum | None
    ) -> StoredPart:
        """Send one part, verified by the store against `checksum`, which the answer repeats. None, where
        `capabilities.finds_checksums` allows it: it is found in the thread that sends, before the bytes or while they
        go, and then follows them.
        """
        ...

    async def copy_part(
        self, source: str, etag: str, key: str, upload_id: str, number: int, offset: int, size_bytes: int
    ) -> StoredPart:
        """As `copy`, for a range of an object as one part of a multipart upload."""
        ...

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        """The parts the store has, by number. ObjectNotFoundError if there is no such upload."""
        ...

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        """Make the object visible if its whole content has `checksum`. Completing twice is not an error."""
        ...

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop the parts. No error if there is no such upload."""
        ...

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        """Unfinished multipart uploads under `prefix`."""
        ...


async def put_one_by_one(
    store: Store, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]
) -> None:
    """`put_many` of a store that has no faster way."""
    left = iter(puts)
    while (each := await asyncio.to_thread(next, left, None)) is not None:
        stored(await store.put(each.key, BytesBody(each.data), each.checksum))
