"""The package's basic values and the events of the journal. Pure: no I/O, no clock.

Work in flight, which a crash invalidates, is never an event.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_async.errors import FailureReason


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """One point of training in one generation of the run. `latest` moves in the order of these ids (rule R6)."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"generation {self.generation} step {self.step}"

    @property
    def short(self) -> str:
        """The checkpoint as commands take it: `3@g2`."""
        return f"{self.step}@g{self.generation}"


@dataclass(frozen=True, slots=True)
class Checksum:
    """A full-object checksum as S3 writes it: base64 of the big-endian value."""

    algorithm: str  # "crc64nvme" | "crc32c"
    value: str


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Distinguishes one version of a file from another.

    The inode number alone does not, because it is reused. The device is not compared: after a boot, disks may be
    numbered in another order although the file is the same.
    """

    device: int = field(compare=False)
    inode: int
    size_bytes: int
    mtime_ns: int

    def is_as_long_and_old_as(self, other: FileIdentity) -> bool:
        """Return whether size and mtime agree, which are what `cp -a` and `rsync -a` keep."""
        return (self.size_bytes, self.mtime_ns) == (other.size_bytes, other.mtime_ns)


@dataclass(frozen=True, slots=True)
class Shard:
    """One immutable file that one rank has finished writing.

    `name` is its path within the checkpoint and `source` its path within the folder, both with '/'.
    `is_linked` says whether the spool holds a hard link; otherwise there is only the user's own file. `publish_as` is
    the exact key, relative to the run, under which the user wants a copy once the checkpoint is committed.
    """

    name: str
    source: str
    identity: FileIdentity
    is_linked: bool
    publish_as: str = ""

    @property
    def size_bytes(self) -> int:
        return self.identity.size_bytes


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard in the store, with the size and checksum that the store reported. Receipts list these."""

    name: str
    key: str
    size_bytes: int
    checksum: Checksum
    publish_as: str = ""  # only in receipts; see `Shard`


@dataclass(frozen=True, slots=True)
class Receipt:
    """States that a rank has verified all its shards of this checkpoint."""

    checkpoint: CheckpointId
    name: str
    rank: int
    world_size: int
    shards: tuple[StoredShard, ...]
    metrics: tuple[tuple[str, float], ...] = ()
    # Shards, of any rank, without which the checkpoint is incomplete (R5).
    expected: tuple[str, ...] = ()
    nonce: str = ""  # of the record of the generation in which this launch saved; as in `Opened`

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


class Outcome(enum.Enum):
    """The outcome of a decision: absent → COMMIT | ABORT; COMMIT → PRUNING → PRUNED. No transition ever reverts."""

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
    is_superseded: bool = False  # aborted because a rank gave it up for newer checkpoints
    is_lost_by_store: bool = False  # aborted because the store has lost what it had confirmed


@dataclass(frozen=True, slots=True)
class Lease:
    """States that a reader is loading the checkpoint: its shards stay until the lease is gone or has expired.

    The lease expires `ttl_s` after its own `Last-Modified` in the store; the holder stops reading after two thirds of
    that time.
    """

    checkpoint: CheckpointId
    reader: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Damage:
    """A reader's mark on a committed checkpoint that cannot be read as it was decided, so that other readers skip it.

    The mark removes nothing, and retention keeps as many other checkpoints as if this one did not exist. Deleting the
    mark gives the checkpoint another chance.
    """

    checkpoint: CheckpointId
    reason: str
    found_by: str
    found_at: float


@dataclass(frozen=True, slots=True)
class Latest:
    """The hint that names the newest committed checkpoint.

    `number` grows with every move: an ETag depends on the content alone, so without it A→B→A would pass a
    compare-and-swap (rule R13).
    """

    checkpoint: CheckpointId
    name: str
    prefix: str
    number: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Target:
    """Names the checkpoint that all ranks of a launch send next. Moves forward only; `number` and `nonce` are as in
    `Latest`.
    """

    checkpoint: CheckpointId
    number: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Claim:
    """States whose copy belongs under an exact key: that of the newest checkpoint that has claimed the key.

    `number` and `nonce` are as in `Latest`.
    """

    key: str
    checkpoint: CheckpointId
    source: str
    size_bytes: int
    checksum: Checksum
    number: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Generation:
    """One launch of the run, claimed once by whichever of its ranks came first."""

    number: int
    launch_key: str
    world_size: int
    host: str
    nonce: str
    claimed_at: float


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: the rank that claimed the generation was alive when it wrote this, for the `count`th time."""

    generation: int
    rank: int
    count: int


def without_slash(url: str) -> str:
    """Return a remote's URL as it is compared with others: a slash at its end does not make it another place."""
    scheme, separator, rest = url.rpartition("://")
    return scheme + separator + rest.rstrip("/")


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """Where a run's checkpoints go, in a form that may be written to disk: everything but credentials. Its URL has no
    slash at the end, however it was given or recorded.

    `put_args` are included because they say how objects are encrypted, and whoever finishes the uploads must do the
    same.
    """

    url: str
    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: str = "auto"
    put_args: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", without_slash(self.url))


# --- journal events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine took over this rank's journal. Shards whose uploads had finally failed get another chance."""

    generation: int
    world_size: int
    remote: RemoteAddress
    # The settings listed in `settings.RECORDED`, which `drain` and the sweeper must follow too.
    settings: tuple[tuple[str, str | int], ...] = ()
    boot_id: str = ""  # of the machine's kernel; if it has changed, whatever was not fsynced may be gone
    # Of the generation's record, as this rank wrote or read it; "" if the user has given the generation and the store
    # has no conditional PUT, because another rank may have replaced the record.
    nonce: str = ""
    # Generations that this rank has opened before, oldest first, and the nonces of their records.
    earlier: tuple[tuple[int, str], ...] = ()

    @property
    def nonces(self) -> dict[int, str]:
        """The nonces of the records of all generations of which they are known, oldest first."""
        return dict(self.earlier) | ({self.generation: self.nonce} if self.nonce else {})


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The trainer handed over a shard; its spool link exists."""

    checkpoint: CheckpointId
    name: str
    shard: Shard


@dataclass(frozen=True, slots=True)
class Growing:
    """The trainer is writing a shard, whose finished parts may be sent ahead.

    `source` is None once the trainer has stopped writing without enqueueing the shard.
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
    sealed_at: float | None = None  # None: the time at which the row was written
    expected: tuple[str, ...] = ()  # as in `Receipt`


@dataclass(frozen=True, slots=True)
class MadeDurable:
    """Shards and what belongs to them were fsynced, and survive power loss.

    That includes their folders, the spool's manifest and the journal rows before this one. `is_sealed` tells whether
    the manifest on disk includes the seal.
    """

    checkpoint: CheckpointId
    shards: tuple[str, ...]
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class Superseded:
    """The user's policy gave the checkpoint up for newer ones, because uploads fell behind or the disk ran full."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class MultipartOpened:
    """A multipart upload was begun for the shard, so that no part needs to be sent twice."""

    checkpoint: CheckpointId
    shard: str
    upload_id: str
    part_size_bytes: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The store answered with the size and checksum that were computed from the local file."""

    checkpoint: CheckpointId
    stored: StoredShard


_LOSSES = frozenset({FailureReason.SOURCE_CHANGED, FailureReason.SOURCE_MISSING})


@dataclass(frozen=True, slots=True)
class Failed:
    """The shard could not be uploaded in time, or never can be (`reason` is not retryable).

    An empty `shard` means that the whole checkpoint failed: either an fsync of something else in it failed, so that
    nothing fsynced for it can be trusted, or the trainer gave it up.
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
    """Someone is waiting, so failed uploads are tried again. Shards whose source is gone or changed stay failed."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class ReceiptStored:
    """This rank's receipt is in the store."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision was read back from the store, this rank's own included."""

    checkpoint: CheckpointId
    outcome: Outcome
    name: str  # as decided; a rank without shards may have used another name
    reason: str = ""
    is_superseded: bool = False
    is_lost_by_store: bool = False


@dataclass(frozen=True, slots=True)
class Copied:
    """These shards need no more copying.

    They are under the exact keys that the user wanted, or a newer checkpoint's shards are, or they were pruned.
    """

    checkpoint: CheckpointId
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Local retention has deleted the user's files, but copies within the store are still to be made."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Released:
    """The spool links are gone; the user's own files are where they were."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Unproven:
    """The store may lack what it had confirmed of this rank's part of the checkpoint: none of that counts any more."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Forgotten:
    """This rank has nothing more to do with the checkpoint."""

    checkpoint: CheckpointId
    committed_at: float | None  # local time; None if it was never committed


@dataclass(frozen=True, slots=True)
class StartedOver:
    """Of all rows before this one, only what it says counts: they were compacted, or were those of another remote."""

    generation: int = 0
    committed: CheckpointId | None = None
    committed_at: float = 0.0
    enqueued: CheckpointId | None = None
    enqueued_at: float = 0.0


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
    | Copied
    | Removed
    | Unproven
    | Forgotten
    | StartedOver
)


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One event with its position in the journal, which it shares with those appended at once, and the local time at
    which it was written (for people, not rules).
    """

    sequence: int
    rank: int
    written_at: float
    event: Event
