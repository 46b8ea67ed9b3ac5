"""What is decided about a checkpoint whose ranks are done, from their receipts and what the store still has. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_async.core.model import CheckpointId, Checksum, Decision, Outcome, Receipt
from ckpt_async.core.units import few, named


def verdict(
    draft: Decision, receipts: Mapping[int, Receipt], gone: Sequence[str], checksums: Mapping[int, Checksum]
) -> Decision | None:
    """Return the decision to create: a commit, or an abort if the receipts contradict each other (R5), or if the store
    has lost what it had confirmed (R1: `gone` are the keys). None if a receipt is missing that may still be listed.

    `receipts` and their `checksums` are those of ranks 0..N-1 that are there. `draft` has what both decisions have.
    """
    is_complete = len(receipts) == draft.world_size
    if is_complete and (reason := obstacle(draft.checkpoint, receipts.values())):
        return replace(draft, outcome=Outcome.ABORT, reason=reason)
    if gone:
        return replace(draft, outcome=Outcome.ABORT, reason=lost(gone), is_lost_by_store=True)
    if not is_complete:
        return None
    return replace(
        draft,
        outcome=Outcome.COMMIT,
        receipts=tuple(checksums[rank] for rank in range(draft.world_size)),
        num_shards=sum(len(each.shards) for each in receipts.values()),
        size_bytes=sum(each.size_bytes for each in receipts.values()),
        metrics=merged_metrics(receipts.values()),
    )


def is_ours(there: Decision, wanted: Decision) -> bool:
    """Return whether the decision that is there is ours: whoever decides has more to do afterwards. An earlier attempt
    of ours may have created it and then failed.
    """
    return there.nonce == wanted.nonce or there.decided_by == wanted.decided_by


def obstacle(checkpoint: CheckpointId, receipts: Iterable[Receipt]) -> str | None:
    """Return why these receipts must not be committed together, or None if they may be (R5).

    They are the receipts found under the checkpoint's own keys; decoding has checked that each belongs there.
    """
    by_rank = sorted(receipts, key=lambda receipt: receipt.rank)
    if not by_rank:
        return "there are no receipts"
    first, name = by_rank[0], name_of(by_rank)
    launches = {receipt.nonce: receipt.rank for receipt in by_rank}
    if len(launches) > 1:
        return f"the receipts of {named('rank', sorted(launches.values()))} are of different launches"
    for receipt in by_rank:
        if receipt.checkpoint != checkpoint:
            return f"rank {receipt.rank}'s receipt is of {receipt.checkpoint}"
        if receipt.world_size != first.world_size:
            sizes = f"{receipt.world_size}, but rank {first.rank} says {first.world_size}"
            return f"rank {receipt.rank} says world size {sizes}"
        if receipt.shards and receipt.name != name:
            return f"rank {receipt.rank} calls it {receipt.name!r}, other ranks {name!r}"
    if [receipt.rank for receipt in by_rank] != list(range(first.world_size)):
        return f"receipts of ranks {[receipt.rank for receipt in by_rank]}, but world size {first.world_size}"
    if not any(receipt.shards for receipt in by_rank):
        return "no rank enqueued a shard"
    owners: dict[str, tuple[int, object]] = {}
    for receipt in by_rank:
        for shard in receipt.shards:
            content = (shard.size_bytes, shard.checksum)
            rank, other = owners.setdefault(shard.key, (receipt.rank, content))
            if other != content:
                return f"ranks {rank} and {receipt.rank} both wrote {shard.key}, but with different content"
    return _lacking(by_rank)


def _lacking(receipts: Iterable[Receipt]) -> str | None:
    """Return a message if some rank expects files that no rank has, else None."""
    there = {shard.name for receipt in receipts for shard in receipt.shards}
    for receipt in receipts:
        if lacking := sorted({*receipt.expected} - there):
            return f"rank {receipt.rank} expects {few(lacking)}, which no rank has"
    return None


def lost(gone: Sequence[str]) -> str:
    """Return why a checkpoint is given up of which the store does not have these keys any more."""
    return (
        f"the store has lost {few(gone)}, which it had confirmed: nothing is uploaded again, and each rank's files stay"
        " in its folder until a newer checkpoint is committed"
    )


def name_of(receipts: Iterable[Receipt]) -> str:
    """Return the checkpoint's name, as the lowest rank with shards has it (a rank without any need not know it)."""
    return min(receipts, key=lambda receipt: (not receipt.shards, receipt.rank)).name


def merged_metrics(receipts: Iterable[Receipt]) -> tuple[tuple[str, float], ...]:
    """Return the metrics given at `seal`; where ranks differ, the lowest rank's value counts."""
    merged: dict[str, float] = {}
    for receipt in sorted(receipts, key=lambda receipt: receipt.rank, reverse=True):
        merged.update(receipt.metrics)
    return tuple(sorted(merged.items()))
