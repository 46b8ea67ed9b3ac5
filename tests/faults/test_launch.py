"""A start that comes again with the same launch key, after some of its ranks had died before they opened."""

from pathlib import Path

import pytest

from ckpt_async.model import CheckpointId
from tests.faults.oracle import Oracle
from tests.faults.processes import Nursery, Trainer


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_all_ranks_of_a_start_are_in_one_generation_though_its_key_was_used_before(
    nursery: Nursery, tmp_path: Path, runner: str
) -> None:
    """R5: the free place that a dead rank never took was taken for this start's: two generations for ever, of which
    neither commits anything, and exit code 0. With `process`, the dead trainer's engine goes on for a while.
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
        whole = [start(dies_early), start(1 - dies_early)]  # whose place is free comes first
        assert {each.expect("opened") for each in whole} == {f"opened {2 * attempt + 2}"}
        for each in whole:
            each.tell("save 1")
            each.tell("wait 1")
        for each in whole:
            each.expect("done wait 1")
            each.kill()
        promised.add(CheckpointId(2 * attempt + 2, 1))
    assert Oracle(remote, 2).look() == promised
