"""Writes a sharded checkpoint to one whole `.pt` or `.safetensors` file.

It needs no process group, and does not hold the state in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Unpack, cast

from ckpt_async import restore
from ckpt_async.errors import DestinationError, FormatError, InTheWayError, SettingsError
from ckpt_async.local.durable import fsync_descriptor, fsync_path, new_file
from ckpt_async.restore import Checkpoint
from ckpt_async.restore.options import ReadOptions
from ckpt_async.torch.assembly import Assembler, Whole
from ckpt_async.torch.codecs import SAFETENSORS_SUFFIX, TORCH_SUFFIXES
from ckpt_async.torch.plain import Allow, allowed
from ckpt_async.torch.planned import Plan
from ckpt_async.torch.sharded_plans import Planner
from ckpt_async.torch.states import IgnoreKeys, checked_keys, drop, model_path, model_state
from ckpt_async.torch.tensors import flattened
from ckpt_async.torch.whole_files import write_safetensors, write_torch

logger = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_CONFIG = "config.yaml"


@dataclass(frozen=True, slots=True)
class UnshardReport:
    """The files that were written, and their sizes."""

    paths: tuple[Path, ...]
    num_tensors: int
    size_bytes: int
    duration_s: float


def unshard(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    allow: Allow = (),
    ignore_keys: IgnoreKeys = (),
    overwrite: bool = False,
    max_memory_bytes: int = MAX_MEMORY_BYTES,
    **options: Unpack[ReadOptions],
) -> UnshardReport:
    """Write the whole state of a checkpoint to one file, or into a folder.

    It runs in one process, without a process group. It reads DCP (also below `model_and_optim`, as written by OLMo and
    OLMo-core, and that of ML Flashpoint), OLMo's `torch_legacy`, `local` and `olmo_core` sharded checkpoints and its
    unsharded ones, and checkpoints that are one torch or safetensors file. `path` determines what is written:

    - `….pt` (`.pth`, `.bin`, `.ckpt`): the whole state; for OLMo's, rank 0's trainer state is in it as `train`;
    - `….safetensors`: the model's tensors (see `model_state`), or the whole state if it has nothing else;
    - another name: a new folder, as OLMo's own unsharding leaves it: `model.pt`, `optim.pt`, `train.pt` with the rest;
      and its `config.yaml`.

    It uses at most `max_memory_bytes` of memory (plus what `.metadata` or the ranks' pickles take), however large the
    state is; only a part that was saved in another order of dimensions is read whole. It compares the CRC-32 that torch
    saved with each part, and checks that every element is there exactly once. What was written is read back and
    compared before it gets its name; it is durable on return. An error or SIGKILL leaves what was there before. Nothing
    in the files is run; `allow` and `ignore_keys` are those of `load`. Tensors in the result are plain ones: no
    parameters, no gradients. The other options are those of `restore.open`.

    Blocks. Raises FormatError for what cannot be read or written in this way, UnsafePickleError, DamagedCheckpointError
    if a part is missing or is not what was saved, DestinationError if `path` exists (`overwrite` replaces a file),
    NoSpaceError.
    """
    target, began = Path(path), time.monotonic()
    ignore_keys, classes = checked_keys(ignore_keys), allowed(allow)
    is_folder = _is_folder(target)
    if type(max_memory_bytes) is not int or max_memory_bytes < 1 << 20:
        raise SettingsError(f"max_memory_bytes={max_memory_bytes!r} is not a number of at least 1 MiB")
    if os.path.lexists(target) and (is_folder or not overwrite):
        hint = (
            "use another folder"
            if is_folder
            else "use another name, or overwrite it (overwrite=True, --overwrite)"
        )
        raise InTheWayError(f"{str(target)!r} already exists; it was left alone", hint=hint)
    options.setdefault("num_concurrent_reads", 8)
    with restore.open(checkpoint, **options) as reader:
        plan = Planner(reader, classes).make(subfolder)
        drop(plan.state, ignore_keys)
        writing = _Writing(reader, plan, max_memory_bytes)
        if is_folder:
            paths = writing.folder(target)
        else:
            writing.file(target, _chosen(plan.state, target), overwrite=overwrite)
            paths = (target,)
    fsync_path(target.absolute().parent)
    report = UnshardReport(
        paths, writing.num_tensors, sum(each.stat().st_size for each in paths), time.monotonic() - began
    )
    logger.info("checkpoint_unsharded checkpoint=%s path=%s", checkpoint.name, target)
    return report


def _is_folder(target: Path) -> bool:
    if target.suffix in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX):
        return False
    if target.suffix and not target.suffix[1:].isdigit():
        known = " ".join((*TORCH_SUFFIXES, SAFETENSORS_SUFFIX))
        raise FormatError(
            f"{target.name}: unknown format {target.suffix!r}",
            hint=f"known: {known}; for a folder, use a name without a suffix",
        )
    return True


def _chosen(state: Any, target: Path) -> Any:
    """Return the part of the state that goes into a file of this name."""
    if target.suffix != SAFETENSORS_SUFFIX:
        return state
    with contextlib.suppress(FormatError):
        return model_state(state)
    return state


class _Writing:
    """The work of one call of `unshard`."""

    def __init__(self, reader: restore.Reader, plan: Plan, max_memory_bytes: int) -> None:
        self._reader, self._plan, self._max_memory_bytes = reader, plan, max_memory_bytes
        self.num_tensors = 0

    def file(self, target: Path, state: Any, *, overwrite: bool = False) -> None:
        is_safetensors = target.suffix == SAFETENSORS_SUFFIX
        if is_safetensors:
            flattened(state, str(target), are_stand_ins=True)  # raises before any file is created
        assembler = Assembler(self._reader, self._max_memory_bytes)

        def contents(wholes: Sequence[Whole]) -> Iterator[tuple[Whole, memoryview]]:
            yield from assembler.stream(wholes)
            assembler.finish()

        with new_file(target, overwrite=overwrite) as file:
            written = _Written(file)
            write = write_safetensors if is_safetensors else write_torch
            sink = cast(IO[bytes], written) if is_safetensors else file
            self.num_tensors += write(state, self._plan.wholes, contents, sink, str(target))
            file.flush()
            fsync_descriptor(file.fileno(), target)
            _check_written(file, target, written.crc32 if is_safetensors else None)

    def folder(self, target: Path) -> tuple[Path, ...]:
        """Write into a temporary folder beside the target, and rename it once everything is there."""
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        hidden = target.absolute().with_name(f".ckpt-async-{secrets.token_hex(8)}.tmp")
        hidden.mkdir()
        try:
            parts = self._parts()
            for name, state in parts.items():
                self.file(hidden / name, state)
            names = list(parts)
            if _CONFIG in self._reader.files:
                with new_file(hidden / _CONFIG, overwrite=False) as file:
                    file.write(self._reader.read(_CONFIG))
                    file.flush()
                    fsync_descriptor(file.fileno(), hidden / _CONFIG)
                names.append(_CONFIG)
            fsync_path(hidden)
            hidden.rename(target)
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            raise DestinationError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return tuple(target / name for name in names)

    def _parts(self) -> dict[str, Any]:
        """Split the state as OLMo's own unsharding does: model, optimizer, and the rest of the trainer's state."""
        state = self._plan.state
        try:
            model = model_state(state)
        except FormatError:
            return {"model.pt": state}
        if model is state or not isinstance(state, dict):
            return {"model.pt": state}
        parts: dict[str, Any] = {"model.pt": model}
        path = model_path(state)
        rest = {key: value for key, value in state.items() if (key,) != path}
        if "optim" in rest:
            parts["optim.pt"] = rest.pop("optim")
        train = rest.pop("train", None)
        if rest or train is not None:
            parts["train.pt"] = train if not rest else rest if train is None else {**rest, "train": train}
        return parts


class _Written:
    """A file that is written from beginning to end, with the CRC-32 of its content."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc32 = 0

    def write(self, data: bytes | memoryview) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def _check_written(file: IO[bytes], target: Path, crc32: int | None) -> None:
    """Read the file back and compare it.

    If the system drops its cached pages, it is read from the disk. An archive contains CRC-32s of its own.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    source = file.name if isinstance(file.name, str) else f"/proc/self/fd/{file.fileno()}"
    with open(source, "rb") as back:
        if crc32 is None:
            with zipfile.ZipFile(back) as archive:
                is_right = archive.testzip() is None
        else:
            found = 0
            while chunk := back.read(_CHUNK_BYTES):
                found = zlib.crc32(chunk, found)
            is_right = found == crc32
    if not is_right:
        raise DestinationError(
            f"{str(target)!r} did not contain the bytes that were written to it, and was removed",
            hint="check this disk and the system's log",
        )
