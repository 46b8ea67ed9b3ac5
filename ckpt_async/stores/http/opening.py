"""The small requests by which a store finds out what its server enforces."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.http.turns import Turns
from ckpt_async.stores.options import StoreOptions

T = TypeVar("T")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

# Called when the server has answered.
_answered: ContextVar[Callable[[], None]] = ContextVar("answered", default=lambda: None)


@contextlib.asynccontextmanager
async def while_answering(silence_s: float) -> AsyncIterator[None]:
    """Bound the block by `silence_s` since it began or `in_time` last got an answer: a slow server that answers one
    request after the other is not silent. Raises StoreError (TIMEOUT).
    """
    loop = asyncio.get_running_loop()

    def go_on() -> None:
        if not scope.expired():
            scope.reschedule(loop.time() + silence_s)

    before = _answered.set(go_on)
    try:
        async with asyncio.timeout(silence_s) as scope:
            yield
    except TimeoutError:
        message = f"no answer within {silence_s:g} s"
        raise StoreError(message, reason=FailureReason.TIMEOUT, operation="open") from None
    finally:
        _answered.reset(before)


async def in_time(request: Awaitable[T], options: StoreOptions, hint: str) -> T:
    """Return the result of `request`. Raises StoreError (TIMEOUT) if it takes longer than connecting and reading may.

    `hint`: what to do about that.
    """
    limit_s = options.connect_timeout_s + options.read_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            result = await request
    except TimeoutError as error:
        raise StoreError(
            f"no answer within {limit_s:g} s",
            reason=FailureReason.TIMEOUT,
            operation="open",
            hint=hint,
        ) from error
    except StoreError as error:
        if error.reason not in (FailureReason.TRANSIENT, FailureReason.TIMEOUT):
            _answered.get()()
        raise
    _answered.get()()
    return result


class FirstRequests:
    """Makes requests at the same time, until one fails although the server has answered another: it may accept only few
    connections from one address. From then on they are made one after the other, each repeated as long as making a
    connection may take. A server that has not answered at all is nothing to wait for here.
    """

    def __init__(self, options: StoreOptions, hint: str, drop_idle: Callable[[], None]) -> None:
        self._options, self._hint, self._drop_idle = options, hint, drop_idle
        self._has_answered = self._is_scarce = False
        self._turns = Turns(drop_idle)
        self._turn = asyncio.Lock()

    async def outcomes(self, *requests: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return what each request returned or raised."""
        if self._is_scarce:
            return [await self._alone(request) for request in requests]
        outcomes = await asyncio.gather(*map(self._once, requests))
        self._has_answered = self._has_answered or not all(map(_may_pass, outcomes))
        if self._has_answered:
            for index, request in enumerate(requests):
                if _may_pass(outcomes[index]):
                    self._is_scarce = True
                    outcomes[index] = await self._alone(request)
        return outcomes

    async def outcome_of_last(self, request: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return what a request returned or raised that nothing depends on: it is repeated only where connections are
        known to be few.
        """
        return await (self._alone if self._is_scarce else self._once)(request)

    async def _once(self, request: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            with self._turns.one():
                return await in_time(request(), self._options, self._hint)
        except Exception as error:  # noqa: BLE001  the caller judges it
            return error

    async def _alone(self, request: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        give_up_at = time.monotonic() + self._options.connect_timeout_s
        pause_s = _SHORTEST_PAUSE_S
        while True:
            async with self._turn:
                outcome = await self._once(request)
            if not _may_pass(outcome) or time.monotonic() >= give_up_at:
                return outcome
            self._drop_idle()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _may_pass(outcome: object) -> bool:
    return isinstance(outcome, StoreError) and outcome.reason is FailureReason.TRANSIENT
