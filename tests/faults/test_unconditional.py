"""Fault F32: a real S3 server that ignores conditions, with ranks as processes of their own."""

from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.retention import KeepAll
from ckpt_async.core.settings import Settings
from ckpt_async.protocol.cas import create_once
from ckpt_async.protocol.sweep_plan import Ages, Settle
from ckpt_async.stores.interface import Create
from ckpt_async.sweep.remote import Done, RemoteSweep
from ckpt_async.transfer.patient import connect
from tests.faults.oracle import Oracle
from tests.faults.processes import Nursery, Trainer
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.ranks import start

NUM_RANKS = 3


@pytest.fixture
def remote(proxy: FaultProxy, s3_url: str) -> str:
    proxy.add(Fault("unconditional", "PUT"))
    return f"{s3_url}/run"


async def settled_by_a_sweep(remote: str) -> list[Done]:
    """Run one sweep that helps at once; also check that the store behaves as these tests need it to."""
    store = connect(remote, None, Settings())
    await store.open()
    assert not store.capabilities.conditional_put
    for _ in range(2):
        await store.put(f"{keys.PROBES}again", b"x", Create())
    assert await create_once(store, f"{keys.PROBES}again", b"y") == b"x", "it looks first"
    sweep = RemoteSweep(store, KeepAll(), Ages(help_s=0.0), lambda: 0.0)
    report = await sweep.run(is_dry_run=False)
    await store.close()
    assert report.is_clean, report
    return [each for each in report.done if isinstance(each.action, Settle)]


def save(trainers: list[Trainer], step: int, *, waits: bool) -> None:
    for what in ("save", "wait") if waits else ("save",):
        for trainer in trainers:
            trainer.tell(f"{what} {step}")
        for trainer in trainers:
            trainer.expect(f"done {what} {step}")


@pytest.mark.fault("F32")
def test_only_rank_0_decides_and_the_sweeper_if_it_is_dead(
    nursery: Nursery, tmp_path: Path, remote: str, proxy: FaultProxy, run: Any
) -> None:
    """If two ranks decided at once, the later would overwrite the earlier. So all others wait for
    rank 0, also for their generation.
    """
    decision, receipts = (f"{each}000001-000000000002" for each in (keys.DECISIONS, keys.RECEIPTS))
    trainers = start(nursery, tmp_path, remote, NUM_RANKS)
    for trainer in trainers:
        trainer.expect("saved")
    save(trainers, 1, waits=True)
    held = proxy.add_first(Fault("hold", "PUT", decision))
    save(trainers, 2, waits=False)
    proxy.wait_for(lambda: len(proxy.sent(receipts)) == NUM_RANKS and held.num_hits > 0)
    trainers[0].kill()  # everything is there, and it was about to decide
    for trainer in trainers[1:]:
        trainer.tell("wait 2 1")
        trainer.expect("error CommitTimeoutError")
    assert held.num_hits == 1, "another rank has tried to decide"
    held.times = 0
    (done,) = run(settled_by_a_sweep(remote))
    assert (done.action.checkpoint, done.outcome) == (CheckpointId(1, 2), Outcome.COMMIT)
    for trainer in trainers[1:]:
        trainer.tell("wait 2 30")
        trainer.expect("done wait 2 30")
        trainer.kill()
    again = start(nursery, tmp_path, remote, NUM_RANKS, launch="two")
    for trainer in again:
        trainer.expect("saved")
    save(again, 3, waits=True)
    assert Oracle(remote, NUM_RANKS).look() == {CheckpointId(1, 1), CheckpointId(1, 2), CheckpointId(2, 3)}
    written = proxy.sent(f"{keys.DECISIONS}|{keys.GENERATIONS}")
    assert set(written.values()) == {1}, "nothing that is created once was written over"
    assert len(written) == 3 + 2
