"""What an engine does once, before it starts working.

It completes the journal from the spool's manifests (rule R10), clears the spool of what no caller was told is safe, and
gives up what a reboot may have destroyed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from ckpt_async.core import backlog, keys, records
from ckpt_async.core.local_state import Local, LocalCheckpoint
from ckpt_async.core.model import CheckpointId, FileIdentity, Opened, RemoteAddress
from ckpt_async.core.recovery import (
    OnDisk,
    adopted,
    completing,
    doubtful_after_reboot,
    lost_by_reboot,
    put_back,
    wiped,
)
from ckpt_async.core.units import few
from ckpt_async.engine.state import State
from ckpt_async.errors import InvalidRecordError, JournalError
from ckpt_async.local import kept
from ckpt_async.local.folder import Folder, boot_id, identity_of
from ckpt_async.protocol import generation as generations
from ckpt_async.protocol import steps
from ckpt_async.threads import in_thread
from ckpt_async.transfer.patient import PatientStore

logger = logging.getLogger(__name__)


def on_disk(folder: Folder, local: Local) -> OnDisk:
    """Complete what the journal says with what it has lost and a manifest in the spool knows. Blocks."""
    spool = folder.private / keys.spool_rank(local.rank)
    return OnDisk(local, dict(kept.manifests(spool, but=local.checkpoints)))


def refuse_copy(folder: Folder, found: OnDisk) -> None:
    """Raise JournalError if something is unfinished and the folder is a copy of the one in which it was saved: that may
    still upload it, and has what the copy lacks. Blocks.

    Only copying gives a link in the spool another inode. Where a mount does that too, no copy is refused.
    """
    for id_, shard in found.unfinished if folder.keeps_inodes else ():
        now = _identity_at(folder.private / keys.spool_checkpoint(id_, found.local.rank) / shard.name)
        if shard.is_linked and now is not None and now.inode != shard.identity.inode:
            raise JournalError(
                f"folder {str(folder.path)!r} is a copy of another one, which may still be uploading {id_}",
                hint="nothing was changed: use the original. If that is gone, `ckpt-async drain FOLDER --adopt` puts"
                " the copy in its place, and gives up what this lacks or has with another mtime (as without `cp -a`)",
            )


async def unproven(store: PatientStore, local: Local, address: RemoteAddress) -> list[CheckpointId]:
    """Return the unfinished checkpoints of which the journal must forget what the store has: at another endpoint all of
    them (`OnDisk.unproven`), else those of which the store has lost something that this rank uploaded. Logs them.
    """
    if found := OnDisk(local).unproven(address):
        there, here = local.remote and local.remote.endpoint_url, address.endpoint_url
        logger.warning(
            "endpoint_changed url=%s from=%s to=%s checkpoints=%d; what was uploaded of these is looked up again",
            *(address.url, there or "the default", here or "the default", len(found)),
        )
        return found
    lost = {each.id: await _lost_uploads(store, each, local.rank) for each in backlog.undecided(local)}
    for id_, gone in lost.items():
        if gone:
            logger.warning("uploads_gone %s keys=%s; uploading again, unless it is decided", id_, few(gone))
    return [id_ for id_, gone in lost.items() if gone]


async def _lost_uploads(store: PatientStore, checkpoint: LocalCheckpoint, rank: int) -> list[str]:
    id_, stored = checkpoint.id, [each.stored for each in checkpoint.shards.values() if each.stored]
    of_receipts = {keys.receipt_key(id_, rank): None} if checkpoint.has_receipt else {}
    of_shards = {each.key: each.size_bytes for each in stored}
    prefix = keys.data_prefix(checkpoint.name, id_.generation)
    return [
        *await steps.gone(store, keys.receipts_prefix(id_), of_receipts),
        *await steps.gone(store, prefix, of_shards),
    ]


async def lost(store: PatientStore, found: OnDisk, address: RemoteAddress) -> list[CheckpointId]:
    """Return the checkpoints that the newest launch in the journal saw committed, and that the store does not know: it
    was put back, or is another one, such as a replica that the same URL leads to.
    """
    known = [] if found.is_of_another(address.url) else found.committed_in_newest()
    return await steps.vanished(store, known) if known else []


async def why_refused(
    store: PatientStore, found: OnDisk, folder: str, address: RemoteAddress
) -> JournalError | None:
    """Return why nothing that this rank has left may be uploaded, or None if it may. Takes its generation again if the
    store has lost that, but none of this rank's commits.
    """
    if gone := await lost(store, found, address):
        return put_back(gone, found.local, folder, address)
    opened = found.local.opened
    is_ours = opened is None or not opened.nonce or await generations.reclaim(store, opened)
    # Also if this generation is there: another rank may have claimed it again, and this one has older files left.
    if is_ours and not await generations.is_taken(store, found.nonces):
        return None
    return wiped(found, folder, address)


async def recover(state: State, before: Opened | None, *, adopts_copy: bool = False) -> None:
    """Recover the state.

    Called once, after the lock was taken and before anything is enqueued; `before` is the newest launch in the journal.
    With `adopts_copy`, a copy of a folder takes its original's place.
    """
    await in_thread(rebuild, state)
    if adopts_copy:
        await in_thread(_adopt, state)
    await in_thread(_take_up_kept, state)
    if before is not None and before.boot_id not in ("", boot_id()):
        await in_thread(_invalidate_after_reboot, state)


def rebuild(state: State) -> None:
    """Replay the journal, and complete it with what only the spool's manifests know (rule R10)."""
    state.refresh()
    spool = state.folder.private / keys.spool_rank(state.rank)
    spool.mkdir(exist_ok=True)
    known = state.local.checkpoints
    for entry in sorted(os.listdir(spool)):
        tag, dot, suffix = entry.partition(".")
        checkpoint = keys.parse_checkpoint_tag(tag)
        if checkpoint is None:
            (spool / entry).unlink(missing_ok=True)  # the temporary file of a write that a crash cut short
        elif dot and suffix == "json":
            _complete_from(state, spool / entry, known.get(checkpoint) or LocalCheckpoint(checkpoint, ""))
        elif checkpoint not in known and not (spool / f"{tag}.json").exists():
            # Neither a journal row nor a manifest mentions these links: the caller of `enqueue` was never
            # told that they are safe, and the user's own files are untouched.
            state.folder.remove_spool(f"{keys.spool_rank(state.rank)}/{entry}")
    state.refresh()


def _complete_from(state: State, path: Path, known: LocalCheckpoint) -> None:
    """Append what the manifest knows about the checkpoint and the journal does not."""
    if known.decision is not None:
        return
    try:
        lost = completing(records.decode_manifest(path.read_bytes(), known.id), known)
    except InvalidRecordError as error:
        logger.warning("manifest_unreadable path=%s error=%s; its files are left in place", path, error)
        return
    if lost:
        logger.warning("journal_rebuilt rank=%d %s events=%d", state.rank, known.id, len(lost))
        state.record(*lost)


def _adopt(state: State) -> None:
    """Take copied files for those that were enqueued if size and mtime agree. They are not durable yet."""
    copied = [
        event
        for checkpoint in backlog.undecided(state.local)
        for each in checkpoint.shards.values()
        if (event := adopted(checkpoint, each.shard, _identity_at(state.path(checkpoint, each)))) is not None
    ]
    if copied:
        state.record(*copied)
        state.refresh()
        logger.warning(
            "folder_adopted path=%s rank=%d files=%d; no trainer, drain or sweeper must use the original any more",
            *(state.folder.path, state.rank, len(copied)),
        )


def _identity_at(path: str | Path) -> FileIdentity | None:
    try:
        return identity_of(os.lstat(path))
    except OSError:
        return None


def _take_up_kept(state: State) -> None:
    """Return the checkpoints that earlier launches kept for good to the journal, if this launch keeps fewer."""
    kept.drop_gone(state.folder, state.rank)
    if state.policy.local_retention.is_all:
        return
    for id_, events in kept.events(state.folder, state.rank, state.store.url):
        if state.is_trainer and id_.generation >= state.local.generation:
            continue  # of a run that was deleted from the remote
        if id_ not in state.local.checkpoints:
            state.record(*events)
        kept.drop(state.folder, state.rank, id_)
    state.refresh()


def _invalidate_after_reboot(state: State) -> None:
    """Give up shards that may not have survived the reboot."""
    for checkpoint in list(state.local.checkpoints.values()):
        if not doubtful_after_reboot(checkpoint):
            continue
        path = state.folder.private / keys.spool_manifest(checkpoint.id, state.rank)
        safe: set[str] = set()
        with contextlib.suppress(OSError, InvalidRecordError):
            found = records.decode_manifest(path.read_bytes(), checkpoint.id)
            safe = {event.shard.name for event in found.enqueued}
        if lost := lost_by_reboot(checkpoint, safe, str(state.folder.path)):
            state.fail(checkpoint.id, lost)
    state.refresh()
