"""Saves that no timestamp triggers: by the clock, by what saves cost, or on request.

Only one rank's clock counts, and a request from any rank is passed to all, so that all save at the same step.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import ckpt_async.torch as ckpt
from ckpt_async.errors import SettingsError
from ckpt_async.saver.auto import Auto, Choice, Meter, choose
from ckpt_async.saver.schedule import Due, Rules, Schedule

logger = logging.getLogger(__name__)


class SaveRequests:
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


def on_signals(numbers: Sequence[int], action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` when one of these signals arrives, and then the handler that was installed before.

    Returns a function that restores the previous handlers, if called in the main thread. Raises SettingsError if called
    in any other thread, or if a number is not a signal.
    """
    if not numbers:
        return lambda: None
    if threading.current_thread() is not threading.main_thread():
        raise SettingsError("save_signals require that the saver is created in the main thread")
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        action()
        earlier = before[number]
        if callable(earlier):
            earlier(number, frame)

    def undo() -> None:
        if threading.current_thread() is threading.main_thread():
            for number, earlier in before.items():
                if signal.getsignal(number) is handle:
                    signal.signal(number, earlier)

    try:
        for number in numbers:
            before[number] = signal.getsignal(number)  # first: the signal may come at once
            signal.signal(number, handle)
    except (OSError, ValueError, TypeError) as error:
        undo()
        raise SettingsError(f"save_signals={list(numbers)!r}: {error}") from None
    return undo


def watch(action: Callable[[], None], period_s: float) -> Callable[[], None]:
    """Call `action` every `period_s` seconds on a thread. Returns a function that stops this after one last call.

    An exception is logged, once until another one comes, and the next call is made nevertheless.
    """
    over = threading.Event()
    logged = ""

    def act() -> None:
        nonlocal logged
        try:
            action()
        except Exception as error:  # noqa: BLE001  the next call may succeed
            if repr(error) != logged:
                logged = repr(error)
                logger.warning("saver_watch_failed error=%r", error)

    def work() -> None:
        while not over.wait(period_s):
            act()
        act()

    thread = threading.Thread(target=work, name="ckpt-async-watch", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return stop
