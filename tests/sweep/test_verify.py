"""`verify` is the oracle of all fault tests, so it must itself be tested: it reports exactly what was damaged."""

import asyncio
from typing import Any

import pytest

from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Damage, Latest, Outcome, Receipt
from ckpt_async.core.retention import KeepLast
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.protocol import steps
from ckpt_async.protocol import verify as verifying
from ckpt_async.protocol.verify import verify
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.transfer.patient import PatientStore
from tests import virtual_time
from tests.stores.misbehaving import Meddled, trouble
from tests.sweep.world import Counted, World, replaced

ID = CheckpointId(1, 5)
SHARD = keys.data_key("step-5", 1, "rank-1.pt")


async def _world() -> World:
    return await World.begun(4, 5)


def test_a_sound_run_has_no_findings(run: Any) -> None:
    """There must be no false alarms."""

    async def main() -> None:
        result = await (await _world()).verify()
        assert result.findings == []
        assert (result.num_committed, result.num_shards) == (2, 4)

    run(main())


@pytest.mark.fault("F60")
def test_one_damaged_byte_is_named(run: Any) -> None:
    """It is found by the store's own checksum, and by reading where the store only repeats what it was told."""

    async def main() -> None:
        world = await _world()
        stored = world.bucket.objects[SHARD]
        damaged = bytes([stored.data[0] ^ 1]) + stored.data[1:]
        await world.store.put(SHARD, damaged)
        assert [(each.rule, each.key) for each in (await world.verify()).findings] == [("I6", SHARD)]
        world.bucket.objects[SHARD] = replaced(stored, data=damaged)  # the checksum it keeps is the old one
        assert (await world.verify()).findings == []
        result = await verify(world.store, read_percent=100)
        assert [(each.rule, each.key) for each in result.findings] == [("I6", SHARD)]
        assert result.num_shards_read == 4

    run(main())


@pytest.mark.parametrize("key", [SHARD, keys.receipt_key(ID, 0)])
def test_one_missing_key_is_named(run: Any, key: str) -> None:
    """A lifecycle rule or a careless user may delete it."""

    async def main() -> None:
        world = await _world()
        await world.store.delete([key])
        result = await world.verify()
        assert [(each.rule, each.key) for each in result.violations] == [("I1", key)]

    run(main())


def test_a_truncated_shard_is_named(run: Any) -> None:
    """The classic failure of unreliable stores: a short object under the right name."""

    async def main() -> None:
        world = await _world()
        await world.store.put(SHARD, b"x")
        result = await world.verify()
        assert [(each.rule, each.key) for each in result.findings] == [("I1", SHARD)]
        assert "1 bytes" in result.findings[0].message

    run(main())


def test_a_forged_decision_is_named(run: Any) -> None:
    """The receipts are not those that the commit was made from, or it claims other counts."""

    async def main() -> None:
        world = await _world()
        decision = await steps.read_decision(world.store, ID)
        assert decision is not None
        other = checksum_of(b"forged", "crc64nvme")
        for forged, where in (
            (replaced(decision, receipts=(other, decision.receipts[1])), keys.receipt_key(ID, 0)),
            (replaced(decision, num_shards=99), keys.decision_key(ID)),
        ):
            await world.store.put(keys.decision_key(ID), records.encode_decision(forged))
            result = await world.verify()
            assert [(each.rule, each.key) for each in result.violations] == [("I1", where)]
        await world.store.put(keys.decision_key(ID), b'{"outcome":"commit"}')
        assert keys.decision_key(ID) in {each.key for each in (await world.verify()).violations}

    run(main())


@pytest.mark.fault("F19")
def test_latest_that_names_nothing_committed_is_named(run: Any) -> None:
    """latest is a hint and may be behind, but it must never lead to something that does not exist."""

    async def main() -> None:
        world = await _world()
        latest = Latest(CheckpointId(1, 4), "step-4", keys.data_prefix("step-4", 1), 9, "nonce")
        await world.store.put(keys.LATEST, records.encode_latest(latest))
        assert (await world.verify()).findings == []
        nowhere = Latest(CheckpointId(9, 9), "step-9", keys.data_prefix("step-9", 9), 9, "nonce")
        for data in (records.encode_latest(nowhere), b"nonsense"):
            await world.store.put(keys.LATEST, data)
            assert [each.rule for each in (await world.verify()).violations] == ["I2"]

    run(main())


def test_stray_objects_are_leftovers_not_violations(run: Any) -> None:
    """Garbage is the sweeper's business; nobody has to be woken up for it."""

    async def main() -> None:
        world = await _world()
        await world.shard(ID, 9)
        await world.shard(CheckpointId(1, 6), 0)  # in progress: not stray
        result = await world.verify()
        assert result.violations == []
        assert [each.key for each in result.findings] == [keys.data_key("step-5", 1, "rank-9.pt")]
        assert await steps.begin_prune(world.store, CheckpointId(1, 4))
        assert await world.outcome(CheckpointId(1, 4)) is Outcome.PRUNING
        assert (await world.verify()).violations == []

    run(main())


@pytest.mark.parametrize("is_there", [True, False], ids=["damaged", "missing"])
def test_shards_whose_receipt_cannot_be_read_are_no_leftovers(run: Any, is_there: bool) -> None:
    """Good data of a committed checkpoint was called garbage, which people delete."""

    async def main() -> None:
        world, key = await _world(), keys.receipt_key(ID, 0)
        await world.shard(CheckpointId(1, 4), 9)
        await (world.store.put(key, b'{"garb') if is_there else world.store.delete([key]))
        result = await world.verify()
        assert [each.key for each in result.violations] == [key]
        stray = keys.data_key("step-4", 1, "rank-9.pt")
        assert [each.key for each in result.findings if each.is_leftover] == [stray]

    run(main())


def test_a_latest_with_a_wrong_name_is_named(run: Any) -> None:
    """A reader that follows it would look for shards where there are none."""

    async def main() -> None:
        world = await _world()
        latest = Latest(ID, "best-5", keys.data_prefix("best-5", 1), 9, "nonce")
        await world.store.put(keys.LATEST, records.encode_latest(latest))
        result = await world.verify()
        assert [(each.rule, each.key) for each in result.findings] == [("I2", keys.LATEST)]
        assert "best-5" in result.findings[0].message

    run(main())


class _NoChecksums(Meddled):
    """A store that keeps no checksums, or does not return them on HEAD."""

    async def head(self, key: str) -> ObjectInfo:
        return replaced(await self._store.head(key), checksum=None)  # type: ignore[no-any-return]


def test_objects_without_a_stored_checksum_are_read(run: Any) -> None:
    """Nothing counts as sound that was not compared."""

    async def main() -> None:
        world = await _world()
        store = PatientStore(_NoChecksums(world.bucket), Settings())
        assert (await verify(store)).findings == []
        stored = world.bucket.objects[SHARD]
        world.bucket.objects[SHARD] = replaced(stored, data=bytes([stored.data[0] ^ 1]) + stored.data[1:])
        result = await verify(store)
        assert [(each.rule, each.key) for each in result.findings] == [("I6", SHARD)]

    run(main())


class _PrunedMeanwhile(Counted):
    """Retention prunes checkpoint 4 during the check."""

    world: World

    async def by_itself(self, *request: Any) -> Any:
        if await self.world.outcome(CheckpointId(1, 4)) is Outcome.COMMIT:
            await self.world.sweep(KeepLast(1))
        return await self._store.by_itself(*request)


def test_pruning_during_verify_is_not_damage(run: Any) -> None:
    async def main() -> None:
        world = await _world()
        store: Any = _PrunedMeanwhile(world.store)
        store.world = world
        result = await verify(store)
        assert await world.outcome(CheckpointId(1, 4)) is Outcome.PRUNED
        assert result.violations == []
        assert result.num_committed == 1

    run(main())


SHARD_READ_S = 6.0


class _ReadsOnHead(Meddled):
    """A directory: to report a checksum it reads the file, which takes longer than a small request may."""

    async def before(self, operation: str, key: str) -> None:
        if operation == "head" and key.startswith(keys.DATA):
            await asyncio.sleep(SHARD_READ_S)


def test_a_store_that_reads_a_large_shard_to_report_its_checksum_has_time_for_it() -> None:
    async def main() -> None:
        world = await _world()
        shards = [each for key, each in world.bucket.objects.items() if key.startswith(keys.DATA)]
        settings = Settings(request_timeout_s=5, upload_timeout_s=60, minimum_rate_bytes_per_s=1)
        assert all(len(each.data) > SHARD_READ_S for each in shards)
        result = await verify(PatientStore(_ReadsOnHead(world.bucket), settings, is_patient=False))
        assert (result.findings, result.num_shards) == ([], 4)

    virtual_time.run(main())


class _CannotRead(Meddled):
    """A store that cannot read some objects."""

    reason, start = FailureReason.OTHER, SHARD

    async def before(self, operation: str, key: str) -> None:
        if operation == "get_range" and key.startswith(self.start):
            raise trouble(self.reason)


def test_a_shard_that_cannot_be_read_is_named_and_does_not_end_the_rest(run: Any) -> None:
    async def main() -> None:
        world = await _world()
        store = _CannotRead(world.bucket)
        patient = PatientStore(store, Settings(), is_patient=False)
        result = await verify(patient, read_percent=100)
        assert (result.violations, result.num_committed, result.num_shards_read) == ([], 2, 3)
        assert [(each.key, each.kind) for each in result.unread] == [(SHARD, "unread")]
        store.reason = FailureReason.AUTH  # concerns every shard
        with pytest.raises(StoreError):
            await verify(patient, read_percent=100)

    run(main())


def test_a_store_that_cannot_be_read_ends_the_verification(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard would be waited for in turn."""
    monkeypatch.setattr(verifying, "_MAX_UNREAD", 2)

    async def main() -> None:
        store = _CannotRead((await _world()).bucket)
        store.start = keys.DATA
        with pytest.raises(StoreError):
            await verify(PatientStore(store, Settings(), is_patient=False), read_percent=100)

    run(main())


class _ForbidsUploads(Meddled):
    """A typical policy for a reader: objects may be listed and read, and nothing else."""

    async def before(self, operation: str, key: str) -> None:
        if operation == "list_multiparts":
            raise trouble(self.reason)

    reason = FailureReason.AUTH


def test_uploads_that_may_not_be_listed_are_named_and_nothing_else_is_lost(run: Any) -> None:
    async def main() -> None:
        world = await _world()
        store = _ForbidsUploads(world.bucket)
        result = await verify(PatientStore(store, Settings(), is_patient=False))
        assert (result.findings, result.num_committed, result.num_shards) == ([], 2, 4)
        [said] = result.not_looked_at
        assert "unfinished uploads" in said
        store.reason = FailureReason.OTHER
        with pytest.raises(StoreError):
            await verify(PatientStore(store, Settings(), is_patient=False))

    run(main())


def test_a_distant_store_is_asked_for_many_records_at_once() -> None:
    """One after the other, the receipts of 8 checkpoints of 1,000 ranks took seven minutes at 50 ms each."""

    class Distant(Meddled):
        async def before(self, operation: str, key: str) -> None:
            await asyncio.sleep(1)

    async def main() -> float:
        world = await World.begun(*range(64), world_size=4)
        store = PatientStore(Distant(world.bucket), Settings())  # type: ignore[arg-type]
        began_s = asyncio.get_running_loop().time()
        assert (await verify(store)).num_committed == 64
        return asyncio.get_running_loop().time() - began_s

    num_requests = 64 * (1 + 4 + 4)  # a decision, its receipts, their shards
    assert virtual_time.run(main()) < num_requests / 2


@pytest.mark.parametrize(
    ("read_percent", "is_damaged", "is_sound"),
    [(100.0, False, True), (100.0, True, False), (0.0, False, False)],
)
def test_a_mark_is_refuted_only_by_reading_all_of_a_sound_checkpoint(
    run: Any, read_percent: float, is_damaged: bool, is_sound: bool
) -> None:
    """What refutes it removes it, and readers use the checkpoint again."""

    async def main() -> None:
        world = await _world()
        mark = records.encode_damage(Damage(ID, "unreadable", "a reader", 1.0))
        await world.store.put(keys.damage_key(ID), mark)
        if is_damaged:
            await world.store.put(SHARD, b"other")
        result = await verify(world.store, read_percent=read_percent)
        assert [(each.checkpoint, each.is_sound) for each in result.marks] == [(ID, is_sound)]

    run(main())


def test_a_receipt_may_be_larger_than_other_records(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists all shards of its rank."""

    async def main() -> None:
        world, undecided = await _world(), CheckpointId(1, 6)
        shards = [await world.shard(undecided, rank) for rank in range(30)]
        receipt = Receipt(undecided, "step-6", 0, 2, tuple(shards))
        await world.store.put(keys.receipt_key(undecided, 0), records.encode_receipt(receipt))
        monkeypatch.setattr(records, "MAX_RECORD_SIZE_BYTES", 2000)
        assert (await world.verify()).findings == []

    run(main())
