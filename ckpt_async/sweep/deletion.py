"""Deletes a run, or one kind of it: every checkpoint and all records, but nothing else below its URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.units import age, named
from ckpt_async.errors import CheckpointRefusedError
from ckpt_async.protocol import steps
from ckpt_async.stores.interface import Listing, ObjectInfo
from ckpt_async.transfer.patient import PatientStore

# Whoever works on a run writes to it more often: signs of life, receipts, leases.
QUIET_S = 600.0


@dataclass(frozen=True, slots=True)
class Deletion:
    """What there is to delete. `other_keys` are not ours and stay; `obstacle` is why not to begin, or ""."""

    url: str
    committed: Sequence[CheckpointId]
    num_objects: int
    size_bytes: int
    other_keys: Sequence[str]
    obstacle: str


def is_ours(key: str) -> bool:
    return key.startswith((keys.DATA, f"{keys.PRIVATE}/"))


async def plan(store: PatientStore) -> Deletion:
    """Return what `delete` would delete in an open store. Lists every object of the run."""
    listing = await store.list("")
    ours = [each for each in listing.objects if is_ours(each.key)]
    others = [
        each.key for each in listing.objects if not is_ours(each.key) and not keys.parse_kind_key(each.key)
    ]
    decisions, _ = await steps.all_decisions(store)  # what cannot be read is deleted, too
    committed = [each for each in decisions if each.outcome is Outcome.COMMIT]
    return Deletion(
        url=store.url,
        committed=[each.checkpoint for each in committed],
        num_objects=len(ours),
        size_bytes=sum(each.size_bytes for each in ours),
        other_keys=others,
        obstacle=await _obstacle(store, committed, _silent_s(listing, ours)),
    )


def check(found: Deletion) -> None:
    """Raise CheckpointRefusedError if something speaks against it."""
    if found.obstacle:
        raise CheckpointRefusedError(f"{found.url} is not deleted: {found.obstacle}")


async def delete(store: PatientStore, found: Deletion) -> None:
    """Delete what `plan` has found, and what was written since. Safe to repeat and to cut short anywhere.

    Readers see no checkpoint any more once the first step is done. Raises CheckpointRefusedError, before anything is
    deleted, if there is an obstacle, and in between if somebody has begun to read.
    """
    check(found)
    for id_ in found.committed:
        await steps.begin_prune(store, id_)
    decisions, _ = await steps.all_decisions(store)
    for decision in decisions:
        if decision.outcome is Outcome.PRUNING and not await steps.finish_prune(store, decision.checkpoint):
            raise CheckpointRefusedError(
                f"{store.url} is not deleted yet: somebody reads {decision.checkpoint}"
            )
    for upload in await store.list_multiparts(""):
        await store.abort_multipart(upload.key, upload.upload_id)
    # The generations go last: a launch that goes on until then gets a newer one than any that was deleted.
    left = [each.key for each in (await store.list("")).objects if is_ours(each.key)]
    last = [each for each in left if each.startswith(keys.GENERATIONS) or each == keys.COPY]
    await store.delete([each for each in left if each not in last])
    await store.delete(last)


async def _obstacle(store: PatientStore, committed: Sequence[Decision], silent_s: float) -> str:
    if pinned := [each.checkpoint.step for each in committed if each.is_pinned]:
        return f"{named('step', pinned)} {'is' if len(pinned) == 1 else 'are'} pinned: unpin first"
    if silent_s < QUIET_S:
        return f"something was written {age(silent_s)} ago, so somebody may be at work: try again {age(QUIET_S)} later"
    for each in committed:
        if reading := await steps.readers(store, each.checkpoint):
            return f"{reading[0]} reads {each.checkpoint}"
    return ""


def _silent_s(listing: Listing, ours: Sequence[ObjectInfo]) -> float:
    """Return for how long nobody has written, by the store's clock, apart from what looking at it writes, and what an
    interrupted deletion has written.
    """
    own = (keys.DECISIONS, keys.PROBES, keys.TEMPORARY)
    return listing.server_time - max(
        (each.last_modified or 0.0 for each in ours if not each.key.startswith(own)), default=0.0
    )
