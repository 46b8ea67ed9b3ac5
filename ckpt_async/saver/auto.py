"""Chooses how often to save from what a save costs. Pure.

The cost of a save is the time for which training is blocked, plus the time by which it is slowed while the save is
written and uploaded. The budget bounds this cost as a share of the run, as in CheckFreq (Mohan et al., FAST '21). If
the mean time between failures is known, saving more often than Young's interval, sqrt(2 · cost · MTBF), costs more than
it saves (Young 1974, Daly 2006).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from ckpt_async.core import arguments
from ckpt_async.errors import SettingsError

# How many saves and steps are remembered: enough for a median that one slow save does not move.
_SAVES = 5
_STEPS = 51
# After this many undisturbed steps, the duration of a step without a save counts as known.
_ENOUGH_STEPS = 3


@dataclass(frozen=True, slots=True)
class Auto:
    """Choose the interval so that saving costs at most the share `overhead` of training time.

    `mtbf_s` is the mean time between failures of the whole job; if it is given, training saves no more often than pays
    off. The first save comes `first_s` after the start and tells what a save costs. The interval stays between `min_s`
    and `max_s`, and is never shorter than an upload takes: no save begins while the last one is on its way, unless
    that takes longer than `max_s`.
    """

    overhead: float = 0.01
    mtbf_s: float | None = None
    first_s: float = 60.0
    min_s: float = 10.0
    max_s: float = 4 * 3600.0

    def __post_init__(self) -> None:
        if not 0 < self.overhead < 1:
            raise SettingsError(
                f"Auto: overhead={self.overhead!r} must be a fraction of the run, such as 0.01"
            )
        for name in ("mtbf_s", "first_s", "min_s", "max_s"):
            value = getattr(self, name)
            if value is not None and not arguments.seconds(value, f"Auto: {name}") > 0:
                raise SettingsError(f"Auto: {name}={value!r} must be more than 0 seconds")
        if self.min_s > self.max_s:
            raise SettingsError(f"Auto: min_s={self.min_s!r} is more than max_s={self.max_s!r}")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one save, in seconds."""

    blocked_s: float
    slowed_s: float
    total_s: float  # from the beginning of the save to its commit

    @property
    def training_s(self) -> float:
        """The time that training loses."""
        return self.blocked_s + self.slowed_s


@dataclass(frozen=True, slots=True)
class Choice:
    """An interval between saves, and the reason for it."""

    interval_s: float
    reason: str


def choose(auto: Auto, cost: Cost | None) -> Choice:
    """Return the interval, in seconds from the beginning of one save to the beginning of the next."""
    if cost is None:
        return Choice(min(auto.first_s, auto.max_s), "first: the cost of a save is not known yet")
    lost = f"a save costs training {cost.training_s:.3g} s"
    budget_s = cost.training_s / auto.overhead
    choices = [
        Choice(budget_s, f"budget: {lost}, which is {auto.overhead:.2%} of {budget_s:.3g} s"),
        Choice(cost.total_s, f"upload: a save takes {cost.total_s:.3g} s until it is committed"),
        Choice(auto.min_s, f"min_s: {auto.min_s:g} s"),
    ]
    if auto.mtbf_s is not None:
        young_s = math.sqrt(2 * cost.training_s * auto.mtbf_s)
        choices.append(Choice(young_s, f"mtbf: {lost}, and a failure is expected every {auto.mtbf_s:.3g} s"))
    longest = max(choices, key=lambda each: each.interval_s)
    if longest.interval_s > auto.max_s:
        return Choice(
            auto.max_s, f"max_s: {auto.max_s:g} s; more often than the budget allows ({longest.reason})"
        )
    return longest


@dataclass(slots=True)
class _Open:
    """A save that is on its way."""

    began_at: float
    blocked_s: float
    lost_s: float = 0.0  # by slower steps


class Meter:
    """Measures what saves cost from the times at which training steps begin and end.

    It has no clock of its own; the caller passes the times. Not thread-safe.
    """

    def __init__(self) -> None:
        self._undisturbed_s: deque[float] = deque(maxlen=_STEPS)
        self._costs: deque[Cost] = deque(maxlen=_SAVES)
        self._stepped_at: float | None = None
        self._open: dict[int, _Open] = {}  # by step, the newest last

    @property
    def cost(self) -> Cost | None:
        """The median cost of the last saves; None before the first."""
        if not self._costs:
            return None
        return Cost(
            *(
                statistics.median(getattr(each, name) for each in self._costs)
                for name in ("blocked_s", "slowed_s", "total_s")
            )
        )

    @property
    def step_s(self) -> float | None:
        """The duration of a step that no save disturbs; None until it is known."""
        enough = len(self._undisturbed_s) >= _ENOUGH_STEPS
        return statistics.median(self._undisturbed_s) if enough else None

    def step_ended(self, now_s: float) -> None:
        """Record the end of a training step; the time since `step_began` was spent on training."""
        if self._stepped_at is None:
            return
        took_s = now_s - self._stepped_at
        if not self._open:
            self._undisturbed_s.append(took_s)
        elif self.step_s is not None:
            newest = next(reversed(self._open.values()))  # what training loses is counted once
            newest.lost_s += took_s - self.step_s

    def step_began(self, now_s: float) -> None:
        """Record that training goes on."""
        self._stepped_at = now_s

    def save_began(self, step: int, began_at_s: float, blocked_s: float) -> None:
        """Record that the save of this step is on its way; it blocked training for `blocked_s`."""
        self._open[step] = _Open(began_at_s, blocked_s)

    def is_open(self, step: int | None) -> bool:
        """Whether the save of this step is on its way."""
        return step in self._open

    def save_ended(self, step: int, now_s: float, *, is_committed: bool = True) -> None:
        """Record that the save of this step was committed or given up. One that was given up, perhaps before it was
        written, does not show what a save costs.
        """
        save = self._open.pop(step, None)
        if save is not None and is_committed:
            self._costs.append(Cost(save.blocked_s, max(0.0, save.lost_s), now_s - save.began_at))
