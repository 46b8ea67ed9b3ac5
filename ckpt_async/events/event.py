"""One event as a value, and its JSON form, which `docs/events.md` describes. Pure."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.observe import Notice, Reporter
from ckpt_async.core.refusal import Refused
from ckpt_async.errors import SettingsError

VERSION = 1
KINDS = ("committed", "given_up", "refused", "fenced", "damaged", "pruned", "backlog")
# Longest text of one detail, such as a reason, in characters: an event must fit into an environment variable.
MAX_TEXT = 4000


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a checkpoint or to a run.

    `id` is the same for the same event, whoever delivers it and however often: drop ids that you have seen. `run` is
    the URL of the run; `url` is that of the checkpoint's folder in it, or else of the run. `generation` is the run's
    launch. `step` and `name` are the checkpoint's (None and "" if the event is about no single checkpoint). `time` is
    when it became known, in Unix seconds. `details` depend on the kind; docs/events.md lists them.
    """

    kind: str
    id: str
    run: str
    url: str
    generation: int
    step: int | None
    name: str
    time: float
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the event as one JSON object on one line."""
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse what `to_json` wrote, also in a later version. Raises ValueError."""
        try:
            fields = json.loads(text)
            return cls(**{name: fields[name] for name in cls.__slots__})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an event: {error!r}") from None


def of_checkpoint(
    kind: str, run: str, checkpoint: CheckpointId, name: str, time: float, *, about: str = "", **details: Any
) -> Event:
    """Return an event about one checkpoint. `about` tells apart events of the same kind and checkpoint."""
    run = run.rstrip("/")
    url = f"{run}/{keys.data_prefix(name, checkpoint.generation)}" if name else run
    id_ = _id(run, checkpoint.generation, checkpoint.step, kind, about)
    return Event(kind, id_, run, url, checkpoint.generation, checkpoint.step, name, time, _shortened(details))


def of_run(kind: str, run: str, generation: int, time: float, *, about: str = "", **details: Any) -> Event:
    """Return an event that is about no single checkpoint."""
    run = run.rstrip("/")
    id_ = _id(run, generation, None, kind, about)
    return Event(kind, id_, run, run, generation, None, "", time, _shortened(details))


def of_found(
    kind: str, run: str, step: int | None, name: str, time: float, *, about: str, **details: Any
) -> Event:
    """Return an event about files that a watcher found and no launch of the run has handed in: its generation is 0."""
    run = run.rstrip("/")
    return Event(kind, _id(run, 0, step, kind, about), run, run, 0, step, name, time, _shortened(details))


def _id(*facts: str | int | None) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _shortened(details: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value[: MAX_TEXT - 1] + "…" if isinstance(value, str) and len(value) > MAX_TEXT else value
        for name, value in details.items()
    }


# --- the events of facts, and their notices for the sinks that want them ------------------------------------


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
            return of_checkpoint(
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
            return of_checkpoint(
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
    return of_checkpoint(
        "pruned", run, decision.checkpoint, decision.name, now, about="remote", location="remote", reason=""
    )


def damaged(
    run: str, checkpoint: CheckpointId, name: str, reason: str, now: float, *, key: str = ""
) -> Event:
    """Return the event that a committed checkpoint can no longer be read as it was committed.

    `key` is the object's, if known.
    """
    return of_checkpoint("damaged", run, checkpoint, name, now, about=key, reason=reason, key=key)


def refused(run: str, what: Refused, now: float, *, node: int) -> Event:
    """Return the event that the watcher of a node does not accept files that it found."""
    about = f"{node} {what.cause.value} {what.version} {what.path}"
    details = {"path": what.path, "cause": what.cause.value, "reason": what.reason, "node": node}
    name = "" if what.name.startswith("-") else what.name  # a command would take it for an option
    return of_found("refused", run, what.step, name, now, about=about, **details)


class RunReporter(Reporter):
    """Tells of one run, as its rank 0 sees it."""

    def __init__(self, run: str, wants: Wants, clock: Callable[[], float] = time.time) -> None:
        self._run, self._wants, self._clock = run, wants, clock

    def of(self, event: Event) -> Sequence[Notice]:
        """Return one notice for each sink that wants the event."""
        return notices_of(event, self._wants)

    def decided(self, decision: Decision) -> Sequence[Notice]:
        return self.of(of_decision(self._run, decision, self._clock()))

    def fenced(self, generation: int, by: int) -> Sequence[Notice]:
        return self.of(of_run("fenced", self._run, generation, self._clock(), by_generation=by))

    def removed_locally(self, id_: CheckpointId, name: str, reason: str) -> Sequence[Notice]:
        event = of_checkpoint(
            "pruned", self._run, id_, name, self._clock(), about="local", location="local", reason=reason
        )
        return self.of(event)

    def backlog(self, generation: int, state: str, **details: object) -> Sequence[Notice]:
        """Tell that uploads have fallen behind or caught up, or have stopped or started moving."""
        now = self._clock()
        about = f"{state} {now:.3f}"
        return self.of(of_run("backlog", self._run, generation, now, about=about, state=state, **details))
