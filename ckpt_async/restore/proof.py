"""What may be held against a store: an answer that it gives twice, over connections that share nothing.

One that comes once may be the wire's: a checkpoint that is whole must not be marked for a byte that went wrong on its
way.
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
    """A store, and what it has brought of each record."""

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
    """What `look` makes of the store's records. If it cannot read one, it looks again over other connections. Of those
    that it reads at once it must read all, and complain of the first.

    Raises InvalidRecordError if it fails twice for the same reason over the same bytes; UnreliableReadError if no two
    looks agree.
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
    raise unreliable(
        f"records in {opened.remote} are unreadable, in another way each time they are read ({last})"
    )
