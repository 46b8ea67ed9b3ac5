"""From a rank's verified shards to the decision: receipt, looks at the other ranks, commit or abort, latest.

Writes only through the steps of the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ckpt_async.core import backlog, decide, keys, records, waiting
from ckpt_async.core.failures import Failure
from ckpt_async.core.local_state import LocalCheckpoint
from ckpt_async.core.model import CheckpointId, Decided, Decision, Outcome, Receipt, ReceiptStored
from ckpt_async.core.units import one_line
from ckpt_async.engine import recovery
from ckpt_async.engine.state import State
from ckpt_async.errors import CkptAsyncError, InvalidRecordError
from ckpt_async.protocol import cas, deciding, presence, steps
from ckpt_async.protocol.generation import absent_ranks, is_taken, look_from, nonce_of, take_place
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)

# For how long a rank may upload again what the store has lost of it, before the others give the checkpoint up.
GIVE_UP_LOST_S = 20.0


async def store_receipt(state: State, action: decide.StoreReceipt) -> None:
    checkpoint = state.checkpoint(action.checkpoint)
    data = records.encode_receipt(_receipt(state, checkpoint))
    key = keys.receipt_key(checkpoint.id, state.rank)
    there = await cas.create_once(state.store, key, data)
    if there != data and not _is_same(there, _receipt(state, checkpoint)):
        await look_for_successor(state)  # it may be of a launch that has taken our generation
        if not state.is_taken:
            await abort(state, checkpoint, "another process wrote a different receipt for this rank")
        return
    state.record(ReceiptStored(checkpoint.id))
    if decide.is_alone(checkpoint):
        state.receipts[checkpoint.id] = there


def _is_same(there: bytes, ours: Receipt) -> bool:
    """Return whether it is the same receipt, of which one does not know its launch: an earlier version of this package
    has written it, or our journal was lost.
    """
    try:
        found = records.decode_receipt(there, ours.checkpoint, ours.rank)
    except InvalidRecordError:
        return False
    return "" in (found.nonce, ours.nonce) and replace(found, nonce="") == replace(ours, nonce="")


def _receipt(state: State, checkpoint: LocalCheckpoint) -> Receipt:
    assert checkpoint.sealed is not None
    return Receipt(
        checkpoint.id,
        checkpoint.name,
        state.rank,
        checkpoint.sealed.world_size,
        tuple(
            replace(each.stored, publish_as=each.shard.publish_as) if each.shard.publish_as else each.stored
            for each in checkpoint.shards.values()
            if each.stored is not None
        ),
        checkpoint.sealed.metrics,
        checkpoint.sealed.expected,
        state.local.opened.nonces.get(checkpoint.id.generation, "") if state.local.opened else "",
    )


async def list_receipts(state: State, action: decide.ListReceipts) -> None:
    """List which ranks are done; the first time, also look for a successor."""
    checkpoint, id_ = state.checkpoint(action.checkpoint), action.checkpoint
    watch = state.remote.watches.get(id_)
    at_once: list[Callable[[], Coroutine[Any, Any, Any]]] = [lambda: receipts_of(state, id_)]
    if watch is None:
        at_once.append(lambda: look_for_successor(state))
    receipts, *_ = await all_or_none(look() for look in at_once)
    is_missed = waiting.lacks_own(receipts, state.rank)
    if is_missed and not await presence.has_receipt(state.store, id_, state.rank):
        await _upload_unless_settled(state, checkpoint)
        return
    now = state.now()
    if watch is None:
        first_s = state.settings.decision_poll_s
        state.remote = replace(state.remote, polls=state.remote.polls.began(now, first_s=first_s))
        watch = waiting.Watch(since=now, tell_at=now + backlog.first_tell_s(receipts, state.rank))
    else:
        state.remote = replace(state.remote, polls=replace(state.remote.polls, last_listing_at=now))
    if now >= watch.tell_at:
        if text := backlog.long_wait(state.local, id_, receipts, now - watch.since):
            logger.warning("checkpoint_waits %s", text)
        watch = replace(watch, tell_at=now + (now - watch.since))
    list_at = waiting.listed_until(checkpoint, receipts, state.rank, now)
    _watch(state, id_, replace(watch, receipts=receipts, list_at=list_at))


def _watch(state: State, id_: CheckpointId, watch: waiting.Watch) -> None:
    state.remote = replace(state.remote, watches={**state.remote.watches, id_: watch})


async def receipts_of(state: State, id_: CheckpointId) -> waiting.Receipts:
    """List which ranks are done, only as far as the first page that lacks one.

    Otherwise each of N ranks would list N / 1000 pages.
    """
    prefix = keys.receipts_prefix(id_)

    def written(objects: Iterable[ObjectInfo]) -> list[tuple[float, int]]:
        parsed = ((each.last_modified or 0.0, keys.parse_receipt_key(each.key)) for each in objects)
        return sorted((at, found[1]) for at, found in parsed if found is not None and found[0] == id_)

    def is_enough(objects: Sequence[ObjectInfo]) -> bool:
        return waiting.has_gap([rank for _, rank in written(objects)])

    listing = await state.store.list(prefix, enough=is_enough)
    there = written(listing.objects)
    newest_at = there[-1][0] if there else 0.0
    ranks = tuple(rank for _, rank in there)
    # The times may come from two clocks (NFS), or from one with a resolution of a second.
    newest_age_s = max(0.0, listing.server_time - newest_at)
    return waiting.Receipts(ranks, newest_age_s, listing.is_whole)


async def poll(state: State) -> None:
    """Find out which of all checkpoints that wait are decided, with one LIST. If there is only one, it is asked for."""
    ids = decide.waiting_ids(state.local, state.remote, state.policy)
    to_read = await _seem_decided(state, ids) if len(ids) > 1 else ids
    first_s, longest_s = state.settings.decision_poll_s, state.settings.decision_poll_max_s
    polls = state.remote.polls.polled(
        state.now(), first_s=first_s, longest_s=first_s if state.is_hurried else longest_s
    )
    state.remote = replace(state.remote, to_read=state.remote.to_read | {*to_read}, polls=polls)


async def _seem_decided(state: State, ids: Sequence[CheckpointId]) -> set[CheckpointId]:
    there = await steps.list_decisions(state.store, ids)
    superseded = {id_ for id_ in ids if id_ not in there and _may_be_collected(state, id_)}
    if superseded:
        try:
            there |= await steps.collected(state.store, superseded)
        except InvalidRecordError:  # reading each one's decision shows whether it blocks any of them
            there |= superseded
    return there


def _may_be_collected(state: State, id_: CheckpointId) -> bool:
    """Return whether a decision may have been there and be gone: only those of superseded launches are collected."""
    is_earlier = decide.may_be_settled(id_, state.local.generation, state.policy)
    return is_earlier or state.fenced_by is not None


async def read_decision(state: State, action: decide.ReadDecision) -> None:
    id_ = action.checkpoint
    decision = await steps.read_settled(state.store, id_, may_be_collected=_may_be_collected(state, id_))
    if decision is not None:
        await _learn_ours(state, state.checkpoint(id_), decision)
    state.remote = replace(state.remote, to_read=state.remote.to_read - {id_})


async def look_for_successor(state: State) -> None:
    """Look for a newer generation, which means that this trainer is superseded, and for another launch that has taken
    ours, or that of what a dead launch has left (rule R11).
    """
    own = state.local.generation
    if state.fenced_by is None and not state.is_trainer:
        if await is_taken(state.store, backlog.nonces_of_left(state.local, {})):
            _fence(state, own)
    elif state.fenced_by is None:
        newest, record = await look_from(state.store, own)
        if not await _is_still_ours(state, record):
            _fence(state, own)
        elif newest > own:
            _fence(state, newest)
    state.remote = decide.has_looked_for_successor(state.local, state.remote, state.now())


def _fence(state: State, by: int) -> None:
    own = state.local.generation
    if state.is_taken or (state.fenced_by is not None and by > own):
        return  # another look, beside this one, has found out
    state.fenced_by = by
    if not state.is_trainer:
        logger.error(
            "generation_taken generation=%d; another launch has it, or an earlier one: nothing more is uploaded",
            own,
        )
        return
    state.observer.fenced()
    state.record(notices=state.teller.fenced(own, by))
    logger.error("fenced generation=%d by=%d; no new checkpoint is accepted", own, by)


async def _is_still_ours(state: State, record: ObjectInfo | None) -> bool:
    """Return whether no other launch has taken our generation. If the store has lost its record since (it was wiped or
    put back), or another rank has written it again, take it again, and upload again what is lost with it.
    """
    mark = (record.etag or str(record.last_modified)) if record else ""
    before, state.generation_mark = state.generation_mark, mark
    opened = state.local.opened
    if opened is None or not opened.nonce or before == mark:
        return True
    there = await nonce_of(state.store, opened.generation)
    if there is not None and before is None and record is not None:  # our first look
        return there in ("", opened.nonce)
    if there is None:  # otherwise the listing has lagged
        logger.error(
            "remote_was_wiped generation=%d; the store has lost our generation: it was wiped or put back to an older"
            " state. What was committed there may be lost; going on with what this rank still has",
            opened.generation,
        )
    if not await recovery.reclaim(state.store, opened):
        # Without a proof, it is not written again: the next launch will be refused.
        return not await is_taken(state.store, {opened.generation: opened.nonce})
    await take_place(state.store, opened.generation, state.rank)
    state.generation_mark = None
    _upload_again(state, await recovery.with_lost_uploads(state.store, state.local))
    return True


async def _upload_unless_settled(state: State, checkpoint: LocalCheckpoint) -> None:
    """Upload again what the store has lost; but what was given up is removed there, and what is pruned, too.

    What is committed is uploaded again as well: under the same keys, the same bytes, and the same receipt.
    """
    decision = await steps.read_settled(state.store, checkpoint.id)
    is_committed = decision is not None and decision.outcome is Outcome.COMMIT
    if decision is None or (is_committed and await _is_of_us(state, checkpoint, decision)):
        if _may_upload_again(state, checkpoint.id):
            _upload_again(state, [checkpoint.id])
    else:
        await _learn_ours(state, checkpoint, decision)


def _may_upload_again(state: State, id_: CheckpointId) -> bool:
    """Return whether it is time to upload again what the store does not show: at once the first time, after that with
    pauses that double. The store may be late to show what it has, or may never show it.
    """
    settings, now = state.settings, state.now()
    num, at = state.uploaded_again.get(id_, (0, 0.0))
    if num and not at:
        at = waiting.next_poll(
            num, now, first_s=settings.decision_poll_s, longest_s=settings.decision_poll_max_s
        )
    may = now >= at
    state.uploaded_again[id_] = (num + 1, 0.0) if may else (num, at)
    if not may:
        _wait_again(state, id_, list_at=at)
    return may


def _upload_again(state: State, ids: Sequence[CheckpointId]) -> None:
    recovery.tell_lost(ids)
    for id_ in ids:
        state.receipts.pop(id_, None)
    _forget_watches(state, ids)
    state.distrust(ids)


async def look_for_members(state: State) -> None:
    await look_for_successor(state)
    opened = state.local.opened
    world_size = opened.world_size if opened else 1
    state.absent_ranks = await absent_ranks(state.store, state.local.generation, world_size)
    state.remote = replace(state.remote, are_members_asked_for=False)


def missing_ranks(state: State, id_: CheckpointId) -> list[int]:
    """Return the ranks whose receipts were missing when this engine last looked. Any thread.

    If there are many, only the first are returned.
    """
    checkpoint, watch = state.local.checkpoints.get(id_), state.remote.watches.get(id_)
    if checkpoint is None or checkpoint.sealed is None or watch is None:
        return []
    return waiting.missing_ranks(watch.receipts, checkpoint.sealed.world_size)


def _wait_again(state: State, id_: CheckpointId, *, list_at: float) -> None:
    """Look for the decision, and then at the receipts, before anything else is done for this checkpoint."""
    now, first_s = state.now(), state.settings.decision_poll_s
    _watch(state, id_, waiting.Watch(list_at=list_at, since=now, tell_at=now))
    state.remote = replace(state.remote, polls=state.remote.polls.began(now, first_s=first_s))


def _forget_watches(state: State, ids: Sequence[CheckpointId]) -> None:
    watches = {id_: each for id_, each in state.remote.watches.items() if id_ not in ids}
    state.remote = replace(state.remote, watches=watches, to_read=state.remote.to_read - {*ids})


async def commit(state: State, action: decide.Commit) -> None:
    checkpoint = state.checkpoint(action.checkpoint)
    assert checkpoint.sealed is not None
    own = state.receipts.get(checkpoint.id)
    since = state.lost_by_others_since.get(checkpoint.id, state.now())
    settled: tuple[Decision, bool] | None = None
    try:
        settled = await deciding.settle(
            state.store,
            checkpoint.id,
            world_size=checkpoint.sealed.world_size,
            by=f"rank {state.rank}",
            now=state.clock(),
            name=checkpoint.name,
            rank=state.rank,
            known={} if own is None else {state.rank: own},
            may_give_up=state.policy.is_adopted or state.now() - since >= GIVE_UP_LOST_S,
            clock=state.now,
            # A newer launch may have begun since the first look, however long ago that was.
            alongside=lambda: look_for_successor(state),
        )
    except deciding.UploadsLostError:
        await _upload_unless_settled(state, checkpoint)
        return
    except deciding.OthersLostError as lost:
        if checkpoint.id not in state.lost_by_others_since:
            state.lost_by_others_since[checkpoint.id] = since
            logger.warning("uploads_lost_by_others %s reason=%s; waiting for that rank", checkpoint.id, lost)
    if settled is None:
        # Receipts vanish only after an abort: look again, and the decision will say so.
        _wait_again(state, checkpoint.id, list_at=state.now())
        return
    decision, is_ours = settled
    if is_ours and decision.outcome is Outcome.COMMIT:
        _publish(state, checkpoint.id)
    await _learn_ours(state, checkpoint, decision)


async def abort(state: State, checkpoint: LocalCheckpoint, reason: str) -> None:
    wanted = steps.new_decision(
        checkpoint.id,
        Outcome.ABORT,
        name=checkpoint.name,
        world_size=checkpoint.sealed.world_size if checkpoint.sealed else 1,
        by=f"rank {state.rank}",
        now=state.clock(),
        reason=f"rank {state.rank}: {reason}",
    )
    wanted = replace(wanted, is_superseded=bool(checkpoint.superseded))
    decision, is_ours = await deciding.decide_once(state.store, wanted)
    if checkpoint.superseded and is_ours:
        for _ in checkpoint.shards:
            state.observer.shards_finished("superseded", 1, 0.0)
    await _learn_ours(state, checkpoint, decision)


async def _learn_ours(state: State, checkpoint: LocalCheckpoint, decision: Decision) -> None:
    """Record a decision, unless it commits what another launch has uploaded that has taken our generation."""
    is_own = not state.is_trainer or checkpoint.id.generation == state.local.generation
    if is_own and not await _is_of_us(state, checkpoint, decision):
        _fence(state, state.local.generation)
        return
    _learn(state, checkpoint, decision)


async def _is_of_us(state: State, checkpoint: LocalCheckpoint, decision: Decision) -> bool:
    if decision.outcome is not Outcome.COMMIT or not checkpoint.is_verified:
        return True
    if state.rank >= len(decision.receipts):
        return False
    ours, theirs = _receipt(state, checkpoint), decision.receipts[state.rank]
    if checksum_of(records.encode_receipt(ours), theirs.algorithm) == theirs:
        return True
    try:  # an earlier version of this package may have written the same differently
        there = await steps.bound_receipt(state.store, decision, state.rank)
    except InvalidRecordError:
        return False
    return {*there.shards} == {*ours.shards}


def _learn(state: State, checkpoint: LocalCheckpoint, decision: Decision) -> None:
    """Record a decision that was read back from the store, unless a look or an attempt beside this one has done so."""
    known = state.fresh_local().checkpoints.get(checkpoint.id)
    if known is None or known.decision is not None:
        return
    event = Decided(checkpoint.id, decision.outcome, decision.name, decision.reason, decision.is_superseded)
    _count(state, checkpoint, decision)  # first, so that whoever waits for the decision finds it counted
    state.record(event, notices=state.teller.decided(decision))
    state.outcomes.add(event)
    state.receipts.pop(checkpoint.id, None)
    state.lost_by_others_since.pop(checkpoint.id, None)
    state.uploaded_again.pop(checkpoint.id, None)
    _forget_watches(state, [checkpoint.id])
    if decision.outcome is Outcome.ABORT:
        logger.error("checkpoint_aborted %s reason=%s", checkpoint.id, one_line(decision.reason))
        is_known = decision.is_superseded or checkpoint.loss is not None
        is_known = is_known or any(each.failure for each in checkpoint.shards.values())
        if checkpoint.sealed and not is_known and not state.is_left_over(checkpoint.id):
            error = CkptAsyncError(f"{checkpoint.id} was given up: {decision.reason}")
            state.failures.append(Failure(error, checkpoint.id, is_given_up=True))
        return
    if decision.outcome is Outcome.COMMIT and state.is_left_over(checkpoint.id):
        # Whoever committed it may have died before it could move latest.
        _publish(state, checkpoint.id)


def _count(state: State, checkpoint: LocalCheckpoint, decision: Decision) -> None:
    if decision.outcome is Outcome.ABORT:
        state.observer.checkpoint_aborted(checkpoint.id.step, decision.reason)
        return
    now = state.clock()
    first = min((each.enqueued_at for each in checkpoint.shards.values()), default=checkpoint.sealed_at)
    state.observer.checkpoint_committed(checkpoint.id.step, max(0.0, now - first), now)


def _publish(state: State, id_: CheckpointId) -> None:
    publish = max(filter(None, (state.remote.to_publish, id_)))
    state.remote = replace(state.remote, to_publish=publish)


async def move_latest(state: State, action: decide.MoveLatest) -> None:
    decided = state.checkpoint(action.checkpoint).decision
    assert decided is not None
    name = decided.name
    latest = await steps.move_latest(state.store, action.checkpoint, name)
    state.remote = replace(state.remote, latest=latest)
