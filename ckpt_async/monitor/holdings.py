"""What the journals of a folder say about all ranks of a node together, in numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckpt_async import private
from ckpt_async.core.backlog import queue_state, waits_for_ranks
from ckpt_async.core.local_state import LocalShard
from ckpt_async.core.model import CheckpointId
from ckpt_async.local import journals
from ckpt_async.local.journals import RankState

QUEUE_STATES = ("queued", "uploading", "retrying", "failed")


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

    def add(self, state: RankState) -> None:
        """Add one rank."""
        local = state.local
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
                    is_begun = state.progress.get((id_, name), 0) > 0
                    is_inherited = id_.generation < local.generation
                    self._add_pending(each, is_begun=is_begun, is_inherited=is_inherited)

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


def add_folder(runs: dict[str, Holdings], folder: str | os.PathLike[str]) -> None:
    """Add what a folder holds to `runs`, whose keys are the URLs of the runs' remotes.

    Works beside live trainers: creates no file, takes no lock. Raises NoJournalError if there is no journal,
    JournalError if one cannot be read, and for another user's folder.
    """
    private.check(journals.private_of(folder))
    for states in journals.states(folder).values():
        for each in states:
            run = each.local.remote.url if each.local.remote else ""
            runs.setdefault(run, Holdings()).add(each)
