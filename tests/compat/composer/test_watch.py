"""`ckpt-async watch` beside Composer's Trainer, one file or sharded; both are killed."""

from pathlib import Path

import pytest

from tests.compat.beside import check_watched
from tests.compat.play import Job, ranks

SCRIPT = Path(__file__).with_name("train_plain.py")
STEPS = 60


@pytest.mark.parametrize("mode", ["file", "sharded"])
def test_what_the_trainer_saved_is_in_the_store(job: Job, mode: str) -> None:
    check_watched(job, [*ranks(2), SCRIPT, mode], num_steps=STEPS)
