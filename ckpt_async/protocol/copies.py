"""Copies of committed shards under exact keys that the user chose.

They never decide anything: the shards are the checkpoint, and a missing copy is made again.

Two checkpoints may be published under one key; the newest wins. A *claim* on the key says which one that is, and only
moves forward, as latest does. After copying, a copier reads the claim again, and copies what it says until it stays the
same. So the last copy to arrive is the claimed one, however late a request for an older checkpoint gets through.
"""

from __future__ import annotations

import contextlib
import logging
import uuid

from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Claim, StoredShard
from ckpt_async.errors import (
    FailureReason,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from ckpt_async.protocol.cas import advance, read_record
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.transfer import copying
from ckpt_async.transfer.patient import PatientStore

logger = logging.getLogger(__name__)

# A copy may turn out to be that of another checkpoint whose request was late, but rarely twice.
_ATTEMPTS = 3
_CANNOT = "files cannot be published under exact keys: this store cannot copy objects"
_HINT = "leave out publish_copies, or check the permissions in docs/operations.md"


async def publish(store: PatientStore, checkpoint: CheckpointId, shard: StoredShard) -> bool:
    """Make the object under the shard's exact key a copy of the shard. Returns whether it is.

    If a newer checkpoint has claimed the key, the object becomes that one's copy instead, and the result is False. On
    return, the store has confirmed the copy. Safe to repeat and to cut short.

    The checkpoint must be committed. The caller must check afterwards whether it still is, and `retract` if not.
    """
    while True:
        claim = await _bring_about(store, await _claim(store, checkpoint, shard), ours=shard.key)
        if claim is not None:
            return claim.source == shard.key


async def retract(store: PatientStore, checkpoint: CheckpointId, shard: StoredShard) -> None:
    """Delete the copy that `publish` made, but not what a newer checkpoint or somebody else has put there since."""
    key = shard.publish_as
    there = await _read_claim(store, key)
    if there is not None and (there[0].checkpoint, there[0].source) == (checkpoint, shard.key):
        if shard.size_bytes > copying.COPY_PART_BYTES and store.capabilities.multipart:
            await copying.drop_parts(store, key)
        copy = await copying.find(store, key, shard.size_bytes, shard.checksum)
        if copy is not None:
            await _delete_if_same(store, key, copy.etag)
        if await _delete_if_same(store, keys.claim_key(key), there[1]):
            return
        there = await _read_claim(store, key)
    if there is not None:
        # A newer checkpoint has claimed the key in the meantime. If its shard has the same bytes, it took our copy for
        # its own, and that was deleted just now.
        await _bring_about(store, there[0], ours=shard.key)


async def check_can_copy(store: PatientStore) -> None:
    """Copy a small object and delete both. Raises StoreError if the store cannot copy, or these credentials may not."""
    if not store.capabilities.copies:
        raise StoreError(_CANNOT, reason=FailureReason.OTHER, operation="copy", hint=_HINT)
    data, name = b"a", f"{keys.PROBES}{uuid.uuid4().hex}"
    source, key = f"{name}-source", f"{name}-copy"
    await store.put(source, data)
    try:
        checksum = checksum_of(data, store.capabilities.checksum_algorithm)
        await copying.copy(store, source, key, len(data), checksum)
    except StoreError as error:
        message = f"{_CANNOT}: {error}"
        raise StoreError(message, reason=error.reason, operation="copy", key=key, hint=_HINT) from error
    finally:
        with contextlib.suppress(StoreError):  # credentials that may not delete are allowed
            await store.delete([source, key])


async def read_claim(store: PatientStore, key: str) -> Claim | None:
    there = await _read_claim(store, key)
    return there[0] if there else None


async def _read_claim(store: PatientStore, key: str) -> tuple[Claim, str] | None:
    return await read_record(store, keys.claim_key(key), lambda data: records.decode_claim(data, key))


async def _claim(store: PatientStore, checkpoint: CheckpointId, shard: StoredShard) -> Claim:
    """Move the claim on the key forward to this shard, unless it is as new already. Returns the claim as it is then."""
    key, nonce = shard.publish_as, uuid.uuid4().hex

    def change(there: bytes | None) -> bytes | None:
        claim = None if there is None else records.decode_claim(there, key)
        if claim is not None and claim.checkpoint >= checkpoint:
            return None
        number = claim.number + 1 if claim else 1
        return records.encode_claim(
            Claim(key, checkpoint, shard.key, shard.size_bytes, shard.checksum, number, nonce)
        )

    data = await advance(store, keys.claim_key(key), change)
    assert data is not None
    claim = records.decode_claim(data, key)
    if claim.checkpoint == checkpoint and claim.source != shard.key:
        logger.warning(
            "copy_left_out key=%s source=%s; %s already owns the key", key, shard.key, claim.source
        )
    return claim


async def _bring_about(store: PatientStore, claim: Claim, *, ours: str) -> Claim | None:
    """Copy what the claim says until the copy is there and the claim stays the same.

    Returns the claim, or None if it is gone.
    """
    num_failed = 0
    while True:
        error: StoreError | None = None
        try:
            if await copying.find(store, claim.key, claim.size_bytes, claim.checksum) is None:
                await copying.copy(store, claim.source, claim.key, claim.size_bytes, claim.checksum)
        except (IntegrityError, ObjectNotFoundError, PreconditionFailedError) as raised:
            error = raised  # or somebody else has just copied to this key, for another claim
        there = await read_claim(store, claim.key)
        if there is None or (there == claim and error is None):
            return there
        if there == claim and error is not None:
            if claim.source != ours and not isinstance(error, IntegrityError):
                return claim  # of a newer checkpoint that was pruned: nothing belongs here
            num_failed += 1
            if num_failed == _ATTEMPTS:
                raise error
        claim = there


async def _delete_if_same(store: PatientStore, key: str, etag: str) -> bool:
    try:
        await store.delete_if(key, etag)
    except (ObjectNotFoundError, PreconditionFailedError):
        return False  # it is gone, or is somebody else's by now
    return True
