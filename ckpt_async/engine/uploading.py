"""Sending shards: a single one, a series of small ones, or one that is still being written."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence

from ckpt_async.core import decide, keys
from ckpt_async.core.local_state import LocalCheckpoint, LocalShard
from ckpt_async.core.model import MultipartOpened, StoredShard, Verified
from ckpt_async.engine.state import State
from ckpt_async.transfer import ahead
from ckpt_async.transfer import upload as transfer
from ckpt_async.transfer.source import Source

logger = logging.getLogger(__name__)


async def upload(state: State, action: decide.Upload) -> None:
    """Send one shard, resuming where an earlier attempt left off. Raises StoreError, and SourceError if the file
    changed.
    """
    checkpoint = state.checkpoint(action.checkpoint)
    local = checkpoint.shards[action.shard]
    key, started = _key(checkpoint, action.shard), state.now()
    await _settled(state, local)

    def opened(multipart: transfer.Resume) -> None:
        state.record(
            MultipartOpened(checkpoint.id, action.shard, multipart.upload_id, multipart.part_size_bytes)
        )

    def sent(size_bytes: int) -> None:
        state.progress.sent_bytes[action] = state.progress.sent_bytes.get(action, 0) + size_bytes
        state.progress.is_new = True
        state.observer.bytes_uploaded(size_bytes)

    resume = None
    if local.multipart is not None:
        resume = transfer.Resume(local.multipart.upload_id, local.multipart.part_size_bytes)
    elif (resume := state.progress.ahead.pop((checkpoint.id, action.shard), None)) is not None:
        opened(resume)
    state.observer.uploads_started(1)
    try:
        # Takes microseconds on a local disk. In a thread, a cancellation would leave the descriptor open.
        source = _open(state, checkpoint, local)
        try:
            size_bytes, checksum = await transfer.upload(
                state.store.within(checkpoint.id),
                source,
                key,
                smallest_part_bytes=state.settings.part_size_bytes,
                resume=resume,
                may_be_there=checkpoint.id.generation < state.local.generation,
                opened=opened,
                sent=sent,
            )
        finally:
            source.close()
    finally:
        state.observer.uploads_ended(1)
    state.record(Verified(checkpoint.id, StoredShard(action.shard, key, size_bytes, checksum)))
    state.observer.shards_finished("ok", 1, state.now() - started)
    logger.debug("shard_verified key=%s size_bytes=%d", key, size_bytes)


async def upload_series(state: State, actions: Sequence[decide.Upload]) -> Sequence[decide.Upload]:
    """Send small shards one after the other, and return those that were not sent."""
    started = state.now()
    shards = [_small_shard(state, action) for action in actions]
    await _settled(state, *(state.checkpoint(each.checkpoint).shards[each.shard] for each in actions))
    state.observer.uploads_started(len(actions))
    try:
        checksums = await transfer.upload_many(state.store.within(actions[0].checkpoint), shards)
    finally:
        state.observer.uploads_ended(len(actions))
    sent = {
        action: StoredShard(action.shard, shard.key, shard.size_bytes, checksum)
        for action, shard, checksum in zip(actions, shards, checksums, strict=True)
        if checksum is not None
    }
    state.record(*(Verified(action.checkpoint, stored) for action, stored in sent.items()))
    state.observer.bytes_uploaded(sum(stored.size_bytes for stored in sent.values()))
    state.observer.shards_finished("ok", len(sent), state.now() - started)
    return [action for action in actions if action not in sent]


def _small_shard(state: State, action: decide.Upload) -> transfer.SmallShard:
    checkpoint = state.checkpoint(action.checkpoint)
    local = checkpoint.shards[action.shard]
    size_bytes = local.shard.identity.size_bytes
    open_ = functools.partial(_open, state, checkpoint, local)
    return transfer.SmallShard(_key(checkpoint, action.shard), size_bytes, open_)


async def send_ahead(state: State, action: decide.SendAhead) -> None:
    """Send the finished parts of a shard that is being written, until it is enqueued or given up."""
    checkpoint = state.checkpoint(action.checkpoint)
    key = _key(checkpoint, action.shard)

    def is_growing() -> bool:
        now = state.local.checkpoints.get(action.checkpoint)
        if now is None or now.superseded or now.decision is not None or state.is_stopping:
            return False
        return action.shard in now.growing

    resume = await ahead.send_ahead(
        state.store.within(checkpoint.id),
        state.folder.path / checkpoint.growing[action.shard],
        key,
        smallest_part_bytes=state.settings.part_size_bytes,
        is_growing=is_growing,
    )
    if resume is None:
        return
    known = state.local.checkpoints.get(action.checkpoint)  # it may be settled and forgotten by now
    if known is not None and action.shard in known.shards:
        state.progress.ahead[action.checkpoint, action.shard] = resume
    else:  # given up: the sweeper would remove the upload too, but much later
        await state.store.abort_multipart(key, resume.upload_id)


async def _settled(state: State, *shards: LocalShard) -> None:
    """Wait until no change of these files can have the time with which they were enqueued any more."""
    now = state.clock()
    left_s = max(state.folder.settles_in_s(each.shard.identity, now) for each in shards)
    if left_s:
        await asyncio.sleep(left_s)


def _open(state: State, checkpoint: LocalCheckpoint, local: LocalShard) -> Source:
    shard, spool = local.shard, state.spool_path(checkpoint, local)
    descriptor = state.folder.open_source(shard.source, spool, shard.identity)
    return Source(descriptor, shard.identity, state.users_path(local))


def _key(checkpoint: LocalCheckpoint, shard: str) -> str:
    return keys.data_key(checkpoint.name, checkpoint.id.generation, shard)
