"""From a rank's verified shards to the decision (receipt, looks at the other ranks, commit or abort), and what follows
it: latest, copies under exact keys, Composer's pointer.

Writes only through the steps of the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from ckpt_async.core import agreement, backlog, decide, keys, naming, order, pointers, records, waiting
from ckpt_async.core.boundary import Checkpoints
from ckpt_async.core.failures import Failure
from ckpt_async.core.local_state import LocalCheckpoint
from ckpt_async.core.model import (
    CheckpointId,
    Copied,
    Decided,
    Decision,
    Failed,
    Outcome,
    Receipt,
    ReceiptStored,
    StoredShard,
    Superseded,
)
from ckpt_async.core.units import one_line
from ckpt_async.engine import fencing
from ckpt_async.engine.state import State
from ckpt_async.errors import CkptAsyncError, FailureReason, InvalidRecordError, StoreError
from ckpt_async.protocol import cas, copies, deciding, steps
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)

# A rank that has waited so long for a decision also asks whether it has been collected.
COLLECTED_AFTER_S = 3600.0


async def store_receipt(state: State, action: decide.StoreReceipt) -> None:
    checkpoint = state.checkpoint(action.checkpoint)
    data = records.encode_receipt(_receipt(state, checkpoint))
    key = keys.receipt_key(checkpoint.id, state.rank)
    there = await cas.create_once(state.store, key, data)
    if there != data:
        if await fencing.is_still_ours(state):  # it may be of a launch that has taken our generation
            await abort(state, checkpoint, "another process wrote a different receipt for this rank")
        return
    state.record(ReceiptStored(checkpoint.id))


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
    watch = state.commits.watches.get(id_)
    at_once: list[Callable[[], Coroutine[Any, Any, Any]]] = [lambda: receipts_of(state, id_)]
    if watch is None:
        at_once.append(lambda: fencing.look_for_successor(state))
    receipts, *_ = await all_or_none(look() for look in at_once)
    is_missed = waiting.lacks_own(receipts, state.rank)
    is_lost = is_missed and not await steps.is_there(state.store, keys.receipt_key(id_, state.rank))
    now = state.now()
    if watch is None:
        polls = state.commits.polls.began(now, first_s=state.settings.decision_poll_s)
        watch = waiting.Watch(since=now, log_at=now + backlog.first_log_s(receipts, state.rank))
    else:
        polls = replace(state.commits.polls, last_listing_at=now)
    if now >= watch.log_at:
        if text := backlog.long_wait(state.local, id_, receipts, now - watch.since):
            logger.warning("checkpoint_waits %s", text)
        watch = replace(watch, log_at=now + (now - watch.since))
    list_at = waiting.listed_until(checkpoint, receipts, state.rank, now)
    watch = replace(watch, receipts=receipts, list_at=list_at)
    state.commits = replace(state.commits.watching(id_, watch), polls=polls)
    if is_lost:
        await _give_up_lost(state, checkpoint)


async def _give_up_lost(state: State, checkpoint: LocalCheckpoint) -> None:
    """Give up a checkpoint of which the store has lost this rank's receipt, unless it is decided, or another launch has
    our generation.
    """
    decision = await steps.read_settled(state.store, checkpoint.id)
    if decision is not None:
        await _learn_ours(state, checkpoint, decision)
    elif checkpoint.loss is None and await fencing.is_still_ours(state):
        reason = agreement.lost([keys.receipt_key(checkpoint.id, state.rank)])
        state.fail(checkpoint.id, [Failed(checkpoint.id, "", FailureReason.STORE_LOST_OBJECTS, reason)])


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


async def poll(state: State, action: decide.Poll) -> None:
    """Find out which of all checkpoints that wait are decided, with one LIST. If there is only one, it is asked for."""
    ids = action.waiting
    to_read = await _seem_decided(state, ids) if len(ids) > 1 else ids
    first_s, longest_s = state.settings.decision_poll_s, state.settings.decision_poll_max_s
    polls = state.commits.polls.polled(
        state.now(), first_s=first_s, longest_s=first_s if state.is_hurried else longest_s
    )
    state.commits = replace(state.commits, to_read=state.commits.to_read | {*to_read}, polls=polls)


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
    """Return whether a decision may have been there and be gone: a sweeper collects what was decided long ago."""
    watch = state.commits.watches.get(id_)
    is_old = watch is not None and state.now() - watch.since >= COLLECTED_AFTER_S
    is_earlier = decide.may_be_decided(id_, state.local.generation, state.policy)
    return is_earlier or is_old or state.fence.by is not None


async def read_decision(state: State, action: decide.ReadDecision) -> None:
    id_ = action.checkpoint
    decision = await steps.read_settled(state.store, id_, may_be_collected=_may_be_collected(state, id_))
    if decision is not None:
        await _learn_ours(state, state.checkpoint(id_), decision)
    state.commits = replace(state.commits, to_read=state.commits.to_read - {id_})


def missing_ranks(state: State, id_: CheckpointId) -> list[int]:
    """Return the ranks whose receipts were missing when this engine last looked. Any thread.

    If there are many, only the first are returned.
    """
    checkpoint, watch = state.local.checkpoints.get(id_), state.commits.watches.get(id_)
    if checkpoint is None or checkpoint.sealed is None or watch is None:
        return []
    return waiting.missing_ranks(watch.receipts, checkpoint.sealed.world_size)


def _wait_again(state: State, id_: CheckpointId) -> None:
    """Look for the decision, and then at the receipts, before anything else is done for this checkpoint, with the
    pauses of polls.
    """
    now = state.now()
    state.commits = state.commits.watching(id_, waiting.Watch(list_at=now, since=now, log_at=now))


async def commit(state: State, action: decide.Commit) -> None:
    checkpoint, id_ = state.checkpoint(action.checkpoint), action.checkpoint
    assert checkpoint.sealed is not None
    settled = await deciding.settle(
        state.store,
        id_,
        world_size=checkpoint.sealed.world_size,
        by=f"rank {state.rank}",
        now=state.clock(),
        name=checkpoint.name,
        may_decide=lambda: fencing.is_still_ours(state),
    )
    if settled is None:
        _wait_again(state, id_)
        return
    # A newer launch may have begun since the first look, however long ago that was.
    await fencing.look_for_successor(state)
    decision, is_ours = settled
    if is_ours and decision.outcome is Outcome.COMMIT:
        state.published = state.published.publishing(id_)
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
    loss = checkpoint.loss
    wanted = replace(
        wanted,
        is_superseded=bool(checkpoint.superseded),
        is_lost_by_store=loss is not None and loss.reason is FailureReason.STORE_LOST_OBJECTS,
    )
    decision, is_ours = await deciding.decide_once(state.store, wanted)
    if checkpoint.superseded and is_ours:
        for _ in checkpoint.shards:
            state.observer.shards_finished("superseded", 1, 0.0)
    await _learn_ours(state, checkpoint, decision)


async def _learn_ours(state: State, checkpoint: LocalCheckpoint, decision: Decision) -> None:
    """Record a decision, unless it commits what another launch has uploaded that has taken our generation."""
    is_own = not state.is_trainer or checkpoint.id.generation == state.local.generation
    if is_own and not _is_of_us(state, checkpoint, decision):
        fencing.fence(state, state.local.generation)
        return
    _learn(state, checkpoint, decision)


def _is_of_us(state: State, checkpoint: LocalCheckpoint, decision: Decision) -> bool:
    if decision.outcome is not Outcome.COMMIT or not checkpoint.is_verified:
        return True
    if state.rank >= len(decision.receipts):
        return False
    ours, theirs = _receipt(state, checkpoint), decision.receipts[state.rank]
    return checksum_of(records.encode_receipt(ours), theirs.algorithm) == theirs


def _learn(state: State, checkpoint: LocalCheckpoint, decision: Decision) -> None:
    """Record a decision that was read back from the store, unless a look or an attempt beside this one has done so."""
    known = state.fresh_local().checkpoints.get(checkpoint.id)
    if known is None or known.decision is not None:
        return
    event = Decided(
        checkpoint.id,
        decision.outcome,
        decision.name,
        decision.reason,
        decision.is_superseded,
        decision.is_lost_by_store,
    )
    _count(state, checkpoint, decision)  # first, so that whoever waits for the decision finds it counted
    state.record(event, notices=state.reporter.decided(decision))
    state.reports.outcomes.add(event)
    state.commits = state.commits.without(checkpoint.id)
    delivered = state.uploads.delivered_by_others - {checkpoint.id}
    state.uploads = replace(state.uploads, delivered_by_others=delivered)
    if decision.outcome is Outcome.ABORT:
        logger.error("checkpoint_aborted %s reason=%s", checkpoint.id, one_line(decision.reason))
        is_known = decision.is_superseded or checkpoint.loss is not None
        is_known = is_known or any(each.failure for each in checkpoint.shards.values())
        if checkpoint.sealed and not is_known and not state.is_left_over(checkpoint.id):
            error = CkptAsyncError(f"{checkpoint.id} was given up: {decision.reason}")
            state.reports.failures.append(Failure(error, checkpoint.id, is_given_up=True))
        return
    if decision.outcome is Outcome.COMMIT and state.is_left_over(checkpoint.id):
        # Whoever committed it may have died before it could move latest.
        state.published = state.published.publishing(checkpoint.id)


def _count(state: State, checkpoint: LocalCheckpoint, decision: Decision) -> None:
    if decision.outcome is Outcome.ABORT:
        state.observer.checkpoint_aborted(checkpoint.id.step, decision.reason)
        return
    first = min((each.enqueued_at for each in checkpoint.shards.values()), default=checkpoint.sealed_at)
    state.observer.checkpoint_committed(checkpoint.id.step, max(0.0, state.clock() - first))


async def name_target(state: State) -> None:
    local, known = state.local, state.uploads.turn.target
    newest = max(decide.owed_of_launch(local, state.policy), default=None)
    if newest is None:
        return
    is_open = order.is_open(local, known)
    is_waiting = order.is_waiting(state.uploads.turn, state.now(), is_open=is_open)
    if state.policy.may_decide and not is_waiting:
        target = await steps.name_target(state.store, newest, known)
    else:
        target = await steps.read_target(state.store, newest)
    turn = order.with_target(state.uploads.turn, target or known, state.now(), may_have_named=not is_waiting)
    state.uploads = replace(state.uploads, turn=turn)


async def report_owed(state: State) -> None:
    key = keys.owed_key(state.local.generation, state.rank)
    owed = Checkpoints.of(decide.owed(state.local, state.policy))
    await state.store.put(key, records.encode_owed(owed))
    state.uploads = replace(state.uploads, report_owed_at=state.now() + decide.REPORT_OWED_S)


async def give_up_for_newer(state: State, action: decide.GiveUpForNewer) -> None:
    """Give up a checkpoint unless some rank has delivered its part: then it may still be committed."""
    id_ = action.checkpoint
    if (await receipts_of(state, id_)).ranks:
        delivered = state.uploads.delivered_by_others | {id_}
        state.uploads = replace(state.uploads, delivered_by_others=delivered)
        return
    if (shortage := state.uploads.shortage) is None:
        return
    size_bytes = state.checkpoint(id_).size_bytes
    logger.warning("checkpoint_superseded %s size_bytes=%d reason=%s", id_, size_bytes, shortage.text)
    state.record(Superseded(id_, f"superseded by newer checkpoints: {shortage.text}"))
    state.uploads = replace(state.uploads, shortage=None)  # until it is looked for again


async def move_latest(state: State, action: decide.MoveLatest) -> None:
    decided = state.checkpoint(action.checkpoint).decision
    assert decided is not None
    name = decided.name
    latest = await steps.move_latest(state.store, action.checkpoint, name)
    state.published = replace(state.published, latest=latest)


# --- after the commit ---------------------------------------------------------------------------------------


# The store does the copying; one rank asks for this many copies at once.
_AT_ONCE = 4
RETRACT_S = 30.0
# What tells other tools that a folder is complete: DCP, OLMo-core, OLMo.
_MARKERS = frozenset({".metadata", ".metadata.json", "config.yaml"})


async def copy_shards(state: State, action: decide.Copy) -> None:
    """Copy this rank's shards to their exact keys; if the checkpoint is being pruned, take back what was copied.

    A marker comes last: its rank first makes the copies of all ranks that are not there yet, so that a tool that trusts
    the marker never finds half of a checkpoint. The decision is read again after copying, because the pruner may have
    looked before a copy was there. Copies that fail are tried again later; the others are recorded.
    """
    checkpoint, store, id_ = state.checkpoint(action.checkpoint), state.store, action.checkpoint
    wanted, failed = set(checkpoint.to_copy), dict[str, StoreError | InvalidRecordError]()
    left: set[str] = set()  # by name, markers for which it is too early
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def publish(shard: StoredShard) -> None:
        async with at_once:
            try:
                await copies.publish(store, id_, shard)
            except (StoreError, InvalidRecordError) as error:
                failed[shard.name] = error

    decision = await _decision(state, id_)
    if decision is not None:
        # Only what the receipt lists: the pruner finds the copies by it.
        own = [each for each in await _listed(state, decision, state.rank) if each.name in wanted]
        markers = sorted(filter(_is_marker, own), key=lambda each: -each.publish_as.count("/"))
        shards = [each for each in own if each not in markers]
        if markers:
            others = [rank for rank in range(len(decision.receipts)) if rank != state.rank]
            for rank in others:
                shards += await _listed(state, decision, rank)
        await all_or_none(publish(each) for each in shards)
        for marker in markers:  # that of a folder in it before its own
            if not failed:
                await publish(marker)
            left |= {marker.name} if failed else set()
        shards += markers
        decision = await _decision(state, id_)
    else:
        shards = _known_here(checkpoint)
    if decision is None:
        logger.info("copies_left_out %s: it was pruned", id_)
        await _take_back(state, id_, shards)
        failed.clear()
        left.clear()
    done = wanted - failed.keys() - left
    if decision is not None:
        state.observer.copies_finished("ok", len(done))
        state.observer.copies_finished("failed", len(wanted) - len(done))
    state.record(Copied(id_, tuple(sorted(done))))
    for error in failed.values():
        raise error


async def _listed(state: State, decision: Decision, rank: int) -> Sequence[StoredShard]:
    receipt = await steps.bound_receipt(state.store, decision, rank)
    return [each for each in receipt.shards if each.publish_as]


def _is_marker(shard: StoredShard) -> bool:
    return PurePosixPath(shard.publish_as).name in _MARKERS


async def _take_back(state: State, id_: CheckpointId, shards: Iterable[StoredShard]) -> None:
    """Delete copies, as far as possible: a trainer's credentials need not be allowed to delete."""
    store = state.store.answering_within(RETRACT_S)
    for each in shards:
        try:
            await copies.retract(store, id_, each)
        except (StoreError, InvalidRecordError) as error:
            logger.warning("copy_left key=%s error=%s; delete it yourself", each.publish_as, error)


async def _decision(state: State, id_: CheckpointId) -> Decision | None:
    """Return the decision if it is still `commit`, else None."""
    decision = await steps.read_settled(state.store, id_)
    return decision if decision is not None and decision.outcome is Outcome.COMMIT else None


def _known_here(checkpoint: LocalCheckpoint) -> list[StoredShard]:
    """Return, from the journal, the shards that may have been copied by an engine that died before it could look again.
    By now, the receipt may be gone.
    """
    found = (
        (each.stored, each.shard.publish_as) for each in checkpoint.shards.values() if each.shard.publish_as
    )
    return [replace(stored, publish_as=key) for stored, key in found if stored is not None]


async def move_pointer(state: State, action: decide.MovePointer) -> None:
    """Move Composer's remote 'symlink'. It is a hint, like latest, and never moves behind latest.

    It is a text object that holds an object name without its bucket (composer/utils/file_helpers.py,
    create_symlink_file).
    """
    shards = [each.shard for each in state.checkpoint(action.checkpoint).shards.values()]
    if pointers.may_write(state.rank, shards):
        latest = await steps.read_latest(state.store)
        decision = await _decision(state, action.checkpoint)
        if decision is not None and (latest is None or latest.checkpoint <= action.checkpoint):
            template = state.settings.composer_symlink
            target = pointers.target(
                state.rank,
                shards,
                name=decision.name,
                generation=action.checkpoint.generation,
                num_shards=decision.num_shards,
                has_own=naming.fill(template, rank=0) != naming.fill(template, rank=1),
            )
            if target is not None:
                root = keys.path_in(state.store.url)
                named = f"{root}/{target}".strip("/")
                await state.store.put(naming.fill(template, rank=state.rank), named.encode())
    state.published = replace(state.published, pointed_at=action.checkpoint)
