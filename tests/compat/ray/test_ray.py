"""Ray Train's `TorchTrainer` with 2 workers: the node is lost; one worker after the other is SIGKILLed.

The number of workers killed is CKPT_ASYNC_PLAY_KILLS (3): 50 take a quarter of an hour.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.play import Job

SCRIPT = Path(__file__).with_name("train.py")
KILLS = int(os.environ.get("CKPT_ASYNC_PLAY_KILLS", "3"))


@pytest.fixture(autouse=True)
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The paths of Ray's sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        monkeypatch.setenv("RAY_PLAY_FOLDER", folder)
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # it takes one report per look
        yield


def test_a_killed_run_goes_on_on_a_fresh_node(job: Job) -> None:
    job.check_kill_and_resume([sys.executable, SCRIPT, "150", "SYNC"])


@pytest.mark.timeout(120 + 60 * KILLS)
def test_killed_workers_never_leave_a_partial_checkpoint(job: Job) -> None:
    """Ray's issue 41700. Each group resumes from a commit, and the losses say that no state was mixed."""
    command = [sys.executable, SCRIPT, str(100 + 40 * KILLS), "ASYNC"]
    training = job.start(command, "killed")
    num_killed, wait_s, since = 0, random.random(), time.monotonic()
    committed = -1
    for _ in training:
        if num_killed == KILLS or time.monotonic() < since + wait_s:
            continue
        if (newest := job.committed()) > committed or num_killed == 0:
            workers = [pid for pid in training.processes() if _is_worker(pid)]
            if len(workers) == 2:
                os.kill(random.choice(workers), signal.SIGKILL)
                num_killed += 1
                committed = newest
                wait_s, since = random.random(), time.monotonic()
    assert training.process.wait(120) == 0, training.tail()
    assert num_killed == KILLS, training.tail()
    undisturbed = job.start(command, "undisturbed", f"{job.remote}/undisturbed").finish()
    assert training.losses == undisturbed


def _is_worker(pid: int) -> bool:
    try:
        return b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
