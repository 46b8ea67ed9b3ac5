"""The smallest honest resume, over the store alone. To be replaced by `ckpt_async.restore` when that exists."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from ckpt_async import keys, protocol
from ckpt_async.checksums import Digest
from ckpt_async.model import CheckpointId, Outcome, StoredShard
from ckpt_async.observe import NullObserver
from ckpt_async.requests import Requests
from ckpt_async.settings import Settings
from ckpt_async.store import Store
from ckpt_async.stores import open_store

T = TypeVar("T")


def with_store(remote: str, work: Callable[[Store, Requests], Awaitable[T]]) -> T:
    """Run `work` on the remote, opened for reading, in a loop of its own."""

    async def main() -> T:
        store = open_store(remote)
        await store.open(is_read_only=True)
        try:
            return await work(store, Requests(Settings(), NullObserver(), remote))
        finally:
            await store.close()

    return asyncio.run(main())


def find_newest(remote: str) -> CheckpointId | None:
    """The newest committed checkpoint, from the decisions: the truth, where `latest` is a hint (rule R3)."""

    async def work(store: Store, requests: Requests) -> CheckpointId | None:
        listing = await requests.control("list", lambda: store.list(keys.DECISIONS))
        for each in reversed(listing.objects):
            checkpoint = keys.parse_decision_key(each.key)
            if checkpoint is None:
                continue
            decision = await protocol.read_decision(store, requests, checkpoint)
            if decision is not None and decision.outcome is Outcome.COMMIT:
                return checkpoint
        return None

    return with_store(remote, work)


def load_shard(
    remote: str, checkpoint: CheckpointId, rank: int, folder: Path, work: Path
) -> tuple[Path, str]:
    """This rank's one shard of the checkpoint, verified: the local file if it is the right one, else fetched.

    Returns its path, and "local" or "remote".
    """

    async def fetch(store: Store, requests: Requests) -> tuple[Path, str]:
        decision = await protocol.read_decision(store, requests, checkpoint)
        assert decision is not None
        (shard,) = (await protocol.bound_receipt(store, requests, decision, rank)).shards
        local = folder / decision.name / shard.name
        if local.is_file() and _matches(local.read_bytes(), shard):
            return local, "local"
        target = work / f"fetched-rank-{rank}.pt"
        with target.with_suffix(".tmp").open("wb") as file:
            digest = Digest(shard.checksum.algorithm)

            def sink(piece: memoryview) -> None:
                digest.update(piece)
                file.write(piece)

            await store.get_range(shard.key, 0, shard.size_bytes, sink)
        if digest.checksum() != shard.checksum:
            raise RuntimeError(f"{shard.key} arrived damaged")
        os.replace(target.with_suffix(".tmp"), target)
        return target, "remote"

    return with_store(remote, fetch)


def _matches(data: bytes, shard: StoredShard) -> bool:
    digest = Digest(shard.checksum.algorithm)
    digest.update(data)
    return len(data) == shard.size_bytes and digest.checksum() == shard.checksum
