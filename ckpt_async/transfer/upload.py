"""Sending a shard: whole or in parts, resumed where it stopped, and verified by what the store answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt_async.core.model import Checksum
from ckpt_async.core.units import MIB
from ckpt_async.errors import FailureReason, IntegrityError, ObjectNotFoundError, SourceError, StoreError
from ckpt_async.stores.checksums import Digest, checksum_of, combine
from ckpt_async.stores.interface import Capabilities, ObjectInfo, Sink, SmallPut, Store, StoredPart
from ckpt_async.transfer.concurrency import Concurrency
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.progress import Progress, Series
from ckpt_async.transfer.source import FileBody, Source
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)

T = TypeVar("T")


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


# How long a part may take: so much time is lost with it, or spent on the last part after all others have arrived.
PART_S = 5.0
MAX_PART_BYTES = 64 * MIB
# How many connections are expected to need a part, before anything is known about the link.
LIKELY_CONCURRENCY = 32
_ABORT_S = 10.0


def part_size(
    size_bytes: int, smallest_bytes: int, capabilities: Capabilities, link: Concurrency | None = None
) -> int:
    """Return the part size for a file, in whole MiB.

    It is a 32nd of the file, because a request costs about 2 ms of CPU whatever it carries; less if that would not give
    each connection two parts. It is not less than `smallest_bytes` and not more than a connection sends in PART_S, but
    always large enough to stay a tenth below the store's limit on the number of parts.
    """
    link = link or Concurrency(limit=1, most=1, is_searching=False)
    at_once = max(link.limit, LIKELY_CONCURRENCY) if link.is_searching else link.limit
    few = min(-(-size_bytes // max(32, 2 * at_once)), MAX_PART_BYTES)
    if link.connection_bytes_per_s:
        few = min(few, int(PART_S * link.connection_bytes_per_s))
    needed = max(few, -(-size_bytes // (capabilities.max_parts * 9 // 10)))
    return max(smallest_bytes, capabilities.min_part_size_bytes, -(-needed // MIB) * MIB)


@dataclass(frozen=True, slots=True)
class Resume:
    """A multipart upload that an earlier attempt or process has begun.

    `parts` are known to be in the store; if there are none, the store is asked.
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

    `may_be_there`: an earlier process may have sent the shard and died before it recorded that, so one HEAD asks first.
    `opened` is called once a multipart upload exists, before its first part; `sent` is called with the size of every
    piece that the store has acknowledged (when resuming, also with what it already had). Retries are made part by part.
    Raises SourceError if the file changed, StoreError when the requests give up.
    """
    capabilities = store.capabilities
    if may_be_there and (found := await _find(store, source, key)) is not None:
        return source.size_bytes, found
    is_small = source.size_bytes <= max(smallest_part_bytes, capabilities.min_part_size_bytes)
    if is_small or not capabilities.multipart:
        info, checksum = await _put(store, source, key)
        sent(source.size_bytes)
    else:
        try:
            info, checksum = await _multipart(store, source, key, smallest_part_bytes, resume, opened, sent)
        except (ObjectNotFoundError, IntegrityError) as error:
            # Somebody, or a lifecycle rule, has aborted the upload; or it has parts that the file does not have any
            # more, with which Ceph completes nothing.
            if resume is None and isinstance(error, IntegrityError):
                raise
            logger.warning("upload_gone key=%s error=%s; sending it again", key, error)
            if resume is not None:
                await drop(store, key, resume.upload_id)
            info, checksum = await _multipart(store, source, key, smallest_part_bytes, None, opened, sent)
    await asyncio.to_thread(source.check)
    await verify_stored(store, info, key, source.size_bytes, checksum)
    return source.size_bytes, checksum


async def _find(store: PatientStore, source: Source, key: str) -> Checksum | None:
    """Return the shard's checksum if, according to the store, the very same bytes are there already, else None."""

    async def attempt(once: Store, progress: Progress) -> ObjectInfo:
        progress.moved(is_last=True)  # a directory store reads the whole file before it answers
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
        info = await once.put(key, body, checksum)
        return info if info.checksum is not None else await _there(once, key), checksum

    return await _unless_changed(source, store.bulk("put", source.size_bytes, attempt))


async def _there(once: Store, key: str) -> ObjectInfo:
    """Return what was put just now. Some proxies confirm a PUT that the store never received."""
    try:
        return await once.head(key)
    except ObjectNotFoundError:
        raise StoreError(
            f"{key} was acknowledged as stored, but does not exist",
            reason=FailureReason.TRANSIENT,
            operation="put",
            key=key,
        ) from None


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
        await drop(store, key, resume.upload_id)
        resume = None  # it was begun before the shard's size was known
    if resume is not None:
        try:
            upload_id = resume.upload_id
            listed: Iterable[StoredPart] = resume.parts
            if not listed:
                # Waiting for other credentials could last until the upload is given up.
                listed = await store.answering_within(math.inf).list_parts(key, upload_id)
            there = {part.number: part for part in listed}
        except StoreError as error:
            # It was completed or aborted since, or parts may not be listed here: sending again is always right.
            if error.reason.is_retryable and error.reason is not FailureReason.AUTH:
                raise
            await drop(store, key, resume.upload_id)
            resume = None
    if resume is None:
        upload_id = await store.create_multipart(key)
        size = part_size(source.size_bytes, smallest_part_bytes, store.capabilities, store.link)
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
    return info if info.checksum is not None else await store.head(key), whole


async def drop(store: PatientStore, key: str, upload_id: str) -> None:
    """Drop an upload that cannot be finished. A trainer's credentials may not allow it; then the sweeper does."""
    with contextlib.suppress(StoreError):
        await store.answering_within(_ABORT_S).abort_multipart(key, upload_id)


async def send_part(
    store: Store, source: Source, key: str, upload_id: str, part: PlannedPart, progress: Progress
) -> StoredPart:
    """Make one attempt to send a part. The result has the checksum of what was sent."""
    checksum = None
    if not store.capabilities.finds_checksums:
        algorithm = store.capabilities.checksum_algorithm
        checksum = await source.checksum(part.offset, part.size_bytes, algorithm, progress.moved)
    body = FileBody(source, part.offset, part.size_bytes, progress)
    return await store.put_part(key, upload_id, part.number, body, checksum)


async def _is_same(source: Source, part: PlannedPart, have: StoredPart, checksum: Checksum) -> bool:
    """Return whether the store already has this very part.

    SeaweedFS lists parts without their checksums; then the ETag must do, which is the part's MD5 unless the store
    encrypts (S3 API reference, "Object": ETag).
    """
    if have.size_bytes != part.size_bytes or have.checksum is not None:
        return (have.size_bytes, have.checksum) == (part.size_bytes, checksum)
    return have.etag.strip('"') == await source.md5(part.offset, part.size_bytes)


async def _unless_changed(source: Source, request: Awaitable[T]) -> T:
    """Await a request.

    If the store refuses its checksum, raise SourceError if the file's time shows that the bytes changed between our two
    reads; otherwise the network is at fault, or somebody who writes to it through a mapping.
    """
    try:
        return await request
    except IntegrityError as error:
        await asyncio.to_thread(source.check)
        raise IntegrityError(f"{error}, or somebody writes to {source.path!r} through a mapping") from error


async def verify_stored(
    store: PatientStore, info: ObjectInfo, key: str, size_bytes: int, checksum: Checksum
) -> None:
    """Compare size and checksum as the store reports them with what was read locally.

    If the store reports no checksum, read the object back.
    """
    if info.checksum is None:
        info = await read_back(store, key, size_bytes, checksum.algorithm)
    if (info.size_bytes, info.checksum) != (size_bytes, checksum):
        raise IntegrityError(
            f"the store has {info.size_bytes} bytes with {info.checksum}, but {size_bytes} with {checksum}"
            " were sent",
            operation="verify",
            key=key,
        )


async def read_back(store: PatientStore, key: str, size_bytes: int, algorithm: str) -> ObjectInfo:
    """Read every byte again and return the object with its checksum, for stores that keep none."""

    digest = Digest(algorithm)

    @contextlib.asynccontextmanager
    async def begin() -> AsyncIterator[Sink]:
        nonlocal digest
        digest = Digest(algorithm)
        yield digest.update

    info = await store.get_range(key, 0, size_bytes, begin)
    return ObjectInfo(key, info.size_bytes, info.etag, digest.checksum())


# --- many small shards -------------------------------------------------------------------------------------

# Up to this size, a request costs more than its bytes.
SMALL_BYTES = 256 << 10
# The most bytes that are sent on one connection and recorded together, so that it is soon known what has arrived.
# `Lane` limits how many shards they may be.
SERIES_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class SmallShard:
    """A shard of at most SMALL_BYTES whose upload has not begun."""

    key: str
    size_bytes: int
    open: Callable[[], Source]  # called in a worker thread


async def upload_many(store: PatientStore, shards: Sequence[SmallShard]) -> list[Checksum | None]:
    """Send shards one after the other as *one* request of the budgets, without retries.

    Returns the checksum of each shard that the store has, as the store answered it (rule R1), and None for the others:
    `upload` will send these, or raise what is wrong with them.
    """
    algorithm = store.capabilities.checksum_algorithm
    checksums: dict[str, Checksum] = {}
    stored: dict[str, ObjectInfo] = {}

    def read() -> Iterator[SmallPut]:
        for each in shards:
            try:
                put = _read(each, algorithm)
            except (StoreError, SourceError, OSError):
                continue  # `upload` will raise what is wrong
            checksums[each.key] = put.checksum
            yield put

    async def attempt(once: Store, progress: Progress, series: Series) -> None:
        def answered(info: ObjectInfo) -> None:
            stored[info.key] = info
            series.answered(info.size_bytes)

        await progress.may_send(sum(each.size_bytes for each in shards))
        series.begins()
        await once.put_many(read(), answered)

    with contextlib.suppress(StoreError):  # `upload` will meet the same error, and retries
        await store.series("put", len(shards), sum(each.size_bytes for each in shards), attempt)

    def is_right(shard: SmallShard) -> bool:
        info = stored[shard.key]
        return (info.size_bytes, info.checksum) == (shard.size_bytes, checksums[shard.key])

    async def ask(shard: SmallShard) -> None:
        try:
            info, checksum = stored[shard.key], checksums[shard.key]
            info = info if info.checksum is not None else await store.head(shard.key)
            await verify_stored(store, info, shard.key, shard.size_bytes, checksum)
        except StoreError:
            del stored[shard.key]

    await all_or_none(ask(each) for each in shards if each.key in stored and not is_right(each))
    return [checksums[each.key] if each.key in stored else None for each in shards]


def _read(shard: SmallShard, algorithm: str) -> SmallPut:
    """Read a small shard as a whole. The file is read only once: the bytes checksummed are the bytes sent."""
    with contextlib.closing(shard.open()) as source:
        data = source.read()
        source.check()
    return SmallPut(shard.key, data, checksum_of(data, algorithm))
