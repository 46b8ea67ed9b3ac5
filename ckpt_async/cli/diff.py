"""Compares two checkpoints: `diff`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckpt_async import restore
from ckpt_async.cli.output import (
    ANY,
    Exit,
    Json,
    Which,
    id_json,
    print_json,
    print_line,
    store_options,
    telling_of_silence,
)
from ckpt_async.cli.parsing import WHERE, add_kind, add_store_options, as_step, as_which
from ckpt_async.core.units import counted, few, in_units
from ckpt_async.errors import ObjectNotFoundError
from ckpt_async.restore.checkpoint import RemoteFile
from ckpt_async.restore.session import PATIENCE_S
from ckpt_async.restore.tensors import Tensors, tensors_of

T = TypeVar("T")

_PLACED = re.compile(r"(?P<remote>.+://.*?)(?:#(?P<step>[0-9]+(?:@g[0-9]+)?))?", re.ASCII)


def diff_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("a", metavar="A", type=_as_place, help=f"REMOTE or REMOTE#STEP: {WHERE}#100")
    parser.add_argument(
        "b", metavar="B", type=_as_place_or_step, help="the same, or only a STEP (100, 100@g2) of A's remote"
    )
    add_kind(parser)
    parser.add_argument(
        "--tensors",
        action="store_true",
        help="also compare the names, types and shapes of tensors in DCP and safetensors files; their content"
        " is not read",
    )


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint as the user typed it: the remote ("" for A's), and which checkpoint there."""

    remote: str
    which: Which

    def __str__(self) -> str:
        return f"{self.remote}#{self.which.text}" if self.which.text else self.remote


def _as_place(text: str) -> Place:
    found = _PLACED.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a remote such as s3://bucket/prefix/run#100")
    _, mark, step = found["remote"].rpartition("#")
    if mark and "/" not in step:
        as_step(step)  # raises: it is not a step
    return Place(found["remote"], as_which(found["step"]) if found["step"] else ANY)


def _as_place_or_step(text: str) -> Place:
    which = as_which(text)
    return _as_place(text) if which.step is None else Place("", which)


@dataclass(frozen=True, slots=True)
class Difference(Generic[T]):
    """The difference between two mappings, each part in order of the names."""

    removed: dict[str, T]
    added: dict[str, T]
    changed: dict[str, tuple[T, T]]
    num_same: int

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.changed)


def difference(a: Mapping[str, T], b: Mapping[str, T], is_same: Callable[[T, T], bool]) -> Difference[T]:
    """Compare two mappings. Pure."""
    both = sorted(a.keys() & b.keys())
    changed = {name: (a[name], b[name]) for name in both if not is_same(a[name], b[name])}
    removed = {name: a[name] for name in sorted(a.keys() - b.keys())}
    added = {name: b[name] for name in sorted(b.keys() - a.keys())}
    return Difference(removed, added, changed, len(both) - len(changed))


def is_same_file(a: RemoteFile, b: RemoteFile) -> bool:
    """Return whether two files have the same size and checksum.

    Files without checksums of a common algorithm count as different, since nothing shows that they are the same.
    """
    return a.size_bytes == b.size_bytes and a.checksum is not None and a.checksum == b.checksum


def diff(options: argparse.Namespace) -> Exit:
    """Print what B has and A has not, and vice versa, from receipts alone; DIFFERENT if there is anything."""
    places = options.a, options.b if options.b.remote else Place(options.a.remote, options.b.which)
    a, b = (_find(place, options) for place in places)
    files = difference(a.files, b.files, is_same_file)
    told: list[Tensors] = [_tensors(each) for each in (a, b)] if options.tensors else []
    tensors = difference(told[0].facts, told[1].facts, lambda one, other: one == other) if told else None
    silent = sorted({name for each in told for name in each.silent_files})
    code = Exit.DIFFERENT if files or tensors else Exit.OK
    if options.json:
        made: Json = {"a": _json(a), "b": _json(b), "is_same": code is Exit.OK}
        made["files"] = _difference_json(files, _file_json)
        if tensors is not None:
            made["tensors"] = _difference_json(
                tensors, lambda each: {"dtype": each.dtype, "shape": each.shape}
            )
            made["silent_files"] = silent
        print_json(made)
        return code
    for sign, each in (("-", a), ("+", b)):
        print_line(f"{sign * 3} {each.remote} step {each.step} ({each.name}, generation {each.generation})")
    _print(files, _file_text, _change_text, "file")
    if tensors is not None:
        _print(tensors, str, lambda old, new: f"{old} -> {new}", "tensor")
        if silent:
            print_line(f"the tensors of {counted(len(silent), 'file')} are unknown: {few(silent)}")
    return code


def _find(place: Place, options: argparse.Namespace) -> restore.Checkpoint:
    with telling_of_silence(place.remote, patience_s=PATIENCE_S):
        found = restore.find(
            place.remote,
            kind=options.kind,
            step=place.which.step,
            generation=place.which.generation,
            store_options=store_options(options),
        )
    if found is None:
        raise ObjectNotFoundError(f"{place} has no complete checkpoint")
    return found


def _tensors(checkpoint: restore.Checkpoint) -> Tensors:
    with restore.open(checkpoint) as reader:
        return tensors_of(reader)


def _print(found: Difference[T], text: Callable[[T], str], change: Callable[[T, T], str], noun: str) -> None:
    for name, each in found.removed.items():
        print_line(f"- {name}  {text(each)}")
    for name, each in found.added.items():
        print_line(f"+ {name}  {text(each)}")
    for name, (old, new) in found.changed.items():
        print_line(f"~ {name}  {change(old, new)}")
    print(
        f"{counted(found.num_same, noun)} the same, {len(found.changed)} changed, {len(found.removed)} only in A,"
        f" {len(found.added)} only in B"
    )


def _file_text(file: RemoteFile) -> str:
    return in_units(file.size_bytes)


def _change_text(old: RemoteFile, new: RemoteFile) -> str:
    before, after = _file_text(old), _file_text(new)
    if before != after:
        return f"{before} -> {after}"
    algorithms = {each.checksum and each.checksum.algorithm for each in (old, new)}
    is_known = old.size_bytes != new.size_bytes or (len(algorithms) == 1 and None not in algorithms)
    return f"{before}, {'different content' if is_known else 'no checksums to compare'}"


def _file_json(file: RemoteFile) -> Json:
    checksum = file.checksum and {"algorithm": file.checksum.algorithm, "value": file.checksum.value}
    return {"size_bytes": file.size_bytes, "checksum": checksum}


def _difference_json(found: Difference[T], of: Callable[[T], Json]) -> Json:
    return {
        "only_in_a": {name: of(each) for name, each in found.removed.items()},
        "only_in_b": {name: of(each) for name, each in found.added.items()},
        "changed": {name: {"a": of(old), "b": of(new)} for name, (old, new) in found.changed.items()},
        "same": found.num_same,
    }


def _json(checkpoint: restore.Checkpoint) -> Json:
    return {"remote": checkpoint.remote, **id_json(checkpoint.id), "name": checkpoint.name}
