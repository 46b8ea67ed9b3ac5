"""torchtitan's own CheckpointManager, which knows nothing of ckpt_async: `train_plain.py MODE NODE REMOTE`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpointer.dcp import CheckpointManager

from tests.compat.beside import FOLDER, say_left, say_resumed, say_saved, say_step
from tests.compat.torchtitan.train import train

STEPS, INTERVAL = 60, 5


def main(mode: str, node: str, _remote: str) -> None:
    config = CheckpointManager.Config(
        enable=True,
        folder=FOLDER,
        interval=INTERVAL,
        keep_latest_k=2,
        async_mode=mode,
        last_save_model_only=False,
    )
    if os.environ["RANK"] == "0":
        say_left(Path(node, FOLDER))
    said = 0

    def saved(manager: Any, step: int) -> None:
        nonlocal said
        if step % INTERVAL == INTERVAL - 1 or step == STEPS:  # before the next one is saved
            manager.maybe_wait_for_saving()
        newest, future = step - step % INTERVAL, manager.save_future
        if newest > said and (future is None or future.done()):
            said = newest
            if dist.get_rank() == 0:
                say_saved(Path(node, FOLDER, f"step-{newest}"))

    def begun(step: int) -> None:
        nonlocal said
        said = step
        if step and dist.get_rank() == 0:
            say_resumed(step)

    train(config, node, STEPS, say_step, begun, saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
