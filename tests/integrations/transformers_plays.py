"""What the tests' Hugging Face trainers do, each in a process of its own."""

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch._dynamo  # optimizers import it at their first step, so import it before the trainers are forked
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import ckpt_async.stores.directory
import ckpt_async.stores.s3.client  # noqa: F401
from ckpt_async import Uploader
from ckpt_async.integrations.files import files_of_rank
from ckpt_async.integrations.transformers import CkptAsyncCallback, newest_checkpoint
from ckpt_async.torch import fetch_together, launch_id
from tests.integrations.stage import tell

WIDTH = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        # Dropout depends on restoring the random number generators.
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Data(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self._x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[index]}


def train(
    folder: str,
    remote: str,
    num_steps: int,
    *,
    world_size: int = 1,
    waits_at: int | None = None,
    sigterm_at: int | None = None,
    has_store: bool = True,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train as a user's script would, starting from the newest checkpoint; optionally stop at some step."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    args = transformers.TrainingArguments(
        **{
            "output_dir": folder,
            "max_steps": num_steps,
            "save_steps": 1,
            "save_total_limit": 1,
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "use_cpu": True,
            "ddp_backend": "gloo" if world_size > 1 else None,
            "report_to": "none",
            "disable_tqdm": True,
        }
        | (arguments or {})
    )
    uploading = CkptAsyncCallback(remote, **settings)
    started_at: list[int] = []

    class Script(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            started_at.append(state.global_step)

            if not has_store:
                Path(remote.removeprefix("file://")).rename(f"{folder}.away")
                Path(remote.removeprefix("file://")).write_text("not a folder any more")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == sigterm_at:
                os.kill(os.getpid(), signal.SIGTERM)
                # Left by others that write here at the same time.
                for name in ("checkpoint-90", "checkpoint-91"):
                    Path(folder, name).mkdir()
                    Path(folder, name, "other.txt").write_text("other")
                Path(folder, "checkpoint-90", "checkpoint-is-incomplete.txt").write_text("")
                assert jit.jit_manager is not None
                while not jit.jit_manager.is_checkpoint_requested:
                    threading.Event().wait(0.01)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == waits_at:
                tell(sorted(os.listdir(folder)))
                threading.Event().wait()

    trainer = transformers.Trainer(
        Model(), args, train_dataset=Data(), eval_dataset=Data(), callbacks=[uploading, Script()]
    )
    for jit in trainer.callback_handler.callbacks:
        if isinstance(jit, JITCheckpointCallback):
            jit.jit_manager.kill_wait = 0
            break
    resumed_from = newest_checkpoint(folder, remote)
    trainer.train(resume_from_checkpoint=resumed_from)
    return {
        "resumed_from": resumed_from,
        "started_at": started_at[0],
        "step": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "weights": {name: value.flatten().tolist() for name, value in trainer.model.state_dict().items()},
        "is_closed": uploading.uploader is None,
    }


def accelerated(
    folder: str, remote: str, num_steps: int, *, world_size: int, is_distributed: bool = True
) -> dict[str, Any]:
    """Train by the recipe for accelerate in docs/integrations.md."""
    accelerator = accelerate.Accelerator(cpu=is_distributed)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))

    found = fetch_together(remote, lambda checkpoint: f"{folder}/{checkpoint.name}", folder=folder)
    if found is not None:
        accelerator.load_state(f"{folder}/{found[0].name}")
    first_step = found[0].step + 1 if found is not None else 1
    rank, world_size = accelerator.process_index, accelerator.num_processes
    with Uploader(folder, remote, rank=rank, world_size=world_size, launch_id=launch_id()) as uploader:
        for step in range(first_step, num_steps + 1):
            accelerator.backward(model(x)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            saved = accelerator.save_state(f"{folder}/step-{step}")
            uploader.enqueue(saved, step, files=files_of_rank(saved, rank, world_size))
            uploader.seal(step)
    weights = accelerator.unwrap_model(model).state_dict()
    return {
        "first_step": first_step,
        "weights": {name: value.flatten().tolist() for name, value in weights.items()},
    }
