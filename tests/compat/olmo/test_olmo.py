"""OLMo's `Trainer` on 2 ranks: FSDP with sharded checkpoints, DDP with full ones; all five checkpointers."""

import sys
from pathlib import Path

import pytest

from tests.compat.play import Job

SCRIPT = Path(__file__).with_name("train.py")
FIVE = Path(__file__).with_name("five.py")


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_killed_run_goes_on_on_a_fresh_node(job: Job, strategy: str) -> None:
    kind = "unsharded" if strategy == "ddp" else None
    job.check_kill_and_resume([sys.executable, SCRIPT, strategy], kind=kind)


def test_each_of_the_five_checkpointers_saves_and_gets_back_what_it_saved(job: Job) -> None:
    job.start([sys.executable, FIVE], "node").finish()
