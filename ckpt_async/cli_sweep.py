"""The commands that change or examine a remote: `sweep`, `prune`, `pin`, `unpin`, `verify`. See `cli`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from ckpt_async import keys, plan, protocol, retention
from ckpt_async.errors import ObjectNotFoundError, SettingsError
from ckpt_async.model import CheckpointId, Decision, Outcome
from ckpt_async.observe import NullObserver
from ckpt_async.requests import Requests
from ckpt_async.settings import Settings
from ckpt_async.store import Store
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.sweeper import FolderReport, RemoteReport, Sweeper, SweepReport
from ckpt_async.verify import verify

T = TypeVar("T")
Json = dict[str, Any]

# Someone is waiting at a terminal, or a script has its own retries.
COMMAND_TIMEOUT_S = 120.0


# --- sweep -------------------------------------------------------------------------------------------------


def sweep(options: argparse.Namespace, settings: Settings) -> bool:
    """Sweep once, or every `--interval` seconds until SIGTERM. Returns whether the last one was clean."""
    if not options.folders and not options.remote:
        raise SettingsError("nothing to sweep", hint="give a folder, or --remote URL")
    if options.keep is not None:
        settings = replace(settings, remote_retention=options.keep)
    sweeper = Sweeper(
        options.folders, options.remote, settings=settings, store_options=_store_options(options)
    )
    return asyncio.run(_sweep(options, sweeper))


async def _sweep(options: argparse.Namespace, sweeper: Sweeper) -> bool:
    stopped = asyncio.Event()
    if options.interval is not None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    while True:
        sweeping = asyncio.ensure_future(sweeper.sweep(is_dry_run=options.dry_run))
        stopping = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({sweeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not sweeping.done():
            sweeping.cancel()  # safe anywhere: the next sweep finishes
            await asyncio.wait({sweeping})
            return True
        report = sweeping.result()
        _print_sweep(report, options)
        if options.interval is None:
            return report.is_clean
        try:
            async with asyncio.timeout(options.interval):
                await stopped.wait()
            return report.is_clean
        except TimeoutError:
            continue


def _print_sweep(report: SweepReport, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(_sweep_json(report, is_dry_run=options.dry_run)), flush=True)
        return
    lines = [line for each in report.folders for line in _folder_lines(each)]
    lines += [line for each in report.remotes for line in _remote_lines(each, is_dry_run=options.dry_run)]
    print("\n".join(lines), flush=True)


def _folder_lines(each: FolderReport) -> Iterator[str]:
    if each.error:
        yield f"{each.folder}: {each.error}"
    elif each.waiting_ranks:
        yield f"{each.folder}: would finish what ranks {list(each.waiting_ranks)} left, where no owner is alive"
    elif each.drained is None:
        yield f"{each.folder}: nothing left to finish"
    else:
        committed = sum(len(rank.committed) for rank in each.drained.ranks)
        left = sum(len(rank.left) + len(rank.waiting) for rank in each.drained.ranks)
        owned = [rank.rank for rank in each.drained.ranks if rank.in_use_by]
        yield (
            f"{each.folder}: {committed} committed, {left} left, {each.drained.uploaded_bytes} bytes uploaded"
            + (f"; ranks {owned} have a live owner" if owned else "")
        )


def _remote_lines(each: RemoteReport, *, is_dry_run: bool) -> Iterator[str]:
    if each.error:
        yield f"{each.url}: {each.error}"
        return
    if not each.done:
        yield f"{each.url}: nothing to do"
    for done in each.done:
        what = describe(done.action)
        state = f"FAILED ({done.error})" if done.error else "would" if is_dry_run else "did"
        if isinstance(done.action, plan.Wait):
            state = "waits:"
        yield f"{each.url}: {state} {what}: {done.action.reason}"


def describe(action: plan.Planned) -> str:
    """An action in a few words."""
    match action:
        case plan.AbortMultipart():
            return f"abort the multipart upload of {action.key}"
        case plan.Delete():
            return f"delete {len(action.object_keys)} objects, {action.object_keys[0]} first"
        case plan.CollectDecisions():
            return f"collect {len(action.object_keys)} decisions"
        case plan.Settle():
            return f"commit {action.checkpoint}"
        case plan.GiveUp():
            return f"give up {action.checkpoint}"
        case plan.MoveLatest():
            return f"move latest to {action.checkpoint}"
        case plan.BeginPrune():
            return f"begin to prune {action.checkpoint}"
        case plan.FinishPrune():
            return f"prune {action.checkpoint}"
        case plan.Wait():
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
                        "error": done.error or None,
                    }
                    for done in each.done
                ],
            }
            for each in report.remotes
        ],
    }


# --- prune -------------------------------------------------------------------------------------------------


def prune(options: argparse.Namespace, settings: Settings) -> bool:
    """Apply a retention policy to a remote; a dry run unless `--yes`."""
    text = options.keep if options.keep is not None else settings.remote_retention
    if retention.keeps_all(retention.parse(text)):
        raise SettingsError(
            "the policy keeps all: nothing to prune",
            hint="say what to keep, e.g. --keep last=3,every-steps=1000",
        )
    options.folders, options.remote, options.interval = [], [options.url], None
    options.keep, options.dry_run = text, not options.yes
    is_clean = sweep(options, settings)
    if options.dry_run and not options.json:
        print("nothing was touched; --yes does it")
    return is_clean


# --- pin, unpin --------------------------------------------------------------------------------------------


def pin(options: argparse.Namespace, *, is_pinned: bool) -> None:
    """Keep a committed checkpoint whatever the policy says, or no longer."""

    async def work(store: Store, requests: Requests) -> Decision:
        id_ = await _find(store, requests, options.checkpoint)
        decision = await protocol.set_pin(store, requests, id_, is_pinned)
        if decision is None or decision.outcome is not Outcome.COMMIT:
            state = decision.outcome.value if decision else "gone"
            raise ObjectNotFoundError(f"{id_} is {state}: too late to pin it", key=keys.decision_key(id_))
        return decision

    decision = _with_store(options, work)
    if options.json:
        id_ = decision.checkpoint
        print(json.dumps({"generation": id_.generation, "step": id_.step, "is_pinned": decision.is_pinned}))
    else:
        print(f"step {decision.checkpoint.step} ({decision.name}) is {'' if is_pinned else 'not '}pinned")


async def _find(store: Store, requests: Requests, wanted: str) -> CheckpointId:
    """The newest committed checkpoint with this step or name."""
    listing = await requests.control("list", lambda: store.list(keys.DECISIONS))
    boundary = await protocol.read_boundary(store, requests)
    for each in reversed(listing.objects):
        id_ = keys.parse_decision_key(each.key)
        if id_ is None or plan.is_void(id_, boundary):
            continue
        if wanted.isdecimal() and int(wanted) != id_.step:
            continue
        decision = await protocol.read_decision(store, requests, id_)
        if decision is None or decision.outcome is not Outcome.COMMIT:
            continue
        if wanted in (str(id_.step), decision.name):
            return id_
    raise ObjectNotFoundError(f"no committed checkpoint has the step or name {wanted!r}")


# --- verify ------------------------------------------------------------------------------------------------


def verify_remote(options: argparse.Namespace) -> bool:
    """Check a remote; returns whether no violation was found."""

    async def work(store: Store, requests: Requests) -> Any:
        return await verify(
            store, requests, step=options.step, read_percent=options.read_data, seed=options.seed
        )

    result = _with_store(options, work, is_read_only=True)
    if options.json:
        fields = {
            "committed": result.num_committed,
            "shards": result.num_shards,
            "shards_read": result.num_shards_read,
            "size_bytes": result.size_bytes,
            "violations": [_finding(each) for each in result.violations],
            "leftovers": [_finding(each) for each in result.findings if each.is_leftover],
        }
        print(json.dumps(fields))
        return not result.violations
    for each in result.findings:
        print(f"{'leftover' if each.is_leftover else 'VIOLATION'} {each}")
    how = (
        f"{result.num_shards_read} of them read whole"
        if result.num_shards_read
        else "by the store's checksums"
    )
    print(
        f"{result.num_committed} committed checkpoints, {result.num_shards} shards ({how}),"
        f" {len(result.violations)} violations"
    )
    return not result.violations


def _finding(each: Any) -> Json:
    return {"rule": each.rule, "key": each.key, "message": each.message}


# --- the store ---------------------------------------------------------------------------------------------


def _store_options(options: argparse.Namespace) -> StoreOptions:
    return StoreOptions(endpoint_url=options.endpoint_url, region=options.region, profile=options.profile)


def _with_store(
    options: argparse.Namespace,
    work: Callable[[Store, Requests], Awaitable[T]],
    *,
    is_read_only: bool = False,
) -> T:
    async def main() -> T:
        store = open_store(options.url, _store_options(options), env=os.environ)
        try:
            await store.open(is_read_only=is_read_only)
            requests = Requests(Settings(upload_timeout_s=COMMAND_TIMEOUT_S), NullObserver(), store.url)
            if not await _has_run(store, requests):
                raise ObjectNotFoundError(f"{store.url} holds no run of ckpt_async")
            return await work(store, requests)
        finally:
            await store.close()

    return asyncio.run(main())


async def _has_run(store: Store, requests: Requests) -> bool:
    for prefix in (keys.GENERATIONS, keys.DECISIONS):
        listing = await requests.control("list", lambda prefix=prefix: store.list(prefix))  # type: ignore[misc]
        if listing.objects:
            return True
    return False
