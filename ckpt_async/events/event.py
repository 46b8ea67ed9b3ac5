"""One event as a value, and its JSON form, which `docs/events.md` describes. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId

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
