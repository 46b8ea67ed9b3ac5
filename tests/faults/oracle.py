"""An oracle that knows every shard's content and checks, byte by byte, what must hold of a remote at all times."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.errors import ObjectNotFoundError
from ckpt_async.protocol.verify import Verification, verify
from ckpt_async.stores import open_store
from ckpt_async.stores.interface import Store
from ckpt_async.transfer.patient import connect
from tests.faults.trainer import content, shard_name


@dataclass
class Oracle:
    """Looks at one remote again and again. `committed` is what it has seen and checked so far. `world_size` is that of
    all generations, or of each one.
    """

    remote: str
    world_size: int | dict[int, int]
    num_shards: int = 2
    size_bytes: int = 5000
    sizes_bytes: tuple[int, ...] = ()  # by shard number, where sizes differ
    environment: dict[str, str] | None = None
    committed: set[CheckpointId] = field(default_factory=set)
    aborted: set[CheckpointId] = field(default_factory=set)
    latest: CheckpointId | None = None

    def look(self) -> set[CheckpointId]:
        """Read and check everything new: no partial checkpoint may be visible, and `latest` must never go back."""
        asyncio.run(asyncio.wait_for(self._look(), 60))
        return self.committed

    async def _look(self) -> None:
        store = open_store(self.remote, env=self.environment)
        await store.open()
        try:
            latest = await self._read(store, keys.LATEST)
            decisions = (await store.list(keys.DECISIONS)).objects
            for each in decisions:
                id_ = keys.parse_decision_key(each.key)
                assert id_ is not None, each.key
                if id_ not in self.committed | self.aborted:
                    await self._check(store, id_)
            if latest is not None:
                named = records.decode_latest(latest).checkpoint
                assert self.latest is None or named >= self.latest, (
                    f"latest went back from {self.latest} to {named}"
                )
                assert named in self.committed, f"latest names {named}, which is not committed"
                self.latest = named
        finally:
            await store.close()

    async def _check(self, store: Store, id_: CheckpointId) -> None:
        raw = await self._read(store, keys.decision_key(id_))
        assert raw is not None
        decision = records.decode_decision(raw, id_)
        if decision.outcome is Outcome.ABORT:
            self.aborted.add(id_)
            return
        if decision.outcome is not Outcome.COMMIT:
            # It was committed once, because retention only takes committed checkpoints.
            self.committed.add(id_)
            return
        sizes = self.world_size
        world_size = sizes[id_.generation] if isinstance(sizes, dict) else sizes
        assert decision.world_size == world_size
        for rank in range(world_size):
            receipt = await self._read(store, keys.receipt_key(id_, rank))
            assert receipt is not None, f"{id_} is committed without the receipt of rank {rank}"
            named = [each["key"] for each in json.loads(receipt)["shards"]]
            wanted = {
                keys.data_key(f"step-{id_.step}", id_.generation, shard_name(rank, number)): number
                for number in range(self.num_shards)
            }
            assert sorted(named) == sorted(wanted), f"{id_}, rank {rank}: {named} instead of {list(wanted)}"
            for key, number in wanted.items():
                data = await self._read(store, key)
                size_bytes = self.sizes_bytes[number] if self.sizes_bytes else self.size_bytes
                assert data == content(id_.generation, id_.step, rank, number, size_bytes), (
                    f"{id_} is committed, but {key} is {'missing' if data is None else 'other content'}"
                )
        self.committed.add(id_)

    async def _read(self, store: Store, key: str) -> bytes | None:
        try:
            return (await store.get(key, max_size_bytes=1 << 30))[0]
        except ObjectNotFoundError:
            return None


def heard(lines: Iterable[str], what: str) -> set[CheckpointId]:
    """Return the checkpoints about which a trainer said this."""
    words = (line.split() for line in lines)
    return {CheckpointId(int(each[1]), int(each[2])) for each in words if each[0] == what}


def verified(remote: str) -> Verification:
    """Return what `ckpt-async verify --read-data 100` finds."""

    async def look() -> Verification:
        store = connect(remote, None, Settings())
        await store.open(is_read_only=True)
        try:
            return await verify(store, read_percent=100)
        finally:
            await store.close()

    return asyncio.run(asyncio.wait_for(look(), 120))
