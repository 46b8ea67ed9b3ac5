"""`ckpt-async watch` beside torchtitan's own CheckpointManager, `disabled` and `async`; both are killed."""

from pathlib import Path

import pytest

from tests.compat.beside import check_watched
from tests.compat.play import Job, ranks
from tests.compat.torchtitan.train_plain import STEPS

SCRIPT = Path(__file__).with_name("train_plain.py")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_the_trainer_saved_is_in_the_store(job: Job, mode: str) -> None:
    check_watched(job, [*ranks(2), SCRIPT, mode], num_steps=STEPS)
