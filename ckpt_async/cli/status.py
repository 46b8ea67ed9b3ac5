"""What a node's folder holds: `status`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection

from ckpt_async.cli.output import Exit, print_json, print_table
from ckpt_async.cli.parsing import as_folder
from ckpt_async.core.units import in_units
from ckpt_async.monitor.report import FolderWatch, folder_json, hint_for
from ckpt_async.monitor.status import Status


def status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=as_folder("`ckpt-async ls {}` shows what is there"),
        help="the folder that the uploader was opened with",
    )


def status(options: argparse.Namespace) -> Exit:
    """What the journal of a folder says; touches nothing."""
    by_kind = FolderWatch(options.folder).look()
    if options.json:
        print_json(folder_json(options.folder, by_kind, time.time()))
        return Exit.OK
    for number, (kind, seen) in enumerate(by_kind.items()):
        if len(by_kind) > 1 or kind:
            print(("\n" if number else "") + (f"kind {kind}" if kind else "the run itself, no kind"))
        _print_status(seen.status, seen.owned, options.folder)
    return Exit.OK


def _print_status(found: Status, owned: Collection[int], folder: str) -> None:
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
        if hint := hint_for(each, owned, folder):
            print(f"step {each.id.step}: {hint}")
