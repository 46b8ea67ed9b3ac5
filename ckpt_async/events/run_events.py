"""The events of one rank's engine, in whatever process it runs: what is reported, its delivery, and the watch over its
backlog.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.observe import Reporter
from ckpt_async.core.settings import Settings
from ckpt_async.events.delivery import Delivery, Sink
from ckpt_async.events.event import RunReporter, Wants
from ckpt_async.events.sinks import sinks_of
from ckpt_async.local.journal import Journal

# How often the backlog is looked at. A journal of 10,000 shards should not be summed up at every change.
LOOK_S = 1.0
# Rank 0 speaks for all ranks: the run has one event, not one for each rank.
SPEAKER = 0
# How long `close` delivers. The trainer has waited for what was due; the next launch delivers the rest.
CLOSE_S = 0.5


class RunEvents:
    """The events of a run. Does nothing on a rank that does not report them, or if nobody wants to hear of any.

    `sinks` are added to those of the settings. Raises SettingsError, JournalError.
    """

    def __init__(
        self,
        run: str,
        journal: Journal,
        settings: Settings,
        wants: Wants,
        environment: Mapping[str, str] = os.environ,
        *,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        is_speaker = journal.rank == SPEAKER
        sinks = [*sinks, *sinks_of(settings, environment)] if is_speaker else []
        self._run = RunReporter(run, wants) if is_speaker and (wants or sinks) else None
        self.reporter = self._run or Reporter()
        self._clock, self._look_at, self._journal = clock, 0.0, journal
        self._watch = BacklogWatch(settings.event_backlog_checkpoints, settings.event_stall_s)
        outbox = journal.outbox()
        for sink in sinks:
            outbox.retry_now(sink.name)
        self.delivery = Delivery(outbox, sinks, wants)

    def look(self, generation: int, local: Local, sent_bytes: int, missing: Callable[[], list[int]]) -> None:
        """Report changes of the backlog. Called when the engine has made a round.

        `missing` returns the ranks that the oldest checkpoint waits for.
        """
        self.delivery.notify()
        now = self._clock()
        if self._run is None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        view = Backlog.of(local, sent_bytes)
        for state in self._watch.look(view, now):
            details = {
                "num_checkpoints": view.num_checkpoints,
                "size_bytes": view.size_bytes,
                "oldest_step": view.oldest.step if view.oldest else None,
                "missing_ranks": missing()[:100],
            }
            self._journal.append((), self._run.backlog(generation, state, **details))
            self.delivery.notify()


# --- when a backlog is worth an event -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog, and how far its uploads have come."""

    num_checkpoints: int = 0
    size_bytes: int = 0
    oldest: CheckpointId | None = None
    num_stored: int = 0
    sent_bytes: int = 0

    @classmethod
    def of(cls, local: Local, sent_bytes: int) -> Self:
        """Count the sealed checkpoints that are not decided: those to be uploaded, and those that wait for other ranks.

        `sent_bytes` are the bytes sent so far of shards whose upload is under way.
        """
        waiting = [
            each for each in local.checkpoints.values() if each.decision is None and each.sealed is not None
        ]
        shards = [shard for each in waiting for shard in each.shards.values()]
        return cls(
            len(waiting),
            sum(each.shard.size_bytes for each in shards if each.stored is None),
            min((each.id for each in waiting), default=None),
            sum(each.stored is not None for each in shards),
            sent_bytes,
        )


class BacklogWatch:
    """Compares successive views of the backlog and reports what has changed."""

    def __init__(self, threshold: int, stall_s: float) -> None:
        self._threshold, self._stall_s = threshold, stall_s
        self._is_high = self._is_stalled = False
        self._place: object = None
        self._most_sent_bytes = 0
        self._moved_at = float("-inf")

    def look(self, view: Backlog, now: float) -> list[str]:
        """Return the changes, as a list of states.

        `high` comes at `threshold` checkpoints and `normal` at half of that; `stalled` comes after `stall_s` seconds
        without progress, and `moving` with the next progress.
        """
        found = []
        if not self._is_high and self._threshold and view.num_checkpoints >= self._threshold:
            self._is_high = True
            found.append("high")
        elif self._is_high and view.num_checkpoints <= self._threshold // 2:
            self._is_high = False
            found.append("normal")
        if self._has_moved(view):
            self._moved_at = now
            if self._is_stalled:
                self._is_stalled = False
                found.append("moving")
        elif self._stall_s and not self._is_stalled and now - self._moved_at >= self._stall_s:
            self._is_stalled = True
            found.append("stalled")
        return found

    def _has_moved(self, view: Backlog) -> bool:
        """Return whether uploads have made progress.

        A further checkpoint that waits is no progress, nor are bytes that are sent again because an attempt failed.
        """
        place = view.oldest, view.num_stored
        if place != self._place or view.oldest is None:
            self._place, self._most_sent_bytes = place, view.sent_bytes
            return True
        has_moved = view.sent_bytes > self._most_sent_bytes
        self._most_sent_bytes = max(view.sent_bytes, self._most_sent_bytes)
        return has_moved
