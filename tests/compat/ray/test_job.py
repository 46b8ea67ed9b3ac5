"""deploy/ray/submit.sh: a Ray job whose driver is SIGKILLed is submitted again, and goes on."""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_async import restore

ROOT = Path(__file__).resolve().parents[3]
MARK = "CKPT_ASYNC_RAY_PLAY"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    """A cluster of its own, which ends with all its processes; yields the environment by which it is found."""
    dashboard, mark = free_port(), secrets.token_hex(8)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        MARK: mark,
    }
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        start = ["ray", "start", "--head", f"--port={free_port()}", f"--dashboard-port={dashboard}"]
        start += [
            "--dashboard-host=127.0.0.1",
            f"--temp-dir={folder}",
            "--num-cpus=2",
            "--disable-usage-stats",
        ]
        try:
            subprocess.run(start, env=environment, check=True, capture_output=True, timeout=120)
            yield environment
        finally:
            while pids := [
                pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if has(pid, mark)
            ]:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def has(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def test_a_job_whose_driver_is_killed_is_submitted_again_and_goes_on(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    remote = f"file://{tmp_path}/remote"
    code = tmp_path / "code"
    code.mkdir()
    (code / "job.py").write_text(Path(__file__).with_name("job.py").read_text())
    done = subprocess.run(
        [ROOT / "deploy/ray/submit.sh", code, sys.executable, "job.py", tmp_path / "folder", remote],
        # A cluster that has just started refuses the first tries.
        env=cluster | {"TRIES": "10", "PAUSE_S": "3"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 10 failed: once more" in done.stderr
    firsts = dict.fromkeys(int(each) for each in re.findall(r"^FIRST (\d+)$", done.stdout, re.MULTILINE))
    assert list(firsts) == [1, 16]
    found = restore.find(remote)
    assert found is not None
    assert found.step == 30
