"""Finding out what a store enforces, by a few small requests on blobs below `.ckpt-async/probe/`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from ckpt_async.core.keys import PROBES, longest_keys
from ckpt_async.errors import FailureReason, PreconditionFailedError, StoreError
from ckpt_async.stores.azure import answers
from ckpt_async.stores.azure.blocks import ALGORITHM
from ckpt_async.stores.azure.sending import BLOB, Compared, Sender
from ckpt_async.stores.azure.session import NOTHING, AzureSession
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.http.failures import reachable_hint
from ckpt_async.stores.interface import BytesBody, Condition, Create, Match, Store
from ckpt_async.stores.opening import in_time

T = TypeVar("T")

_WRONG = {
    Compared.CRC64: answers.crc64_header(checksum_of(b"b", ALGORITHM)),
    Compared.MD5: "kutf/uauL+w61xx3dTFXjw==",
}


class Probe:
    """Five small writes to two blobs, which are deleted again; six if the store does not compare CRC64."""

    def __init__(self, store: Store, session: AzureSession, sender: Sender, request_timeout_s: float) -> None:
        self._store, self._session, self._sender = store, session, sender
        self._timeout_s = request_timeout_s
        self._hint = reachable_hint(session.location.account.endpoint_url)
        # As long as the longest key of a run, to find out here if the store refuses such keys.
        name = f"{PROBES}{secrets.token_hex(8)}".ljust(max(map(len, longest_keys())) - len("-a"), "0")
        self._key, self._spoiled = f"{name}-a", f"{name}-b"

    async def is_conditional(self) -> bool:
        """Return whether conditions are enforced, and tell the sender which checksum the store compares. Raises
        StoreError if it compares none.
        """
        try:
            self._sender.compared = await self._compared()
            return await self._conditions()
        finally:
            # Best effort: credentials without the right to delete are allowed, and leave the blobs behind.
            with contextlib.suppress(StoreError):
                await self._within(lambda: self._store.delete([self._key, self._spoiled]))

    async def _compared(self) -> Compared:
        for each in Compared:
            headers = {**BLOB, each.value: _WRONG[each]}
            try:
                body = BytesBody(b"a")
                await self._within(
                    partial(self._session.put, "put_blob", self._spoiled, NOTHING, headers, body)
                )
            except StoreError as error:
                if error.reason is FailureReason.CHECKSUM:
                    return each
                if error.reason is not FailureReason.OTHER:
                    raise
        raise self._session.location.error(
            "the store verifies neither CRC64 nor MD5 of the bytes that it receives",
            reason=FailureReason.OTHER,
            operation="open",
            hint="is the endpoint Azure, or an emulator that verifies them (Azurite)?",
        )

    async def _conditions(self) -> bool:
        created = await self._put(None)
        stale = Match('"0x8D0000000000000"')
        is_refused, is_stale_refused = await asyncio.gather(
            self._is_refused(Create()), self._is_refused(stale)
        )
        return is_refused and is_stale_refused and not await self._is_refused(Match(created))

    async def _is_refused(self, condition: Condition) -> bool:
        try:
            await self._put(condition)
        except PreconditionFailedError:
            return True
        return False

    async def _put(self, condition: Condition) -> str:
        body = BytesBody(secrets.token_bytes(8))
        checksum = checksum_of(body.data, ALGORITHM)
        put = partial(self._store.put, self._key, body, checksum, condition=condition)
        return (await self._within(put)).etag

    async def _within(self, request: Callable[[], Awaitable[T]]) -> T:
        return await in_time(request, self._timeout_s, self._hint)
