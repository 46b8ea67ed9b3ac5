"""The time limit of the small requests by which a store finds out what its server enforces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.options import StoreOptions

T = TypeVar("T")


async def in_time(requests: Awaitable[T], options: StoreOptions, hint: str) -> T:
    """Return the result of `requests`. Raises StoreError (TIMEOUT) if it takes longer than connecting and reading may.

    `hint`: what to do about that.
    """
    limit_s = options.connect_timeout_s + options.read_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await requests
    except TimeoutError as error:
        raise StoreError(
            f"no answer within {limit_s:g} s",
            reason=FailureReason.TIMEOUT,
            operation="open",
            hint=hint,
        ) from error
