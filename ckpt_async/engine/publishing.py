"""What an engine publishes for other tools: copies of committed shards under exact keys, and Composer's pointer.

All of this happens after the commit and never changes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace

from ckpt_async.core import decide, keys, naming, pointers
from ckpt_async.core.local_state import LocalCheckpoint
from ckpt_async.core.model import CheckpointId, Copied, Decision, Outcome, StoredShard
from ckpt_async.engine.state import State
from ckpt_async.errors import InvalidRecordError, StoreError
from ckpt_async.protocol import copies, steps
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)

# The store does the copying; one rank asks for this many copies at once.
_AT_ONCE = 4
RETRACT_S = 30.0


async def copy(state: State, action: decide.Copy) -> None:
    """Copy this rank's shards to their exact keys; if the checkpoint is being pruned, take back what was copied.

    The decision is read again after copying, because the pruner may have looked before a copy was there. Copies that
    fail are tried again later; the others are recorded.
    """
    checkpoint, store, id_ = state.checkpoint(action.checkpoint), state.store, action.checkpoint
    wanted, failed = set(checkpoint.to_copy), dict[str, StoreError | InvalidRecordError]()
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def publish(shard: StoredShard) -> None:
        async with at_once:
            try:
                await copies.publish(store, id_, shard)
            except (StoreError, InvalidRecordError) as error:
                failed[shard.name] = error

    decision = await _decision(state, id_)
    if decision is not None:
        receipt = await steps.bound_receipt(store, decision, state.rank)
        # Only what the receipt lists: the pruner finds the copies by it.
        shards = [each for each in receipt.shards if each.publish_as and each.name in wanted]
        await all_or_none(publish(each) for each in shards)
        decision = await _decision(state, id_)
    else:
        shards = _known_here(checkpoint)
    if decision is None:
        logger.info("copies_left_out %s: it was pruned", id_)
        await _take_back(state, id_, shards)
        failed.clear()
    else:
        state.observer.copies_finished("ok", len(shards) - len(failed))
        state.observer.copies_finished("failed", len(failed))
    state.record(Copied(id_, tuple(sorted(wanted - failed.keys()))))
    for error in failed.values():
        raise error


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
