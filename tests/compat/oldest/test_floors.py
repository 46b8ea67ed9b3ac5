"""The suite's core at the oldest versions that pyproject.toml allows."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_core_passes_at_the_floors() -> None:
    folders = ("core", "protocol", "engine", "transfer", "local", "events", "runners", "trainer")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            "loadfile",
            *(f"tests/{each}" for each in folders),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
