"""Two tensor-parallel layers of Megatron-core, saved by its dist_checkpointing as docs/integrations.md shows it.
`train.py async|sync TENSOR_PARALLEL STEPS NODE REMOTE`.

Even where all tensors are on the CPU, Megatron asks CUDA for its current device, and to synchronize. These two calls
are replaced; everything else is Megatron's own. After loading and before each save, rank 0 reports a digest of the
whole state, however it is sharded: `STATE loaded|saved STEP DIGEST`.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from ckpt_async import Uploader
from ckpt_async.integrations.files import files_of_rank
from ckpt_async.torch import fetch_together, launch_id
from tests.compat.play import say, say_loss

WIDTH, INTERVAL = 16, 10

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = ModelParallelConfig(
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            use_cpu_initialization=True,
        )
        init = torch.nn.init.xavier_normal_
        self.first = ColumnParallelLinear(WIDTH, 4 * WIDTH, config=config, init_method=init)
        self.second = RowParallelLinear(
            *(4 * WIDTH, WIDTH),
            config=config,
            init_method=init,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(batch)[0]))[0]

    def sharded_state_dict(self) -> dict[str, Any]:
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        first = self.first.sharded_state_dict("first.", metadata=metadata)
        return first | self.second.sharded_state_dict("second.", metadata=metadata)


class Run:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train(self, step: int) -> float:
        numbers = torch.Generator().manual_seed(step)
        batch = torch.randn(8, 1, WIDTH, generator=numbers)  # the same on all replicas
        self.optimizer.zero_grad()
        loss = (self.model(batch) - batch.flip(-1)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def sharded(self, step: int) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        if not self.optimizer.state:  # make the state that is to be loaded into
            for each in self.model.parameters():
                each.grad = torch.zeros_like(each)
            self.optimizer.step()
        optimizer = self.optimizer.state_dict()
        updates = [int(state["step"]) for state in optimizer["state"].values()]  # the same for all
        optimizer["state"] = {
            number: {name: value for name, value in state.items() if name != "step"}
            for number, state in optimizer["state"].items()
        }
        places = get_param_id_to_sharded_param_map(model, self.model.parameters())
        optim_state_to_sharding_state(optimizer, places)
        return {"model": model, "optimizer": optimizer, "updates": updates[0], "step": step}

    def load(self, path: Path) -> int:
        state = dist_checkpointing.load(self.sharded(0), str(path))
        self.model.load_state_dict(state["model"])
        for each in state["optimizer"]["state"].values():
            each["step"] = torch.tensor(float(state["updates"]))
        self.optimizer.load_state_dict(state["optimizer"])
        step: int = state["step"]
        return step

    def say_state(self, what: str, step: int) -> None:
        """Report a digest of all weights and moments, gathered as on one rank."""
        digest = hashlib.sha256()
        for name, weight in self.model.named_parameters():
            moments = self.optimizer.state[weight]
            axis = {"first.weight": 0, "first.bias": 0, "second.weight": 1}.get(name)
            for part in (weight.detach(), moments["exp_avg"], moments["exp_avg_sq"]):
                whole = part if axis is None else gathered(part, axis)
                digest.update(whole.contiguous().numpy().tobytes())
        if dist.get_rank() == 0:
            say(f"STATE {what} {step} {digest.hexdigest()}")


def gathered(part: torch.Tensor, axis: int) -> torch.Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part.contiguous()) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, axis)


def main(how: str, tensor_parallel: str, steps: str, node: str, remote: str) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(int(tensor_parallel))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder, first = Path(node, "checkpoints"), 0
    folder.mkdir(exist_ok=True)
    run = Run()

    found = fetch_together(
        remote, lambda checkpoint: folder / checkpoint.name, folder=folder, drain_timeout_s=60
    )
    if found is not None:
        first = run.load(folder / found[0].name) + 1
        run.say_state("loaded", first - 1)
    queue = AsyncCallsQueue()
    with Uploader(folder, remote, rank=rank, world_size=world_size, launch_id=launch_id()) as uploader:

        def hand_over(path: Path, step: int) -> None:
            if files := files_of_rank(path, rank, world_size):  # a replica may have written nothing
                uploader.enqueue(path, step, files=files)
            uploader.seal(step)

        for step in range(first, int(steps)):
            loss = run.train(step)
            if rank == 0:
                say_loss(step, loss)
            queue.maybe_finalize_async_calls(blocking=False)
            if step % INTERVAL == INTERVAL - 1:
                queue.maybe_finalize_async_calls(blocking=True)
                run.say_state("saved", step)
                path = folder / f"step-{step}"
                path.mkdir(exist_ok=True)
                request = dist_checkpointing.save(
                    run.sharded(step), str(path), async_sharded_save=how == "async"
                )
                if request is None:
                    hand_over(path, step)
                else:
                    request.add_finalize_fn(lambda path=path, step=step: hand_over(path, step))
                    queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
