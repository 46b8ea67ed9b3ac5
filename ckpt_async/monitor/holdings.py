"""What the journals of a folder say about all ranks of a node together, in numbers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt_async import private
from ckpt_async.core.backlog import queue_state, waits_for_ranks
from ckpt_async.core.local_state import Local, LocalShard, fold
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import NoJournalError
from ckpt_async.local import journals

QUEUE_STATES = ("queued", "uploading", "retrying", "failed")

Progress = Mapping[tuple[int, CheckpointId, str], int]  # bytes sent of unfinished shards, by rank


@dataclass(slots=True)
class Holdings:
    """Sums over the ranks that were added."""

    enqueued: tuple[CheckpointId, float] | None = None
    committed: tuple[CheckpointId, float] | None = None
    oldest_pending_at: float | None = None
    oldest_waiting_at: float | None = None
    num_files: dict[str, int] = field(default_factory=lambda: dict.fromkeys(QUEUE_STATES, 0))
    size_bytes: int = 0  # of the queue
    waiting: set[CheckpointId] = field(default_factory=set)  # waiting for ranks that have not delivered
    retained: set[CheckpointId] = field(default_factory=set)
    linked: dict[tuple[int, int], int] = field(default_factory=dict)  # (device, inode): size

    def add(self, local: Local, begun: set[tuple[CheckpointId, str]]) -> None:
        """Add one rank; `begun` are the shards of which some bytes were sent."""
        if local.newest_committed is not None:
            self.committed = _newest(self.committed, (local.newest_committed, local.newest_committed_at))
        if local.newest_enqueued is not None:
            self.enqueued = _newest(self.enqueued, (local.newest_enqueued, local.newest_enqueued_at))
        for id_, checkpoint in local.checkpoints.items():
            if checkpoint.was_committed:
                self.retained.add(id_)
            if waits_for_ranks(checkpoint):
                self.waiting.add(id_)
                self.oldest_waiting_at = _older(self.oldest_waiting_at, checkpoint.receipt_at)
            for name, each in checkpoint.shards.items():
                if each.shard.is_linked and not checkpoint.is_released:
                    identity = each.shard.identity
                    self.linked[identity.device, identity.inode] = identity.size_bytes
                if each.stored is None and checkpoint.decision is None:
                    self._add_pending(
                        each, is_begun=(id_, name) in begun, is_inherited=id_.generation < local.generation
                    )

    def _add_pending(self, each: LocalShard, *, is_begun: bool, is_inherited: bool) -> None:
        self.num_files[queue_state(each, is_begun=is_begun, is_inherited=is_inherited)] += 1
        self.size_bytes += each.shard.size_bytes
        self.oldest_pending_at = _older(self.oldest_pending_at, each.enqueued_at)


def _older(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)


def _newest(
    one: tuple[CheckpointId, float] | None, other: tuple[CheckpointId, float]
) -> tuple[CheckpointId, float]:
    return other if one is None else max(one, other)


def read(folder: str | os.PathLike[str]) -> dict[str, tuple[list[Local], Progress]]:
    """Return what each rank's journal says, by kind of checkpoints. Works beside live trainers: creates no file,
    takes no lock. Raises NoJournalError if there is none, JournalError if one cannot be read.
    """
    return {kind: _of_ranks(found.values()) for kind, found in journals.read_all(folder).items()}


def _of_ranks(readings: Iterable[journals.Reading]) -> tuple[list[Local], Progress]:
    found = [each for each in readings if each.rows]
    progress = {
        (each.rank, id_, shard): sent for each in found for (id_, shard), sent in each.progress.items()
    }
    return [each.local() for each in found], progress


def add_folder(runs: dict[str, Holdings], folder: str | os.PathLike[str]) -> None:
    """Add what a folder holds to `runs`, whose keys are the URLs of the runs' remotes. Raises the same errors as
    `read`, and JournalError for another user's folder.
    """
    private.check(journals.private_of(folder))
    for locals_, progress in read(folder).values():
        for local in locals_:
            run = local.remote.url if local.remote else ""
            begun = {
                (id_, name) for (rank, id_, name), sent in progress.items() if rank == local.rank and sent
            }
            runs.setdefault(run, Holdings()).add(local, begun)


class Replay:
    """The state that the journals of one kind of checkpoints describe, for every rank of the folder. For one thread
    at a time.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str = "") -> None:
        self._folder, self._kind = folder, kind
        self._places: dict[int, journals.Place] = {}
        self.is_there = False
        self.locals: dict[int, Local] = {}  # by rank
        self.progress: dict[
            int, Mapping[tuple[CheckpointId, str], int]
        ] = {}  # bytes sent of unfinished shards

    def look(self) -> None:
        """Fold in new rows. Raises JournalError."""
        found: dict[int, journals.Reading] = {}
        self.is_there = False
        with contextlib.suppress(NoJournalError):  # before the first uploader of the node has opened
            found = journals.read(self._folder, kind=self._kind, after=self._places)
            self.is_there = True
        self.locals = {
            rank: reading.local() if reading.is_whole else fold(reading.rows, self.locals[rank])
            for rank, reading in found.items()
        }
        self._places = {rank: reading.place for rank, reading in found.items()}
        self.progress = {rank: reading.progress for rank, reading in found.items()}
