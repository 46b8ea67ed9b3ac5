"""Turns facts into events, and events into notices for the sinks that want them. Pure, except for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.observe import Notice, Teller
from ckpt_async.core.refusal import Refused
from ckpt_async.errors import SettingsError
from ckpt_async.events import event as events
from ckpt_async.events.event import KINDS, Event

# Name of a sink -> the kinds of events it wants.
Wants = Mapping[str, frozenset[str]]


def parse_kinds(text: str, where: str) -> frozenset[str]:
    """Parse a list such as `committed,pruned`; empty or `all` means every kind. Raises SettingsError."""
    names = [each.strip() for each in text.split(",") if each.strip()]
    for each in names:
        if each not in (*KINDS, "all"):
            raise SettingsError(f"{where}={text!r}: unknown kind {each!r}; use all, {', '.join(KINDS)}")
    return frozenset(KINDS) if not names or "all" in names else frozenset(names)


def format_wants(wants: Wants) -> str:
    """Return the form that is recorded in the journal, for the process that looks after it when the trainer is gone."""
    return " ".join(f"{sink}={','.join(sorted(kinds))}" for sink, kinds in sorted(wants.items()))


def parse_wants(text: str) -> Wants:
    """Parse what `format_wants` returned. Kinds that only a later version knows are left out."""
    pairs = (each.partition("=") for each in text.split())
    return {sink: frozenset(kinds.split(",")) & frozenset(KINDS) for sink, _, kinds in pairs}


def notices_of(event: Event, wants: Wants) -> list[Notice]:
    """Return one notice for each sink that wants the event."""
    body = event.to_json()
    return [Notice(event.id, sink, body) for sink, kinds in sorted(wants.items()) if event.kind in kinds]


def of_decision(run: str, decision: Decision, now: float) -> Event:
    """Return the event for a decision."""
    match decision.outcome:
        case Outcome.COMMIT:
            return events.of_checkpoint(
                "committed",
                run,
                decision.checkpoint,
                decision.name,
                now,
                committed_at=decision.decided_at,
                world_size=decision.world_size,
                num_shards=decision.num_shards,
                size_bytes=decision.size_bytes,
                metrics=dict(decision.metrics),
            )
        case Outcome.ABORT:
            return events.of_checkpoint(
                "given_up",
                run,
                decision.checkpoint,
                decision.name,
                now,
                reason=decision.reason,
                is_superseded=decision.is_superseded,
            )
        case Outcome.PRUNING | Outcome.PRUNED:
            return pruned(run, decision, now)


def pruned(run: str, decision: Decision, now: float) -> Event:
    """Return the event that retention has removed the checkpoint from the store, or is about to.

    From now on, nobody may begin to read it.
    """
    return events.of_checkpoint(
        "pruned", run, decision.checkpoint, decision.name, now, about="remote", location="remote", reason=""
    )


def damaged(
    run: str, checkpoint: CheckpointId, name: str, reason: str, now: float, *, key: str = ""
) -> Event:
    """Return the event that a committed checkpoint can no longer be read as it was committed.

    `key` is the object's, if known.
    """
    return events.of_checkpoint("damaged", run, checkpoint, name, now, about=key, reason=reason, key=key)


def refused(run: str, what: Refused, now: float, *, node: int) -> Event:
    """Return the event that the watcher of a node does not accept files that it found."""
    about = f"{node} {what.cause.value} {what.version} {what.path}"
    details = {"path": what.path, "cause": what.cause.value, "reason": what.reason, "node": node}
    name = "" if what.name.startswith("-") else what.name  # a command would take it for an option
    return events.of_found("refused", run, what.step, name, now, about=about, **details)


class RunTeller(Teller):
    """Tells of one run, as its rank 0 sees it."""

    def __init__(self, run: str, wants: Wants, clock: Callable[[], float] = time.time) -> None:
        self._run, self._wants, self._clock = run, wants, clock

    def of(self, event: Event) -> Sequence[Notice]:
        """Return one notice for each sink that wants the event."""
        return notices_of(event, self._wants)

    def decided(self, decision: Decision) -> Sequence[Notice]:
        return self.of(of_decision(self._run, decision, self._clock()))

    def fenced(self, generation: int, by: int) -> Sequence[Notice]:
        return self.of(events.of_run("fenced", self._run, generation, self._clock(), by_generation=by))

    def removed_locally(self, id_: CheckpointId, name: str, reason: str) -> Sequence[Notice]:
        event = events.of_checkpoint(
            "pruned", self._run, id_, name, self._clock(), about="local", location="local", reason=reason
        )
        return self.of(event)

    def backlog(self, generation: int, state: str, **details: object) -> Sequence[Notice]:
        """Tell that uploads have fallen behind or caught up, or have stopped or started moving."""
        now = self._clock()
        about = f"{state} {now:.3f}"
        return self.of(
            events.of_run("backlog", self._run, generation, now, about=about, state=state, **details)
        )
