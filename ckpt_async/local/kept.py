"""Committed checkpoints that stay on the local disk for good, moved out of the journal.

The journal need not know them for ever, but a later launch that keeps fewer checkpoints must find them. Each one is
a small file, `kept/rank-<r>/<g>-<step>.json`, that exists until the user's own files are gone. Local retention leaves
alone what any kind of checkpoints in the folder still has, here or in its journal.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterator
from pathlib import Path

from ckpt_async.core import keys, records
from ckpt_async.core.local_state import LocalCheckpoint
from ckpt_async.core.model import (
    CheckpointId,
    Decided,
    Event,
    FileIdentity,
    Outcome,
    Released,
    without_slash,
)
from ckpt_async.errors import InvalidRecordError
from ckpt_async.local import journals
from ckpt_async.local.durable import write_durably
from ckpt_async.local.folder import Folder

logger = logging.getLogger(__name__)


def put(folder: Folder, rank: int, checkpoint: LocalCheckpoint, remote: str) -> None:
    """Set a checkpoint of a remote aside; durable on return."""
    path = folder.private / keys.kept_manifest(checkpoint.id, rank)
    folder.check_same()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, records.manifest_of(checkpoint, remote))


def drop(folder: Folder, rank: int, checkpoint: CheckpointId) -> None:
    folder.unlink(keys.kept_manifest(checkpoint, rank))


def drop_gone(folder: Folder, rank: int) -> None:
    """Drop the checkpoints none of whose files exists any more, for trainers that rotate files themselves."""
    for id_, found in manifests(folder.private / keys.kept_rank(rank)):
        if not any(folder.is_same(each.shard.source, each.shard.identity) for each in found.enqueued):
            drop(folder, rank, id_)


def events(folder: Folder, rank: int, remote: str) -> Iterator[tuple[CheckpointId, list[Event]]]:
    """Yield what the journal knew of each of a remote's checkpoints when it was set aside, the oldest first."""
    for id_, found in manifests(folder.private / keys.kept_rank(rank)):
        if found.remote != without_slash(remote):
            continue
        sealed = [found.sealed] if found.sealed else []
        committed = Decided(id_, Outcome.COMMIT, sealed[0].name if sealed else f"step-{id_.step}")
        yield id_, [*found.enqueued, *sealed, committed, Released(id_)]


def sources(private: Path) -> Iterator[tuple[str, FileIdentity]]:
    """Yield the files of the checkpoints that any rank has set aside."""
    for place in private.glob("kept/rank-*"):
        for _, found in manifests(place):
            yield from ((each.shard.source, each.shard.identity) for each in found.enqueued)


def manifests(
    place: Path, *, but: Container[CheckpointId] = ()
) -> Iterator[tuple[CheckpointId, records.Manifest]]:
    """Those in a folder, oldest first, except those of some checkpoints; what cannot be understood is only logged."""
    try:
        names = sorted(os.listdir(place))
    except (FileNotFoundError, NotADirectoryError):  # a file in its place is refused by `Folder`
        return
    for name in names:
        id_ = keys.parse_checkpoint_tag(name.removesuffix(".json"))
        if id_ is None or not name.endswith(".json") or id_ in but:
            continue
        try:
            found = records.decode_manifest((place / name).read_bytes(), id_)
        except InvalidRecordError as error:
            logger.warning("manifest_unreadable path=%s error=%s; its files are kept", place / name, error)
            continue
        yield id_, found


def of_other_kinds(folder: Folder) -> set[tuple[str, FileIdentity]]:
    """Return (source, identity) of every file that a kind other than the folder's own still knows. A file that
    several kinds have is deleted by the last one to let go of it. Raises JournalError if a journal cannot be read,
    because the answer is unknown then.
    """
    return {
        each for kind in journals.kinds(folder.path) if kind != folder.kind for each in _of_kind(folder, kind)
    }


def _of_kind(folder: Folder, kind: str) -> Iterator[tuple[str, FileIdentity]]:
    for checkpoint in journals.checkpoints(folder.path, kind):
        if checkpoint.is_removed:
            continue
        for each in checkpoint.shards.values():
            yield each.shard.source, each.shard.identity
    yield from sources(journals.private_of(folder.path, kind))
