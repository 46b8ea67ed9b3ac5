"""A transformers Trainer that knows nothing of ckpt_async."""

import sys

import torch
import transformers
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


if __name__ == "__main__":
    args = transformers.TrainingArguments(
        sys.argv[1],
        max_steps=12,
        save_steps=4,
        save_total_limit=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"x": torch.ones(8)} for _ in range(64)]
    transformers.Trainer(Model(), args, train_dataset=data).train()  # type: ignore[arg-type]
