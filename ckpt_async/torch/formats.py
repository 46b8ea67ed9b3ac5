"""Loading checkpoints that are one file: torch's own, safetensors, archives and compressed ones.

Nothing that a file says is run: torch's files are read with `weights_only=True`, safetensors and tensor headers are
JSON, and of an archive only plain files and folders are taken. What is unpacked goes to a temporary folder first.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import fnmatch
import glob
import gzip
import io
import json
import logging
import lzma
import math
import os
import pickle
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from ckpt_async import restore
from ckpt_async.core import launch, naming
from ckpt_async.errors import FormatError, StateMismatchError, UnsafePickleError
from ckpt_async.torch import validation
from ckpt_async.torch.validation import ValidationFunction, validation_function

logger = logging.getLogger(__name__)

# By torch's own names: a name from a file is never looked up in a module.
_TORCH_DTYPES = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}

IgnoreKeys = Sequence[str] | Callable[[Any], None]
MapLocation = str | torch.device | Mapping[str, str] | Callable[..., Any] | None

_CHUNK_BYTES = 1 << 20
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.lzma", ".tar.xz")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# In this process; `lzma` tells .xz from .lzma by itself.
_CODECS: dict[str, Callable[..., Any]] = {
    ".bz2": bz2.open,
    ".gz": gzip.open,
    ".lzma": lzma.open,
    ".xz": lzma.open,
}
# In a process of the tool's own, which reads its standard input.
_TOOLS = {".lz4": ("lz4", "-dc"), ".lzo": ("lzop", "-dc"), ".zst": ("zstd", "-dc")}
# How Composer names the states in an archive.
_STATES_NAME = "composer_states.pt"
_MAX_MEMBERS = 100_000
_MAX_DEPTH = 100
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_NOT_UNPACKABLE = (
    tarfile.TarError,
    FileExistsError,
    NotADirectoryError,
    OverflowError,
    RecursionError,  # headers that follow each other without a file
    ValueError,
)
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def load(
    path: str | os.PathLike[str],
    *,
    map_location: MapLocation = "cpu",
    weights_only: bool = True,
    ignore_keys: IgnoreKeys = (),
    run_name: str = "",
    mmap: bool = False,
    max_size_bytes: int | None = None,
    validate: ValidationFunction | None = None,
) -> Any:
    """What a checkpoint's file holds, as `torch.load` would return it.

    By its name: `.pt`, `.pth`, `.bin`, `.ckpt` (a `.safetensors` of the same stem beside it is preferred, as in OLMo);
    `.safetensors`; `.tar`, `.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.lzma`, `.tar.xz` with one such file in them, or
    Composer's `composer_states.pt`; and `.bz2`, `.gz`, `.lzma`, `.xz`, `.lz4`, `.lzo`, `.zst` of any of these (the last
    three need the tool `lz4`, `lzop` or `zstd`). In `path`, `{rank}`, `{local_rank}` and `{node_rank}` are those of the
    launcher's environment, and `{run_name}` is `run_name`.

    `ignore_keys` leaves parts out: globs over the '/'-joined keys of nested dicts and positions in lists, as in
    Composer (`*` crosses '/', `state/optimizers/*`), or a function that changes what was loaded. One that matches
    nothing is warned of.

    `mmap` maps the file instead of reading it: less memory, but whoever truncates the file later kills this process, so
    it is off for files of yours; unpacked copies are always mapped. Unpacking takes disk space in the temporary folder
    ($TMPDIR), at most `max_size_bytes`, or nine tenths of what is free there.

    `validate`, or the function that CHECKPOINT_VALIDATION_FUNCTION names, is asked about the unpacked file before it is
    decoded, as in Composer: see `ckpt_async.torch.validation`.

    Blocks. Raises FormatError if the file cannot be loaded, UnsafePickleError if it holds more than tensors and plain
    data (`weights_only=False` runs whatever it says: for files you wrote yourself), CheckpointRefusedError, OSError if
    it cannot be read.
    """
    found = Path(fill(os.fspath(path), run_name=run_name))
    twin = found.with_suffix(".safetensors")
    if found.suffix in _TORCH_SUFFIXES and twin.exists():
        found = twin
    ignore_keys = _checked(ignore_keys)
    state = _load(found, map_location, weights_only, mmap, max_size_bytes, validation_function(validate))
    drop(state, ignore_keys)
    return state


def load_remote(
    checkpoint: restore.Checkpoint,
    name: str,
    *,
    destination: str | os.PathLike[str] | None = None,
    map_location: MapLocation = "cpu",
    weights_only: bool = True,
    ignore_keys: IgnoreKeys = (),
    run_name: str = "",
    max_size_bytes: int | None = None,
    validate: ValidationFunction | None = None,
    **fetch_options: Any,
) -> Any:
    """`load` the file `name` of a checkpoint in the store, which is fetched whole and verified before anything of it is
    read or unpacked: into `destination`, or into a temporary folder that is gone on return.

    `fetch_options` are those of `restore.fetch` (`folder`, `peers`, …). Blocks. Raises what `restore.fetch` and `load`
    raise.
    """
    name, ignore_keys = fill(name, run_name=run_name), _checked(ignore_keys)
    twin = str(Path(name).with_suffix(".safetensors"))
    if Path(name).suffix in _TORCH_SUFFIXES and twin in checkpoint.files:
        name = twin
    function = validation_function(validate)
    with contextlib.ExitStack() as stack:
        folder = destination or stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt_async-"))
        report = restore.fetch(checkpoint, folder, files=[glob.escape(name)], **fetch_options)
        is_ours = destination is None
        state = _load(report.paths[name], map_location, weights_only, is_ours, max_size_bytes, function)
    drop(state, ignore_keys)
    return state


_RANK = re.compile(r"\{(local_|node_)?rank\b")


def fill(template: str, *, run_name: str = "") -> str:
    """Replace `{rank}`, `{local_rank}`, `{node_rank}` (from the launcher's environment) and `{run_name}`. Raises
    InvalidNameError for any other name, SettingsError if the environment does not say which rank this is.
    """
    values: dict[str, object] = {"rank": 0, "local_rank": 0, "node_rank": 0, "run_name": run_name}
    if _RANK.search(template):
        rank, _ = launch.rank_and_world_size(os.environ, None, None)
        local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or rank)
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", rank + 1))
        # torchrun and Slurm say it outright; otherwise nodes have equally many ranks, in order.
        node_rank = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or rank // ranks_per_node
        values.update(rank=rank, local_rank=local_rank, node_rank=int(node_rank))
    return naming.substitute(template, values) if "{" in template else template


# --- one file -------------------------------------------------------------------------------------------------


def _load(
    path: Path,
    map_location: MapLocation,
    weights_only: bool,
    mmap: bool,
    max_size_bytes: int | None,
    function: ValidationFunction | None,
) -> Any:
    is_archive = path.name.endswith(_TAR_SUFFIXES)
    if is_archive or path.suffix in _CODECS or path.suffix in _TOOLS:
        with tempfile.TemporaryDirectory(prefix="ckpt_async-") as folder:
            if is_archive:
                extract(path, folder, max_size_bytes=max_size_bytes)
                inner = _only_file(Path(folder), path)
            else:
                inner = Path(folder, path.stem)
                decompress(path, inner, max_size_bytes=max_size_bytes)
            return _load(inner, map_location, weights_only, True, max_size_bytes, function)
    validation.validate(function, str(path), None)
    if path.suffix == ".safetensors":
        return _load_safetensors(path, map_location)
    if path.suffix not in _TORCH_SUFFIXES:
        raise FormatError(
            f"{path}: unknown format {path.suffix!r}",
            hint=f"known: {' '.join((*_TORCH_SUFFIXES, '.safetensors', *_TAR_SUFFIXES, *_CODECS, *_TOOLS))}",
        )
    return _torch_load(path, map_location, weights_only, mmap)


def _torch_load(path: Path, map_location: MapLocation, weights_only: bool, mmap: bool) -> Any:
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # only these can be mapped; torch before 1.6 wrote others
    if weights_only and not is_zip and _is_tar(path):
        # torch itself refuses them since 2.6 (CVE-2025-32434).
        raise UnsafePickleError(f"{path} is in torch's legacy tar format, which cannot be read safely")
    try:
        return torch.load(
            path,
            map_location=cast(Any, map_location),
            weights_only=weights_only,
            mmap=mmap and is_zip,
        )
    except pickle.UnpicklingError as error:
        raise UnsafePickleError(
            f"{path} is damaged, or holds more than tensors and plain data: {str(error)[:500]}"
        ) from error
    except OSError:
        raise
    except Exception as error:  # damaged files make torch raise almost any
        raise FormatError(
            f"{path} cannot be loaded: {type(error).__name__}: {str(error)[:500]}",
            hint="most likely it is cut short or damaged",
        ) from error


def _is_tar(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            tarfile.open(fileobj=cast(Any, _Bounded(file, path.stat().st_size, path)), mode="r:").close()
        except tarfile.TarError:
            return False
        except _NOT_UNPACKABLE:
            return True  # for all we know
    return True


def _load_safetensors(path: Path, map_location: MapLocation) -> dict[str, torch.Tensor]:
    if not isinstance(map_location, (str, torch.device, type(None))):
        raise FormatError(
            f"{path}: a safetensors file goes to one device", hint="map_location='cpu', 'cuda:0', …"
        )
    with path.open("rb") as file:
        try:
            header, start = _read_header(file, "<Q")
            header.pop("__metadata__", None)
            places = {
                name: _Place(_DTYPES[entry["dtype"]], entry["shape"], *entry["data_offsets"])
                for name, entry in header.items()
            }
            _check_apart(places.values())
        except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            raise FormatError(f"{path} is no safetensors file: {str(error)[:500]}") from error
        tensors = {}
        for name, place in places.items():
            file.seek(start + place.begin)
            tensors[name] = place.read(file, f"{path}: {name[:200]!r}").to(map_location)
    return tensors


def _check_apart(places: Iterable[_Place]) -> None:
    """A byte that belonged to a million tensors would be read into memory a million times."""
    last_end = 0
    for place in sorted(places, key=lambda each: (each.begin, each.end)):
        if place.begin < last_end:
            raise ValueError("tensors that overlap")
        last_end = place.end


def flashpoint_tensor(data: bytes) -> torch.Tensor:
    """The tensor in ML Flashpoint's optimised form: the length of the header (4 bytes, little-endian), the header (JSON
    with `dtype` and `shape`), the elements. A header that is a pickle, as older ones are, is refused.
    """
    file = io.BytesIO(data)
    try:
        header, start = _read_header(file, "<I")
        dtype = _TORCH_DTYPES[header["dtype"].removeprefix("torch.")]
        place = _Place(dtype, header["shape"], 0, len(data) - start)
    except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise FormatError(f"not an optimised tensor of ML Flashpoint: {str(error)[:500]}") from error
    return place.read(file, "optimised tensor")


@dataclass(frozen=True, slots=True)
class _Place:
    """What a header says of one tensor: its elements are the bytes from `begin` to `end`."""

    dtype: torch.dtype
    shape: Sequence[int]
    begin: int
    end: int

    def __post_init__(self) -> None:
        if len(self.shape) > _MAX_DIMENSIONS:
            raise ValueError(f"{len(self.shape)} dimensions")
        if not all(type(each) is int and each >= 0 for each in (*self.shape, self.begin, self.end)):
            raise ValueError("a size or offset that is no natural number")
        if math.prod(max(1, each) for each in self.shape) >= 1 << 63:  # also beside a 0, where no bytes tell
            raise ValueError(f"a shape of {self.shape}")
        if self.end - self.begin != math.prod(self.shape) * self.dtype.itemsize:
            raise ValueError(f"{self.end - self.begin} bytes for {self.dtype} of shape {self.shape}")

    def read(self, file: IO[bytes], what: str) -> torch.Tensor:
        size_bytes = file.seek(0, os.SEEK_CUR) + self.end - self.begin
        if size_bytes > _size_of(file):  # before memory is taken for it
            raise FormatError(f"{what} is cut short")
        if self.begin == self.end:
            return torch.empty(tuple(self.shape), dtype=self.dtype)
        data = bytearray(self.end - self.begin)
        if cast(io.BufferedReader, file).readinto(data) != len(data):
            raise FormatError(f"{what} is cut short")
        return torch.frombuffer(data, dtype=self.dtype).reshape(tuple(self.shape))


def _read_header(file: IO[bytes], length_format: str) -> tuple[dict[str, Any], int]:
    """A JSON object behind its length, and where it ends."""
    length_bytes = struct.calcsize(length_format)
    (size_bytes,) = struct.unpack(length_format, file.read(length_bytes))
    if size_bytes > min(_MAX_HEADER_BYTES, _size_of(file)):
        raise ValueError(f"a header of {size_bytes} bytes")
    try:
        header = json.loads(file.read(size_bytes))
    except RecursionError:
        raise ValueError("a header nested too deeply") from None
    if not isinstance(header, dict):
        raise TypeError("a header that is no object")
    return header, length_bytes + size_bytes


def _size_of(file: IO[bytes]) -> int:
    position = file.tell()
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size_bytes


# --- unpacking ------------------------------------------------------------------------------------------------


def decompress(
    path: str | os.PathLike[str], destination: str | os.PathLike[str], *, max_size_bytes: int | None = None
) -> None:
    """Write what the compressed file `path` holds to the new file `destination`; at most `max_size_bytes`, or nine
    tenths of the space that is free there. On an error nothing stays. Blocks. Raises FormatError.
    """
    source, target = Path(path), Path(destination)
    limit = _limit(target.parent, max_size_bytes)
    with target.open("xb") as file:
        try:
            with _unpacking(source) as stream:
                _copy(stream, file, limit, source)
        except BaseException:
            target.unlink()
            raise


def extract(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], *, max_size_bytes: int | None = None
) -> list[Path]:
    """Write the files of an archive below `folder`, which exists, and return their paths.

    Files and folders only: a link, a device, a path that is absolute or leads out, or a file that is there already
    raises FormatError, and so does more than `max_size_bytes` (or nine tenths of the free space) in all. Owners and
    modes are not taken over. What was written before stays. Blocks.
    """
    source, target = Path(path), Path(folder)
    if not source.name.endswith(_TAR_SUFFIXES):
        raise FormatError(f"{source} is no archive by its name", hint=f"known: {' '.join(_TAR_SUFFIXES)}")
    limit = _limit(target, max_size_bytes)
    written: list[Path] = []
    with _unpacking(source) as stream:
        try:
            bounded = _Bounded(stream, limit, source)
            with tarfile.open(fileobj=cast(Any, bounded), mode="r:") as archive:
                for number, member in enumerate(archive):
                    bounded.allow(0)
                    if number >= _MAX_MEMBERS:
                        raise FormatError(f"{source} has more than {_MAX_MEMBERS} members")
                    if (found := _member_path(member, source)) is None:
                        continue
                    place = target / found
                    place.parent.mkdir(parents=True, exist_ok=True)
                    if member.isdir():
                        place.mkdir(exist_ok=True)
                        continue
                    with place.open("xb") as file:
                        bounded.allow(member.size)
                        content = archive.extractfile(member)
                        assert content is not None
                        _copy(content, file, limit, source)
                    if place.stat().st_size != member.size:
                        raise FormatError(f"{source} is cut short in {member.name[:200]!r}")
                    limit -= member.size
                    written.append(place)
        except (*_NOT_UNPACKABLE, OSError) as error:
            if not isinstance(error, _NOT_UNPACKABLE) and error.errno != errno.ENAMETOOLONG:
                raise
            raise FormatError(f"{source} is no archive that can be unpacked: {str(error)[:500]}") from error
    return written


def _member_path(member: tarfile.TarInfo, source: Path) -> str | None:
    """Where a member belongs below the folder; None for the folder itself."""
    what = f"{source}: {member.name[:200]!r}"
    if not (member.isdir() or member.isreg()) or member.issparse():
        raise FormatError(f"{what} is neither a plain file nor a folder")
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
        raise FormatError(f"{what} would lead out of the folder")
    if len(parts) > _MAX_DEPTH:  # what makes and removes folders recurses
        raise FormatError(f"{what} is more than {_MAX_DEPTH} folders deep")
    return "/".join(parts) or None


def _only_file(folder: Path, source: Path) -> Path:
    found = sorted(each for each in folder.rglob("*") if each.suffix in (*_TORCH_SUFFIXES, ".safetensors"))
    states = [each for each in found if each.name == _STATES_NAME]
    if len(states or found) != 1:
        names = ", ".join(str(each.relative_to(folder)) for each in found[:20])
        raise FormatError(
            f"{source} has {len(found)} files to load: {names}", hint="unpack it with `extract`"
        )
    return (states or found)[0]


def _limit(folder: Path, max_size_bytes: int | None) -> int:
    return shutil.disk_usage(folder).free * 9 // 10 if max_size_bytes is None else max_size_bytes


@contextlib.contextmanager
def _unpacking(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file, or its own if it is a plain `.tar`."""
    suffix = ".gz" if path.suffix == ".tgz" else path.suffix
    try:
        if command := _TOOLS.get(suffix):
            with _tool(command, path) as stream:
                yield stream
        elif suffix == ".tar":
            with path.open("rb") as stream:
                yield stream
        elif codec := _CODECS.get(suffix):
            with codec(path) as stream:
                yield stream
        else:
            raise FormatError(f"{path}: unknown compression {suffix!r}")
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise FormatError(f"{path} is cut short or damaged: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise FormatError(f"{path} is damaged: {error}") from error  # gzip's and bz2's way to say so


@contextlib.contextmanager
def _tool(command: tuple[str, ...], path: Path) -> Iterator[IO[bytes]]:
    if shutil.which(command[0]) is None:
        raise FormatError(f"{path} needs the program {command[0]!r}", hint=f"install {command[0]}")
    with path.open("rb") as packed, tempfile.TemporaryFile() as complaints:
        with subprocess.Popen(command, stdin=packed, stdout=subprocess.PIPE, stderr=complaints) as process:
            assert process.stdout is not None
            try:
                yield process.stdout
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            complaints.seek(max(0, complaints.seek(0, os.SEEK_END) - 500))  # the reason comes last
            said = complaints.read().decode(errors="replace").strip()
            raise FormatError(f"{path}: {command[0]} failed: {said}")


class _Bounded:
    """What `tarfile` reads from. It takes headers of any size and number into memory, and a sparse file's map, which
    takes fourteen times its size there; here those of one file end at 1 MiB.
    """

    def __init__(self, stream: IO[bytes], limit: int, source: Path) -> None:
        self._stream = stream
        self._end = limit + _CHUNK_BYTES * 100  # headers and padding are not in the limit
        self._source = source
        self._left = _CHUNK_BYTES

    def allow(self, content_bytes: int) -> None:
        """What may be read from here on: so much, and the next file's headers."""
        self._left = content_bytes + _CHUNK_BYTES

    def read(self, size: int) -> bytes:
        self._left -= size
        if size < 0 or self._left < 0 or self._stream.tell() > self._end:
            raise FormatError(
                f"{self._source} has headers of more than {_CHUNK_BYTES} bytes, or unpacks to more than is allowed"
            )
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        if position > self._end:
            raise FormatError(f"{self._source} unpacks to more than is allowed")
        return self._stream.seek(position)

    def tell(self) -> int:
        return self._stream.tell()


def _copy(stream: IO[bytes], file: IO[bytes], limit: int, source: Path) -> None:
    while chunk := stream.read(_CHUNK_BYTES):
        limit -= len(chunk)
        if limit < 0:
            raise FormatError(
                f"{source} unpacks to more than is allowed",
                hint="pass max_size_bytes, or a roomier temporary folder in $TMPDIR",
            )
        file.write(chunk)


# --- parts of what was loaded -----------------------------------------------------------------------------------


def _checked(ignore_keys: IgnoreKeys) -> IgnoreKeys:
    """Before anything is loaded for nothing."""
    return ignore_keys if callable(ignore_keys) else naming.several(ignore_keys, "ignore_keys")


def drop(state: Any, ignore_keys: IgnoreKeys) -> None:
    """Remove what `ignore_keys` (see `load`) matches from a loaded state, in place."""
    if callable(ignore_keys):
        ignore_keys(state)
        return
    unmatched = {pattern: re.compile(fnmatch.translate(pattern)) for pattern in ignore_keys}
    patterns = dict(unmatched)
    pending: list[tuple[Any, str]] = [(state, "")]
    seen = {id(state)}  # a file may say that a dict holds itself
    while patterns and pending:
        container, prefix = pending.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container) - 1, -1, -1):
            path = f"{prefix}{key}"
            matching = [glob for glob, pattern in patterns.items() if pattern.match(path)]
            for each in matching:
                unmatched.pop(each, None)
            value = container[key]
            if matching:
                del container[key]
            elif isinstance(value, (dict, list)) and id(value) not in seen:
                seen.add(id(value))
                pending.append((value, f"{path}/"))
    for each in unmatched:
        logger.warning("ignore_keys_unmatched glob=%s", each)


def model_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's part of a training checkpoint, without optimizer and the rest, where the common trainers put it:
    `state/model` (Composer), `model`, `model_state_dict`, `state_dict` (Lightning), `module` (DeepSpeed); or all of it
    if it holds tensors only. Raises FormatError if it is at none of these.
    """
    for path in (("state", "model"), ("model",), ("model_state_dict",), ("state_dict",), ("module",)):
        found: Any = state
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            return found
    if state and all(isinstance(each, torch.Tensor) for each in state.values()):
        return state
    raise FormatError(f"no model in it: it has {', '.join(map(str, list(state)[:20])) or 'nothing'}")


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What differs between a model and a state: keys only the model has, keys only the state has, and other shapes."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        parts = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.reshaped),
        )
        return "; ".join(
            f"{len(keys)} {what}: {', '.join(keys[:10])}{', …' * (len(keys) > 10)}"
            for what, keys in parts
            if keys
        )


def load_into(model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> KeyReport:
    """Load the model's part of a state (see `model_state`) into a model. What differs is in the report; with `strict`
    it raises StateMismatchError instead, before anything is changed. Without, the keys that fit are loaded.
    """
    found, own = model_state(state), model.state_dict()
    report = KeyReport(
        missing=tuple(sorted(own.keys() - found.keys())),
        unexpected=tuple(sorted(found.keys() - own.keys())),
        reshaped=tuple(
            f"{key} {tuple(found[key].shape)} for {tuple(own[key].shape)}"
            for key in sorted(own.keys() & found.keys())
            if not _fits(found[key], own[key])
        ),
    )
    if strict and report:
        raise StateMismatchError(f"the state does not fit the model: {report}")
    fitting = {key: found[key] for key in own.keys() & found.keys() if _fits(found[key], own[key])}
    model.load_state_dict(fitting, strict=False)
    return report


def _fits(value: Any, own: Any) -> bool:
    both = isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)
    return not both or value.shape == own.shape
