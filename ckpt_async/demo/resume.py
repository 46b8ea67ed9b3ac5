"""Finding and fetching the newest committed checkpoint. Stands in for `ckpt_async.restore`, and goes when that comes:
no lease is taken, and nothing older is tried if the newest is damaged.
"""

from __future__ import annotations

import time
from pathlib import Path

from ckpt_async import keys, protocol, status
from ckpt_async.checksums import Digest
from ckpt_async.model import CheckpointId, Checksum, Decision, Outcome, StoredShard
from ckpt_async.observe import NullObserver
from ckpt_async.requests import Requests
from ckpt_async.settings import Settings
from ckpt_async.store import Store
from ckpt_async.stores import open_store

_POLL_S = 0.05
_SLICE_BYTES = 1 << 20


def await_predecessor(folder: Path, generation: int, timeout_s: float) -> float:
    """Wait until what earlier generations had sealed is decided (the uploader finishes it, R11); returns how long.

    The newest checkpoint is often the very one that was still uploading when the predecessor died.
    """
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if all(each.id.generation >= generation for each in status.load(folder).pending):
            break
        time.sleep(_POLL_S)
    return time.monotonic() - started


async def newest_committed(remote: str) -> CheckpointId | None:
    """The newest committed checkpoint by the decisions themselves, in the order (generation, step)."""
    store, requests = await _open(remote)
    try:
        found = [each.checkpoint for each in await committed(store, requests)]
        return max(found, default=None)
    finally:
        await store.close()


async def committed(store: Store, requests: Requests) -> list[Decision]:
    """Every checkpoint that is committed now, oldest first."""
    listing = await requests.control("list", lambda: store.list(keys.DECISIONS))
    ids = [keys.parse_decision_key(each.key) for each in listing.objects]
    decisions = [await protocol.read_decision(store, requests, each) for each in ids if each is not None]
    return [each for each in decisions if each is not None and each.outcome is Outcome.COMMIT]


async def fetch(remote: str, checkpoint: CheckpointId, rank: int, *, folder: Path, into: Path) -> list[Path]:
    """Files with the contents of this rank's shards, in the receipt's order: those in `folder` that still have the
    right checksum, the others downloaded to `into` and verified.
    """
    store, requests = await _open(remote)
    try:
        decision = await protocol.read_decision(store, requests, checkpoint)
        if decision is None or decision.outcome is not Outcome.COMMIT:
            raise LookupError(f"{checkpoint} is not committed any more")
        receipt = await protocol.bound_receipt(store, requests, decision, rank)
        found = []
        for shard in receipt.shards:
            path = folder / decision.name / shard.name
            if not _is_whole(path, shard.checksum):
                path = into / shard.name
                await _download(store, requests, shard, path)
            found.append(path)
        return found
    finally:
        await store.close()


async def _open(remote: str) -> tuple[Store, Requests]:
    store = open_store(remote)
    await store.open(is_read_only=True)
    return store, Requests(Settings(), NullObserver(), remote)


def _is_whole(path: Path, checksum: Checksum) -> bool:
    digest = Digest(checksum.algorithm)
    try:
        with path.open("rb") as file:
            while piece := file.read(_SLICE_BYTES):
                digest.update(piece)
    except FileNotFoundError:
        return False
    return digest.checksum() == checksum


async def _download(store: Store, requests: Requests, shard: StoredShard, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{path.name}.tmp")
    with tmp.open("wb") as file:

        async def attempt() -> None:
            file.seek(0)
            await store.get_range(shard.key, 0, shard.size_bytes, lambda piece: _write(file.write(piece)))

        await requests.control("get", attempt)
        file.truncate()
    if not _is_whole(tmp, shard.checksum):
        raise OSError(f"{shard.key}: what was downloaded does not have the receipt's checksum")
    tmp.replace(path)


def _write(_size_bytes: int) -> None:
    """`Sink` returns nothing."""
