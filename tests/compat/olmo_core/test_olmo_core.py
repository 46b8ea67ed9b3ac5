"""OLMo-core's `Trainer` with FSDP on 2 gloo ranks and `CkptAsyncCallback`, saving asynchronously; a folder per node."""

import shutil
from pathlib import Path

from tests.compat.play import Job, ranks

SCRIPT = Path(__file__).with_name("train.py")
NODES = SCRIPT.with_name("train_nodes.py")


def test_a_killed_run_goes_on_on_a_fresh_node(job: Job) -> None:
    job.check_kill_and_resume([*ranks(2), SCRIPT])


def test_nodes_with_a_folder_each_go_on_when_one_of_them_is_lost_or_both(job: Job) -> None:
    expected = job.start([*ranks(2), NODES], "undisturbed", f"{job.remote}/undisturbed").finish()
    committed = 0
    for lost in ("1", "0", ""):
        killed = job.start([*ranks(2), NODES], "nodes")
        for _ in killed:
            if job.committed() > committed:
                break
        killed.kill()
        job.check_losses(killed, expected, is_resumed=committed > 0)
        committed = job.committed()
        shutil.rmtree(killed.node / lost)
    last = job.start([*ranks(2), NODES], "nodes")
    last.finish()
    job.check_losses(last, expected, is_resumed=True)
    assert max(last.losses) == max(expected)
