"""Finds what is to be loaded: a file here or in a store, a pointer to one, or a folder or run that has it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ckpt_async import restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.naming import MAX_POINTER_BYTES, POINTER_SUFFIX
from ckpt_async.errors import FormatError, InTheWayError
from ckpt_async.formats.dcp_files import is_metadata
from ckpt_async.restore import Checkpoint
from ckpt_async.restore.objects import MAX_HOPS, look, own_place, pointed
from ckpt_async.restore.progress import ProgressBar
from ckpt_async.stores import StoreOptions
from ckpt_async.torch.codecs import CODECS, SAFETENSORS_SUFFIX, TAR_SUFFIXES, TORCH_SUFFIXES

Progress = bool | Callable[[int, int], None] | None

_LOADABLE = (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX, *TAR_SUFFIXES, *CODECS)
_RANK_LAST = re.compile(r"rank[0-9]+(-of-[0-9]+)?$")  # as Composer's `ep1-ba42-rank0`


@dataclass(frozen=True, slots=True)
class Place:
    """A file on this node. `is_ours` means that it is a copy that nobody else uses."""

    path: Path
    is_ours: bool


def is_url(path: str) -> bool:
    return "://" in path


@contextlib.contextmanager
def placed(
    path: str,
    *,
    rank: int,
    store_options: StoreOptions | None,
    progress: Progress,
    world_size: int | None = None,
) -> Iterator[Place]:
    """Yield the file at `path`, valid until the block ends. Raises FileNotFoundError if there is nothing."""
    if not is_url(path):
        yield Place(_local(Path(path), rank), is_ours=False)
        return
    checkpoint, name = _remote(path, rank, store_options, world_size)
    with tempfile.TemporaryDirectory(prefix="ckpt-async-") as folder, reported(progress, name) as on_progress:
        report = restore.fetch(checkpoint, folder, files=[_escaped(name)], on_progress=on_progress)
        yield Place(report.paths[name], is_ours=True)


def fetch_file(
    url: str,
    destination: str | os.PathLike[str],
    *,
    rank: int = 0,
    store_options: StoreOptions | None = None,
    overwrite: bool = False,
    progress: Progress = None,
) -> Path:
    """Fetch one file to exactly this path.

    `url` is an object; a pointer (`….symlink`) to one; or a run, a checkpoint of ours, or a folder that another tool
    has saved. From those, it fetches the only file, or this `rank`'s, of the newest complete checkpoint.

    The file appears as a whole, by rename; files of our checkpoints are verified. Blocks. Raises FileNotFoundError if
    there is nothing at `url`, DestinationError if a file is in the way and `overwrite` is off, FormatError if there are
    several files to choose from, and what `restore.fetch` raises.
    """
    path = Path(destination)
    if not overwrite and os.path.lexists(path):
        raise InTheWayError(f"{path} already exists", hint="pass overwrite=True, or another destination")
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint, name = _remote(url, rank, store_options, None)
    with tempfile.TemporaryDirectory(prefix=".ckpt-async-", dir=path.parent) as folder:
        with reported(progress, name) as on_progress:
            report = restore.fetch(checkpoint, folder, files=[_escaped(name)], on_progress=on_progress)
        os.replace(report.paths[name], path)
    return path


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


# --- on this node --------------------------------------------------------------------------------------------


def _local(path: Path, rank: int) -> Path:
    seen = [path]
    while path.name.endswith(POINTER_SUFFIX) and path.is_file() and path.stat().st_size <= MAX_POINTER_BYTES:
        text = path.read_bytes().decode("utf-8", "replace")
        path = path.parent / pointed(text, str(path))
        if path in seen or len(seen) > MAX_HOPS:
            raise FormatError(f"{seen[0]} is a pointer that forms a loop")
        seen.append(path)
    if not path.is_dir():
        return path
    if (path / ".ckpt-async" / "decisions").is_dir():
        raise FormatError(f"{path} is the remote of a run", hint=f"load('file://{path.absolute()}')")
    names = [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]
    return path / chosen(names, rank, str(path))


def chosen(names: list[str], rank: int, where: str) -> str:
    """Return the file of a checkpoint that this rank loads: the only one, or the one with its rank in the name."""
    if any(map(is_metadata, names)):
        raise FormatError(
            f"{where} is a sharded checkpoint; it cannot be loaded as a single file",
            hint="use ckpt_async.torch.load_latest(state, remote) or torch.distributed.checkpoint.load",
        )
    found = sorted(name for name in names if name.endswith(_LOADABLE) or _RANK_LAST.search(name))
    own = [name for name in found if re.search(rf"rank[-_]?0*{rank}(?![0-9])", name)]
    if len(found) == 1 or len(own) == 1:
        return found[0] if len(found) == 1 else own[0]
    told = ", ".join((found or sorted(names))[:20]) or "nothing"
    raise FormatError(
        f"{where} has {len(found)} files that could be loaded: {told}", hint="give the path of one of them"
    )


# --- in a store ------------------------------------------------------------------------------------------------


def _remote(
    url: str, rank: int, options: StoreOptions | None, world_size: int | None
) -> tuple[Checkpoint, str]:
    """Return the checkpoint to fetch from, and the file to fetch."""
    if (own := own_place(url)) is not None:
        return _of_ours(own, rank, url, options)
    looked = look(url, options)
    if looked.checkpoint is not None:
        return looked.checkpoint, looked.checkpoint.name
    if (own := own_place(looked.url)) is not None:
        return _of_ours(own, rank, looked.url, options)
    checkpoint = restore.find(looked.url, world_size=world_size, store_options=options)
    if checkpoint is None:
        raise FileNotFoundError(f"{looked.url} is neither an object nor a run with a checkpoint")
    return checkpoint, chosen(list(checkpoint.files), rank, f"{looked.url} ({checkpoint.name})")


def _of_ours(
    own: tuple[str, CheckpointId, str], rank: int, url: str, options: StoreOptions | None
) -> tuple[Checkpoint, str]:
    run, id_, name = own
    checkpoint = restore.find(run, step=id_.step, generation=id_.generation, store_options=options)
    if checkpoint is None or (name and name not in checkpoint.files):
        raise FileNotFoundError(f"{url} is not part of a committed checkpoint")
    return checkpoint, name or chosen(list(checkpoint.files), rank, url)


# --- progress --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reported(
    progress: Progress, name: str, stream: IO[str] | None = None
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that is told the bytes, or None.

    It is the caller's own function, or shows a bar (where it cannot be redrawn, lines) on standard error. There is none
    with False, or with None if standard error is not a terminal.
    """
    stream = sys.stderr if stream is None else stream
    if callable(progress) or progress is False or (progress is None and not stream.isatty()):
        yield progress if callable(progress) else None
        return
    bar = ProgressBar(stream, name)
    try:
        yield bar
    finally:
        bar.clear()
