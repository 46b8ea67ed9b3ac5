"""Conditional writes whose answer can be trusted (rule R13).

After a lost reply our own successful PUT answers 412 to the retry. So a refusal is never believed: the object
is read back and compared. Every record written here carries a nonce, so equal bytes mean it is ours.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt_async.errors import ObjectNotFoundError, PreconditionFailedError
from ckpt_async.records import MAX_RECORD_SIZE_BYTES
from ckpt_async.requests import Requests
from ckpt_async.store import Condition, Create, Match, Store
from ckpt_async.transfer import bytes_body


async def create_once(store: Store, requests: Requests, key: str, data: bytes) -> bytes:
    """Create the object unless there is one, and return what is there now: `data` if and only if we won."""
    if not store.capabilities.conditional_put:
        there = await read(store, requests, key)
        if there is not None:
            return there[0]
        await put(store, requests, key, data)
        return data
    while True:
        try:
            await put(store, requests, key, data, Create())
            return data
        except PreconditionFailedError:
            there = await read(store, requests, key)
            if there is not None:
                return there[0]
            # 409 of a concurrent write that then failed, or the object was deleted meanwhile: try again


async def advance(
    store: Store, requests: Requests, key: str, change: Callable[[bytes | None], bytes | None]
) -> bytes | None:
    """Replace an object by compare-and-swap until it is as wanted, and return what is there then.

    `change` gets the present content (None if there is none) and returns the new one, or None to leave it.
    It must never go back: it is called again with whatever a competitor wrote.
    """
    there = await read(store, requests, key)
    while True:
        wanted = change(there[0] if there else None)
        if wanted is None:
            return there[0] if there else None
        condition: Condition = Match(there[1]) if there else Create()
        if not store.capabilities.conditional_put:
            condition = None
        try:
            await put(store, requests, key, wanted, condition)
            return wanted
        except PreconditionFailedError:
            there = await read(store, requests, key)
            if there is not None and there[0] == wanted:
                return wanted


async def put(store: Store, requests: Requests, key: str, data: bytes, condition: Condition = None) -> None:
    """Write a small object in the control lane."""
    body, checksum = bytes_body(data, store.capabilities.checksum_algorithm)
    await requests.control("put", lambda: store.put(key, body, checksum, condition=condition))


async def read(
    store: Store, requests: Requests, key: str, *, max_size_bytes: int = MAX_RECORD_SIZE_BYTES
) -> tuple[bytes, str] | None:
    """Content and ETag of a small object, or None if there is none."""
    try:
        data, info = await requests.control("get", lambda: store.get(key, max_size_bytes=max_size_bytes))
    except ObjectNotFoundError:
        return None
    return data, info.etag
