"""What the trainers of test_failures.py do."""

import logging
from pathlib import Path
from typing import Any

from olmo_core.distributed.utils import get_rank
from olmo_core.train.callbacks import Callback

from ckpt_async.errors import CheckpointAbortedError
from tests.compat.olmo_core.train import train as _train
from tests.integrations.stage import tell

STEPS = 30


class Disturbance(Callback):
    """Interferes between the save of step 20 and our callback, on rank 1."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind

    def post_checkpoint_saved(self, path: Any) -> None:
        if Path(path).name == "step20" and get_rank() == 1:
            if self.kind == "deletes":
                Path(path, "train", "rank1.pt").unlink()
            elif self.kind == "raises":
                raise RuntimeError("somebody else's callback has failed")


class Watch(Callback):
    """Reports the end of each step, and finally what became of step 20."""

    priority = -200

    def __init__(self, tells_steps: bool) -> None:
        self.tells_steps = tells_steps
        self.fate = ""

    def post_train_batch(self) -> None:
        if self.tells_steps:
            tell(self.step)

    def pre_train(self) -> None:
        self.uploader = self.trainer.callbacks["ckpt_async"].uploader

    def close(self) -> None:
        try:
            self.fate = "committed" if self.uploader.is_committed(20) else "open"
        except CheckpointAbortedError as error:
            self.fate = str(error)


def train(
    node: str,
    remote: str,
    world_size: int,
    *,
    disturbance: str | None = None,
    tells_steps: bool = False,
    save_async: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    logging.basicConfig(level=logging.INFO)
    watch = Watch(tells_steps)
    return _train(
        node,
        remote,
        lambda step, loss: None,
        steps=STEPS,
        save_async=save_async,
        others={"disturbance": Disturbance(disturbance), "watch": watch},
        **settings,
    ) | {"fate": watch.fate}
