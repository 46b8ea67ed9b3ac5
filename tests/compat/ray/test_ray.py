"""Ray Train's `TorchTrainer` with 2 workers: the node is lost; one worker after the other is SIGKILLed.

The number of workers killed is CKPT_ASYNC_PLAY_KILLS (3).
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
        monkeypatch.setenv("RAY_worker_niceness", "0")  # otherwise a busy machine has no time for the workers
        # A busy machine may take more than a minute to import torch.
        monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
        monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # Ray takes one report per check
        yield


def test_a_killed_run_goes_on_on_a_fresh_node(job: Job) -> None:
    job.check_kill_and_resume([sys.executable, SCRIPT, "60", "SYNC", "0"])


@pytest.mark.timeout(300 + 120 * KILLS)
def test_killed_workers_never_leave_a_partial_checkpoint(job: Job) -> None:
    """Ray's issue 41700: at each launch, everything that Ray has registered is compared with what was
    written, by SHA-256, and the losses show that no states were mixed. The group may fail as often as it
    was killed, and not once more.
    """
    command = [sys.executable, SCRIPT, str(100 + 30 * KILLS), "ASYNC", str(KILLS)]
    undisturbed = job.start(command, "undisturbed", f"{job.remote}/undisturbed").finish()
    training, num_killed, target = job.start(command, "killed"), 0, -1
    for step in training:
        if target < 0:
            target = step + random.randrange(30)  # reports come every 5 steps
        workers = [pid for pid in training.processes() if _is_worker(pid)] if step >= target else []
        if num_killed < KILLS and len(workers) == 2:
            time.sleep(random.random())  # anywhere within a step, a save, an upload or a report
            os.kill(random.choice(workers), signal.SIGKILL)
            num_killed, target = num_killed + 1, -1
            print(f"killed {num_killed} of {KILLS}, at step {step}", file=sys.stderr, flush=True)
    assert training.process.wait(120) == 0, training.tail()
    assert num_killed == KILLS, training.tail()
    assert training.losses == undisturbed
    checked = [int(line.split()[1]) for line in training.said if line.startswith("CHECKED ")]
    print(f"{sum(checked)} checkpoints compared in {len(checked)} looks", file=sys.stderr)
    assert len(checked) == KILLS + 2, "a look at every launch, and at the end"
    assert checked[-1] >= 2
    assert sum(checked) >= KILLS


def _is_worker(pid: int) -> bool:
    try:
        return b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
