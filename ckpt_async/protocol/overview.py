"""An overview of a run for people, from its remote.

It shows what is committed and, for checkpoints in flight, whose receipts are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_async.core import keys, records
from ckpt_async.core.boundary import NOTHING_COLLECTED
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.protocol import steps, sweep_plan
from ckpt_async.protocol.cas import if_readable, read_record
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none

# At most this many data objects are listed, which takes five requests on S3. Beyond that, checkpoints that no rank has
# finished are not seen.
MAX_LISTED = 5000
# At most this many of the ranks that a checkpoint waits for are named.
MAX_RANKS = 100
STATES = {
    Outcome.COMMIT: "committed",
    Outcome.ABORT: "aborted",
    Outcome.PRUNING: "pruning",
    Outcome.PRUNED: "pruned",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint.

    `state` is in_flight, committed, aborted, pruning or pruned. `ranks` are those with a receipt, if it is in flight;
    `at` is when it was decided, or else when something of it last arrived.
    """

    id: CheckpointId
    name: str
    state: str
    world_size: int | None
    ranks: tuple[int, ...] = ()
    num_shards: int = 0
    size_bytes: int = 0
    at: float | None = None
    reason: str = ""
    is_pinned: bool = False
    is_damaged: bool = False

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks whose receipts are missing, if the checkpoint is in flight."""
        if self.state != "in_flight" or self.world_size is None:
            return []
        return sorted({*range(self.world_size)} - {*self.ranks})


@dataclass(frozen=True, slots=True)
class Overview:
    """A run, or one kind of its checkpoints. `seen_at` is by the store's clock; `generation` is the newest launch's."""

    url: str
    seen_at: float
    generation: int
    world_size: int | None
    items: tuple[Item, ...]
    unreadable: tuple[str, ...] = ()

    @property
    def newest_committed(self) -> Item | None:
        return max(
            (each for each in self.items if each.state == "committed" and not each.is_damaged),
            key=lambda each: each.id,
            default=None,
        )

    @property
    def in_flight(self) -> tuple[Item, ...]:
        return tuple(each for each in self.items if each.state == "in_flight")


def overview(url: str, view: sweep_plan.View, unreadable: Sequence[str] = ()) -> Overview:
    """Return the overview for what a look at the store showed. Pure."""
    decided = [
        Item(
            id_,
            each.name,
            STATES[each.outcome],
            each.world_size,
            num_shards=each.num_shards,
            size_bytes=each.size_bytes,
            at=each.decided_at,
            reason=each.reason,
            is_pinned=each.is_pinned,
            is_damaged=id_ in view.damaged and each.outcome is Outcome.COMMIT,
        )
        for id_, each in view.decisions.items()
        if not view.boundary.voids(id_)
    ]
    open_ = {*view.receipts, *view.data} - view.decisions.keys() - view.unreadable
    flying = [_flying(id_, view) for id_ in open_ if not view.boundary.voids(id_)]
    newest = view.newest_generation
    items = tuple(sorted([*decided, *flying], key=lambda each: each.id))
    return Overview(url, view.server_time, newest, view.world_sizes.get(newest), items, tuple(unreadable))


def _flying(id_: CheckpointId, view: sweep_plan.View) -> Item:
    receipts, data = view.receipts.get(id_, {}), view.data.get(id_, ())
    times = [each.last_modified for each in (*receipts.values(), *data) if each.last_modified is not None]
    return Item(
        id_,
        view.names.get(id_, f"step-{id_.step}"),
        "in_flight",
        view.world_sizes.get(id_.generation),
        ranks=tuple(sorted(receipts)),
        num_shards=len(data),
        size_bytes=sum(each.size_bytes for each in data),
        at=max(times, default=None),
        reason="left by an earlier launch of the run" if id_.generation < view.newest_generation else "",
    )


def overview_json(found: Overview) -> dict[str, Any]:
    """Return the overview as `ckpt-async status REMOTE --json` prints it and a sweeper's page shows it."""
    newest = found.newest_committed
    return {
        "remote": found.url,
        "seen_at": found.seen_at,
        "generation": found.generation,
        "world_size": found.world_size,
        "last_committed": newest
        and {
            "generation": newest.id.generation,
            "step": newest.id.step,
            "decided_at": newest.at,
            "age_s": max(0.0, found.seen_at - (newest.at or 0.0)),
        },
        "checkpoints": [_item_json(each) for each in found.items],
        "unreadable": list(found.unreadable),
    }


def _item_json(each: Item) -> dict[str, Any]:
    missing, is_flying = each.missing_ranks, each.state == "in_flight"
    return {
        "generation": each.id.generation,
        "step": each.id.step,
        "name": each.name,
        "state": each.state,
        "world_size": each.world_size,
        "ranks": list(each.ranks),
        "missing_ranks": missing[:MAX_RANKS],
        "num_missing": len(missing),
        "shards": each.num_shards,
        "size_bytes": each.size_bytes,
        "changed_at" if is_flying else "decided_at": each.at,
        "failure": each.reason or None,
        "is_pinned": each.is_pinned,
        "is_damaged": each.is_damaged,
    }


# --- looking -----------------------------------------------------------------------------------------------


async def look(store: PatientStore, known: steps.KnownDecisions) -> Overview | None:
    """Look at a run; returns None if there was never one here.

    Takes four listings, a part of one more, and a GET for each decision that is not in `known` yet, which is kept up to
    date. Read-only.
    """
    generations, decisions, receipts, damages, data = await all_or_none(
        [
            store.list(keys.GENERATIONS),
            store.list(keys.DECISIONS),
            store.list(keys.RECEIPTS),
            store.list(keys.DAMAGED),
            store.list(keys.DATA, enough=lambda found: len(found) >= MAX_LISTED),
        ]
    )
    if not generations.objects and not decisions.objects:
        return None
    unreadable = [error.key for error in await steps.read_decisions(store, decisions, known)]
    there = sweep_plan.stored(receipts.objects, data.objects)
    decided = {decision.checkpoint: decision for _, decision in known.values()}
    numbers = {number for each in generations.objects if (number := keys.parse_generation_key(each.key))}
    newest = max(numbers, default=0)
    wanted = {newest, *(id_.generation for id_ in {*there.receipts, *there.data} - decided.keys())} & numbers
    sizes = await all_or_none(_world_size(store, number) for number in sorted(wanted))
    view = sweep_plan.View(
        server_time=max(each.server_time for each in (generations, decisions, receipts, data)),
        newest_generation=newest,
        world_sizes={number: size for number, size in zip(sorted(wanted), sizes, strict=True) if size},
        decisions=decided,
        decided_at={},
        receipts=there.receipts,
        data=there.data,
        names=there.names,
        damaged=frozenset(filter(None, (keys.parse_damage_key(each.key) for each in damages.objects))),
        boundary=await if_readable(steps.read_boundary(store)) or NOTHING_COLLECTED,
        unreadable=frozenset(filter(None, map(keys.parse_decision_key, unreadable))),
    )
    return overview(store.url, view, unreadable)


async def _world_size(store: PatientStore, generation: int) -> int | None:
    key = keys.generation_key(generation)
    there = await if_readable(
        read_record(store, key, lambda data: records.decode_generation(data, generation))
    )
    return there[0].world_size if there else None
