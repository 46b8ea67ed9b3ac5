"""The ranks of a job, for tests: forks of one process that has imported torch for all of them.

A test calls `run_ranks(SCRIPT, 3, folder)`; the script calls `become_ranks(3)` once it has imported what it needs.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(script: Path, world_size: int, folder: Path, *, timeout_s: float = 180) -> None:
    """Run `python SCRIPT WORLD_SIZE FOLDER`. Fails with its output unless all ranks exit with 0 in time."""
    ranks = subprocess.Popen(
        [sys.executable, str(script), str(world_size), str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = ranks.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have exited
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    assert ranks.returncode == 0, output


def become_ranks(world_size: int) -> int:
    """Fork a process for each rank and return its number there. The parent waits for all of them, and exits with 1 if
    any has failed.
    """
    pids = []
    for rank in range(world_size):
        if (pid := os.fork()) == 0:
            return rank
        pids.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(any(codes))
