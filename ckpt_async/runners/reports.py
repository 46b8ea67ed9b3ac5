"""The reports that a runner process sends to a trainer about its engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from ckpt_async.core import backlog
from ckpt_async.core.failures import Failing, Failure, Outcomes
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId, Decided
from ckpt_async.core.observe import Observer
from ckpt_async.engine.loop import Engine
from ckpt_async.engine.state import MAX_FAILURES
from ckpt_async.errors import FailureReason, JournalError
from ckpt_async.local.journal import Journal
from ckpt_async.runners import wire
from ckpt_async.runners.wire import Channel, Wants

# Facts that nobody waits for are collected for this long and sent together.
REPORT_S = 0.25
# Limits of one packet. If all of them are reached at once, they are halved until the report fits.
MAX_FACTS, MAX_DECIDED, MAX_SENT_FAILURES = 200, 50, 20
MAX_MISSING = 100
MAX_FAILING = 100
MAX_REASON_BYTES, MAX_DECISION_BYTES, MAX_ERROR_BYTES = 120, 500, 500
# For this many checkpoints, the ranks that they wait for are reported even if nobody is waiting.
MAX_WAITING = 3


class Reports:
    """Collects news and reports it: at once if somebody waits or something was decided, otherwise soon.

    `tell` sends one report and returns whether that succeeded; `engine` returns the current engine.
    """

    def __init__(
        self,
        tell: Callable[[dict[str, Any]], bool],
        engine: Callable[[], Engine | None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._tell, self._engine, self._loop = tell, engine, loop
        self.facts = _Facts(self._send_soon)
        self.is_hurried = False
        self._known: AbstractSet[CheckpointId] = frozenset()
        self._decided: deque[Decided] = deque()
        self._failures: deque[dict[str, Any]] = deque()
        self._told_outcomes: set[CheckpointId] = set()
        self._told_state: tuple[object, ...] = (None, None, frozenset())
        self._wakes: deque[tuple[int, int]] = deque()  # (the trainer's number, the engine's)
        self._num_read = 0  # messages since the last report
        self._last_seen_wake = 0
        self._sending: asyncio.TimerHandle | None = None

    def note_wake(self, number: int, engines_number: int) -> None:
        """Note a message of the trainer, which is told so after the round that the message causes: until then it
        sends only so many more.
        """
        self._wakes.append((number, engines_number))
        self._num_read += 1

    def note_round(self, engine: Engine) -> None:
        """Collect the news of a round of the engine."""
        has_forgotten = bool(self._known - engine.local.checkpoints.keys())
        self._known = engine.local.checkpoints.keys()
        outcomes = engine.outcomes.newest()
        self._decided.extend(told(each) for each in outcomes if each.checkpoint not in self._told_outcomes)
        self._told_outcomes = {each.checkpoint for each in outcomes}
        while engine.failures:
            self._failures.append(wire.failure_fields(engine.failures.popleft()))
        state = engine.fenced_by, engine.absent_ranks, engine.failing
        has_news = has_forgotten or self._decided or self._failures or state != self._told_state
        self._told_state = state
        is_wake_seen = self._wakes and self._wakes[0][1] <= engine.last_seen_wake
        if has_news or is_wake_seen or self.is_hurried:
            self.send()

    def _send_soon(self) -> None:
        if self._sending is None:
            self._sending = self._loop.call_later(REPORT_S, self.send)

    def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def send(self) -> None:
        """Send everything that was not reported yet, in as many packets as it takes."""
        self.close()
        engine = self._engine()
        queues: tuple[tuple[str, deque[Any], int], ...] = (
            ("observed", self.facts.observed, MAX_FACTS),
            ("decided", self._decided, MAX_DECIDED),
            ("failures", self._failures, MAX_SENT_FAILURES),
        )
        if engine is None:
            for _, queue, _ in queues:
                queue.clear()
            return
        while self._wakes and self._wakes[0][1] <= engine.last_seen_wake:
            self._last_seen_wake = self._wakes.popleft()[0]
        state = {
            "fenced_by": engine.fenced_by,
            "absent_ranks": engine.absent_ranks and engine.absent_ranks[:MAX_MISSING],
            "store_error": wire.shortened(engine.store_error, MAX_ERROR_BYTES),
            "num_due": engine.num_due,
            "last_seen_wake": self._last_seen_wake,
            "num_read": self._num_read,
            "failing": sorted(engine.failing)[:MAX_FAILING],
            "missing": self._missing(engine),
        }
        divisor = 1
        while True:
            parts = {
                name: list(itertools.islice(queue, max(1, most // divisor))) for name, queue, most in queues
            }
            try:
                was_told = self._tell(parts | state)
            except wire.PacketTooLargeError:
                if all(len(part) <= 1 for part in parts.values()):
                    raise
                divisor *= 2
                continue
            if not was_told:
                self._send_soon()
                return
            state["num_read"] = self._num_read = 0
            for name, queue, _ in queues:
                for _ in parts[name]:
                    queue.popleft()
            if not any(queue for _, queue, _ in queues):
                return

    def _missing(self, engine: Engine) -> list[tuple[CheckpointId, list[int]]]:
        most = MAX_MISSING if self.is_hurried else MAX_WAITING
        waiting = (
            id_
            for id_, each in engine.local.checkpoints.items()
            if (each.decision is None if self.is_hurried else backlog.waits_for_ranks(each))
        )
        found = ((id_, engine.missing_ranks(id_)[:MAX_MISSING]) for id_ in itertools.islice(waiting, most))
        return [(id_, ranks) for id_, ranks in found if ranks]


def told(decided: Decided) -> Decided:
    """Return the decision with a reason that fits into a report."""
    return replace(decided, reason=wire.shortened(decided.reason, MAX_DECISION_BYTES))


class _Facts(Observer):
    """An observer that records what the engine tells it, for the trainer's metrics."""

    def __init__(self, on_fact: Callable[[], None]) -> None:
        self.observed: deque[tuple[Any, ...]] = deque()
        self._on_fact = on_fact

    def note(self, fact: str, *values: Any) -> None:
        self.observed.append((fact, *map(_in_report, values)))
        self._on_fact()


def _in_report(value: Any) -> Any:
    """Return a value of a fact so that it fits into a report."""
    if isinstance(value, str):
        return wire.shortened(value, MAX_REASON_BYTES)
    return [round(each, 6) for each in value] if isinstance(value, list | tuple) else value


# --- the trainer's side -------------------------------------------------------------------------------------


class EngineProxy:
    """The trainer's view of an engine in another process: the journal, which is the truth, and what the process
    reports in addition. Its reports, and the trainer's requests, outlive the process.
    """

    def __init__(self, journal: Journal, observer: Observer, on_change: Callable[[], None]) -> None:
        self.fenced_by: int | None = None
        self.absent_ranks: list[int] | None = None
        self.outcomes = Outcomes()
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self.failing: frozenset[Failing] = frozenset()
        self.store_error = ""
        self._reported_failing: frozenset[Failing] = frozenset()  # by the present process
        self.num_due = 0
        self.last_seen_wake = 0
        self._journal, self._observer, self._on_change = journal, observer, on_change
        self._lock = threading.Lock()
        self._local = Local(journal.rank)
        self._missing: dict[CheckpointId, list[int]] = {}
        self._telling = threading.Lock()
        self._wants = self._told = Wants()
        self._num_unread = 0  # messages that the process has not reported to have read
        self._num_uploads = 0
        self._has_ended = False
        self._channel: Channel | None = None

    # --- for the uploader --------------------------------------------------------------------------------------

    @property
    def local(self) -> Local:
        return self.fresh_local()

    def fresh_local(self) -> Local:
        with self._lock:
            if not self._has_ended:
                self._refresh()
            return self._local

    def _refresh(self) -> None:
        self._local = self._journal.follow(self._local)

    def missing_ranks(self, id_: CheckpointId) -> list[int]:
        return self._missing.get(id_, [])

    def wake(self) -> int:
        with self._telling:
            number = self._wants.wake + 1
            self._want(wake=number)
        return number

    def hurry(self, is_hurried: bool) -> None:
        with self._telling:
            self._want(is_hurried=is_hurried, num_hurries=self._wants.num_hurries + is_hurried)

    def turn_to_newest(self) -> None:
        with self._telling:
            self._want(num_turns_to_newest=self._wants.num_turns_to_newest + 1)

    def look_for_members(self) -> None:
        with self._telling:
            self._want(num_looks=self._wants.num_looks + 1)

    def _want(self, **changes: Any) -> None:
        self._wants = self._wants._replace(**changes)
        self._tell()

    def _tell(self) -> None:
        """Send what is wanted now, if that is news. A process that has much to read is told when it has reported to
        have read it, and one that has just died by `attach`, when it is replaced.
        """
        channel = self._channel
        if channel is None or self._told == self._wants or self._num_unread >= wire.MAX_UNREAD:
            return
        with contextlib.suppress(OSError):
            if channel.send("want", self._wants):
                self._told = self._wants
                self._num_unread += 1

    # --- for the thread that follows the process ---------------------------------------------------------------

    def attach(self, channel: Channel) -> None:
        """Use a new process from now on."""
        self._reported_failing = frozenset()  # what failed in an earlier process may not have healed
        with self._telling:
            self._channel, self._told, self._num_unread = channel, Wants(), 0
            self._tell()

    def detach(self) -> None:
        """Note that the process is gone, with all uploads in progress."""
        self._channel = None
        self._observer.uploads_ended(self._num_uploads)
        self._num_uploads = 0

    def end(self) -> None:
        """Keep the journal's last state: no process works for us any more, and the journal may be closed."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                with contextlib.suppress(JournalError):
                    self._refresh()

    def take(self, report: dict[str, Any]) -> None:
        for name, *values in report["observed"]:
            self._observe(name, values)
        for fields in report["decided"]:
            self.outcomes.add(wire.decided_from(fields))
        failing = frozenset((CheckpointId(**id_), action) for id_, action in report["failing"])
        self.failing = (self.failing - self._reported_failing) | failing
        self._reported_failing = failing
        self.failures.extend(map(wire.failure_from, report["failures"]))
        self._missing = {CheckpointId(**id_): ranks for id_, ranks in report["missing"]}
        self.fenced_by, self.absent_ranks = report["fenced_by"], report["absent_ranks"]
        self.store_error, self.num_due = report["store_error"], report["num_due"]
        self.last_seen_wake = max(self.last_seen_wake, report["last_seen_wake"])
        with self._telling:
            self._num_unread -= report["num_read"]
            self._tell()
        self._on_change()

    def _observe(self, name: str, values: list[Any]) -> None:
        if name == "attempt_failed":
            values = [FailureReason(values[0])]
        if name in ("uploads_started", "uploads_ended"):
            self._num_uploads += values[0] if name == "uploads_started" else -values[0]
        getattr(self._observer, name)(*values)
