"""Conditional writes whose answer can be trusted (rule R13).

If the reply to a successful PUT is lost, its retry is answered with 412. So a refusal is never believed: the object is
read back and compared. Every record written here carries a nonce, so equal bytes mean that it is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ckpt_async.core.records import MAX_RECORD_SIZE_BYTES
from ckpt_async.errors import (
    FailureReason,
    InvalidRecordError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    PreconditionFailedError,
    StoreError,
)
from ckpt_async.stores.interface import Condition, Create, Match
from ckpt_async.transfer.patient import PatientStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

# So many refusals in a row to create an object that is not there are no competition: from then on with pauses.
MAX_REFUSALS = 5


async def create_once(store: PatientStore, key: str, data: bytes) -> bytes:
    """Create the object unless it exists, and return what is there now: `data` if and only if we won.

    Raises InvalidRecordError if the object there is larger than any record and than `data`, and StoreError if the store
    goes on refusing although there is none.
    """
    limit = max(len(data), MAX_RECORD_SIZE_BYTES)
    if not store.capabilities.conditional_put:
        there = await read(store, key, max_size_bytes=limit)
        if there is not None:
            return there[0]
        await store.put(key, data)
        return data
    for _ in range(MAX_REFUSALS):
        try:
            await store.put(key, data, Create())
            return data
        except PreconditionFailedError:
            there = await read(store, key, max_size_bytes=limit)
            if there is not None:
                return there[0]
            # Either a 409 because of a concurrent write that then failed, or the object has been deleted: try again.
    raise StoreError(
        "the store refuses to create it, as if it were there, but does not have it",
        reason=FailureReason.TRANSIENT,
        operation="put",
        key=key,
    )


async def advance(
    store: PatientStore, key: str, change: Callable[[bytes | None], bytes | None]
) -> bytes | None:
    """Replace an object by compare-and-swap until it is as wanted, and return what is there then.

    `change` gets the present content (None if there is none, b"" if it is larger than any record) and returns the new
    content, or None to leave it. It must only ever move forward, because it is called again with whatever a competitor
    wrote.
    """
    there = await _read_to_replace(store, key)
    while True:
        try:
            wanted = change(there[0] if there else None)
        except InvalidRecordError as error:
            raise error.at(key) from None
        if wanted is None:
            return there[0] if there else None
        condition: Condition = Match(there[1]) if there else Create()
        if not store.capabilities.conditional_put:
            condition = None
        try:
            await store.put(key, wanted, condition)
            return wanted
        except PreconditionFailedError:
            there = await _read_to_replace(store, key)
            if there is not None and there[0] == wanted:
                return wanted


async def read(
    store: PatientStore, key: str, *, max_size_bytes: int = MAX_RECORD_SIZE_BYTES
) -> tuple[bytes, str] | None:
    """Return content and ETag of a small object, or None if there is none.

    Raises InvalidRecordError if it is larger than `max_size_bytes`: such an object is not a record, and is not read.
    """
    try:
        data, info = await store.get(key, max_size_bytes=max_size_bytes)
    except ObjectNotFoundError:
        return None
    except ObjectTooLargeError:
        raise InvalidRecordError(
            f"it has more than {max_size_bytes} bytes, so it is not a record", key=key
        ) from None
    return data, info.etag


async def read_record(
    store: PatientStore,
    key: str,
    decode: Callable[[bytes], T],
    *,
    max_size_bytes: int = MAX_RECORD_SIZE_BYTES,
) -> tuple[T, str] | None:
    """Return a record and its ETag, or None if there is none. Raises InvalidRecordError, which names the key."""
    there = await read(store, key, max_size_bytes=max_size_bytes)
    try:
        return None if there is None else (decode(there[0]), there[1])
    except InvalidRecordError as error:
        raise error.at(key) from None


async def if_readable(reading: Awaitable[T]) -> T | None:
    """Return what is read, or None if it is unreadable, which is logged: for callers that can do without."""
    try:
        return await reading
    except InvalidRecordError as error:
        logger.warning("record_unreadable error=%s; skipping it", error)
        return None


async def _read_to_replace(store: PatientStore, key: str) -> tuple[bytes, str] | None:
    """Do the same as `read`, but return b"" as the content of an object that is too large."""
    try:
        return await read(store, key)
    except InvalidRecordError:
        info = await store.head(key)
        return b"", info.etag
