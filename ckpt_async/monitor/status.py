"""The content of a node's journals, for people: the queue, each checkpoint's progress, and what dying now would
lose.

A pure view over replayed journals.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_async import private
from ckpt_async.core import backlog, keys
from ckpt_async.core.local_state import LocalCheckpoint
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.units import age, named
from ckpt_async.local import journals
from ckpt_async.local.journals import RankState
from ckpt_async.monitor.holdings import QUEUE_STATES


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """One checkpoint, over all ranks of this node that hold a part of it.

    `state`: open (not sealed by all of these ranks), uploading, waiting (this node's whole part is in the store),
    lost (a shard is gone or changed), superseded, committed, aborted.
    """

    id: CheckpointId
    name: str
    state: str
    ranks: tuple[int, ...]
    world_size: int | None
    num_shards: int
    num_verified: int
    size_bytes: int
    uploaded_bytes: int
    failure: str = ""
    begun_at: float | None = None  # Unix time at which the first shard was enqueued on this node
    decided_at: float | None = None  # Unix time at which this node learned of the decision
    is_delivered: bool = False  # every rank of this node that holds a part of it has its receipt in the store
    num_to_copy: int = 0  # copies under exact keys that are outstanding; none before the commit

    @property
    def is_at_risk(self) -> bool:
        """Whether the checkpoint would be lost with this node, and is not lost already."""
        return self.state in ("open", "uploading", "waiting") and not self.is_delivered

    @property
    def is_pending(self) -> bool:
        return self.state not in ("committed", "aborted")

    @property
    def percent(self) -> int:
        """Uploaded percentage, rounded down: 100 means all of it."""
        if self.size_bytes == 0:
            return 100 if self.num_verified == self.num_shards else 0
        return self.uploaded_bytes * 100 // self.size_bytes


@dataclass(frozen=True, slots=True)
class Status:
    """The status of the whole node."""

    remote: str | None
    ranks: tuple[int, ...]
    last_committed: CheckpointId | None
    last_committed_at: float
    queue: Mapping[str, tuple[int, int]]  # shards and bytes, by state
    checkpoints: tuple[CheckpointStatus, ...]
    now: float

    @property
    def pending(self) -> tuple[CheckpointStatus, ...]:
        return tuple(each for each in self.checkpoints if each.is_pending)

    @property
    def at_risk(self) -> tuple[CheckpointStatus, ...]:
        """The checkpoints that would be lost if this node died now, with its disk."""
        return tuple(each for each in self.checkpoints if each.is_at_risk)

    @property
    def summary(self) -> str:
        """What would be lost if this node died now, in one line."""
        if self.last_committed is None:
            parts = ["nothing committed yet"]
        else:
            ago = age(self.now - self.last_committed_at)
            parts = [f"last committed step {self.last_committed.step}, {ago} ago"]
        pending = self.pending
        if pending:
            parts.append(_newest(pending[-1], self.ranks))
            if len(pending) > 1:
                parts.append(
                    f"{len(pending) - 1} more {_plural(len(pending) - 1, 'checkpoint')} pending"
                    f" ({_steps(pending[:-1])})"
                )
        uncopied = [each for each in self.checkpoints if each.num_to_copy]
        if uncopied:
            count = sum(each.num_to_copy for each in uncopied)
            parts.append(
                f"{count} {'copy' if count == 1 else 'copies'} under exact keys outstanding ({_steps(uncopied)})"
            )
        if not pending and not uncopied:
            parts.append("nothing is pending")
        num_failed = self.queue["failed"][0]
        if num_failed:
            parts.append(f"{num_failed} {_plural(num_failed, 'shard')} failed")
        return "; ".join(parts)


# --- the view ----------------------------------------------------------------------------------------------


def view(states: Iterable[RankState], now: float) -> Status:
    """Merge what the ranks of a node know. Pure."""
    known = sorted(states, key=lambda each: each.local.rank)
    queue = dict.fromkeys(QUEUE_STATES, (0, 0))
    parts: dict[CheckpointId, list[tuple[RankState, LocalCheckpoint]]] = {}
    committed: CheckpointId | None = None
    committed_at = 0.0
    for rank in known:
        local, newest = rank.local, rank.local.newest_committed
        if newest is not None and (committed is None or newest > committed):
            committed, committed_at = newest, local.newest_committed_at
        for id_, checkpoint in local.checkpoints.items():
            parts.setdefault(id_, []).append((rank, checkpoint))
            if checkpoint.decision is not None:
                continue
            for name, each in checkpoint.shards.items():
                if each.stored is not None:
                    continue
                state = backlog.queue_state(
                    each,
                    is_begun=rank.progress.get((id_, name), 0) > 0,
                    is_inherited=id_.generation < local.generation,
                )
                count, size_bytes = queue[state]
                queue[state] = (count + 1, size_bytes + each.shard.size_bytes)
    remotes = [each.local.remote.url for each in known if each.local.remote is not None]
    return Status(
        remote=remotes[-1] if remotes else None,
        ranks=tuple(each.local.rank for each in known),
        last_committed=committed,
        last_committed_at=committed_at,
        queue=queue,
        checkpoints=tuple(_merge(id_, each) for id_, each in sorted(parts.items())),
        now=now,
    )


def _merge(id_: CheckpointId, parts: list[tuple[RankState, LocalCheckpoint]]) -> CheckpointStatus:
    uploaded_bytes = num_verified = 0
    failure = ""
    for rank, part in parts:
        failure = failure or (part.failure.message if part.failure else "")
        for name, each in part.shards.items():
            if each.stored is not None:
                num_verified += 1
                uploaded_bytes += each.shard.size_bytes
            else:
                uploaded_bytes += min(each.shard.size_bytes, rank.progress.get((id_, name), 0))
                failure = failure or (each.failure.message if each.failure else "")
        if part.decision is not None and part.decision.outcome is Outcome.ABORT:
            failure = part.decision.reason
    named = [part.name for _, part in parts if part.shards] or [parts[0][1].name]
    return CheckpointStatus(
        id=id_,
        name=named[0],
        state=_state([part for _, part in parts]),
        ranks=tuple(rank.local.rank for rank, _ in parts),
        world_size=next((part.sealed.world_size for _, part in parts if part.sealed is not None), None),
        num_shards=sum(len(part.shards) for _, part in parts),
        num_verified=num_verified,
        size_bytes=sum(part.size_bytes for _, part in parts),
        uploaded_bytes=uploaded_bytes,
        failure=failure,
        begun_at=min((each.enqueued_at for _, part in parts for each in part.shards.values()), default=None),
        decided_at=min((part.decided_at for _, part in parts if part.decision is not None), default=None),
        is_delivered=all(part.has_receipt for _, part in parts),
        num_to_copy=sum(len(part.to_copy) for _, part in parts),
    )


def _state(parts: list[LocalCheckpoint]) -> str:
    """Return the state of a checkpoint from the parts of this node's ranks. It is enough that one rank has read the
    decision, because there is only one (rule R4).
    """
    if any(each.was_committed for each in parts):
        return "committed"
    if any(each.decision is not None for each in parts):
        return "aborted"
    if any(each.loss is not None for each in parts):
        return "lost"
    if any(each.superseded for each in parts):
        return "superseded"
    if any(each.sealed is None for each in parts):
        return "open"
    return "waiting" if all(each.is_verified for each in parts) else "uploading"


def _newest(checkpoint: CheckpointStatus, ranks_here: tuple[int, ...]) -> str:
    step, percent = f"step {checkpoint.id.step}", f"{checkpoint.percent} % uploaded"
    match checkpoint.state:
        case "lost":
            return f"{step} cannot be committed from this folder: {checkpoint.failure}"
        case "superseded":
            return f"{step} was given up for a newer one"
        case "waiting" if checkpoint.world_size == len(checkpoint.ranks):
            return f"{step} is uploaded and about to be committed"
        case "waiting" if others := sorted(set(ranks_here) - {*checkpoint.ranks}):
            # These ranks never saved this checkpoint, or have seen it decided.
            have = "has" if len(others) == 1 else "have"
            return f"{step} is uploaded, but {named('rank', others)} of this node {have} no part of it"
        case "waiting":
            return f"{step} is uploaded and waits for other nodes"
        case "open":
            return f"{step} is {percent} and not sealed yet"
        case _:
            return f"{step} is {percent}"


def _steps(checkpoints: Sequence[CheckpointStatus]) -> str:
    shown = ", ".join(str(each.id.step) for each in checkpoints[-8:])
    return f"{'… ' if len(checkpoints) > 8 else ''}{_plural(len(checkpoints), 'step')} {shown}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


# --- the folder --------------------------------------------------------------------------------------------


def load(folder: str | os.PathLike[str], *, now: float | None = None) -> dict[str, Status]:
    """Read a folder's journals, by kind of checkpoints, also beside live trainers. Raises NoJournalError if there
    is none.
    """
    now = time.time() if now is None else now
    return {kind: view(states, now) for kind, states in journals.states(folder).items()}


def has_owner(folder: str | os.PathLike[str], rank: int, kind: str = "") -> bool:
    """Return whether a live process holds this rank's lock, by trying to take it, shared, for a moment."""
    path = journals.private_of(folder, kind) / keys.lock_name(rank)
    try:
        descriptor = private.open_file(path, os.O_RDONLY)
    except PermissionError:  # another user may see that it is there, but not lock it
        with contextlib.suppress(OSError):
            return bool(private.holder(os.lstat(path)))
        return False
    except OSError:
        return False
    try:
        return not private.lock(descriptor, path, how=fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
