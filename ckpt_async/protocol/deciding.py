"""From the receipts to the decision: what is compared before a checkpoint is committed, and that only one decides.

Safe to repeat and to cut short anywhere, as all steps of the protocol.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from ckpt_async.core import agreement, keys, records
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.errors import InvalidRecordError
from ckpt_async.protocol.cas import create_once, read
from ckpt_async.protocol.presence import has_receipt, missing
from ckpt_async.protocol.steps import new_decision, receipt_from, unless_void
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import Listing
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none, both

logger = logging.getLogger(__name__)

Alongside = Callable[[], Coroutine[Any, Any, None]]
_NONE_KNOWN: Mapping[int, bytes] = {}
# For how long what was found out in the store is relied upon: whoever deletes there does not wait for us.
VALID_S = 10.0


class UploadsLostError(Exception):
    """The store has lost what the caller's own rank had uploaded."""


async def settle(
    store: PatientStore,
    checkpoint: CheckpointId,
    *,
    world_size: int,
    by: str,
    now: float,
    name: str = "",
    rank: int | None = None,
    known: Mapping[int, bytes] = _NONE_KNOWN,
    alongside: Alongside | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Decision, bool] | None:
    """Read every rank's receipt, check them against each other and against what is in the store, and decide: commit, or
    abort if they contradict, or if the store has lost a shard that a rank had uploaded.

    `name` is the checkpoint's, as far as the caller knows; then the shards are listed while the receipts are read.
    `rank` is the caller's own: raises UploadsLostError if it can upload again what is lost, and nothing is decided.
    `known` are receipts by rank that the caller has just written or read. `alongside` is called once the decision is in
    the store, and awaited while the boundary is read. Returns what was decided, by us or by another, and whether it was
    us; None if a receipt is missing.

    If the store refuses the decision for longer than `VALID_S`, everything is compared again before the next retry.
    """
    find_out = functools.partial(
        _find_out,
        store,
        checkpoint,
        world_size=world_size,
        by=by,
        now=now,
        name=name,
        rank=rank,
        known=known,
        clock=clock,
    )
    wanted, valid_until = None, -math.inf

    async def attempt(once: PatientStore) -> tuple[Decision, bytes] | None:
        nonlocal wanted, valid_until
        if (began := clock()) >= valid_until:
            wanted, valid_until = await find_out(), began + VALID_S
        return None if wanted is None else (wanted, await _create(once, wanted))

    created = await store.from_the_start(attempt)
    return None if created is None else await _decided(store, *created, alongside)


async def _find_out(
    store: PatientStore,
    checkpoint: CheckpointId,
    *,
    world_size: int,
    by: str,
    now: float,
    name: str,
    rank: int | None,
    known: Mapping[int, bytes],
    clock: Callable[[], float],
) -> Decision | None:
    """Return what is to be decided, or None if a receipt is missing."""
    began = clock()

    async def listed() -> Listing | None:
        return await store.list(keys.data_prefix(name, checkpoint.generation)) if name else None

    async def are_known_there() -> bool:
        return all(await all_or_none(has_receipt(store, checkpoint, each) for each in known))

    async def seen() -> tuple[Listing | None, bool]:
        return await both(listed(), are_known_there())

    raw, (listing, are_there) = await both(read_receipts(store, checkpoint, world_size, known), seen())
    if not are_there:
        raise UploadsLostError
    if raw is None:
        return None
    receipts = [receipt_from(data, checkpoint, each) for each, data in enumerate(raw)]
    obstacle, agreed_name = agreement.obstacle(checkpoint, receipts), agreement.name_of(receipts)
    if obstacle is None:
        if listing is None or clock() - began > VALID_S:
            listing = await store.list(keys.data_prefix(agreed_name, checkpoint.generation))
        gone = await missing(store, [shard for receipt in receipts for shard in receipt.shards], listing)
        losers = agreement.losers(gone, receipts)
        if rank in losers:
            raise UploadsLostError
        if not all(await all_or_none(has_receipt(store, checkpoint, each) for each in losers)):
            return None  # a rank that has lost its receipt, too, uploads everything again
        obstacle = agreement.lost(gone, losers)
    outcome = Outcome.COMMIT if obstacle is None else Outcome.ABORT
    wanted = new_decision(
        checkpoint, outcome, name=agreed_name, world_size=world_size, by=by, now=now, reason=obstacle or ""
    )
    if obstacle is not None:
        return wanted
    algorithm = store.capabilities.checksum_algorithm
    return replace(
        wanted,
        receipts=tuple(checksum_of(data, algorithm) for data in raw),
        num_shards=sum(len(receipt.shards) for receipt in receipts),
        size_bytes=sum(receipt.size_bytes for receipt in receipts),
        metrics=agreement.merged_metrics(receipts),
    )


async def read_receipts(
    store: PatientStore, checkpoint: CheckpointId, world_size: int, known: Mapping[int, bytes]
) -> list[bytes] | None:
    """Return the receipts of ranks 0..N-1, reading in parallel those that are not `known`; None if one is missing."""
    missing = [rank for rank in range(world_size) if rank not in known]
    found = await all_or_none(
        read(store, keys.receipt_key(checkpoint, rank), max_size_bytes=records.MAX_RECEIPT_SIZE_BYTES)
        for rank in missing
    )
    there = {rank: data[0] for rank, data in zip(missing, found, strict=True) if data is not None}
    there |= known
    return [there[rank] for rank in range(world_size)] if len(there) == world_size else None


async def decide_once(store: PatientStore, wanted: Decision) -> tuple[Decision, bool]:
    """Create the decision unless there is one (rule R4). Returns the decision that holds now, and whether it is ours.

    A decision below the boundary is void: an older one was collected, so the checkpoint was settled long ago.
    """
    return await _decided(store, wanted, await _create(store, wanted))


async def _create(store: PatientStore, wanted: Decision) -> bytes:
    """Create the decision unless there is one. Returns what is there now."""
    return await create_once(store, keys.decision_key(wanted.checkpoint), records.encode_decision(wanted))


async def _decided(
    store: PatientStore, wanted: Decision, there: bytes, alongside: Alongside | None = None
) -> tuple[Decision, bool]:
    id_ = wanted.checkpoint
    try:
        decision = records.decode_decision(there, id_)
    except InvalidRecordError as error:
        raise error.at(keys.decision_key(id_)) from None
    # An earlier attempt of ours may have created it and then failed: whoever decides has more to do afterwards.
    is_ours = decision.nonce == wanted.nonce or decision.decided_by == wanted.decided_by
    settled = unless_void(store, decision)
    decision = await settled if alongside is None else (await both(settled, alongside()))[0]
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
