"""OLMo-core's `Trainer` with FSDP on 2 gloo ranks and `CkptAsyncCallback`, saving asynchronously."""

from pathlib import Path

from tests.compat.play import Job, ranks

SCRIPT = Path(__file__).with_name("train.py")


def test_a_killed_run_goes_on_on_a_fresh_node(job: Job) -> None:
    job.check_kill_and_resume([*ranks(2), SCRIPT])
