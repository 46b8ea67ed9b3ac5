"""A launch that is repeated with the same launch key after some of its ranks died before they opened."""

from pathlib import Path

import pytest

from ckpt_async.core.model import CheckpointId
from tests.faults.oracle import Oracle
from tests.faults.processes import Nursery, Trainer


@pytest.mark.fault("F33")
@pytest.mark.parametrize("runner", ["thread", "process"])
def test_ranks_with_a_reused_launch_key_share_one_new_generation(
    nursery: Nursery, tmp_path: Path, runner: str
) -> None:
    """R5: a place that a dead rank never took used to be mistaken for one in the new launch. That left two
    generations, neither of which ever committed anything, and exit code 0. With `process`, the dead
    trainer's engine goes on for a while.
    """
    remote, promised = f"file://{tmp_path}/remote", set()

    def start(rank: int) -> Trainer:
        return nursery.start(
            "saves",
            {"CKPT_ASYNC_LAUNCH_ID": "always the same"},
            folder=str(tmp_path / f"node-{rank}"),
            remote=remote,
            rank=rank,
            world_size=2,
            steps=[],
            settings={"decision_poll_s": 0.05, "decision_poll_max_s": 0.5, "runner": runner},
        )

    for attempt, dies_early in enumerate((1, 0, 1)):
        alone = start(1 - dies_early)
        alone.expect(f"opened {2 * attempt + 1}")
        alone.tell("save 1")
        alone.expect("done save 1")
        alone.kill()
        whole = [start(dies_early), start(1 - dies_early)]  # the rank whose place is still free comes first
        assert {each.expect("opened") for each in whole} == {f"opened {2 * attempt + 2}"}
        for each in whole:
            each.tell("save 1")
            each.tell("wait 1")
        for each in whole:
            each.expect("done wait 1")
            each.kill()
        promised.add(CheckpointId(2 * attempt + 2, 1))
    assert Oracle(remote, 2).look() == promised


@pytest.mark.fault("F35")
@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_start_that_can_never_commit_exits_with_an_error(
    nursery: Nursery, tmp_path: Path, runner: str
) -> None:
    """Otherwise the job ends with exit code 0 and without a checkpoint. A rank that is only late gets a warning."""
    settings = {"runner": runner, "close_grace_s": 1.0, "decision_poll_s": 0.05, "decision_poll_max_s": 0.2}

    def start(name: str, rank: int, launch: str, *steps: int, **more: str) -> Trainer:
        return nursery.start(
            "saves",
            {"CKPT_ASYNC_LAUNCH_ID": launch},
            folder=str(tmp_path / f"{name}-{launch}-{rank}"),
            remote=f"file://{tmp_path}/{name}",
            rank=rank,
            world_size=2,
            steps=steps,
            settings=settings | more,
        )

    alone = start("alone", 0, "a", 3, 4)
    warned = start("warned", 0, "a", 3, 4, on_error="warn")
    waiting, fenced = (start(name, 0, "a", 3, 4) for name in ("late", "fenced"))
    others = [start(name, 1, "a") for name in ("late", "fenced")]
    for each in (alone, warned, waiting, fenced, *others):
        each.expect("opened 1")
    for each in (alone, warned, waiting):
        each.expect("saved")
        each.tell("stop")
    start("fenced", 0, "b").expect("opened 2")
    fenced.expect("saved")
    fenced.tell("stop")

    nothing = "nothing of generation 1 was committed, although this rank sealed steps 3, 4"
    told = [
        (alone, 1, f"UploadFailedError: {nothing}: rank 1 never opened it"),
        (warned, 0, f"ERROR closed_without_commit error={nothing}: rank 1 never opened it"),
        (waiting, 0, "WARNING closed_with_unfinished steps=[3, 4]"),
        (fenced, 1, f"FencedError: {nothing}: generation 2 of this run has started"),
    ]
    for trainer, exit_code, text in told:
        assert trainer.finish() == exit_code, trainer.log.read_text()
        assert text in trainer.log.read_text()
    assert "closed_without_commit" not in waiting.log.read_text()
