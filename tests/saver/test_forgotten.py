"""Trainers that end without `close`, or by SIGTERM, while a save is being written."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_async import restore

# What takes long to write; until the uploader says that it will be closed at exit, or a second.
TRAINER = """
import logging, os, signal, sys, threading
from ckpt_async.saver import CheckpointSaver

closing = threading.Event()

class Watch(logging.Handler):
    def emit(self, record):
        closing.set()

class Slow:
    def __deepcopy__(self, memo):
        return self
    def __reduce__(self):
        closing.wait(timeout_s)
        return bytes, (b"7",)

logging.getLogger("ckpt_async.trainer.at_exit").addHandler(Watch())
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRAINER + script, str(folder / "local"), f"file://{folder}/remote"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_what_was_taken_is_written_and_uploaded_before_the_interpreter_exits(
    tmp_path: Path, end: str, code: int
) -> None:
    script = (
        "timeout_s = 60\nsaver = CheckpointSaver(*sys.argv[1:3], save_interval=None)\nsaver.save_now()\n"
        'saver.step({"a": Slow()}, 1)\n'
    )
    done = run(script + end, tmp_path)
    assert done.returncode == code, done.stderr
    found = restore.find(f"file://{tmp_path}/remote")
    assert found is not None, done.stderr
    assert list(found.files) == ["ep0-ba1-rank0.pt"]


def test_without_close_a_failed_save_is_logged_and_the_log_says_that_the_exit_code_stays(
    tmp_path: Path,
) -> None:
    script = (
        "timeout_s = 60\nlogging.basicConfig()\n"
        "saver = CheckpointSaver(*sys.argv[1:3], save_interval=None, fixed_steps=[1])\n"
        'saver.step({"a": Slow(), "b": lambda: 0}, 1)\n'
    )
    done = run(script, tmp_path)
    assert done.returncode == 0
    assert "save_failed checkpoint=ep0-ba1" in done.stderr
    (line,) = [each for each in done.stderr.splitlines() if "not_closed" in each]
    assert "with CheckpointSaver(...)" in line
    assert "no longer change the exit code" in line


def test_sigterm_saves_once_more_though_an_earlier_save_is_still_being_written(tmp_path: Path) -> None:
    script = """
timeout_s = 1
saver = CheckpointSaver(*sys.argv[1:3], save_interval=None, fixed_steps=[1], sigterm_flush_s=60)
for batch in range(1, 10**9):
    saver.step({"a": Slow()}, batch)
    if batch == 1:
        os.kill(os.getpid(), signal.SIGTERM)
"""
    done = run(script, tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    found = restore.find(f"file://{tmp_path}/remote")
    assert found is not None, done.stderr
    assert found.step > 1
