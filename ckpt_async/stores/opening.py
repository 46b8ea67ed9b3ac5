"""The deadline of each request by which a store is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.heard import count_answer

T = TypeVar("T")


# The pauses between attempts of a request that a store refuses because it is busy.
PAUSE_S, MAX_PAUSE_S = 0.05, 1.0


async def in_time(
    request: Callable[[], Awaitable[T]], timeout_s: float, hint: str = "", *, is_answer: bool = True
) -> T:
    """Return the result of `request`, which is made again if the store is too busy for it: it has done nothing then.

    Raises StoreError (TIMEOUT) if that takes longer; `hint`: what to do about it. `is_answer`: whether success shows
    that the store answers; some are opened to read without any request.
    """
    pause_s = PAUSE_S
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    result = await request()
                    break
                except StoreError as error:
                    if error.reason is not FailureReason.THROTTLED:
                        raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
    except TimeoutError as error:
        raise StoreError(
            f"no answer within {timeout_s:g} s", reason=FailureReason.TIMEOUT, operation="open", hint=hint
        ) from error
    if is_answer:
        count_answer()
    return result
