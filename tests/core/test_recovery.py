"""What a process concludes from what earlier launches of a rank have left on its node."""

from dataclasses import replace

from ckpt_async.core.local_state import Local, LocalCheckpoint, LocalShard
from ckpt_async.core.model import (
    CheckpointId,
    Enqueued,
    FileIdentity,
    Opened,
    RemoteAddress,
    Sealed,
    Shard,
    StartedOver,
    Unproven,
)
from ckpt_async.core.records import Manifest
from ckpt_async.core.recovery import NUM_EARLIER, OnDisk, completing, lost_by_reboot

URL = "s3://bucket/run"
ADDRESS = RemoteAddress(URL)
OLD, NEW = CheckpointId(2, 10), CheckpointId(3, 20)


def shard(name: str) -> Shard:
    return Shard(name, f"step/{name}", FileIdentity(1, 2, 3, 4), is_linked=True)


def manifest(id_: CheckpointId, nonce: str, *names: str, remote: str = URL) -> Manifest:
    enqueued = [Enqueued(id_, "step", shard(each)) for each in names]
    return Manifest(enqueued, Sealed(id_, "step", 4), remote, "", nonce)


def opened(generation: int, **more: object) -> Opened:
    return replace(Opened(generation, 4, ADDRESS, nonce=f"n{generation}"), **more)  # type: ignore[arg-type]


def test_lost_journal_takes_generation_and_nonces_from_manifests() -> None:
    found = OnDisk(Local(0), {OLD: manifest(OLD, "n2"), NEW: manifest(NEW, "n3")})
    assert (found.generation, found.nonces) == (3, {2: "n2", 3: "n3"})
    launch = found.opened_at(ADDRESS)
    assert (launch.generation, launch.world_size, launch.nonces) == (3, 4, {2: "n2", 3: "n3"})


def test_launch_must_be_newer_unless_it_is_the_same_one() -> None:
    found = OnDisk(Local(0, generation=3, opened=opened(3)))
    assert not found.may_open(3, URL, is_again=False)
    assert found.may_open(3, URL, is_again=True)
    assert found.may_open(4, URL, is_again=False)
    assert not found.may_open(2, URL, is_again=True)
    assert found.may_open(1, "s3://bucket/other", is_again=False)


def test_launch_remembers_earlier_nonces_of_this_remote_only() -> None:
    earlier = tuple((number, f"n{number}") for number in range(1, NUM_EARLIER + 5))
    found = OnDisk(Local(0, generation=200, opened=opened(200, earlier=earlier)))
    (row,) = found.rows_of(opened(201), [])
    assert isinstance(row, Opened)
    assert len(row.earlier) == NUM_EARLIER
    assert row.earlier[-1] == (200, "n200")
    elsewhere = opened(1, remote=RemoteAddress("s3://bucket/other"))
    assert found.rows_of(elsewhere, [OLD]) == [StartedOver(), elsewhere, Unproven(OLD)]


def test_unfinished_checkpoint_of_another_remote_is_found_in_manifests() -> None:
    lost = {OLD: manifest(OLD, "n2"), NEW: manifest(NEW, "n3", remote="s3://bucket/other")}
    found = OnDisk(Local(0, generation=3, opened=opened(3)), lost)
    assert found.unfinished_elsewhere(URL) == (NEW, "s3://bucket/other")
    assert found.remote_of_lost() == ""


def test_manifest_completes_a_journal_that_lost_its_tail() -> None:
    known = LocalCheckpoint(OLD, "step", {"a": LocalShard(shard("a"), 0.0)})
    found = manifest(OLD, "n2", "a", "b")
    assert completing(found, known) == [found.enqueued[1], found.sealed]
    assert completing(found, replace(known, sealed=found.sealed)) == [found.enqueued[1]]


def test_reboot_loses_only_what_was_neither_durable_nor_stored() -> None:
    shards = {
        "durable": LocalShard(shard("durable"), 0.0, is_durable=True),
        "listed": LocalShard(shard("listed"), 0.0),
        "lost": LocalShard(shard("lost"), 0.0),
    }
    failed = lost_by_reboot(LocalCheckpoint(OLD, "step", shards), {"listed"}, "/folder")
    assert [each.shard for each in failed] == ["lost"]
    assert "/folder/step/lost" in failed[0].message
