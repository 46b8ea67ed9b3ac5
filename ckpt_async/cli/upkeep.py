"""The commands that change or examine a remote: `sweep`, `prune`, `pin`, `unpin`, `verify`. See `cli`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ckpt_async import threads
from ckpt_async.cli.output import Exit, Json, Which, id_json, store_options, telling_of_silence
from ckpt_async.core import keys, retention
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.observe import NullObserver
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import in_units
from ckpt_async.errors import ObjectNotFoundError, SettingsError
from ckpt_async.local.settings_file import load_settings
from ckpt_async.monitor.server import serve
from ckpt_async.protocol import steps, sweep_plan
from ckpt_async.protocol import verify as verification
from ckpt_async.protocol.cas import if_readable
from ckpt_async.stores import open_store
from ckpt_async.stores.interface import Store
from ckpt_async.sweep.sweeper import Done, FolderReport, RemoteReport, Sweeper, SweepReport, open_run
from ckpt_async.transfer.requests import Requests

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Someone is waiting at a terminal, or a script has its own retries.
COMMAND_TIMEOUT_S = 120.0
# Share of `--interval` by which a pause is longer or shorter.
JITTER = 0.1


# --- sweep -------------------------------------------------------------------------------------------------


def sweep(options: argparse.Namespace) -> Exit:
    """Sweep once, or every `--interval` seconds until SIGTERM."""
    return _sweep(options, load_settings({}, os.environ))


def _sweep(options: argparse.Namespace, settings: Settings) -> Exit:
    if not options.folders and not options.remote:
        raise SettingsError("nothing to sweep", hint="give a folder, or --remote URL")
    if options.keep is not None:
        if options.folders_only:
            raise SettingsError("--folders-only prunes nothing", hint="leave out --keep")
        settings = replace(settings, remote_retention=options.keep)
    sweeper = Sweeper(
        options.folders,
        options.remote,
        settings=settings,
        store_options=store_options(options),
        verifies=options.verify,
        is_for_folders_only=options.folders_only,
    )
    server = serve(sweeper.metrics.registry, options.metrics_port, settings.metrics_address, {})
    try:
        if options.interval is None:
            report = threads.run(sweeper.sweep(is_dry_run=options.dry_run))
            _print_sweep(report, options)
            return Exit.OK if report.is_clean else Exit.ERROR
        threads.run(_sweep_until_stopped(options, sweeper))
        return Exit.OK
    finally:
        if server is not None:
            server.close()


async def _sweep_until_stopped(options: argparse.Namespace, sweeper: Sweeper) -> None:
    """Sweep until SIGTERM or SIGINT. Whatever goes wrong in one sweep, the next one is made."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    stopping = asyncio.ensure_future(stopped.wait())
    while not stopping.done():
        sweeping = asyncio.ensure_future(sweeper.sweep(is_dry_run=options.dry_run))
        await asyncio.wait({sweeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not sweeping.done():
            sweeping.cancel()  # safe anywhere: the next sweep finishes
            await asyncio.wait({sweeping})
            return
        if (bug := sweeping.exception()) is None:
            _print_sweep(sweeping.result(), options)
        else:
            logger.error("sweep_failed error=%r; the next one is made all the same", bug, exc_info=bug)
            if options.json:
                print(
                    json.dumps({"is_dry_run": options.dry_run, "is_clean": False, "error": repr(bug)}),
                    flush=True,
                )
        # Sweepers of a thousand nodes that were started together must not list the same remote together for ever.
        pause_s = options.interval * random.uniform(1 - JITTER, 1 + JITTER)
        await asyncio.wait({stopping}, timeout=pause_s)


def _print_sweep(report: SweepReport, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(_sweep_json(report, is_dry_run=options.dry_run)), flush=True)
        return
    lines = [line for each in report.folders for line in _folder_lines(each)]
    lines += [line for each in report.remotes for line in _remote_lines(each, is_dry_run=options.dry_run)]
    print("\n".join(lines or ["no folder matches yet: nothing to do"]), flush=True)


def _folder_lines(each: FolderReport) -> Iterator[str]:
    if each.error:
        yield f"{each.folder}: {each.error}"
    elif not os.path.isdir(f"{each.folder}/{keys.PRIVATE}"):
        yield f"{each.folder}: no trainer has run here yet"
    elif each.waiting_ranks:
        yield f"{each.folder}: would finish what ranks {list(each.waiting_ranks)} left, where no owner is alive"
    elif each.drained is None:
        yield f"{each.folder}: nothing left to finish"
    else:
        ranks = each.drained.ranks
        committed = sum(len(rank.committed) for rank in ranks)
        left = sum(len(rank.left) + len(rank.waiting) for rank in ranks)
        owned = [rank.rank for rank in ranks if rank.in_use_by]
        yield (
            f"{each.folder}: {committed} committed, {left} left, {each.drained.uploaded_bytes} bytes uploaded"
            + (f"; ranks {owned} have a live owner" if owned else "")
        )
        for rank in ranks:
            if rank.error:
                yield f"{each.folder}: rank {rank.rank} FAILED ({rank.error})"
            for fate in rank.left:
                yield f"{each.folder}: rank {rank.rank} step {fate.checkpoint.step} is not uploaded: {fate.reason}"


def _remote_lines(each: RemoteReport, *, is_dry_run: bool) -> Iterator[str]:
    if each.error:
        yield f"{each.url}: FAILED ({each.error})"
        return
    if not each.done and not each.violations:
        yield f"{each.url}: nothing to do"
    for done in each.done:
        if is_dry_run and (objects := _objects(done.action)):
            yield from (f"{each.url}: would delete {key}: {done.action.reason}" for key in objects)
        else:
            yield f"{each.url}: {_state(done, is_dry_run)} {describe(done.action)}: {done.action.reason}"
    for finding in each.violations:
        yield f"{each.url}: VIOLATION {finding}"
    if is_dry_run:
        yield from _stock_lines(each)


def _stock_lines(each: RemoteReport) -> Iterator[str]:
    """What a dry run found to stay, and the sum of it all."""
    for one in each.stock:
        if one.stays:
            yield f"{each.url}: keep {one.checkpoint} ({one.name}, {in_units(one.size_bytes)}): {one.reason}"
    if each.stock:
        stay, go = ([one for one in each.stock if one.stays is stays] for stays in (True, False))
        yield f"{each.url}: {_sum(stay)} {'stays' if len(stay) == 1 else 'stay'}, {_sum(go)} would go"


def _sum(stock: Sequence[sweep_plan.Stock]) -> str:
    size = in_units(sum(each.size_bytes for each in stock))
    return f"{len(stock)} checkpoint{'' if len(stock) == 1 else 's'} ({size})"


def _state(done: Done, is_dry_run: bool) -> str:
    if done.error:
        return f"FAILED ({done.error})"
    if isinstance(done.action, sweep_plan.Wait):
        return "waits:"
    if is_dry_run:
        return "would"
    is_settling = isinstance(
        done.action, sweep_plan.Settle | sweep_plan.GiveUp | sweep_plan.BeginPrune | sweep_plan.FinishPrune
    )
    return "no longer had to" if is_settling and done.outcome is None else "did"


def _objects(action: sweep_plan.Planned) -> tuple[str, ...]:
    return action.object_keys if isinstance(action, sweep_plan.Delete | sweep_plan.CollectDecisions) else ()


def describe(action: sweep_plan.Planned) -> str:
    """An action in a few words."""
    match action:
        case sweep_plan.AbortMultipart():
            return f"abort the multipart upload of {action.key}"
        case sweep_plan.Delete():
            return f"delete {len(action.object_keys)} objects, {action.object_keys[0]} first"
        case sweep_plan.CollectDecisions():
            return f"collect {len(action.object_keys)} decisions"
        case sweep_plan.Settle():
            return f"commit {action.checkpoint}"
        case sweep_plan.GiveUp():
            return f"give up {action.checkpoint}"
        case sweep_plan.MoveLatest():
            return f"move latest to {action.checkpoint}"
        case sweep_plan.BeginPrune():
            return f"begin to prune {action.checkpoint}"
        case sweep_plan.FinishPrune():
            return f"prune {action.checkpoint}"
        case sweep_plan.Wait():
            return str(action.checkpoint)


def _sweep_json(report: SweepReport, *, is_dry_run: bool) -> Json:
    return {
        "is_dry_run": is_dry_run,
        "is_clean": report.is_clean,
        "folders": [
            {
                "folder": each.folder,
                "error": each.error or None,
                "unfinished_ranks": list(each.waiting_ranks),
                "uploaded_bytes": each.drained.uploaded_bytes if each.drained else 0,
                "committed": sum(len(rank.committed) for rank in each.drained.ranks) if each.drained else 0,
                "left": sum(len(rank.left) for rank in each.drained.ranks) if each.drained else 0,
            }
            for each in report.folders
        ],
        "remotes": [
            {
                "remote": each.url,
                "error": each.error or None,
                "actions": [
                    {
                        "action": type(done.action).__name__,
                        "what": describe(done.action),
                        "reason": done.action.reason,
                        "keys": list(_objects(done.action)),
                        "outcome": done.outcome.value if done.outcome else None,
                        "error": done.error or None,
                    }
                    for done in each.done
                ],
                "violations": [_finding(found) for found in each.violations],
                "checkpoints": [
                    {
                        **id_json(one.checkpoint),
                        "name": one.name,
                        "size_bytes": one.size_bytes,
                        "stays": one.stays,
                        "reason": one.reason,
                    }
                    for one in each.stock
                ],
            }
            for each in report.remotes
        ],
    }


# --- prune -------------------------------------------------------------------------------------------------


def prune(options: argparse.Namespace) -> Exit:
    """Apply a retention policy to a remote; a dry run unless `--yes`."""
    settings = load_settings({}, os.environ)
    text = options.keep if options.keep is not None else settings.remote_retention
    if retention.keeps_all(retention.parse(text)):
        raise SettingsError(
            "the policy keeps all: nothing to prune",
            hint="say what to keep, e.g. --keep last=3,every-steps=1000",
        )

    async def nothing(*_: object) -> None:
        """What is to be pruned is there: the sweep would say otherwise too, but not with the same exit code."""

    _with_store(options, nothing, is_read_only=True)
    options.folders, options.remote, options.interval = [], [options.url], None
    options.keep, options.dry_run = text, not options.yes
    options.metrics_port, options.verify, options.folders_only = -1, False, False
    code = _sweep(options, settings)
    if options.dry_run and not options.json:
        print("nothing was touched; --yes does it")
    return code


# --- pin, unpin --------------------------------------------------------------------------------------------


def pin(options: argparse.Namespace) -> Exit:
    """Keep a committed checkpoint whatever the policy says."""
    return _set_pin(options, is_pinned=True)


def unpin(options: argparse.Namespace) -> Exit:
    """Leave a checkpoint to the policy again."""
    return _set_pin(options, is_pinned=False)


def _set_pin(options: argparse.Namespace, *, is_pinned: bool) -> Exit:

    async def work(store: Store, requests: Requests) -> Decision:
        id_ = await _find(store, requests, options.checkpoint)
        decision = await steps.set_pin(store, requests, id_, is_pinned)
        if decision is None or decision.outcome is not Outcome.COMMIT:
            state = decision.outcome.value if decision else "gone"
            raise ObjectNotFoundError(f"{id_} is {state}: too late to pin it", key=keys.decision_key(id_))
        return decision

    decision = _with_store(options, work)
    if options.json:
        print(json.dumps({**id_json(decision.checkpoint), "is_pinned": decision.is_pinned}))
    else:
        print(f"step {decision.checkpoint.step} ({decision.name}) is {'' if is_pinned else 'not '}pinned")
    return Exit.OK


def unmark(options: argparse.Namespace) -> Exit:
    """Take a mark of damage back, so that readers try the checkpoint again."""

    async def work(store: Store, requests: Requests) -> tuple[CheckpointId, str]:
        marks = await steps.read_damages(store, requests)
        id_ = await _find(store, requests, options.checkpoint, among=marks)
        await steps.unmark(store, requests, id_)
        return id_, marks[id_]

    id_, reason = _with_store(options, work)
    if options.json:
        print(json.dumps({**id_json(id_), "was_marked": reason}))
    else:
        print(
            f"step {id_.step} of generation {id_.generation} is not marked any more; the mark said: {reason}"
        )
    return Exit.OK


async def _find(
    store: Store, requests: Requests, wanted: Which, *, among: Collection[CheckpointId] | None = None
) -> CheckpointId:
    """The newest committed checkpoint with this step (and generation) or name; if those that are marked as damaged are
    given, only of them.
    """
    listing = await requests.control("list", lambda: store.list(keys.DECISIONS))
    boundary = await if_readable(steps.read_boundary(store, requests))
    for each in reversed(listing.objects):
        id_ = keys.parse_decision_key(each.key)
        if id_ is None or sweep_plan.is_void(id_, boundary) or (among is not None and id_ not in among):
            continue
        if wanted.step is not None and not wanted.is_of(id_):
            continue
        decision = await if_readable(steps.read_decision(store, requests, id_))
        if decision is None or decision.outcome is not Outcome.COMMIT:
            continue
        if wanted.is_of(id_) or wanted.text == decision.name:
            return id_
    which = "committed checkpoint" if among is None else "checkpoint that is marked as damaged"
    raise ObjectNotFoundError(f"no {which} has the step or name {wanted.text!r}")


# --- verify ------------------------------------------------------------------------------------------------


def verify(options: argparse.Namespace) -> Exit:
    """Check a remote; INCOMPLETE if a violation was found."""

    async def work(store: Store, requests: Requests) -> Any:
        return await verification.verify(
            store,
            requests,
            step=options.step.step,
            generation=options.step.generation,
            read_percent=options.read_data,
            seed=options.seed,
        )

    result = _with_store(options, work, is_read_only=True)
    if options.step.step is not None and not result.num_committed and not result.findings:
        raise ObjectNotFoundError(f"no committed checkpoint has step {options.step.text}: nothing to verify")
    code = Exit.INCOMPLETE if result.violations else Exit.OK
    if options.json:
        fields = {
            "committed": result.num_committed,
            "shards": result.num_shards,
            "shards_read": result.num_shards_read,
            "size_bytes": result.size_bytes,
            "violations": [_finding(each) for each in result.violations],
            "leftovers": [_finding(each) for each in result.findings if each.is_leftover],
            "marked": [
                {**id_json(each.checkpoint), "reason": each.reason, "is_sound": each.is_sound}
                for each in result.marks
            ],
        }
        print(json.dumps(fields))
        return code
    for each in result.findings:
        print(f"{'leftover' if each.is_leftover else 'VIOLATION'} {each}")
    for mark in result.marks:
        print(f"MARKED {mark.checkpoint}: {mark.reason}")
        if mark.is_sound:
            name = f"{mark.checkpoint.step}@g{mark.checkpoint.generation}"
            print(
                f"  every byte of it is as committed: `ckpt-async unmark {options.url} {name}` takes the mark back"
            )
    how = (
        f"{result.num_shards_read} of them read whole"
        if result.num_shards_read
        else "by the store's checksums"
    )
    print(
        f"{result.num_committed} committed checkpoints, {result.num_shards} shards ({how}),"
        f" {len(result.violations)} violations"
    )
    return code


def _finding(each: Any) -> Json:
    return {"rule": each.rule, "kind": each.kind, "key": each.key, "message": each.message}


# --- the store ---------------------------------------------------------------------------------------------


def _with_store(
    options: argparse.Namespace,
    work: Callable[[Store, Requests], Awaitable[T]],
    *,
    is_read_only: bool = False,
) -> T:
    async def main() -> T:
        store = open_store(options.url, store_options(options), env=os.environ)
        try:
            settings = Settings(upload_timeout_s=COMMAND_TIMEOUT_S)
            requests = Requests(settings, NullObserver(), store.url, is_patient=False)
            with telling_of_silence(store.url, patience_s=COMMAND_TIMEOUT_S):
                is_there = await open_run(store, is_read_only=is_read_only, timeout_s=COMMAND_TIMEOUT_S)
            if not is_there:
                raise ObjectNotFoundError(f"{store.url} holds no run of ckpt_async")
            return await work(store, requests)
        finally:
            await store.close()

    return threads.run(main())
