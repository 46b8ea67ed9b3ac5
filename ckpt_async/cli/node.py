"""The commands about this node's folder: `status` and `drain`. See `cli`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ckpt_async.cli.output import Exit, Json, id_json, print_json, print_table
from ckpt_async.core.units import few, in_units
from ckpt_async.errors import SettingsError
from ckpt_async.monitor.status import has_owner, load

if TYPE_CHECKING:
    from ckpt_async.core.model import RemoteAddress
    from ckpt_async.monitor.status import CheckpointStatus, Status
    from ckpt_async.sweep.drain import DrainReport, Fate, RankReport


def status(options: argparse.Namespace) -> Exit:
    """What the journal of a folder says; touches nothing."""
    found = load(options.folder)
    owned = {rank for rank in found.ranks if has_owner(options.folder, rank)}
    if options.json:
        print_json(_status_json(options.folder, found, owned))
        return Exit.OK
    print(found.summary)
    if found.pending and not owned:
        print("no uploader is running here: `ckpt-async drain` finishes what was sealed")
    print(f"\nremote  {found.remote or 'not recorded'}")
    ranks = (f"{rank}" if rank in owned else f"{rank} (stopped)" for rank in found.ranks)
    print(f"ranks   {', '.join(ranks)}")
    queue = ", ".join(
        f"{count} {state} ({in_units(size_bytes)})"
        for state, (count, size_bytes) in found.queue.items()
        if count
    )
    print(f"queue   {queue or 'empty'}")
    if found.checkpoints:
        print()
        rows = [
            (
                str(each.id.step),
                each.name,
                str(each.id.generation),
                each.state,
                f"{each.percent} %",
                f"{each.num_verified}/{each.num_shards}",
                in_units(each.size_bytes),
                each.failure,
            )
            for each in found.checkpoints
        ]
        print_table(("STEP", "NAME", "GENERATION", "STATE", "UPLOADED", "SHARDS", "SIZE", ""), rows)
    for each in found.checkpoints:
        if hint := _hint(each, owned, options.folder):
            print(f"step {each.id.step}: {hint}")
    return Exit.OK


def _status_json(folder: str, found: Status, owned: set[int]) -> Json:
    committed = found.last_committed
    return {
        "folder": os.path.realpath(folder),
        "remote": found.remote,
        "summary": found.summary,
        "last_committed": None
        if committed is None
        else {
            **id_json(committed),
            "committed_at": found.last_committed_at,
            "age_s": max(0.0, found.now - found.last_committed_at),
        },
        "queue": {
            state: {"shards": count, "bytes": size_bytes}
            for state, (count, size_bytes) in found.queue.items()
        },
        "ranks": [{"rank": rank, "is_running": rank in owned} for rank in found.ranks],
        "checkpoints": [
            {**_checkpoint_json(each), "hint": _hint(each, owned, folder) or None}
            for each in found.checkpoints
        ],
    }


def _hint(each: CheckpointStatus, owned: set[int], folder: str) -> str:
    """What to do about a checkpoint with a failure. There is no command to retry one: what may still be sent is, and an
    abort is never taken back (rule R4).
    """
    match each.state:
        case "lost" | "aborted":
            return "given up for good, on all ranks; if wanted, save it again: as another step, or after a restart"
        case "uploading" | "open" if each.failure and owned.intersection(each.ranks):
            return "what failed is tried again every half minute"
        case "uploading" | "open" if each.failure:
            return f"`ckpt-async drain {folder}` tries again now"
        case _:
            return ""


def _checkpoint_json(each: CheckpointStatus) -> Json:
    return {
        **id_json(each.id),
        "name": each.name,
        "state": each.state,
        "ranks": list(each.ranks),
        "world_size": each.world_size,
        "shards": each.num_shards,
        "shards_verified": each.num_verified,
        "size_bytes": each.size_bytes,
        "uploaded_bytes": each.uploaded_bytes,
        "percent": each.percent,
        "failure": each.failure or None,
    }


# --- drain -------------------------------------------------------------------------------------------------


def drain(options: argparse.Namespace) -> Exit:
    """Finish what a trainer left in a folder."""
    from ckpt_async import threads
    from ckpt_async.local.settings_file import load_settings
    from ckpt_async.sweep import drain as work

    settings = load_settings({}, os.environ)
    report = threads.run(
        work.drain(
            options.folder,
            timeout_s=options.timeout,
            grace_s=settings.close_grace_s if options.grace is None else options.grace,
            settings=settings,
            change=_change_of(options),
            profile=options.profile,
        )
    )
    code = _drain_code(report)
    if options.json:
        print_json(_drain_json(report, code))
        return code
    lines = [line for each in report.ranks for line in _rank_lines(each)]
    for line in lines or ["nothing to do"]:
        print(line)
    if report.uploaded_bytes:
        print(f"{in_units(report.uploaded_bytes)} uploaded to {', '.join(report.remotes)}")
    return code


def _change_of(options: argparse.Namespace) -> Callable[[RemoteAddress | None], RemoteAddress] | None:
    """How the flags change the remote that a journal recorded, if there are any."""
    if not (options.remote or options.endpoint_url or options.region):
        return None
    from dataclasses import replace

    from ckpt_async.stores import StoreOptions, address_of

    given = StoreOptions(endpoint_url=options.endpoint_url, region=options.region)
    if options.remote:
        address_of(options.remote, given, env=os.environ)  # refused here, before anything is touched

    def change(recorded: RemoteAddress | None) -> RemoteAddress:
        url = options.remote or (recorded.url if recorded else None)
        if url is None:
            raise SettingsError("the journal does not say where it uploads to", hint="say so with --remote")
        if recorded is None or recorded.url != url:
            recorded = replace(
                address_of(url, given, env=os.environ), put_args=recorded.put_args if recorded else {}
            )
        return replace(
            recorded,
            endpoint_url=options.endpoint_url or recorded.endpoint_url,
            region=options.region or recorded.region,
        )

    return change


def _drain_code(report: DrainReport) -> Exit:
    """The worst of the ranks: not all uploaded, then a live owner with work, then ranks elsewhere."""
    if any(each.error for each in report.ranks):
        return Exit.ERROR
    if any(each.left for each in report.ranks):
        return Exit.NOT_DRAINED
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
                "in_use_by": each.in_use_by or None,
                "committed": [_fate_json(fate) for fate in each.committed],
                "aborted": [_fate_json(fate) for fate in each.aborted],
                "waiting": [_fate_json(fate) for fate in each.waiting],
                "left": [_fate_json(fate) for fate in each.left],
                "uploaded_bytes": each.uploaded_bytes,
                "error": each.error or None,
            }
            for each in report.ranks
        ],
    }


def _fate_json(fate: Fate) -> Json:
    return {
        **id_json(fate.checkpoint),
        "name": fate.name,
        "reason": fate.reason or None,
        "missing_ranks": list(fate.missing_ranks),
    }


def _rank_lines(each: RankReport) -> Iterator[str]:
    rank = f"rank {each.rank}:"
    if each.in_use_by:
        yield f"{rank} in use by {each.in_use_by}; left alone"
    for fate in each.committed:
        yield f"{rank} step {fate.checkpoint.step} is committed"
    for fate in each.aborted:
        yield f"{rank} step {fate.checkpoint.step} was given up: {fate.reason}"
    for fate in each.waiting:
        missing = few(fate.missing_ranks)
        yield f"{rank} step {fate.checkpoint.step} is uploaded and waits for ranks {missing or 'elsewhere'}"
    for fate in each.left:
        yield f"{rank} step {fate.checkpoint.step} is not uploaded: {fate.reason}"
    if each.error:
        yield f"{rank} failed: {each.error}"
