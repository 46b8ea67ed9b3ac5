"""Fetches a checkpoint: `pull`."""

from __future__ import annotations

import argparse
import os
import sys

from ckpt_async import restore
from ckpt_async.cli.metrics_file import add_metrics_file, tally_of
from ckpt_async.cli.output import (
    ANY,
    Exit,
    Json,
    present,
    store_options,
    telling_of_silence,
)
from ckpt_async.cli.parsing import (
    WHERE,
    add_generation,
    add_kind,
    add_store_options,
    as_folder,
    as_path,
    as_step,
    generation_of,
)
from ckpt_async.core import keys
from ckpt_async.core.units import counted, in_units
from ckpt_async.errors import ObjectNotFoundError
from ckpt_async.restore.options import MAX_CONCURRENT_READS
from ckpt_async.restore.progress import ProgressBar
from ckpt_async.restore.session import PATIENCE_S


def pull_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("url", metavar="REMOTE", help=WHERE)
    parser.add_argument(
        "destination",
        metavar="DEST",
        type=as_folder("give the remote first, then the destination folder"),
        help="destination folder",
    )
    add_kind(parser)
    parser.add_argument(
        "--step",
        metavar="S[@gN]",
        type=as_step,
        default=ANY,
        help="fetch this step instead of the newest complete checkpoint (100@g2: of generation 2)",
    )
    add_generation(parser)
    parser.add_argument(
        "--only", metavar="GLOB", action="append", help="fetch only files whose names match; repeatable"
    )
    parser.add_argument(
        "--rank", metavar="R", type=int, action="append", help="fetch only files of this rank; repeatable"
    )
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=_ranks,
        help="number of ranks of another tool's one-file-per-rank checkpoint, if no file name tells it",
    )
    parser.add_argument(
        "--folder", metavar="F", type=as_path, help="a trainer's folder that may still hold some of the files"
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify every file against its checksum (the default)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files of the same names whose content differs"
    )
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=_reads,
        default=MAX_CONCURRENT_READS,
        help="maximum concurrent reads (default: %(default)s; fewer if that fills the link)",
    )
    add_metrics_file(parser, "url")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be pulled")


def pull(options: argparse.Namespace) -> Exit:
    """Fetch the newest complete checkpoint (or that of `--step`) into a folder; with `--dry-run` only print what."""
    if options.dry_run:
        return _plan(options)
    bar = ProgressBar(sys.stderr) if sys.stderr.isatty() else None
    try:
        with telling_of_silence(options.url, patience_s=PATIENCE_S) as heard:

            def progressed(done_bytes: int, total_bytes: int) -> None:
                heard()
                if bar is not None:
                    bar(done_bytes, total_bytes)

            found = restore.fetch_latest(
                options.url,
                options.destination,
                kind=options.kind,
                ranks=options.rank,
                files=options.only,
                folder=options.folder,
                step=options.step.step,
                generation=generation_of(options.step, options.generation),
                world_size=options.world_size,
                store_options=store_options(options),
                verify=options.verify,
                overwrite=options.overwrite,
                num_concurrent_reads=options.concurrency,
                on_progress=progressed,
            )
    finally:
        if bar is not None:
            bar.clear()
    if found is None:
        raise _none(options)
    checkpoint, report = found
    tally = tally_of(options)
    tally.checkpoints["fetched"], tally.size_bytes = 1, report.size_bytes
    value = {
        **_checkpoint_json(checkpoint, options),
        "files": {name: str(path) for name, path in report.paths.items()},
        "size_bytes": report.size_bytes,
        "bytes_from": dict(report.bytes_from),
        "duration_s": round(report.duration_s, 3),
    }
    came = ", ".join(f"{in_units(count)} {_ORIGINS[kind]}" for kind, count in report.bytes_from.items())
    rate = report.size_bytes / max(report.duration_s, 1e-9)
    lines = [
        *(f"passed over {each}" for each in checkpoint.rejected),
        f"step {checkpoint.step} ({checkpoint.name}): {counted(len(report.paths), 'file')},"
        f" {in_units(report.size_bytes)} in {report.duration_s:.1f} s, {in_units(rate)}/s"
        + (f" ({came})" if came else ""),
    ]
    present(value, lines, is_json=options.json)
    return Exit.OK


_ORIGINS = {
    "there": "already there",
    "resumed": "from an earlier pull",
    "local": "from this node",
    "peer": "from peers",
    "remote": "from the store",
}


def _plan(options: argparse.Namespace) -> Exit:
    with telling_of_silence(options.url, patience_s=PATIENCE_S):
        checkpoint = restore.find(
            options.url,
            kind=options.kind,
            step=options.step.step,
            generation=generation_of(options.step, options.generation),
            world_size=options.world_size,
            store_options=store_options(options),
        )
    if checkpoint is None:
        raise _none(options)
    files = checkpoint.select(options.rank, options.only)
    size_bytes = sum(file.size_bytes for file in files)
    value = {
        **_checkpoint_json(checkpoint, options),
        "files": {file.name: file.size_bytes for file in files},
        "size_bytes": size_bytes,
    }
    lines = [
        *(f"passed over {each}" for each in checkpoint.rejected),
        *(f"{in_units(file.size_bytes):>12}  {file.name}" for file in files),
        (
            f"step {checkpoint.step} ({checkpoint.name}): {counted(len(files), 'file')}, {in_units(size_bytes)}"
            " would be pulled"
        ),
    ]
    present(value, lines, is_json=options.json)
    return Exit.OK


def _none(options: argparse.Namespace) -> ObjectNotFoundError:
    which = (
        "no complete checkpoint"
        if options.step.step is None
        else f"no complete checkpoint of step {options.step.text}"
    )
    of_kind = f" of kind {options.kind}" if options.kind else ""
    of_kind += f" of generation {options.generation}" if options.generation else ""
    hint = f"`ckpt-async ls {options.url}` lists its checkpoints, or the runs below a prefix"
    return ObjectNotFoundError(f"{options.url} has {which}{of_kind}", hint=hint)


def _checkpoint_json(checkpoint: restore.Checkpoint, options: argparse.Namespace) -> Json:
    return {
        "destination": os.path.realpath(options.destination),
        "remote": checkpoint.remote,
        "format": checkpoint.format,
        "generation": checkpoint.generation,
        "step": checkpoint.step,
        "name": checkpoint.name,
        "ranks": checkpoint.world_size,
        "passed_over": [
            {"generation": each.id.generation, "step": each.id.step, "reason": each.reason}
            for each in checkpoint.rejected
        ],
    }


def _reads(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= 1024:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1024")


def _ranks(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= keys.MAX_RANK + 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {keys.MAX_RANK + 1}")
