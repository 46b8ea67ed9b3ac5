"""Real writers, killed between the parts of a save: never a part is taken for a checkpoint."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_async.formats import Rules, find
from ckpt_async.watch.disk import Disk

pytestmark = pytest.mark.timeout(240)
NUM_SAVES = 400
OF_A_SAVE = {
    *(
        f"{part}/{name}"
        for part in ("pytorch_model_fsdp_0", "optimizer_0")
        for name in (".metadata", "__0_0.distcp")
    ),
    *(f"{part}/__1_0.distcp" for part in ("pytorch_model_fsdp_0", "optimizer_0")),
    *("random_states_0.pkl", "random_states_1.pkl"),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_accelerate_killed_between_the_parts_leaves_no_checkpoint_of_a_part(tmp_path: Path) -> None:
    script = Path(__file__).with_name("train_accelerate.py")
    # Not by torchrun, whose workers outlive it.
    common = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(NUM_SAVES)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    disk, rules, num_begun = Disk(tmp_path), Rules(ranks=2), 0
    try:
        while True:
            found = find(disk.scan(), rules)
            for each in found:
                assert (each.format, each.path) == ("accelerate", f"checkpoints/checkpoint_{each.step}")
                assert not each.is_complete or {*each.inner} == OF_A_SAVE
            begun = [
                each for each in found if not each.is_complete and "optimizer_0/.metadata" not in each.inner
            ]
            num_begun += bool(begun)
            if num_begun >= 3 and any(each.is_complete for each in found):
                break
            assert ranks[0].poll() is None, "it ended before it was seen between two parts"
            time.sleep(0.002)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    found = find(disk.scan(), rules)
    steps = sorted(each.step for each in found if each.is_complete)
    assert steps == [*range(len(steps))]
    assert all({*each.inner} == OF_A_SAVE for each in found if each.is_complete)
    assert len(found) - len(steps) <= 1, "the one that was cut short"
