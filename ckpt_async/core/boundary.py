"""Which decisions have been collected (rule R4), as exact runs of steps. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from ckpt_async.core.keys import MAX_STEP
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.errors import InvalidRecordError

# Every rank reads the record at a commit, and a sweeper goes through all that has been collected.
MAX_BOUNDARY_SIZE_BYTES = 64 << 10
MAX_COLLECTED = 1_000_000

_GENERATION = re.compile(r"[1-9][0-9]{0,5}")


class Run(NamedTuple):
    """Every `stride`th step of one generation from `first` to `last`, both included."""

    generation: int
    first: int
    last: int
    stride: int


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A set of checkpoints as runs: a schedule is one run, however many checkpoints it has. The runs are in ascending
    order and do not overlap.
    """

    runs: tuple[Run, ...] = ()

    @classmethod
    def of(cls, ids: Iterable[CheckpointId]) -> Self:
        """Return exactly these checkpoints."""
        runs: list[Run] = []
        for id_ in sorted({*ids}):
            generation, step = id_.generation, id_.step
            if runs and runs[-1].generation == generation:
                _, first, last, stride = runs[-1]
                if first == last or step == last + stride:
                    runs[-1] = Run(generation, first, step, step - last)
                    continue
            runs.append(Run(generation, step, step, 1))
        return cls(tuple(runs))

    def __contains__(self, id_: CheckpointId) -> bool:
        begun = bisect_right(self.runs, (id_.generation, id_.step), key=lambda run: run[:2])
        if not begun:
            return False
        generation, first, last, stride = self.runs[begun - 1]
        return generation == id_.generation and id_.step <= last and (id_.step - first) % stride == 0

    def __iter__(self) -> Iterator[CheckpointId]:
        for generation, first, last, stride in self.runs:
            yield from (CheckpointId(generation, step) for step in range(first, last + 1, stride))

    def __len__(self) -> int:
        return sum((last - first) // stride + 1 for _, first, last, stride in self.runs)


# Below every checkpoint: nothing has been collected of a superseded generation.
NOWHERE = CheckpointId(0, 0)
_NONE = Checkpoints()


@dataclass(frozen=True, slots=True)
class Boundary:
    """What has been collected: up to `upto`, in superseded generations, everything that is not in `kept`; above it
    exactly what is in `pruned` and `aborted`.

    Once a create-once object is deleted, the store forgets that it existed. So the boundary moves first: a decision on
    what has been collected is void, whatever it says, and a committer reads the boundary after it has created its
    decision.
    """

    upto: CheckpointId = NOWHERE
    kept: Checkpoints = _NONE
    number: int = 0
    nonce: str = ""
    pruned: Checkpoints = _NONE
    aborted: Checkpoints = _NONE

    def outcome_of(self, checkpoint: CheckpointId) -> Outcome | None:
        """Return what became of a collected checkpoint, None if it is not collected.

        Up to `upto` nobody knows any more, and taking it for given up keeps the user's files.
        """
        if checkpoint <= self.upto:
            return None if checkpoint in self.kept else Outcome.ABORT
        if checkpoint in self.pruned:
            return Outcome.PRUNED
        return Outcome.ABORT if checkpoint in self.aborted else None

    @property
    def num_checkpoints(self) -> int:
        return len(self.kept) + len(self.pruned) + len(self.aborted)

    def voids(self, checkpoint: CheckpointId) -> bool:
        """Return whether a decision found for the checkpoint must be treated as no decision at all."""
        return self.outcome_of(checkpoint) is not None

    def moved(
        self,
        upto: CheckpointId,
        kept: Iterable[CheckpointId],
        pruned: Iterable[CheckpointId],
        aborted: Iterable[CheckpointId],
        nonce: str,
    ) -> Self:
        """Return the boundary at `upto`, which is not below this one's, with more collected above it.

        What is void stays void. What was kept, and is not in `kept`, is collected.
        """

        def above(before: Checkpoints, more: Iterable[CheckpointId]) -> Checkpoints:
            new = (id_ for id_ in more if not self.voids(id_))
            return Checkpoints.of(id_ for id_ in (*before, *new) if id_ > upto)

        return type(self)(
            upto,
            Checkpoints.of(id_ for id_ in kept if not self.voids(id_)),
            self.number + 1,
            nonce,
            above(self.pruned, pruned),
            above(self.aborted, aborted),
        )


NOTHING_COLLECTED = Boundary()


# --- as JSON -----------------------------------------------------------------------------------------------


def checkpoints_as_json(checkpoints: Checkpoints) -> dict[str, Any]:
    """Return the runs by generation, each as `[first, last, stride]`."""
    found: dict[str, Any] = {}
    for generation, *run in checkpoints.runs:
        found.setdefault(str(generation), []).append(run)
    return found


def checkpoints_from_json(value: object) -> Checkpoints:
    """Return what `checkpoints_as_json` has encoded. Raises InvalidRecordError."""
    found = _checkpoints(_by_generation(value))
    if len(found) > MAX_COLLECTED:
        raise InvalidRecordError(f"more than {MAX_COLLECTED} checkpoints")
    return found


def sets_as_json(boundary: Boundary) -> dict[str, Any]:
    """Return `kept` and `collected`, with the runs of each generation as `[first, last, stride]`."""
    collected: dict[str, Any] = {}
    for name, found in (("pruned", boundary.pruned), ("aborted", boundary.aborted)):
        for generation, *run in found.runs:
            collected.setdefault(str(generation), {"pruned": [], "aborted": []})[name].append(run)
    return {"kept": checkpoints_as_json(boundary.kept), "collected": collected}


def sets_from_json(fields: Mapping[str, Any]) -> dict[str, Checkpoints]:
    """Return `kept`, `pruned` and `aborted`. Raises InvalidRecordError for what `sets_as_json` cannot have returned."""
    collected = _by_generation(fields.get("collected"))
    outcomes = {number: _object(each) for number, each in collected.items()}
    found = {"kept": _checkpoints(_by_generation(fields.get("kept")))}
    for name in ("pruned", "aborted"):
        found[name] = _checkpoints({number: each.get(name) for number, each in outcomes.items()})
    if sum(map(len, found.values())) > MAX_COLLECTED:
        raise InvalidRecordError(f"boundary: more than {MAX_COLLECTED} checkpoints")
    return found


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRecordError("boundary: not a JSON object")
    return value


def _by_generation(value: object) -> dict[int, Any]:
    found = _object(value)
    if not all(_GENERATION.fullmatch(number) for number in found):
        raise InvalidRecordError("boundary: not by generation")
    return {int(number): found[number] for number in sorted(found, key=int)}


def _checkpoints(runs_of: Mapping[int, Any]) -> Checkpoints:
    runs: list[Run] = []
    for generation, items in runs_of.items():
        for item in items if isinstance(items, list) else [None]:
            if not isinstance(item, list) or [type(number) for number in item] != [int] * 3:
                raise InvalidRecordError(f"boundary: a run of generation {generation} is not three numbers")
            first, last, stride = item
            is_run = 0 <= first <= last <= MAX_STEP and stride > 0 and (last - first) % stride == 0
            if not is_run or (runs and (generation, first) <= (runs[-1].generation, runs[-1].last)):
                raise InvalidRecordError(f"boundary: {item} of generation {generation} is not the next run")
            runs.append(Run(generation, first, last, stride))
    return Checkpoints(tuple(runs))
