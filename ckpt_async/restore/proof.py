"""Proof of damage: a store is blamed only for an answer that it gives twice, over connections that share nothing.

A wrong answer that comes only once may be the network's fault, and an intact checkpoint must not be marked as
damaged because of a byte that was corrupted on its way.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from ckpt_async.errors import InvalidRecordError
from ckpt_async.restore.session import Session, session, unreliable
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.transfer.patient import PatientStore

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Noting:
    """A store that remembers the hash of each record that it has returned."""

    def __init__(self, store: PatientStore) -> None:
        self._store = store
        self.brought: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        data, info = await self._store.get(key, max_size_bytes=max_size_bytes)
        self.brought[key] = hashlib.sha256(data).hexdigest()
        return data, info


async def sure(opened: Session, look: Callable[[Session], Awaitable[T]]) -> T:
    """Return what `look` makes of the store's records. If it cannot read one, look again over other connections.

    Of records that it reads concurrently, `look` must read all before it raises for the first bad one, so that two
    looks can be compared.

    Raises InvalidRecordError if it fails twice for the same reason over the same bytes; UnreliableReadError if no
    two looks agree.
    """
    try:
        return await look(opened)
    except InvalidRecordError as error:
        logger.info("record_is_read_again error=%s", error)
    failures: list[tuple[str, dict[str, str]]] = []
    for _ in range(2):
        async with session(opened.remote, opened.options) as afresh:
            store = _Noting(afresh.store)
            try:
                return await look(replace(afresh, store=cast(PatientStore, store)))
            except InvalidRecordError as error:
                failures.append((str(error), store.brought))
                last = error
    if failures[0] == failures[1]:
        raise last
    raise unreliable(f"records in {opened.remote} are unreadable, differently at each read ({last})")
