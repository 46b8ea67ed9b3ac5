"""The S3 server itself is killed and started again, over and over, while two ranks upload to it."""

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.model import CheckpointId
from ckpt_async.sweep.sweeper import Sweeper
from tests.faults.oracle import Oracle, heard, verified
from tests.faults.processes import SOAK, Nursery
from tests.seaweed import SeaweedServer

WORLD_SIZE = 2
PART = 5 << 20
SIZE_BYTES = 2 * PART + 1
SETTINGS: dict[str, Any] = {
    "part_size_bytes": PART,
    "decision_poll_s": 0.05,
    "retry_initial_s": 0.05,
    "retry_max_s": 0.5,
    "stall_timeout_s": 2.0,
    "request_timeout_s": 5.0,
    "num_checkpoints_to_keep": 1,
}


@pytest.mark.fault("F31")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=SOAK)])
def test_killing_the_server_at_random_times_loses_nothing(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, num_kills: int
) -> None:
    """Everything that both ranks sealed is committed in the end, once and complete; no rank ends or is delayed."""
    rng, pause = random.Random(seed), threading.Event()
    with SeaweedServer(tmp_path / "seaweed") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        remote = f"s3://{server.bucket}/run"
        ranks = [
            nursery.start(
                "saves",
                {"CKPT_ASYNC_LAUNCH_ID": "one"},
                folder=str(tmp_path / f"node-{rank}"),
                remote=remote,
                rank=rank,
                world_size=WORLD_SIZE,
                steps=[],
                num_shards=1,
                size_bytes=SIZE_BYTES,
                settings=SETTINGS,
            )
            for rank in range(WORLD_SIZE)
        ]
        for rank in ranks:
            rank.expect("saved")
        oracle = Oracle(remote, WORLD_SIZE, num_shards=1, size_bytes=SIZE_BYTES)
        step = 0
        for _ in range(num_kills):
            for _ in range(3):
                step += 1
                for rank in ranks:
                    rank.tell(f"save {step}")
            pause.wait(rng.uniform(0.0, 0.6))
            server.kill()
            for rank in ranks:
                rank.expect(f"done save {step}")  # saving needs no server
            server.start()
            oracle.look()
        for rank in ranks:
            rank.tell(f"wait {step}")
        for rank in ranks:
            rank.expect(f"done wait {step}")
            rank.tell("stop")
        for rank in ranks:
            assert rank.finish() == 0, rank.log.read_text()
            assert not [line for line in rank.said if line.startswith("error")]
        wanted = {CheckpointId(1, each) for each in range(1, step + 1)}
        assert all(heard(rank.said, "sealed") == wanted for rank in ranks)
        assert oracle.look() == wanted
        assert oracle.latest == CheckpointId(1, step)
        # An upload whose creation was never answered because the server died belongs only to the sweeper.
        assert asyncio.run(Sweeper([], [remote]).sweep()).is_clean
        result = verified(remote)
        print(f"kills={num_kills} committed={result.num_committed} read={result.num_shards_read}")
        assert (result.findings, result.num_committed) == ([], step)
        assert result.num_shards_read == step * WORLD_SIZE
