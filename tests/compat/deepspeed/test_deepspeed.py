"""The engine's `save_checkpoint` with ZeRO 1 and 3 on 2 ranks, and `files_of_rank`."""

from pathlib import Path

import pytest

from tests.compat.play import Job, ranks

SCRIPT = Path(__file__).with_name("train.py")


@pytest.mark.timeout(1800)  # on CPUs it compiles an extension at its first start
@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_killed_run_goes_on_on_a_fresh_node(job: Job, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # looked for when deepspeed is imported
    job.check_kill_and_resume([*ranks(2), SCRIPT, stage])
