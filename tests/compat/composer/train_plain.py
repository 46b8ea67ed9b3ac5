"""A Composer Trainer, which knows nothing of ckpt_async: `train_plain.py file|sharded NODE REMOTE`."""

import os
import re
import sys
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from composer.core import Callback
from composer.utils import dist

from tests.compat.beside import FOLDER, say_left, say_resumed, say_saved, say_step
from tests.compat.composer.train import Model, trainer_of

STEPS = 60


class Says(Callback):
    """Reports before the saver rotates, because Composer's own saver runs after the callbacks given to the Trainer."""

    def __init__(self, is_sharded: bool) -> None:
        self._is_sharded = is_sharded
        self._said: str | None = None

    def fit_start(self, state: Any, logger: Any) -> None:
        self.say_resumed(state)

    def say_resumed(self, state: Any) -> None:
        if state.timestamp.batch.value and dist.get_global_rank() == 0:
            say_resumed(state.timestamp.batch.value)

    def batch_end(self, state: Any, logger: Any) -> None:
        self.say_saved(state)
        if dist.get_global_rank() == 0:
            say_step(state.timestamp.batch.value, float(state.loss))

    def say_saved(self, state: Any) -> None:
        """Report what was saved after an earlier batch."""
        (saver,) = (each for each in state.callbacks if type(each).__name__ == "CheckpointSaver")
        if saver.saved_checkpoints and saver.saved_checkpoints[-1] != self._said:
            self._said = saver.saved_checkpoints[-1]
            if dist.get_global_rank() == 0:
                path = Path(self._said)
                say_saved(path.parent if self._is_sharded else path)


def newest(folder: Path) -> str | None:
    """Return the newest complete checkpoint. Composer's own link may lead to the one before it; a complete file would
    then be overwritten in place, which watch refuses.
    """
    whole = {
        int(match[1]): path
        for path in folder.glob("ep*")
        if (match := re.search(r"-ba(\d+)", path.name))
        and (is_zipfile(path) or (path / ".metadata").exists())
    }
    return str(whole[max(whole)]) if whole else None


def main(mode: str, node: str, _remote: str) -> None:
    os.environ.setdefault("NODE_RANK", "0")  # as Composer's own launcher does
    dist.initialize_dist("cpu", 120.0)
    is_sharded, folder = mode == "sharded", Path(node, FOLDER)
    if is_sharded:  # Composer needs a GPU only for its number
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if dist.get_global_rank() == 0:
        say_left(folder)
    torch.manual_seed(1)
    says = Says(is_sharded)
    trainer = trainer_of(
        Model(),
        f"{STEPS}ba",
        save_folder=str(folder),
        save_interval="5ba",
        save_num_checkpoints_to_keep=2,
        save_overwrite=True,
        load_path=newest(folder),
        callbacks=[says],
        **({"parallelism_config": {"fsdp": {"state_dict_type": "sharded"}}} if is_sharded else {}),
    )
    if trainer.state.timestamp.batch.value < STEPS:
        trainer.fit()
        says.say_saved(trainer.state)
    else:
        says.say_resumed(trainer.state)
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
