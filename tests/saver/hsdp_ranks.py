"""One rank of a job with HSDP that saves sharded checkpoints: `python hsdp_ranks.py 4 FOLDER`.

Each launch is given its ranks that write, and perhaps a group: of training's own, with a collective under way in it.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_async.torch as ckpt
from ckpt_async.errors import FormatError, SaveFailedError, SettingsError
from ckpt_async.saver import CheckpointSaver
from tests.ranks import become_ranks

world_size, root = int(sys.argv[1]), Path(sys.argv[2])
rank = become_ranks(world_size)
warnings.simplefilter("ignore")
os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)
mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
is_first = mesh["replicate"].get_local_rank() == 0
of_training = mesh["shard"].get_group()


def trainer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 7), torch.nn.Linear(7, 1))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optim": of_optimizer, "batch": batch}


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> str:
    torch.manual_seed(batch)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach()).hex()


def save_and_load(name: str, remote: str | None, **options: Any) -> None:
    folder = root / name / "local"
    model, optimizer = trainer(seed=1)
    with CheckpointSaver(
        folder, remote, save_interval="2ba", saves_last=False, sharded=True, **options
    ) as saver:
        assert saver.load_latest() is None
        for batch in range(1, 5):
            step(model, optimizer, batch)
            saver.step(lambda batch=batch: state_of(model, optimizer, batch), batch)
        expected = step(model, optimizer, 5)
    if remote is None:
        return
    model, optimizer = trainer(seed=2)
    state = state_of(model, optimizer, 0)
    found = ckpt.load_latest(state, remote, folder=folder, replicas=mesh["replicate"].get_group())
    assert found is not None
    assert state["batch"] == 4
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert step(model, optimizer, 5) == expected
    with CheckpointSaver(
        folder, remote, save_interval="2ba", sharded=True, resume_from=4, **options
    ) as saver:
        assert saver.find() == found
        with pytest.raises(FormatError, match="load_latest"):  # and on no rank does it hang
            saver.load_latest()


def refuse(name: str, told: str, **options: Any) -> None:
    with pytest.raises(SettingsError, match=told):
        CheckpointSaver(root / name / "local", f"file://{root}/{name}/remote", sharded=True, **options)


def fail_across_replicas() -> None:
    """A tensor of which the replica that does not write holds a part."""
    of_all = init_device_mesh("cpu", (world_size,))
    state = {"whole": distribute_tensor(torch.arange(8.0), of_all, [Shard(0)])}
    with CheckpointSaver(
        root / "across", None, save_interval="1ba", sharded=True, blocking=True, is_writer=is_first
    ) as saver:
        if not is_first:
            saver.step(state, 1)
            return
        with pytest.raises(
            SaveFailedError, match=r"key:whole .*is_writer=True must hold every part"
        ) as caught:
            saver.step(state, 1)
        assert "Traceback" not in str(caught.value)


def remote(name: str) -> str:
    return f"file://{root}/{name}/remote"


for name, options in {
    "first_replica": {"is_writer": is_first},
    "blocking": {"is_writer": is_first, "blocking": True},
    "second_replica": {"is_writer": not is_first},
    "group_of_training": {"is_writer": is_first, "process_group": of_training},
    "all": {},
}.items():
    save_and_load(name, remote(name), **options)
save_and_load("no_remote", None, is_writer=is_first)
refuse("nobody", "no rank", is_writer=False)
refuse("two_groups", "process_group", process_group=of_training)
fail_across_replicas()
dist.barrier()
dist.destroy_process_group()
