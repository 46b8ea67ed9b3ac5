"""What Composer's text pointer names. Pure.

Composer (0.32) names the file of the rank that writes it, or, of a checkpoint that is several files, their folder,
which rank 0 does (composer/callbacks/checkpoint_saver.py); without a '/' at the end.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from ckpt_async.core import keys
from ckpt_async.core.model import Shard


def may_write(rank: int, shards: Sequence[Shard]) -> bool:
    """Whether this rank may have a pointer to write, as far as it knows by itself."""
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
    """What this rank's pointer to a committed checkpoint names, relative to the run ("": the run itself); None if
    another rank writes it. `shards` are this rank's of `num_shards` in all; `has_own`: each rank has its own pointer.

    A checkpoint that is one file: that file. One that is several: the folder, or, if each rank has a pointer of its own
    and this one published one file, that file. Published names where there are some.
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
