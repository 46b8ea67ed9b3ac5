"""The user's files that other kinds of checkpoints in the same folder still need: local retention leaves them
alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_async.core.model import FileIdentity
from ckpt_async.local import journals, kept
from ckpt_async.local.folder import Folder


def of_other_kinds(folder: Folder) -> set[tuple[str, FileIdentity]]:
    """Return (source, identity) of every file that a kind other than the folder's own still knows. A file that
    several kinds have is deleted by the last one to let go of it. Raises JournalError if a journal cannot be read,
    because the answer is unknown then.
    """
    return {each for kind in journals.kinds(folder.path) if kind != folder.kind for each in _of(folder, kind)}


def _of(folder: Folder, kind: str) -> Iterator[tuple[str, FileIdentity]]:
    for checkpoint in journals.checkpoints(folder.path, kind):
        if checkpoint.is_removed:
            continue
        for each in checkpoint.shards.values():
            yield each.shard.source, each.shard.identity
    yield from kept.sources(journals.private_of(folder.path, kind))
