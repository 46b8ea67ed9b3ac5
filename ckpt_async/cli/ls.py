"""A run's checkpoints: `ls`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt_async import threads
from ckpt_async.cli.output import (
    Exit,
    Json,
    id_json,
    print_json,
    print_table,
    store_options,
    telling_of_silence,
)
from ckpt_async.cli.parsing import WHERE, add_kind, add_store_options
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import age, in_units
from ckpt_async.errors import InvalidRecordError, ObjectNotFoundError
from ckpt_async.protocol import steps, sweep_plan
from ckpt_async.protocol.kinds import check_known, kinds_below
from ckpt_async.transfer.patient import PatientStore, connect
from ckpt_async.transfer.together import all_or_none

T = TypeVar("T")

# How long a store that fails is tried, and the longest pause in between: someone is waiting.
LS_TIMEOUT_S, LS_PAUSE_S = 20.0, 2.0


def ls_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("remote", metavar="REMOTE", help=WHERE)
    add_kind(parser)
    parser.add_argument(
        "--all", action="store_true", help="also list checkpoints that were given up or pruned"
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """What was decided of the run itself, or of a `kind`, oldest first, without what the boundary voids; the store's
    time; and what cannot be read.
    """

    kind: str
    decisions: list[Decision]
    server_time: float
    unreadable: list[InvalidRecordError]

    @property
    def newest(self) -> CheckpointId | None:
        committed = (each.checkpoint for each in self.decisions if each.outcome is Outcome.COMMIT)
        return max(committed, default=None)


def ls(options: argparse.Namespace) -> Exit:
    """What is committed in a remote, of all kinds or one; INCOMPLETE if a record cannot be read."""
    url, found = threads.run(_look(options))
    unreadable = [error for of_kind in found for error in of_kind.unreadable]
    code = Exit.INCOMPLETE if unreadable else Exit.OK
    shown = [
        (of_kind, each)
        for of_kind in found
        for each in of_kind.decisions
        if options.all or each.outcome is Outcome.COMMIT
    ]
    if options.json:
        print_json(_json(url, found, shown, unreadable))
        return code
    for error in unreadable:
        print(f"cannot be read: {error}", file=sys.stderr)
    num_given_up = sum(each.outcome is Outcome.ABORT for of_kind in found for each in of_kind.decisions)
    if num_given_up and not options.all:
        print(f"{num_given_up} given up; `ckpt-async ls {url} --all` shows why", file=sys.stderr)
    if not shown:
        if not unreadable:
            print("no checkpoint is committed yet")
        return code
    titles: tuple[str, ...] = ("STEP", "NAME", "GENERATION", "RANKS", "SHARDS", "SIZE", "AGE", "")
    rows: list[tuple[str, ...]] = [
        (
            str(each.checkpoint.step),
            each.name,
            str(each.checkpoint.generation),
            str(each.world_size),
            str(each.num_shards),
            in_units(each.size_bytes),
            age(of_kind.server_time - each.decided_at),
            ", ".join(_remarks(each, of_kind.newest)),
        )
        for of_kind, each in shown
    ]
    if any(of_kind.kind for of_kind in found):
        titles = ("KIND", *titles)
        rows = [(of_kind.kind or "-", *row) for (of_kind, _), row in zip(shown, rows, strict=True)]
    print_table(titles, rows)
    return code


async def _look(options: argparse.Namespace) -> tuple[str, list[_Found]]:
    """The run's URL, and what is there of each kind.

    Only reads: it needs no right to write. Raises ObjectNotFoundError if no run was ever here, UnknownKindError if none
    of the kind that was asked for was.
    """
    async with _opened(options.remote, options) as (run, heard):
        found = [] if options.kind else [await _decisions(run, "", heard)]
        kinds = await kinds_below(run)
        heard()
        if options.kind is not None and options.kind not in kinds:
            await check_known(run, options.kind)
            raise ObjectNotFoundError(f"{run.url} holds no checkpoints of kind {options.kind!r}")
        if not kinds and found == [None]:
            raise ObjectNotFoundError(f"{run.url} holds no run of ckpt_async")
    for kind in kinds:
        if options.kind in (None, kind):
            async with _opened(keys.kind_remote(run.url, kind), options) as (store, heard):
                found.append(await _decisions(store, kind, heard))
    return run.url, [each for each in found if each is not None]


@contextlib.asynccontextmanager
async def _opened(
    url: str, options: argparse.Namespace
) -> AsyncIterator[tuple[PatientStore, Callable[[], None]]]:
    """The store, and what to call once it has answered."""
    settings = Settings(upload_timeout_s=LS_TIMEOUT_S, retry_max_s=LS_PAUSE_S)
    store = connect(url, store_options(options), settings, is_patient=False)
    try:
        with telling_of_silence(store.url, patience_s=LS_TIMEOUT_S) as heard:
            await store.open(is_read_only=True)
            yield store, heard
    finally:
        await store.close()


async def _decisions(store: PatientStore, kind: str, heard: Callable[[], None]) -> _Found | None:
    """None if no run was ever here."""
    listing = await store.list(keys.DECISIONS)
    heard()
    if not listing.objects and not (await store.list(keys.GENERATIONS)).objects:
        return None
    unreadable: list[InvalidRecordError] = []
    boundary = await _or_note(steps.read_boundary(store), unreadable)
    checkpoints = filter(None, (keys.parse_decision_key(each.key) for each in listing.objects))
    found = await all_or_none(_or_note(steps.read_decision(store, each), unreadable) for each in checkpoints)
    decisions = [
        each for each in found if each is not None and not sweep_plan.is_void(each.checkpoint, boundary)
    ]
    return _Found(kind, sorted(decisions, key=lambda each: each.checkpoint), listing.server_time, unreadable)


def _json(
    url: str,
    found: Sequence[_Found],
    shown: Sequence[tuple[_Found, Decision]],
    unreadable: Sequence[InvalidRecordError],
) -> Json:
    newest = {of_kind.kind: of_kind.newest and id_json(of_kind.newest) for of_kind in found}
    return {
        "remote": url,
        "latest": newest.pop("", None),
        "kinds": {kind: {"latest": latest} for kind, latest in newest.items()},
        "checkpoints": [
            {"kind": of_kind.kind or None, **_decision_json(each, of_kind.newest, of_kind.server_time)}
            for of_kind, each in shown
        ],
        "unreadable": [error.key for error in unreadable],
    }


async def _or_note(reading: Awaitable[T], unreadable: list[InvalidRecordError]) -> T | None:
    try:
        return await reading
    except InvalidRecordError as error:
        unreadable.append(error)
        return None


def _decision_json(each: Decision, newest: CheckpointId | None, server_time: float) -> Json:
    return {
        **id_json(each.checkpoint),
        "name": each.name,
        "outcome": each.outcome.value,
        "is_latest": each.checkpoint == newest,
        "is_pinned": each.is_pinned,
        "ranks": each.world_size,
        "shards": each.num_shards,
        "size_bytes": each.size_bytes,
        "decided_at": each.decided_at,
        "age_s": max(0.0, server_time - each.decided_at),
        "metrics": dict(each.metrics),
        "reason": each.reason or None,
    }


def _remarks(each: Decision, newest: CheckpointId | None) -> Iterator[str]:
    if each.checkpoint == newest:
        yield "latest"
    if each.is_pinned:
        yield "pinned"
    said = {"abort": "given up", "pruning": "being pruned", "pruned": "pruned"}.get(each.outcome.value)
    if said:
        yield f"{said}: {each.reason}" if each.reason else said
