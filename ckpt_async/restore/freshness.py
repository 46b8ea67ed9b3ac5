"""Checks whether a run in which nothing was found is really new. A silent restart from step 0 costs more than a
question.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_async import threads
from ckpt_async.core import keys
from ckpt_async.core.backlog import left_by_predecessors
from ckpt_async.core.boundary import NOTHING_COLLECTED
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId, Latest, Outcome, without_slash
from ckpt_async.core.units import counted
from ckpt_async.errors import FailureReason, NoJournalError, StoreError
from ckpt_async.local import journals
from ckpt_async.protocol import steps
from ckpt_async.protocol.cas import if_readable
from ckpt_async.restore.session import Session, session
from ckpt_async.stores import StoreOptions
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)

_HINT = (
    "is this the right place, is it mounted, and does the store list everything it has? If you emptied the"
    " run on purpose, start it again under another URL and in another folder"
)


@dataclass(frozen=True, slots=True)
class Known:
    """What a node's journals know of a run."""

    committed: CheckpointId | None = None
    generation: int = 0


def known_of(locals_: Iterable[Local], remote: str) -> Known:
    """Return what the journals of the ranks that wrote to `remote` know. Pure."""
    there = without_slash(remote)
    ours = [each for each in locals_ if each.remote is not None and each.remote.url == there]
    committed = [each.newest_committed for each in ours if each.newest_committed is not None]
    return Known(max(committed, default=None), max((each.generation for each in ours), default=0))


def known_in(folder: str | os.PathLike[str] | None, remote: str) -> Known:
    """Return what the journals in `folder` know of the run at `remote`. Blocks."""
    if folder is None:
        return Known()
    try:
        found = journals.states(folder)
    except NoJournalError:
        return Known()
    return known_of([each.local for states in found.values() for each in states], remote)


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a checkpoint that an earlier launch has sealed, and of which no decision is known here."""

    checkpoint: CheckpointId
    world_size: int
    rank: int


def parts_in(folder: str | os.PathLike[str], kind: str, remote: str, generation: int) -> list[Part]:
    """Return what launches before `generation` left in this folder, and what can still be committed of it. Blocks."""
    there = without_slash(remote)
    found = []
    for rank, reading in journals.read(folder, kind=kind).items():
        local = reading.local()
        if local.remote is not None and local.remote.url == there:
            for id_ in left_by_predecessors(local, generation):
                sealed = local.checkpoints[id_].sealed
                found += [Part(id_, sealed.world_size, rank)] if sealed is not None else []
    return found


def missing_parts(
    remote: str, parts: Iterable[Part], store_options: StoreOptions | None
) -> dict[CheckpointId, list[int]]:
    """Return the ranks whose part is neither in `parts` nor in the store, for each checkpoint that was not given up.
    Blocks.
    """
    ranks: dict[CheckpointId, set[int]] = {}
    for each in parts:
        ranks.setdefault(each.checkpoint, {*range(each.world_size)}).discard(each.rank)

    async def one(store: PatientStore, id_: CheckpointId) -> list[int] | None:
        listing = await store.list(keys.receipts_prefix(id_))
        decision = await steps.read_settled(store, id_, only_reads=True)
        if decision is not None:
            return [] if decision.outcome is Outcome.COMMIT else None
        done = [keys.parse_receipt_key(each.key) for each in listing.objects]
        return sorted(ranks[id_] - {each[1] for each in done if each is not None})

    async def work() -> dict[CheckpointId, list[int]]:
        async with session(remote, store_options) as opened:
            found = await all_or_none(one(opened.store, id_) for id_ in ranks)
        return {id_: each for id_, each in zip(ranks, found, strict=True) if each is not None}

    return threads.run(work()) if ranks else {}


def check_nowhere(remote: str, known: Known) -> None:
    """Like `check_fresh`, for a remote that does not exist at all. Pure."""
    _check(remote, known, None, has_generations=False)


async def check_fresh(opened: Session, remote: str, known: Known, latest: Latest | None) -> None:
    """Raise StoreError if the run has left traces although no checkpoint of it was found. `latest` is what it said
    before all was listed. Logs whether anything was ever here: the URL may be mistyped.
    """
    store = opened.store
    if latest is not None:
        boundary = await if_readable(steps.read_boundary(store)) or NOTHING_COLLECTED
        latest = None if boundary.voids(latest.checkpoint) else latest
    if not store.capabilities.lists:
        _check(remote, known, latest, has_generations=True)
        return
    numbers = {keys.parse_generation_key(each.key) for each in (await store.list(keys.GENERATIONS)).objects}
    _check(remote, known, latest, has_generations=bool(numbers))
    earlier = numbers - {None, known.generation}
    logger.warning(
        "no_checkpoint url=%s; %s",
        remote,
        f"{counted(len(earlier), 'other generation')} began here, and nothing was committed"
        if earlier
        else "nothing was ever saved here, so this is a new run, or not the right URL",
    )


def _check(remote: str, known: Known, latest: Latest | None, *, has_generations: bool) -> None:
    if latest is not None:
        mark = f"{keys.LATEST} says that {latest.checkpoint} is committed"
    elif known.committed is not None:
        mark = f"this node's journal knows that {known.committed} was committed"
    elif known.generation and not has_generations:
        mark = f"this node's journal knows generation {known.generation} of it"
    else:
        return
    raise StoreError(
        f"{remote} shows no checkpoint, but {mark}: this is not a fresh start",
        reason=FailureReason.OTHER,
        operation="find",
        hint=_HINT,
    )
