"""The steps of the protocol that touch shared objects, as taken by engine, sweeper, reader and `pin`.

Each is safe to repeat and to cut short anywhere; what may happen only once is decided by a conditional write.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckpt_async.core import decide, keys, records
from ckpt_async.core.boundary import MAX_BOUNDARY_SIZE_BYTES, MAX_COLLECTED, NOTHING_COLLECTED, Boundary
from ckpt_async.core.model import (
    CheckpointId,
    Decision,
    Latest,
    Lease,
    Outcome,
    Receipt,
    StoredShard,
    Target,
)
from ckpt_async.errors import CapabilityError, InvalidRecordError, ObjectNotFoundError
from ckpt_async.protocol import copies, sweep_plan
from ckpt_async.protocol.cas import advance, if_readable, read, read_record
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import Listing
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)

KnownDecisions = dict[str, tuple[str, Decision]]  # by key, with their ETags


def new_decision(
    checkpoint: CheckpointId,
    outcome: Outcome,
    *,
    name: str,
    world_size: int,
    by: str,
    now: float,
    reason: str = "",
) -> Decision:
    return Decision(
        checkpoint=checkpoint,
        outcome=outcome,
        name=name,
        world_size=world_size,
        nonce=uuid.uuid4().hex,
        decided_at=now,
        decided_by=f"{by} on {socket.gethostname()}",
        reason=reason,
    )


def receipt_from(data: bytes, checkpoint: CheckpointId, rank: int) -> Receipt:
    try:
        return records.decode_receipt(data, checkpoint, rank)
    except InvalidRecordError as error:
        raise error.at(keys.receipt_key(checkpoint, rank)) from None


async def bound_receipt(store: PatientStore, decision: Decision, rank: int) -> Receipt:
    """Return one rank's receipt of a committed checkpoint, checked to be the very one that was decided on.

    Raises InvalidRecordError if it is missing or differs.
    """
    id_, checksum = decision.checkpoint, decision.receipts[rank]
    key = keys.receipt_key(id_, rank)
    there = await read(store, key, max_size_bytes=records.MAX_RECEIPT_SIZE_BYTES)
    if there is None:
        raise InvalidRecordError(f"{id_}: rank {rank}'s receipt is missing", key=key)
    if checksum_of(there[0], checksum.algorithm) != checksum:
        raise InvalidRecordError(
            f"{id_}: rank {rank}'s receipt is not the one that the decision was based on", key=key
        )
    return receipt_from(there[0], id_, rank)


async def read_settled(
    store: PatientStore,
    checkpoint: CheckpointId,
    *,
    only_reads: bool = False,
    may_be_collected: bool = True,
) -> Decision | None:
    """Return the decision that holds for the checkpoint, or None if nothing was decided.

    What was collected was settled long ago: a decision there was created by a straggler and is void (R4). A caller that
    knows that nothing can have been collected yet saves a request (`may_be_collected=False`).

    Raises InvalidRecordError if the boundary is needed but unreadable. A caller that `only_reads` gets a commit as it
    is in that case: if it is void and a part of it is gone, the receipts and shards show that.
    """
    decision = await read_decision(store, checkpoint)
    if decision is None and not may_be_collected:
        return None
    if decision is not None and decision.outcome in (Outcome.PRUNING, Outcome.PRUNED):
        return decision  # no straggler creates these
    try:
        return settled(checkpoint, decision, await read_boundary(store))
    except InvalidRecordError as error:
        if not only_reads:
            raise
        logger.warning("boundary_unreadable error=%s; treating decisions that it may void as valid", error)
        return decision


def settled(checkpoint: CheckpointId, decision: Decision | None, boundary: Boundary) -> Decision | None:
    """Return what holds for a checkpoint: what was collected, else the decision that is there, if any. Pure."""
    outcome = boundary.outcome_of(checkpoint)
    if outcome is None:
        return decision
    name = f"step-{checkpoint.step}"
    there = decision or new_decision(checkpoint, outcome, name=name, world_size=1, by="nobody", now=0)
    what = "pruned" if outcome is Outcome.PRUNED else "given up"
    return replace(there, outcome=outcome, reason=f"it was {what} and collected long ago")


async def read_decision(store: PatientStore, checkpoint: CheckpointId) -> Decision | None:
    """Return what was decided, or None. Not checked against the boundary."""
    key = keys.decision_key(checkpoint)
    there = await read_record(store, key, lambda data: records.decode_decision(data, checkpoint))
    return there[0] if there else None


async def list_decisions(store: PatientStore, ids: Sequence[CheckpointId]) -> set[CheckpointId]:
    """Return which of these checkpoints have a decision. `ids` are in order; costs one LIST per 1,000 decisions from
    the first to the last of them.
    """
    before, last = keys.decision_key(ids[0]).removesuffix(".json"), keys.decision_key(ids[-1])
    listing = await store.list(
        keys.DECISIONS, start_after=before, enough=lambda objects: objects[-1].key >= last
    )
    return {*ids} & {keys.parse_decision_key(each.key) for each in listing.objects}


async def collected(store: PatientStore, ids: Collection[CheckpointId]) -> set[CheckpointId]:
    """Return which of these checkpoints the boundary says were settled, and their decisions collected (R4)."""
    boundary = await read_boundary(store)
    return {id_ for id_ in ids if boundary.voids(id_)}


async def vanished(store: PatientStore, committed: Collection[CheckpointId]) -> list[CheckpointId]:
    """Return which checkpoints the store has forgotten, of those that are known to have been committed there, oldest
    first; none if the newest is there, or collected.

    Costs one request if the newest is there.
    """
    newest = max(committed)
    try:
        await store.head(keys.decision_key(newest))
        return []
    except ObjectNotFoundError:
        gone = await lost(store, committed)
        return gone if newest in gone else []


async def lost(store: PatientStore, committed: Collection[CheckpointId]) -> list[CheckpointId]:
    """Return what `vanished` returns, also if the newest is there: a launch may have begun anew in the wiped store.

    Pruning keeps a decision, and only the boundary lets one be deleted: so whatever else is missing was lost by the
    store, or this is another store. Costs one listing, and if anything is missing, one request
    and, because a listing may lag, a HEAD for each of it.
    """
    listing = await store.list(keys.DECISIONS)
    gone = {*committed} - {keys.parse_decision_key(each.key) for each in listing.objects}
    if not gone:
        return []
    try:
        boundary = await read_boundary(store)
    except InvalidRecordError as error:
        logger.warning("boundary_unreadable error=%s; taking what is missing for collected", error)
        return []
    doubtful = sorted(id_ for id_ in gone if not boundary.voids(id_))
    are_there = await all_or_none(is_there(store, keys.decision_key(id_)) for id_ in doubtful)
    return [id_ for id_, found in zip(doubtful, are_there, strict=True) if not found]


async def read_decisions(
    store: PatientStore, listing: Listing, known: KnownDecisions
) -> list[InvalidRecordError]:
    """Bring `known` up to date with a listing of all decisions, by one GET for each that is new or has changed.

    Returns an error for each that is unreadable. If it was readable before, `known` keeps that.
    """
    unreadable: list[InvalidRecordError] = []

    async def one(key: str, id_: CheckpointId) -> tuple[Decision, str] | None:
        try:
            return await read_record(store, key, lambda data: records.decode_decision(data, id_))
        except InvalidRecordError as error:
            unreadable.append(error)
            return None

    listed = {
        each.key: (id_, each.etag) for each in listing.objects if (id_ := keys.parse_decision_key(each.key))
    }
    # A store may list objects without their ETags.
    fresh = {key: id_ for key, (id_, etag) in listed.items() if not etag or known.get(key, ("",))[0] != etag}
    read_now = await all_or_none(one(key, id_) for key, id_ in fresh.items())
    for gone in known.keys() - listed.keys():
        del known[gone]
    known |= {key: (there[1], there[0]) for key, there in zip(fresh, read_now, strict=True) if there}
    return unreadable


async def all_decisions(store: PatientStore) -> tuple[list[Decision], list[InvalidRecordError]]:
    """Return all decisions that can be read, in the order of checkpoints, and an error for each other one."""
    known: KnownDecisions = {}
    unreadable = await read_decisions(store, await store.list(keys.DECISIONS), known)
    return sorted((each for _, each in known.values()), key=lambda each: each.checkpoint), unreadable


async def read_boundary(store: PatientStore) -> Boundary:
    there = await read_record(store, keys.BOUNDARY, records.decode_boundary)
    return there[0] if there else NOTHING_COLLECTED


async def refuse_unfinished_copy(store: PatientStore) -> None:
    """Raise CapabilityError if another run is being copied here: what it has so far is not all of it. Costs a GET."""
    if (source := await unfinished_copy(store)) is not None:
        raise CapabilityError(
            f"{store.url} holds an unfinished copy of {source}",
            hint=f"repeat `ckpt-async copy {source} {store.url}` until it has ended, or delete the copy",
        )


async def unfinished_copy(store: PatientStore) -> str | None:
    """Return the URL of the run that is being copied here, or None if none is."""
    there = await read_record(store, keys.COPY, records.decode_copy)
    return there[0] if there else None


async def read_latest(store: PatientStore) -> Latest | None:
    """Return the hint, or None if there is none or it is unreadable (R3: it never hides a good checkpoint)."""
    try:
        there = await read(store, keys.LATEST)
    except InvalidRecordError:
        there = b"", ""  # too large
    return _latest(there[0] if there else None)


async def move_latest(store: PatientStore, checkpoint: CheckpointId, name: str) -> Latest:
    """Move `latest` forward to `checkpoint`, or leave it if it is ahead (rule R6). Returns what it says then."""
    nonce = uuid.uuid4().hex

    def change(there: bytes | None) -> bytes | None:
        latest = _latest(there)
        if not decide.is_ahead(checkpoint, latest):
            return None
        number = latest.number + 1 if latest else 1
        prefix = keys.data_prefix(name, checkpoint.generation)
        return records.encode_latest(Latest(checkpoint, name, prefix, number, nonce))

    data = await advance(store, keys.LATEST, change)
    assert data is not None
    return records.decode_latest(data)


def _latest(data: bytes | None) -> Latest | None:
    if data is None:
        return None
    try:
        return records.decode_latest(data)
    except InvalidRecordError as error:
        logger.warning("latest_unreadable error=%s; treated as missing", error)
        return None


async def begin_prune(store: PatientStore, checkpoint: CheckpointId) -> bool:
    """Swap `commit` for `pruning`; return False if it is pinned or no longer `commit`. Never reverts."""
    decision = await _swap(store, checkpoint, Outcome.COMMIT, Outcome.PRUNING)
    return decision is not None and decision.outcome is Outcome.PRUNING


async def finish_prune(store: PatientStore, checkpoint: CheckpointId) -> bool:
    """Delete a checkpoint that is `pruning`: shards, copies, receipts; then decide `pruned`.

    Returns False if there are readers left or it is not `pruning`.

    Leases are listed after the decision was read: a reader whose lease is not visible yet will read `pruning`.
    """
    decision = await read_decision(store, checkpoint)
    if decision is None or decision.outcome is not Outcome.PRUNING:
        return False
    if await readers(store, checkpoint):
        return False
    victims: list[StoredShard] = []
    for rank in range(decision.world_size):
        key = keys.receipt_key(checkpoint, rank)
        data = await read(store, key, max_size_bytes=records.MAX_RECEIPT_SIZE_BYTES)
        if data is not None:  # if gone, an earlier sweep was cut short after it had deleted the shards
            victims += receipt_from(data[0], checkpoint, rank).shards
    await store.delete([shard.key for shard in victims])
    for shard in victims:  # the shards are gone, so nobody can begin another copy
        if shard.publish_as:
            await copies.retract(store, checkpoint, shard)
    await store.delete([keys.receipt_key(checkpoint, rank) for rank in range(decision.world_size)])
    await _swap(store, checkpoint, Outcome.PRUNING, Outcome.PRUNED)
    return True


async def set_pin(store: PatientStore, checkpoint: CheckpointId, is_pinned: bool) -> Decision | None:
    """Pin or unpin a committed checkpoint. Returns the decision as it is then, or None if there is none.

    The pin is part of the decision, so that pruning, which swaps the same object, cannot overlook it.
    """
    nonce = uuid.uuid4().hex

    def change(there: bytes | None) -> bytes | None:
        decision = None if there is None else records.decode_decision(there, checkpoint)
        if decision is None or decision.outcome is not Outcome.COMMIT or decision.is_pinned == is_pinned:
            return None
        return records.encode_decision(replace(decision, is_pinned=is_pinned, nonce=nonce))

    data = await advance(store, keys.decision_key(checkpoint), change)
    return records.decode_decision(data, checkpoint) if data else None


async def _swap(store: PatientStore, checkpoint: CheckpointId, old: Outcome, new: Outcome) -> Decision | None:
    nonce = uuid.uuid4().hex

    def change(there: bytes | None) -> bytes | None:
        decision = None if there is None else records.decode_decision(there, checkpoint)
        if decision is None or decision.outcome is not old or decision.is_pinned:
            return None
        return records.encode_decision(replace(decision, outcome=new, nonce=nonce))

    data = await advance(store, keys.decision_key(checkpoint), change)
    return records.decode_decision(data, checkpoint) if data else None


async def collect(store: PatientStore, action: sweep_plan.CollectDecisions) -> None:
    """Move the boundary, and only then delete the decisions that it voids (rule R4)."""
    nonce = uuid.uuid4().hex

    def change(there: bytes | None) -> bytes | None:
        boundary = NOTHING_COLLECTED if there is None else records.decode_boundary(there)
        if boundary.upto > action.upto:
            return None  # another sweeper is ahead, and what it collects next covers ours
        moved = boundary.moved(action.upto, action.kept, action.pruned, action.aborted, nonce)
        if replace(moved, number=boundary.number, nonce=boundary.nonce) == boundary:
            return None
        data = records.encode_boundary(moved)
        if len(data) > MAX_BOUNDARY_SIZE_BYTES or moved.num_checkpoints > MAX_COLLECTED:
            logger.warning("boundary_is_full url=%s; nothing more is collected", store.url)
            return None
        return data

    data = await advance(store, keys.BOUNDARY, change)
    boundary = records.decode_boundary(data) if data else NOTHING_COLLECTED
    parsed = [(key, keys.parse_decision_key(key)) for key in action.object_keys]
    await store.delete([key for key, id_ in parsed if id_ and boundary.voids(id_)])


# --- readers -----------------------------------------------------------------------------------------------


async def readers(store: PatientStore, checkpoint: CheckpointId) -> list[str]:
    """Return who holds a lease on the checkpoint that has not expired by the store's clock."""
    prefix = keys.leases_prefix(checkpoint)
    listing = await store.list(prefix)
    found: list[str] = []
    for each in listing.objects:
        try:
            there = await read_record(store, each.key, records.decode_lease)
        except InvalidRecordError as error:
            logger.warning(
                "lease_unreadable error=%s; treating it as valid for the longest possible lease", error
            )
            there = unreadable_lease(checkpoint, each.key), ""
        if there is None:
            continue
        lease = there[0]
        if listing.server_time < sweep_plan.expires_at(lease, each.last_modified or listing.server_time):
            found.append(lease.reader)
    return found


def unreadable_lease(checkpoint: CheckpointId, key: str) -> Lease:
    """Return the lease that an unreadable one counts as: since some reader wrote it, it lasts as long as any may."""
    return Lease(checkpoint, key, sweep_plan.MAX_LEASE_S)


async def read_damages(store: PatientStore) -> dict[CheckpointId, str]:
    """Return the damage marks: why readers could not read committed checkpoints. An unreadable mark does not count."""
    listing = await store.list(keys.DAMAGED)
    found: dict[CheckpointId, str] = {}
    for each in listing.objects:
        checkpoint = keys.parse_damage_key(each.key)
        if checkpoint is None:
            continue
        reading = read_record(
            store,
            each.key,
            lambda data, of=checkpoint: records.decode_damage(data, of),  # type: ignore[misc]
        )
        there = await if_readable(reading)
        if there is None:
            continue
        damage, _ = there
        found[checkpoint] = f"{damage.reason} (found by {damage.found_by})"
    return found


async def unmark(store: PatientStore, checkpoint: CheckpointId) -> None:
    """Remove a damage mark: readers and retention count the checkpoint again. No error if there is none."""
    await store.delete([keys.damage_key(checkpoint)])


async def take_lease(store: PatientStore, lease: Lease) -> Decision | None:
    """Write or renew a lease, then read the decision *again* (rule R3).

    Only if it is still `commit` may the reader go on, until two thirds of `ttl_s` have passed since this call began;
    otherwise the lease is dropped and the result is None.
    """
    await store.put(keys.lease_key(lease.checkpoint, lease.reader), records.encode_lease(lease))
    decision = await read_settled(store, lease.checkpoint, only_reads=True)
    if decision is not None and decision.outcome is Outcome.COMMIT:
        return decision
    await drop_lease(store, lease)
    return None


async def drop_lease(store: PatientStore, lease: Lease) -> None:
    await store.delete([keys.lease_key(lease.checkpoint, lease.reader)])


# --- what the store still has of what it confirmed: somebody may have deleted there, or put the remote back (R1) ---


async def gone(store: PatientStore, prefix: str, expected: Mapping[str, int | None]) -> list[str]:
    """Return the keys of the objects below `prefix` that the store does not have any more, or has with another size
    than `expected` (None: any). A listing may lag, so HEAD is asked for each object that it lacks.
    """
    if not expected:
        return []
    listing = await store.list(prefix)
    there = {each.key: each.size_bytes for each in listing.objects}
    doubtful = {key: size for key, size in expected.items() if not _is_as_expected(there.get(key), size)}
    are_there = await all_or_none(is_there(store, key, size) for key, size in doubtful.items())
    return [key for key, found in zip(doubtful, are_there, strict=True) if not found]


async def is_there(store: PatientStore, key: str, size_bytes: int | None = None) -> bool:
    """Return whether there is such an object, of this size unless it is None. Costs one HEAD."""
    try:
        return _is_as_expected((await store.head(key)).size_bytes, size_bytes)
    except ObjectNotFoundError:
        return False


def _is_as_expected(found: int | None, size_bytes: int | None) -> bool:
    return found is not None and size_bytes in (None, found)


# --- the target ---------------------------------------------------------------------------------------------


async def name_target(
    store: PatientStore, newest: CheckpointId, known: CheckpointId | None
) -> CheckpointId | None:
    """Name `newest` as the target, unless another rank has named one after `known`. Returns what is named then; None if
    it is of another launch.
    """
    nonce = uuid.uuid4().hex

    def change(there: bytes | None) -> bytes | None:
        target = _decoded_target(there)
        if target is not None and (target.checkpoint >= newest or _is_newer_target(target, newest, known)):
            return None
        return records.encode_target(Target(newest, target.number + 1 if target else 1, nonce))

    return _of_launch(_decoded_target(await advance(store, keys.TARGET, change)), newest)


async def read_target(store: PatientStore, newest: CheckpointId) -> CheckpointId | None:
    """Return the target; None if there is none of this launch, that of `newest`."""
    try:
        there = await read(store, keys.TARGET)
    except InvalidRecordError:
        return None
    return _of_launch(_decoded_target(there[0] if there else None), newest)


def _is_newer_target(target: Target, newest: CheckpointId, known: CheckpointId | None) -> bool:
    return target.checkpoint.generation == newest.generation and (known is None or target.checkpoint > known)


def _of_launch(target: Target | None, newest: CheckpointId) -> CheckpointId | None:
    is_ours = target is not None and target.checkpoint.generation == newest.generation
    return target.checkpoint if target is not None and is_ours else None


def _decoded_target(data: bytes | None) -> Target | None:
    """Return the target; None if there is none, or if it is unreadable: it is only a hint, and is replaced."""
    if data is None:
        return None
    try:
        return records.decode_target(data)
    except InvalidRecordError as error:
        logger.warning("target_unreadable error=%s; treated as missing", error)
        return None
