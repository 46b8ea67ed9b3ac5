"""Works on a run as a whole: `copy` it to another place, `delete` it."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ckpt_async import threads
from ckpt_async.cli.output import (
    Exit,
    id_json,
    present,
    print_line,
    store_options,
    telling_of_silence,
)
from ckpt_async.cli.parsing import WHERE, add_store_options, as_path
from ckpt_async.core import keys
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import counted, in_units
from ckpt_async.errors import CkptAsyncError, ObjectNotFoundError
from ckpt_async.protocol.runs import kinds_below
from ckpt_async.restore.checkpoint import Checkpoint
from ckpt_async.restore.run_copy import copy as copy_run
from ckpt_async.restore.session import PATIENCE_S
from ckpt_async.sweep import deletion
from ckpt_async.transfer.patient import PatientStore, connect

# --- copy --------------------------------------------------------------------------------------------------


def copy_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("source", metavar="SOURCE", help=WHERE)
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        help="a place with nothing in it, perhaps in another kind of store",
    )
    parser.add_argument(
        "--step",
        metavar="S",
        type=_step,
        action="append",
        help="copy only this step; repeatable (default: all)",
    )
    parser.add_argument(
        "--to-endpoint-url",
        metavar="URL",
        help="endpoint of the destination, if it is another one than the source's",
    )
    parser.add_argument(
        "--place",
        metavar="DIR",
        type=as_path,
        help="where files lie on their way, 2 GiB or two files (default: the temporary folder)",
    )


def copy(options: argparse.Namespace) -> Exit:
    """Copy a run; the checkpoints appear when all are there. Repeated after an interruption, it goes on."""

    def copied(checkpoint: Checkpoint) -> None:
        if not options.json:
            print_line(f"{checkpoint.name}: {in_units(checkpoint.size_bytes)} copied")

    from_options = store_options(options)
    to_options = from_options
    if options.to_endpoint_url:
        to_options = replace(from_options, endpoint_url=options.to_endpoint_url)
    with telling_of_silence(options.source, patience_s=PATIENCE_S):
        report = copy_run(
            options.source,
            options.destination,
            steps=options.step,
            place=options.place,
            store_options=from_options,
            destination_options=to_options,
            on_copied=copied,
        )
    value = {
        "source": options.source,
        "destination": options.destination,
        "copied": [id_json(each) for each in report.copied],
        "skipped": [{**id_json(id_), "reason": reason} for id_, reason in report.skipped.items()],
        "size_bytes": report.size_bytes,
    }
    lines = [
        *(f"step {id_.step} is not copied: {reason}" for id_, reason in report.skipped.items()),
        f"{counted(len(report.copied), 'checkpoint')}, {in_units(report.size_bytes)}, in {options.destination}",
    ]
    present(value, lines, is_json=options.json)
    return Exit.INCOMPLETE if report.skipped else Exit.OK


def _step(text: str) -> int:
    if text.isdecimal() and int(text) <= keys.MAX_STEP:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a step, such as 100")


# --- delete ------------------------------------------------------------------------------------------------


def delete_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("url", metavar="REMOTE", help=WHERE)
    parser.add_argument(
        "--yes", action="store_true", help="delete it; without, only print what would be deleted"
    )


def delete(options: argparse.Namespace) -> Exit:
    """Delete a run with all its kinds; other objects below its URL stay."""
    plans = threads.run(_delete(options))
    obstacles = [f"{each.url} is not deleted: {each.obstacle}" for each in plans if each.obstacle]
    value = {
        "remote": options.url,
        "is_deleted": options.yes,
        "places": [
            {
                "remote": each.url,
                "checkpoints": [id_json(id_) for id_ in each.committed],
                "objects": each.num_objects,
                "size_bytes": each.size_bytes,
                "stays": list(each.other_keys),
                "obstacle": each.obstacle or None,
            }
            for each in plans
        ],
    }
    done = "deleted" if options.yes else "would be deleted"
    lines = [
        *(
            f"{each.url}: {counted(len(each.committed), 'checkpoint')}, {counted(each.num_objects, 'object')},"
            f" {in_units(each.size_bytes)} {done}"
            + (f"; {counted(len(each.other_keys), 'object')} of others left" if each.other_keys else "")
            for each in plans
        ),
        *obstacles,
        *([] if options.yes else ["nothing was deleted: repeat with --yes"]),
    ]
    present(value, lines, is_json=options.json)
    return Exit.OK


async def _delete(options: argparse.Namespace) -> list[deletion.Deletion]:
    """Return what there is, of the kinds and then of the run; delete it if the user has said so."""
    with telling_of_silence(options.url, patience_s=PATIENCE_S):
        run = await _opened(options, "")
        stores = []
        try:
            stores = [await _opened(options, kind) for kind in await kinds_below(run)]
            stores.append(run)
            plans = [await deletion.plan(each) for each in stores]
            if not any(each.num_objects for each in plans):
                raise ObjectNotFoundError(f"{options.url} holds no run of ckpt_async")
            if options.yes:
                for found in plans:
                    deletion.check(found)
                for store, found in zip(stores, plans, strict=True):
                    await deletion.delete(store, found)
        finally:
            for store in {id(each): each for each in (*stores, run)}.values():
                await store.close()
    return plans


async def _opened(options: argparse.Namespace, kind: str) -> PatientStore:
    url = keys.kind_remote(options.url, kind)
    store = connect(url, store_options(options), Settings(), is_patient=False)
    try:
        await store.open(PATIENCE_S, is_read_only=not options.yes)
    except CkptAsyncError:
        await store.close()
        raise
    return store
