"""DeepSpeed's engine with ZeRO, saving to `NODE/out` and knowing nothing of ckpt_async."""

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

WIDTH = 16


def main(folder: str, stage: str) -> None:
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
    for step in range(1, 13):
        loss = engine(torch.full((4, WIDTH), float(step))).square().mean()
        engine.backward(loss)
        engine.step()
        if step % 4 == 0:
            engine.save_checkpoint(folder)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(*sys.argv[1:])
