"""Writes checkpoints that are one file, the counterpart of `load`: torch's, safetensors, archives, and compressed ones.

Writing streams: no second full copy of the state is made, in memory or on disk.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import tarfile
import time
from collections import deque
from pathlib import Path
from typing import IO, Any, cast

import torch

from ckpt_async.errors import FormatError, SettingsError
from ckpt_async.local.durable import new_file
from ckpt_async.torch.codecs import CHUNK_BYTES, STATES_NAME, Format, format_of, unknown
from ckpt_async.torch.formats import fill
from ckpt_async.torch.states import IgnoreKeys, checked_keys, drop, model_path, model_state
from ckpt_async.torch.tensors import save_safetensors

# The parts of `state` that Composer keeps with weights_only.
_COMPOSERS_WEIGHTS = ("model", "integrations", "metadata")


def dump(
    state: Any,
    path: str | os.PathLike[str] | IO[bytes],
    *,
    ignore_keys: IgnoreKeys = (),
    weights_only: bool = False,
    overwrite: bool = False,
    run_name: str = "",
    format: str = "",  # noqa: A002  the natural name
) -> None:
    """Write a state to a file that `load` and torch's own readers read. The suffix of the name selects the format:

    - `.pt`, `.pth`, `.bin`, `.ckpt`, or none (`ep1-ba42-rank0`): as `torch.save` does;
    - `.safetensors`: tensors only, nested dicts by '.'-joined keys;
    - `.tar`, `.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.lzma`, `.tar.xz`: an archive with `composer_states.pt`, as Composer
      writes; for the compressed ones the state is serialized twice, because an archive states sizes first;
    - `.bz2`, `.gz`, `.lz4`, `.lzma`, `.lzo`, `.xz`, `.zst` after any of these: compressed while it is written.

    In the name, `{rank}` and the like are replaced as by `load`. Missing folders are created. The file gets its name
    once it is complete: an error or SIGKILL leaves what was there before, or nothing. It is durable once fsynced, which
    `Uploader` does with what is enqueued; a file that replaces another one is durable at once.

    Instead of a path, pass a binary file that is open for writing (`Uploader.open(step, name)`); `format` is then the
    suffix that selects the format, `.pt` by default. It may be given with a path, too.

    `ignore_keys` leaves parts out, as in `load`: globs over the '/'-joined keys, or a function that changes the state.
    `weights_only` then keeps only the model's part, at its place (see `model_state`): of Composer's states
    `state/model`, `state/integrations` and `state/metadata`; in a safetensors file only its tensors. The caller's state
    is not changed: dicts, lists, tuples, sets and deques are copied before anything is removed; tensors are not.

    Blocks; compression works without the GIL. Raises FormatError if the state cannot be written like this or a library
    is missing (see `check_writable`), DestinationError if the file exists (`overwrite` replaces it) or cannot be
    written, NoSpaceError if the disk is full. A file object's own errors are raised as they are.
    """
    ignore_keys = checked_keys(ignore_keys)
    if not isinstance(path, str | os.PathLike):
        how = _writable(format or ".pt")
        _write(_kept(state, ignore_keys, weights_only, how), path, how, format or "the file")
        return
    target = Path(fill(os.fspath(path), run_name=run_name))
    how = _writable(format or target.name)
    state = _kept(state, ignore_keys, weights_only, how)
    with new_file(target, overwrite=overwrite) as file:
        _write(state, file, how, str(target))


def check_writable(name: str | os.PathLike[str]) -> None:
    """Check whether `dump` could write a file of this name, or template of names, here. Call it before training starts.

    Only the suffix of the name matters. Raises FormatError, which says what is unknown or missing, and how to get it.
    """
    _writable(os.fspath(name))


def selected(state: Any, name: str = "", *, ignore_keys: IgnoreKeys = (), weights_only: bool = False) -> Any:
    """Return what `dump` would write to a file of this name, without the parts that are left out.

    The tensors are the same, the containers are new.
    """
    return _kept(state, checked_keys(ignore_keys), weights_only, _writable(name or ".pt"))


def deepspeed_filename(name: str, *, weights_only: bool = False) -> str:
    """Return the name of a rank's file for DeepSpeed, which needs one archive per rank.

    `.tar` is added unless the name is an archive's already, as in Composer. Raises SettingsError for `weights_only`,
    because DeepSpeed keeps the weights and the rest together.
    """
    if weights_only:
        raise SettingsError("weights_only=True cannot be used with DeepSpeed", hint="save everything")
    found = format_of(name)
    return name if found is not None and found.is_archive else f"{name}.tar"


def _writable(name: str) -> Format:
    # `.pt` alone would be the name of a hidden file.
    how = format_of(f"_{name}" if name.startswith(".") else name)
    if how is None:
        raise unknown(name)
    if how.codec is not None:
        how.codec.check(name)
    return how


# --- selecting what is written --------------------------------------------------------------------------------


def _kept(state: Any, ignore_keys: IgnoreKeys, weights_only: bool, how: Format) -> Any:
    if ignore_keys:
        state = _copied(state, {})
        drop(state, ignore_keys)
    if not weights_only:
        return state
    if how.is_safetensors:
        return model_state(state)
    path = model_path(state)
    if path == ("state", "model"):
        whole = state["state"]
        return {"state": {key: whole[key] for key in _COMPOSERS_WEIGHTS if key in whole}}
    kept: Any = model_state(state)
    for key in reversed(path):
        kept = {key: kept}
    return kept


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Copy the containers but not what they contain; a container that is shared stays shared."""
    if not isinstance(value, dict | list | tuple | set | deque):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, tuple):
        parts = [_copied(each, copies) for each in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        made = getattr(value, "_make", type(value))
        return copies.setdefault(id(value), made(parts))
    new = copies[id(value)] = _shallow(value)
    if not isinstance(value, set):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            new[key] = _copied(each, copies)
    return new


def _shallow(value: Any) -> Any:
    """Copy with the class and attributes kept, such as `_metadata` of a module's state."""
    return copy.copy(value)


# --- writing --------------------------------------------------------------------------------------------------


class _Sink:
    """The file that torch writes to.

    It passes data on in pieces, so that no library makes a compressed copy of a whole tensor. After an error torch
    raises an error of its own, about positions; this keeps the original one.
    """

    def __init__(self, stream: IO[bytes] | None) -> None:
        """Without a stream, only count the bytes."""
        self._stream = stream
        self.size_bytes = 0
        self.failure: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        self.size_bytes += len(data)
        if self._stream is not None and self.failure is None:
            try:
                for start in range(0, len(data), CHUNK_BYTES):
                    self._stream.write(memoryview(data)[start : start + CHUNK_BYTES])
            except BaseException as error:
                self.failure = error
                raise
        return len(data)

    def flush(self) -> None:
        """Do nothing; torch calls it."""


def _write(state: Any, file: IO[bytes], how: Format, what: str) -> None:
    with contextlib.ExitStack() as stack:
        stream = file if how.codec is None else stack.enter_context(how.codec.writing(file, what))
        if how.is_archive:
            _write_archive(state, stream, how.codec is None and file.seekable(), what)
        elif how.is_safetensors:
            save_safetensors(state, cast(IO[bytes], _Sink(stream)), what)
        else:
            _torch_save(state, stream, what)


def _torch_save(state: Any, stream: IO[bytes] | None, what: str) -> int:
    """Write the state, and return how many bytes were written; without a stream, how many would be."""
    sink = _Sink(stream)
    try:
        torch.save(state, cast(IO[bytes], sink))
    except Exception as error:
        if sink.failure is not None:
            raise sink.failure from None
        if not isinstance(error, pickle.PicklingError | AttributeError | TypeError):
            raise
        raise FormatError(
            f"{what}: {_unpicklable(state, '')} cannot be saved: {str(error)[:500]}",
            hint="leave it out with ignore_keys, or save its state_dict",
        ) from error
    if sink.failure is not None:
        raise sink.failure
    return sink.size_bytes


def _unpicklable(value: Any, path: str) -> str:
    """Return the path of the first part that cannot be pickled."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in parts:
        if isinstance(each, torch.Tensor):
            continue
        try:
            pickle.dumps(each)
        except Exception:  # noqa: BLE001  any error means that it cannot be pickled
            return _unpicklable(each, f"{path}/{key}".lstrip("/"))
    return repr(path) if path else "the state"


def _write_archive(state: Any, stream: IO[bytes], can_go_back: bool, what: str) -> None:
    """Write a tar with one file.

    Its header contains the size, so it is written afterwards if the stream can go back; otherwise the state is
    serialized twice.
    """
    member = tarfile.TarInfo(STATES_NAME)
    member.mtime = int(time.time())
    if can_go_back:
        start = stream.tell()
        stream.write(bytes(tarfile.BLOCKSIZE))
        member.size = _torch_save(state, stream, what)
        end = stream.tell()
        stream.seek(start)
        stream.write(member.tobuf(tarfile.GNU_FORMAT))  # one block, however large the file
        stream.seek(end)
    else:
        member.size = _torch_save(state, None, what)
        stream.write(member.tobuf(tarfile.GNU_FORMAT))
        if _torch_save(state, stream, what) != member.size:
            raise FormatError(
                f"{what}: the state changed while it was written", hint="write a copy of the state"
            )
    written = tarfile.BLOCKSIZE + member.size
    # Padding, two empty blocks for the end, and whole records.
    stream.write(bytes(-written % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE))
    written += -written % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE
    stream.write(bytes(-written % tarfile.RECORDSIZE))
