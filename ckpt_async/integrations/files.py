"""Tells which rank owns each file of a checkpoint's folder, where all ranks write to one folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ckpt_async.formats import rank_of_file

logger = logging.getLogger(__name__)


def files_of_rank(folder: str | os.PathLike[str], rank: int, world_size: int) -> list[str]:
    """Return the files that this rank has to enqueue, as paths within the folder.

        uploader.enqueue(folder, step, files=files_of_rank(folder, uploader.rank, uploader.world_size))

    A rank's own files are those with the rank in their names, as transformers, accelerate, Lightning and DCP write it;
    rank 0 has all others. So no file is enqueued twice, and none before it is complete. Files that an earlier launch
    with more ranks left in the folder belong to nobody; the log names them.
    """
    found = []
    for here, _, names in os.walk(folder):
        for name in names:
            owner = rank_of_file(name) or 0
            path = (Path(here) / name).relative_to(folder).as_posix()
            if owner == rank:
                found.append(path)
            elif owner >= world_size and rank == 0:
                logger.warning("left_over_file %s: this launch has no rank %d", path, owner)
    return sorted(found)
