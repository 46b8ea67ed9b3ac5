"""What an engine does on this node's disk: it makes durable what was enqueued and, once a checkpoint is
decided, moves the local symlink, removes spool links and applies local retention.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterable
from dataclasses import replace

from ckpt_async.core import decide, keys, naming, records
from ckpt_async.core.local_state import LocalCheckpoint, LocalShard
from ckpt_async.core.model import CheckpointId, Failed, Forgotten, MadeDurable, Released, Removed
from ckpt_async.engine.state import State
from ckpt_async.errors import FailureReason, InvalidNameError
from ckpt_async.local import kept
from ckpt_async.local.durable import fsync_path, is_final, point_symlink, with_those_above, write_durably
from ckpt_async.threads import in_thread

logger = logging.getLogger(__name__)


async def move_local_latest(state: State, action: decide.MoveLocalLatest) -> None:
    await in_thread(_point_symlink, state, action.checkpoint)
    state.published = replace(state.published, local_latest=action.checkpoint)


def _point_symlink(state: State, id_: CheckpointId) -> None:
    checkpoint = state.local.checkpoints.get(id_)
    if checkpoint is None:
        return  # forgotten in the meantime
    state.folder.check_same()
    shards = [each.shard for each in checkpoint.shards.values()]
    # If a lost journal was rebuilt from manifests, retention may have removed the checkpoint's files before.
    is_here = any(state.folder.is_same(each.source, each.identity) for each in shards)
    target = local_target([(each.source, each.name) for each in shards]) if is_here else None
    link = state.folder.path / naming.fill(state.settings.latest_filename, rank=state.rank)
    try:
        if target is not None:
            point_symlink(link, state.folder.path / target, state.folder.private)
        elif link.is_symlink():
            link.unlink()  # the newest checkpoint has no files here, and the symlink's target will be removed
    except InvalidNameError as error:
        logger.warning("local_latest_skipped error=%s", error)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}:
            raise
        state.policy = replace(state.policy, has_local_latest=False)
        logger.warning("local_latest_left_out path=%s: no symlinks there; set latest_filename=''", link)


async def release(state: State, action: decide.Release) -> None:
    spool = keys.spool_checkpoint(action.checkpoint, state.rank)
    await in_thread(state.folder.remove_spool, spool)
    state.journal.check_there()  # in a folder that was moved, the links are still there: the next launch removes them
    state.record(Released(action.checkpoint))


async def remove(state: State, action: decide.Remove) -> None:
    checkpoint = state.checkpoint(action.checkpoint)
    others = (
        each
        for id_, each in state.local.checkpoints.items()
        if id_ != action.checkpoint and not each.is_removed
    )
    # A restarted trainer reaches the same steps again, and may just have created an empty folder for one of them.
    is_ahead = state.is_trainer and decide.is_still_to_come(state.local, action.checkpoint)
    shared = {(shard.shard.source, shard.shard.identity) for each in others for shard in each.shards.values()}

    def remove() -> None:
        with state.folder.letting_go():
            kept_by_others = shared | kept.of_other_kinds(state.folder)
            for each in checkpoint.shards.values():
                if (each.shard.source, each.shard.identity) in kept_by_others:
                    continue  # the same file belongs to another checkpoint, which is removed later or stays
                source, identity = each.shard.source, each.shard.identity
                if not state.folder.remove_source(source, identity, keeps_folders=is_ahead):
                    logger.info("local_file_kept path=%s; the file has been replaced", each.shard.source)
            # Before the checkpoint is forgotten, because nothing comes back to a forgotten one.
            state.record(
                notices=state.reporter.removed_locally(checkpoint.id, checkpoint.name, action.reason)
            )
            if checkpoint.to_copy:  # copies are made within the store, and need none of these files
                state.record(Removed(action.checkpoint))
            else:
                _drop(state, checkpoint)

    await in_thread(remove)
    state.observer.checkpoint_pruned("local")
    logger.info("local_checkpoint_removed %s reason=%s", action.checkpoint, action.reason)


async def keep(state: State, id_: CheckpointId) -> None:
    """Save the checkpoint for a later launch that keeps fewer, and forget it."""
    await in_thread(kept.put, state.folder, state.rank, state.checkpoint(id_), state.store.url)
    await forget(state, id_)


async def forget(state: State, id_: CheckpointId) -> None:
    await in_thread(_drop, state, state.checkpoint(id_))


def _drop(state: State, checkpoint: LocalCheckpoint) -> None:
    state.folder.check_same()
    state.folder.unlink(keys.spool_manifest(checkpoint.id, state.rank))
    state.record(Forgotten(checkpoint.id, checkpoint.decided_at if checkpoint.was_committed else None))


def local_target(shards: list[tuple[str, str]]) -> str | None:
    """Return what the local symlink points at, given (source, name) of each shard.

    That is the folder from which the shards were enqueued, or the file itself if it is a single one directly in the
    uploader's folder; None if several are.
    """
    roots = {source.removesuffix(name).rstrip("/") for source, name in shards}
    if len(roots) != 1:
        return None
    root = roots.pop()
    if root:
        return root
    return shards[0][0] if len(shards) == 1 else None


async def make_durable(state: State, action: decide.MakeDurable) -> None:
    """Make a checkpoint survive power loss, or record that a shard or all of it is lost.

    An fsync that fails is final (F4).
    """
    checkpoint = state.checkpoint(action.checkpoint)
    volatile = [each for each in checkpoint.shards.values() if not each.is_durable]
    state.journal.check_there()
    try:
        failed = await in_thread(fsync_shards, state, checkpoint, volatile)
        if not failed:
            await in_thread(_write_manifest, state, checkpoint)
            await in_thread(state.journal.sync)
    except OSError as error:
        if not is_final(error):
            state.folder.check_same()  # which says why there is no such file
            raise
        message = f"{error.filename!r}: {error.strerror}: the data on disk cannot be trusted"
        failed = [Failed(checkpoint.id, "", FailureReason.DISK, message)]
    if failed:
        state.fail(checkpoint.id, failed)
        return
    names = tuple(each.shard.name for each in volatile)
    state.record(MadeDurable(checkpoint.id, names, checkpoint.sealed is not None))


def fsync_shards(state: State, checkpoint: LocalCheckpoint, shards: Iterable[LocalShard]) -> list[Failed]:
    """Fsync the shards, and every folder on the way to them and to their links. Returns the shards that are lost."""
    failed = []
    folders = {f"{state.folder.private}/{keys.spool_checkpoint(checkpoint.id, state.rank)}"}
    for each in shards:
        path = state.path(checkpoint, each)
        try:
            fsync_path(path)
        except FileNotFoundError:
            message = f"shard {path!r} is gone: it was deleted before it was uploaded"
            failed.append(Failed(checkpoint.id, each.shard.name, FailureReason.SOURCE_MISSING, message))
        except OSError as error:
            if not is_final(error):
                raise
            message = f"shard {state.users_path(each)!r}: {error.strerror}: its data cannot be trusted"
            failed.append(Failed(checkpoint.id, each.shard.name, FailureReason.SOURCE_CHANGED, message))
        folders.add(path.rpartition("/")[0])
        folders.add(state.users_path(each).rpartition("/")[0])
    for folder in with_those_above(folders, str(state.folder.path)):
        with contextlib.suppress(FileNotFoundError):
            fsync_path(folder)
    return failed


def _write_manifest(state: State, checkpoint: LocalCheckpoint) -> None:
    if checkpoint.shards or checkpoint.sealed:
        path = state.folder.private / keys.spool_manifest(checkpoint.id, state.rank)
        nonces = state.local.opened.nonces if state.local.opened else {}
        nonce = nonces.get(checkpoint.id.generation, "")
        write_durably(path, records.manifest_of(checkpoint, state.store.url, nonce))
