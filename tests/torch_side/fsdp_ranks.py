"""Ranks under FSDP that write one state in the formats of all of OLMo 0.6's sharded checkpointers and of OLMo-core 0.1.

    python -m tests.torch_side.fsdp_ranks FOLDER

Each OLMo format is written by the torch calls that olmo/checkpoint.py makes, and `olmo_core` as OLMo-core 0.1 writes
it. OLMo itself refuses `local` with torch 2.3 and newer, but the attributes of a flat parameter that it saves still
exist. The full state is written as well, as torch makes it from the DCP checkpoint (what FSDP gathers of AdamW's
`exp_avg` on the CPU differs from what it saves), and so is the model as FSDP gathers it.
"""

import json
import multiprocessing
import pickle
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step, so import it before the ranks are forked
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  as in torch's own docs
from torch.distributed.tensor import Shard, distribute_tensor

WORLD_SIZE = 4
KEPT = (
    *("_fqns", "_shard_param_offsets", "_shard_indices", "_numels", "_numels_with_padding", "_shapes"),
    *("_shard_numel_padded", "_shard_param_infos"),
)


def model() -> FSDP:
    torch.manual_seed(0)
    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    inner = FSDP(nn.Sequential(nn.Linear(13, 31), nn.LayerNorm(31)), **options)
    return FSDP(nn.Sequential(inner, nn.Linear(31, 5), nn.Linear(5, 3, bias=False)), **options)


def flat_state(fsdp: FSDP) -> dict[str, Any]:
    """Return what OLMo's `_get_flat_param_state_to_save` returns."""
    modules = []
    for name, module in fsdp.named_modules():
        if not isinstance(module, FSDP):
            continue
        flat = module._handle.flat_param
        data = {"flat_param.data": flat.detach()}
        data |= {f"flat_param.{key}": getattr(flat, key) for key in KEPT if hasattr(flat, key)}
        modules.append({"handles": [data], "name": name})
    return {"modules": modules}


def save_as_olmo_core_0_1(fsdp: FSDP, optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> None:
    """Save as `save_model_and_optim_state` does: stretches of the flattened parameters, in safetensors."""
    stretches = {}
    for module in FSDP.fsdp_modules(fsdp):
        flat: Any = module._handle.flat_param
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            begin, last = info.intra_param_start_idx, info.intra_param_end_idx
            stretches[parameter] = (tuple(shape), (begin, last + 1) if info.in_shard else (0, 0))
    names = {each: name.replace("_fsdp_wrapped_module.", "") for name, each in fsdp.named_parameters()}
    groups = optimizer.state_dict()["param_groups"]
    groups = [{**group, "_param_names": list(names.values())} for group in groups]
    model = {names[each]: (each.detach(), *stretches[each]) for each in names}
    optim = {
        "num_param_groups": torch.tensor(len(groups)),
        "state_keys": pickled(["exp_avg", "exp_avg_sq", "step"]),
    }
    optim |= {f"param_group{number}": pickled(group) for number, group in enumerate(groups)}
    # A rank that holds no part of a parameter has no optimizer state for it, so take the step from any other.
    step = next(iter(optimizer.state.values()))["step"]
    for each, name in names.items():
        optim[f"state.{name}.__step"] = step
        for key in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[each][key] if each in optimizer.state else torch.zeros(0)
            optim[f"state.{name}.__{key}"] = (moment, *stretches[each])
    for part, state in (("model", model), ("optim", optim)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        save_parts(state, folder / part, rank)


def pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def save_parts(state: dict[str, Any], folder: Path, rank: int) -> None:
    own, told = {}, {}
    for name, value in state.items():
        tensor, shape, stretch = value if isinstance(value, tuple) else (value, tuple(value.shape), None)
        if stretch is not None or rank == 0:
            own[name] = tensor.reshape(-1).contiguous().clone()
        every: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(every, stretch)
        specs = {
            f"rank_{number}.safetensors": {
                "flattened_offsets": [each],
                "local_shape": None,
                "global_offset": None,
            }
            for number, each in enumerate([(0, tensor.numel())] if stretch is None else every)
        }
        dtype = {torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}[tensor.dtype]
        told[name] = {
            "shape": shape,
            "is_sharded": stretch is not None,
            "dtype": dtype,
            "shard_spec_per_file": specs,
        }
    save_file(own, folder / f"rank_{rank}.safetensors")
    if rank == 0:
        (folder / "metadata.json").write_text(json.dumps({"tensors": told}))


def run(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    fsdp = model()
    optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.1)
    optimizer.param_groups[0]["param_names"] = [name for name, _ in fsdp.named_parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        fsdp(torch.randn(7, 13)).square().sum().backward()
        optimizer.step()
    trainer = {"global_step": 5, "world_size": WORLD_SIZE}
    rng = {"rng": {"python": random.getstate(), "torch": torch.get_rng_state() + rank}}

    def saved(value: Any, name: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, folder / name)

    sharded = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(fsdp, StateDictType.SHARDED_STATE_DICT, *sharded):
        state = {"model": fsdp.state_dict(), "optim": FSDP.optim_state_dict(fsdp, optimizer)}
        saved({**state, **trainer, **rng}, f"legacy/step5/rank{rank}.pt")
        state_dict_saver.save(
            state, storage_writer=FileSystemWriter(folder / "new" / "step5" / "model_and_optim")
        )
    saved({**trainer, **rng}, f"new/step5/train/rank{rank}.pt")
    saved(flat_state(fsdp), f"local/step5/model/rank{rank}.pt")
    saved(optimizer.state_dict(), f"local/step5/optim/rank{rank}.pt")
    saved({**trainer, **rng}, f"local/step5/train/rank{rank}.pt")
    save_as_olmo_core_0_1(fsdp, optimizer, folder / "olmo_core" / "step5", rank)
    saved({**trainer, **rng}, f"olmo_core/step5/train/rank{rank}.pt")
    with FSDP.state_dict_type(fsdp, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        gathered = fsdp.state_dict()
    mesh = init_device_mesh("cpu", (2, 2))
    grid = torch.arange(7 * 11 * 3, dtype=torch.float32).reshape(7, 11, 3)
    tensors = {
        "rows": distribute_tensor(grid, mesh, [Shard(0), Shard(0)]),
        "both": distribute_tensor(grid, mesh, [Shard(0), Shard(1)]),
        "columns": distribute_tensor(grid, mesh, [Shard(1), Shard(1)]),
    }
    state_dict_saver.save(tensors, storage_writer=FileSystemWriter(folder / "grid" / "step-5"))
    if rank == 0:
        saved(gathered, "gathered.pt")
        dcp_to_torch_save(folder / "new" / "step5" / "model_and_optim", folder / "whole.pt")
        (folder / "local" / "step5" / "metadata.yaml").write_text(f"world_size: {WORLD_SIZE}\n")
        for kind in ("legacy", "new", "local", "olmo_core"):
            (folder / kind / "step5" / "config.yaml").write_text("model: {}\n")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank, folder)) for rank in range(WORLD_SIZE)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(timeout=100)
    return max(abs(each.exitcode) if each.exitcode is not None else 1 for each in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
