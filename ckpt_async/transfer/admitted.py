"""One attempt of a request that carries shard bytes: admitted by the budgets, and ended if its bytes do not move."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.transfer.budgets import Budgets
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
