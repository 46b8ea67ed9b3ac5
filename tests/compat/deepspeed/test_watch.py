"""`ckpt-async run` around DeepSpeed, which knows nothing of it: `latest` and every rank's files."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_async import restore
from tests.compat.play import ROOT, ranks

SCRIPT = Path(__file__).with_name("train_plain.py")


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


@pytest.mark.timeout(1800)  # on CPUs, DeepSpeed compiles an extension at its first start
@pytest.mark.parametrize("stage", ["1", "3"])
def test_an_unmodified_engine_s_checkpoints_are_in_the_store(tmp_path: Path, s3_url: str, stage: str) -> None:
    out = tmp_path / "out"
    watch = [sys.executable, "-m", "ckpt_async", "run", s3_url, "--folder", out, "--json"]
    done = subprocess.run(
        [*watch, "--settle-s", "0.2", "--", *ranks(2), SCRIPT, out, stage],
        env=os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    assert ended["refused"] == {}
    there = {int(path.name.removeprefix("global_step")): hashes(path) for path in out.glob("global_step*")}
    assert sorted(there) == [4, 8, 12]
    for step, written in there.items():
        found = restore.find(s3_url, step=step)
        if found is None:  # `latest` moved on before it was seen, and no longer names this step
            assert f"global_step{step}" in ended["incomplete"]
            assert step != 12
            continue
        assert len(written) >= 3, "the model states, and the optimizer's of two ranks"
        restore.fetch(found, tmp_path / f"fetched-{step}")
        assert hashes(tmp_path / f"fetched-{step}") == written


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", ["1", "3"])
def test_accelerate_s_saves_with_deepspeed_are_whole_in_the_store(
    tmp_path: Path, s3_url: str, stage: str
) -> None:
    """Of each, every rank's states and random states; never the engine's part as a checkpoint of its own."""
    out = tmp_path / "out"
    out.mkdir()
    watch = [sys.executable, "-m", "ckpt_async", "run", s3_url, "--folder", out, "--json", "--ranks", "2"]
    script = SCRIPT.with_name("train_accelerate.py")
    done = subprocess.run(
        [*watch, "--settle-s", "0.2", "--", *ranks(2), script, out, stage],
        env=os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    assert (ended["refused"], ended["incomplete"]) == ({}, {})
    for step in range(3):
        found = restore.find(s3_url, step=step)
        assert found is not None
        assert found.name == f"checkpoint_{step}"
        restore.fetch(found, tmp_path / f"fetched-{step}")
        written = hashes(out / "checkpoints" / found.name)
        assert len(written) >= 7
        assert hashes(tmp_path / f"fetched-{step}") == written
