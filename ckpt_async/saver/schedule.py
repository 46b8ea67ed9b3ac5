"""Decides when a checkpoint is due.

Pure: the decision depends on the run's previous and current position, and is the same on every rank. What no timestamp
tells (wall clock, a measured interval, a signal) is decided by one rank and passed to the others (`is_asked`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from fractions import Fraction
from typing import Any

from ckpt_async.core import arguments, keys
from ckpt_async.errors import SettingsError
from ckpt_async.saver.auto import Auto
from ckpt_async.saver.timestamp import Event, Timestamp

logger = logging.getLogger(__name__)

Predicate = Callable[[Timestamp, Event], bool]
# The forms in which a user gives an interval. None: only the other rules, such as the end of the run, save.
Interval = int | str | timedelta | Auto | Predicate | Collection[Any] | None

# Composer's units, and the field of `Timestamp` that each of them counts.
_COUNTED = {"ep": "epoch", "ba": "batch", "sp": "sample", "tok": "token", "iter": "iteration"}
_PLURAL = {unit: "batches" if unit == "ba" else f"{field}s" for unit, field in _COUNTED.items()}
# The fields that every batch increases, so that 0 after a batch means the trainer does not count them.
_GROWS = frozenset({"sample", "token"})
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
# Each unit's spellings are listed, because a rule such as "drop the s" would take milliseconds for minutes.
_SPELLINGS = {
    "ep": "ep epoch epochs",
    "ba": "ba batch batches step steps",
    "sp": "sp sample samples",
    "tok": "tok toks token tokens",
    "iter": "iter iters iteration iterations",
    "dur": "dur",
    "s": "s sec secs second seconds",
    "min": "m min mins minute minutes",
    "h": "h hr hrs hour hours",
    "d": "d day days",
}
_UNITS = {spelling: unit for unit, told in _SPELLINGS.items() for spelling in told.split()}
_AMOUNT = re.compile(r"([0-9][0-9_]{0,24}(?:\.[0-9]{1,18})?(?:[eE]\+?[0-9]{1,2})?)\s*([a-z]+)")
_HINT = 'like "1ep", "500ba", "10000sp", "1e9tok", "2iter", "0.1dur" or "30min"'


class Due(IntEnum):
    """Whether to save, and how long to keep the checkpoint."""

    REPEATED = -1  # due, but training has gone back to a batch that was saved already
    NO = 0
    EPHEMERAL = 1  # kept only until a newer one is committed
    YES = 2


@dataclass(frozen=True, slots=True)
class Every:
    """Due each time a field of the timestamp has grown by `count`, which need not be a whole number."""

    field: str
    count: Fraction

    def is_passed(self, before: Timestamp | None, now: Timestamp) -> bool:
        """Return whether a multiple of `count` was passed between `before` and `now`.

        If `before` is None (not known), return whether `now` itself is exactly at a multiple.
        """
        reached = getattr(now, self.field)
        had = max(reached - 1, 0) if before is None else getattr(before, self.field)
        return bool(reached // self.count > had // self.count)

    def is_reached(self, now: Timestamp) -> bool:
        return bool(getattr(now, self.field) >= self.count)

    def __str__(self) -> str:
        return f"{self.count} x {self.field}"


@dataclass(frozen=True, slots=True)
class Amount:
    """A number with its unit, as the user gave it."""

    number: Fraction
    unit: str

    @property
    def seconds(self) -> float | None:
        """The amount in seconds, or None if it is not a time."""
        return float(self.number * _SECONDS[self.unit]) if self.unit in _SECONDS else None


@dataclass(frozen=True, slots=True)
class Rules:
    """The parts of one `save_interval`: what timestamps decide, and how often the clock asks for a save."""

    intervals: tuple[Every, ...] = ()
    predicates: tuple[Predicate, ...] = ()
    clock_s: float | None = None
    auto: Auto | None = None

    def is_due(self, before: Timestamp | None, now: Timestamp, event: Event) -> bool:
        # Call every predicate every time, because one may keep a count.
        answers = [bool(each(now, event)) for each in self.predicates]
        return any(answers) or any(each.is_passed(before, now) for each in self.intervals)

    @property
    def told(self) -> str:
        told = [str(each) for each in self.intervals]
        told += ["a function"] * len(self.predicates)
        told += [] if self.clock_s is None else [f"{self.clock_s:g} s"]
        return " or ".join([*told, *([] if self.auto is None else [repr(self.auto)])]) or "never"


@dataclass(frozen=True, slots=True)
class Schedule:
    """When to save; made by `parse`."""

    rules: Rules
    ephemeral: Rules = Rules()
    fixed_steps: frozenset[int] = frozenset()
    end: Every | None = None
    _counted: frozenset[str] = field(init=False)  # the fields needed besides the batch

    def __post_init__(self) -> None:
        intervals = [
            *self.rules.intervals,
            *self.ephemeral.intervals,
            *([] if self.end is None else [self.end]),
        ]
        object.__setattr__(self, "_counted", frozenset(each.field for each in intervals) - {"batch"})

    @property
    def told(self) -> dict[str, str]:
        """The schedule as text. It must be the same on all ranks, or they would not save at the same steps."""
        return {
            "save_interval": self.rules.told,
            "ephemeral_save_interval": self.ephemeral.told,
            "fixed_steps": str(sorted(self.fixed_steps)),
            "max_duration": str(self.end),
        }

    def check_counts(self, now: Timestamp, *, is_number: bool) -> None:
        """Refuse a timestamp that lacks what an interval counts, because the save would silently never become due.

        `is_number`: the trainer gives only the batch. (Epoch 0 is a valid value, the first epoch; 0 samples after a
        batch means that samples are not counted.) Raises SettingsError.
        """
        for name in self._counted:
            if is_number or (name in _GROWS and now.batch > 0 and getattr(now, name) == 0):
                raise SettingsError(
                    f"a save interval, or max_duration, counts {name}s, but step() was given"
                    f" {'only the batch' if is_number else f'{name}=0'}: it would never be due",
                    hint=f'pass Timestamp(batch=…, {name}=…), or save_interval="500ba", which counts batches, or None',
                )

    @property
    def needs_clock(self) -> bool:
        """Whether one rank must decide for all."""
        return any(each.clock_s is not None or each.auto is not None for each in (self.rules, self.ephemeral))


@dataclass(frozen=True, slots=True)
class Past:
    """What happened before this call: the time up to which all that was due has been handled, and the last save."""

    decided: Timestamp | None = None
    saved: Timestamp | None = None
    kept: Due = Due.NO  # how long the last save is kept


def due(
    schedule: Schedule,
    before: Timestamp | None,
    now: Timestamp,
    event: Event = Event.BATCH_CHECKPOINT,
    *,
    is_asked: Due = Due.NO,
) -> Due:
    """Return whether a checkpoint is due at `now`, if nothing was decided since `before` (None: not known)."""
    had = now.batch - 1 if before is None else before.batch
    is_regular = (
        schedule.rules.is_due(before, now, event)
        or any(had < step <= now.batch for step in schedule.fixed_steps)
        or (
            schedule.end is not None
            and schedule.end.is_reached(now)
            and (before is None or not schedule.end.is_reached(before))
        )
    )
    if is_regular or is_asked is Due.YES:
        return Due.YES
    is_ephemeral = schedule.ephemeral.is_due(before, now, event)
    return Due.EPHEMERAL if is_ephemeral or is_asked is Due.EPHEMERAL else Due.NO


def decide(
    schedule: Schedule, past: Past, now: Timestamp, event: Event, *, is_asked: Due = Due.NO
) -> tuple[Due, Past]:
    """Return what to do at `now`, and the past after it.

    No step is saved twice. What becomes due at a step that was saved already is saved at the next one, unless the
    earlier save is kept at least as long.
    """
    wanted = due(schedule, past.decided, now, event, is_asked=is_asked)
    if past.saved is not None and now.batch <= past.saved.batch:
        had = past.saved if past.decided is None else past.decided
        if min(had.batch, now.batch) < past.saved.batch:
            return Due.NO if wanted is Due.NO else Due.REPEATED, Past(now, past.saved, past.kept)
        return Due.NO, past if wanted > past.kept else Past(now, past.saved, past.kept)
    if wanted is Due.NO:
        return Due.NO, Past(now, past.saved, past.kept)
    return wanted, Past(now, now, wanted)


# --- parsing of the user's arguments -----------------------------------------------------------------------


def parse(
    save_interval: Interval,
    fixed_steps: Iterable[int] = (),
    ephemeral_save_interval: Interval = None,
    max_duration: int | str | None = None,
) -> Schedule:
    """Return the schedule for a saver's arguments. Raises SettingsError."""
    whole = None if max_duration is None else amount(max_duration, "max_duration")
    if whole is not None and whole.unit not in _COUNTED:
        raise SettingsError(f"max_duration={max_duration!r} must be in ep, ba, sp, tok or iter")
    if arguments.is_whole(save_interval):
        logger.warning(
            'save_interval=%s counts epochs; "%sba" would count batches, "%sep" says what it is',
            *(save_interval, save_interval, save_interval),
        )
    return Schedule(
        rules=_rules(save_interval, "save_interval", whole),
        ephemeral=_rules(ephemeral_save_interval, "ephemeral_save_interval", whole),
        fixed_steps=_batches(fixed_steps),
        end=None if whole is None else Every(_COUNTED[whole.unit], whole.number),
    )


def _batches(given: Any) -> frozenset[int]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise SettingsError(f"fixed_steps={arguments.shown(given)} must be a list of batches")
    return frozenset(arguments.whole(each, "fixed_steps", 1, keys.MAX_STEP, SettingsError) for each in given)


def amount(given: object, what: str) -> Amount:
    """Parse an amount such as `"500ba"`, or an object with Composer's `to_timestring`; a bare number counts epochs."""
    if arguments.is_whole(given):
        given = f"{given}ep"
    elif hasattr(given, "to_timestring"):
        given = given.to_timestring()
    elif isinstance(given, timedelta):
        given = f"{given.total_seconds():f}s"
    match = _AMOUNT.fullmatch(given.strip().lower()) if isinstance(given, str) else None
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise SettingsError(f"{what}={arguments.shown(given)} is not an amount of training", hint=_HINT)
    number = Fraction(match[1].replace("_", ""))
    if number <= 0:
        raise SettingsError(f"{what}={given!r} must be more than 0")
    if unit in _COUNTED and number.denominator != 1:
        raise SettingsError(f"{what}={given!r} must be a whole number of {_PLURAL[unit]}")
    if unit == "dur" and number > 1:
        raise SettingsError(f"{what}={given!r} must be a fraction of the run, at most 1dur")
    return Amount(number, unit)


def _rules(given: Interval, what: str, whole: Amount | None) -> Rules:
    intervals: list[Every] = []
    predicates: list[Predicate] = []
    clocks_s: list[float] = []
    autos: list[Auto] = []
    for each in _several(given):
        if isinstance(each, Auto):
            autos.append(each)
        elif callable(each) and not hasattr(each, "to_timestring"):
            predicates.append(each)
        else:
            found = amount(each, what)
            if found.seconds is not None:
                clocks_s.append(found.seconds)
            elif found.unit != "dur":
                intervals.append(Every(_COUNTED[found.unit], found.number))
            elif whole is None:
                raise SettingsError(f'{what}={each!r} needs max_duration, for example "10ep"')
            else:
                intervals.append(Every(_COUNTED[whole.unit], found.number * whole.number))
    if len(autos) > 1:
        raise SettingsError(f"{what} has more than one Auto")
    return Rules(
        tuple(intervals), tuple(predicates), min(clocks_s, default=None), autos[0] if autos else None
    )


def _several(given: Interval) -> Collection[Any]:
    if given is None:
        return ()
    return given if isinstance(given, list | tuple | set | frozenset) else (given,)
