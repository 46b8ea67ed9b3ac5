"""A Lightning Trainer as docs/integrations.md shows it."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from ckpt_async.integrations.lightning import CkptAsyncCheckpointIO, newest_checkpoint
from tests.compat.play import say_loss

STEPS, WIDTH = 150, 8


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        if self.global_rank == 0:
            say_loss(self.global_step, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(node: str, remote: str) -> None:
    dist.init_process_group("gloo")
    folder = Path(node, "checkpoints")
    torch.manual_seed(1)
    # Repeat one sample, because Lightning does not save the position of a plain loader within an epoch.
    data: Any = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2)).repeat(64, 1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        plugins=[CkptAsyncCheckpointIO(folder, remote)],
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=10, save_last="link")],
    )
    trainer.fit(Model(), DataLoader(data, batch_size=4), ckpt_path=newest_checkpoint(folder, remote))


if __name__ == "__main__":
    main(*sys.argv[1:])
