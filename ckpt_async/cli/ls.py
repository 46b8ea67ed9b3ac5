"""A run's checkpoints: `ls`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Iterator
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
from ckpt_async.cli.parsing import WHERE, add_store_options
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import age, in_units
from ckpt_async.errors import InvalidRecordError, ObjectNotFoundError
from ckpt_async.protocol import steps, sweep_plan
from ckpt_async.transfer.patient import connect
from ckpt_async.transfer.together import all_or_none

T = TypeVar("T")

# How long a store that fails is tried, and the longest pause in between: someone is waiting.
LS_TIMEOUT_S, LS_PAUSE_S = 20.0, 2.0


def ls_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("remote", metavar="REMOTE", help=WHERE)
    parser.add_argument(
        "--all", action="store_true", help="also list checkpoints that were given up or pruned"
    )


def ls(options: argparse.Namespace) -> Exit:
    """What is committed in a remote; INCOMPLETE if a record cannot be read."""
    url, decisions, server_time, unreadable = threads.run(_list_decisions(options))
    code = Exit.INCOMPLETE if unreadable else Exit.OK
    newest = max((each.checkpoint for each in decisions if each.outcome is Outcome.COMMIT), default=None)
    shown = [each for each in decisions if options.all or each.outcome is Outcome.COMMIT]
    if options.json:
        print_json(
            {
                "remote": url,
                "latest": None if newest is None else id_json(newest),
                "checkpoints": [_decision_json(each, newest, server_time) for each in shown],
                "unreadable": [error.key for error in unreadable],
            }
        )
        return code
    for error in unreadable:
        print(f"cannot be read: {error}", file=sys.stderr)
    num_given_up = sum(each.outcome is Outcome.ABORT for each in decisions)
    if num_given_up and not options.all:
        print(f"{num_given_up} given up; `ckpt-async ls {url} --all` shows why", file=sys.stderr)
    if not shown:
        if not unreadable:
            print("no checkpoint is committed yet")
        return code
    titles = ("STEP", "NAME", "GENERATION", "RANKS", "SHARDS", "SIZE", "AGE", "")
    rows = [
        (
            str(each.checkpoint.step),
            each.name,
            str(each.checkpoint.generation),
            str(each.world_size),
            str(each.num_shards),
            in_units(each.size_bytes),
            age(server_time - each.decided_at),
            ", ".join(_remarks(each, newest)),
        )
        for each in shown
    ]
    print_table(titles, rows)
    return code


async def _list_decisions(
    options: argparse.Namespace,
) -> tuple[str, list[Decision], float, list[InvalidRecordError]]:
    """What was decided, oldest first, without what the boundary voids; the store's time; and what cannot be read.

    Only reads: it needs no right to write. Raises ObjectNotFoundError if no run was ever here.
    """
    settings = Settings(upload_timeout_s=LS_TIMEOUT_S, retry_max_s=LS_PAUSE_S)
    store = connect(options.remote, store_options(options), settings, is_patient=False)
    try:
        with telling_of_silence(store.url, patience_s=LS_TIMEOUT_S):
            await store.open(is_read_only=True)
            listing = await store.list(keys.DECISIONS)
        if not listing.objects:
            started = await store.list(keys.GENERATIONS)
            if not started.objects:
                raise ObjectNotFoundError(f"{store.url} holds no run of ckpt_async")
        unreadable: list[InvalidRecordError] = []
        boundary = await _or_note(steps.read_boundary(store), unreadable)
        checkpoints = filter(None, (keys.parse_decision_key(each.key) for each in listing.objects))
        found = await all_or_none(
            _or_note(steps.read_decision(store, each), unreadable) for each in checkpoints
        )
    finally:
        await store.close()
    decisions = [
        each for each in found if each is not None and not sweep_plan.is_void(each.checkpoint, boundary)
    ]
    return store.url, sorted(decisions, key=lambda each: each.checkpoint), listing.server_time, unreadable


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
