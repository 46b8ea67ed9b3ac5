"""`CheckpointManager` with FSDP on 2 ranks: `disabled` and `async`. The Trainer itself needs an accelerator."""

from pathlib import Path

import pytest

from tests.compat.play import Job, ranks

SCRIPT = Path(__file__).with_name("train.py")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_killed_run_goes_on_on_a_fresh_node(job: Job, mode: str) -> None:
    job.check_kill_and_resume([*ranks(2), SCRIPT, mode])
