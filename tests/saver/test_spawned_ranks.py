"""Ranks of `mp.spawn`, and ranks that end while the others wait for them in a collective of training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_async import restore

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


@pytest.mark.fault("F103")
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
    assert "by peer" in told[1]  # closed or reset
    assert [rank.returncode for rank in ranks] == [1, end == "raises"]


SPAWNED = """
import os
import sys
import torch.distributed as dist
import torch.multiprocessing as mp
from ckpt_async.saver import CheckpointSaver

def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    remote = f"file://{folder}/remote" if sys.argv[2] == "remote" else None
    with CheckpointSaver(f"{folder}/local", remote, save_interval="1ba", is_writer=True) as saver:
        saver.step({"rank": rank}, 1)

if __name__ == "__main__":
    mp.spawn(train, args=(sys.argv[1],), nprocs=2)
"""


@pytest.mark.parametrize("place", ["remote", "none"])
def test_ranks_that_only_torch_knows_are_used(tmp_path: Path, place: str) -> None:
    """`mp.spawn` sets no variables, so that each process took itself for the only one."""
    (tmp_path / "train.py").write_text(SPAWNED)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path), place]
    subprocess.run(command, env=environment, check=True, timeout=120)
    found = sorted(each.name for each in (tmp_path / "local").glob("ep*.pt"))
    assert found == ["ep0-ba1-rank0.pt", "ep0-ba1-rank1.pt"]
    if place == "remote":
        checkpoint = restore.find(f"file://{tmp_path}/remote")
        assert checkpoint is not None
        assert checkpoint.world_size == 2
        assert sorted(checkpoint.files) == found
