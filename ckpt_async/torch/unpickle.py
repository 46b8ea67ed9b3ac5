"""Reads DCP's `.metadata`, which is a pickle, without running anything that it says.

The interpreter is in `pickled`. Here are its tables: a global is only a name in a table, and a value is put into a
class of DCP only if it has the field's type. The result is always well-formed metadata.
"""

from __future__ import annotations

import os
from collections import OrderedDict
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

from ckpt_async.core.pickled import ILL_FORMED, Class, Function, Rules, interpret, refuse
from ckpt_async.errors import UnsafePickleError
from ckpt_async.formats.dcp_files import MAX_METADATA_BYTES, METADATA, OLMO_CORE_STORAGE

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


def _globals() -> dict[tuple[str, str], object]:
    layouts = {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)}
    memory_formats = {each.value: each for each in _MEM_FORMAT_ENCODING}
    metadata, filesystem = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
    found: dict[tuple[str, str], object] = {
        (filesystem if each is _StorageInfo else metadata, each.__name__): Class(each) for each in _FIELDS
    }
    found |= {("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
    found |= {
        (metadata, "_MEM_FORMAT_ENCODING"): Function(memory_formats.__getitem__, int),
        ("torch", "Size"): Function(_size, tuple),
        ("torch.serialization", "_get_layout"): Function(layouts.__getitem__, str),
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
            f"{what}: {error}", hint="if it comes from a newer torch, load it with that torch"
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
