"""A Composer Trainer as docs/integrations.md shows it."""

import sys
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback
from composer.models import ComposerModel
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_async.integrations.composer import CheckpointSaver
from tests.compat.play import say_loss

SAMPLES, BATCH_SIZE, WIDTH = 96, 4, 8


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        # Dropout depends on restoring the random number generators.
        self.layer: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        self.layer._fsdp_wrap = True

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any, *_: Any, **__: Any) -> torch.Tensor:
        return outputs.square().mean()


class Losses(Callback):
    def batch_end(self, state: Any, logger: Any) -> None:
        if dist.get_global_rank() == 0:
            say_loss(state.timestamp.batch.value, float(state.loss))


def loader() -> DataLoader[Any]:
    samples = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(samples, (samples > 0).int())
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=dist.get_sampler(data, shuffle=True))


def trainer_of(model: Model, duration: str = "6ep", **more: Any) -> Trainer:
    return Trainer(
        model=model,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        train_dataloader=loader(),
        max_duration=duration,
        device="cpu",
        dist_timeout=120.0,
        seed=1,
        progress_bar=False,
        **more,
    )


def main(_node: str, remote: str, **more: Any) -> None:
    torch.manual_seed(1)
    saver = CheckpointSaver("checkpoints", remote=remote, save_interval="5ba", num_checkpoints_to_keep=2)
    trainer = trainer_of(Model(), run_name="run", autoresume=True, callbacks=[saver, Losses()], **more)
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
