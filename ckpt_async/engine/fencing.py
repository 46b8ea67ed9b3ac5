"""Whether this launch may go on: a newer one ends it, and so does one that has taken its generation (rule R11)."""

from __future__ import annotations

import logging
from dataclasses import replace

from ckpt_async.core.recovery import OnDisk
from ckpt_async.engine.state import State
from ckpt_async.protocol.generation import absent_ranks, is_taken, look_from, nonce_of, reclaim
from ckpt_async.stores.interface import ObjectInfo

logger = logging.getLogger(__name__)


async def look_for_successor(state: State) -> None:
    """Look for a newer generation, which means that this trainer is superseded, and for another launch that has taken
    ours, or that of what a dead launch has left (rule R11).
    """
    own = state.local.generation
    if state.fence.by is None and not state.is_trainer:
        if await is_taken(state.store, OnDisk(state.local).nonces):
            fence(state, own)
    elif state.fence.by is None:
        newest, record = await look_from(state.store, own)
        if not await _has_record(state, record, newest):
            fence(state, own)
        elif newest > own:
            fence(state, newest)
    state.fence = state.fence.looked(state.local, state.now())


def fence(state: State, by: int) -> None:
    own = state.local.generation
    before, state.fence = state.fence, state.fence.fenced(by, own)
    if state.fence == before:
        return
    if not state.is_trainer:
        logger.error(
            "generation_taken generation=%d; another launch has it, or an earlier one: nothing more is uploaded",
            own,
        )
        return
    state.observer.fenced()
    state.record(notices=state.reporter.fenced(own, by))
    logger.error("fenced generation=%d by=%d; no new checkpoint is accepted", own, by)


async def _has_record(state: State, record: ObjectInfo | None, newest: int) -> bool:
    """Return whether no other launch has our generation. If its record is gone (a lifecycle rule begins with the oldest
    objects), it is written again, unless another launch may have begun there since.
    """
    mark, opened = (record.etag or str(record.last_modified)) if record else "", state.local.opened
    if opened is None or not opened.nonce or mark == state.fence.record_mark:
        return True
    there = await nonce_of(state.store, opened.generation)  # the listing may lag
    if there is None and newest == opened.generation:
        if not await reclaim(state.store, opened):
            return False
        logger.error(
            "generation_was_lost generation=%d; the store had lost its record, which is written again: what was"
            " committed there may be lost, too (a lifecycle rule, or a remote that was wiped or put back)",
            opened.generation,
        )
    state.fence = replace(state.fence, record_mark=mark)
    return there in (None, "", opened.nonce)


async def is_still_ours(state: State) -> bool:
    await look_for_successor(state)
    return not state.is_taken


async def look_for_members(state: State) -> None:
    await look_for_successor(state)
    opened = state.local.opened
    world_size = opened.world_size if opened else 1
    absent = await absent_ranks(state.store, state.local.generation, world_size)
    state.fence = replace(state.fence, absent_ranks=absent, are_members_asked_for=False)
