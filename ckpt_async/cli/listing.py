"""The command that lists a run's checkpoints: `ls`. See `cli`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from ckpt_async import keys, plan, protocol, threads
from ckpt_async.cli.output import (
    Exit,
    Json,
    id_json,
    print_json,
    print_table,
    store_options,
    telling_of_silence,
)
from ckpt_async.errors import ObjectNotFoundError
from ckpt_async.model import Boundary, CheckpointId, Decision, Outcome
from ckpt_async.observe import NullObserver
from ckpt_async.requests import Requests
from ckpt_async.settings import Settings
from ckpt_async.store import ObjectInfo, Store
from ckpt_async.stores import open_store
from ckpt_async.transfer import all_or_none
from ckpt_async.units import age, in_units

# How long a store that fails is tried, and the longest pause in between: someone is waiting.
LS_TIMEOUT_S, LS_PAUSE_S = 20.0, 2.0


def ls(options: argparse.Namespace) -> Exit:
    """What is committed in a remote."""
    url, decisions, server_time = threads.run(_list_decisions(options))
    newest = max((each.checkpoint for each in decisions if each.outcome is Outcome.COMMIT), default=None)
    shown = [each for each in decisions if options.all or each.outcome is Outcome.COMMIT]
    if options.json:
        print_json(
            {
                "remote": url,
                "latest": None if newest is None else id_json(newest),
                "checkpoints": [_decision_json(each, newest, server_time) for each in shown],
            }
        )
        return Exit.OK
    num_given_up = sum(each.outcome is Outcome.ABORT for each in decisions)
    if num_given_up and not options.all:
        print(f"{num_given_up} given up; `ckpt-async ls {url} --all` says why", file=sys.stderr)
    if not shown:
        print("no checkpoint is committed yet")
        return Exit.OK
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
    return Exit.OK


async def _list_decisions(options: argparse.Namespace) -> tuple[str, list[Decision], float]:
    """What was decided, oldest first, without what the boundary voids; and the store's time.

    Only reads: it needs no right to write. Raises ObjectNotFoundError if no run was ever here.
    """
    store = open_store(options.remote, store_options(options))
    settings = Settings(upload_timeout_s=LS_TIMEOUT_S, retry_max_s=LS_PAUSE_S)
    requests = Requests(settings, NullObserver(), store.url, is_patient=False)
    try:
        with telling_of_silence(store.url, patience_s=LS_TIMEOUT_S):
            await store.open(is_read_only=True)
            listing = await requests.control("list", lambda: store.list(keys.DECISIONS))
        if not listing.objects:
            started = await requests.control("list", lambda: store.list(keys.GENERATIONS))
            if not started.objects:
                raise ObjectNotFoundError(f"{store.url} holds no run of ckpt_async")
        boundary: Boundary | None = await protocol.read_boundary(store, requests)
        found = await all_or_none(_read_decision(store, requests, each) for each in listing.objects)
    finally:
        await store.close()
    decisions = [each for each in found if each is not None and not plan.is_void(each.checkpoint, boundary)]
    return store.url, sorted(decisions, key=lambda each: each.checkpoint), listing.server_time


async def _read_decision(store: Store, requests: Requests, listed: ObjectInfo) -> Decision | None:
    checkpoint = keys.parse_decision_key(listed.key)
    return None if checkpoint is None else await protocol.read_decision(store, requests, checkpoint)


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
