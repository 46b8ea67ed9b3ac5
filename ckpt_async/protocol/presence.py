"""What the store still has of what it confirmed: it may have been wiped or put back since (rule R1)."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, StoredShard
from ckpt_async.errors import ObjectNotFoundError
from ckpt_async.stores.interface import Listing
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none


async def missing(
    store: PatientStore, shards: Iterable[StoredShard], listing: Listing | None = None
) -> list[StoredShard]:
    """Return which of these shards are not in the store (any more), or have another size. Costs one HEAD for each that
    the listing lacks, which may be out of date.
    """
    there = {each.key: each.size_bytes for each in listing.objects} if listing else {}
    doubtful = [shard for shard in shards if there.get(shard.key) != shard.size_bytes]
    are_there = await all_or_none(_is_there(store, shard) for shard in doubtful)
    return [shard for shard, is_there in zip(doubtful, are_there, strict=True) if not is_there]


async def has_receipt(store: PatientStore, checkpoint: CheckpointId, rank: int) -> bool:
    try:
        await store.head(keys.receipt_key(checkpoint, rank))
        return True
    except ObjectNotFoundError:
        return False


async def ranks_without_receipt(store: PatientStore, checkpoint: CheckpointId, world_size: int) -> list[int]:
    """Return the ranks whose receipts are not in the store. Costs a listing, and one HEAD for each that it lacks."""
    listing = await store.list(keys.receipts_prefix(checkpoint))
    there = {found[1] for each in listing.objects if (found := keys.parse_receipt_key(each.key)) is not None}
    doubtful = [rank for rank in range(world_size) if rank not in there]
    are_there = await all_or_none(has_receipt(store, checkpoint, rank) for rank in doubtful)
    return [rank for rank, is_there in zip(doubtful, are_there, strict=True) if not is_there]


async def _is_there(store: PatientStore, shard: StoredShard) -> bool:
    try:
        return (await store.head(shard.key)).size_bytes == shard.size_bytes
    except ObjectNotFoundError:
        return False
