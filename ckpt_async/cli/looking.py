"""What read-only commands find in a remote: the run's checkpoints of all kinds, or the runs below a prefix."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ckpt_async.cli.output import Which, saying_later, store_options, telling_of_silence
from ckpt_async.core import keys
from ckpt_async.core.boundary import NOTHING_COLLECTED
from ckpt_async.core.model import CheckpointId, Decision, Outcome, Receipt
from ckpt_async.core.settings import Settings
from ckpt_async.errors import InvalidRecordError, ObjectNotFoundError
from ckpt_async.protocol import steps
from ckpt_async.protocol.runs import check_known, kinds_below, runs_below
from ckpt_async.transfer.budgets import Budgets
from ckpt_async.transfer.patient import PatientStore, connect
from ckpt_async.transfer.together import all_or_none

T = TypeVar("T")

# How long requests to a failing store are retried, and the longest pause in between: someone is waiting.
LS_TIMEOUT_S, LS_PAUSE_S = 20.0, 2.0
NUM_RUNS_AT_ONCE = 8
# All decisions are read at once, and there is no training to leave room for.
NUM_RECORDS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Found:
    """The decisions on the run itself, or on one `kind` of its checkpoints, with the store's time.

    They are in order, oldest first, without those that the boundary voids. `unreadable` are records that cannot be
    read, `receipts` those that were asked for.
    """

    kind: str
    decisions: list[Decision]
    server_time: float
    unreadable: list[InvalidRecordError]
    receipts: dict[CheckpointId, list[Receipt]] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The prefix of its keys within the run."""
        return f"{keys.kind_place(self.kind)}/" if self.kind else ""

    @property
    def newest(self) -> CheckpointId | None:
        committed = (each.checkpoint for each in self.decisions if each.outcome is Outcome.COMMIT)
        return max(committed, default=None)

    @property
    def committed(self) -> list[Decision]:
        return [each for each in self.decisions if each.outcome is Outcome.COMMIT]


@dataclass(frozen=True, slots=True)
class Run:
    """A run, and what was found of each kind; `kinds` is empty if nobody ever opened the run."""

    url: str
    kinds: list[Found]

    @property
    def unreadable(self) -> list[InvalidRecordError]:
        return [error for of_kind in self.kinds for error in of_kind.unreadable]


@contextlib.asynccontextmanager
async def opened(
    url: str, options: argparse.Namespace
) -> AsyncIterator[tuple[PatientStore, Callable[[], None]]]:
    """Yield the store, and a function to call once it has answered."""
    settings = Settings(upload_timeout_s=LS_TIMEOUT_S, retry_max_s=LS_PAUSE_S)
    budgets = Budgets(settings, num_records=NUM_RECORDS_AT_ONCE)
    store = connect(url, store_options(options), settings, is_patient=False, budgets=budgets)
    try:
        with telling_of_silence(store.url, patience_s=LS_TIMEOUT_S) as heard:
            await store.open(is_read_only=True)
            yield store, heard
    finally:
        await store.close()
        budgets.close()


async def look(
    options: argparse.Namespace, wanted: Callable[[Decision], bool] | None = None
) -> tuple[str, list[Run]]:
    """Return the URL with the run that is there, or with the runs below it.

    With `wanted`, the receipts of such checkpoints are read as well. Only reads, so it needs no right to write.
    Raises ObjectNotFoundError if there was never a run here or below, UnknownKindError if there was never one of the
    requested kind.
    """
    run = await _look_at(options.remote, options, wanted)
    if run.kinds:
        return run.url, [run]
    async with opened(options.remote, options) as (store, heard):
        heard()  # the store has answered already
        text = f"still searching for runs below {store.url}"
        with saying_later(lambda: text, "still_looking", url=store.url):
            below = [] if options.kind else await runs_below(store)
    if not below:
        raise ObjectNotFoundError(f"{run.url} holds no run of ckpt_async, and there are none below it")
    at_once = asyncio.Semaphore(NUM_RUNS_AT_ONCE)

    async def one(place: str) -> Run:
        async with at_once:
            return await _look_at(f"{run.url.removesuffix('/')}/{place}", options, None)

    return run.url, await all_or_none(one(place) for place in below)


async def _look_at(url: str, options: argparse.Namespace, wanted: Callable[[Decision], bool] | None) -> Run:
    async with opened(url, options) as (run, heard):
        found = [] if options.kind else [await _decisions(run, "", heard, wanted)]
        kinds = await kinds_below(run)
        heard()
        if options.kind is not None and options.kind not in kinds:
            await check_known(run, options.kind)
            raise ObjectNotFoundError(f"{run.url} holds no checkpoints of kind {options.kind!r}")
    for kind in kinds:
        if options.kind in (None, kind):
            async with opened(keys.kind_remote(run.url, kind), options) as (store, heard):
                found.append(await _decisions(store, kind, heard, wanted))
    return Run(run.url, [each for each in found if each is not None])


async def _decisions(
    store: PatientStore, kind: str, heard: Callable[[], None], wanted: Callable[[Decision], bool] | None
) -> Found | None:
    """Return what was decided, or None if there was never a run here."""
    listing = await store.list(keys.DECISIONS)
    heard()
    if not listing.objects and not (await store.list(keys.GENERATIONS)).objects:
        return None
    unreadable: list[InvalidRecordError] = []
    boundary = await _or_note(steps.read_boundary(store), unreadable) or NOTHING_COLLECTED
    checkpoints = filter(None, (keys.parse_decision_key(each.key) for each in listing.objects))
    read = await all_or_none(_or_note(steps.read_decision(store, each), unreadable) for each in checkpoints)
    valid = (each for each in read if each is not None and not boundary.voids(each.checkpoint))
    decisions = sorted(valid, key=lambda each: each.checkpoint)
    found = Found(kind, decisions, listing.server_time, unreadable)
    for each in found.committed if wanted is not None else ():
        if wanted is not None and wanted(each):
            receipts = await all_or_none(
                _or_note(steps.bound_receipt(store, each, rank), unreadable)
                for rank in range(each.world_size)
            )
            found.receipts[each.checkpoint] = [receipt for receipt in receipts if receipt is not None]
    return found


async def _or_note(reading: Awaitable[T], unreadable: list[InvalidRecordError]) -> T | None:
    try:
        return await reading
    except InvalidRecordError as error:
        unreadable.append(error)
        return None


def is_wanted(each: Decision, which: Which | None, generation: int | None) -> bool:
    """Return whether a checkpoint has this step or name and this generation, where given. Pure."""
    if generation not in (None, each.checkpoint.generation):
        return False
    return which is None or which.is_of(each.checkpoint) or which.text == each.name


def size_bytes(decisions: Iterable[Decision]) -> int:
    return sum(each.size_bytes for each in decisions)
