"""How long and how often a request is retried, and whether the store answers at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, LocalReadError, StoreError
from ckpt_async.transfer.progress import Silence

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A wrong checksum comes from a broken network or a broken client; a few attempts tell which.
MAX_CHECKSUM_ATTEMPTS = 5
# Shorter outages of the store are not logged.
QUIET_OUTAGE_S = 5.0
# A store may refuse these alone: over a quota, or without the right to write. Answers to others then prove nothing.
_WRITES = frozenset({"put", "create_multipart", "upload_part", "complete", "copy"})


class Patience:
    """What is retried, and until when. See `PatientStore`, whose settings these are."""

    def __init__(
        self,
        settings: Settings,
        health: Health,
        *,
        is_patient: bool,
        silence_s: float,
        is_retried: bool = True,
    ) -> None:
        self._settings, self._health, self._is_retried = settings, health, is_retried
        self.is_patient, self.silence_s = is_patient, silence_s

    async def persist(self, attempt: Callable[[], Awaitable[T]], silence: Silence | None = None) -> T:
        """Call `attempt` until it succeeds, a retry cannot help, or `upload_timeout_s` has passed."""
        if not self._is_retried:
            return await attempt()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.upload_timeout_s
        backoff = tenacity.wait_random_exponential(
            multiplier=self._settings.retry_initial_s, max=self._settings.retry_max_s
        )

        def is_final(state: tenacity.RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, StoreError) and error.reason is FailureReason.CHECKSUM:
                return state.attempt_number >= MAX_CHECKSUM_ATTEMPTS
            now = loop.time()
            next_at = now + state.upcoming_sleep
            return now >= give_up_at or (silence is not None and self._is_silent(silence, error, next_at))

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(self.may_heal),
            wait=backoff,
            stop=is_final,
            sleep=self._health.pause,
            reraise=True,
        )
        return await retrying(attempt)

    def _is_silent(self, silence: Silence, error: BaseException | None, next_at: float) -> bool:
        """Return whether, at its next attempt, a request will have moved no byte for too long.

        If the store answers other requests, it is busy and will get to this one, unless it refuses just this one.
        """
        if silence.since is None:
            return False
        is_refused = isinstance(error, StoreError) and error.reason in (
            FailureReason.AUTH,
            FailureReason.DISK,
        )
        since = silence.since if is_refused else max(silence.since, self._health.answered_at)
        return next_at - since >= self.silence_s

    def once(self) -> Patience:
        """Return the same, except that nothing is retried."""
        return Patience(
            self._settings,
            self._health,
            is_patient=self.is_patient,
            silence_s=self.silence_s,
            is_retried=False,
        )

    def may_heal(self, error: BaseException) -> bool:
        """Return whether a request that failed like this is made again."""
        if not isinstance(error, StoreError) or not error.reason.is_retryable:
            return False
        return self.is_patient or error.reason not in (FailureReason.AUTH, FailureReason.DISK)


class Health:
    """Whether the store answers.

    Logs when it has not for a while, and wakes the requests that wait to be retried when it answers again.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.answered_at = -math.inf
        self.last_error = ""  # of the store or this node's disk, in words; kept when other requests succeed
        self._failing_since: dict[bool, float] = {}  # by whether they are writes
        self._warned_since: float | None = None
        self._told_here: set[str] = set()
        self._answers_again = asyncio.Event()

    async def pause(self, duration_s: float) -> None:
        """Wait before another attempt, but only until the store answers again.

        Otherwise, after an outage, all requests would sit out the back-off that they had reached.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await self._answers_again.wait()

    def failed(self, operation: str, error: StoreError, now: float, *, is_final: bool) -> None:
        """`is_final`: it is not tried again, so its error is raised, and need not be logged."""
        self.last_error = str(error)
        if is_final:
            return
        since = self._failing_since.setdefault(operation in _WRITES, now)
        if self._warned_since is None and now - since >= QUIET_OUTAGE_S:
            self._warned_since = since
            logger.warning(
                "store_failing url=%s for_s=%.0f error=%s; retrying", self._url, now - since, error
            )

    def failed_here(self, error: LocalReadError, *, is_final: bool) -> None:
        """Log once for each file that this node's disk does not return. The store has nothing to do with it."""
        self.last_error = str(error)
        if not is_final and self.last_error not in self._told_here:
            self._told_here.add(self.last_error)
            logger.warning("shard_unreadable error=%s; retrying", error)

    def succeeded(self, operation: str, now: float) -> None:
        # A read is no proof that writes are taken, but the first answer of an outage is worth an attempt.
        over = [since for since in self._failing_since.values() if since > self.answered_at]
        self.answered_at = now
        kinds = (False, True) if operation in _WRITES else (False,)
        over += [since for kind in kinds if (since := self._failing_since.pop(kind, None)) is not None]
        if over and now - min(over) >= QUIET_OUTAGE_S:
            self._answers_again.set()
            self._answers_again = asyncio.Event()
        if self._warned_since is not None and not self._failing_since:
            logger.info("store_recovered url=%s after_s=%.0f", self._url, now - self._warned_since)
            self._warned_since = None
