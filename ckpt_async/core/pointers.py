"""What Composer's text pointer names. Pure.

Composer (0.32) names the file of the rank that writes the pointer. For a checkpoint of several files, rank 0 writes it
and names their folder, without a '/' at the end (composer/callbacks/checkpoint_saver.py).
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from ckpt_async.core import keys
from ckpt_async.core.model import Shard


def may_write(rank: int, shards: Sequence[Shard]) -> bool:
    """Return whether this rank may have to write a pointer, judging by what it knows itself."""
    return rank == 0 or bool(shards)


def target(
    rank: int,
    shards: Sequence[Shard],
    *,
    name: str,
    generation: int,
    num_shards: int,
    has_own: bool,
) -> str | None:
    """Return what this rank's pointer to a committed checkpoint names, or None if another rank writes the pointer.

    The result is relative to the run ("" for the run itself). `shards` are this rank's shards, out of `num_shards` in
    all. `has_own` tells whether each rank has its own pointer.

    If the checkpoint is one file, the pointer names that file. If it is several, the pointer names their folder; but if
    each rank has its own pointer and this rank published one file, it names that file. Names under which shards were
    published are preferred.
    """
    published = [each.publish_as for each in shards if each.publish_as]
    is_whole = len(shards) == num_shards
    if len(shards) == 1 and (is_whole or (has_own and published)):
        return published[0] if published else keys.data_key(name, generation, shards[0].name)
    if rank != 0 and not is_whole:
        return None
    if published and len(published) == len(shards):
        folders = {posixpath.dirname(key) for key in published}
        return posixpath.commonpath(folders)
    return keys.data_prefix(name, generation).rstrip("/")
