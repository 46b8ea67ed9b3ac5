"""The work that a rank has not finished: what may be given up, whom it waits for, and what to report. Pure."""

from __future__ import annotations

from ckpt_async.core.decide import Shortage, is_freeing, why_undeliverable
from ckpt_async.core.local_state import Local, LocalCheckpoint, LocalShard
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import age, in_units
from ckpt_async.core.waiting import Receipts, missing_ranks

# A wait for other ranks is logged when it has taken this long, and again each time it has doubled.
LONG_WAIT_S = 600.0


def undecided(local: Local) -> list[LocalCheckpoint]:
    """Return the checkpoints whose decision this rank does not know yet, oldest first."""
    return [each for _, each in sorted(local.checkpoints.items()) if each.decision is None]


def backlog(local: Local) -> list[LocalCheckpoint]:
    """Return the checkpoints that this rank has not finished uploading, oldest first.

    Excluded are checkpoints that wait for other ranks, that are undeliverable and wait to be aborted, or that wait for
    the trainer itself to add shards or to seal: blocking the trainer for those would stall it for ever.
    """
    return [
        each
        for _, each in sorted(local.checkpoints.items())
        if each.decision is None
        and not each.has_receipt
        and why_undeliverable(each, local.generation) is None
        and not (each.sealed is None and all(shard.stored is not None for shard in each.shards.values()))
    ]


def shortage(
    settings: Settings, local: Local, free_bytes: int, num_ranks: int, *, is_for_new: bool = False
) -> Shortage | None:
    """Return why there is no room for what waits, or (`is_for_new`) for another checkpoint; None if there is.

    `num_ranks` share the folder, and save at the same time.
    """
    least_bytes = settings.min_free_bytes
    if least_bytes < 0:
        least_bytes = 2 * num_ranks * save_bytes(local)
    if free_bytes < least_bytes:
        text = f"the disk has {in_units(free_bytes)} left, less than {in_units(least_bytes)}"
        return Shortage(f"{text} (min_free_bytes)", settings.on_disk_low, is_of_disk=True)
    if not (settings.max_backlog_checkpoints or settings.max_backlog_bytes):
        return None
    waiting, reaction = backlog(local), settings.on_backlog
    if 0 < settings.max_backlog_checkpoints < len(waiting) + is_for_new:
        limit = settings.max_backlog_checkpoints
        text = f"{len(waiting)} checkpoints are waiting, max_backlog_checkpoints={limit}"
        return Shortage(text, reaction, is_of_disk=False)
    waiting_bytes = sum(unsent_bytes(each) for each in waiting)
    if 0 < settings.max_backlog_bytes < waiting_bytes + is_for_new:
        limit = settings.max_backlog_bytes
        text = f"{waiting_bytes} bytes are waiting, max_backlog_bytes={limit}"
        return Shortage(text, reaction, is_of_disk=False)
    return None


def why_skipped(settings: Settings, local: Local, found: Shortage, free_bytes: int, num_ranks: int) -> str:
    """Return why the next save is skipped, although it may give up older ones; "" if it is not.

    Only while others wait, whose links hold space. By default that is where another save of the folder's ranks would
    not fit. Where the user says how much is to stay free, it is where nothing older could be given up: it is the
    target, or the only one besides it.
    """
    if not found.is_of_disk or found.reaction != "supersede" or not backlog(local):
        return ""
    if settings.min_free_bytes < 0:
        return found.text if free_bytes < num_ranks * save_bytes(local) else ""
    return "" if is_freeing(local) or len(backlog(local)) > 2 else found.text


def save_bytes(local: Local) -> int:
    """Return the size of this rank's part of the largest of its last few checkpoints; 0 if none is known."""
    return max((each.size_bytes for each in [*local.checkpoints.values()][-4:]), default=0)


def behind(local: Local, upload_s: float) -> str:
    """Return the text to log where uploads fall behind; "" if they do not, or if that cannot be told."""
    waiting = [
        each.sealed_at for each in backlog(local) if each.sealed and each.id.generation == local.generation
    ]
    if len(waiting) < 2 or upload_s <= 0:
        return ""
    every_s = (waiting[-1] - waiting[0]) / (len(waiting) - 1)
    if upload_s <= every_s:
        return ""
    num = max(2, round(upload_s / max(every_s, 1e-3)))
    size_bytes = sum(unsent_bytes(each) for each in backlog(local))
    every, upload = (f"{each:.1f} s" if each < 10 else age(each) for each in (every_s, upload_s))
    return (
        f"a save every {every}, and an upload takes {upload}: about 1 of {num} saves will reach the store"
        f" while training goes on like this; {len(waiting)} are waiting ({in_units(size_bytes)})"
    )


def left_by_predecessors(local: Local, generation: int) -> list[CheckpointId]:
    """Return what earlier generations left, may still be committed from here, and would then be the newest."""
    newest = local.newest_committed
    return [
        each.id
        for each in undecided(local)
        if each.id.generation < generation
        and (newest is None or each.id > newest)
        and why_undeliverable(each, generation) is None
    ]


def unsent_bytes(checkpoint: LocalCheckpoint) -> int:
    return sum(each.shard.size_bytes for each in checkpoint.shards.values() if each.stored is None)


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


def first_log_s(receipts: Receipts, rank: int) -> float:
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
