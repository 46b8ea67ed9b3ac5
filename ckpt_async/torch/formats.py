"""Loads checkpoints that are one file: torch's, safetensors, archives, and compressed ones.

Nothing in a file is run: from torch's files only tensors and plain data are taken (see `plain`), safetensors and tensor
headers are JSON, and from an archive only plain files and folders. Unpacked files go to a temporary folder.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import pickle
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack, cast

import torch

from ckpt_async import restore
from ckpt_async.core import launch, naming
from ckpt_async.errors import FormatError, UnsafePickleError
from ckpt_async.restore.options import TransferOptions, check, part
from ckpt_async.stores import StoreOptions
from ckpt_async.torch import validation
from ckpt_async.torch.agreement import own_rank
from ckpt_async.torch.archives import decompress, extract, is_tar
from ckpt_async.torch.broadcast import read_on_one
from ckpt_async.torch.codecs import (
    CODECS,
    SAFETENSORS_SUFFIX,
    STATES_NAME,
    TAR_SUFFIXES,
    TORCH_SUFFIXES,
    suffix_by_content,
    unknown,
)
from ckpt_async.torch.options import LoadOptions, LoadRemoteOptions
from ckpt_async.torch.places import Place, Progress, placed
from ckpt_async.torch.plain import allowed, or_trusted
from ckpt_async.torch.states import IgnoreKeys, checked_keys, drop
from ckpt_async.torch.tensors import (
    flashpoint_tensor,  # noqa: F401  documented under this module
    load_safetensors,
)
from ckpt_async.torch.torchfile import MapLocation, read_state
from ckpt_async.torch.validation import ValidationFunction, validation_function

logger = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    *,
    remote: str = "",
    store_options: StoreOptions | None = None,
    fallback: int | None = None,
    world_size: int | None = None,
    progress: Progress = None,
    on_one: bool = False,
    group: Any = None,
    **options: Unpack[LoadOptions],
) -> Any:
    """Return what a checkpoint's file holds, as `torch.load` would.

    `path` is one of: a file; the URL of an object in a store (`s3://bucket/run/ep1-ba42-rank0.pt`), or its name within
    `remote`; a text pointer to either (`….symlink`, as of Composer: followed within its place or bucket); the URL of a
    run, whose newest good checkpoint is taken; a checkpoint's folder or its URL. From a checkpoint with several files,
    this rank's is loaded, by `rank<N>` in the name. What is in a store is first fetched to the temporary folder, in
    ranges, and verified: files of our checkpoints by checksum, others by size and by the checksum that the store gives.
    `fallback` is the rank whose file is loaded if this rank's does not exist. `world_size` is that of `restore.find`,
    for a folder of another tool's checkpoints with one file per rank. `progress` is a bar during the fetch (True: even
    if nobody sees it; None: on a terminal; False: none) or a function of the bytes done and the total.

    With `on_one`, a collective of `group`, the first rank does all this and the others receive what it has loaded,
    tensor by tensor, on the CPU; views of one tensor arrive as copies. Its error is raised on all ranks as
    RankFailedError.

    The name determines the format: `.pt`, `.pth`, `.bin`, `.ckpt` (a `.safetensors` file of the same stem beside it is
    preferred, as in OLMo); `.safetensors`; `.tar`, `.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.lzma`, `.tar.xz` with one such
    file in them, or Composer's `composer_states.pt`; and `.bz2`, `.gz`, `.lzma`, `.xz`, `.lz4`, `.lzo`, `.zst` of any
    of these (the last three need a library of the extra `compression`, or the program `lz4`, `lzop` or `zstd`). A
    file without such a suffix (`ep1-ba42-rank0`) is recognized by its first bytes. In `path`, `{rank}`, `{local_rank}`
    and `{node_rank}` are those of the launcher's environment, and `{run_name}` is `run_name`.

    Besides tensors a file may hold plain data: numbers, texts, bytes, lists, tuples, dicts, sets; numpy's arrays and
    scalars of numbers and texts; values of `collections`, `datetime`, `decimal`, `fractions` and `pathlib`; torch's
    sizes, dtypes and devices; states of random number generators; and what `allow` names. What `ignore_keys` leaves out
    may name anything: it is not run either. The options are those of `LoadOptions`.

    Blocks. Raises FormatError if the file cannot be loaded; UnsafePickleError, with the name of what is refused, if it
    holds more than tensors, plain data and what is allowed (`weights_only=False` is torch's own unrestricted reader,
    which runs whatever the file says: for files you wrote yourself); CheckpointRefusedError; OSError if it cannot be
    read.
    """
    check("load", options, LoadOptions)
    how = _How.of(options)
    run_name = options.get("run_name", "")
    template = f"{remote.rstrip('/')}/{os.fspath(path)}" if remote else os.fspath(path)
    ranks = [None] if fallback is None else [None, fallback]

    def read() -> Any:
        paths = [fill(template, run_name=run_name, rank=rank) for rank in ranks]
        with _first_there(paths, world_size, store_options, progress) as place:
            state = _load(place.path, replace(how, mmap=how.mmap or place.is_ours))
            logger.info("checkpoint_loaded path=%s file=%s", template, place.path.name)
        return state

    return read_on_one(read, group=group) if on_one else read()


def load_remote(checkpoint: restore.Checkpoint, name: str, **options: Unpack[LoadRemoteOptions]) -> Any:
    """`load` the file `name` of a checkpoint in the store, after fetching it whole and verifying it.

    `{rank}` in the name is this rank. `load_remote(found, "train/rank{rank}.pt", fallback="train/rank0.pt")` is what
    OLMo and OLMo-core do for the trainer's state, on any number of ranks. The options are those of `load` and of
    `restore.fetch`. Blocks. Raises what `restore.fetch` and `load` raise.
    """
    check("load_remote", options, LoadRemoteOptions)
    how = _How.of(options)
    run_name, fallback, destination = (
        options.get("run_name", ""),
        options.get("fallback"),
        options.get("destination"),
    )
    names = [fill(name, run_name=run_name)]
    if fallback is not None:
        is_rank = isinstance(fallback, int)
        other, rank = (name, fallback) if is_rank else (fallback, None)
        names.append(fill(str(other), run_name=run_name, rank=cast(int | None, rank)))
    name = _chosen(checkpoint, names)
    with contextlib.ExitStack() as stack:
        folder = destination or stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-async-"))
        report = restore.fetch(
            checkpoint, folder, files=[glob.escape(name)], **part(options, TransferOptions)
        )
        state = _load(report.paths[name], replace(how, mmap=how.mmap or destination is None))
        logger.info("checkpoint_loaded path=%s/%s file=%s", checkpoint.remote, checkpoint.name, name)
    return state


def _chosen(checkpoint: restore.Checkpoint, names: list[str]) -> str:
    """Return the first name that the checkpoint has, or that of a safetensors file in its place.

    If it has none of them, return the last one, for the error.
    """
    for name in names:
        twin = str(Path(name).with_suffix(SAFETENSORS_SUFFIX))
        if Path(name).suffix in TORCH_SUFFIXES and twin in checkpoint.files:
            return twin
        if name in checkpoint.files:
            return name
        if name != names[-1]:
            logger.info("checkpoint_file_missing name=%s; falling back to %s", name, names[-1])
    return names[-1]


_RANK = re.compile(r"\{(local_|node_)?rank\b")


@contextlib.contextmanager
def _first_there(
    paths: list[str], world_size: int | None, options: StoreOptions | None, progress: Progress
) -> Iterator[Place]:
    """Yield the place of the first path that exists."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            try:
                place = stack.enter_context(
                    placed(
                        path,
                        rank=own_rank(),
                        store_options=options,
                        progress=progress,
                        world_size=world_size,
                    )
                )
                if not place.is_ours and place.path.suffix in TORCH_SUFFIXES:
                    twin = place.path.with_suffix(SAFETENSORS_SUFFIX)
                    place = replace(place, path=twin if twin.exists() else place.path)
                if not place.path.exists():
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place.path))
                break
            except FileNotFoundError:
                if path == paths[-1]:
                    raise
                logger.info("checkpoint_file_missing path=%s; falling back to %s", path, paths[-1])
        yield place


def fill(template: str, *, run_name: str = "", rank: int | None = None) -> str:
    """Fill `{rank}`, `{local_rank}`, `{node_rank}` and `{run_name}` in.

    The ranks come from the launcher's environment, or are all `rank` if that is given. Raises InvalidNameError for any
    other name, SettingsError if the environment does not say which rank this is.
    """
    values: dict[str, object] = {"rank": 0, "local_rank": 0, "node_rank": 0, "run_name": run_name}
    if rank is not None:
        values.update(rank=rank, local_rank=rank, node_rank=rank)
    elif _RANK.search(template):
        here = launch.placement(os.environ, *launch.rank_and_world_size(os.environ, None, None))
        values.update(rank=here.rank, local_rank=here.local_rank, node_rank=here.node_rank)
    return naming.substitute(template, values) if "{" in template else template


# --- one file -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _How:
    """The arguments of `load` that apply to each file."""

    map_location: MapLocation
    allow: Mapping[tuple[str, str], type] | None  # None: allow anything, and run it
    mmap: bool
    max_size_bytes: int | None
    validate: ValidationFunction | None
    ignore_keys: IgnoreKeys
    is_unpacked: bool = False

    @classmethod
    def of(cls, options: LoadOptions) -> Self:
        return cls(
            options.get("map_location", "cpu"),
            allowed(options.get("allow", ())) if options.get("weights_only", True) else None,
            options.get("mmap", False),
            options.get("max_size_bytes"),
            validation_function(options.get("validate")),
            checked_keys(options.get("ignore_keys", ())),
        )

    def drop(self, state: Any) -> None:
        drop(state, self.ignore_keys)


def _load(path: Path, how: _How) -> Any:
    suffix = _suffix(path, how)
    if suffix in TAR_SUFFIXES or suffix in CODECS:
        with tempfile.TemporaryDirectory(prefix="ckpt-async-") as folder:
            if suffix in TAR_SUFFIXES:
                extract(path, folder, max_size_bytes=how.max_size_bytes, suffix=suffix)
                inner = _only_file(Path(folder), path)
            else:
                inner = Path(folder, path.name.removesuffix(suffix))
                decompress(path, inner, max_size_bytes=how.max_size_bytes, suffix=suffix)
            return _load(inner, replace(how, mmap=True, is_unpacked=True))
    validation.validate(how.validate, str(path), None)
    if suffix == SAFETENSORS_SUFFIX:
        tensors = load_safetensors(path, how.map_location)
        how.drop(tensors)
        return tensors
    return _torch_load(path, how)


def _suffix(path: Path, how: _How) -> str:
    """Return the suffix of the name or, if it has no known one (`ep1-ba42-rank0`), the one that the content suggests.

    Of a link, the name of the file that it leads to counts first: `latest-rank0.pt` may lead to another format.
    An unpacked file is unpacked again only if its name says so, because a file may contain itself.
    """
    for name in (path.resolve().name, path.name) if path.is_symlink() else (path.name,):
        for each in (*TAR_SUFFIXES, *TORCH_SUFFIXES, SAFETENSORS_SUFFIX, *CODECS):
            if name.endswith(each):
                return each
    suffix = suffix_by_content(path)
    if not suffix or (how.is_unpacked and suffix not in (".pt", SAFETENSORS_SUFFIX)):
        raise unknown(str(path))
    return suffix


def _torch_load(path: Path, how: _How) -> Any:
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # torch before 1.6 wrote other formats
        if is_zip and how.allow is not None:
            mapped = path if how.mmap else None
            try:
                return read_state(
                    file,
                    str(path),
                    map_location=how.map_location,
                    mapped=mapped,
                    allow=how.allow,
                    drop=how.drop if how.ignore_keys else None,
                )
            except UnsafePickleError as error:
                raise or_trusted(error) from None
    if how.allow is not None and is_tar(path):
        # torch itself refuses them since 2.6 (CVE-2025-32434).
        raise UnsafePickleError(f"{path} is in torch's legacy tar format, which cannot be read safely")
    try:
        state = torch.load(
            path,
            map_location=cast(Any, how.map_location),
            weights_only=how.allow is not None,
            mmap=how.mmap and is_zip,
        )
    except pickle.UnpicklingError as error:
        raise UnsafePickleError(
            f"{path} is damaged, or holds more than tensors: {str(error)[:500]}",
            hint="it has the format of torch before 1.6: if you trust it, load it and save it again",
        ) from error
    except OSError:
        raise
    except Exception as error:  # damaged files make torch raise almost anything
        raise FormatError(
            f"{path} cannot be loaded: {type(error).__name__}: {str(error)[:500]}",
            hint="most likely it is cut short or damaged",
        ) from error
    how.drop(state)
    return state


def _only_file(folder: Path, source: Path) -> Path:
    found = sorted(each for each in folder.rglob("*") if each.suffix in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX))
    states = [each for each in found if each.name == STATES_NAME]
    if len(states or found) != 1:
        names = ", ".join(str(each.relative_to(folder)) for each in found[:20])
        raise FormatError(
            f"{source} has {len(found)} files that could be loaded: {names}", hint="unpack it with `extract`"
        )
    return (states or found)[0]
