"""Finding out what a store enforces, by a few small requests on objects below `.ckpt-async/probe/`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ckpt_async.core.keys import PROBES, longest_keys
from ckpt_async.errors import FailureReason, PreconditionFailedError, StoreError
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody, Condition, Create, Match, Store
from ckpt_async.stores.opening import in_time

T = TypeVar("T")


class Probe:
    """The requests that every service understands. `hint`: what to do if there is no answer."""

    def __init__(self, store: Store, request_timeout_s: float, hint: str, other_etag: str) -> None:
        self._store, self._timeout_s, self._hint = store, request_timeout_s, hint
        self._other_etag = other_etag  # one that no object has
        # As long as the longest key of a run, to find out here if the store refuses such keys.
        name = f"{PROBES}{secrets.token_hex(8)}".ljust(max(map(len, longest_keys())) - len("-a"), "0")
        self._keys = self._key, self._spoiled, self._trailed = tuple(f"{name}-{each}" for each in "abc")

    async def within(self, request: Callable[[], Awaitable[T]]) -> T:
        return await in_time(request, self._timeout_s, self._hint)

    async def has_conditions(self, algorithm: str, created_etag: str) -> bool:
        """Return whether the store refuses to create the object again, or to replace another version of it, and does
        replace this one: if it refuses every condition, it does not enforce them either.
        """
        is_refused, is_stale_refused = await gathered(
            self.is_put_refused(algorithm, Create()), self.is_put_refused(algorithm, Match(self._other_etag))
        )
        is_swapped = not await self.is_put_refused(algorithm, Match(created_etag))
        return bool(is_refused and is_stale_refused and is_swapped)

    async def is_put_refused(self, algorithm: str, condition: Condition) -> bool:
        return await self.is_refused(lambda: self.put(algorithm, condition))

    async def is_refused(self, request: Callable[[], Awaitable[object]]) -> bool:
        """Return whether the condition of this request is refused. A refusal of the request as such is a result too:
        the store does not know the condition, and so enforces nothing.
        """
        try:
            await self.within(request)
        except PreconditionFailedError:
            return True
        except StoreError as error:
            if not is_verdict(error):
                raise
        return False

    async def put(self, algorithm: str, condition: Condition = None) -> str:
        """Put the object with new bytes, and return its ETag."""
        body = BytesBody(secrets.token_bytes(8))
        checksum = checksum_of(body.data, algorithm)
        return (await self._store.put(self._key, body, checksum, condition=condition)).etag

    async def clean(self) -> None:
        """Delete the objects, best effort: credentials without the right to delete are allowed, and leave them."""
        with contextlib.suppress(StoreError):
            await self.within(lambda: self._store.delete(self._keys))


def is_verdict(error: BaseException) -> bool:
    """Return whether a failed request says something about the store's abilities, not about the connection."""
    return isinstance(error, StoreError) and error.reason in (FailureReason.CHECKSUM, FailureReason.OTHER)


async def gathered(*requests: Coroutine[Any, Any, Any]) -> Sequence[Any]:
    """Return all results, or raise the first failure once every request has ended."""
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
