"""One attempt of a request: what its error means, how long it took, and what it tells of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ckpt_async.core.observe import Observer
from ckpt_async.errors import FailureReason, LocalReadError, StoreError
from ckpt_async.stores.heard import count_answer
from ckpt_async.transfer.patience import Health, Patience

T = TypeVar("T")

# What a request may come to, besides success.
_ANSWERS = frozenset({FailureReason.PRECONDITION, FailureReason.NOT_FOUND})


class Metered:
    """Makes attempts, and tells the observer and the store's health of each."""

    def __init__(self, observer: Observer, health: Health, patience: Patience) -> None:
        self.observer, self._health, self._patience = observer, health, patience

    async def timed(self, operation: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make one attempt, and report how long it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            return await self.heeded(operation, attempt)
        finally:
            self.observer.requests_finished(operation, [loop.time() - started])

    async def heeded(self, operation: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make one attempt, classify its error, and note the store's health."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            result = await attempt()
        except TimeoutError as timeout:
            error = StoreError(
                str(timeout) or f"no answer or no progress within {loop.time() - started:.1f} s",
                reason=FailureReason.TIMEOUT,
                operation=operation,
            )
            self._failed(operation, error)
            raise error from None
        except StoreError as error:
            self._failed(operation, error)
            if error.reason in _ANSWERS:
                count_answer()
            raise
        count_answer()
        self._health.succeeded(operation, loop.time())
        return result

    def _failed(self, operation: str, error: StoreError) -> None:
        if error.reason in _ANSWERS:
            return  # an answer, not a failure; the caller decides what it means
        self.observer.attempt_failed(error.reason)
        is_final = not self._patience.may_heal(error)
        if isinstance(error, LocalReadError):
            self._health.failed_here(error, is_final=is_final)
        else:
            self._health.failed(operation, error, asyncio.get_running_loop().time(), is_final=is_final)
