"""Finding out what a store enforces, by a few small requests on an object below `.ckpt-async/probe/`: Google enforces
everything, emulators less.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ckpt_async.core.keys import PROBES, longest_keys
from ckpt_async.errors import FailureReason, PreconditionFailedError, StoreError
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.gcs.answers import ALGORITHM
from ckpt_async.stores.gcs.session import GcsSession
from ckpt_async.stores.http.failures import reachable_hint
from ckpt_async.stores.interface import BytesBody, Condition, Create, Match, Store
from ckpt_async.stores.opening import in_time

T = TypeVar("T")

_BODY = BytesBody(b"a")
_OTHER_GENERATION = "1"


@dataclass(frozen=True, slots=True)
class Found:
    """What the store was seen to support."""

    has_conditional_put: bool
    has_conditional_delete: bool
    has_multipart: bool

    def remarks(self) -> Iterator[str]:
        """Yield what an emulator lacks; Google lacks nothing."""
        if not self.has_multipart:
            yield "no multipart uploads: an interrupted shard is sent again from its beginning"
        if not self.has_conditional_delete:
            yield "conditions of deletes are ignored: the generation is compared just before the delete"


class Probe:
    """Eight requests on one object, some of them concurrent; seven if the store has no multipart uploads."""

    def __init__(self, store: Store, session: GcsSession, request_timeout_s: float) -> None:
        self._store, self._session, self._timeout_s = store, session, request_timeout_s
        # As long as the longest key of a run, to find out here if the store refuses such keys.
        self._key = f"{PROBES}{secrets.token_hex(8)}".ljust(max(map(len, longest_keys())), "0")

    async def find_out(self) -> Found:
        created = await self._within(lambda: self._put(Create()))
        try:
            async with asyncio.TaskGroup() as group:
                is_refused = group.create_task(self._is_refused(lambda: self._put(Create())))
                is_stale_refused = group.create_task(
                    self._is_refused(lambda: self._put(Match(_OTHER_GENERATION)))
                )
                has_multipart = group.create_task(self._within(self._has_multipart))
            is_swapped = not await self._is_refused(lambda: self._put(Match(created)))
            keeps_others = await self._keeps_others()
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            # Credentials without the right to delete are allowed, and leave the object behind.
            with contextlib.suppress(StoreError):
                await self._within(lambda: self._store.delete([self._key]))
        # If the store refuses every condition, it does not enforce them either.
        is_conditional = is_refused.result() and is_stale_refused.result() and is_swapped
        return Found(is_conditional, keeps_others, has_multipart.result())

    async def _put(self, condition: Condition) -> str:
        checksum = checksum_of(_BODY.data, ALGORITHM)
        return (await self._store.put(self._key, _BODY, checksum, condition=condition)).etag

    async def _keeps_others(self) -> bool:
        try:
            return await self._is_refused(lambda: self._store.delete_if(self._key, _OTHER_GENERATION))
        except StoreError as error:
            if error.reason is FailureReason.AUTH:
                return True  # the credentials have no right to delete at all
            raise

    async def _is_refused(self, request: Callable[[], Awaitable[object]]) -> bool:
        try:
            await self._within(request)
        except PreconditionFailedError:
            return True
        return False

    async def _has_multipart(self) -> bool:
        """Return whether the store supports the XML API."""
        try:
            upload_id = await self._store.create_multipart(self._key)
        except StoreError as error:
            if error.reason in (FailureReason.NOT_FOUND, FailureReason.OTHER):
                return False
            raise
        await self._store.abort_multipart(self._key, upload_id)
        return True

    async def _within(self, request: Callable[[], Awaitable[T]]) -> T:
        return await in_time(request, self._timeout_s, reachable_hint(self._session.endpoint))
