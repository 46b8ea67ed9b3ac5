"""Saves that no timestamp tells of: by the clock, by what saves cost, because somebody asks. One rank's clock counts,
and what any rank asks for is told to all, so that all save at the same step.
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
    """For the trainer's thread. Any thread may call `ended` and `ask`; a signal handler may call `ask`."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        world_size: int,
        *,
        chosen: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chosen` is told each new interval that `Auto` chooses, in seconds."""
        self.meter = Meter()
        self.interval: Choice | None = None  # the newest that `Auto` chose
        self._vote = ckpt.Vote(clock=clock)
        if schedule.needs_clock:
            ckpt.require_vote(self._vote, world_size, "a save by the clock")
        self._schedule, self._clock, self._tell_chosen = schedule, clock, chosen
        self._has_clock = schedule.needs_clock and rank == 0
        self._saved_at = {Due.EPHEMERAL: clock(), Due.YES: clock()}
        self._ended_at: deque[float] = deque()  # what `answer` has not seen yet

    def ask(self, kept: Due) -> None:
        self._vote.wish(kept)

    def answer(self) -> Due:
        """Once per training step, on all ranks: what was asked for, the same on all."""
        while self._ended_at:
            self.meter.save_ended(self._ended_at.popleft())
        if self._has_clock:
            now = self._clock()
            for kept, rules in ((Due.YES, self._schedule.rules), (Due.EPHEMERAL, self._schedule.ephemeral)):
                interval_s = self._interval_s(rules)
                if interval_s is not None and now - self._saved_at[kept] >= interval_s:
                    self._vote.wish(kept)
        return Due(self._vote.step())

    def began(self, kept: Due) -> None:
        """All ranks save now, so what was asked for is done."""
        now = self._clock()
        for each in (Due.EPHEMERAL, kept):
            self._saved_at[each] = now
        self._vote.withdraw(kept)
        self.meter.save_began(now)

    def leave(self) -> None:
        """This rank takes no more steps."""
        self._vote.leave()

    def ended(self) -> None:
        """A save was committed, or given up. Any thread."""
        self._ended_at.append(self._clock())

    def _interval_s(self, rules: Rules) -> float | None:
        chosen = None if rules.auto is None else self._chosen_s(rules.auto)
        given = [each for each in (rules.clock_s, chosen) if each is not None]
        return min(given, default=None)

    def _chosen_s(self, auto: Auto) -> float:
        choice = choose(auto, self.meter.cost)
        if choice != self.interval:
            logger.info("save_interval interval_s=%.1f reason=%r", choice.interval_s, choice.reason)
            self.interval = choice
            self._tell_chosen(choice.interval_s)
        return choice.interval_s
