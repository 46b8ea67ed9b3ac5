"""What a rank has not finished: what may be given up of it, whom it waits for, and what to say of it. Pure."""

from __future__ import annotations

from ckpt_async.core import retention
from ckpt_async.core.decide import Receipts, candidate, is_loadable, missing_ranks, why_hopeless
from ckpt_async.core.local_state import Local, LocalCheckpoint, LocalShard
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.retention import RetentionPolicy
from ckpt_async.core.units import age

# A wait for other ranks is told when it is this long, and at every doubling.
LONG_WAIT_S = 600.0


def undecided(local: Local) -> list[LocalCheckpoint]:
    """Checkpoints whose fate this rank does not know yet, oldest first."""
    return [each for _, each in sorted(local.checkpoints.items()) if each.decision is None]


def backlog(local: Local) -> list[LocalCheckpoint]:
    """Checkpoints that this rank has not finished uploading, oldest first. What waits for other ranks, for whoever
    gives up what is hopeless, or for the trainer itself to add shards or seal is not in it: holding the trainer up
    for those would stall it for ever.
    """
    return [
        each
        for _, each in sorted(local.checkpoints.items())
        if each.decision is None
        and not each.has_receipt
        and why_hopeless(each, local.generation) is None
        and not (each.sealed is None and all(shard.stored is not None for shard in each.shards.values()))
    ]


def supersedable(local: Local, policy: RetentionPolicy) -> list[CheckpointId]:
    """Which checkpoints of the backlog may be given up for newer ones, oldest first.

    Never the newest sealed one, nor what the retention policy would keep if everything in the backlog were
    committed. What was given up, or is bound to be, protects nothing: it does not count.
    """
    candidates = [
        candidate(each)
        for each in local.checkpoints.values()
        if each.sealed is not None
        and (is_loadable(each) if each.decision else why_hopeless(each, local.generation) is None)
    ]
    kept = retention.apply(policy, candidates)
    return [each.id for each in backlog(local) if each.sealed is not None and each.id not in kept]


def unsent_bytes(checkpoint: LocalCheckpoint) -> int:
    return sum(each.shard.size_bytes for each in checkpoint.shards.values() if each.stored is None)


def stranded(local: Local, url: str) -> list[CheckpointId]:
    """Unfinished checkpoints that were begun at another remote than `url`. What is verified there is not here: a
    commit here would name shards that do not exist (R1).
    """
    if local.remote is None or local.remote.url.rstrip("/") == url.rstrip("/"):
        return []
    return sorted(id_ for id_, each in local.checkpoints.items() if each.decision is None)


def queue_state(each: LocalShard, *, is_begun: bool, is_inherited: bool) -> str:
    """Which part of the queue a shard that is not in the store yet belongs to: queued, uploading, retrying, failed.

    `is_begun`: some bytes are acknowledged. `is_inherited`: an earlier start of the run left it.
    """
    if each.failure is not None:
        return "failed"
    if is_begun or (each.multipart is not None and not is_inherited):
        return "uploading"
    return "retrying" if is_inherited else "queued"


def waits_for_others(local: Local) -> bool:
    """Whether our part of a checkpoint is in the store and another rank's is not. What an earlier start left is not
    worth the wait once something newer is committed: its other ranks may never come.
    """
    newest = local.newest_committed
    return any(
        each.has_receipt
        and each.decision is None
        and (each.id.generation == local.generation or newest is None or each.id > newest)
        for each in local.checkpoints.values()
    )


def waits_for_ranks(checkpoint: LocalCheckpoint) -> bool:
    """Whether this rank has delivered its part and nobody has decided yet: others have not, or nobody commits."""
    return checkpoint.has_receipt and checkpoint.decision is None


def first_tell_s(receipts: Receipts, rank: int) -> float:
    """How long this rank waits before it says so: the lowest of those that have delivered speaks for all, the others at
    the next doubling, for it may have died since.
    """
    return LONG_WAIT_S if rank == min(receipts.ranks, default=rank) else 2 * LONG_WAIT_S


def long_wait(local: Local, id_: CheckpointId, receipts: Receipts, waited_s: float) -> str:
    """What to tell of a checkpoint that waits for others; empty unless it is the oldest one that does."""
    waiting = [id_ for id_, each in sorted(local.checkpoints.items()) if waits_for_ranks(each)]
    if waiting[:1] != [id_]:
        return ""
    sealed = local.checkpoints[id_].sealed
    missing = missing_ranks(receipts, sealed.world_size if sealed else 0)
    more = " and more" if missing[8:] or not receipts.is_whole else ""
    whom = f"ranks {missing[:8]}{more}" if missing else "a decision, though all ranks have delivered,"
    others = f"; later ones that wait too: {len(waiting) - 1}" if waiting[1:] else ""
    return f"step {id_.step} waits for {whom} for {age(waited_s)}{others}"
