"""Ranks as processes of their own that share nothing but the store: no collectives and no coordinator."""

import asyncio
from pathlib import Path

import pytest

from ckpt_async import SettingsError, Uploader
from ckpt_async.core.model import CheckpointId
from ckpt_async.sweep.drain import drain
from tests.faults.oracle import Oracle, heard
from tests.faults.processes import Nursery
from tests.faults.ranks import start


@pytest.fixture(params=["file", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    return f"{request.getfixturevalue('s3_url')}/run"


@pytest.mark.fault("F15")
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_last_rank_commits_and_a_missing_rank_delays_no_other_checkpoint(
    nursery: Nursery, tmp_path: Path, remote: str, num_ranks: int
) -> None:
    """R9: no rank's absence, slowness or death may keep a complete checkpoint from being committed."""
    trainers = start(nursery, tmp_path, remote, num_ranks)
    for trainer in trainers:
        trainer.expect("saved")
    incomplete = num_ranks
    for step in range(num_ranks + 1):
        last = trainers[step % num_ranks]
        for trainer in trainers:
            if trainer is not last:
                trainer.tell(f"save {step}")
        for trainer in trainers:
            if trainer is not last:
                trainer.expect(f"done save {step}")
        if step != incomplete:
            last.tell(f"save {step}")
            last.tell(f"wait {step}")
            last.expect(f"done wait {step}")
    # Rank 0 never saves step `num_ranks`; that must not delay the step after it.
    for trainer in trainers:
        trainer.tell(f"save {incomplete + 1}")
        trainer.tell(f"wait {incomplete + 1}")
    for trainer in trainers:
        trainer.expect(f"done wait {incomplete + 1}")
    trainers[1].tell(f"wait {incomplete} 0.3")
    error = trainers[1].expect("error")
    assert "CommitTimeoutError" in error
    assert "rank 0" in error
    for trainer in trainers:
        trainer.tell("stop")
    for trainer in trainers:
        assert trainer.finish() == 0, trainer.log.read_text()
    sealed = set.intersection(*(heard(trainer.said, "sealed") for trainer in trainers))
    assert Oracle(remote, num_ranks).look() == sealed
    assert CheckpointId(1, incomplete) not in sealed
    assert len(sealed) == num_ranks + 1


def test_the_last_rank_commits_even_if_all_others_are_dead(nursery: Nursery, tmp_path: Path) -> None:
    """A promise to a rank that has died since is kept by the remaining ranks."""
    remote = f"file://{tmp_path}/remote"
    trainers = start(nursery, tmp_path, remote, 4)
    for trainer in trainers[:3]:
        trainer.expect("saved")
        trainer.tell("save 1")
        trainer.expect("done save 1")
        trainer.tell("wait 1 0.2")
    for trainer in trainers[:3]:
        trainer.expect("error CommitTimeoutError")
    receipts = Path(f"{tmp_path}/remote/.ckpt-async/receipts/000001-000000000001")
    for trainer in trainers[:3]:
        while len(list(receipts.glob("0000[012].json"))) < 3:
            assert trainer.listen(0.02)
        trainer.kill()
    trainers[3].expect("saved")
    trainers[3].tell("save 1")
    trainers[3].tell("wait 1")
    trainers[3].expect("done wait 1")
    assert Oracle(remote, 4).look() == {CheckpointId(1, 1)}


@pytest.mark.fault("F16")
def test_a_restart_with_another_world_size_never_mixes_shards(
    nursery: Nursery, tmp_path: Path, remote: str
) -> None:
    """R5: step 2 of the first launch lacks rank 3; receipts of later launches with fewer ranks must not complete it."""
    world_sizes = {1: 4, 2: 2, 3: 3}
    promised: set[CheckpointId] = set()
    for generation, num_ranks in world_sizes.items():
        trainers = start(nursery, tmp_path, remote, num_ranks, launch=f"start {generation}")
        for rank, trainer in enumerate(trainers):
            trainer.expect(f"opened {generation}")
            trainer.tell("save 1")
            trainer.tell("wait 1")
            if rank < 3:
                trainer.tell("save 2")
        for trainer in trainers:
            trainer.expect("done wait 1")
        for trainer in trainers[:3]:
            trainer.expect("done save 2")
        for trainer in trainers:
            trainer.kill()
        promised |= {CheckpointId(generation, 1)} | (
            {CheckpointId(generation, 2)} if num_ranks < 4 else set()
        )
    for node in ("node-0", "node-1"):
        asyncio.run(drain(tmp_path / node, timeout_s=60, grace_s=0.5))
    oracle = Oracle(remote, world_sizes)
    assert oracle.look() == promised
    assert CheckpointId(1, 2) not in oracle.committed


def test_eight_processes_agree_on_the_generation_and_a_reused_launch_key_gets_a_new_one(
    nursery: Nursery, tmp_path: Path, remote: str
) -> None:
    """R5: ranks that disagreed would never commit, and two launches in one generation would mix their shards."""
    for wanted in (1, 2):
        trainers = start(nursery, tmp_path, remote, 8, launch="always the same")
        assert {trainer.expect("opened") for trainer in trainers} == {f"opened {wanted}"}
        for trainer in trainers:
            trainer.kill()


def test_an_explicit_generation_that_was_used_is_rejected(tmp_path: Path) -> None:
    """A job script that passes the same number at every launch would overwrite committed checkpoints."""
    remote = f"file://{tmp_path}/remote"
    with Uploader(tmp_path / "a", remote, rank=0, world_size=1, generation=3) as uploader:
        assert uploader.generation == 3
    with pytest.raises(SettingsError, match="already used by rank 0"):
        Uploader(tmp_path / "a", remote, rank=0, world_size=1, generation=3)
