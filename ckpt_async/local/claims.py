"""Which of the user's files the other kinds of checkpoints have in a folder: local retention leaves those to them."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_async.core.model import FileIdentity
from ckpt_async.local import journals, kept
from ckpt_async.local.folder import Folder


def of_other_kinds(folder: Folder) -> set[tuple[str, FileIdentity]]:
    """(source, identity) of every file that a kind other than the folder's own still knows. Whichever lets go last
    deletes a file that several have. Raises JournalError if a journal cannot be read: then nobody knows.
    """
    return {each for kind in journals.kinds(folder.path) if kind != folder.kind for each in _of(folder, kind)}


def _of(folder: Folder, kind: str) -> Iterator[tuple[str, FileIdentity]]:
    for checkpoint in journals.checkpoints(folder.path, kind):
        if checkpoint.is_removed:
            continue
        for each in checkpoint.shards.values():
            yield each.shard.source, each.shard.identity
    yield from kept.sources(journals.private_of(folder.path, kind))
