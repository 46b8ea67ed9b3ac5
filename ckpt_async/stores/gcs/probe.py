"""What a store enforces, found out by a few small requests on objects below `.ckpt_async/probe/`: Google all of it,
emulators less.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt_async.core.keys import PROBES, longest_keys
from ckpt_async.errors import FailureReason, PreconditionFailedError, StoreError
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.gcs.answers import ALGORITHM
from ckpt_async.stores.gcs.session import GcsSession
from ckpt_async.stores.interface import BytesBody, Condition, Create, Match, Store

T = TypeVar("T")

_BODY = BytesBody(b"a")
_OTHER_GENERATION = "1"


@dataclass(frozen=True, slots=True)
class Found:
    """What the store was seen to do."""

    has_conditional_put: bool
    has_conditional_delete: bool
    has_multipart: bool

    def remarks(self) -> Iterator[str]:
        """Of an emulator; Google does it all."""
        if not self.has_multipart:
            yield "no parts: an interrupted shard is sent again from its beginning"
        if not self.has_conditional_delete:
            yield "conditions of deletes are ignored: the generation is compared just before"


class Probe:
    """Seven requests on one object, in three rounds."""

    def __init__(self, store: Store, session: GcsSession) -> None:
        self._store, self._session = store, session
        # As long as any key of a run's: what the store does not take is found out here.
        self._key = f"{PROBES}{secrets.token_hex(8)}".ljust(max(map(len, longest_keys())), "0")

    async def find_out(self) -> Found:
        created = await self._within(self._put(Create()))
        try:
            async with asyncio.TaskGroup() as group:
                is_refused = group.create_task(self._is_refused(self._put(Create())))
                is_stale_refused = group.create_task(self._is_refused(self._put(Match(_OTHER_GENERATION))))
                has_multipart = group.create_task(self._within(self._has_multipart()))
            is_swapped = not await self._is_refused(self._put(Match(created)))
            keeps_others = await self._keeps_others()
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            with contextlib.suppress(
                StoreError
            ):  # credentials that may not delete are allowed, and keep what they write
                await self._within(self._store.delete([self._key]))
        # A store that refuses every condition enforces nothing either.
        is_conditional = is_refused.result() and is_stale_refused.result() and is_swapped
        return Found(is_conditional, keeps_others, has_multipart.result())

    async def _put(self, condition: Condition) -> str:
        checksum = checksum_of(_BODY.data, ALGORITHM)
        return (await self._store.put(self._key, _BODY, checksum, condition=condition)).etag

    async def _keeps_others(self) -> bool:
        try:
            return await self._is_refused(self._store.delete_if(self._key, _OTHER_GENERATION))
        except StoreError as error:
            if error.reason is FailureReason.AUTH:
                return True  # it may not delete at all
            raise

    async def _is_refused(self, request: Coroutine[Any, Any, object]) -> bool:
        try:
            await self._within(request)
        except PreconditionFailedError:
            return True
        return False

    async def _has_multipart(self) -> bool:
        """Whether the store speaks the XML API."""
        try:
            upload_id = await self._store.create_multipart(self._key)
        except StoreError as error:
            if error.reason in (FailureReason.NOT_FOUND, FailureReason.OTHER):
                return False
            raise
        await self._store.abort_multipart(self._key, upload_id)
        return True

    async def _within(self, request: Coroutine[Any, Any, T]) -> T:
        options = self._session.options
        limit_s = options.connect_timeout_s + options.read_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await request
        except TimeoutError as error:
            raise StoreError(
                f"no answer within {limit_s:g} s",
                reason=FailureReason.TIMEOUT,
                operation="open",
                hint=f"is {self._session.endpoint} reachable from here?",
            ) from error
