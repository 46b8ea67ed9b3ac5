"""`dist_checkpointing` with tensor parallelism on 2 gloo ranks, async and sync; resumed on 1, 2 and 4 ranks.

Two calls of CUDA are replaced: see train.py.
"""

import math
from pathlib import Path

import pytest

from tests.compat.play import Job, ranks

SCRIPT = Path(__file__).with_name("train.py")


@pytest.mark.parametrize("how", ["async", "sync"])
def test_a_killed_run_goes_on_on_a_fresh_node(job: Job, how: str) -> None:
    job.check_kill_and_resume([*ranks(2), SCRIPT, how, "2", "100"])


def test_it_goes_on_with_other_numbers_of_ranks(job: Job) -> None:
    whole = [*ranks(2), SCRIPT, "async", "2", "50"]
    expected = job.start(whole, "whole", f"{job.remote}/whole").finish()
    saved: list[str] = []
    for number, (count, tensor_parallel) in enumerate(((2, 2), (4, 2), (1, 1), (4, 4), (2, 1))):
        first, end = 10 * number, 10 * number + 10
        command = [*ranks(count), SCRIPT, "async", str(tensor_parallel), str(end)]
        training = job.start(command, f"node-{number}")
        losses = training.finish()
        assert sorted(losses) == list(range(first, end))
        for step, loss in losses.items():  # they are sums of a different number of parts
            assert math.isclose(float.fromhex(loss), float.fromhex(expected[step]), rel_tol=1e-4), step
        assert states(training.said, "loaded") == saved
        saved = states(training.said, "saved")


def states(said: list[str], what: str) -> list[str]:
    found = [line.split()[2:] for line in said if line.startswith(f"STATE {what} ")]
    return [" ".join(each) for each in found]
