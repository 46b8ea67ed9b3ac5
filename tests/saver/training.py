"""A training run whose loss curve tells whether it was resumed exactly: dropout, shuffled data, AdamW, a schedule.

`train` runs in a forked process and reports through a pipe, a line each: `loss BATCH HEX`, `saved BATCH`, `resumed
BATCH`.
"""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step: so it is here before the trainers are forked

import ckpt_async.runners.thread
import ckpt_async.stores.directory  # noqa: F401  likewise
import ckpt_async.torch as ckpt
from ckpt_async.saver import CheckpointSaver, SavedCheckpoint

SAVE_EVERY = 4


class Loader:
    """Shuffled batches of a data set, which can say where it is."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.data = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
        self.order, self.place = torch.empty(0, dtype=torch.int64), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self.place == len(self.order):
                self.order, self.place = torch.randperm(64, generator=self.generator), 0
            chosen = self.order[self.place : self.place + 8]
            self.place += 8
            yield self.data[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "order": self.order, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order, self.place = state["order"].clone(), state["place"]


class Trainer:
    """Everything that has a state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 16)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 60)
        self.loader = Loader()
        self.batch = 0

    def state(self) -> dict[str, Any]:
        parts = {
            name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler", "loader")
        }
        return {**parts, "rng": torch.get_rng_state(), "batch": self.batch}

    def load(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "scheduler", "loader"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["rng"])
        self.batch = state["batch"]

    def step(self, data: torch.Tensor) -> float:
        loss = torch.nn.functional.mse_loss(self.model(data), data)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.batch += 1
        return float(loss.detach())


def train(
    folder: Path,
    remote: str,
    tell: Callable[[str], object],
    *,
    num_batches: int,
    has_weights: bool = False,
    **options: Any,
) -> None:
    """From wherever it was to the end. `has_weights`: the weights are saved as well, more often, as a kind."""
    trainer = Trainer()
    options = {"save_interval": f"{SAVE_EVERY}ba", "decision_poll_s": 0.02, **options}

    def saved(checkpoint: SavedCheckpoint) -> None:
        tell(f"saved {checkpoint.step}")

    with contextlib.ExitStack() as stack:
        if has_weights:
            more_often = options | {"save_interval": f"{SAVE_EVERY // 2}ba"}
            weights = stack.enter_context(
                CheckpointSaver(folder, remote, kind="weights", weights_only=True, **more_often)
            )
        saver = stack.enter_context(
            CheckpointSaver(folder, remote, on_saved=saved, hooks_at_once=True, **options)
        )
        state = saver.load_latest(wait_s=60)
        if state is not None:
            trainer.load(state)
        tell(f"resumed {trainer.batch}")
        data = iter(trainer.loader)
        while trainer.batch < num_batches:
            tell(f"loss {trainer.batch + 1} {trainer.step(next(data)).hex()}")
            saver.step(trainer.state, trainer.batch)
            if has_weights:
                weights.step(trainer.state, trainer.batch)


def forked(work: Callable[[Callable[[str], object]], None]) -> tuple[int, int]:
    """Run `work` in a fork, which has torch loaded already; returns its pid and where its lines can be read."""
    for each in ckpt.__all__:
        getattr(ckpt, each)  # loaded here, not in each fork
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        torch.set_num_threads(1)
        work(lambda line: os.write(writing, f"{line}\n".encode()))
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)
    raise AssertionError
