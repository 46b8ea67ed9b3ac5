"""OLMo's own Trainer, which knows nothing of ckpt_async: `train_plain.py fsdp|ddp NODE REMOTE`."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from olmo.checkpoint import RemoteFileSystemReader
from olmo.train import Trainer

from tests.compat.beside import FOLDER, say_left, say_resumed, say_saved, say_step
from tests.compat.olmo.tiny import start_ranks
from tests.compat.olmo.train import trainer_of

STEPS = 60

# OLMo reads as torch did before 2.6, and lacks two methods that torch 2.3 has added, which would have nothing
# to do.
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
RemoteFileSystemReader.__abstractmethods__ = frozenset()


class Saying(Trainer):
    def log_metrics_to_console(self, prefix: str, metrics: dict[str, float]) -> None:
        if "train/CrossEntropyLoss" in metrics:
            say_step(self.global_step, metrics["train/CrossEntropyLoss"])

    def save_checkpoint(self, *args: Any, **options: Any) -> Any:
        saved = super().save_checkpoint(*args, **options)
        if dist.get_rank() == 0:
            say_saved(Path(saved[0]))
        return saved


def newest(folder: Path) -> Path | None:
    """Return the newest folder that was renamed into place, as OLMo's own `find_latest_checkpoint` does."""
    there = {
        int(match[1]): path
        for path in folder.glob("step*")
        if (match := re.fullmatch(r"step(\d+)(-unsharded)?", path.name))
    }
    return there[max(there)] if there else None


def main(strategy: str, node: str, _remote: str) -> None:
    start_ranks(2)
    folder = Path(node, FOLDER)
    load_path = newest(folder)
    if dist.get_rank() == 0:
        say_left(folder)
    dist.barrier()
    with trainer_of(
        Saying, strategy, node, None, ranks=2, steps=STEPS, interval=5, save_overwrite=True
    ) as trainer:
        if load_path is not None:
            trainer.restore_checkpoint(str(load_path))
            if dist.get_rank() == 0:
                say_resumed(trainer.global_step)
        if trainer.global_step < STEPS:
            trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
