"""Real trainers, unmodified, with `ckpt-async run` around them: what they wrote comes back as it was."""

import sys
from pathlib import Path

import pytest
import torch

from ckpt_async import restore
from tests.watch.conftest import Place, hashes

pytestmark = pytest.mark.timeout(180)


def run(place: Place, script: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name(script)), str(place.out)]
    watching = place.watch("--", *command, command="run", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    ended = watching.until("ended")
    assert watching.process.wait(60) == 0, (ended["refused"], watching.errors())
    assert (ended["refused"], ended["incomplete"], ended["unfinished"]) == ({}, {}, [])


def test_transformers_s_checkpoints_are_in_the_store_also_the_rotated_ones(place: Place) -> None:
    run(place, "train_transformers.py")
    there = {int(path.name.partition("-")[2]): hashes(path) for path in place.out.glob("checkpoint-*")}
    assert sorted(there) == [8, 12], "the first was rotated away"
    assert {step: place.committed(step) for step in there} == there
    rotated = place.committed(4)
    assert rotated is not None
    assert rotated.keys() == there[12].keys()


def test_lightning_s_checkpoints_are_in_the_store(place: Place) -> None:
    """`last.ckpt` is of a step that is there already."""
    run(place, "train_lightning.py")
    for step in (4, 8, 12):
        name = f"epoch=0-step={step}.ckpt"
        found = restore.find(place.remote, step=step)
        assert found is not None
        report = restore.fetch(found, place.here / f"fetched-{step}")
        (path,) = report.paths.values()
        assert path.read_bytes() == (place.out / name).read_bytes()
        assert (found.generation, torch.load(path, weights_only=False)["global_step"]) == (1, step)
