"""Finishes what dead trainers left, and cleans up: `sweep`, `prune`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpt_async import threads
from ckpt_async.cli.events import add_events, event_settings
from ckpt_async.cli.metrics_file import Tally, add_metrics_file, tally_of
from ckpt_async.cli.output import Exit, Json, id_json, print_line, store_options
from ckpt_async.cli.parsing import (
    WHERE,
    add_kind,
    add_only_remote,
    add_store_options,
    as_folder,
    as_path,
    as_seconds,
    only_remotes,
)
from ckpt_async.cli.upkeep import finding_json, finding_line, with_store
from ckpt_async.core import keys, retention
from ckpt_async.core.model import Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import counted, in_units
from ckpt_async.errors import SettingsError
from ckpt_async.local.journals import watched_from
from ckpt_async.local.settings_file import load_settings
from ckpt_async.page.board import Board
from ckpt_async.page.server import serve
from ckpt_async.protocol import sweep_plan
from ckpt_async.protocol.overview import STATES
from ckpt_async.sweep.remote import Done, RemoteReport
from ckpt_async.sweep.sweeper import FolderReport, Sweeper, SweepReport

logger = logging.getLogger(__name__)

# By which share of `--interval` a pause is randomly longer or shorter.
JITTER = 0.1
POLICIES = (
    "last=N, every-steps=N, every-seconds=T, best=K:METRIC:min|max, named=NAME, all; separated by commas"
)


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        type=as_folder("use `--remote {}`"),
        help="folders of trainers on this node; '*' is a wildcard",
    )
    parser.add_argument(
        "--remote", metavar="URL", action="append", default=[], help="also sweep this remote; repeatable"
    )
    add_only_remote(parser)
    parser.add_argument(
        "--keep",
        metavar="[KIND:]POLICY",
        type=_keep,
        action="append",
        default=[],
        help=f"remote retention (default: the setting remote_retention): {POLICIES}; for a kind of checkpoint,"
        " put its name in front, e.g. weights:last=10 (default: what its Uploader was opened with)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan with its reasons; change nothing"
    )
    parser.add_argument(
        "--verify", action="store_true", help="also verify every committed checkpoint: one HEAD per shard"
    )
    parser.add_argument(
        "--folders-only",
        action="store_true",
        help="only finish what is in the folders, for which a trainer's permissions suffice; leave the remotes"
        " to another sweeper",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="P",
        type=_port,
        default=-1,
        help="port of the Prometheus metrics and the live page (0: any free one)",
    )
    _add_sweep_events(parser)
    add_metrics_file(parser, "targets")
    how_often = parser.add_mutually_exclusive_group()
    how_often.add_argument("--once", action="store_true", help="sweep once (the default)")
    how_often.add_argument(
        "--interval", metavar="S", type=_pause, help="sweep every S seconds, until SIGTERM"
    )


def _add_sweep_events(parser: argparse.ArgumentParser) -> None:
    add_events(parser)
    parser.add_argument(
        "--events-dir",
        metavar="DIR",
        type=as_path,
        help="folder on a local disk where events of remotes are queued (default: the user's state directory)",
    )


def sweep(options: argparse.Namespace) -> Exit:
    """Sweep once, or every `--interval` seconds until SIGTERM."""
    options.targets = [*options.folders, *options.remote]
    return _sweep(options, only_remotes(options, load_settings({}, os.environ)))


def _sweep(options: argparse.Namespace, settings: Settings) -> Exit:
    if not options.folders and not options.remote:
        raise SettingsError("nothing to sweep", hint="give a folder, or --remote URL")
    if options.metrics_file and options.interval is not None:
        raise SettingsError(
            "--metrics-file is only for a sweep that ends", hint="with --interval use --metrics-port"
        )
    kept = dict(options.keep)
    if kept and options.folders_only:
        raise SettingsError("--folders-only does not prune", hint="leave out --keep")
    if len(kept) < len(options.keep):
        raise SettingsError(
            "--keep was given twice for the same checkpoints", hint="separate the policies by commas"
        )
    sweeper = Sweeper(
        options.folders,
        options.remote,
        events_folder=options.events_dir,
        settings=replace(
            event_settings(options, settings), remote_retention=kept.pop("", settings.remote_retention)
        ),
        kind_retention=kept,
        store_options=store_options(options),
        verifies=options.verify,
        is_for_folders_only=options.folders_only,
    )
    board = Board(sweeper.showing.look)
    server = serve(sweeper.metrics.registry, options.metrics_port, settings.metrics_address, {}, board)
    try:
        if options.interval is None:
            report = threads.run(sweeper.sweep(is_dry_run=options.dry_run))
            _print_sweep(report, options)
            if not options.dry_run:
                _tally(report, tally_of(options))
            return Exit.OK if report.is_clean else Exit.ERROR
        threads.run(_sweep_until_stopped(options, sweeper))
        return Exit.OK
    finally:
        if server is not None:
            server.close()


def _tally(report: SweepReport, tally: Tally) -> None:
    ranks = [rank for each in report.folders if each.drained for rank in each.drained.ranks]
    done = [done.outcome for each in report.remotes for done in each.done]
    for fate, outcome in (("committed", Outcome.COMMIT), ("aborted", Outcome.ABORT)):
        drained = {(rank.kind, each.checkpoint) for rank in ranks for each in getattr(rank, fate)}
        tally.checkpoints[fate] = len(drained) + done.count(outcome)
    tally.checkpoints["pruned"] = done.count(Outcome.PRUNED)
    tally.size_bytes = sum(rank.uploaded_bytes for rank in ranks)
    tally.violations = sum(len(each.violations) for each in report.remotes)


async def _sweep_until_stopped(options: argparse.Namespace, sweeper: Sweeper) -> None:
    """Sweep until SIGTERM or SIGINT. Whatever goes wrong in one sweep, the next one still runs."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    stopping = asyncio.ensure_future(stopped.wait())
    while not stopping.done():
        sweeping = asyncio.ensure_future(sweeper.sweep(is_dry_run=options.dry_run))
        await asyncio.wait({sweeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not sweeping.done():
            sweeping.cancel()  # safe at any point: the next sweep finishes the work
            await asyncio.wait({sweeping})
            return
        if (bug := sweeping.exception()) is None:
            _print_sweep(sweeping.result(), options)
        else:
            logger.error("sweep_failed error=%r; the next sweep will run as planned", bug, exc_info=bug)
            if options.json:
                print(
                    json.dumps({"is_dry_run": options.dry_run, "is_clean": False, "error": repr(bug)}),
                    flush=True,
                )
        # Sweepers on a thousand nodes that were started together must not keep listing the same remote
        # together.
        pause_s = options.interval * random.uniform(1 - JITTER, 1 + JITTER)
        await asyncio.wait({stopping}, timeout=pause_s)


def _print_sweep(report: SweepReport, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(_sweep_json(report, is_dry_run=options.dry_run)), flush=True)
        return
    lines = [line for each in report.folders for line in _folder_lines(each)]
    lines += [line for each in report.remotes for line in _remote_lines(each, is_dry_run=options.dry_run)]
    for line in lines or ["no folder matches yet; nothing to do"]:
        print_line(line)


def _folder_lines(each: FolderReport) -> Iterator[str]:
    if each.error:
        yield f"{each.folder}: {each.error}"
    elif not os.path.isdir(f"{each.folder}/{keys.PRIVATE}"):
        beside = watched_from(each.folder)
        where = (
            f"; it is being watched: sweep the watcher's state folder instead, {str(beside)!r}"
            if beside
            else ""
        )
        yield f"{each.folder}: no trainer has run here yet{where}"
    elif each.waiting_ranks:
        yield f"{each.folder}: would finish what ranks {list(each.waiting_ranks)} left, if their owners are dead"
    elif each.drained is None:
        yield f"{each.folder}: nothing left to finish"
    else:
        ranks = each.drained.ranks
        committed = sum(len(rank.committed) for rank in ranks)
        left = sum(len(rank.left) + len(rank.waiting) for rank in ranks)
        owned = sorted({rank.rank for rank in ranks if rank.in_use_by})
        yield (
            f"{each.folder}: {committed} committed, {left} left, {each.drained.uploaded_bytes} bytes uploaded"
            + (f"; ranks {owned} are in use by a live owner" if owned else "")
        )
        for rank in ranks:
            who = f"rank {rank.rank}, kind {rank.kind}," if rank.kind else f"rank {rank.rank}"
            if rank.error:
                yield f"{each.folder}: {who} failed ({rank.error})"
            for fate in rank.left:
                yield f"{each.folder}: {who} step {fate.checkpoint.step} is not uploaded: {fate.reason}"
            for fate in rank.uncopied:
                yield f"{each.folder}: {who} step {fate.checkpoint.step} is not copied: {fate.reason}"


def _remote_lines(each: RemoteReport, *, is_dry_run: bool) -> Iterator[str]:
    if each.error:
        yield f"{each.url}: could not be swept ({each.error})"
        return
    if not each.done and not each.violations:
        yield f"{each.url}: nothing to do"
    for done in each.done:
        if is_dry_run and (objects := _objects(done.action)):
            yield from (f"{each.url}: would delete {key}: {done.action.reason}" for key in objects)
        else:
            yield f"{each.url}: {_told(done, is_dry_run)}: {done.action.reason}"
    for finding in each.violations:
        yield f"{each.url}: {finding_line(finding)}"
    if is_dry_run:
        yield from _stock_lines(each)


def _stock_lines(each: RemoteReport) -> Iterator[str]:
    """Yield the checkpoints that a dry run would keep, and the totals."""
    for one in each.stock:
        if one.stays:
            yield f"{each.url}: keep {one.checkpoint} ({one.name}, {in_units(one.size_bytes)}): {one.reason}"
    if each.stock:
        stay, go = ([one for one in each.stock if one.stays is stays] for stays in (True, False))
        yield f"{each.url}: {_sum(stay)} {'stays' if len(stay) == 1 else 'stay'}, {_sum(go)} would go"


def _sum(stock: Sequence[sweep_plan.Stock]) -> str:
    size = in_units(sum(each.size_bytes for each in stock))
    return f"{counted(len(stock), 'checkpoint')} ({size})"


def _told(done: Done, is_dry_run: bool) -> str:
    """Return what was done, or is to be done, as a sentence without its reason."""
    infinitive, past = _in_words(done.action)
    if isinstance(done.action, sweep_plan.Wait):
        return past
    if done.error:
        return f"could not {infinitive} ({done.error})"
    if is_dry_run:
        return f"would {infinitive}"
    is_settling = isinstance(
        done.action, sweep_plan.Settle | sweep_plan.GiveUp | sweep_plan.BeginPrune | sweep_plan.FinishPrune
    )
    return f"did not need to {infinitive}" if is_settling and done.outcome is None else past


ACTIONS: dict[type[sweep_plan.Planned], str] = {
    sweep_plan.Settle: "settle",
    sweep_plan.GiveUp: "give_up",
    sweep_plan.MoveLatest: "move_latest",
    sweep_plan.BeginPrune: "begin_prune",
    sweep_plan.FinishPrune: "finish_prune",
    sweep_plan.AbortMultipart: "abort_multipart",
    sweep_plan.Delete: "delete",
    sweep_plan.CollectDecisions: "collect_decisions",
    sweep_plan.Wait: "wait",
}


def _objects(action: sweep_plan.Planned) -> tuple[str, ...]:
    return action.object_keys if isinstance(action, sweep_plan.Delete | sweep_plan.CollectDecisions) else ()


def _in_words(action: sweep_plan.Planned) -> tuple[str, str]:
    """Return an action in the infinitive and in the past tense."""
    match action:
        case sweep_plan.AbortMultipart():
            return _both("abort", "aborted", f"the multipart upload of {action.key}")
        case sweep_plan.Delete():
            objects = f"{counted(len(action.object_keys), 'object')}, {action.object_keys[0]} first"
            return _both("delete", "deleted", objects)
        case sweep_plan.CollectDecisions():
            return _both("collect", "collected", counted(len(action.object_keys), "decision"))
        case sweep_plan.Settle():
            return _both("commit", "committed", str(action.checkpoint))
        case sweep_plan.GiveUp():
            return _both("give up", "gave up", str(action.checkpoint))
        case sweep_plan.MoveLatest():
            return _both("move", "moved", f"latest to {action.checkpoint}")
        case sweep_plan.BeginPrune():
            return _both("begin to prune", "began to prune", str(action.checkpoint))
        case sweep_plan.FinishPrune():
            return _both("prune", "pruned", str(action.checkpoint))
        case sweep_plan.Wait():
            return str(action.checkpoint), f"{action.checkpoint} waits"


def _both(infinitive: str, past: str, what: str) -> tuple[str, str]:
    return f"{infinitive} {what}", f"{past} {what}"


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
                        "action": ACTIONS[type(done.action)],
                        "what": _in_words(done.action)[0],
                        "reason": done.action.reason,
                        "keys": list(_objects(done.action)),
                        "state": STATES[done.outcome] if done.outcome else None,
                        "error": done.error or None,
                    }
                    for done in each.done
                ],
                "violations": [finding_json(found) for found in each.violations],
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


def prune_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("url", metavar="REMOTE", help=WHERE)
    add_kind(parser)
    parser.add_argument(
        "--keep", metavar="POLICY", help=f"what to keep (default: the setting remote_retention): {POLICIES}"
    )
    _add_sweep_events(parser)
    add_metrics_file(parser, "url")
    prune_how = parser.add_mutually_exclusive_group()
    prune_how.add_argument("--dry-run", action="store_true", help="only print the plan (the default)")
    prune_how.add_argument("--yes", action="store_true", help="prune")


def prune(options: argparse.Namespace) -> Exit:
    """Apply a retention policy to a remote; a dry run unless `--yes`."""
    settings = load_settings({}, os.environ)
    text = options.keep if options.keep is not None else settings.remote_retention
    if retention.keeps_all(retention.parse(text)):
        raise SettingsError(
            "the policy keeps everything: nothing to prune",
            hint="set what to keep, e.g. --keep last=3,every-steps=1000",
        )

    async def nothing(*_: object) -> None:
        """Do nothing: opening the run suffices to check that it exists.

        The sweep would report that too, but with a different exit code.
        """

    with_store(options, nothing, is_read_only=True)
    options.folders, options.remote, options.interval = (
        [],
        [keys.kind_remote(options.url, options.kind or "")],
        None,
    )
    options.keep, options.dry_run = [("", text)], not options.yes
    options.metrics_port, options.verify, options.folders_only = -1, False, False
    code = _sweep(options, settings)
    if options.dry_run and not options.json:
        print("nothing was changed; pass --yes to prune")
    return code


def _pause(text: str) -> float:
    if value := as_seconds(text):
        return value
    raise argparse.ArgumentTypeError("0 would mean no pause between sweeps")


def _keep(text: str) -> tuple[str, str]:
    """Return the kind ("" for the run itself) and the policy."""
    kind, colon, policy = text.partition(":")
    return (kind, policy) if colon and keys.is_kind(kind) else ("", text)


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= 65_535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
