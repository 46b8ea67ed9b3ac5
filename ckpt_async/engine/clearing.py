"""What an engine does on this node once a checkpoint is decided: the local symlink, the links, local retention."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from ckpt_async.core import decide, keys, naming
from ckpt_async.core.local_state import LocalCheckpoint, fold
from ckpt_async.core.model import CheckpointId, Forgotten, JournalRow, Released, Removed
from ckpt_async.engine.state import State
from ckpt_async.errors import InvalidNameError
from ckpt_async.local import claims, kept
from ckpt_async.local.durable import point_symlink

logger = logging.getLogger(__name__)


async def move_local_latest(state: State, action: decide.MoveLocalLatest) -> None:
    await asyncio.to_thread(_point_symlink, state, action.checkpoint)
    state.remote = replace(state.remote, local_latest=action.checkpoint)


def _point_symlink(state: State, id_: CheckpointId) -> None:
    checkpoint = state.local.checkpoints.get(id_)
    if checkpoint is None:
        return  # forgotten meanwhile
    shards = [each.shard for each in checkpoint.shards.values()]
    # Of what a lost journal's manifests bring back, retention had perhaps removed the files.
    is_here = any(state.folder.is_same(each.source, each.identity) for each in shards)
    target = local_target([(each.source, each.name) for each in shards]) if is_here else None
    link = state.folder.path / naming.fill(state.settings.latest_filename, rank=state.rank)
    try:
        if target is not None:
            point_symlink(link, state.folder.path / target, state.folder.private)
        elif link.is_symlink():
            link.unlink()  # the newest has no files here, and what it pointed at will be removed
    except InvalidNameError as error:
        logger.warning("local_latest_skipped error=%s", error)


async def release(state: State, action: decide.Release) -> None:
    spool = keys.spool_checkpoint(action.checkpoint, state.rank)
    await asyncio.to_thread(state.folder.remove_spool, spool)
    state.record(Released(action.checkpoint))


async def remove(state: State, action: decide.Remove) -> None:
    checkpoint = state.checkpoint(action.checkpoint)
    others = (
        each
        for id_, each in state.local.checkpoints.items()
        if id_ != action.checkpoint and not each.is_removed
    )
    # A restarted trainer comes to the same steps again, and may just have made an empty folder for one.
    is_ahead = state.is_trainer and decide.is_still_to_come(state.local, action.checkpoint)
    shared = {(shard.shard.source, shard.shard.identity) for each in others for shard in each.shards.values()}

    event = _forgotten(checkpoint)

    def remove() -> None:
        with state.folder.letting_go():
            kept_by_others = shared | claims.of_other_kinds(state.folder)
            for each in checkpoint.shards.values():
                if (each.shard.source, each.shard.identity) in kept_by_others:
                    continue  # the same file is part of another checkpoint, which goes later or stays
                source, identity = each.shard.source, each.shard.identity
                if not state.folder.remove_source(source, identity, keeps_folders=is_ahead):
                    logger.info("local_file_kept path=%s; it is another file by now", each.shard.source)
            # First: nobody comes back to what is forgotten.
            state.record(notices=state.teller.removed_locally(checkpoint.id, checkpoint.name, action.reason))
            if checkpoint.to_copy:  # within the store, which needs none of these files
                state.record(Removed(action.checkpoint))
            else:
                _drop(state, event)

    await asyncio.to_thread(remove)
    state.observer.checkpoint_pruned("local")
    logger.info("local_checkpoint_removed %s reason=%s", action.checkpoint, action.reason)
    if not checkpoint.to_copy:
        _note(state, event)


async def keep(state: State, id_: CheckpointId) -> None:
    """Set it aside for a start that keeps fewer, and forget it."""
    await asyncio.to_thread(kept.put, state.folder, state.rank, state.checkpoint(id_))
    await forget(state, id_)


async def forget(state: State, id_: CheckpointId) -> None:
    event = _forgotten(state.checkpoint(id_))
    await asyncio.to_thread(_drop, state, event)
    _note(state, event)


def _forgotten(checkpoint: LocalCheckpoint) -> Forgotten:
    return Forgotten(checkpoint.id, checkpoint.decided_at if checkpoint.was_committed else None)


def _drop(state: State, event: Forgotten) -> None:
    state.folder.unlink(keys.spool_manifest(event.checkpoint, state.rank))
    state.journal.forget(event)


def _note(state: State, event: Forgotten) -> None:
    row = JournalRow(state.local.sequence, state.rank, state.clock(), event)
    state.local = fold([row], state.local)


def local_target(shards: list[tuple[str, str]]) -> str | None:
    """What the local symlink points at, from (source, name) of the shards: the folder they were enqueued
    from; the file itself if one file lies in the uploader's folder; None if several do.
    """
    roots = {source.removesuffix(name).rstrip("/") for source, name in shards}
    if len(roots) != 1:
        return None
    root = roots.pop()
    if root:
        return root
    return shards[0][0] if len(shards) == 1 else None
