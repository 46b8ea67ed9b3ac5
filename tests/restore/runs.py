"""Committed checkpoints in any store, made by the protocol's own steps, and ways to damage and change them."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Decision, Lease, Outcome, Receipt, StoredShard
from ckpt_async.core.settings import Settings
from ckpt_async.protocol import deciding, steps
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.transfer.patient import PatientStore, connect

ALGORITHM = "crc64nvme"


def content(step: int, name: str, size_bytes: int = 3000) -> bytes:
    """Return a file's content, which is different for every step and name, so that a mix-up is noticed."""
    return hashlib.shake_128(f"{step}/{name}".encode()).digest(size_bytes)


def files_of(step: int, world_size: int = 2, size_bytes: int = 3000) -> dict[int, dict[str, bytes]]:
    """Two files per rank, one of them in a folder."""
    return {
        rank: {name: content(step, name, size_bytes) for name in (f"rank-{rank}.pt", f"optim/rank-{rank}.pt")}
        for rank in range(world_size)
    }


class Run:
    """One run at `url`. Every call opens the store anew, in an event loop of its own."""

    def __init__(self, url: str) -> None:
        self.url = url

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[PatientStore]:
        store = connect(self.url, None, Settings())
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    def commit(
        self,
        step: int,
        files: Mapping[int, Mapping[str, bytes]] | None = None,
        *,
        generation: int = 1,
        moves_latest: bool = True,
    ) -> CheckpointId:
        asyncio.run(self.commit_in_loop(step, files, generation=generation, moves_latest=moves_latest))
        return CheckpointId(generation, step)

    async def commit_in_loop(
        self,
        step: int,
        files: Mapping[int, Mapping[str, bytes]] | None = None,
        *,
        generation: int = 1,
        moves_latest: bool = True,
    ) -> None:
        files = files_of(step) if files is None else files
        id_ = CheckpointId(generation, step)
        async with self.opened() as store:
            for rank, theirs in files.items():
                shards = []
                for name, data in theirs.items():
                    key, checksum = (
                        keys.data_key(f"step-{step}", generation, name),
                        checksum_of(data, ALGORITHM),
                    )
                    await store.put(key, data)
                    shards.append(StoredShard(name, key, len(data), checksum))
                receipt = Receipt(id_, f"step-{step}", rank, len(files), tuple(shards))
                await store.put(keys.receipt_key(id_, rank), records.encode_receipt(receipt))
            settled = await deciding.settle(store, id_, world_size=len(files), by="test", now=1_000_000.0)
            assert settled is not None
            assert settled[0].outcome is Outcome.COMMIT
            if moves_latest:
                await steps.move_latest(store, id_, f"step-{step}")

    def prune(self, id_: CheckpointId, *, finish: bool = True) -> None:
        asyncio.run(self.prune_in_loop(id_, finish=finish))

    async def prune_in_loop(self, id_: CheckpointId, *, finish: bool = True) -> bool:
        async with self.opened() as store:
            await steps.begin_prune(store, id_)
            return finish and await steps.finish_prune(store, id_)

    def put(self, key: str, data: bytes) -> None:
        async def main() -> None:
            async with self.opened() as store:
                await store.put(key, data)

        asyncio.run(main())

    def get(self, key: str) -> bytes:
        async def main() -> bytes:
            async with self.opened() as store:
                return (await store.get(key, max_size_bytes=1 << 30))[0]

        return asyncio.run(main())

    def delete(self, *object_keys: str) -> None:
        async def main() -> None:
            async with self.opened() as store:
                await store.delete(list(object_keys))

        asyncio.run(main())

    def keys(self, prefix: str = "") -> list[str]:
        async def main() -> list[str]:
            async with self.opened() as store:
                return [each.key for each in (await store.list(prefix)).objects]

        return asyncio.run(main())

    def decision(self, id_: CheckpointId) -> Decision:
        return records.decode_decision(self.get(keys.decision_key(id_)), id_)

    def damages(self) -> dict[CheckpointId, str]:
        async def main() -> dict[CheckpointId, str]:
            async with self.opened() as store:
                return await steps.read_damages(store)

        return asyncio.run(main())

    def leases(self) -> list[Lease]:
        return [records.decode_lease(self.get(key)) for key in self.keys(keys.LEASES)]

    def flip(self, key: str, at: int = 100) -> None:
        """Flip one bit of one byte."""
        data = bytearray(self.get(key))
        data[at] ^= 1
        self.put(key, bytes(data))


def shard_key(step: int, name: str, generation: int = 1) -> str:
    return keys.data_key(f"step-{step}", generation, name)


def is_whole(report: Any, files: Mapping[int, Mapping[str, bytes]]) -> bool:
    """Whether exactly these files are where the report says, byte for byte."""
    wanted = {name: data for theirs in files.values() for name, data in theirs.items()}
    return set(report.paths) == set(wanted) and all(
        Path(report.paths[name]).read_bytes() == data for name, data in wanted.items()
    )


def left_in(folder: Path) -> list[str]:
    """Return the relative path of every file below the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
