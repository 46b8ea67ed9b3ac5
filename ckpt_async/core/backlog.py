"""The work that a rank has not finished: what may be given up, whom it waits for, and what to report. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_async.core import retention
from ckpt_async.core.decide import candidate, is_loadable, why_hopeless
from ckpt_async.core.local_state import Local, LocalCheckpoint, LocalShard
from ckpt_async.core.model import CheckpointId, RemoteAddress, without_slash
from ckpt_async.core.retention import RetentionPolicy
from ckpt_async.core.units import age
from ckpt_async.core.waiting import Receipts, missing_ranks

# A wait for other ranks is logged when it has taken this long, and again each time it has doubled.
LONG_WAIT_S = 600.0


def undecided(local: Local) -> list[LocalCheckpoint]:
    """Return the checkpoints whose decision this rank does not know yet, oldest first."""
    return [each for _, each in sorted(local.checkpoints.items()) if each.decision is None]


def backlog(local: Local) -> list[LocalCheckpoint]:
    """Return the checkpoints that this rank has not finished uploading, oldest first.

    Excluded are checkpoints that wait for other ranks, that are hopeless and wait to be aborted, or that wait for the
    trainer itself to add shards or to seal: blocking the trainer for those would stall it for ever.
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
    """Return the checkpoints of the backlog that may be given up for newer ones, oldest first.

    Never includes the newest sealed one, nor any that the retention policy would keep if the whole backlog were
    committed. Checkpoints that were or will be aborted do not count towards retention.
    """
    candidates = [
        candidate(each)
        for each in local.checkpoints.values()
        if each.sealed is not None
        and (is_loadable(each) if each.decision else why_hopeless(each, local.generation) is None)
    ]
    kept = retention.apply(policy, candidates)
    return [each.id for each in backlog(local) if each.sealed is not None and each.id not in kept]


def left_by_predecessors(local: Local, generation: int) -> list[CheckpointId]:
    """Return what earlier generations left, may still be committed from here, and would then be the newest."""
    newest = local.newest_committed
    return [
        each.id
        for each in undecided(local)
        if each.id.generation < generation
        and (newest is None or each.id > newest)
        and why_hopeless(each, generation) is None
    ]


def nonces_of_left(local: Local, lost: Mapping[int, str]) -> dict[int, str]:
    """Return the nonces, as far as they are known, of the generation that this rank has opened last, and of those of
    which it has something left; `lost` are those of what the journal has lost.
    """
    known = {**lost, **(local.opened.nonces if local.opened else {})}
    left = {local.generation, *lost, *(each.id.generation for each in undecided(local))}
    return {number: nonce for number, nonce in known.items() if number in left}


def unsent_bytes(checkpoint: LocalCheckpoint) -> int:
    return sum(each.shard.size_bytes for each in checkpoint.shards.values() if each.stored is None)


def is_of_another(local: Local, url: str) -> bool:
    """Return whether the newest launch in the journal used another remote than `url`."""
    return local.remote is not None and local.remote.url != without_slash(url)


def stranded(local: Local, url: str) -> list[CheckpointId]:
    """Return the unfinished checkpoints that were begun at another remote than `url`.

    Shards that were verified there are not at `url`, so a commit at `url` would name shards that do not exist (R1).
    """
    return [each.id for each in undecided(local)] if is_of_another(local, url) else []


def unproven(local: Local, address: RemoteAddress) -> list[CheckpointId]:
    """Return the unfinished checkpoints that were begun at the same URL of another server.

    It may be the same store under a new name, or a replica that lacks what the first one had verified. So what was
    verified there must be asked for again before a commit may name it (R1).
    """
    return [each.id for each in undecided(local)] if is_at_other_endpoint(local, address) else []


def is_at_other_endpoint(local: Local, address: RemoteAddress) -> bool:
    """Return whether the newest launch in the journal used the same URL of another server."""
    known = local.remote
    return known is not None and known.url == address.url and known.endpoint_url != address.endpoint_url


def committed_in_newest(local: Local) -> list[CheckpointId]:
    """Return what this rank knows to be committed of the generation that it has opened last, oldest first.

    What earlier generations have committed is not included: a launch has gone on without asking for it, perhaps at a
    replica that lacks it.
    """
    known = {id_ for id_, each in local.checkpoints.items() if each.was_committed}
    known |= {local.newest_committed} if local.newest_committed is not None else set()
    return sorted(id_ for id_ in known if id_.generation == local.generation)


def queue_state(each: LocalShard, *, is_begun: bool, is_inherited: bool) -> str:
    """Return the state of a shard that is not in the store yet: queued, uploading, retrying or failed.

    `is_begun`: the store has acknowledged some of its bytes. `is_inherited`: an earlier launch of the run left it.
    """
    if each.failure is not None:
        return "failed"
    if is_begun or (each.multipart is not None and not is_inherited):
        return "uploading"
    return "retrying" if is_inherited else "queued"


def waits_for_others(local: Local) -> bool:
    """Return whether some checkpoint has this rank's receipt but waits for other ranks.

    A checkpoint that an earlier launch left no longer counts once a newer one is committed: its other ranks may never
    deliver.
    """
    newest = local.newest_committed
    return any(
        each.has_receipt
        and each.decision is None
        and (each.id.generation == local.generation or newest is None or each.id > newest)
        for each in local.checkpoints.values()
    )


def waits_for_ranks(checkpoint: LocalCheckpoint) -> bool:
    """Return whether this rank has delivered its part of an undecided checkpoint.

    Either other ranks have not delivered theirs, or none of them commits.
    """
    return checkpoint.has_receipt and checkpoint.decision is None


def first_tell_s(receipts: Receipts, rank: int) -> float:
    """Return how long this rank waits before it logs that it is waiting.

    The lowest rank that has delivered does so first, on behalf of all; the others follow at the next doubling, because
    it may have died since.
    """
    return LONG_WAIT_S if rank == min(receipts.ranks, default=rank) else 2 * LONG_WAIT_S


def long_wait(local: Local, id_: CheckpointId, receipts: Receipts, waited_s: float) -> str:
    """Return the text to log about a checkpoint that waits for other ranks; "" unless it is the oldest that does."""
    waiting = [id_ for id_, each in sorted(local.checkpoints.items()) if waits_for_ranks(each)]
    if waiting[:1] != [id_]:
        return ""
    sealed = local.checkpoints[id_].sealed
    missing = missing_ranks(receipts, sealed.world_size if sealed else 0)
    more = " and more" if missing[8:] or not receipts.is_whole else ""
    whom = f"ranks {missing[:8]}{more}" if missing else "a decision, though all ranks have delivered,"
    others = f"; later checkpoints waiting as well: {len(waiting) - 1}" if waiting[1:] else ""
    return f"step {id_.step} waits for {whom} for {age(waited_s)}{others}"
