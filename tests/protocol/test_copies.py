"""Copies under one exact key: the orders in which two checkpoints and a pruner can reach it.

Coroutines are suspended at each request, and interleavings are played, each from the beginning.
"""

import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, StoredShard
from ckpt_async.errors import ObjectNotFoundError, StoreError
from ckpt_async.protocol import copies
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody, Condition
from ckpt_async.transfer import copying
from tests.stores.memory import MemoryBucket, MemoryStore

KEY = "exact/latest.pt"
Work = Coroutine[Any, Any, Any]


class Direct:
    """A PatientStore that does not retry: every request is one attempt."""

    def __init__(self, bucket: MemoryBucket) -> None:
        self._store = MemoryStore(bucket)

    async def put(self, key: str, data: bytes, condition: Condition = None) -> Any:
        return await self._store.put(
            key, BytesBody(data), checksum_of(data, "crc64nvme"), condition=condition
        )

    async def by_itself(self, _operation: str, _size_bytes: int, attempt: Callable[[Any], Any]) -> Any:
        return await attempt(self._store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class World:
    """Committed checkpoints with one file each."""

    def __init__(self, *contents: bytes) -> None:
        self.bucket = MemoryBucket()
        self.store: Any = Direct(self.bucket)
        self.ids = [CheckpointId(1, step) for step in range(1, len(contents) + 1)]
        self.shards = []
        for id_, data in zip(self.ids, contents, strict=True):
            key = keys.data_key(f"step-{id_.step}", 1, "a")
            finish(self.store.put(key, data))
            self.shards.append(StoredShard("a", key, len(data), checksum_of(data, "crc64nvme"), KEY))

    def publish(self, number: int) -> Work:
        return copies.publish(self.store, self.ids[number], self.shards[number])

    def retract(self, number: int) -> Work:
        return copies.retract(self.store, self.ids[number], self.shards[number])

    async def prune(self, number: int) -> None:
        """Prune as `steps.finish_prune` does."""
        await self.store.delete([self.shards[number].key])
        await self.retract(number)

    async def publish_and_look(self, number: int) -> None:
        """Publish as the engine does for a checkpoint that is being pruned at the same time."""
        with contextlib.suppress(ObjectNotFoundError):
            await self.publish(number)
        await self.retract(number)

    def published(self) -> bytes | None:
        there = self.bucket.objects.get(KEY)
        return there.data if there else None

    def claimed_by(self) -> CheckpointId | None:
        claim = finish(copies.read_claim(self.store, KEY))
        return claim.checkpoint if claim else None


def step(work: Work) -> bool:
    """Run one request and return whether it was the last."""
    try:
        work.send(None)
    except StopIteration:
        return True
    return False


def finish(work: Work) -> Any:
    while True:
        try:
            work.send(None)
        except StopIteration as end:
            return end.value


# Most concurrency bugs need only a few context switches (Musuvathi and Qadeer, "Iterative context bounding").
MAX_SWITCHES = 4


def played(begin: Callable[[], tuple[World, list[Work]]]) -> Iterator[World]:
    """Yield the world after every interleaving of the coroutines from `begin` that has at most MAX_SWITCHES
    preemptions.
    """
    _, works = begin()
    todo: list[tuple[list[int], int]] = [([number], 0) for number in range(len(works))]
    for work in works:
        work.close()
    while todo:
        order, num_switches = todo.pop()
        world, works = begin()
        live = dict(enumerate(works))
        for number in order:
            if number in live and step(live[number]):
                del live[number]
        while live:
            now = order[-1] if order[-1] in live else next(iter(live))
            if now == order[-1] and num_switches < MAX_SWITCHES:
                todo += [([*order, other], num_switches + 1) for other in live if other != now]
            order = [*order, now]
            if step(live[now]):
                del live[now]
        yield world


def test_the_newest_wins_in_every_order() -> None:
    def begin() -> tuple[World, list[Work]]:
        world = World(b"old", b"newer")
        return world, [world.publish(0), world.publish(1)]

    num = 0
    for world in played(begin):
        assert (world.published(), world.claimed_by()) == (b"newer", world.ids[1])
        num += 1
    assert num > 1000, "interleavings"


@pytest.mark.parametrize("contents", [(b"old", b"newer"), (b"same", b"same")])
def test_pruning_the_older_leaves_the_newer_in_every_order(contents: tuple[bytes, bytes]) -> None:
    """This must hold even if their bytes are the same, so that neither ETag nor checksum tells them apart."""

    def begin() -> tuple[World, list[Work]]:
        world = World(*contents)
        finish(world.publish(0))
        return world, [world.prune(0), world.publish(1)]

    for world in played(begin):
        assert (world.published(), world.claimed_by()) == (contents[1], world.ids[1])


def test_what_is_pruned_while_it_is_copied_does_not_stay() -> None:
    def begin() -> tuple[World, list[Work]]:
        world = World(b"old")
        return world, [world.prune(0), world.publish_and_look(0)]

    for world in played(begin):
        assert (world.published(), world.claimed_by()) == (None, None)


def test_each_may_be_cut_short_anywhere_and_done_again() -> None:
    for cut in itertools.count():
        world = World(b"old", b"newer")
        work = world.publish(0)
        is_whole = any(step(work) for _ in range(cut))
        work.close()
        finish(world.publish(0))
        assert world.published() == b"old"
        work = world.prune(0)
        is_whole &= any(step(work) for _ in range(cut))
        work.close()
        finish(world.prune(0))
        assert (world.published(), world.claimed_by()) == (None, None)
        if is_whole:
            break
    assert cut > 5


def test_what_somebody_else_has_put_there_stays() -> None:
    world = World(b"old")
    finish(world.publish(0))
    finish(world.store.put(KEY, b"by hand"))
    finish(world.retract(0))
    assert (world.published(), world.claimed_by()) == (b"by hand", None)


def test_of_two_ranks_with_one_key_the_first_wins(caplog: pytest.LogCaptureFixture) -> None:
    world = World(b"first", b"second")
    (id_, _), (first, second) = world.ids, world.shards
    assert finish(copies.publish(world.store, id_, first))
    assert not finish(copies.publish(world.store, id_, second))
    assert finish(copies.publish(world.store, id_, first))
    assert world.published() == b"first"
    assert [each.split()[0] for each in caplog.messages] == ["copy_left_out"]


def test_parts_that_a_killed_copy_has_left_go_with_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(b"large")
    finish(world.publish(0))
    for key in (KEY, f"{KEY}.other"):
        finish(world.store.create_multipart(key))
    monkeypatch.setattr(copying, "COPY_PART_BYTES", 4)
    finish(world.retract(0))
    assert [each.key for each in finish(world.store.list_multiparts(KEY))] == [f"{KEY}.other"]


def test_a_damaged_source_is_not_copied() -> None:
    world = World(b"old")
    finish(world.store.put(world.shards[0].key, b"bad"))
    with pytest.raises(StoreError, match="expected 3 with"):
        finish(world.publish(0))
    assert world.published() is None
