"""Ranks that are killed again and again, and keep their checkpoints on a real SFTP server."""

import random
from pathlib import Path

from ckpt_async.core.model import CheckpointId
from tests.faults.oracle import Oracle, heard
from tests.faults.processes import Nursery, Trainer

WORLD_SIZE = 2
SETTINGS = {
    "decision_poll_s": 0.05,
    "close_grace_s": 0.0,
    "retry_initial_s": 0.01,
    "retry_max_s": 0.1,
    "num_checkpoints_to_keep": 1,
}


def test_ranks_that_are_killed_lose_nothing_on_an_sftp_server(
    nursery: Nursery, tmp_path: Path, sftp_url: str, sftp_server, seed: int
) -> None:
    """No write has a condition there, so rank 0 alone decides: what all ranks had sealed is committed all the same, and
    no half checkpoint is ever to be seen.
    """
    remote, oracle, random_ = f"{sftp_url}/run", Oracle(f"{sftp_url}/run", WORLD_SIZE), random.Random(seed)
    sealed: list[set[CheckpointId]] = [set() for _ in range(WORLD_SIZE)]

    def start(number: int, steps: list[int]) -> list[Trainer]:
        environment = sftp_server.environment() | {"CKPT_ASYNC_LAUNCH_ID": f"start-{number}"}
        return [
            nursery.start(
                "saves",
                environment,
                folder=str(tmp_path / "folder"),
                remote=remote,
                rank=rank,
                world_size=WORLD_SIZE,
                steps=steps,
                train_s=0.1,
                settings=SETTINGS,
            )
            for rank in range(WORLD_SIZE)
        ]

    for number in range(6):
        trainers = start(number, [1, 2, 3])
        for trainer in trainers if number < 4 else ():  # rank 1 opens only when rank 0 has
            trainer.expect("opened")
        for rank in random_.sample(range(WORLD_SIZE), WORLD_SIZE):
            trainers[rank].listen(random_.uniform(0.0, 1.5))
            trainers[rank].kill()
        for rank, trainer in enumerate(trainers):
            sealed[rank] |= heard(trainer.said, "sealed")
        oracle.look()
    trainers = start(9, [])
    for trainer in trainers:
        trainer.expect("saved")
    wanted = sealed[0] & sealed[1]
    assert wanted, "the kills came too early"
    for _ in range(300):
        if wanted <= oracle.look() | oracle.aborted:
            break
        trainers[0].listen(0.1)
    assert wanted <= oracle.committed, "sealed by all ranks, yet lost"
    for trainer in trainers:
        trainer.tell("stop")
        assert trainer.finish() == 0, trainer.log.read_text()
    assert oracle.latest == max(oracle.committed)
