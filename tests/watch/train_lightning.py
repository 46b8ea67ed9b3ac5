"""A Lightning Trainer that knows nothing of ckpt_async."""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    trainer = pl.Trainer(
        default_root_dir=sys.argv[1],
        accelerator="cpu",
        devices=1,
        max_steps=12,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(sys.argv[1], every_n_train_steps=4, save_top_k=-1, save_last=True)],
    )
    trainer.fit(Model(), DataLoader(torch.ones(64, 8), batch_size=4))  # type: ignore[arg-type]
