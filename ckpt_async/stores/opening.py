"""The deadline of each request by which a store is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.heard import heard

T = TypeVar("T")


async def in_time(request: Awaitable[T], timeout_s: float, hint: str = "") -> T:
    """Return the result of `request`. Raises StoreError (TIMEOUT) if it takes longer; `hint`: what to do about that."""
    try:
        async with asyncio.timeout(timeout_s):
            result = await request
    except TimeoutError as error:
        raise StoreError(
            f"no answer within {timeout_s:g} s", reason=FailureReason.TIMEOUT, operation="open", hint=hint
        ) from error
    heard.num_answers += 1
    return result
