"""One attempt of a request: admitted by the budgets, ended if its bytes do not move, timed, its error classified."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, LocalReadError, StoreError
from ckpt_async.stores.heard import count_answer
from ckpt_async.transfer.budgets import Budgets
from ckpt_async.transfer.patience import Health, Patience
from ckpt_async.transfer.progress import Progress

T = TypeVar("T")

# How often one request is begun again because other connections are faster.
MAX_SLOW_CONNECTIONS = 2


@dataclass(frozen=True, slots=True)
class Admitted:
    """Makes attempts within the budgets, for requests of one owner and one group (see `Lane`)."""

    budgets: Budgets
    settings: Settings
    owner: Hashable = 0
    group: Hashable = None
    has_place: bool = False  # the caller holds a place, in which the requests are made one after the other

    async def attempt(
        self, size_bytes: int, request: Callable[[Progress], Awaitable[T]], num_requests: int = 1
    ) -> T:
        """Make one attempt of a request, or of a series of them that counts as one.

        It has a deadline that grows with its size and is put off as long as enough bytes move. It ends early when none
        do (rule R14: aiobotocore's own read timeout is not armed while a body is being written). Raises TimeoutError.
        """
        place = contextlib.nullcontext() if self.has_place else self.budgets.bulk.hold(self.owner, self.group)
        num_slow = 0
        async with place, self.budgets.bytes.hold(size_bytes):
            while True:
                # The cap on the bandwidth may itself make a request slow.
                may_begin_again = num_requests == 1 and num_slow < MAX_SLOW_CONNECTIONS
                may_begin_again &= not self.budgets.bandwidth.is_capped
                progress = Progress(size_bytes, num_requests, self.settings, self.budgets)
                try:
                    async with progress:
                        with self.budgets.bulk.watching(progress, size_bytes if may_begin_again else 0):
                            return await request(progress)
                except TimeoutError:
                    if progress.is_too_slow:
                        num_slow += 1
                        continue
                    if progress.is_late:  # with fewer at once, each has more of the link
                        self._throttled(progress)
                    raise TimeoutError(progress.how_far()) from None
                except StoreError as error:
                    # The socket's own patience may be shorter than ours.
                    is_unanswered = error.reason is FailureReason.TIMEOUT and progress.waited_s > 0
                    if error.reason is FailureReason.THROTTLED or is_unanswered:
                        self._throttled(progress)
                    raise

    def _throttled(self, progress: Progress) -> None:
        now_s = asyncio.get_running_loop().time()
        self.budgets.bulk.throttled(progress.began_s, now_s, progress.waited_s)


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
            return await self.classified(operation, attempt)
        finally:
            self.observer.requests_finished(operation, [loop.time() - started])

    async def classified(self, operation: str, attempt: Callable[[], Awaitable[T]]) -> T:
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
