"""A transformers Trainer as docs/integrations.md shows it."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ckpt_async.integrations.transformers import CkptAsyncCallback, newest_checkpoint
from tests.compat.play import say_loss

STEPS, WIDTH = 150, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Dropout depends on restoring the random number generators.
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Losses(transformers.TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            say_loss(state.global_step, logs["loss"])


def main(node: str, remote: str) -> None:
    args = transformers.TrainingArguments(
        str(Path(node, "checkpoints")),
        max_steps=STEPS,
        save_steps=10,
        save_total_limit=1,
        logging_steps=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(1)
    samples = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
    data: Any = [{"x": sample} for sample in samples]
    callbacks = [CkptAsyncCallback(remote), Losses()]
    trainer = transformers.Trainer(Model(), args, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir, remote))


if __name__ == "__main__":
    main(*sys.argv[1:])
