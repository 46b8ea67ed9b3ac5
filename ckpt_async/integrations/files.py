"""Tells which rank owns each file of a checkpoint's folder, where all ranks write to one folder."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

logger = logging.getLogger(__name__)

# How frameworks put a rank into the names of the files that each rank writes: DCP; transformers; accelerate,
# and its FSDP; DeepSpeed; torch_xla, OLMo; OLMo-core 0.1. A file without a rank in its name is rank 0's.
_RANK = re.compile(
    r"__(\d+)_.*"
    r"|rng_state_(\d+)\.pth"
    r"|random_states_(\d+)\.pkl"
    r"|(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank(\d+)\.bin"
    r"|(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_.*"
    r"|rank(\d+)(?:-of-\d+-.*|\.pt)"
    r"|rank_(\d+)\.safetensors"
)


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
            match = _RANK.fullmatch(name)
            owner = int(next(filter(None, match.groups()))) if match else 0
            path = (Path(here) / name).relative_to(folder).as_posix()
            if owner == rank:
                found.append(path)
            elif owner >= world_size and rank == 0:
                logger.warning("left_over_file %s: this launch has no rank %d", path, owner)
    return sorted(found)
