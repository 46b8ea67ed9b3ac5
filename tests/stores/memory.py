"""`memory://name`, a store in this process's memory: exact about conditions, checksums and multipart uploads.

`tests/registered` registers it, as another package would register a kind of store of its own.

Every request yields to the event loop once and never sleeps. It injects no faults: wrap it for that.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_async.core.model import Checksum
from ckpt_async.errors import (
    FailureReason,
    IntegrityError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    PreconditionFailedError,
    StoreError,
)
from ckpt_async.stores.backend import Backend, Location
from ckpt_async.stores.bodies import LocalWriter, check_complete
from ckpt_async.stores.checks import check_key, check_prefix, check_size
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import (
    REQUEST_TIMEOUT_S,
    Body,
    Capabilities,
    Condition,
    Create,
    Enough,
    Listing,
    Match,
    MultipartInfo,
    ObjectInfo,
    Sink,
    SmallGet,
    SmallPut,
    StoredPart,
)
from ckpt_async.stores.one_by_one import put_one_by_one
from ckpt_async.stores.options import StoreOptions

# Small, so that tests notice whether a caller stops after the first page.
PAGE_KEYS = 2

CAPABILITIES = Capabilities(conditional_put=True, multipart=True, checksum_algorithm="crc64nvme")


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    checksum: Checksum
    last_modified: float


@dataclass(slots=True)
class _Upload:
    key: str
    initiated_at: float
    parts: dict[int, tuple[bytes, StoredPart]] = field(default_factory=dict)
    is_completed: bool = False


class MemoryBucket:
    """The objects that several MemoryStores share. Safe to share between threads, each with its own loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, _Upload] = {}
        self.upload_ids = itertools.count(1)


_shared: dict[str, MemoryBucket] = {}


def shared_bucket(name: str) -> MemoryBucket:
    """Return the bucket of this name, which lives as long as the process."""
    return _shared.setdefault(name, MemoryBucket())


class MemoryStore:
    """A view of a MemoryBucket below `prefix`. `last_modified` and ages follow the bucket's clock."""

    def __init__(
        self,
        bucket: MemoryBucket | None = None,
        *,
        prefix: str = "",
        url: str = "memory://",
        capabilities: Capabilities = CAPABILITIES,
    ) -> None:
        self._bucket = bucket or MemoryBucket()
        self._root = f"{prefix}/" if prefix else ""
        self._url = url
        self._capabilities = capabilities

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def moved(self) -> None:
        pass

    async def open(
        self,
        *,
        is_read_only: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        check_key(key, "put")
        data = await _receive(body, checksum, "put", key)
        with self._bucket.lock:
            current = self._bucket.objects.get(self._root + key)
            match condition:
                case Create() if current is not None:
                    raise PreconditionFailedError(operation="put", key=key)
                case Match(etag) if current is None or current.etag != etag:
                    raise PreconditionFailedError(operation="put", key=key)
            return self._store(key, data, _etag(data), checksum)

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        await put_one_by_one(self, puts, stored)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        await asyncio.sleep(0)
        stored = self._find(key, "get")
        if len(stored.data) > max_size_bytes:
            raise ObjectTooLargeError(
                f"has {len(stored.data)} bytes, more than {max_size_bytes}", operation="get", key=key
            )
        return stored.data, _info(key, stored)

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        await asyncio.sleep(0)
        stored = self._find(key, "get_range")
        if offset + size_bytes > len(stored.data):
            raise StoreError(
                f"bytes {offset}+{size_bytes} are beyond the object's {len(stored.data)}",
                reason=FailureReason.OTHER,
                operation="get_range",
                key=key,
            )
        view = memoryview(stored.data)[offset : offset + size_bytes]
        for start in range(0, size_bytes, 1 << 20):
            sink(view[start : start + (1 << 20)])
        return _info(key, stored)

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        for each in gets:
            data, _ = await self.get(each.key, max_size_bytes=each.size_bytes)
            check_size(len(data), each)
            got(each, memoryview(data))

    async def head(self, key: str) -> ObjectInfo:
        await asyncio.sleep(0)
        return _info(key, self._find(key, "head"))

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        check_prefix(prefix, "list")
        await asyncio.sleep(0)
        with self._bucket.lock:
            found = [
                _info(full.removeprefix(self._root), stored)
                for full, stored in sorted(self._bucket.objects.items())
                if full.startswith(self._root + prefix) and full > self._root + start_after
            ]
            for end in range(PAGE_KEYS, len(found), PAGE_KEYS):
                if enough is not None and enough(found[:end]):
                    return Listing(tuple(found[:end]), self._bucket.clock(), is_whole=False)
            return Listing(tuple(found), self._bucket.clock())

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key, "delete")
        await asyncio.sleep(0)
        with self._bucket.lock:
            for key in keys:
                self._bucket.objects.pop(self._root + key, None)

    async def delete_if(self, key: str, etag: str) -> None:
        await asyncio.sleep(0)
        with self._bucket.lock:
            current = self._bucket.objects.get(self._root + check_key(key, "delete"))
            if current is None or current.etag != etag:
                raise PreconditionFailedError(operation="delete", key=key)
            del self._bucket.objects[self._root + key]

    async def copy(self, source: str, etag: str, key: str) -> None:
        check_key(key, "copy")
        await asyncio.sleep(0)
        with self._bucket.lock:
            data = self._to_copy(source, etag)
            if not self._capabilities.copies or len(data) > self._capabilities.max_copy_bytes:
                message = f"cannot copy {len(data)} bytes at once"
                raise StoreError(message, reason=FailureReason.OTHER, operation="copy", key=key)
            algorithm = self._capabilities.checksum_algorithm
            self._store(key, data, _etag(data), checksum_of(data, algorithm))

    async def create_multipart(self, key: str) -> str:
        check_key(key, "create_multipart")
        await asyncio.sleep(0)
        with self._bucket.lock:
            upload_id = f"upload-{next(self._bucket.upload_ids)}"
            self._bucket.uploads[upload_id] = _Upload(self._root + key, self._bucket.clock())
            return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Body, checksum: Checksum | None
    ) -> StoredPart:
        with self._bucket.lock:
            self._find_upload(key, upload_id, "put_part")  # S3 reports this before it looks at the bytes
        assert checksum is not None, "not promised by the capabilities"
        data = await _receive(body, checksum, "put_part", key)
        with self._bucket.lock:
            return self._store_part(key, upload_id, number, data, checksum)

    async def copy_part(
        self, source: str, etag: str, key: str, upload_id: str, number: int, offset: int, size_bytes: int
    ) -> StoredPart:
        await asyncio.sleep(0)
        with self._bucket.lock:
            data = self._to_copy(source, etag)[offset : offset + size_bytes]
            checksum = checksum_of(data, self._capabilities.checksum_algorithm)
            return self._store_part(key, upload_id, number, data, checksum)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        await asyncio.sleep(0)
        with self._bucket.lock:
            upload = self._find_upload(key, upload_id, "list_parts")
            return [part for _, (_, part) in sorted(upload.parts.items())]

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        await asyncio.sleep(0)
        with self._bucket.lock:
            upload = self._bucket.uploads.get(upload_id)
            if upload is None or upload.key != self._root + key or upload.is_completed:
                return self._completed_before(key, checksum, size_bytes)
            data = self._assemble(key, upload, parts)
            if len(data) != size_bytes or checksum_of(data, checksum.algorithm) != checksum:
                raise IntegrityError(
                    "the parts do not add up to the declared size and checksum",
                    operation="complete_multipart",
                    key=key,
                )
            digests = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
            info = self._store(key, data, f'{_etag(digests)[:-1]}-{len(parts)}"', checksum)
            upload.is_completed = True
            upload.parts.clear()
            return info

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        check_key(key, "abort_multipart")
        await asyncio.sleep(0)
        with self._bucket.lock:
            upload = self._bucket.uploads.get(upload_id)
            if upload is not None and upload.key == self._root + key and not upload.is_completed:
                del self._bucket.uploads[upload_id]

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        check_prefix(prefix, "list_multiparts")
        await asyncio.sleep(0)
        with self._bucket.lock:
            return [
                MultipartInfo(upload.key.removeprefix(self._root), upload_id, upload.initiated_at)
                for upload_id, upload in sorted(self._bucket.uploads.items(), key=lambda item: item[1].key)
                if not upload.is_completed and upload.key.startswith(self._root + prefix)
            ]

    def _to_copy(self, source: str, etag: str) -> bytes:
        stored = self._bucket.objects.get(self._root + check_key(source, "copy"))
        if stored is None:
            raise ObjectNotFoundError(operation="copy", key=source)
        if stored.etag != etag:
            raise PreconditionFailedError(operation="copy", key=source)
        return stored.data

    def _store_part(
        self, key: str, upload_id: str, number: int, data: bytes, checksum: Checksum
    ) -> StoredPart:
        upload = self._find_upload(key, upload_id, "put_part")
        if not 1 <= number <= self._capabilities.max_parts:
            raise StoreError(
                f"part number {number} is out of range",
                reason=FailureReason.OTHER,
                operation="put_part",
                key=key,
            )
        part = StoredPart(number, len(data), _etag(data), checksum)
        upload.parts[number] = (data, part)
        return part

    def _find(self, key: str, operation: str) -> _Object:
        check_key(key, operation)
        with self._bucket.lock:
            stored = self._bucket.objects.get(self._root + key)
        if stored is None:
            raise ObjectNotFoundError(operation=operation, key=key)
        return stored

    def _find_upload(self, key: str, upload_id: str, operation: str) -> _Upload:
        upload = self._bucket.uploads.get(upload_id)
        if upload is None or upload.is_completed or upload.key != self._root + key:
            raise ObjectNotFoundError("no such multipart upload", operation=operation, key=key)
        return upload

    def _completed_before(self, key: str, checksum: Checksum, size_bytes: int) -> ObjectInfo:
        """Do what the S3 store does for an upload that S3 does not know (any more): check the object itself."""
        stored = self._bucket.objects.get(self._root + key)
        if stored is None or (len(stored.data), stored.checksum) != (size_bytes, checksum):
            raise ObjectNotFoundError("no such multipart upload", operation="complete_multipart", key=key)
        return _info(key, stored)

    def _assemble(self, key: str, upload: _Upload, parts: Sequence[StoredPart]) -> bytes:
        pieces: list[bytes] = []
        for position, part in enumerate(parts, 1):
            data, stored = upload.parts.get(part.number, (b"", None))
            is_ascending = position == 1 or part.number > parts[position - 2].number
            if stored is None or stored.etag != part.etag or not is_ascending:
                raise IntegrityError(
                    f"part {part.number} is not the one that was stored",
                    operation="complete_multipart",
                    key=key,
                )
            if position < len(parts) and len(data) < self._capabilities.min_part_size_bytes:
                raise StoreError(
                    f"part {part.number} has {len(data)} bytes, too few",
                    reason=FailureReason.OTHER,
                    operation="complete_multipart",
                    key=key,
                )
            pieces.append(data)
        return b"".join(pieces)

    def _store(self, key: str, data: bytes, etag: str, checksum: Checksum) -> ObjectInfo:
        stored = _Object(data, etag, checksum, self._bucket.clock())
        self._bucket.objects[self._root + key] = stored
        return _info(key, stored)


async def collected(body: Body) -> bytes:
    """Return the whole body, collected in the calling thread: for small bodies in stores that use no threads."""
    data = bytearray()
    writer = _Collector(data.extend)
    body.send(writer)
    check_complete(body, len(data))
    await asyncio.sleep(writer.held_s)
    return bytes(data)


class _Collector(LocalWriter):
    """A collector that waits afterwards: a bandwidth cap's wait counts from now, however long earlier ones took."""

    held_s = 0.0

    def wait(self, duration_s: float) -> None:
        self.held_s = max(self.held_s, duration_s)


async def _receive(body: Body, checksum: Checksum, operation: str, key: str) -> bytes:
    """Take in the whole body, then yield once: a request cancelled there has changed nothing."""
    data = await collected(body)
    if checksum_of(data, checksum.algorithm) != checksum:
        raise IntegrityError("the bytes do not have the declared checksum", operation=operation, key=key)
    return data


def _etag(data: bytes) -> str:
    """Return an ETag like S3's for a plain PUT: made from content alone, so A→B→A passes an If-Match (rule R13)."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _info(key: str, stored: _Object) -> ObjectInfo:
    return ObjectInfo(key, len(stored.data), stored.etag, stored.checksum, stored.last_modified)


class MemoryBackend(Backend):
    schemes = ("memory",)
    example = "memory://name"

    def open(
        self, location: Location, options: StoreOptions, url: str, env: Mapping[str, str]
    ) -> MemoryStore:
        return MemoryStore(shared_bucket(location.bucket), prefix=location.prefix, url=url)


BACKEND = MemoryBackend()
