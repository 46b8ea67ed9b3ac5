"""From the receipts to the decision: reads what `core/agreement.py` compares, and creates what that decides.

Safe to repeat and to cut short anywhere, as all steps of the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ckpt_async.core import agreement, keys, records
from ckpt_async.core.model import CheckpointId, Decision, Outcome, Receipt
from ckpt_async.errors import InvalidRecordError
from ckpt_async.protocol import steps
from ckpt_async.protocol.cas import create_once, read
from ckpt_async.protocol.steps import new_decision, read_boundary, receipt_from, settled
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none, both

logger = logging.getLogger(__name__)


async def _always() -> bool:
    return True


async def settle(
    store: PatientStore,
    checkpoint: CheckpointId,
    *,
    world_size: int,
    by: str,
    now: float,
    name: str = "",
    may_decide: Callable[[], Coroutine[Any, Any, bool]] = _always,
) -> tuple[Decision, bool] | None:
    """Read every rank's receipt, compare them with each other and with what the store has, and decide: commit, or abort
    if they contradict, or if the store has lost an object that it had confirmed (R1).

    All ranks had stored their receipts. `name` is the checkpoint's, in case none is left. Returns what was decided, by
    us or by another, and whether it was us. None if nothing was: we may not, or the store is late to show a receipt.

    Each attempt to create the decision begins with the comparison; a further one first reads whether the decision is
    there. If something is gone, and before a further attempt, `may_decide` is asked: another launch may have begun.
    """
    raw = await read_receipts(store, checkpoint, world_size)
    receipts = {rank: receipt_from(data, checkpoint, rank) for rank, data in raw.items()}
    name = agreement.name_of(receipts.values()) if receipts else name or f"step-{checkpoint.step}"
    draft = new_decision(checkpoint, Outcome.ABORT, name=name, world_size=world_size, by=by, now=now)
    checksums = {rank: checksum_of(data, store.capabilities.checksum_algorithm) for rank, data in raw.items()}
    sizes = {rank: len(raw[rank]) if rank in raw else None for rank in range(world_size)}
    wanted: Decision | None = None

    async def attempt(once: PatientStore) -> bytes | None:
        nonlocal wanted
        is_again = wanted is not None
        if is_again:  # it is there if only the answer was lost, or if another rank was quicker
            there = await read(once, keys.decision_key(checkpoint))
            if there is not None:
                return there[0]
        gone = await _gone(once, checkpoint, name, sizes, receipts)
        if (gone or is_again) and not await may_decide():
            return None
        if (found := agreement.verdict(draft, receipts, gone, checksums)) is None:
            return None
        wanted = found
        return await _create(once, wanted)

    created = await store.from_the_start(attempt)
    return None if created is None or wanted is None else await _decided(store, wanted, created)


async def _gone(
    store: PatientStore,
    checkpoint: CheckpointId,
    name: str,
    sizes: Mapping[int, int | None],
    receipts: Mapping[int, Receipt],
) -> list[str]:
    """Return the keys of the receipts and shards that the store has lost."""
    of_receipts = {keys.receipt_key(checkpoint, rank): size for rank, size in sizes.items()}
    of_shards = {shard.key: shard.size_bytes for each in receipts.values() for shard in each.shards}
    lost_receipts, lost_shards = await both(
        steps.gone(store, keys.receipts_prefix(checkpoint), of_receipts),
        steps.gone(store, keys.data_prefix(name, checkpoint.generation), of_shards),
    )
    return lost_receipts + lost_shards


async def read_receipts(store: PatientStore, checkpoint: CheckpointId, world_size: int) -> dict[int, bytes]:
    """Return the receipts of ranks 0..N-1 that are there, by rank. They are read in parallel."""
    found = await all_or_none(
        read(store, keys.receipt_key(checkpoint, rank), max_size_bytes=records.MAX_RECEIPT_SIZE_BYTES)
        for rank in range(world_size)
    )
    return {rank: there[0] for rank, there in enumerate(found) if there is not None}


async def decide_once(store: PatientStore, wanted: Decision) -> tuple[Decision, bool]:
    """Create the decision unless there is one (rule R4). Returns the decision that holds now, and whether it is ours.

    The decision is void if an earlier one was collected: then the checkpoint was settled long ago.
    """
    return await _decided(store, wanted, await _create(store, wanted))


async def _create(store: PatientStore, wanted: Decision) -> bytes:
    """Create the decision unless there is one. Returns what is there now."""
    return await create_once(store, keys.decision_key(wanted.checkpoint), records.encode_decision(wanted))


async def _decided(store: PatientStore, wanted: Decision, there: bytes) -> tuple[Decision, bool]:
    id_ = wanted.checkpoint
    try:
        decision = records.decode_decision(there, id_)
    except InvalidRecordError as error:
        raise error.at(keys.decision_key(id_)) from None
    is_ours = agreement.is_ours(decision, wanted)
    decision = settled(id_, decision, await read_boundary(store)) or decision
    is_ours = is_ours and decision.outcome is wanted.outcome
    if is_ours and decision.outcome is Outcome.COMMIT:
        logger.info(
            "checkpoint_committed %s name=%s world_size=%d num_shards=%d size_bytes=%d",
            id_,
            wanted.name,
            wanted.world_size,
            wanted.num_shards,
            wanted.size_bytes,
        )
    return decision, is_ours
