"""Reading DCP's `.metadata`, which is a pickle, without running anything that it says.

`pickle.Unpickler` with a list of allowed names is not enough: BUILD on an allowed function or class changes torch
itself, a memo index of 2³¹ takes 32 GiB, and a tuple of tuples as a key hashes for ever. So the few opcodes that a real
`.metadata` has are interpreted here, as `torch.load(weights_only=True)` does for tensors; a global is a name in a
table, and a value is put into a class of DCP only if it is of the field's type. What comes out is nothing but
well-formed metadata.
"""

from __future__ import annotations

import os
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, NoReturn

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

from ckpt_async.errors import UnsafePickleError

# About 5 million shards of tensors: a chunk and where it is stored take some 200 bytes.
MAX_METADATA_BYTES = 1 << 30

# Whatever the memo can repeat for two bytes must be small, or work would grow with the square of the file's size.
_MAX_TEXT_BYTES = 1 << 16
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_ARGUMENTS = 128  # components of a path
_MAX_FIELDS = 16

_NONE = type(None)
_SCALARS = frozenset({_NONE, bool, int, float, str})

# The fields of each class that NEWOBJ may make, with the types their values may have. `TensorProperties` has its state
# as a tuple, in this order. A field that is not here is of a newer torch, and kept if its value is a scalar.
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
_DICTS = frozenset({dict, OrderedDict})


class _Class:
    """A class that NEWOBJ may make; what BUILD then sets is checked against `_FIELDS`."""

    __slots__ = ("made",)

    def __init__(self, made: type) -> None:
        self.made = made


class _Function:
    """What REDUCE may call, with arguments of one type: `make(*arguments)` runs nothing of the pickle's choosing."""

    __slots__ = ("make", "type")

    def __init__(self, make: Callable[..., object], argument_type: type) -> None:
        self.make = make
        self.type = argument_type


def _size(*sizes: tuple[int, ...]) -> torch.Size:
    (numbers,) = sizes
    if len(numbers) > _MAX_DIMENSIONS or not all(
        type(each) is int and 0 <= each < 1 << 63 for each in numbers
    ):
        raise TypeError("a size that is not of natural numbers")
    return torch.Size(numbers)


def _globals() -> dict[tuple[str, str], object]:
    layouts = {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)}
    memory_formats = {each.value: each for each in _MEM_FORMAT_ENCODING}
    metadata, filesystem = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
    found: dict[tuple[str, str], object] = {
        (filesystem if each is _StorageInfo else metadata, each.__name__): _Class(each) for each in _FIELDS
    }
    found |= {("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
    found |= {
        (metadata, "_MEM_FORMAT_ENCODING"): _Function(memory_formats.__getitem__, int),
        ("torch", "Size"): _Function(_size, tuple),
        ("torch.serialization", "_get_layout"): _Function(layouts.__getitem__, str),
        ("collections", "OrderedDict"): _Function(OrderedDict, _NONE),  # without arguments; SETITEMS fills it
    }
    # `pathlib._local` is where Python 3.13 has them.
    for module in ("pathlib", "pathlib._local"):
        found[module, "PosixPath"] = _Function(PosixPath, str)
        found[module, "PurePosixPath"] = _Function(PurePosixPath, str)
    return found


_GLOBALS = _globals()


def load_metadata(
    source: str | os.PathLike[str] | bytes, *, max_size_bytes: int = MAX_METADATA_BYTES
) -> Metadata:
    """The metadata of a DCP checkpoint: `.metadata` itself, the folder that has it, or its bytes.

    Runs nothing that the file says, and takes memory and time in proportion to its size. Paths in it stay below the
    checkpoint. Blocks.

    Raises UnsafePickleError, with the offending name, if it is anything but DCP metadata (one reason may be a newer
    torch that wrote it), and OSError if it cannot be read.
    """
    if isinstance(source, bytes):
        data, what = source, "the metadata"
    else:
        path = Path(source)
        if path.is_dir():
            path /= ".metadata"
        what = str(path)
        with path.open("rb") as file:
            data = file.read(max_size_bytes + 1)
    if len(data) > max_size_bytes:
        raise UnsafePickleError(f"{what} has more than {max_size_bytes} bytes")
    try:
        found = _interpret(data)
        _check(found)
    except UnsafePickleError as error:
        raise UnsafePickleError(
            f"{what}: {error}", hint="if it comes from a newer torch, load it with that torch"
        ) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise UnsafePickleError(f"{what} is cut short, or not DCP metadata: {error}") from error
    assert isinstance(found, Metadata)
    return found


def _refuse(reason: str) -> NoReturn:
    raise UnsafePickleError(reason)


def _interpret(data: bytes) -> object:
    """Run the pickle machine on the opcodes of protocols 2 to 5 that plain data has; the commonest come first."""
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    at, end = 0, len(data)
    unpack = struct.unpack_from
    while True:
        code = data[at]
        at += 1
        if code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[unpack("<I", data, at)[0]])
            at += 4
        elif code == 0x52:  # REDUCE
            arguments = stack.pop()
            stack[-1] = _call(stack[-1], arguments)
        elif code == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif code == 0x86:  # TUPLE2
            stack[-2:] = [(stack[-2], stack[-1])]
        elif code == 0x87:  # TUPLE3
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif code == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif code == 0x81:  # NEWOBJ
            arguments = stack.pop()
            if type(stack[-1]) is not _Class or type(arguments) is not tuple or arguments:
                _refuse("it makes an object of what is no class of DCP's metadata")
            stack[-1] = object.__new__(stack[-1].made)
        elif code == 0x62:  # BUILD
            state = stack.pop()
            _build(stack[-1], state)
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code == 0x28:  # MARK
            marks.append(stack)
            stack = []
        elif code == 0x75:  # SETITEMS
            items, stack = stack, marks.pop()
            _set_items(stack[-1], items)
        elif code == 0x4D:  # BININT2
            stack.append(unpack("<H", data, at)[0])
            at += 2
        elif code == 0x4A:  # BININT
            stack.append(unpack("<i", data, at)[0])
            at += 4
        elif code == 0x8A:  # LONG1
            size = data[at]
            at += 1
            stack.append(int.from_bytes(data[at : at + size], "little", signed=True))
            at += size
        elif code in (0x8C, 0x58):  # SHORT_BINUNICODE, BINUNICODE
            size, start = (data[at], at + 1) if code == 0x8C else (unpack("<I", data, at)[0], at + 4)
            at = start + size
            if at > end:
                _refuse("it is cut short")
            if size > _MAX_TEXT_BYTES:
                _refuse(f"it has a text of {size} bytes")
            stack.append(str(data[start:at], "utf-8", "surrogatepass"))
        elif code == 0x4E:  # NONE
            stack.append(None)
        elif code == 0x89:  # NEWFALSE
            stack.append(False)
        elif code == 0x88:  # NEWTRUE
            stack.append(True)
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif code == 0x61:  # APPEND
            item = stack.pop()
            _extend(stack[-1], [item])
        elif code == 0x65:  # APPENDS
            items, stack = stack, marks.pop()
            _extend(stack[-1], items)
        elif code == 0x73:  # SETITEM
            items = stack[-2:]
            del stack[-2:]
            _set_items(stack[-1], items)
        elif code == 0x74:  # TUPLE
            items, stack = stack, marks.pop()
            stack.append(tuple(items))
        elif code == 0x95:  # FRAME: a promise of bytes, all of which are here already
            if unpack("<Q", data, at)[0] > end - at - 8:
                _refuse("it is cut short")
            at += 8
        elif code == 0x93:  # STACK_GLOBAL
            name = stack.pop()
            stack[-1] = _global(stack[-1], name)
        elif code == 0x63:  # GLOBAL
            middle = data.index(b"\n", at)
            stop = data.index(b"\n", middle + 1)
            stack.append(_global(str(data[at:middle], "utf-8"), str(data[middle + 1 : stop], "utf-8")))
            at = stop + 1
        elif code == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[unpack("<I", data, at)[0]] = stack[-1]
            at += 4
        elif code == 0x47:  # BINFLOAT
            stack.append(unpack(">d", data, at)[0])
            at += 8
        elif code == 0x80:  # PROTO
            at += 1
        elif code == 0x2E:  # STOP
            return stack.pop()
        else:
            opcode = next((each for each in pickletools.opcodes if ord(each.code) == code), None)
            _refuse(f"it has {opcode.name if opcode else hex(code)}, which DCP's metadata never has")


def _global(module: object, name: object) -> object:
    if type(module) is not str or type(name) is not str:
        _refuse("it names something without a name")
    found = _GLOBALS.get((module, name))
    if found is None:
        _refuse(f"it names {module[:200]}.{name[:200]}, which is not of DCP's metadata; nothing was run")
    return found


def _call(function: object, arguments: object) -> object:
    if type(function) is not _Function or type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS:
        _refuse("it calls what DCP's metadata never calls")
    for each in arguments:
        if type(each) is not function.type:
            _refuse("it calls a function with arguments of other types than DCP's metadata has")
    return function.make(*arguments)


def _set_items(target: object, items: list[Any]) -> None:
    if type(target) not in _DICTS:
        _refuse("it sets items of what is no dict")
    assert isinstance(target, dict)
    for key in items[::2]:
        if type(key) not in _KEYS:
            _refuse("it has a key that is neither a name nor an index")
    target.update(zip(items[::2], items[1::2], strict=True))


def _extend(target: object, items: list[Any]) -> None:
    if type(target) is not list:
        _refuse("it appends to what is no list")
    target.extend(items)


def _build(target: object, state: object) -> None:
    fields = _FIELDS.get(type(target))
    if fields is None or vars(target):
        _refuse("it changes what is no new object of DCP's metadata")
    if type(target) is TensorProperties:
        if type(state) is not tuple:
            _refuse("TensorProperties has a state that is no tuple")
        for value, allowed in zip(state, fields.values(), strict=True):
            if type(value) not in allowed:
                _refuse(f"TensorProperties has a {type(value).__name__} where none belongs")
        target.__setstate__(state)  # type: ignore[no-untyped-call]
        return
    if type(state) is not dict or len(state) > _MAX_FIELDS:
        _refuse(f"{type(target).__name__} has a state that is not its fields")
    for name, value in state.items():
        if type(name) is not str or name.startswith("_") or type(value) not in fields.get(name, _SCALARS):
            _refuse(f"{type(target).__name__} has a {type(value).__name__} as {str(name)[:100]!r}")
    vars(target).update(state)


def _check(found: object) -> None:
    """What BUILD cannot know: containers are filled later, and a field may be missing. Each container once."""
    if type(found) is not Metadata:
        _refuse("it is no Metadata")
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
            _refuse(f"it refers to a file outside of the checkpoint, {path[:200]!r}")
    if found.storage_meta is not None:
        modules = getattr(found.storage_meta, "modules", ())  # torch 2.4 has none
        _require(all(type(each) is str for each in modules), "storage_meta")


def _check_tensor(name: str, stored: TensorStorageMetadata) -> None:
    _ = stored.properties.dtype  # is there
    num_dimensions = len(stored.size)
    for chunk in stored.chunks:
        _require(type(chunk) is ChunkStorageMetadata, f"a chunk of {name[:200]!r}")
        is_right = len(chunk.offsets) == len(chunk.sizes) == num_dimensions
        _require(is_right, f"a chunk of {name[:200]!r}")


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        _refuse(f"{what} is not as DCP writes it")
