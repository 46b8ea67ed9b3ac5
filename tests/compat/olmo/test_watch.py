"""`ckpt-async watch` beside OLMo's own Trainer, FSDP and DDP; both are killed."""

import sys
from pathlib import Path

import pytest

from tests.compat.beside import check_watched
from tests.compat.play import Job

SCRIPT = Path(__file__).with_name("train_plain.py")
STEPS = 60


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_what_the_trainer_saved_is_in_the_store(job: Job, strategy: str) -> None:
    check_watched(job, [sys.executable, SCRIPT, strategy], num_steps=STEPS)
