"""`ckpt-async watch` beside JAX and Orbax's `CheckpointManager` and `AsyncCheckpointer`; both are killed."""

import sys
from pathlib import Path

import pytest

from tests.compat.beside import check_watched
from tests.compat.play import Job

SCRIPT = Path(__file__).with_name("train.py")
STEPS = 60


@pytest.mark.parametrize("mode", ["manager", "sync", "commit_file", "checkpointer"])
def test_what_orbax_saved_is_in_the_store(job: Job, mode: str) -> None:
    check_watched(job, [sys.executable, SCRIPT, mode], num_steps=STEPS)
