"""The demo's verdict: every committed checkpoint is compared byte for byte with what the ranks themselves logged."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.protocol import steps
from ckpt_async.protocol.verify import verify
from ckpt_async.stores.interface import Sink
from ckpt_async.transfer.patient import PatientStore, connect
from tests.demo.config import Config, read_log


@dataclass(slots=True)
class Verdict:
    """What was checked, and what was wrong. The verdict is good if nothing was wrong."""

    committed: dict[CheckpointId, Decision] = field(default_factory=dict)
    aborted: dict[CheckpointId, str] = field(default_factory=dict)
    num_shards: int = 0
    size_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


def check(config: Config, world_size: int) -> Verdict:
    """Read every byte of every committed shard back from the store, and compare."""
    lines = [line for rank in range(world_size) for line in read_log(config.log(rank))]
    written = {line["key"]: line for line in lines if line["event"] == "state"}
    sealed: dict[CheckpointId, set[int]] = {}
    losses: dict[tuple[int, int], set[float]] = {}
    for line in lines:
        if line["event"] == "loss":
            losses.setdefault((line["rank"], line["step"]), set()).add(line["loss"])
        if line["event"] == "sealed":
            sealed.setdefault(CheckpointId(line["generation"], line["step"]), set()).add(line["rank"])

    async def read() -> Verdict:
        store = connect(config.remote, None, Settings())
        await store.open(is_read_only=True)
        try:
            return await compare(store)
        finally:
            await store.close()

    async def compare(store: PatientStore) -> Verdict:
        verdict = Verdict()
        listing = await store.list(keys.DECISIONS)
        for each in listing.objects:
            id_ = keys.parse_decision_key(each.key)
            decision = await steps.read_decision(store, id_) if id_ else None
            if id_ is None or decision is None:
                verdict.wrong.append(f"{each.key}: not a decision")
            elif decision.outcome is Outcome.COMMIT:
                verdict.committed[id_] = decision
                for rank in range(decision.world_size):
                    receipt = await steps.bound_receipt(store, decision, rank)
                    for shard in receipt.shards:
                        await _compare(store, shard.key, shard.size_bytes, written, verdict)
            else:
                verdict.aborted[id_] = decision.reason
        for id_, ranks in sorted(sealed.items()):
            if len(ranks) == world_size and id_ not in verdict.committed:
                verdict.wrong.append(f"{id_} was sealed by all ranks but is not committed")
        latest = await steps.read_latest(store)
        newest = max(verdict.committed, default=None)
        if (latest.checkpoint if latest else None) != newest:
            verdict.wrong.append(f"latest names {latest}, the newest commit is {newest}")
        verification = await verify(store)
        verdict.wrong += [str(each) for each in verification.violations]
        return verdict

    verdict = asyncio.run(read())
    for (rank, step), different in sorted(losses.items()):
        if len(different) > 1:
            verdict.wrong.append(f"rank {rank} had different losses at step {step}: {sorted(different)}")
    _check_local(config, verdict)
    return verdict


async def _compare(
    store: PatientStore, key: str, size_bytes: int, written: dict[str, dict[str, object]], verdict: Verdict
) -> None:
    digest = hashlib.sha256()

    @contextlib.asynccontextmanager
    async def receive() -> AsyncIterator[Sink]:
        nonlocal digest
        digest = hashlib.sha256()
        yield digest.update

    await store.get_range(key, 0, size_bytes, receive)
    verdict.num_shards += 1
    verdict.size_bytes += size_bytes
    line = written.get(key)
    if line is None:
        verdict.wrong.append(f"{key}: no rank had such a state")
    elif (line["size_bytes"], line["sha256"]) != (size_bytes, digest.hexdigest()):
        verdict.wrong.append(
            f"{key}: its bytes are not what torch.save wrote of the rank's state at that step"
        )


def _check_local(config: Config, verdict: Verdict) -> None:
    """Check local retention: the newest `keep` committed checkpoints are there, the symlink points to the newest."""
    expected = {verdict.committed[id_].name for id_ in sorted(verdict.committed)[-config.keep :]}
    there = {path.name for path in config.folder.glob("step-*")}
    if not expected <= there:
        verdict.wrong.append(f"local checkpoints {sorted(there)} lack some of {sorted(expected)}")
    extra = there - expected - {f"step-{id_.step}" for id_ in verdict.aborted}
    if extra:
        verdict.wrong.append(f"local checkpoints {sorted(extra)} should have been removed")
    link = config.folder / "latest-rank0.pt"
    newest = verdict.committed[max(verdict.committed)].name if verdict.committed else None
    if newest is not None and link.resolve().parent.name != newest and link.resolve().name != newest:
        verdict.wrong.append(f"{link} points at {link.resolve()}, not at {newest}")
