"""A rank that leaves training, on purpose or by an error, ends at once, although the others have not noticed yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import sys
import torch
import torch.distributed as dist
from ckpt_async.saver import CheckpointSaver

folder, rank, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
ranks = {"rank": rank, "world_size": 2}
with CheckpointSaver(f"{folder}/local", None, save_interval="100ba", saves_last=False, **ranks) as saver:
    for batch in (1, 2, 3):
        if batch == 3:
            if rank == 0:
                dist.all_reduce(torch.ones(1))  # waits for rank 1, as training would
            elif end == "raises":
                raise ValueError("by the test")
            else:
                break
        saver.step({"batch": batch}, batch)
if end == "destroys":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["raises", "ends", "destroys"])
def test_a_rank_that_leaves_ends_at_once_and_the_others_notice(tmp_path: Path, end: str) -> None:
    """It waited for them, up to gloo's 30 minutes, while they waited for it."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank), end], text=True, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=120)[1] for rank in reversed(ranks)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ("by the test" in told[0]) == (end == "raises")
    assert "Connection closed by peer" in told[1]
    assert [rank.returncode for rank in ranks] == [1, end == "raises"]
