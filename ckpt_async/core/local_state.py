"""What one rank knows from its journal. Pure.

This state is built only by `fold`, so that replay after a crash and everyday operation are one code path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from ckpt_async.core.model import (
    CheckpointId,
    Copied,
    Decided,
    Enqueued,
    Failed,
    Forgotten,
    Growing,
    JournalRow,
    MadeDurable,
    MultipartOpened,
    Opened,
    Outcome,
    ReceiptStored,
    Released,
    RemoteAddress,
    Removed,
    Retried,
    Sealed,
    Shard,
    StartedOver,
    StoredShard,
    Superseded,
    Unproven,
    Verified,
)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A shard and its progress."""

    shard: Shard
    enqueued_at: float
    is_durable: bool = False
    multipart: MultipartOpened | None = None
    stored: StoredShard | None = None
    failure: Failed | None = None
    is_copied: bool = False  # to the exact key where it is to be published


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """This rank's part of one checkpoint."""

    id: CheckpointId
    name: str
    shards: Mapping[str, LocalShard] = field(default_factory=dict)
    growing: Mapping[str, str] = field(default_factory=dict)  # sources of shards that are still being written
    sealed: Sealed | None = None
    sealed_at: float = 0.0
    is_seal_durable: bool = False
    superseded: str = ""  # why it was superseded, if it was
    failure: Failed | None = None  # of the checkpoint as a whole, not of a single shard
    has_receipt: bool = False
    receipt_at: float = 0.0
    decision: Decided | None = None
    decided_at: float = 0.0
    is_released: bool = False
    is_removed: bool = False  # the user's files are gone

    @property
    def to_copy(self) -> list[str]:
        """The shards that are still to be published under exact keys; none unless the checkpoint was committed."""
        if not self.was_committed:
            return []
        return [name for name, each in self.shards.items() if each.shard.publish_as and not each.is_copied]

    @property
    def size_bytes(self) -> int:
        return sum(each.shard.size_bytes for each in self.shards.values())

    @property
    def is_verified(self) -> bool:
        """Whether every shard of this rank is in the store and no more will follow."""
        return self.sealed is not None and all(each.stored is not None for each in self.shards.values())

    @property
    def was_committed(self) -> bool:
        """Whether the checkpoint was ever committed; remote retention may have pruned it since."""
        return self.decision is not None and self.decision.outcome is not Outcome.ABORT

    @property
    def loss(self) -> Failed | None:
        """The failure because of which this rank can never complete the checkpoint, if any.

        Either a source is gone or has changed, or the disk failed.
        """
        failures = (self.failure, *(each.failure for each in self.shards.values()))
        return next((failure for failure in failures if failure and failure.is_loss), None)

    @property
    def may_be_retried(self) -> bool:
        """Whether something failed and another attempt may succeed."""
        return self.loss is None and any(each.failure is not None for each in self.shards.values())


@dataclass(frozen=True, slots=True)
class Local:
    """Everything that one rank's journal says. Forgotten checkpoints are not included."""

    rank: int
    generation: int = 0  # of the newest launch on this rank; 0 before the first
    checkpoints: Mapping[CheckpointId, LocalCheckpoint] = field(default_factory=dict)
    newest_committed: CheckpointId | None = None
    newest_committed_at: float = 0.0
    newest_enqueued: CheckpointId | None = None
    newest_enqueued_at: float = 0.0
    sequence: int = 0
    opened: Opened | None = None  # the newest such event

    @property
    def remote(self) -> RemoteAddress | None:
        return self.opened.remote if self.opened else None

    @property
    def to_rescue(self) -> list[CheckpointId]:
        """What the store has lost, with nothing newer committed: the links may be all that is left of it (R7)."""
        newest = self.newest_committed
        lost = (
            id_ for id_, each in self.checkpoints.items() if each.decision and each.decision.is_lost_by_store
        )
        return sorted(id_ for id_ in lost if newest is None or newest < id_)


def fold(rows: Iterable[JournalRow], start: Local) -> Local:
    """Apply journal rows of `start.rank` in order and return the new state; `start` is left as it was.

    Replay is idempotent: an event seen twice changes nothing the second time.
    """
    checkpoints = dict(start.checkpoints)
    owned: dict[CheckpointId, dict[str, LocalShard]] = {}  # copied once per call, not once per event
    generation, sequence, opened = start.generation, start.sequence, start.opened
    committed, committed_at = start.newest_committed, start.newest_committed_at
    enqueued, enqueued_at = start.newest_enqueued, start.newest_enqueued_at
    for row in rows:
        if row.rank != start.rank:
            continue
        sequence = max(sequence, row.sequence)
        event = row.event
        match event:
            case Opened():
                generation, opened = max(generation, event.generation), event
                owned.clear()
                checkpoints = {key: _retry_failed(value) for key, value in checkpoints.items()}
                continue
            case Forgotten():
                owned.pop(event.checkpoint, None)
                checkpoints.pop(event.checkpoint, None)
                if event.committed_at is not None and (committed is None or event.checkpoint > committed):
                    committed, committed_at = event.checkpoint, event.committed_at
                continue
            case StartedOver():
                owned.clear()
                checkpoints, generation, opened = {}, event.generation, None
                committed, committed_at = event.committed, event.committed_at
                enqueued, enqueued_at = event.enqueued, event.enqueued_at
                continue
            case Growing() | Enqueued() | Sealed():
                before = checkpoints.get(event.checkpoint) or LocalCheckpoint(event.checkpoint, event.name)
                if enqueued is None or event.checkpoint >= enqueued:
                    enqueued, enqueued_at = event.checkpoint, row.written_at
            case _:
                known = checkpoints.get(event.checkpoint)
                if known is None:
                    continue
                before = known
        shards = owned.get(event.checkpoint)
        if shards is None:
            shards = owned[event.checkpoint] = dict(before.shards)
            before = replace(before, shards=shards)
        checkpoints[event.checkpoint] = after = _apply(before, shards, event, row.written_at)
        if after.was_committed and (committed is None or event.checkpoint > committed):
            committed, committed_at = event.checkpoint, after.decided_at
    return Local(
        start.rank, generation, checkpoints, committed, committed_at, enqueued, enqueued_at, sequence, opened
    )


def compacted(rows: Sequence[JournalRow], rank: int) -> list[JournalRow]:
    """Return rows from which `fold` builds the same state as from all rows of a rank: without those of checkpoints that
    it has forgotten, and without launches that changed nothing.
    """
    if not rows:
        return []
    local = fold(rows, Local(rank))
    started = max((n for n, row in enumerate(rows) if isinstance(row.event, StartedOver)), default=-1)
    forgotten = {row.event.checkpoint: n for n, row in enumerate(rows) if isinstance(row.event, Forgotten)}
    summary = StartedOver(
        local.generation,
        local.newest_committed,
        local.newest_committed_at,
        local.newest_enqueued,
        local.newest_enqueued_at,
    )
    kept = [replace(rows[0], event=summary)]
    for number, row in enumerate(rows[started + 1 :], started + 1):
        match row.event:
            case Opened():
                if isinstance(kept[-1].event, Opened):
                    kept.pop()
                kept.append(row)
            case StartedOver() | Forgotten():
                pass
            case event if event.checkpoint in local.checkpoints and number > forgotten.get(
                event.checkpoint, -1
            ):
                kept.append(row)
    return kept


_ShardEvent = Enqueued | MadeDurable | MultipartOpened | Verified | Failed | Retried | Copied
_CheckpointEvent = Growing | Sealed | Superseded | ReceiptStored | Decided | Released | Removed | Unproven


def _apply(
    checkpoint: LocalCheckpoint,
    shards: dict[str, LocalShard],
    event: _ShardEvent | _CheckpointEvent,
    written_at: float,
) -> LocalCheckpoint:
    """Apply one event. `shards` are the checkpoint's own and are changed in place."""
    match event:
        case Growing():
            growing = _without(checkpoint.growing, event.shard)
            if event.source is not None:
                growing[event.shard] = event.source
            return replace(checkpoint, growing=growing)
        case Sealed():
            if checkpoint.sealed is not None:
                return checkpoint
            sealed_at = written_at if event.sealed_at is None else event.sealed_at
            return replace(checkpoint, sealed=event, sealed_at=sealed_at)
        case Superseded():
            return replace(checkpoint, superseded=event.reason)
        case ReceiptStored():
            receipt_at = checkpoint.receipt_at if checkpoint.has_receipt else written_at
            return replace(checkpoint, has_receipt=True, receipt_at=receipt_at)
        case Decided():
            return replace(checkpoint, decision=event, decided_at=written_at)
        case Released():
            return replace(checkpoint, is_released=True)
        case Removed():
            return replace(checkpoint, is_removed=True)
        case Unproven():
            shards |= {name: replace(each, multipart=None, stored=None) for name, each in shards.items()}
            return replace(checkpoint, has_receipt=False, receipt_at=0.0)
        case _:
            return _apply_to_shards(checkpoint, shards, event, written_at)


def _apply_to_shards(
    checkpoint: LocalCheckpoint, shards: dict[str, LocalShard], event: _ShardEvent, written_at: float
) -> LocalCheckpoint:
    match event:
        case Enqueued():
            known = shards.get(event.shard.name)
            if known is None:
                shards[event.shard.name] = LocalShard(event.shard, written_at)
            elif known.shard.identity != event.shard.identity:  # as it is in an adopted copy of the folder
                shards[event.shard.name] = replace(known, shard=event.shard, is_durable=False)
            if checkpoint.is_released:  # it was given up before the trainer was done with it
                checkpoint = replace(checkpoint, is_released=False)
            if event.shard.name in checkpoint.growing:
                return replace(checkpoint, growing=_without(checkpoint.growing, event.shard.name))
        case MadeDurable():
            for name in event.shards:
                if (it := shards.get(name)) is not None:
                    # Not `replace`, which takes four times as long: this happens for each of 10,000 shards.
                    shards[name] = LocalShard(
                        it.shard, it.enqueued_at, True, it.multipart, it.stored, it.failure, it.is_copied
                    )
            if event.is_sealed:
                return replace(checkpoint, is_seal_durable=True)
        case MultipartOpened():
            if event.shard in shards:
                shards[event.shard] = replace(shards[event.shard], multipart=event)
        case Verified():
            if (it := shards.get(event.stored.name)) is not None:
                shards[event.stored.name] = LocalShard(
                    it.shard, it.enqueued_at, it.is_durable, it.multipart, event.stored
                )
        case Copied():
            for name in shards.keys() & event.shards:
                shards[name] = replace(shards[name], is_copied=True)
        case Failed():
            if event.shard in shards:
                shards[event.shard] = replace(shards[event.shard], failure=event)
            elif not event.shard:
                return replace(checkpoint, failure=event)
        case Retried():
            if checkpoint.loss is None:
                shards |= {name: replace(each, failure=None) for name, each in shards.items() if each.failure}
        case _:
            assert_never(event)
    return checkpoint


def _without(growing: Mapping[str, str], shard: str) -> dict[str, str]:
    return {name: source for name, source in growing.items() if name != shard}


def _retry_failed(checkpoint: LocalCheckpoint) -> LocalCheckpoint:
    """Clear failures, so that a new engine tries again what an old one gave up on.

    Failures stay if the bytes themselves are gone.
    """
    if not checkpoint.may_be_retried:
        return checkpoint
    return replace(
        checkpoint, shards={name: replace(each, failure=None) for name, each in checkpoint.shards.items()}
    )
