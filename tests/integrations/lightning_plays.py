"""What the tests' Lightning trainers do, each in a process of its own."""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step, so import it before the trainers are forked
import torchmetrics  # noqa: F401  also imported before the fork, because it takes longest
from torch import nn
from torch.utils.data import DataLoader

import ckpt_async.stores.directory
import ckpt_async.stores.s3.client  # noqa: F401
from ckpt_async import restore
from ckpt_async.errors import CkptAsyncError
from tests.integrations.stage import PATIENCE_S, tell

WIDTH = 8


def _whole(value: torch.Tensor) -> torch.Tensor:
    full = getattr(value, "full_tensor", None)
    return full() if full is not None else value


def _model(pl: Any, is_sharded: bool, raises_after: int | None = None) -> Any:
    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.lr, self.batch_size = 0.1, 4

        def configure_model(self) -> None:
            if is_sharded:
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *_: object) -> None:
            if self.global_step == raises_after:  # after all callbacks, ModelCheckpoint too
                raise RuntimeError("the training loop fails")

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.log("val_loss", self.layer(batch).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    torch.manual_seed(1)
    return Model()


def _data() -> DataLoader:
    """Repeat one sample, because Lightning does not save the position of a plain loader within an epoch."""
    sample = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2))
    return DataLoader(sample.repeat(64, 1), batch_size=4)


def train(
    folder: str,
    remote: str,
    num_steps: int,
    *,
    package: str = "lightning.pytorch",
    world_size: int = 1,
    is_sharded: bool = False,
    checkpoints: Sequence[dict[str, Any]] = ({},),
    ckpt_path: str | None = None,
    waits_at: int | None = None,
    raises_at: int | None = None,
    raises_after: int | None = None,
    loses_store_at: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train as a user's script would, starting from the newest checkpoint; optionally stop at some step."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    pl = import_module(package)
    from ckpt_async.integrations.lightning import CkptAsyncCallback, CkptAsyncCheckpointIO, newest_checkpoint

    started_at: list[int] = []

    class Script(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            started_at.append(trainer.global_step)

        def on_train_batch_start(self, trainer: Any, *_: object) -> None:
            step = trainer.global_step
            if step == loses_store_at:
                uploading.uploader.wait(step, timeout_s=PATIENCE_S)
                Path(remote.removeprefix("file://")).rename(f"{folder}.away")
                Path(remote.removeprefix("file://")).write_text("not a folder any more")
            if step == raises_at:
                raise RuntimeError("the training loop fails")
            if step == waits_at:
                tell(sorted(os.listdir(folder)))
                threading.Event().wait()

    script, model = Script(), _model(pl, is_sharded, raises_after)
    modes = [
        pl.callbacks.ModelCheckpoint(folder, **{"every_n_train_steps": 1, "save_top_k": 1} | each)
        for each in checkpoints
    ]
    plugged: dict[str, Any] = {"callbacks": [*modes, script], "strategy": "ddp" if world_size > 1 else "auto"}
    uploading: Any
    if is_sharded:
        uploading = CkptAsyncCallback(folder, remote, **settings)
        plugged["callbacks"].insert(0, uploading)
        plugged["strategy"] = import_module(f"{package}.strategies").ModelParallelStrategy(
            data_parallel_size=world_size, tensor_parallel_size=1, process_group_backend="gloo"
        )
    else:
        uploading = CkptAsyncCheckpointIO(folder, remote, **settings)
        plugged["plugins"] = [uploading]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        max_steps=num_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **plugged,
    )
    failure = ""
    try:
        trainer.fit(model, _data(), ckpt_path=ckpt_path or newest_checkpoint(folder, remote))
    except (RuntimeError, CkptAsyncError) as error:
        failure = str(error)
    return {
        "started_at": started_at[0],
        "step": trainer.global_step,
        "weights": {name: _whole(value).flatten().tolist() for name, value in model.state_dict().items()},
        "failure": failure,
        "is_closed": uploading.uploader is None,
    }


def see_what_is_new(folder: str, remote: str) -> list[str]:
    """As a rank on another node than rank 0 sees it, or on the same while rank 0 deletes what this rank still lists."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    pl = import_module("lightning.pytorch")
    from ckpt_async.integrations.lightning import CkptAsyncCallback

    def save(step: int, name: str) -> Path:
        path = Path(folder, name)
        path.mkdir(parents=True, exist_ok=True)
        for file in ("__0_0.distcp", "meta.pt"):
            (path / file).write_text(f"{file} {step}")  # in place, which does not change the folder
        trainer.global_step = step
        if name == "last.ckpt":
            keeping.last_model_path = str(path)
        else:
            keeping.best_k_models[str(path)] = torch.tensor(1.0)
        uploading.on_train_batch_start(trainer, None, None, 0)
        uploading.uploader.wait(step, PATIENCE_S)
        return path

    keeping = pl.callbacks.ModelCheckpoint(folder, monitor="loss", save_top_k=2)
    uploading: Any = CkptAsyncCallback(folder, remote)
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[keeping], global_step=0, global_rank=0, world_size=1)
    uploading.setup(trainer, None, "fit")
    uploading.on_train_start(trainer, None)
    save(1, "last.ckpt")
    save(2, "last.ckpt")
    older = save(3, "b-3")
    (older / "meta.pt").unlink()
    save(4, "b-4")
    (older / "__0_0.distcp").unlink()
    save(5, "b-5")
    uploading.teardown(trainer, None, "fit")
    return [checkpoint.name for step in range(1, 6) if (checkpoint := restore.find(remote, step=step))]


def tune(folder: str, remote: str) -> dict[str, Any]:
    """Search for a learning rate and a batch size before training."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    pl = import_module("lightning.pytorch")
    from ckpt_async.integrations.lightning import CkptAsyncCheckpointIO

    class Model(type(_model(pl, False))):  # type: ignore[misc]
        def train_dataloader(self) -> DataLoader:
            return DataLoader(torch.ones(64, WIDTH), batch_size=self.batch_size)

        val_dataloader = train_dataloader

    uploading = CkptAsyncCheckpointIO(folder, remote)
    trainer, model = _trainer(pl, folder, uploading, {}), Model()
    tuner = import_module("lightning.pytorch.tuner").Tuner(trainer)
    tuner.lr_find(model, num_training=5)
    tuner.scale_batch_size(model, max_trials=3)
    return {"step": trainer.global_step, "batch_size": model.batch_size}


def find_best(folder: str, remote: str, fresh: str) -> list[str]:
    """Train, then evaluate the best checkpoint where its file is missing: in this folder, and in a fresh one."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    pl = import_module("lightning.pytorch")
    from ckpt_async.integrations.lightning import CkptAsyncCheckpointIO, newest_checkpoint

    # The loss falls, so the first save stays the best.
    mode = {"filename": "mine-{loss:.2f}", "monitor": "loss", "mode": "max"}
    trainer = _trainer(pl, folder, CkptAsyncCheckpointIO(folder, remote), mode, {"filename": "newest"})
    model = _model(pl, False)
    trainer.fit(model, _data())
    best = trainer.checkpoint_callback.best_model_path
    os.remove(best)
    trainer.validate(model, _data(), ckpt_path="best", verbose=False)
    found = [os.path.relpath(best, folder)] if os.path.exists(best) else []
    os.rename(folder, f"{folder}.away")

    trainer = _trainer(pl, fresh, CkptAsyncCheckpointIO(fresh, remote), mode, {"filename": "newest"})
    trainer.fit(model, _data(), ckpt_path=newest_checkpoint(fresh, remote))
    trainer.validate(model, _data(), ckpt_path="best", verbose=False)
    return [*found, *sorted(each for each in os.listdir(fresh) if each.startswith("mine"))]


def _trainer(pl: Any, folder: str, uploading: Any, *modes: dict[str, Any]) -> Any:
    callbacks = [
        pl.callbacks.ModelCheckpoint(folder, **{"every_n_train_steps": 1, "save_top_k": 1} | each)
        for each in modes
    ]
    return pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        plugins=[uploading],
    )
