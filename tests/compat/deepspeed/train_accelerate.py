"""accelerate's `save_state` with DeepSpeed's engine, saving to `NODE/out` and knowing nothing of ckpt_async.

On CPUs, accelerate counts a single process beside DeepSpeed's, and all ranks write the same random states. So this
calls what its `save_state` calls, in the same order, with DeepSpeed's ranks.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.checkpointing import save_accelerator_state

WIDTH = 16


def main(folder: str, stage: str, saves: str = "3") -> None:
    PartialState(cpu=True)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(int(saves)):
        loss = engine(torch.full((4, WIDTH), float(step))).square().mean()
        engine.backward(loss)
        engine.step()
        save = f"{folder}/checkpoints/checkpoint_{step}"
        engine.save_checkpoint(save, "pytorch_model")
        save_accelerator_state(save, [], [], [], [], dist.get_rank(), step)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
