"""Copies within the store, whole or in parts, and verified. No byte leaves the store."""

from __future__ import annotations

import asyncio

from ckpt_async.core.model import Checksum
from ckpt_async.errors import IntegrityError, ObjectNotFoundError, StoreError
from ckpt_async.stores.interface import ObjectInfo, Store, StoredPart
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none
from ckpt_async.transfer.upload import PlannedPart, drop, part_size, plan_parts, read_back, verify_stored

# Larger objects are copied in parts of this size, although S3 copies up to 5 GiB at once: parts are copied in parallel,
# and no request is silent for minutes, which a proxy may take for a dead connection.
COPY_PART_BYTES = 1 << 30
_PARTS_AT_ONCE = 8


async def copy(store: PatientStore, source: str, key: str, size_bytes: int, checksum: Checksum) -> None:
    """Make `key` a copy of `source`, which has this size and checksum, replacing whatever is there.

    On return, the store has confirmed that the copy has them too. Retries are made part by part.

    Raises ObjectNotFoundError if the source is missing, IntegrityError if its content differs, StoreError when the
    requests give up.
    """
    there = await _head(store, source, size_bytes)
    if there.size_bytes != size_bytes or there.checksum not in (None, checksum):
        raise IntegrityError(
            f"the store has {there.size_bytes} bytes with {there.checksum}, expected {size_bytes} with"
            f" {checksum}",
            operation="copy",
            key=source,
        )
    can = store.capabilities
    is_small = size_bytes <= min(COPY_PART_BYTES, can.max_copy_bytes)
    if is_small or not (can.multipart and can.copies_parts):
        await store.by_itself("copy", size_bytes, lambda once: once.copy(source, there.etag, key))
    else:
        await _in_parts(store, there, key, checksum)
    await verify_stored(store, await _head(store, key, size_bytes), key, size_bytes, checksum)


async def find(store: PatientStore, key: str, size_bytes: int, checksum: Checksum) -> ObjectInfo | None:
    """Return the object under the key if it has this size and checksum, else None. A store that reports no checksum is
    asked for the bytes.
    """
    try:
        there = await _head(store, key, size_bytes)
        if there.size_bytes == size_bytes and there.checksum is None:
            there = await read_back(store, key, size_bytes, checksum.algorithm)
    except ObjectNotFoundError:
        return None
    return there if (there.size_bytes, there.checksum) == (size_bytes, checksum) else None


async def _head(store: PatientStore, key: str, size_bytes: int) -> ObjectInfo:
    # A directory store reads the whole file before it answers.
    return await store.by_itself("head", size_bytes, lambda once: once.head(key))


async def _in_parts(store: PatientStore, source: ObjectInfo, key: str, checksum: Checksum) -> None:
    upload_id = await store.create_multipart(key)
    at_once = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def copy_part(part: PlannedPart) -> StoredPart:
        async def attempt(once: Store) -> StoredPart:
            return await once.copy_part(
                source.key, source.etag, key, upload_id, part.number, part.offset, part.size_bytes
            )

        async with at_once:
            return await store.by_itself("copy", part.size_bytes, attempt)

    size = part_size(source.size_bytes, COPY_PART_BYTES, store.capabilities)
    try:
        parts = await all_or_none(copy_part(part) for part in plan_parts(source.size_bytes, size))
        await store.complete_multipart(key, upload_id, parts, checksum, source.size_bytes)
    except StoreError:
        await drop(store, key, upload_id)
        raise


async def drop_parts(store: PatientStore, key: str) -> None:
    """Drop the parts that killed attempts to copy to exactly this key have left."""
    for each in await store.list_multiparts(key):
        if each.key == key:
            await store.abort_multipart(key, each.upload_id)
