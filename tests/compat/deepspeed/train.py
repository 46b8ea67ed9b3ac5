"""DeepSpeed's engine with ZeRO as docs/integrations.md shows it."""

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from ckpt_async import Uploader
from ckpt_async.integrations.files import files_of_rank
from ckpt_async.torch import fetch_together, launch_id
from tests.compat.play import say_loss

STEPS, WIDTH = 150, 16


def main(stage: str, node: str, remote: str) -> None:
    deepspeed.init_distributed("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    folder, first = Path(node, "checkpoints"), 0
    folder.mkdir(exist_ok=True)
    found = fetch_together(
        remote, lambda checkpoint: folder / checkpoint.name, folder=folder, drain_timeout_s=60
    )
    if found is not None:
        _, state = engine.load_checkpoint(str(folder), tag=found[0].name)
        first = state["step"] + 1
    with Uploader(folder, remote, rank=rank, world_size=world_size, launch_id=launch_id()) as uploader:
        for step in range(first, STEPS):
            loss = engine(torch.full((4, WIDTH), float(step % 7 + rank))).square().mean()
            engine.backward(loss)
            engine.step()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            if rank == 0:
                say_loss(step, whole.item())
            if step % 10 == 9:
                tag = f"step-{step}"
                engine.save_checkpoint(str(folder), tag=tag, client_state={"step": step})
                files = files_of_rank(folder / tag, rank, world_size)
                uploader.enqueue(folder / tag, step, files=files)
                uploader.seal(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
