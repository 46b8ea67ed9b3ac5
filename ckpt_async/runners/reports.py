"""The reports that a runner process sends to a trainer about its engine."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from ckpt_async.core import backlog
from ckpt_async.core.model import CheckpointId, Decided
from ckpt_async.core.observe import Observer
from ckpt_async.engine.loop import Engine
from ckpt_async.errors import FailureReason
from ckpt_async.runners import wire

# Facts that nobody waits for are collected for this long and sent together.
REPORT_S = 0.25
# Limits of one packet. If all of them are reached at once, they are halved until the report fits.
MAX_FACTS, MAX_DECIDED, MAX_FAILURES = 200, 50, 20
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
            ("failures", self._failures, MAX_FAILURES),
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

    def _note(self, *fact: Any) -> None:
        self.observed.append(fact)
        self._on_fact()

    def uploads_started(self, num_shards: int) -> None:
        self._note("uploads_started", num_shards)

    def uploads_ended(self, num_shards: int) -> None:
        self._note("uploads_ended", num_shards)

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:
        self._note("requests_finished", operation, [round(each, 6) for each in durations_s])

    def attempt_failed(self, reason: FailureReason) -> None:
        self._note("attempt_failed", reason)

    def bytes_uploaded(self, size_bytes: int) -> None:
        self._note("bytes_uploaded", size_bytes)

    def shards_finished(self, result: str, num_shards: int, duration_s: float) -> None:
        self._note("shards_finished", result, num_shards, duration_s)

    def checkpoint_committed(self, step: int, latency_s: float) -> None:
        self._note("checkpoint_committed", step, latency_s)

    def checkpoint_aborted(self, step: int, reason: str) -> None:
        self._note("checkpoint_aborted", step, wire.shortened(reason, MAX_REASON_BYTES))

    def checkpoint_pruned(self, location: str) -> None:
        self._note("checkpoint_pruned", location)

    def copies_finished(self, result: str, num_files: int) -> None:
        self._note("copies_finished", result, num_files)

    def fenced(self) -> None:
        self._note("fenced")

    def engine_restarted(self) -> None:
        self._note("engine_restarted")
