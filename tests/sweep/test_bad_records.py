"""One unreadable record must affect only what it is about, and both the sweep and `verify` must name it."""

import asyncio
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, restore
from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Generation, Outcome
from ckpt_async.core.retention import KeepLast
from ckpt_async.core.settings import Settings
from ckpt_async.doctor import diagnosis
from ckpt_async.doctor.checks import examine
from ckpt_async.doctor.diagnosis import Level
from ckpt_async.errors import CommitTimeoutError, InvalidRecordError
from ckpt_async.protocol import deciding
from ckpt_async.protocol import steps as protocol
from ckpt_async.protocol.generation import agree
from ckpt_async.protocol.sweep_plan import LEASE_MARGIN_S, MAX_LEASE_S, Ages, CollectDecisions, FinishPrune
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from ckpt_async.sweep.sweeper import Sweeper
from tests.sweep.world import World, ids, replaced

WHOLE, DEAD, BUSY, NEXT = CheckpointId(1, 10), CheckpointId(1, 11), CheckpointId(1, 12), CheckpointId(2, 20)
TOO_LARGE = bytes(records.MAX_RECORD_SIZE_BYTES + 1)
NEWER = json.dumps({"format": "ckpt_async/decision", "version": 2}).encode()


async def _world() -> World:
    """Return a run of six commits, one complete but undecided, one dead, and a newer generation with three commits."""
    world = await World.begun(1, 2, 3, 4, 5, 6)
    for rank in range(2):
        await world.receipt(WHOLE, rank)
    for id_ in (DEAD, BUSY):
        await world.receipt(id_, 0)
    await world.start(2)
    for step in (20, 21, 22):
        await world.commit(CheckpointId(2, step))
    world.now += Ages().superseded_s
    return world


PLACES = {
    "boundary": keys.BOUNDARY,
    "decision": keys.decision_key(CheckpointId(1, 3)),
    "lease": keys.lease_key(CheckpointId(1, 3), "reader"),
    "mark": keys.damage_key(CheckpointId(1, 3)),
    "receipt": keys.receipt_key(BUSY, 1),
    "generation": keys.generation_key(1),
    "member": keys.member_key(2, 0),
}


@pytest.mark.fault("F41")
@pytest.mark.parametrize("bad", [TOO_LARGE, b"", NEWER], ids=["large", "empty", "newer"])
@pytest.mark.parametrize("place", PLACES)
def test_a_sweep_works_around_unreadable_records(run: Any, place: str, bad: bytes) -> None:
    """Everything that does not depend on the record is done."""

    async def main() -> None:
        world = await _world()
        await world.store.put(PLACES[place], bad)
        listed = {each.key for each in (await world.verify()).violations}
        assert listed == {PLACES[place]}
        before = dict(world.bucket.objects)
        report = await world.sweeper(KeepLast(1)).run(is_dry_run=False)
        assert report.error == ""
        outcomes = {id_: await _outcome(world, id_) for id_ in (*ids(1, 2, 3, 4, 5, 6), WHOLE, DEAD, NEXT)}
        expected: dict[CheckpointId, object] = dict.fromkeys(outcomes, Outcome.PRUNED)
        expected |= {WHOLE: Outcome.PRUNED, DEAD: Outcome.ABORT}
        named = {each.key for each in report.violations}
        match place:
            case "boundary":  # it may be about any checkpoint
                expected |= dict.fromkeys((*ids(1, 2, 3, 4, 5, 6), NEXT), Outcome.COMMIT)
                expected |= {WHOLE: None, DEAD: None}
            case "decision":
                expected[CheckpointId(1, 3)] = "unreadable"
            case "lease":
                expected[CheckpointId(1, 3)] = Outcome.PRUNING
            case "generation":  # nobody knows how many ranks they have
                expected |= {WHOLE: None, DEAD: None}
            case _:
                named.add(PLACES[place])  # the sweep does not need it, or removes it
        assert named == {PLACES[place]}
        assert outcomes == expected
        for id_, outcome in expected.items():
            if outcome not in (Outcome.PRUNED, Outcome.ABORT):
                own = {key: each for key, each in before.items() if _is_of(key, id_)}
                assert own
                assert own.items() <= world.bucket.objects.items()
        assert await world.outcome(CheckpointId(2, 22)) is Outcome.COMMIT

    run(main())


def _is_of(key: str, id_: CheckpointId) -> bool:
    shard, receipt = keys.parse_data_key(key), keys.parse_receipt_key(key)
    return (shard is not None and shard[0] == id_) or (receipt is not None and receipt[0] == id_)


async def _outcome(world: World, id_: CheckpointId) -> object:
    try:
        return await world.outcome(id_)
    except InvalidRecordError as error:
        return "unreadable" if error.key == keys.decision_key(id_) else error


def _run(folder: Path, remote: str, *steps: int, generation: int) -> None:
    with Uploader(
        folder, remote, rank=0, world_size=1, generation=generation, decision_poll_s=0.02
    ) as uploader:
        for step in steps:
            (folder / f"{step}.pt").write_bytes(b"x")
            uploader.enqueue(folder / f"{step}.pt", step)
            uploader.seal(step)
            uploader.wait(step, timeout_s=60)


@pytest.mark.fault("F41")
def test_a_huge_lease_costs_a_sweep_neither_memory_nor_its_other_work(
    run: Any, tmp_path: Path, s3_url: str
) -> None:
    """On a real server: nothing of it is fetched, only its checkpoint waits for it, and doctor and `verify` name it."""
    _run(tmp_path, s3_url, 1, 2, 3, generation=1)
    store, key = open_store(s3_url, StoreOptions()), keys.lease_key(CheckpointId(1, 1), "reader")
    huge = bytes(50 << 20)

    async def put_it() -> None:
        await store.open()
        await store.put(key, BytesBody(huge), checksum_of(huge, store.capabilities.checksum_algorithm))
        await store.close()

    run(put_it())
    tracemalloc.start()
    report = run(Sweeper([], [s3_url], settings=Settings(remote_retention="last=1")).sweep())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (remote,) = report.remotes
    assert (remote.error, [each.key for each in remote.violations]) == ("", [key])
    both = run(Sweeper([], [s3_url], verifies=True).sweep(is_dry_run=True))
    assert [each.key for each in both.remotes[0].violations] == [key]  # found twice, told once
    told = {
        each.action.checkpoint.step: each.outcome
        for each in remote.done
        if isinstance(each.action, FinishPrune)
    }
    assert told == {2: Outcome.PRUNED}, "1 is being pruned, and waits"
    assert peak_bytes < 20 << 20
    facts = examine(None, s3_url, StoreOptions(), dict(os.environ))
    (finding,) = [
        each for each in diagnosis.diagnose(facts) if each.check == "records" and each.level is Level.WARN
    ]
    assert key in finding.message


@pytest.mark.fault("F41")
def test_nothing_is_decided_while_the_boundary_is_unreadable(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have collected any checkpoint. Training goes on, the log names the record, readers have what is there, and
    what was sealed is committed once it can be read again.
    """
    root = tmp_path / "remote"
    remote, folder = f"file://{root}", tmp_path / "folder"
    _run(folder, remote, 1, generation=1)
    (root / keys.BOUNDARY).write_bytes(TOO_LARGE)
    more = {"generation": 2, "decision_poll_s": 0.02, "decision_poll_max_s": 0.02}
    with Uploader(folder, remote, rank=0, world_size=1, **more) as uploader:
        (folder / "2.pt").write_bytes(b"x")
        uploader.enqueue(folder / "2.pt", 2)
        uploader.seal(2)
        with pytest.raises(CommitTimeoutError):
            uploader.wait(2, timeout_s=1)
        assert keys.BOUNDARY in caplog.text
        found = restore.find(remote)
        assert found is not None
        assert found.step == 2
        (root / keys.BOUNDARY).unlink()
        uploader.wait(2, timeout_s=30)


def test_an_unreadable_latest_is_replaced(run: Any) -> None:
    """latest is a hint: if it is too large to be read, it counts as missing, and is moved."""

    async def main() -> None:
        world = await World.begun(1, 2)
        await world.store.put(keys.LATEST, TOO_LARGE)
        assert await protocol.read_latest(world.store) is None
        await world.sweep()
        latest = await protocol.read_latest(world.store)
        assert latest is not None
        assert latest.checkpoint == CheckpointId(1, 2)

    run(main())


def test_an_unreadable_decision_is_not_replaced(run: Any) -> None:
    """Whatever it is, it may have been a commit: nobody decides, prunes or pins in its place. A boundary is not begun
    anew either.
    """

    async def main() -> None:
        world = await World.begun(1, 2)
        for key in (keys.decision_key(CheckpointId(1, 1)), keys.BOUNDARY):
            await world.store.put(key, TOO_LARGE)
        before = dict(world.bucket.objects)
        wanted = protocol.new_decision(
            CheckpointId(1, 1), Outcome.ABORT, name="step-1", world_size=2, by="test", now=0.0
        )
        store = world.store
        collecting = CollectDecisions(
            CheckpointId(1, 2), frozenset(), (keys.decision_key(CheckpointId(1, 1)),), ""
        )
        for attempt in (
            deciding.decide_once(store, wanted),
            protocol.begin_prune(store, CheckpointId(1, 1)),
            protocol.set_pin(store, CheckpointId(1, 1), True),
            protocol.collect(store, collecting),
        ):
            with pytest.raises(InvalidRecordError, match=r"\.ckpt-async/"):
                await attempt
        assert world.bucket.objects == before

    run(main())


def test_an_unreadable_lease_counts_for_the_longest_term(run: Any) -> None:
    """Then it is removed, and what it protected is removed too."""

    async def main() -> None:
        world = await World.begun(1, 2)
        key = keys.lease_key(CheckpointId(1, 1), "reader")
        await world.store.put(key, TOO_LARGE)
        await world.sweeper(KeepLast(1)).run(is_dry_run=False)
        world.now += MAX_LEASE_S
        assert await protocol.readers(world.store, CheckpointId(1, 1)) == [key]
        world.now += LEASE_MARGIN_S
        assert await protocol.readers(world.store, CheckpointId(1, 1)) == []
        await world.sweeper(KeepLast(1)).run(is_dry_run=False)
        assert await world.outcome(CheckpointId(1, 1)) is Outcome.PRUNED
        assert key not in world.bucket.objects

    run(main())


@pytest.mark.fault("F41")
@pytest.mark.parametrize("bad", [TOO_LARGE, b"", b"nonsense"], ids=["large", "empty", "nonsense"])
def test_an_unreadable_generation_does_not_block_a_start(run: Any, bad: bytes) -> None:
    """All ranks skip it, and meet in the next one. A record of a newer version is different: its writer can read it."""

    async def main() -> None:
        world = await World.begun(1)
        world.bucket.objects[keys.generation_key(1)] = replaced(
            world.bucket.objects[keys.generation_key(1)], data=bad
        )
        assert await asyncio.gather(_agree(world, 0), _agree(world, 1)) == [2, 2]
        newer = records.encode_generation(Generation(3, "key", 2, "host", "nonce", 0.0))
        newer = newer.replace(b'"version":1', b'"version":2')
        await world.store.put(keys.generation_key(3), newer)
        with pytest.raises(InvalidRecordError, match=re.escape(keys.generation_key(3))):
            await _agree(world, 0)

    run(main())


async def _agree(world: World, rank: int) -> int:
    found = await agree(world.store, rank=rank, world_size=2, launch_key="new", explicit=None, now=0.0)
    return found.number
