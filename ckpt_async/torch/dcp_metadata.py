"""Reads DCP's `.metadata`, which is a pickle, without running anything that it says, and finds the parts it names.

The interpreter is in `pickled`. Here are its tables: a global is only a name in a table, and a value is put into a
class of DCP only if it has the field's type. The result is always well-formed metadata.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_async import restore
from ckpt_async.core.pickled import ILL_FORMED, Class, Function, Rules, interpret, refuse
from ckpt_async.errors import DamagedCheckpointError, FormatError, UnsafePickleError
from ckpt_async.formats.dcp_files import (
    FLASHPOINT_HEAD_BYTES,
    FLASHPOINT_PREFIX_BYTES,
    MAX_METADATA_BYTES,
    METADATA,
    OLMO_CORE_STORAGE,
    flashpoint_is_optimised,
)
from ckpt_async.restore import Checkpoint, Reader
from ckpt_async.restore.session import unreliable
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.torch import flashpoint

NOT_TORCH = "not in the form that torch saves"

_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_FIELDS = 16

_NONE = type(None)
_SCALARS = frozenset({_NONE, bool, int, float, str})

# The fields of each class that NEWOBJ may make, with the types their values may have. The state of
# `TensorProperties` is a tuple, in this order. A field that is not listed belongs to a newer torch, and is
# kept if its value is a scalar.
_FIELDS: dict[type, dict[str, frozenset[type]]] = {
    Metadata: {
        "state_dict_metadata": frozenset({dict, OrderedDict}),
        "planner_data": frozenset({dict, OrderedDict, _NONE}),
        "storage_data": frozenset({dict, OrderedDict, _NONE}),
        "storage_meta": frozenset({StorageMeta, _NONE}),
    },
    TensorStorageMetadata: {
        "properties": frozenset({TensorProperties}),
        "size": frozenset({torch.Size}),
        "chunks": frozenset({list}),
    },
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": frozenset({torch.Size}), "sizes": frozenset({torch.Size})},
    TensorProperties: {
        "dtype": frozenset({torch.dtype}),
        "layout": frozenset({torch.layout}),
        "requires_grad": frozenset({bool}),
        "memory_format": frozenset({_MEM_FORMAT_ENCODING}),
        "pin_memory": frozenset({bool}),
    },
    MetadataIndex: {
        "fqn": frozenset({str}),
        "offset": frozenset({torch.Size, _NONE}),
        "index": frozenset({int, _NONE}),
    },
    _StorageInfo: {
        "relative_path": frozenset({str}),
        "offset": frozenset({int}),
        "length": frozenset({int}),
        "transform_descriptors": frozenset({list, tuple, _NONE}),
    },
    StorageMeta: {
        "checkpoint_id": frozenset({str, PosixPath, PurePosixPath, _NONE}),
        "save_id": frozenset({str, _NONE}),
        "load_id": frozenset({str, _NONE}),
        "modules": frozenset({list}),
    },
}
_KEYS = frozenset({str, MetadataIndex})


def _size(*sizes: tuple[int, ...]) -> torch.Size:
    (numbers,) = sizes
    if len(numbers) > _MAX_DIMENSIONS or not all(
        type(each) is int and 0 <= each < 1 << 63 for each in numbers
    ):
        raise TypeError("a size that does not consist of non-negative integers")
    return torch.Size(numbers)


def _known(values: Mapping[Any, object], what: str) -> Callable[[object], object]:
    def look_up(value: object) -> object:
        if value not in values:
            refuse(f"it has the {what} {str(value)[:100]!r}, which torch {torch.__version__} does not know")
        return values[value]

    return look_up


def _globals() -> dict[tuple[str, str], object]:
    layouts = {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)}
    memory_formats = {each.value: each for each in _MEM_FORMAT_ENCODING}
    metadata, filesystem = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
    found: dict[tuple[str, str], object] = {
        (filesystem if each is _StorageInfo else metadata, each.__name__): Class(each) for each in _FIELDS
    }
    found |= {("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
    found |= {
        (metadata, "_MEM_FORMAT_ENCODING"): Function(_known(memory_formats, "memory format"), int),
        ("torch", "Size"): Function(_size, tuple),
        ("torch.serialization", "_get_layout"): Function(_known(layouts, "layout"), str),
        ("collections", "OrderedDict"): Function(OrderedDict, _NONE),  # without arguments; SETITEMS fills it
    }
    # The names of the same things in torch before 2.3, and OLMo-core's own class with the same three fields.
    old = "torch.distributed._shard.sharded_tensor.metadata"
    found[old, "TensorProperties"] = found[metadata, "TensorProperties"]
    found[old, "MEM_FORMAT_ENCODING"] = found[metadata, "_MEM_FORMAT_ENCODING"]
    found[OLMO_CORE_STORAGE] = found[filesystem, "_StorageInfo"]
    # Python 3.13 has them in `pathlib._local`.
    for module in ("pathlib", "pathlib._local"):
        found[module, "PosixPath"] = Function(PosixPath, str)
        found[module, "PurePosixPath"] = Function(PurePosixPath, str)
    return found


_GLOBALS = _globals()


def load_metadata(
    source: str | os.PathLike[str] | bytes, *, max_size_bytes: int = MAX_METADATA_BYTES
) -> Metadata:
    """Return the metadata of a DCP checkpoint, from `.metadata` itself, from the folder that has it, or from its bytes.

    Runs nothing that the file says, and takes memory and time in proportion to its size. Paths in it stay below the
    checkpoint. Blocks.

    Raises UnsafePickleError, with the offending name, if it is anything but DCP metadata (for example if a newer torch
    wrote it), and OSError if it cannot be read.
    """
    if isinstance(source, bytes):
        data, what = source, "the metadata"
    else:
        path = Path(source)
        if path.is_dir():
            path /= METADATA
        what = str(path)
        with path.open("rb") as file:
            data = file.read(max_size_bytes + 1)
    if len(data) > max_size_bytes:
        raise UnsafePickleError(f"{what} has more than {max_size_bytes} bytes")
    try:
        found = interpret(data, _MetadataRules())
        _check(found)
    except UnsafePickleError as error:
        raise UnsafePickleError(
            f"{what}: {error}", hint="if a newer torch wrote it, upgrade torch here, or load it with that one"
        ) from None
    except ILL_FORMED as error:
        raise UnsafePickleError(f"{what} is cut short, or not DCP metadata: {error}") from error
    assert isinstance(found, Metadata)
    return found


class _MetadataRules(Rules):
    what = "DCP's metadata"

    def find(self, module: str, name: str) -> object:
        return _GLOBALS.get((module, name))

    def build(self, target: object, state: object) -> object:
        return _build(target, state)

    def check_keys(self, keys: list[Any]) -> None:
        if not _KEYS.issuperset(map(type, keys)):
            refuse("it has a key that is neither a name nor an index")


def _build(target: object, state: object) -> object:
    fields = _FIELDS.get(type(target))
    if fields is None or vars(target):
        refuse("it modifies an object that it did not just create")
    if type(target) is TensorProperties:
        if type(state) is not tuple:
            refuse("TensorProperties has a state that is not a tuple")
        for value, allowed in zip(state, fields.values(), strict=True):
            if type(value) not in allowed:
                refuse(f"TensorProperties has a {type(value).__name__} where none belongs")
        target.__setstate__(state)  # type: ignore[no-untyped-call]
        return target
    if type(state) is not dict or len(state) > _MAX_FIELDS:
        refuse(f"{type(target).__name__} has a state that is not its fields")
    for name, value in state.items():
        if type(name) is not str or name.startswith("_") or type(value) not in fields.get(name, _SCALARS):
            refuse(f"{type(target).__name__} has a {type(value).__name__} as {str(name)[:100]!r}")
    vars(target).update(state)
    return target


def _check(found: object) -> None:
    """Check what BUILD cannot know, because containers are filled later and fields may be missing.

    Looks at each container once.
    """
    if type(found) is not Metadata:
        refuse("it is not a Metadata object")
    seen: set[int] = set()

    def is_new(container: object) -> bool:
        if id(container) in seen:
            return False
        seen.add(id(container))
        return True

    for name, stored in found.state_dict_metadata.items():
        _require(type(name) is str, "state_dict_metadata")
        if type(stored) is TensorStorageMetadata:
            if is_new(stored):
                _require(is_new(stored.chunks), f"the list of chunks of {name[:200]!r}")
                _check_tensor(name, stored)
        else:
            _require(type(stored) is BytesStorageMetadata, f"{name[:200]!r}")
    for name, path in (found.planner_data or {}).items():
        _require(type(name) is str and type(path) is tuple, "planner_data")
        _require(not is_new(path) or all(type(each) in _SCALARS for each in path), "planner_data")
    paths: set[str] = set()
    for index, info in (found.storage_data or {}).items():
        _require(type(index) is MetadataIndex and type(info) is _StorageInfo, "storage_data")
        _require(info.offset >= 0 and info.length >= 0, f"the place of {index.fqn[:200]!r}")
        paths.add(info.relative_path)
        descriptors = getattr(info, "transform_descriptors", None) or ()  # torch 2.4 has none
        _require(
            not is_new(descriptors) or all(type(each) is str for each in descriptors), "transform_descriptors"
        )
    for path in paths:
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            refuse(f"it refers to a file outside of the checkpoint, {path[:200]!r}")
    if found.storage_meta is not None:
        modules = getattr(found.storage_meta, "modules", ())  # torch 2.4 has none
        _require(all(type(each) is str for each in modules), "storage_meta")


def _check_tensor(name: str, stored: TensorStorageMetadata) -> None:
    _ = stored.properties.dtype  # raises if it is missing
    num_dimensions = len(stored.size)
    for chunk in stored.chunks:
        _require(type(chunk) is ChunkStorageMetadata, f"a chunk of {name[:200]!r}")
        is_right = len(chunk.offsets) == len(chunk.sizes) == num_dimensions
        _require(is_right, f"a chunk of {name[:200]!r}")


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        refuse(f"{what} is not as DCP writes it")


# --- the parts of a checkpoint in a store ------------------------------------------------------------------


def read_metadata(reader: Reader, name: str) -> Metadata:
    """Return the metadata in this file of a checkpoint, once its checksum is that of its receipt.

    Raises DamagedCheckpointError; UnreliableReadError; UnsafePickleError, as `load_metadata`.
    """
    file = reader.files[name]

    def damage(stream: io.BytesIO) -> str:
        told = file.checksum
        is_right = told is None or checksum_of(stream.getbuffer(), told.algorithm) == told
        return "" if is_right else "its checksum differs from its receipt"

    stream = io.BytesIO(reader.read(name))
    if damage(stream):
        stream = read_beyond_doubt(reader.checkpoint, name, 0, file.size_bytes, damage)
    return load_metadata(stream.getvalue())


def read_beyond_doubt(
    checkpoint: Checkpoint, file: str, offset: int, size_bytes: int, damage: Callable[[io.BytesIO], str]
) -> io.BytesIO:
    """Read from the store alone, over new connections each time: a peer may have wrong bytes, or the network may have
    corrupted one. `damage` says what is wrong with what was read.

    Raises DamagedCheckpointError once the same wrong bytes came twice, else UnreliableReadError.
    """
    before: bytes | None = None
    for _ in range(2):
        with restore.open(checkpoint) as store:
            stream = io.BytesIO(store.read(file, offset, size_bytes))
            if not (reason := damage(stream)):
                return stream
            told = f"bytes {offset}+{size_bytes}: {reason}"
            if stream.getvalue() == before:
                # Pieces in another serialization look like this, too: it does not prove the store wrong.
                is_other = reason.startswith(NOT_TORCH)
                raise damaged(checkpoint, file, told) if is_other else store.damaged(f"{file}: {told}")
            before = stream.getvalue()
    raise unreliable(f"{checkpoint.name}: {file}: {told}, and others when they are read again")


def damaged(checkpoint: Checkpoint, file: str, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{checkpoint.name} ({checkpoint.id}) is damaged: {file}: {reason}")


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes that were saved as one part of a tensor, or as one object."""

    file: str
    offset: int
    size_bytes: int
    is_optimised: bool  # in ML Flashpoint's own form


class Places:
    """Finds the parts that the metadata in one folder of a checkpoint names. `read` reads a range of a file."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, metadata: Metadata, read: Callable[[str, int, int], bytes]
    ) -> None:
        self._checkpoint, self._prefix, self._read = checkpoint, prefix, read
        self._stored = metadata.storage_data or {}
        self._are_optimised: dict[str, bool | None] = {}

    def find(self, index: MetadataIndex) -> Place:
        """Return where a part is. Raises DamagedCheckpointError if the checkpoint does not have it."""
        stored = self._stored.get(index)
        if stored is None:
            raise damaged(self._checkpoint, METADATA, f"it does not say where {index.fqn!r} is")
        if getattr(stored, "transform_descriptors", None):
            raise FormatError(
                f"{index.fqn!r} was saved through stream extensions",
                hint="fetch the checkpoint and load it with torch's FileSystemReader",
            )
        name, offset = f"{self._prefix}{stored.relative_path}", stored.offset
        file = self._checkpoint.files.get(name)
        if file is None:
            raise damaged(self._checkpoint, METADATA, f"it names {name!r}, which is not in the checkpoint")
        is_optimised = self._is_optimised(name, file.size_bytes)
        if is_optimised is not None:
            offset += FLASHPOINT_PREFIX_BYTES
        if not 0 <= offset <= offset + stored.length <= file.size_bytes:
            told = f"bytes {offset}+{stored.length} are beyond its {file.size_bytes} bytes"
            raise damaged(self._checkpoint, name, told)
        return Place(name, offset, stored.length, bool(is_optimised))

    def _is_optimised(self, name: str, size_bytes: int) -> bool | None:
        """Return whether ML Flashpoint wrote this file in its own form (True) or in torch's (False).

        None if another tool wrote it.
        """
        if not flashpoint.OBJECT_NAME.search(name):
            return None
        if name not in self._are_optimised:
            head = self._read(name, 0, min(size_bytes, FLASHPOINT_HEAD_BYTES))
            self._are_optimised[name] = flashpoint_is_optimised(head)
        return self._are_optimised[name]
