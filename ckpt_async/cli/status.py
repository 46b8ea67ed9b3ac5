"""What a node's folder holds: `status`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping

from ckpt_async.cli.output import Exit, Json, id_json, print_json, print_table
from ckpt_async.cli.parsing import as_folder
from ckpt_async.core.units import in_units
from ckpt_async.monitor.status import CheckpointStatus, Status, has_owner, load, view


def status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=as_folder("`ckpt-async ls {}` shows what is there"),
        help="the folder that the uploader was opened with",
    )


def status(options: argparse.Namespace) -> Exit:
    """What the journal of a folder says; touches nothing."""
    by_kind = {
        kind: (found, {rank for rank in found.ranks if has_owner(options.folder, rank, kind)})
        for kind, found in load(options.folder).items()
    }
    if options.json:
        print_json(_folder_json(options.folder, by_kind))
        return Exit.OK
    for number, (kind, (found, owned)) in enumerate(by_kind.items()):
        if len(by_kind) > 1 or kind:
            print(("\n" if number else "") + (f"kind {kind}" if kind else "the run itself, no kind"))
        _print_status(found, owned, options.folder)
    return Exit.OK


def _print_status(found: Status, owned: set[int], folder: str) -> None:
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
        if hint := _hint(each, owned, folder):
            print(f"step {each.id.step}: {hint}")


def _folder_json(folder: str, by_kind: Mapping[str, tuple[Status, set[int]]]) -> Json:
    """What it says of the run itself, and `kinds`."""
    own, owned = by_kind.get("", (view([], {}, time.time()), set[int]()))
    return {
        "folder": os.path.realpath(folder),
        **_status_json(folder, own, owned),
        "kinds": {kind: _status_json(folder, *each) for kind, each in by_kind.items() if kind},
    }


def _status_json(folder: str, found: Status, owned: set[int]) -> Json:
    committed = found.last_committed
    return {
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
            return "given up for good, on all ranks; to keep it, save it again as another step, or after a restart"
        case "uploading" | "open" if each.failure and owned.intersection(each.ranks):
            return "failed uploads are retried every half minute"
        case "uploading" | "open" if each.failure:
            return f"`ckpt-async drain {folder}` retries now"
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
