"""Two replicas on gloo, each SIGKILLed once and healed by the other; then all of it is killed, and loses its node."""

import sys
from pathlib import Path

from tests.compat.play import Job

SCRIPT = Path(__file__).with_name("train.py")


def test_a_killed_run_goes_on_on_a_fresh_node(job: Job) -> None:
    job.check_kill_and_resume([sys.executable, SCRIPT])
