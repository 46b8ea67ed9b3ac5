"""From the receipts to the decision: what is compared before a checkpoint is committed, and that only one decides.

Safe to repeat and to cut short anywhere, as all steps of the protocol.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_async.core import agreement, keys, records
from ckpt_async.core.model import CheckpointId, Decision, Outcome, Receipt, StoredShard
from ckpt_async.errors import InvalidRecordError
from ckpt_async.protocol.cas import create_once, read
from ckpt_async.protocol.presence import has_receipt, missing, ranks_without_receipt
from ckpt_async.protocol.steps import new_decision, read_boundary, receipt_from, settled
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import Listing
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none, both

logger = logging.getLogger(__name__)

Alongside = Callable[[], Coroutine[Any, Any, None]]
FindOut = Callable[[], Coroutine[Any, Any, tuple[Decision, float] | None]]
_NONE_KNOWN: Mapping[int, bytes] = {}
# For how long what was found out in the store is relied upon: whoever deletes there does not wait for us.
VALID_S = 10.0
# How often that is found out again because the store took longer; it may be that slow.
MAX_COMPARISONS = 3


class UploadsLostError(Exception):
    """The store has lost what the caller's own rank had uploaded."""


class OthersLostError(Exception):
    """The store has lost what another rank had uploaded, which may upload it again."""


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
    may_give_up: bool = True,
    alongside: Alongside | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Decision, bool] | None:
    """Read every rank's receipt, check them against each other and against what is in the store, and decide: commit, or
    abort if they contradict, or if the store has lost a shard that a rank had uploaded.

    `name` is the checkpoint's, as far as the caller knows; then the shards are listed while the receipts are read.
    `rank` is the caller's own: raises UploadsLostError if it can upload again what is lost. Unless `may_give_up`,
    raises OthersLostError if another rank can. Nothing is decided then.
    `known` are receipts by rank that the caller has just written or read. `alongside` is called once the decision is in
    the store, and awaited while the boundary is read. Returns what was decided, by us or by another, and whether it was
    us; None if a receipt is missing.

    If the store refuses the decision for longer than `VALID_S`, everything is compared again before the next retry, and
    if it takes longer over one attempt, afterwards: then UploadsLostError means that the checkpoint may be committed.
    Each retry first reads whether the decision is there.
    """
    find_out = _Comparison(
        store, checkpoint, world_size, by, now, name, rank, known, may_give_up, clock
    ).find_out
    found: tuple[Decision, float] | None = None

    async def attempt(once: PatientStore) -> tuple[Decision, bytes] | None:
        nonlocal found
        if found is not None:  # it is there if only the answer was lost, or if another rank was quicker
            there = await read(once, keys.decision_key(checkpoint))
            if there is not None:
                return found[0], there[0]
        if found is None or found[0].outcome is Outcome.ABORT or clock() >= found[1]:
            found = await find_out()
        return None if found is None else (found[0], await _create(once, found[0]))

    created = await store.from_the_start(attempt)
    if created is None or found is None:
        return None
    decided = await _decided(store, *created, alongside)
    if decided[0].outcome is Outcome.COMMIT and clock() >= found[1]:
        await _compare_again(checkpoint, find_out)
    return decided


async def _compare_again(checkpoint: CheckpointId, find_out: FindOut) -> None:
    """Compare a commit once more, over which the store has taken long. Raises UploadsLostError."""
    try:
        again = await find_out()
        reason = "a receipt is gone" if again is None else again[0].reason
    except OthersLostError as lost:
        reason = str(lost)
    if reason:
        logger.error(
            "commit_is_damaged %s reason=%s; the store lost it while it took its decision", checkpoint, reason
        )


@dataclass(frozen=True, slots=True)
class _Comparison:
    """See `settle`."""

    store: PatientStore
    checkpoint: CheckpointId
    world_size: int
    by: str
    now: float
    name: str
    rank: int | None
    known: Mapping[int, bytes]
    may_give_up: bool
    clock: Callable[[], float]

    async def find_out(self) -> tuple[Decision, float] | None:
        """Return what is to be decided, and until when that is to be relied upon; None if a receipt is missing."""
        store, seen_at = self.store, self.clock()
        reading = read_receipts(store, self.checkpoint, self.world_size, self.known)
        raw, (listing, are_there) = await both(reading, self._seen())
        if not are_there:
            raise UploadsLostError
        if raw is None:
            if self.rank is not None and not await has_receipt(store, self.checkpoint, self.rank):
                raise UploadsLostError
            return None
        receipts = [receipt_from(data, self.checkpoint, each) for each, data in enumerate(raw)]
        obstacle, name = agreement.obstacle(self.checkpoint, receipts), agreement.name_of(receipts)
        if obstacle is None:
            found = await self._losses(receipts, name, listing, seen_at)
            if found is None:
                return None
            obstacle, seen_at = found
        outcome = Outcome.COMMIT if obstacle is None else Outcome.ABORT
        wanted = new_decision(
            self.checkpoint,
            outcome,
            name=name,
            world_size=self.world_size,
            by=self.by,
            now=self.now,
            reason=obstacle or "",
        )
        if obstacle is None:
            algorithm = store.capabilities.checksum_algorithm
            wanted = replace(
                wanted,
                receipts=tuple(checksum_of(data, algorithm) for data in raw),
                num_shards=sum(len(receipt.shards) for receipt in receipts),
                size_bytes=sum(receipt.size_bytes for receipt in receipts),
                metrics=agreement.merged_metrics(receipts),
            )
        return wanted, seen_at + VALID_S

    async def _seen(self) -> tuple[Listing | None, bool]:
        return await both(self._listed(self.name), self._are_known_there())

    async def _listed(self, name: str) -> Listing | None:
        if not name:
            return None
        return await self.store.list(keys.data_prefix(name, self.checkpoint.generation))

    async def _are_known_there(self) -> bool:
        return all(await all_or_none(has_receipt(self.store, self.checkpoint, each) for each in self.known))

    async def _losses(
        self, receipts: Sequence[Receipt], name: str, listing: Listing | None, seen_at: float
    ) -> tuple[str | None, float] | None:
        """Return what the store has lost (if anything), and when it was asked; None if a receipt is missing.

        `listing` is one of the shards, of the time `seen_at`, at which the receipts were there, too.
        """
        shards = [shard for receipt in receipts for shard in receipt.shards]
        gone: Sequence[StoredShard] = ()
        for _ in range(MAX_COMPARISONS):
            if self.clock() - seen_at > VALID_S:
                seen_at = self.clock()
                listing, without = await both(
                    self._listed(name), ranks_without_receipt(self.store, self.checkpoint, self.world_size)
                )
                if self.rank in without:
                    raise UploadsLostError
                if without:
                    return None
            gone = await missing(self.store, shards, listing or await self._listed(name))
            if self.clock() - seen_at <= VALID_S:
                break
        losers = agreement.losers(gone, receipts)
        if self.rank in losers:
            raise UploadsLostError
        if not all(await all_or_none(has_receipt(self.store, self.checkpoint, each) for each in losers)):
            return None  # a rank that has lost its receipt, too, uploads everything again
        lost = agreement.lost(gone, losers)
        if lost is not None and not self.may_give_up:
            raise OthersLostError(lost)
        return lost, seen_at


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

    The decision is void if an earlier one was collected: then the checkpoint was settled long ago.
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
    reading = read_boundary(store)
    boundary = await reading if alongside is None else (await both(reading, alongside()))[0]
    decision = settled(id_, decision, boundary) or decision
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
