"""`put_many` and `get_many` for stores that have no faster way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ckpt_async.stores.checks import check_size
from ckpt_async.stores.interface import BytesBody, ObjectInfo, SmallGet, SmallPut, Store
from ckpt_async.threads import in_thread


class _Reader(Protocol):
    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]: ...


async def put_one_by_one(
    store: Store, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]
) -> None:
    left = iter(puts)
    while (each := await in_thread(next, left, None)) is not None:
        stored(await store.put(each.key, BytesBody(each.data), each.checksum))


async def get_one_by_one(
    reader: _Reader, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]
) -> None:
    left = iter(gets)
    while (each := await in_thread(next, left, None)) is not None:
        data, _ = await reader.get(each.key, max_size_bytes=each.size_bytes)
        check_size(len(data), each)
        await in_thread(got, each, memoryview(data))
