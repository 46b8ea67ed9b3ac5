"""How bytes move: parts, checksums, bodies that read a shard slice by slice.

A shard is read through small reused buffers, never mapped: truncating a mapped file is a SIGBUS that kills
the trainer, while here it is an error. Memory does not grow with the shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt_async.core.model import Checksum, FileIdentity
from ckpt_async.errors import (
    FailureReason,
    IntegrityError,
    ObjectNotFoundError,
    SourceError,
    StoreError,
)
from ckpt_async.local.folder import check_identity
from ckpt_async.stores.checksums import Digest, checksum_of, combine
from ckpt_async.stores.interface import (
    BodyWriter,
    Capabilities,
    ObjectInfo,
    Sink,
    SmallPut,
    Store,
    StoredPart,
)
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.progress import TELL_S, Progress, Series

T = TypeVar("T")

MIB = 1 << 20
# Large enough that a slice costs little Python, small enough that 16 in flight are 16 MiB.
SLICE_BYTES = 1 * MIB
# What is checksummed and encrypted at a time stays in the cache; with less, threads hand the interpreter's lock round
# more often. With half or four times as much, an upload over TLS takes a twelfth more CPU.
THREAD_SLICE_BYTES = 512 << 10
# What the kernel is asked to send at a time, at most; only the bookkeeping of progress costs anything here.
SEND_BYTES, FIRST_SEND_BYTES, MIN_SEND_BYTES = 4 * MIB, 256 << 10, 64 << 10
# Checksums run at 8 GiB/s. More of one shard at once would only make all its parts wait for theirs at the same
# time, with nothing on the wire: measured, 8 at once cost about a quarter of the throughput of a 1 GiB file.
CHECKSUMS_AT_ONCE = 2
# Read in one go while checksumming: at 10 MB/s, a bad disk, still well below `stall_timeout_s`.
CHECKSUM_BYTES = 64 * MIB
# Some file systems (FUSE with direct I/O) give no pages to send.
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """One part of a multipart upload."""

    number: int  # from 1
    offset: int
    size_bytes: int


def plan_parts(size_bytes: int, part_size_bytes: int) -> list[PlannedPart]:
    """Cut a file into parts of `part_size_bytes`; the last one is what remains."""
    return [
        PlannedPart(number, offset, min(part_size_bytes, size_bytes - offset))
        for number, offset in enumerate(range(0, size_bytes, part_size_bytes), start=1)
    ]


def part_size(size_bytes: int, smallest_bytes: int, capabilities: Capabilities) -> int:
    """The part size for a file, in whole MiB: a 32nd of it, for a request costs about 2 ms of CPU whatever it
    carries; not less than `smallest_bytes`, nor more than 64 MiB, for that much is sent again when one fails;
    but as much as keeps the store's limit on the number of parts with a tenth to spare.
    """
    few = min(-(-size_bytes // 32), 64 * MIB)
    needed = max(few, -(-size_bytes // (capabilities.max_parts * 9 // 10)))
    return max(smallest_bytes, capabilities.min_part_size_bytes, -(-needed // MIB) * MIB)


class Source:
    """An open shard, checked to be the file that was enqueued. Close it."""

    def __init__(self, descriptor: int, identity: FileIdentity, path: str) -> None:
        self.descriptor, self.identity, self.path = descriptor, identity, path
        self._checksums = asyncio.Semaphore(CHECKSUMS_AT_ONCE)
        self._on_read: list[Callable[[], None]] = []

    @property
    def size_bytes(self) -> int:
        return self.identity.size_bytes

    def close(self) -> None:
        os.close(self.descriptor)

    def check(self) -> None:
        """Raise SourceError if the file was changed since it was enqueued. Done after the last read."""
        check_identity(self.descriptor, self.identity, self.path)

    async def checksum(
        self, offset: int, size_bytes: int, algorithm: str, moved: Callable[[], None] = lambda: None
    ) -> Checksum:
        """Checksum of a range, read in a worker thread. `moved` is called as it goes: where there are no parts, a
        shard takes longer than any stall may last.
        """
        digest, end = Digest(algorithm), offset + size_bytes
        self._on_read.append(moved)
        try:
            async with self._checksums:
                while offset < end:
                    stretch = min(CHECKSUM_BYTES, end - offset)
                    await asyncio.to_thread(self._digest, digest, offset, stretch)
                    offset += stretch
                    for each in self._on_read:
                        each()  # who waits for its turn has not stalled either
        finally:
            self._on_read.remove(moved)
        return digest.checksum()

    def _digest(self, digest: Digest, offset: int, size_bytes: int) -> None:
        for piece in self._pieces(offset, size_bytes):
            digest.update(piece)

    async def md5(self, offset: int, size_bytes: int) -> str:
        """MD5 of a range in hex, read in a worker thread: a part's ETag, where the store says nothing else."""
        return await asyncio.to_thread(self._md5, offset, size_bytes)

    def _md5(self, offset: int, size_bytes: int) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        for piece in self._pieces(offset, size_bytes):
            digest.update(piece)
        return digest.hexdigest()

    def _pieces(self, offset: int, size_bytes: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(SLICE_BYTES, max(size_bytes, 1))))
        end = offset + size_bytes
        while offset < end:
            piece = buffer[: min(len(buffer), end - offset)]
            self.read_into(piece, offset)
            offset += len(piece)
            yield piece

    def read(self) -> bytes:
        """All of a small shard."""
        data = b""
        while len(data) < self.size_bytes:
            try:
                more = os.pread(self.descriptor, self.size_bytes - len(data), len(data))
            except OSError as error:
                raise self.unreadable(error) from error
            if not more:
                raise self.truncated()
            data += more
        return data

    def read_into(self, piece: memoryview, offset: int, flags: int = 0) -> None:
        """Fill `piece`; a file that ends early was truncated."""
        filled = 0
        while filled < len(piece):
            try:
                count = os.preadv(self.descriptor, [piece[filled:]], offset + filled, flags)
            except BlockingIOError:
                raise
            except OSError as error:
                raise self.unreadable(error) from error
            if count == 0:
                raise self.truncated()
            filled += count

    def unreadable(self, error: OSError) -> StoreError:
        return StoreError(f"shard {self.path!r} cannot be read: {error.strerror}", reason=FailureReason.DISK)

    def truncated(self) -> SourceError:
        return SourceError(
            f"shard {self.path!r} was truncated while it was read", reason=FailureReason.SOURCE_CHANGED
        )


class FileBody:
    """A range of a shard as a request body."""

    def __init__(self, source: Source, offset: int, size_bytes: int, progress: Progress) -> None:
        self._source, self._offset, self._size_bytes, self._progress = source, offset, size_bytes, progress

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def send(self, writer: BodyWriter) -> None:
        """Where it can, the kernel sends the file's own pages: measured, that halves the CPU of an upload. They were
        read for the checksum a moment ago, so that this rarely waits for the disk; what is written to the file
        meanwhile fails that checksum in the store. Else it goes through one small buffer.
        """
        offset, end = self._offset, self._offset + self._size_bytes
        takes_files, buffer = writer.takes_files, memoryview(b"")
        now, send_bytes = time.monotonic(), FIRST_SEND_BYTES
        while offset < end:
            most = SEND_BYTES if takes_files else THREAD_SLICE_BYTES
            size_bytes = min(send_bytes, most, end - offset)
            self._progress.may_send_in_thread(size_bytes, writer.wait)
            count = self._send_file(writer, offset, size_bytes) if takes_files else None
            if count is None:
                takes_files = False
                buffer = buffer or memoryview(bytearray(min(THREAD_SLICE_BYTES, end - offset)))
                piece = buffer[:size_bytes]
                self._source.read_into(piece, offset)
                writer.write(piece)
                count = len(piece)
            if count < size_bytes:
                self._progress.not_sent(size_bytes - count)
            offset += count
            # This returns when all is sent: on a slow link, so much that it would pass for a stall.
            began, now = now, time.monotonic()
            is_fast = now - began < TELL_S
            send_bytes = min(2 * send_bytes, SEND_BYTES) if is_fast else max(send_bytes // 2, MIN_SEND_BYTES)
            self._progress.moved_in_thread(is_last=offset == end)
        self._source.check()

    def _send_file(self, writer: BodyWriter, offset: int, size_bytes: int) -> int | None:
        """How much the kernel took; None where it sends no files."""
        try:
            count = writer.send_file(self._source.descriptor, offset, size_bytes)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            if error.errno in _NO_SENDFILE:
                return None
            raise self._source.unreadable(error) from error
        if count == 0:
            raise self._source.truncated()
        return count


# --- one shard ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resume:
    """A multipart upload that an earlier attempt or process has begun. `parts` are known to be there; if there are
    none, the store is asked.
    """

    upload_id: str
    part_size_bytes: int
    parts: tuple[StoredPart, ...] = ()


async def upload(
    store: PatientStore,
    source: Source,
    key: str,
    *,
    smallest_part_bytes: int,
    resume: Resume | None,
    may_be_there: bool = False,
    opened: Callable[[Resume], None],
    sent: Callable[[int], None],
) -> tuple[int, Checksum]:
    """Send one shard and return its size and checksum *as the store answered them* (rule R1).

    `may_be_there`: an earlier process may have sent it and died before it could say so; then one HEAD asks first.
    `opened` is called once a multipart upload exists, before its first part; `sent` with the size of every
    piece the store has acknowledged (and with what it already had, when resuming). Retries are made part by
    part. Raises SourceError if the file changed, StoreError when the requests give up.
    """
    capabilities = store.capabilities
    if may_be_there and (found := await _find(store, source, key)) is not None:
        return source.size_bytes, found
    is_small = source.size_bytes <= max(smallest_part_bytes, capabilities.min_part_size_bytes)
    if is_small or not capabilities.multipart:
        info, checksum = await _put(store, source, key)
        sent(source.size_bytes)
    else:
        info, checksum = await _multipart(store, source, key, smallest_part_bytes, resume, opened, sent)
    await asyncio.to_thread(source.check)
    await _verify(store, info, key, source.size_bytes, checksum)
    return source.size_bytes, checksum


async def _find(store: PatientStore, source: Source, key: str) -> Checksum | None:
    """The checksum of the very same bytes in the store, if it says that it has them."""

    async def attempt(once: Store, progress: Progress) -> ObjectInfo:
        progress.moved(is_last=True)  # a folder reads the whole file before it answers
        return await once.head(key)

    try:
        info = await store.bulk("head", source.size_bytes, attempt)
    except ObjectNotFoundError:
        return None
    if info.checksum is None or info.size_bytes != source.size_bytes:
        return None
    checksum = await source.checksum(0, source.size_bytes, info.checksum.algorithm)
    await asyncio.to_thread(source.check)
    return checksum if checksum == info.checksum else None


async def _put(store: PatientStore, source: Source, key: str) -> tuple[ObjectInfo, Checksum]:
    async def attempt(once: Store, progress: Progress) -> tuple[ObjectInfo, Checksum]:
        algorithm = once.capabilities.checksum_algorithm
        checksum = await source.checksum(0, source.size_bytes, algorithm, progress.moved)
        body = FileBody(source, 0, source.size_bytes, progress)
        return await once.put(key, body, checksum), checksum

    return await _unless_changed(source, store.bulk("put", source.size_bytes, attempt))


async def _multipart(
    store: PatientStore,
    source: Source,
    key: str,
    smallest_part_bytes: int,
    resume: Resume | None,
    opened: Callable[[Resume], None],
    sent: Callable[[int], None],
) -> tuple[ObjectInfo, Checksum]:
    algorithm = store.capabilities.checksum_algorithm
    there: dict[int, StoredPart] = {}
    if resume is not None and resume.part_size_bytes * store.capabilities.max_parts < source.size_bytes:
        upload_id = resume.upload_id
        await store.abort_multipart(key, upload_id)
        resume = None  # begun when nobody knew how large it would be
    if resume is not None:
        try:
            upload_id = resume.upload_id
            listed: Iterable[StoredPart] = resume.parts
            if not listed:
                listed = await store.list_parts(key, upload_id)
            there = {part.number: part for part in listed}
        except ObjectNotFoundError:
            resume = None  # completed or aborted meanwhile; sending again is always right
    if resume is None:
        upload_id = await store.create_multipart(key)
        size = part_size(source.size_bytes, smallest_part_bytes, store.capabilities)
        resume = Resume(upload_id, size)
        opened(resume)

    async def send(part: PlannedPart) -> StoredPart:
        async def attempt(once: Store, progress: Progress) -> StoredPart:
            have = there.get(part.number)
            if have is None:
                return await send_part(once, source, key, resume.upload_id, part, progress)
            checksum = await source.checksum(part.offset, part.size_bytes, algorithm, progress.moved)
            if await _is_same(source, part, have, checksum):
                return StoredPart(part.number, part.size_bytes, have.etag, checksum)
            body = FileBody(source, part.offset, part.size_bytes, progress)
            return await once.put_part(key, resume.upload_id, part.number, body, checksum)

        have = await _unless_changed(source, store.bulk("upload_part", part.size_bytes, attempt))
        sent(part.size_bytes)
        return have

    parts = await all_or_none(send(part) for part in plan_parts(source.size_bytes, resume.part_size_bytes))
    whole = combine([(part.checksum, part.size_bytes) for part in parts if part.checksum], algorithm)
    await asyncio.to_thread(source.check)
    info = await store.complete_multipart(key, resume.upload_id, parts, whole, source.size_bytes)
    return info, whole


async def send_part(
    store: Store, source: Source, key: str, upload_id: str, part: PlannedPart, progress: Progress
) -> StoredPart:
    """One attempt. The answer has the checksum of what was sent."""
    checksum = None
    if not store.capabilities.trailing_checksums:
        algorithm = store.capabilities.checksum_algorithm
        checksum = await source.checksum(part.offset, part.size_bytes, algorithm, progress.moved)
    body = FileBody(source, part.offset, part.size_bytes, progress)
    return await store.put_part(key, upload_id, part.number, body, checksum)


async def _is_same(source: Source, part: PlannedPart, have: StoredPart, checksum: Checksum) -> bool:
    """Whether the store already has this very part. SeaweedFS lists parts without their checksums; then the ETag
    has to do, which is the part's MD5 unless the store encrypts (S3 API reference, "Object": ETag).
    """
    if have.size_bytes != part.size_bytes or have.checksum is not None:
        return (have.size_bytes, have.checksum) == (part.size_bytes, checksum)
    return have.etag.strip('"') == await source.md5(part.offset, part.size_bytes)


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them all and return their results in order; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _unless_changed(source: Source, request: Awaitable[T]) -> T:
    """A refused checksum means a broken wire, or bytes that changed between our two reads: say which."""
    try:
        return await request
    except IntegrityError:
        await asyncio.to_thread(source.check)
        raise


async def _verify(
    store: PatientStore, info: ObjectInfo, key: str, size_bytes: int, checksum: Checksum
) -> None:
    """Compare what the store says with what was read locally; ask, or read back, if it did not say."""
    if info.checksum is None:
        info = await store.head(key)
    if info.checksum is None:
        info = await read_back(store, key, size_bytes, checksum.algorithm)
    if (info.size_bytes, info.checksum) != (size_bytes, checksum):
        raise IntegrityError(
            f"the store has {info.size_bytes} bytes with {info.checksum}, sent were {size_bytes} with {checksum}",
            operation="verify",
            key=key,
        )


async def read_back(store: PatientStore, key: str, size_bytes: int, algorithm: str) -> ObjectInfo:
    """Verify the slow way, for stores that keep no checksum: read every byte again."""

    digest = Digest(algorithm)

    @contextlib.asynccontextmanager
    async def begin() -> AsyncIterator[Sink]:
        nonlocal digest
        digest = Digest(algorithm)
        yield digest.update

    info = await store.get_range(key, 0, size_bytes, begin)
    return ObjectInfo(key, info.size_bytes, info.etag, digest.checksum())


# --- many small shards -------------------------------------------------------------------------------------

# Up to here a request costs more than its bytes.
SMALL_BYTES = 256 << 10
# Sent on one connection, and recorded together: enough to share what a series costs by itself, few enough that its end
# is soon known.
SERIES_SHARDS, SERIES_BYTES = 64, 4 * MIB


@dataclass(frozen=True, slots=True)
class SmallShard:
    """A shard of at most SMALL_BYTES that was not begun yet."""

    key: str
    size_bytes: int
    open: Callable[[], Source]  # called in a worker thread


async def upload_many(store: PatientStore, shards: Sequence[SmallShard]) -> list[Checksum | None]:
    """Send shards one after the other as *one* request of the budgets, without retries. The checksum of each one that
    the store has, as it answered it (rule R1); None for the rest, which `upload` will send, or say what is wrong with.
    """
    checksums: dict[str, Checksum] = {}
    stored: dict[str, ObjectInfo] = {}

    def read() -> Iterator[SmallPut]:
        for each in shards:
            try:
                put = _read(each, store.capabilities.checksum_algorithm)
            except (StoreError, SourceError, OSError):
                continue  # `upload` will say what is wrong
            checksums[each.key] = put.checksum
            yield put

    async def attempt(once: Store, progress: Progress, series: Series) -> None:
        def answered(info: ObjectInfo) -> None:
            stored[info.key] = info
            series.answered()

        await progress.may_send(sum(each.size_bytes for each in shards))
        series.begins()
        await once.put_many(read(), answered)

    with contextlib.suppress(StoreError):  # `upload` meets the same, and is patient
        await store.series("put", len(shards), sum(each.size_bytes for each in shards), attempt)

    def is_right(shard: SmallShard) -> bool:
        info = stored[shard.key]
        return (info.size_bytes, info.checksum) == (shard.size_bytes, checksums[shard.key])

    async def ask(shard: SmallShard) -> None:
        try:
            info, checksum = stored[shard.key], checksums[shard.key]
            await _verify(store, info, shard.key, shard.size_bytes, checksum)
        except StoreError:
            del stored[shard.key]

    await all_or_none(ask(each) for each in shards if each.key in stored and not is_right(each))
    return [checksums[each.key] if each.key in stored else None for each in shards]


def _read(shard: SmallShard, algorithm: str) -> SmallPut:
    """Whole. What was read is what is sent: the file is looked at once."""
    with contextlib.closing(shard.open()) as source:
        data = source.read()
        source.check()
    return SmallPut(shard.key, data, checksum_of(data, algorithm))
