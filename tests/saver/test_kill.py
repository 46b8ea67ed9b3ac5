"""A trainer that saves through `CheckpointSaver` is killed again and again: nothing that was saved is lost, and the run
goes on as if nothing had happened, bit for bit.
"""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async import restore
from ckpt_async import torch as ckpt
from tests.faults.processes import SOAK
from tests.saver.training import forked, train


class Oracle:
    """What trainers told: every loss of a batch is the same, and what was saved is never gone."""

    def __init__(self) -> None:
        self.losses: dict[int, str] = {}
        self.newest_saved = 0
        self.num_kills = 0

    def hear(self, line: str) -> None:
        what, batch, *loss = line.split()
        match what:
            case "loss":
                assert self.losses.setdefault(int(batch), loss[0]) == loss[0], f"batch {batch} went otherwise"
            case "saved":
                self.newest_saved = max(self.newest_saved, int(batch))
            case "resumed":
                assert int(batch) >= self.newest_saved, "a saved checkpoint is lost"


def lines(reading: int) -> Iterator[str]:
    with os.fdopen(reading) as file:
        yield from (line.strip() for line in file if line.endswith("\n"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    oracle = Oracle()
    pid, reading = forked(
        lambda tell: train(folder / "local", f"file://{folder}/remote", tell, num_batches=480)
    )
    for line in lines(reading):
        oracle.hear(line)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(oracle.losses) == 480
    return oracle.losses


@pytest.mark.parametrize(("num_kills", "num_batches"), [(3, 60), pytest.param(40, 480, marks=SOAK)])
@pytest.mark.parametrize(
    ("filename", "has_weights"),
    [
        ("ba{batch}.pt", False),
        ("ba{batch}.pt.zst", False),
        ("ba{batch}.tar.gz", False),
        ("ep{epoch}-ba{batch}-rank{rank}", False),
        ("ep{epoch}-ba{batch}-rank{rank}.pt", True),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path,
    filename: str,
    has_weights: bool,
    num_kills: int,
    num_batches: int,
    reference: dict[int, str],
) -> None:
    oracle, chance = Oracle(), random.Random(filename)
    folder, remote = tmp_path / "local", f"file://{tmp_path}/remote"
    while True:
        pid, reading = forked(
            lambda tell: train(
                folder, remote, tell, num_batches=num_batches, has_weights=has_weights, filename=filename
            )
        )
        # Killed at some line after it was resumed: within a step, a copy, a write, an upload.
        left = chance.randrange(2, 20) if oracle.num_kills < num_kills else -1
        for line in lines(reading):
            oracle.hear(line)
            left -= 1
            if left == 0:
                os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, "the trainer failed"
        oracle.num_kills += 1
    assert oracle.num_kills == num_kills
    assert oracle.losses == {batch: reference[batch] for batch in range(1, num_batches + 1)}
    full = newest(remote)
    assert full["batch"] == num_batches
    if has_weights:
        assert state_hash(newest(remote, kind="weights")["model"]) == state_hash(full["model"])


def newest(remote: str, **which: str) -> dict[str, Any]:
    checkpoint = restore.find(remote, **which)
    assert checkpoint is not None
    (name,) = checkpoint.files
    state: dict[str, Any] = ckpt.load_remote(checkpoint, name)
    return state


def state_hash(model: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: each.numpy().tobytes() for name, each in model.items()}


def test_sigterm_saves_the_step_that_training_is_at(tmp_path: Path) -> None:
    folder, remote = tmp_path / "local", f"file://{tmp_path}/remote"
    pid, reading = forked(
        lambda tell: train(
            folder, remote, tell, num_batches=10**9, save_interval="1000000ba", sigterm_flush_s=30
        )
    )
    batch = 0
    for line in lines(reading):
        what, number, *_ = line.split()
        if what == "loss":
            batch = int(number)
            if batch == 20:
                os.kill(pid, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    assert checkpoint.id.step >= 20
