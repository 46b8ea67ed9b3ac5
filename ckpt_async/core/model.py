"""The values the package thinks in, and the events of the journal. Pure: no I/O, no clock.

`fold` is the only way to build local state: replay after a crash and everyday operation are one code path.
What a crash invalidates (work in flight) is never an event.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from ckpt_async.errors import FailureReason


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """One point of training in one incarnation of the run. Its order is the order of `latest` (rule R6)."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"generation {self.generation} step {self.step}"


@dataclass(frozen=True, slots=True)
class Checksum:
    """A full-object checksum as S3 writes it: base64 of the big-endian value."""

    algorithm: str  # "crc64nvme" | "crc32c"
    value: str


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells one version of a file from another. An inode number alone does not: it is reused. Nor does the device:
    disks may be numbered in another order after a boot, and the file is the same.
    """

    device: int = field(compare=False)
    inode: int
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One immutable file that one rank has finished writing.

    `name` is its path within the checkpoint, `source` its path within the folder, both with '/'.
    `is_linked` says that the spool holds a hard link; otherwise only the user's own file is there.
    """

    name: str
    source: str
    identity: FileIdentity
    is_linked: bool

    @property
    def size_bytes(self) -> int:
        return self.identity.size_bytes


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard as the store answered that it has it: what a receipt lists."""

    name: str
    key: str
    size_bytes: int
    checksum: Checksum


@dataclass(frozen=True, slots=True)
class Receipt:
    """Rank r has verified all its shards of this checkpoint."""

    checkpoint: CheckpointId
    name: str
    rank: int
    world_size: int
    shards: tuple[StoredShard, ...]
    metrics: tuple[tuple[str, float], ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


class Outcome(enum.Enum):
    """What a decision says. absent → COMMIT | ABORT; COMMIT → PRUNING → PRUNED; nothing ever goes back."""

    COMMIT = "commit"
    ABORT = "abort"
    PRUNING = "pruning"
    PRUNED = "pruned"


@dataclass(frozen=True, slots=True)
class Decision:
    """The one object per checkpoint that settles its fate. A COMMIT is the commit (rule R4).

    `receipts` holds the checksum of each rank's receipt, indexed by rank: it binds the decision to exactly
    those receipts, and so to every byte of every shard.
    """

    checkpoint: CheckpointId
    outcome: Outcome
    name: str
    world_size: int
    nonce: str
    decided_at: float
    decided_by: str
    receipts: tuple[Checksum, ...] = ()
    num_shards: int = 0
    size_bytes: int = 0
    metrics: tuple[tuple[str, float], ...] = ()
    reason: str = ""
    is_pinned: bool = False  # set by compare-and-swap, so that pruning and pinning cannot both succeed
    is_superseded: bool = False  # an abort because a rank gave it up for newer ones


@dataclass(frozen=True, slots=True)
class Boundary:
    """Up to where old decisions have been collected (rule R4).

    A create-once object is forgotten when it is deleted. So this one moves first: a decision at or below `upto`
    that is not in `kept` is void, whatever it says, and a committer looks here after its create.
    """

    upto: CheckpointId
    kept: frozenset[CheckpointId]
    number: int
    nonce: str

    def voids(self, checkpoint: CheckpointId) -> bool:
        return checkpoint <= self.upto and checkpoint not in self.kept


@dataclass(frozen=True, slots=True)
class Lease:
    """A reader is loading the checkpoint: its shards stay until the lease is gone or has expired.

    It expires `ttl_s` after the store's `Last-Modified` of it; the holder stops reading at two thirds of that.
    """

    checkpoint: CheckpointId
    reader: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Damage:
    """A reader found a committed checkpoint that cannot be read as it was decided, so that no other tries in vain.

    It takes nothing away: retention keeps as many others. Deleting it gives the checkpoint another chance.
    """

    checkpoint: CheckpointId
    reason: str
    found_by: str
    found_at: float


@dataclass(frozen=True, slots=True)
class Latest:
    """The hint that names the newest committed checkpoint. `number` grows with every move: an ETag is
    made from content alone, so A→B→A would pass a compare-and-swap without it (rule R13).
    """

    checkpoint: CheckpointId
    name: str
    prefix: str
    number: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Generation:
    """One incarnation of the run, claimed once by whichever rank came first."""

    number: int
    launch_key: str
    world_size: int
    host: str
    nonce: str
    claimed_at: float


@dataclass(frozen=True, slots=True)
class Beat:
    """The rank that claimed a generation was alive when it wrote this, for the `count`th time."""

    generation: int
    rank: int
    count: int


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """Where a run's checkpoints go, as far as it may be written to disk: everything but credentials.

    `put_args` are in it because they say how objects are encrypted, which whoever finishes them must keep.
    """

    url: str
    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: str = "auto"
    put_args: Mapping[str, object] = field(default_factory=dict)


# --- journal events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine took over this rank's journal. Shards that had finally failed get another chance."""

    generation: int
    world_size: int
    remote: RemoteAddress | None = None  # None: written by a version that did not record it
    settings: tuple[
        tuple[str, str | int], ...
    ] = ()  # `settings.INHERITED`: what whoever adopts it must follow
    boot_id: str = ""  # of the machine's kernel: under another one, what was not fsynced may be gone


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The trainer handed over a shard; its spool link exists."""

    checkpoint: CheckpointId
    name: str
    shard: Shard


@dataclass(frozen=True, slots=True)
class Growing:
    """The trainer is writing a shard: parts that are finished may be sent ahead. `source` is None when it stopped
    without enqueueing it.
    """

    checkpoint: CheckpointId
    name: str
    shard: str
    source: str | None


@dataclass(frozen=True, slots=True)
class Sealed:
    """This rank has no more shards for the checkpoint."""

    checkpoint: CheckpointId
    name: str
    world_size: int
    metrics: tuple[tuple[str, float], ...] = ()
    sealed_at: float | None = None  # None: when the row was written


@dataclass(frozen=True, slots=True)
class MadeDurable:
    """Shards, their folders, the spool's manifest and the journal rows before this one were fsynced: they
    survive power loss. `is_sealed` says that the manifest on disk says so too.
    """

    checkpoint: CheckpointId
    shards: tuple[str, ...]
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class Superseded:
    """The user's policy gives the checkpoint up for newer ones, because uploads fell behind or the disk ran full."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class MultipartOpened:
    """A multipart upload was begun for the shard: its parts need not be sent twice."""

    checkpoint: CheckpointId
    shard: str
    upload_id: str
    part_size_bytes: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The store answered with the size and checksum we computed from the local file."""

    checkpoint: CheckpointId
    stored: StoredShard


@dataclass(frozen=True, slots=True)
class Failed:
    """The shard could not be uploaded in time, or never can be (`reason` not retryable). Without a shard it is the
    checkpoint: the disk refused something else of it, and nothing that was fsynced for it can be trusted.
    """

    checkpoint: CheckpointId
    shard: str
    reason: FailureReason
    message: str

    @property
    def is_loss(self) -> bool:
        """Whether the checkpoint can never be completed."""
        return not self.shard or self.reason in _LOSSES


@dataclass(frozen=True, slots=True)
class Retried:
    """Someone who waits has what failed tried again; what is gone or changed stays failed."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class ReceiptStored:
    """This rank's receipt is in the store."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision was read back from the store (also our own)."""

    checkpoint: CheckpointId
    outcome: Outcome
    name: str  # as decided: a rank without shards may have called it otherwise
    reason: str = ""
    is_superseded: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """The spool links are gone; the user's own files are where they were."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Forgotten:
    """This rank has nothing more to do with the checkpoint; its other rows are gone from the journal."""

    checkpoint: CheckpointId
    committed_at: float | None  # local time; None if it was never committed


Event = (
    Opened
    | Growing
    | Enqueued
    | Sealed
    | MadeDurable
    | Superseded
    | MultipartOpened
    | Verified
    | Failed
    | Retried
    | ReceiptStored
    | Decided
    | Released
    | Forgotten
)


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One event with its place in the journal and the local time it was written (for people, not rules)."""

    sequence: int
    rank: int
    written_at: float
    event: Event


# --- local state: what one rank knows from its journal -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A shard and how far it has come."""

    shard: Shard
    enqueued_at: float
    is_durable: bool = False
    multipart: MultipartOpened | None = None
    stored: StoredShard | None = None
    failure: Failed | None = None


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """What this rank holds of one checkpoint."""

    id: CheckpointId
    name: str
    shards: Mapping[str, LocalShard] = field(default_factory=dict)
    growing: Mapping[str, str] = field(default_factory=dict)  # sources of shards that are still being written
    sealed: Sealed | None = None
    sealed_at: float = 0.0
    is_seal_durable: bool = False
    superseded: str = ""  # why, if it was
    failure: Failed | None = None  # of no single shard
    has_receipt: bool = False
    receipt_at: float = 0.0
    decision: Decided | None = None
    decided_at: float = 0.0
    is_released: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(each.shard.size_bytes for each in self.shards.values())

    @property
    def is_verified(self) -> bool:
        """Every shard of this rank is in the store, and there will be no more."""
        return self.sealed is not None and all(each.stored is not None for each in self.shards.values())

    @property
    def was_committed(self) -> bool:
        """It was whole in the store once; remote retention may have pruned it since."""
        return self.decision is not None and self.decision.outcome is not Outcome.ABORT

    @property
    def loss(self) -> Failed | None:
        """Why this rank can never complete the checkpoint, if so: a source is gone or changed, or the disk failed."""
        failures = (self.failure, *(each.failure for each in self.shards.values()))
        return next((failure for failure in failures if failure and failure.is_loss), None)

    @property
    def may_be_retried(self) -> bool:
        """Whether something failed, and another try may succeed."""
        return self.loss is None and any(each.failure is not None for each in self.shards.values())


_LOSSES = frozenset({FailureReason.SOURCE_CHANGED, FailureReason.SOURCE_MISSING})


@dataclass(frozen=True, slots=True)
class Local:
    """Everything one rank's journal says. Forgotten checkpoints are not in it."""

    rank: int
    generation: int = 0  # of the newest start on this rank; 0 before the first
    checkpoints: Mapping[CheckpointId, LocalCheckpoint] = field(default_factory=dict)
    newest_committed: CheckpointId | None = None
    newest_committed_at: float = 0.0
    newest_enqueued: CheckpointId | None = None
    newest_enqueued_at: float = 0.0
    sequence: int = 0
    opened: Opened | None = None  # the newest

    @property
    def remote(self) -> RemoteAddress | None:
        return self.opened.remote if self.opened else None


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


def _apply(
    checkpoint: LocalCheckpoint,
    shards: dict[str, LocalShard],
    event: Growing
    | Enqueued
    | Sealed
    | MadeDurable
    | Superseded
    | MultipartOpened
    | Verified
    | Failed
    | Retried
    | ReceiptStored
    | Decided
    | Released,
    written_at: float,
) -> LocalCheckpoint:
    match event:
        case Growing():
            rest = {name: source for name, source in checkpoint.growing.items() if name != event.shard}
            return replace(
                checkpoint, growing=rest if event.source is None else {**rest, event.shard: event.source}
            )
        case Enqueued():
            shards.setdefault(event.shard.name, LocalShard(event.shard, written_at))
            if event.shard.name in checkpoint.growing:
                rest = {
                    name: source for name, source in checkpoint.growing.items() if name != event.shard.name
                }
                return replace(checkpoint, growing=rest)
        case Sealed():
            if checkpoint.sealed is None:
                sealed_at = written_at if event.sealed_at is None else event.sealed_at
                return replace(checkpoint, sealed=event, sealed_at=sealed_at)
        case MadeDurable():
            for name in event.shards:
                if name in shards:
                    it = shards[name]
                    shards[name] = LocalShard(
                        it.shard, it.enqueued_at, True, it.multipart, it.stored, it.failure
                    )
            if event.is_sealed:
                return replace(checkpoint, is_seal_durable=True)
        case MultipartOpened():
            if event.shard in shards:
                shards[event.shard] = replace(shards[event.shard], multipart=event)
        case Verified():
            if event.stored.name in shards:
                it = shards[event.stored.name]
                shards[event.stored.name] = LocalShard(
                    it.shard, it.enqueued_at, it.is_durable, it.multipart, event.stored
                )
        case Failed():
            if event.shard in shards:
                shards[event.shard] = replace(shards[event.shard], failure=event)
            elif not event.shard:
                return replace(checkpoint, failure=event)
        case Retried():
            if checkpoint.loss is None:
                shards |= {name: replace(each, failure=None) for name, each in shards.items() if each.failure}
        case Superseded():
            return replace(checkpoint, superseded=event.reason)
        case ReceiptStored():
            receipt_at = checkpoint.receipt_at if checkpoint.has_receipt else written_at
            return replace(checkpoint, has_receipt=True, receipt_at=receipt_at)
        case Decided():
            return replace(checkpoint, decision=event, decided_at=written_at)
        case Released():
            return replace(checkpoint, is_released=True)
        case _:
            assert_never(event)
    return checkpoint


def _retry_failed(checkpoint: LocalCheckpoint) -> LocalCheckpoint:
    """A new engine tries again what an old one gave up on, except where the bytes themselves are gone."""
    if not checkpoint.may_be_retried:
        return checkpoint
    return replace(
        checkpoint, shards={name: replace(each, failure=None) for name, each in checkpoint.shards.items()}
    )
