"""A run in a memory store, made by the same protocol steps that the engine takes, with a clock that the tests move."""

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ckpt_async.core import keys, records
from ckpt_async.core.model import Beat, CheckpointId, Generation, Outcome, Receipt, StoredShard
from ckpt_async.core.retention import KeepAll, RetentionPolicy
from ckpt_async.core.settings import Settings
from ckpt_async.errors import StoreError
from ckpt_async.protocol import deciding
from ckpt_async.protocol import steps as protocol
from ckpt_async.protocol.cas import create_once
from ckpt_async.protocol.sweep_plan import Ages
from ckpt_async.protocol.verify import Verification, verify
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.sweep.remote import RemoteReport, RemoteSweep
from ckpt_async.transfer.patient import PatientStore
from tests.stores.memory import MemoryBucket, MemoryStore

HOUR_S = 3600.0


class World:
    """One run of `world_size` ranks. Everything is awaited in the test's own loop."""

    def __init__(self, world_size: int = 2) -> None:
        self.now = 1_000_000.0
        self.bucket = MemoryBucket(clock=lambda: self.now)
        self.store = PatientStore(MemoryStore(self.bucket), Settings())
        self.world_size = world_size

    @classmethod
    async def begun(cls, *steps: int, world_size: int = 2, moves_latest: bool = True) -> "World":
        """Return a run in which generation 1 was started and these steps were committed."""
        world = cls(world_size)
        await world.start(1)
        for id_ in ids(*steps):
            await world.commit(id_, moves_latest=moves_latest)
        return world

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.bucket.objects if key.startswith(prefix))

    async def start(self, generation: int) -> None:
        record = Generation(generation, f"launch-{generation}", self.world_size, "host", "nonce", self.now)
        data = records.encode_generation(record)
        await create_once(self.store, keys.generation_key(generation), data)
        for rank in range(self.world_size):
            member = records.encode_member(f"{generation}-{rank}", rank)
            await create_once(self.store, keys.member_key(generation, rank), member)
        await self.store.put(
            keys.beat_key(generation),
            records.encode_beat(Beat(generation, 0, 1)),
        )

    async def shard(self, id_: CheckpointId, rank: int, name: str = "") -> StoredShard:
        shard = f"rank-{rank}.pt"
        key = keys.data_key(name or f"step-{id_.step}", id_.generation, shard)
        data = f"{id_} {rank}".encode()
        await self.store.put(key, data)
        return StoredShard(shard, key, len(data), checksum_of(data, "crc64nvme"))

    async def receipt(self, id_: CheckpointId, rank: int, **metrics: float) -> None:
        shard = await self.shard(id_, rank)
        receipt = Receipt(
            id_, f"step-{id_.step}", rank, self.world_size, (shard,), tuple(sorted(metrics.items()))
        )
        await self.store.put(keys.receipt_key(id_, rank), records.encode_receipt(receipt))

    async def commit(self, id_: CheckpointId, *, moves_latest: bool = True, **metrics: float) -> None:
        for rank in range(self.world_size):
            await self.receipt(id_, rank, **metrics)
        settled = await deciding.settle(self.store, id_, world_size=self.world_size, by="test", now=self.now)
        assert settled is not None
        assert settled[0].outcome is Outcome.COMMIT
        if moves_latest:
            await protocol.move_latest(self.store, id_, f"step-{id_.step}")

    async def outcome(self, id_: CheckpointId) -> Outcome | None:
        decision = await protocol.read_decision(self.store, id_)
        return decision.outcome if decision else None

    def sweeper(
        self,
        policy: RetentionPolicy | None = None,
        ages: Ages | None = None,
        store: PatientStore | None = None,
    ) -> RemoteSweep:
        return RemoteSweep(store or self.store, policy or KeepAll(), ages or Ages(), clock=lambda: self.now)

    async def sweep(self, policy: RetentionPolicy | None = None, ages: Ages | None = None) -> RemoteReport:
        report = await self.sweeper(policy, ages).run(is_dry_run=False)
        assert report.is_clean, report
        return report

    async def verify(self) -> Verification:
        return await verify(self.store)


class StoppedError(Exception):
    """The process that made the request is gone."""


class Counted:
    """A store whose process dies at request number `die_at`, before or after its effect."""

    def __init__(self, store: PatientStore, die_at: int | None = None, *, after_effect: bool = False) -> None:
        self._store, self._die_at, self._after_effect = store, die_at, after_effect
        self.num_requests = 0

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Any:
        return self._store.capabilities

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method: Callable[..., Awaitable[Any]] = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.num_requests += 1
            is_last = self.num_requests == self._die_at
            if not is_last:
                return await method(*args, **kwargs)
            if self._after_effect:
                with contextlib.suppress(StoreError):
                    await method(*args, **kwargs)
            raise StoppedError

        return call


def ids(*steps: int, generation: int = 1) -> Sequence[CheckpointId]:
    return [CheckpointId(generation, step) for step in steps]


def replaced(record: Any, **changes: Any) -> Any:
    return dataclasses.replace(record, **changes)
