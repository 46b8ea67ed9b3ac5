"""OLMo's `Trainer` on 1, 2 and 4 ranks, FSDP with sharded checkpoints, DDP with full ones; all five checkpointers."""

import math
import sys
from pathlib import Path

import pytest

from tests.compat.play import Job

SCRIPT = Path(__file__).with_name("train.py")
FIVE = Path(__file__).with_name("five.py")


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_killed_run_goes_on_on_a_fresh_node(job: Job, strategy: str) -> None:
    kind = "unsharded" if strategy == "ddp" else None
    job.check_kill_and_resume([sys.executable, SCRIPT, strategy, "2", "0.1", "100"], kind=kind)


@pytest.mark.parametrize(("strategy", "numbers"), [("fsdp", (2, 4, 2)), ("ddp", (2, 4, 1))])
def test_it_goes_on_with_other_numbers_of_ranks(job: Job, strategy: str, numbers: tuple[int, ...]) -> None:
    """There is no dropout, whose random numbers are each rank's own. (On one rank FSDP takes no sharded state.)"""
    command = [sys.executable, SCRIPT, strategy]
    expected = job.start([*command, "2", "0", "30"], "whole", f"{job.remote}/whole").finish()
    for number, ranks in enumerate(numbers):
        first, last = 10 * number + 1, 10 * number + 10
        losses = job.start([*command, str(ranks), "0", str(last)], f"node-{number}").finish()
        assert sorted(losses) == list(range(first, last + 1))
        for step, loss in losses.items():  # they are means of a different number of parts
            assert math.isclose(float.fromhex(loss), float.fromhex(expected[step]), rel_tol=1e-4), step


def test_each_of_the_five_checkpointers_saves_and_gets_back_what_it_saved(job: Job) -> None:
    job.start([sys.executable, FIVE], "node").finish()
