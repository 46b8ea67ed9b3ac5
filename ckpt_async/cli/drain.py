"""Finishes what a trainer left in a folder: `drain`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from ckpt_async import threads
from ckpt_async.cli.events import add_events, event_settings
from ckpt_async.cli.metrics_file import add_metrics_file, tally_of
from ckpt_async.cli.output import Exit, Json, id_json, present, store_options
from ckpt_async.cli.parsing import add_only_remote, add_store_options, as_folder, as_seconds, only_remotes
from ckpt_async.core.model import RemoteAddress
from ckpt_async.core.units import in_units, named, one_line
from ckpt_async.errors import SettingsError
from ckpt_async.local.settings_file import load_settings
from ckpt_async.stores import StoreOptions, address_of
from ckpt_async.sweep import drain as work
from ckpt_async.sweep.drain import DrainedCheckpoint, DrainReport, RankReport


def drain_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=as_folder("the folder's journal names the remote; if it is lost, use `--remote {}`"),
        help="the folder that the uploader was opened with",
    )
    parser.add_argument(
        "--remote", metavar="URL", help="remote URL (default: the one that the trainer recorded)"
    )
    add_only_remote(parser)
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=as_seconds,
        default=3600.0,
        help="give up after this long (default: 3600)",
    )
    parser.add_argument(
        "--grace",
        metavar="S",
        type=as_seconds,
        help="once this folder is uploaded, wait this long for ranks on other nodes (default: close_grace_s)",
    )
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="FOLDER is a copy that takes its original's place; nothing must use that any more",
    )
    add_events(parser)
    add_metrics_file(parser, "folder")


def drain(options: argparse.Namespace) -> Exit:
    """Finish what a trainer left in a folder."""
    settings = only_remotes(options, event_settings(options, load_settings({}, os.environ)))
    report = threads.run(
        work.drain(
            options.folder,
            timeout_s=options.timeout,
            grace_s=settings.close_grace_s if options.grace is None else options.grace,
            settings=settings,
            change=_change_of(options),
            store_options=store_options(options),
            adopts_copy=options.adopt,
        )
    )
    code = _drain_code(report)
    tally = tally_of(options)
    tally.size_bytes = report.uploaded_bytes
    for fate in ("committed", "aborted", "waiting", "left"):
        tally.checkpoints[fate] = len(
            {(rank.kind, each.checkpoint) for rank in report.ranks for each in getattr(rank, fate)}
        )
    lines = [line for each in report.ranks for line in _rank_lines(each)] or ["nothing to do"]
    if report.uploaded_bytes:
        lines.append(f"{in_units(report.uploaded_bytes)} uploaded to {', '.join(report.remotes)}")
    present(_drain_json(report, code), lines, is_json=options.json)
    return code


def _change_of(options: argparse.Namespace) -> Callable[[RemoteAddress | None], RemoteAddress] | None:
    """Return how the flags change the remote that a journal recorded; None if they do not."""
    if not (options.remote or options.endpoint_url or options.region):
        return None
    given = StoreOptions(endpoint_url=options.endpoint_url, region=options.region)
    # A remote that is not valid is refused before anything is touched.
    named = address_of(options.remote, given, env=os.environ) if options.remote else None

    def change(recorded: RemoteAddress | None) -> RemoteAddress:
        if named is not None and (recorded is None or recorded.url != named.url):
            recorded = replace(named, put_args=recorded.put_args if recorded else {})
        if recorded is None:
            raise SettingsError("the journal does not name the remote", hint="pass it with --remote")
        return replace(
            recorded,
            endpoint_url=options.endpoint_url or recorded.endpoint_url,
            region=options.region or recorded.region,
        )

    return change


def _drain_code(report: DrainReport) -> Exit:
    """Return the exit code for the worst of the ranks.

    From worst to best: an error, not all uploaded or copied, an event that was not delivered, a live owner that has
    work, waiting for ranks elsewhere. Whether an event was dropped after the last attempt or still waits depends on the
    time limits only, so both are the same error.
    """
    if any(each.error for each in report.ranks):
        return Exit.ERROR
    if any(each.left or each.uncopied for each in report.ranks):
        return Exit.NOT_DRAINED
    if any(each.events.num_dropped or each.events.num_waiting for each in report.ranks):
        return Exit.ERROR
    if any(each.in_use_by for each in report.ranks):
        return Exit.TEMPORARY
    return Exit.INCOMPLETE if any(each.waiting for each in report.ranks) else Exit.OK


def _drain_json(report: DrainReport, code: Exit) -> Json:
    return {
        "folder": report.folder,
        "remotes": list(report.remotes),
        "is_drained": code is Exit.OK,
        "exit_code": int(code),
        "uploaded_bytes": report.uploaded_bytes,
        "ranks": [
            {
                "rank": each.rank,
                "kind": each.kind or None,
                "in_use_by": each.in_use_by or None,
                "committed": [_fate_json(fate) for fate in each.committed],
                "aborted": [_fate_json(fate) for fate in each.aborted],
                "waiting": [_fate_json(fate) for fate in each.waiting],
                "left": [_fate_json(fate) for fate in each.left],
                "uncopied": [_fate_json(fate) for fate in each.uncopied],
                "uploaded_bytes": each.uploaded_bytes,
                "num_delivered_events": each.events.num_delivered,
                "num_dropped_events": each.events.num_dropped,
                "num_untold_events": each.events.num_waiting,
                "error": each.error or None,
            }
            for each in report.ranks
        ],
    }


def _fate_json(fate: DrainedCheckpoint) -> Json:
    return {
        **id_json(fate.checkpoint),
        "name": fate.name,
        "reason": fate.reason or None,
        "missing_ranks": list(fate.missing_ranks),
    }


def _rank_lines(each: RankReport) -> Iterator[str]:
    rank = f"rank {each.rank}, kind {each.kind}:" if each.kind else f"rank {each.rank}:"
    if each.in_use_by:
        yield f"{rank} in use by {each.in_use_by}; left alone"
    for fate in each.committed:
        yield f"{rank} step {fate.checkpoint.short} is committed"
    for fate in each.aborted:
        yield f"{rank} step {fate.checkpoint.short} was given up: {one_line(fate.reason)}"
    for fate in each.waiting:
        missing = named("rank", fate.missing_ranks) if fate.missing_ranks else "other nodes"
        yield f"{rank} step {fate.checkpoint.short} is uploaded and waits for {missing}"
    for fate in each.left:
        yield f"{rank} step {fate.checkpoint.short} is not uploaded: {fate.reason}"
    for fate in each.uncopied:
        yield f"{rank} step {fate.checkpoint.short} is not copied to its exact keys: {fate.reason}"
    for num, (one, many), what in (
        (each.events.num_delivered, ("was", "were"), "delivered"),
        (
            each.events.num_dropped,
            ("was", "were"),
            "dropped after the last attempt and will not be sent again",
        ),
        (each.events.num_waiting, ("is", "are"), "not delivered yet: drain again, with the same receivers"),
    ):
        if num:
            yield f"{rank} 1 event {one} {what}" if num == 1 else f"{rank} {num} events {many} {what}"
    if each.error:
        yield f"{rank} failed: {each.error}"
