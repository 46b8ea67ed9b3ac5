"""A script: `dcp.save` of so many gloo ranks, each to a folder of its own, as on as many nodes. See `tests.ranks`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from tests.ranks import become_ranks

STEPS = (10, 20, 30)


def main(world_size: int, folder: Path) -> None:
    rank = become_ranks(world_size)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    for step in STEPS:
        here = folder / f"node-{rank}/step-{step}"
        here.mkdir(parents=True)
        state = {"w": distribute_tensor(torch.full((64, 8), float(step)), mesh, [Shard(0)]), "step": step}
        dcp.save(state, checkpoint_id=here)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
