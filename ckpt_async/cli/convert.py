"""Writes a sharded checkpoint as a whole: `convert`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ckpt_async import restore
from ckpt_async.cli.output import ANY, Exit, present, store_options, telling_of_silence
from ckpt_async.cli.parsing import add_kind, add_store_options, as_path, as_size, as_step
from ckpt_async.core.units import counted, in_units
from ckpt_async.errors import ObjectNotFoundError, SettingsError
from ckpt_async.formats.table import is_of_deepspeed
from ckpt_async.restore.objects import look
from ckpt_async.restore.session import PATIENCE_S

_DEFAULT_MEMORY = "256MiB"


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a checkpoint as a single file. The source is a run, one of its checkpoints, or a file, in a"
        " store or on this node, in the format of ckpt_async, torch DCP, OLMo (except its olmo_core kind),"
        " OLMo-core or ML Flashpoint. No process group or GPU is needed, and little memory. No code in the"
        " files is run."
    )
    parser.epilog = (
        "examples: ckpt-async convert s3://bucket/run model.safetensors | ckpt-async convert"
        " s3://bucket/run --step 1000 whole.pt | ckpt-async convert ./step1000 ./step1000-unsharded"
    )
    add_store_options(parser)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=as_path,
        help="URL or path of a run (its newest complete checkpoint is used), a checkpoint or a file",
    )
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        type=_destination,
        help="a new file: .safetensors (the model's tensors) or .pt (the whole state); or a new folder"
        " (model.pt, optim.pt, train.pt)",
    )
    add_kind(parser)
    parser.add_argument(
        "--step",
        metavar="S[@gN]",
        type=as_step,
        default=ANY,
        help="convert this step instead of the newest complete checkpoint (100@g2: of generation 2)",
    )
    parser.add_argument(
        "--ignore", metavar="GLOB", action="append", default=[], help="leave out keys ('optim/*'); repeatable"
    )
    parser.add_argument(
        "--subfolder", metavar="F", help="read only the DCP checkpoint in this folder of the source"
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        type=as_size,
        default=_DEFAULT_MEMORY,
        help=f"memory for tensors (default: {_DEFAULT_MEMORY})",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the destination if it is a file")


def convert(options: argparse.Namespace) -> Exit:
    """Unshard the newest complete checkpoint (or that of `--step`) to a file or folder."""
    try:
        from ckpt_async.torch import unshard
    except ModuleNotFoundError as error:
        raise SettingsError(str(error)) from error
    checkpoint = _found(options)
    report = unshard(
        checkpoint,
        options.destination,
        subfolder=options.subfolder,
        ignore_keys=options.ignore,
        overwrite=options.overwrite,
        max_memory_bytes=options.max_memory,
    )
    value = {
        "remote": checkpoint.remote,
        "format": checkpoint.format,
        "generation": checkpoint.generation,
        "step": checkpoint.step,
        "name": checkpoint.name,
        "files": [str(path) for path in report.paths],
        "tensors": report.num_tensors,
        "size_bytes": report.size_bytes,
        "duration_s": round(report.duration_s, 3),
    }
    lines = [
        *(f"passed over {each}" for each in checkpoint.rejected),
        *map(str, report.paths),
        (
            f"{checkpoint.name} ({checkpoint.format}): {counted(report.num_tensors, 'tensor')},"
            f" {in_units(report.size_bytes)} in {report.duration_s:.1f} s, verified"
        ),
    ]
    present(value, lines, is_json=options.json)
    return Exit.OK


def _found(options: argparse.Namespace) -> restore.Checkpoint:
    source, stores = options.source, store_options(options)
    if "://" not in source:
        path = Path(source).absolute()
        if not path.exists():
            raise ObjectNotFoundError(f"{source} does not exist")
        if any(is_of_deepspeed(each.name) for each in (*path.glob("*"), *path.glob("*/*"))):
            raise ObjectNotFoundError(
                f"{source} has DeepSpeed's ZeRO parts; use DeepSpeed's own zero_to_fp32 to merge them"
            )
        source = f"file://{path}"
    with telling_of_silence(source, patience_s=PATIENCE_S):
        looked = look(source, stores)
        if looked.checkpoint is not None:
            return looked.checkpoint
        found = restore.find(
            looked.url,
            kind=options.kind,
            step=options.step.step,
            generation=options.step.generation,
            store_options=stores,
        )
    if found is None:
        which = "" if options.step.step is None else f" of step {options.step.text}"
        raise ObjectNotFoundError(
            f"{options.source} has no complete checkpoint{which}; to convert a single file, give its name"
        )
    return found


def _destination(text: str) -> str:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a remote; convert to a local file and upload that")
    return as_path(text)
