"""Making what was enqueued survive power loss: fsync of shards, folders, manifest and journal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ckpt_async.core import decide, keys, records
from ckpt_async.core.local_state import LocalCheckpoint, LocalShard
from ckpt_async.core.model import Failed, MadeDurable
from ckpt_async.engine.state import State
from ckpt_async.errors import FailureReason
from ckpt_async.local.durable import fsync_path, is_final, with_those_above, write_durably
from ckpt_async.threads import in_thread


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
