"""The events of one rank's engine, in whatever process it runs: teller, couriers, and the watch over its backlog."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from ckpt_async.core.local_state import Local
from ckpt_async.core.observe import Teller
from ckpt_async.core.settings import Settings
from ckpt_async.events.backlog import View, Watch
from ckpt_async.events.couriers import NO_EVENTS, Couriers, Deliveries, Sink
from ckpt_async.events.sinks import sinks_of
from ckpt_async.events.telling import RunTeller, Wants
from ckpt_async.local.journal import Journal

# How often the backlog is looked at. A journal of 10,000 shards should not be summed up at every change.
LOOK_S = 1.0
# Rank 0 speaks for all ranks: the run has one event, not one for each rank.
SPEAKER = 0
# How long `close` delivers. The trainer has waited for what was due; the next launch delivers the rest.
CLOSE_S = 0.5


class RunEvents:
    """The events of a run. Does nothing on a rank that does not speak, or if nobody wants to hear of events.

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
        self.teller: Teller = Teller()
        self._couriers: Couriers | None = None
        self._tells: RunTeller | None = None
        self._clock, self._look_at = clock, 0.0
        self._journal = journal
        sinks = [*sinks, *sinks_of(settings, environment)] if journal.rank == SPEAKER else []
        if journal.rank != SPEAKER or not (wants or sinks):
            return
        self._tells = self.teller = RunTeller(run, wants)
        self._watch = Watch(settings.event_backlog_checkpoints, settings.event_stall_s)
        outbox = journal.outbox()
        for sink in sinks:
            outbox.retry_now(sink.name)
        self._couriers = Couriers(outbox, sinks, wants)

    def look(self, generation: int, local: Local, sent_bytes: int, missing: Callable[[], list[int]]) -> None:
        """Report changes of the backlog. Called when the engine has made a round.

        `missing` returns the ranks that the oldest checkpoint waits for.
        """
        if self._tells is None or self._couriers is None:
            return
        self._couriers.notify()
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        view = View.of(local, sent_bytes)
        for state in self._watch.look(view, now):
            details = {
                "num_checkpoints": view.num_checkpoints,
                "size_bytes": view.size_bytes,
                "oldest_step": view.oldest.step if view.oldest else None,
                "missing_ranks": missing()[:100],
            }
            self._journal.append((), self._tells.backlog(generation, state, **details))
            self._couriers.notify()

    def notify(self) -> None:
        """Signal that new notices may have been written. May be called from any thread; never blocks."""
        if self._couriers is not None:
            self._couriers.notify()

    @property
    def done(self) -> Deliveries:
        """See `Couriers.done`."""
        return NO_EVENTS if self._couriers is None else self._couriers.done

    def close(self, grace_s: float = CLOSE_S) -> None:
        """Close the couriers. Blocks for at most `grace_s` and a few seconds more."""
        if self._couriers is not None:
            self._couriers.close(grace_s)

    def cut_short(self) -> None:
        """Make a `close` that runs in another thread stop waiting."""
        if self._couriers is not None:
            self._couriers.cut_short()
