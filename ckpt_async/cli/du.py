"""Shows what a run, or each run below a prefix, occupies in the store: `du`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_async import threads
from ckpt_async.cli.ls import Found, Run, look, opened
from ckpt_async.cli.output import Exit, Json, id_json, print_json, print_table
from ckpt_async.cli.parsing import WHERE, add_kind, add_store_options
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.units import in_units
from ckpt_async.errors import StoreError
from ckpt_async.protocol.overview import STATES
from ckpt_async.stores.interface import ObjectInfo

RECORDS, OTHERS = "records", "others"


def du_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("remote", metavar="REMOTE", help=f"{WHERE}, or a prefix with runs below it")
    add_kind(parser)


@dataclass(slots=True)
class Used:
    """Objects that belong together: those of one checkpoint (`checkpoint`, `state`), or the rest."""

    what: str
    kind: str = ""
    checkpoint: CheckpointId | None = None
    state: str = ""
    objects: int = 0
    size_bytes: int = 0


def du(options: argparse.Namespace) -> Exit:
    """Print the sizes of all objects as the store lists them, which leaves out unfinished multipart uploads."""
    url, used = threads.run(_use(options))
    if options.json:
        total = sum(each.size_bytes for _, all_ in used for each in all_)
        runs = [{"remote": run.url, "used": [_json(each) for each in all_]} for run, all_ in used]
        print_json({"remote": url, "size_bytes": total, "runs": runs})
        return Exit.OK
    if [run.url for run, _ in used] == [url]:
        rows = [
            (in_units(each.size_bytes), str(each.objects), _name(each), _SAID.get(each.state, each.state))
            for each in used[0][1]
        ]
        rows.append((*_sum(used[0][1]), url, ""))
        print_table(("SIZE", "OBJECTS", "WHAT", ""), rows)
    else:
        by_run = [(*_sum(all_), run.url) for run, all_ in used]
        by_run.append((*_sum(each for _, all_ in used for each in all_), url))
        print_table(("SIZE", "OBJECTS", "RUN"), by_run)
    return Exit.OK


async def _use(options: argparse.Namespace) -> tuple[str, list[tuple[Run, list[Used]]]]:
    url, runs = await look(options)
    used = []
    for run in runs:
        where = keys.kind_remote(run.url, options.kind or "")
        async with opened(where, options) as (store, _):
            listing = await store.list("")
            for each in listing.objects[
                :1
            ]:  # whose answer tells of a bucket that keeps versions, which no listing shows
                with contextlib.suppress(StoreError):
                    await store.head(each.key)
        used.append((run, sort_out(listing.objects, run.kinds, options.kind or "")))
    return url, used


def sort_out(objects: Iterable[ObjectInfo], kinds: Iterable[Found], of_kind: str = "") -> list[Used]:
    """Group the objects of a run, or of one kind in it, by purpose: checkpoints in order, then the rest. Pure."""
    states = {
        (found.kind, each.checkpoint): (each.name, STATES[each.outcome])
        for found in kinds
        for each in found.decisions
    }
    used: dict[tuple[str, CheckpointId | str], Used] = {}
    for each in objects:
        kind, key = (of_kind, each.key) if of_kind else keys.parse_kind_key(each.key) or ("", each.key)
        data = keys.parse_data_key(key)
        if data is not None:
            name, state = states.get((kind, data[0]), (data[1], "in_flight"))
            place = used.setdefault((kind, data[0]), Used(name, kind, data[0], state))
        else:
            what = RECORDS if key.startswith(f"{keys.PRIVATE}/") else OTHERS
            place = used.setdefault((kind, what), Used(what, kind))
        place.objects += 1
        place.size_bytes += each.size_bytes
    first = CheckpointId(keys.MAX_GENERATION + 1, 0)
    return sorted(used.values(), key=lambda each: (each.kind, each.checkpoint or first, each.what))


_SAID = {"committed": "", "in_flight": "not committed", "aborted": "given up", "pruning": "being pruned"}


def _name(each: Used) -> str:
    kind = f"{each.kind}: " if each.kind else ""
    generation = f".g{each.checkpoint.generation}" if each.checkpoint else ""
    return f"{kind}{each.what}{generation}"


def _sum(used: Iterable[Used]) -> tuple[str, str]:
    all_ = list(used)
    return in_units(sum(each.size_bytes for each in all_)), str(sum(each.objects for each in all_))


def _json(each: Used) -> Json:
    return {
        "what": "checkpoint" if each.checkpoint else each.what,
        "kind": each.kind or None,
        **(id_json(each.checkpoint) if each.checkpoint else {}),
        **({"name": each.what, "state": each.state} if each.checkpoint else {}),
        "objects": each.objects,
        "size_bytes": each.size_bytes,
    }
