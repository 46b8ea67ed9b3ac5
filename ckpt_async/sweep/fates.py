"""What `drain` has done and what it leaves, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_async.core import decide
from ckpt_async.core.failures import last_store_error
from ckpt_async.core.local_state import Local, LocalCheckpoint
from ckpt_async.core.model import CheckpointId
from ckpt_async.engine.loop import Engine
from ckpt_async.errors import CkptAsyncError, StoreError
from ckpt_async.events.couriers import NO_EVENTS, Deliveries


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one checkpoint of one rank.

    `reason` says why it was given up or is left over; `missing_ranks` have not delivered yet.
    """

    checkpoint: CheckpointId
    name: str
    reason: str = ""
    missing_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """What was done for one kind of one rank's checkpoints.

    `in_use_by` names the live owner that holds the rank or has taken it back.

    `waiting` checkpoints have all of this rank's shards in the store and wait for other ranks; `left` ones do not.
    `uncopied` ones are committed, but copies of their shards under exact keys are outstanding.
    """

    rank: int
    kind: str = ""
    in_use_by: str = ""
    committed: tuple[Fate, ...] = ()
    aborted: tuple[Fate, ...] = ()
    waiting: tuple[Fate, ...] = ()
    left: tuple[Fate, ...] = ()
    uncopied: tuple[Fate, ...] = ()
    uploaded_shards: int = 0
    uploaded_bytes: int = 0
    error: str = ""  # the engine itself failed, or nothing was done
    events: Deliveries = NO_EVENTS


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What was done for one folder, rank by rank."""

    folder: str
    remotes: tuple[str, ...]
    ranks: tuple[RankReport, ...]

    @property
    def uploaded_bytes(self) -> int:
        return sum(each.uploaded_bytes for each in self.ranks)


def why_left(checkpoint: LocalCheckpoint, engine: Engine) -> str:
    """Return why a checkpoint is left over.

    That is a failure of it or one of its shards, else the last thing that went wrong, else that time ran out.
    """
    found = (checkpoint.failure, *(each.failure for each in checkpoint.shards.values()))
    failures = [each.message for each in found if each is not None]
    others: list[CkptAsyncError] = [
        each.error for each in engine.failures if isinstance(each.error, StoreError)
    ]
    return next(iter([*failures, *map(str, reversed(others))]), _out_of_time(engine))


def _out_of_time(engine: Engine) -> str:
    """Say that time ran out and, since the store may be why, what it answered last to a request that failed."""
    return f"time ran out{last_store_error(engine.store_error)}"


def uncopied(local: Local, engine: Engine) -> tuple[Fate, ...]:
    """Return the committed checkpoints of which copies under exact keys are outstanding, and why."""
    reasons = {
        each.checkpoint: str(each.error)
        for each in engine.failures
        if each.action == decide.Copy.__name__ and isinstance(each.error, StoreError)
    }
    left = [each for _, each in sorted(local.checkpoints.items()) if each.to_copy]
    return tuple(Fate(each.id, each.name, reasons.get(each.id, _out_of_time(engine))) for each in left)
