"""Two trainers of one run: the older is stopped at some point, a newer one takes over, and then the older wakes up."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.model import CheckpointId
from tests.faults.oracle import Oracle, verified
from tests.faults.processes import PATIENCE_S, Nursery, Trainer
from tests.faults.proxy import Fault, FaultProxy

# A trainer stopped for longer than any timeout is merely late, and a newer trainer waits for nobody.
SETTINGS: dict[str, Any] = {
    "decision_poll_s": 0.05,
    "retry_initial_s": 0.02,
    "retry_max_s": 0.2,
    "request_timeout_s": 60.0,
    "stall_timeout_s": 60.0,
    "close_grace_s": 0.0,
    # So that no trainer takes a held request for a slow connection and sends it again.
    "max_bytes_per_s": 1e9,
}
# Where the older trainer is stopped: the request of its step 2 that is in flight.
MOMENTS = {
    "before seal": "",
    "during upload": r"/ckpt/step-2\.g1/",
    "before its receipt": "/receipts/000001-0+2/",
    "before its commit": "/decisions/000001-0+2",
}


def start(nursery: Nursery, tmp_path: Path, remote: str, which: str) -> Trainer:
    """Start a trainer on a node of its own, so that only the store connects it with the other one."""
    return nursery.start(
        "obeys",
        {"CKPT_ASYNC_LAUNCH_ID": which},
        folder=str(tmp_path / which),
        remote=remote,
        settings=SETTINGS,
    )


def do(trainer: Trainer, *lines: str) -> None:
    for line in lines:
        trainer.tell(line)
        trainer.expect(f"done {line}")


def stop(trainer: Trainer) -> None:
    """Send SIGSTOP, and wait until the process has stopped."""
    os.kill(trainer.pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{trainer.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline


@pytest.mark.fault("F13")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_paused_trainer_that_wakes_up_after_a_takeover_is_fenced(
    nursery: Nursery, proxy: FaultProxy, s3_url: str, tmp_path: Path, moment: str
) -> None:
    """What the older trainer had sealed may commit, but it accepts nothing new and says why, and `latest`
    stays where the newer one put it.
    """
    remote = f"{s3_url}/run"
    oracle = Oracle(remote, 1)
    older = start(nursery, tmp_path, remote, "older")
    older.expect("opened 1")
    do(older, "enqueue 1", "seal 1", "wait 1")
    if MOMENTS[moment]:
        held = proxy.add(Fault("hold", "PUT", MOMENTS[moment]))
        do(older, "enqueue 2", "seal 2")
        proxy.wait_for(lambda: held.num_hits > 0)
    else:
        do(older, "enqueue 2")
        proxy.wait_for(lambda: len(proxy.sent(r"/ckpt/step-2\.g1/")) == 2)
    stop(older)
    oracle.look()

    newer = start(nursery, tmp_path, remote, "newer")
    newer.expect("opened 2")
    # An older step than the other's, because the generation takes precedence.
    do(newer, "enqueue 1", "seal 1", "wait 1")
    oracle.look()
    assert oracle.latest == CheckpointId(2, 1)

    os.kill(older.pid, signal.SIGCONT)
    proxy.release()
    if moment == "before seal":
        do(older, "seal 2")
    do(older, "wait 2")
    committed = {CheckpointId(1, 1), CheckpointId(1, 2), CheckpointId(2, 1), CheckpointId(2, 2)}
    do(older, "fenced")
    assert older.expect("ckpt_async_fenced").endswith(" 1.0")
    older.tell("enqueue 3")
    assert "generation 2 of this run has started" in older.expect("error FencedError")
    older.tell("stop")
    assert older.finish() == 0, older.log.read_text()
    oracle.look()
    assert oracle.latest == CheckpointId(2, 1)
    do(newer, "enqueue 2", "seal 2", "wait 2", "fenced")
    assert newer.expect("ckpt_async_fenced").endswith(" 0.0")
    newer.tell("stop")
    assert newer.finish() == 0, newer.log.read_text()
    assert oracle.look() == committed
    assert oracle.latest == CheckpointId(2, 2)
    assert set(proxy.sent(r"/run/(ckpt|\.ckpt-async/receipts|\.ckpt-async/decisions)/").values()) == {1}, (
        "no key was written twice"
    )
    assert verified(remote).findings == []
