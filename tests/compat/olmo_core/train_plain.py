"""OLMo-core's Trainer, which knows nothing of ckpt_async: `train_plain.py sync|async NODE REMOTE`."""

import sys
from pathlib import Path
from typing import Any

from olmo_core.distributed.utils import get_rank
from olmo_core.train import prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import Callback, CheckpointerCallback

from tests.compat.beside import say_left, say_resumed, say_saved, say_step
from tests.compat.olmo_core.train import Losses, trainer_of

STEPS = 60


class Says(Callback):
    priority = -200  # after the callback that saves the config

    def post_checkpoint_saved(self, path: Any) -> None:
        if get_rank() == 0:
            say_saved(Path(path))

    def post_checkpoint_loaded(self, path: Any) -> None:
        if get_rank() == 0:
            say_resumed(self.step)


def main(mode: str, node: str, _remote: str) -> None:
    prepare_training_environment(backend="cpu:gloo", shared_filesystem=True)
    # It rotates away the ephemeral checkpoints, and those beyond `max_checkpoints`.
    checkpointer = CheckpointerCallback(
        save_interval=10, ephemeral_save_interval=5, max_checkpoints=2, save_async=mode == "async"
    )
    trainer = trainer_of(node, STEPS, checkpointer)
    trainer.add_callback("says", Says())
    trainer.add_callback("losses", Losses(say_step))
    if get_rank() == 0:
        say_left(Path(node, "checkpoints"))
    trainer.fit()
    teardown_training_environment()


if __name__ == "__main__":
    main(*sys.argv[1:])
