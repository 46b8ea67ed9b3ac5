"""Saves that no timestamp triggers: by the clock, by what saves cost, or on request.

Only one rank's clock counts, and a request from any rank is passed to all, so that all save at the same step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import ckpt_async.torch as ckpt
from ckpt_async.saver.auto import Auto, Choice, Meter, choose
from ckpt_async.saver.schedule import Due, Rules, Schedule

logger = logging.getLogger(__name__)


class Asking:
    """Decides, together with the other ranks, whether a save was asked for.

    Belongs to the trainer's thread, except for `ended` and `ask`, which any thread may call; a signal handler may call
    `ask`.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        world_size: int,
        *,
        chosen: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chosen` is called with each new interval that `Auto` chooses, in seconds."""
        self.meter = Meter()
        self.interval: Choice | None = None  # the latest choice of `Auto`
        self._vote = ckpt.Vote(clock=clock)
        if schedule.needs_clock:
            ckpt.require_vote(self._vote, world_size, "a time-based save")
        self._schedule, self._clock, self._tell_chosen = schedule, clock, chosen
        self._has_clock = schedule.needs_clock and rank == 0
        # Of the last save: when it began, and its step (None: there was none).
        self._last: dict[Due, tuple[float, int | None]] = dict.fromkeys(
            (Due.EPHEMERAL, Due.YES), (clock(), None)
        )
        # Step, time and whether it was committed; `answer` has not seen these yet.
        self._ends: deque[tuple[int, float, bool]] = deque()

    def ask(self, kept: Due) -> None:
        self._vote.wish(kept)

    def answer(self) -> Due:
        """Return what was asked for, which is the same on all ranks. Call it once per training step, on all ranks."""
        while self._ends:
            ended, at_s, is_committed = self._ends.popleft()
            self.meter.save_ended(ended, at_s, is_committed=is_committed)
        if self._has_clock:
            now = self._clock()
            for kept, rules in ((Due.YES, self._schedule.rules), (Due.EPHEMERAL, self._schedule.ephemeral)):
                saved_at, step = self._last[kept]
                interval_s = self._interval_s(rules, is_open=self.meter.is_open(step))
                if interval_s is not None and now - saved_at >= interval_s:
                    self._vote.wish(kept)
        return Due(self._vote.step())

    def began(self, kept: Due, step: int) -> None:
        """Record that all ranks save now, which fulfils what was asked for."""
        now = self._clock()
        for each in (Due.EPHEMERAL, kept):
            self._last[each] = (now, step)
        self._vote.withdraw(kept)

    def leave(self) -> None:
        """Tell the other ranks that this one takes no more steps."""
        self._vote.leave()

    def ended(self, step: int, is_committed: bool) -> None:
        """Record that the save of this step was committed or given up. May be called from any thread."""
        self._ends.append((step, self._clock(), is_committed))

    def _interval_s(self, rules: Rules, *, is_open: bool) -> float | None:
        chosen = None if rules.auto is None else self._chosen_s(rules.auto, is_open=is_open)
        given = [each for each in (rules.clock_s, chosen) if each is not None]
        return min(given, default=None)

    def _chosen_s(self, auto: Auto, *, is_open: bool) -> float:
        """`is_open`: the last save is still on its way. It takes longer than it has taken so far, so nobody knows yet
        how long the interval must be.
        """
        choice = choose(auto, self.meter.cost)
        if choice != self.interval:
            logger.info("save_interval interval_s=%.1f reason=%r", choice.interval_s, choice.reason)
            self.interval = choice
            self._tell_chosen(choice.interval_s)
        return auto.max_s if is_open else choice.interval_s
