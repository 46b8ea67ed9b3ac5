"""The object-store protocol, the capabilities that a store declares, and the values that cross it.

A store's keys are relative to the run's root: no key outside the prefix can be named (invariant I10). Every method
makes exactly one attempt (retries and deadlines belong to the engine), raises only `StoreError`, and may be cancelled
at any await.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt_async.core.model import Checksum

# Deadline of each request by which a store is opened, unless the caller says otherwise.
REQUEST_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do, as probed or known beforehand. Callers branch on these, never on a store's name."""

    conditional_put: bool  # If-None-Match and If-Match on PUT are enforced and atomic
    multipart: bool
    checksum_algorithm: str  # "crc64nvme" or "crc32c": verified by the store over the whole object
    min_part_size_bytes: int = 5 << 20  # S3: applies to every part but the last
    max_parts: int = 10_000  # S3 user guide, multipart upload limits
    finds_checksums: bool = False  # `put_part` can compute a part's checksum as it sends the bytes
    copies: bool = True  # has `copy`
    copies_parts: bool = True  # has `copy_part`, provided that it has `multipart`
    max_copy_bytes: int = 5 << 30  # S3: larger objects are copied part by part (S3 API reference, CopyObject)
    lists: bool = True  # else only objects whose names are known can be found
    # The store compares no checksums: we read back what arrived and compare it ourselves.
    reads_back: bool = False
    place: str = ""  # for people: the type of the file system that a folder is on
    # For people: what this store lacks that others have, and what follows from it.
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store itself reports about one object. `checksum` is None if it was not asked for or is not kept."""

    key: str
    size_bytes: int
    etag: str
    checksum: Checksum | None = None
    last_modified: float | None = None  # by the store's clock, seconds since the epoch


@dataclass(frozen=True, slots=True)
class Listing:
    """A listing in key order. It is complete (`is_whole`) unless the caller's `enough` ended it early: a listing that
    the store has cut short is never returned but raises (rule R8).
    """

    objects: tuple[ObjectInfo, ...]
    server_time: float  # by the store's own clock when it answered; ages are measured against it
    is_whole: bool = True


Enough = Callable[[Sequence[ObjectInfo]], bool]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of a multipart upload, as the store returned or listed it."""

    number: int  # starts at 1
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
    """How many bytes, in both directions, the peers have acknowledged on a store's connections since it was opened, and
    the round-trip time.
    """

    size_bytes: int
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Create:
    """Condition: only if there is no object at the key (`If-None-Match: *`)."""


@dataclass(frozen=True, slots=True)
class Match:
    """Condition: only if the object at the key still has this ETag (`If-Match`)."""

    etag: str


Condition = Create | Match | None


class BodyWriter(Protocol):
    """The destination that a body writes itself to. All methods block; their exceptions end the attempt."""

    @property
    def takes_files(self) -> bool:
        """Whether `send_file` may be called."""
        ...

    def write(self, piece: memoryview) -> None:
        """Send all of `piece`, whose buffer may be reused once this returns."""
        ...

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> int:
        """Have the kernel send a range of a file, and return how many bytes it took, 0 at the end of the file. Raises
        ConnectionError or TimeoutError if the connection fails, any other OSError if the file does.
        """
        ...

    def wait(self, duration_s: float) -> None:
        """Pause to honour a bandwidth cap. Raises as soon as the attempt is over."""
        ...

    def queued_bytes(self) -> int:
        """Return how many bytes sent have not reached the peer, as far as known. Any thread may call this."""
        ...

    def acknowledged_bytes(self) -> int | None:
        """Return a count that grows with every byte that reaches the peer; None if that is not known. Any thread may
        call this.
        """
        ...


class Body(Protocol):
    """A sequence of bytes to send."""

    @property
    def size_bytes(self) -> int: ...

    def send(self, writer: BodyWriter) -> None:
        """Write all bytes in order, from the beginning again on another attempt. Blocks: a store calls it in a worker
        thread. Raises SourceError if the underlying file is no longer the one that was enqueued.
        """
        ...


Sink = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class BytesBody:
    """A small body held in memory."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def send(self, writer: BodyWriter) -> None:
        writer.write(memoryview(self.data))


@dataclass(frozen=True, slots=True)
class SmallPut:
    """A small object to store in one batch with others."""

    key: str
    data: bytes
    checksum: Checksum


@dataclass(frozen=True, slots=True)
class SmallGet:
    """A small object to read whole, in one batch with others. It has at least one byte."""

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
        """What the store can do, known after `open`. Only `finds_checksums` may change later."""
        ...

    def moved(self) -> Moved | None:
        """Return what has moved since `open`, or None if this store does not count: then concurrency is not tuned."""
        ...

    async def open(self, *, is_read_only: bool = False, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Connect and probe: check that the bucket or folder exists and is writable, and find out the capabilities by
        writing, comparing and deleting small objects, each request with a deadline of its own. Raises StoreError with a
        hint.

        If read-only, create and write nothing, and declare no capability that a writer would rely on.
        """
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        """Store one object whole, or not at all. On return it is durable in the store, and the returned size and
        checksum are the store's own answer (the checksum is None if the store gave none: then call `head`).

        Raises PreconditionFailedError if the condition does not hold *or a lost reply makes it look so*; IntegrityError
        if the bytes that arrived do not have `checksum`.
        """
        ...

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        """Store small objects in this order, each as `put` does, until one fails: its error is raised, as is any error
        raised by `puts`. Each item is taken from `puts` when its turn to be sent comes, and `stored` is called for each
        object that is durable; both may happen in a worker thread. `stored` is never called after this has returned,
        raised or been cancelled.
        """
        ...

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        """Read a small object whole. Raises ObjectTooLargeError, reading nothing, if it exceeds `max_size_bytes`."""
        ...

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        """Read a range, passing slices to `sink` in order as they arrive. `sink` is called with one slice at a time,
        usually from a worker thread, and a slice is valid only until that call returns. Errors of `sink` are raised
        here; it is never called after this has returned, raised or been cancelled.
        """
        ...

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        """Read small objects in this order, until one fails or has another size than stated: its error is raised, as is
        any error raised by `got`. `got` is called with the bytes of each object, which are valid until it returns; only
        then is the next one taken from `gets`. Both happen perhaps in a worker thread, and never after this has
        returned, raised or been cancelled.
        """
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Return size, ETag, time and checksum of an object."""
        ...

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        """List every object whose key starts with `prefix` and is greater than `start_after`, in key order. Pagination
        is internal; before each further page, `enough` may decide that the objects so far, which are the first in key
        order, will do.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete exactly these keys; a missing one counts as deleted. Raises if any could not be deleted."""
        ...

    async def delete_if(self, key: str, etag: str) -> None:
        """Delete the object if it still has this ETag. If the store does not support this condition, the ETag is
        compared just before the deletion.

        Raises PreconditionFailedError if the object has changed or is missing *or a lost reply makes it look so*.
        """
        ...

    async def copy(self, source: str, etag: str, key: str) -> None:
        """Have the store copy an object of at most `max_copy_bytes` that has this ETag to another key, replacing what
        is there. No byte of it leaves the store, and its checksum is kept. Call `head` to be sure: a store that merely
        resembles S3 may take this for a `put` of an empty object.

        Raises PreconditionFailedError if the source has changed, ObjectNotFoundError if it is missing.
        """
        ...

    async def create_multipart(self, key: str) -> str:
        """Begin a multipart upload and return its id."""
        ...

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Body, checksum: Checksum | None
    ) -> StoredPart:
        """Send one part, which the store compares with `checksum`; the returned part has it. If `checksum` is None,
        which `capabilities.finds_checksums` must allow, the sending thread computes it while it sends the bytes, and
        then sends it after them, or compares it with the answer.
        """
        ...

    async def copy_part(
        self, source: str, etag: str, key: str, upload_id: str, number: int, offset: int, size_bytes: int
    ) -> StoredPart:
        """Copy a range of an object as one part of a multipart upload, as `copy` does."""
        ...

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        """Return the parts that the store has, by number. Raises ObjectNotFoundError if there is no such upload."""
        ...

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        """Make the object visible if its whole content has `checksum`. Completing twice is not an error."""
        ...

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop the upload's parts. It is no error if there is no such upload."""
        ...

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        """Return the unfinished multipart uploads under `prefix`."""
        ...
