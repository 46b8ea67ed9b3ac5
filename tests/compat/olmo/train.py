"""OLMo's Trainer as docs/integrations.md shows it. `python train.py fsdp|ddp RANKS DROPOUT STEPS NODE REMOTE`."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo.data.iterable_dataset import IterableDataset
from olmo.model import OLMo
from olmo.optim import build_optimizer, build_scheduler
from torch.utils.data import DataLoader

from ckpt_async.integrations.olmo import Trainer, find_latest_checkpoint
from tests.compat.olmo.tiny import LENGTH, VOCABULARY, config, start_ranks, wrapped
from tests.compat.play import say_loss

MOST_STEPS, BATCH = 100, 8

# OLMo's trainer saves the random number generators of CUDA, and there is no CUDA here.
torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
torch.cuda.set_rng_state = lambda state: None  # type: ignore[assignment,misc]


class SayingTrainer(Trainer):
    def log_metrics_to_console(self, prefix: str, metrics: dict[str, float]) -> None:
        if "train/CrossEntropyLoss" in metrics:
            say_loss(self.global_step, metrics["train/CrossEntropyLoss"])


def trainer_of(
    kind: Any,
    strategy: str,
    node: str,
    remote: str | None,
    *,
    ranks: int,
    steps: int,
    dropout: float = 0.1,
    interval: int = 10,
    **more: Any,
) -> Any:
    """Return, in each rank, a trainer that saves below NODE/checkpoints."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    is_ddp = strategy == "ddp"
    cfg = config(
        f"{node}/checkpoints",
        remote,
        is_ddp=is_ddp,
        dropout=dropout,
        global_train_batch_size=BATCH,
        device_train_batch_size=BATCH // ranks,
        device_train_microbatch_size=BATCH // ranks,
        device_train_grad_accum=1,
        max_duration=steps,
        stop_at=steps,  # otherwise OLMo continues for 10 more
        console_log_interval=1,
        eval_interval=10**6,
        save_interval=interval,
        save_num_checkpoints_to_keep=2,
        save_interval_unsharded=interval if is_ddp else None,
        save_num_unsharded_checkpoints_to_keep=2,
        **more,
    )
    Path(cfg.save_folder).mkdir(parents=True, exist_ok=True)
    model = OLMo(cfg.model)
    dist_model = wrapped(model, is_ddp=is_ddp)
    numbers = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (BATCH * (MOST_STEPS + 1), LENGTH), generator=numbers)
    samples: Any = [{"input_ids": sample} for sample in tokens]
    data = IterableDataset(samples, BATCH, num_threads=0)
    # A loader draws a random number when it starts, after the checkpoint's generators were restored; this one
    # draws from its own generator.
    loader = DataLoader(data, BATCH // ranks, drop_last=True, generator=torch.Generator())
    return kind(
        cfg=cfg,
        epoch=0,
        model=model,
        dist_model=dist_model,
        optim=build_optimizer(cfg, dist_model),
        scheduler=build_scheduler(cfg),
        train_loader=loader,
        device=torch.device("cpu"),
        evaluators=[],
    )


def main(strategy: str, ranks: str, dropout: str, steps: str, node: str, remote: str) -> None:
    start_ranks(int(ranks))
    sizes: dict[str, Any] = {"ranks": int(ranks), "dropout": float(dropout), "steps": int(steps)}
    with trainer_of(SayingTrainer, strategy, node, remote, **sizes) as trainer:
        if (load_path := find_latest_checkpoint(remote)) is not None:
            trainer.restore_checkpoint(load_path)
        trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
