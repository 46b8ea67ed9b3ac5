"""Training on a GPU that is killed again and again goes on bit for bit, and loses nothing that was saved."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_BATCHES = 40


def launch(folder: Path, *options: str, kill_after: int | None = None) -> Iterator[list[str]]:
    """Yield what it tells, line by line; SIGKILL it after so many lines."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.gpu.train",
        f"{folder}/local",
        f"file://{folder}/remote",
    ]
    with subprocess.Popen(
        [*command, str(NUM_BATCHES), *options], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for number, line in enumerate(child.stdout):
            if number == kill_after:
                child.kill()
                return
            if line.endswith("\n"):
                yield line.split()
    assert child.returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        ["map_location=cpu"],
        ["map_location=cuda"],
        ["suffix=tar.gz", "runner=process"],
        ["sharded=1", "backend=nccl"],
        ["sharded=1", "backend=cpu:gloo,cuda:nccl"],
    ],
    ids="-".join,
)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "killed").mkdir()
    expected = [words for words in launch(tmp_path / "alone", *options) if words[0] == "loss"]
    assert len(expected) == NUM_BATCHES
    losses: dict[str, str] = {}
    newest, chance, is_over = 0, random.Random(str(options)), False
    for kill_after in [*(chance.randrange(3, 30) for _ in range(3)), None]:
        for what, batch, *loss in launch(tmp_path / "killed", *options, kill_after=kill_after):
            if what == "loss":
                assert losses.setdefault(batch, loss[0]) == loss[0], f"batch {batch} went otherwise"
            elif what == "saved":
                newest = max(newest, int(batch))
            else:
                assert int(batch) >= newest, "a saved checkpoint is lost"
        is_over = kill_after is None
    assert is_over
    assert [["loss", batch, loss] for batch, loss in losses.items()] == expected
