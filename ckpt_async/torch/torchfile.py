"""Reads torch's own files (a zip archive of a pickle and the tensors' bytes) without running what they say.

`torch.load(weights_only=True)` knows tensors and little else, and calls the functions for the rest with whatever the
file says. Here the pickle is interpreted (see `plain`), a tensor is a view of a record that exists and is long enough,
and no byte of the file belongs to two records. So the memory is proportional to the file.
"""

from __future__ import annotations

import io
import re
import struct
import sys
import zipfile
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from ckpt_async.core.pickled import Class, Function, interpret, refuse
from ckpt_async.errors import FormatError, UnsafePickleError
from ckpt_async.torch.plain import Arguments, Names, PlainRules, Refused, natural_product

MapLocation = str | torch.device | Mapping[str, str] | Callable[..., Any] | None

MAX_PICKLE_BYTES = 1 << 30

_OBJECT_BYTES = 512
_ALIGNMENT_BYTES = 16
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCATION = re.compile(r"[a-z][a-z0-9_]{0,30}(:[0-9]{1,4})?")
# The dtypes of storages by their old names; `UntypedStorage` counts in bytes.
_NAMED = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_STORAGES = {("torch", f"{name}Storage"): dtype for name, dtype in _NAMED.items()}
# torch's name for the storage of a dtype; other dtypes have no storage of their own.
STORAGE_NAMES = {dtype: f"{name}Storage" for name, dtype in _NAMED.items()}
_STORAGES |= {(module, "UntypedStorage"): torch.uint8 for module in ("torch", "torch.storage")}
_CONSTANT_TYPES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_CONSTANTS: Names = {
    ("torch", name): each for name, each in vars(torch).items() if isinstance(each, _CONSTANT_TYPES)
}
_torch: Any = torch  # for attributes that its annotations lack
_LAYOUTS = {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)}


def read_state(
    file: IO[bytes],
    what: str,
    *,
    map_location: MapLocation = "cpu",
    mapped: Path | None = None,
    allow: Mapping[tuple[str, str], type] | None = None,
    drop: Callable[[Any], None] | None = None,
) -> Any:
    """Return what torch.save wrote into the zip archive `file`.

    `what` names the file in errors. `mapped` is its path if tensors should be mapped instead of read. `allow` is what
    `plain.allowed` returns. `drop` takes out of the state what is not wanted: only what is left must be plain data.

    Raises UnsafePickleError, with the global that has no place in a state, or FormatError if the file is damaged.
    """
    return _read(file, what, StateRules, map_location, mapped, allow or {}, drop)


def _read(
    file: IO[bytes],
    what: str,
    make: Callable[..., StateRules],
    map_location: MapLocation,
    mapped: Path | None,
    allow: Mapping[tuple[str, str], type],
    drop: Callable[[Any], None] | None = None,
) -> Any:
    try:
        records = Records(file)
        data = records.pickle()
        rules = make(records, map_location, mapped, allow)
        rules.is_patient = drop is not None
        found = interpret(data, rules)
        rules.check_data((found,))
    except (UnsafePickleError, FormatError) as error:
        raise type(error)(f"{what}: {error.without_hint}", hint=error.hint) from None
    except OSError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # damaged files make torch, and allowed classes, raise almost anything
        raise FormatError(
            f"{what} cannot be loaded: {type(error).__name__}: {str(error)[:500]}",
            hint="most likely it is cut short or damaged",
        ) from error
    if drop is not None:
        drop(found)
        try:
            rules.check_kept(found)
        except UnsafePickleError as error:
            raise UnsafePickleError(f"{what}: {error.without_hint}", hint=error.hint) from None
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """The state in a file with its tensors on the meta device, and where the bytes of each tensor are."""

    state: Any
    records: Mapping[int, Record]  # by the address of the tensor's storage

    def record_of(self, tensor: torch.Tensor) -> Record:
        return self.records[_address(tensor.untyped_storage())]


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an archive, by its place in the file. `crc32` is 0 if none was computed."""

    start: int
    size_bytes: int
    crc32: int


def read_layout(
    file: IO[bytes],
    what: str,
    *,
    allow: Mapping[tuple[str, str], type] | None = None,
    rules: type[StateRules] | None = None,
) -> Layout:
    """Read a state like `read_state`, but leave the tensors where they are.

    `rules`, a subclass of `StateRules`, may allow more in it.
    """
    found: list[StateRules] = []

    def made(*arguments: Any) -> StateRules:
        found.append((rules or StateRules)(*arguments))
        return found[0]

    state = _read(file, what, made, "meta", None, allow or {})
    if found[0].is_swapped:
        raise FormatError(
            f"{what} has the byte order of a different kind of machine", hint="load it and save it again"
        )
    return Layout(state, found[0].places())


def _address(storage: torch.UntypedStorage) -> int:
    address: int = cast(Any, storage)._cdata  # noqa: SLF001  torch has no other way to identify a storage
    return address


class RandomAccess(io.RawIOBase):
    """A file object over bytes that are elsewhere, as `Records` needs it. Subclasses know how to get them."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._at = 0

    def get(self, at: int, size_bytes: int) -> bytes | bytearray | memoryview:
        raise NotImplementedError

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self.size_bytes)[whence]
        if at < 0:
            raise ValueError(f"negative seek position {at}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        size_bytes = max(0, min(len(buffer), self.size_bytes - self._at))
        if size_bytes:
            buffer[:size_bytes] = self.get(self._at, size_bytes)
        self._at += size_bytes
        return size_bytes


class _MemoryFile(RandomAccess):
    """See `in_memory`."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(len(view))
        self.view = view

    def get(self, at: int, size_bytes: int) -> memoryview:
        return self.view[at : at + size_bytes]


def in_memory(view: memoryview) -> IO[bytes]:
    """Return a file over memory: tensors that are read from it are views of that memory."""
    return cast(IO[bytes], _MemoryFile(view))


class Records:
    """The archive's records, by their names below its one folder. Each is stored uncompressed, and none overlap."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size_bytes = file.seek(0, 2)
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        except (
            zipfile.BadZipFile,
            zlib.error,
            NotImplementedError,
            ValueError,
            struct.error,
            EOFError,
        ) as error:
            raise FormatError(
                f"it is not a zip archive: {error}", hint="most likely it is cut short or damaged"
            ) from error
        pickles = [each.filename for each in infos if each.filename.partition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise FormatError(f"it has {len(pickles)} files data.pkl", hint="torch.save writes one")
        folder = pickles[0].partition("/")[0] + "/"
        self._infos = {each.filename.removeprefix(folder): each for each in infos}
        if len(self._infos) != len(infos):
            raise FormatError("it has two records with the same name")
        if "constants.pkl" in self._infos:
            raise UnsafePickleError("it is a TorchScript archive, which is a program", hint="torch.jit.load")
        self._taken: list[tuple[int, int]] = []
        if callable(prefetch := getattr(file, "prefetch", None)):  # a file in a store
            prefetch([(each.header_offset, _LOCAL_HEADER.size) for each in infos])

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def place(self, name: str) -> tuple[int, int]:
        """Return where a record begins in the file, and its size in bytes. Ask only once for each record."""
        info = self._infos.get(name)
        if info is None:
            raise FormatError(f"it has no record {name[:200]!r}")
        size_bytes = info.file_size
        self._file.seek(info.header_offset)
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        is_whole = signature == b"PK\x03\x04" and start + size_bytes <= self.size_bytes
        if not is_whole or info.compress_type != zipfile.ZIP_STORED or info.compress_size != size_bytes:
            raise FormatError(f"its record {name[:200]!r} is damaged")
        if size_bytes:
            self._take(start, start + size_bytes)
        return start, size_bytes

    def _take(self, start: int, end: int) -> None:
        """Refuse overlaps: a byte shared by a million records would be read into memory a million times."""
        at = bisect_left(self._taken, (start, end))
        before, after = self._taken[max(0, at - 1) : at], self._taken[at : at + 1]
        if (before and before[0][1] > start) or (after and after[0][0] < end):
            raise FormatError("it has records that overlap")
        self._taken.insert(at, (start, end))

    def crc32(self, name: str) -> int:
        return self._infos[name].CRC

    def read(self, name: str) -> bytearray | memoryview:
        start, size_bytes = self.place(name)
        return self.read_at(start, size_bytes)

    def read_at(self, start: int, size_bytes: int) -> bytearray | memoryview:
        if isinstance(self._file, _MemoryFile):
            return self._file.view[start : start + size_bytes]
        data = bytearray(size_bytes)
        self._file.seek(start)
        if cast(Any, self._file).readinto(data) != size_bytes:
            raise FormatError("it is cut short")
        return data

    def pickle(self) -> bytes:
        if self._infos["data.pkl"].file_size > MAX_PICKLE_BYTES:
            raise FormatError(f"it has more than {MAX_PICKLE_BYTES} bytes besides its tensors")
        return bytes(self.read("data.pkl"))


class Storage:
    """The bytes of one or more tensors."""

    __slots__ = ("dtype", "untyped")

    def __init__(self, untyped: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.untyped = untyped
        self.dtype = dtype


class _Version(str):
    """Replaces the class of `torch.__version__`, which Composer saves. Makes plain text, and only from text."""

    __slots__ = ()

    def __new__(cls, *told: object) -> str:  # type: ignore[misc]
        if len(told) != 1 or type(told[0]) is not str:
            refuse("it has a version of torch that is not text")
        return told[0]


class StateRules(PlainRules):
    what = "tensors and plain data"
    internal = PlainRules.internal | {Storage}
    never_allowed = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)

    def __init__(
        self,
        records: Records,
        map_location: MapLocation,
        mapped: Path | None,
        allow: Mapping[tuple[str, str], type],
    ) -> None:
        super().__init__(allow)
        self._records, self._map_location, self._mapped = records, map_location, mapped
        self._is_meta = isinstance(map_location, str | torch.device) and str(map_location) == "meta"
        self._whole: Any = None
        self._storages: dict[str, Storage] = {}
        self._places: dict[str, Record] = {}
        order = bytes(records.read("byteorder")) if "byteorder" in records else sys.byteorder.encode()
        self.is_swapped = order.strip() != sys.byteorder.encode()

    def names(self) -> Names:
        found = super().names()
        found |= _CONSTANTS
        found |= {place: Class(torch.UntypedStorage) for place in _STORAGES}
        self._storage_dtypes = {id(found[place]): dtype for place, dtype in _STORAGES.items()}
        tensor_types = {
            ("torch", "Tensor"): Class(torch.Tensor),
            ("torch.nn.parameter", "Parameter"): Class(torch.nn.Parameter),
        }
        self._tensor_types = {id(each) for each in tensor_types.values()}
        self._not_made = self._tensor_types | self._storage_dtypes.keys()
        self._rebuild_v2 = Function(self._tensor_v2)
        rebuild: dict[str, Callable[..., object]] = {
            "_rebuild_tensor": self._tensor_v1,
            "_rebuild_tensor_v3": self._tensor_v3,
            "_rebuild_parameter": self._parameter,
            "_rebuild_parameter_with_state": self._parameter_with_state,
            "_rebuild_sparse_tensor": _sparse,
        }
        found |= {("torch._utils", name): Function(make) for name, make in rebuild.items()}
        return found | {
            **tensor_types,
            ("torch._utils", "_rebuild_tensor_v2"): self._rebuild_v2,
            ("torch._tensor", "_rebuild_from_type_v2"): Function(self._from_type),
            ("torch", "Size"): Function(self._size),
            ("torch", "device"): Function(_device),
            ("torch.torch_version", "TorchVersion"): Class(_Version),
            ("torch.serialization", "_get_layout"): Function(_layout),
        }

    def is_key(self, key: object) -> bool:
        return isinstance(key, torch.dtype | torch.device | torch.layout) or super().is_key(key)

    def new(self, class_: object, arguments: object) -> object:
        if id(class_) in self._not_made:
            refuse("it makes a tensor without a storage")
        return super().new(class_, arguments)

    def call(self, function: object, arguments: object) -> object:
        if id(function) in self._not_made:
            refuse("it makes a tensor without a storage")
        return super().call(function, arguments)

    def places(self) -> dict[int, Record]:
        """Return where the bytes of each storage are, by the storage's address."""
        return {_address(self._storages[key].untyped): place for key, place in self._places.items()}

    # --- storages --------------------------------------------------------------------------------------------

    def persistent(self, told: object) -> object:
        """Return the storage for `('storage', its type, the record's name, its location, the number of elements)`."""
        if type(told) is Refused:
            return told
        if type(told) is not Arguments or len(told) != 5 or type(told[0]) is not str or told[0] != "storage":
            refuse("it refers to something outside of it that is not a storage")
        _, type_, key, location, count = told
        dtype = self._storage_dtypes.get(id(type_))
        if dtype is None or type(key) is not str or type(location) is not str or type(count) is not int:
            refuse("it has a storage without a type")
        if not _LOCATION.fullmatch(location):
            refuse(f"it has a storage on {location[:100]!r}")
        found = self._storages.get(key)
        if found is None:
            found = self._storages[key] = Storage(self._read(key, dtype, location), dtype)
        if found.dtype != dtype or found.untyped.nbytes() != count * dtype.itemsize:
            refuse(f"it has a storage of {count} elements, but its record holds a different number")
        return found

    def _read(self, key: str, dtype: torch.dtype, location: str) -> torch.UntypedStorage:
        storage: Any
        start, size_bytes = self._records.place(f"data/{key}")
        self._places[key] = Record(start, size_bytes, self._records.crc32(f"data/{key}"))
        if self._is_meta:
            return cast(torch.UntypedStorage, _torch.UntypedStorage(size_bytes, device="meta"))
        if size_bytes == 0:
            storage = _torch.UntypedStorage(0)
        elif self._mapped is not None and start % _ALIGNMENT_BYTES == 0:
            if self._whole is None:
                self._whole = _torch.UntypedStorage.from_file(
                    str(self._mapped), False, self._records.size_bytes
                )
            storage = self._whole[start : start + size_bytes]
        else:
            read = self._records.read_at(start, size_bytes)
            storage = torch.frombuffer(read, dtype=torch.uint8).untyped_storage()
        if self.is_swapped and dtype.itemsize > 1:
            storage = storage.clone() if self._mapped is not None else storage
            storage.byteswap(dtype)
        return self._placed(storage, location)

    def _placed(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """Move a storage as torch.load interprets `map_location`."""
        found: Any = None
        where = self._map_location
        if isinstance(where, Mapping):
            location = where.get(location, location)
        elif isinstance(where, str | torch.device):
            location = str(where)
        elif where is not None:
            found = where(storage, location)
        if found is None:
            found = _torch.serialization.default_restore_location(storage, location)
        untyped: torch.UntypedStorage = getattr(found, "_untyped_storage", found)
        return untyped

    # --- tensors ---------------------------------------------------------------------------------------------

    def _view(
        self, storage: object, offset: object, size: object, stride: object, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if type(storage) is not Storage or type(offset) is not int or not 0 <= offset < 1 << 63:
            refuse("it has a tensor without a storage")
        if type(size) not in (tuple, torch.Size) or type(stride) is not tuple:
            refuse("it has a tensor without a shape")
        assert isinstance(size, tuple)
        assert isinstance(stride, tuple)
        count, dtype = natural_product(size), dtype or storage.dtype
        if len(size) != len(stride) or not all(type(each) is int and 0 <= each < 1 << 63 for each in stride):
            refuse("it has a tensor with a different number of strides than dimensions")
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if count else -1
        if (offset + last + 1) * dtype.itemsize > storage.untyped.nbytes():
            refuse("it has a tensor that is larger than its storage")
        self.spend(_OBJECT_BYTES)
        empty = torch.empty((0,), dtype=dtype, device=storage.untyped.device)
        return empty.set_(cast(Any, storage.untyped), offset, size, stride)

    def _tensor_v1(self, storage: object, offset: object, size: object, stride: object) -> torch.Tensor:
        return self._view(storage, offset, size, stride)

    def _tensor_v2(
        self,
        storage: object,
        offset: object,
        size: object,
        stride: object,
        requires_grad: object,
        hooks: object,
        metadata: object = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        _check_inert(requires_grad, hooks)
        if metadata:
            refuse("it has a tensor that is conjugated or negated lazily")
        found = self._view(storage, offset, size, stride, dtype)
        return found.requires_grad_() if requires_grad else found

    def _tensor_v3(self, *arguments: object) -> torch.Tensor:
        """Make a tensor of a dtype for which there is no named storage."""
        *others, dtype = arguments[:7]
        if len(arguments) not in (7, 8) or not isinstance(dtype, torch.dtype):
            refuse("it has a tensor without a type")
        return self._tensor_v2(*others, *arguments[7:], dtype=dtype)  # type: ignore[arg-type, misc]

    def _parameter(self, data: object, requires_grad: object, hooks: object) -> torch.nn.Parameter:
        _check_inert(requires_grad, hooks)
        if not isinstance(data, torch.Tensor):
            refuse("it has a parameter without a tensor")
        self.spend(_OBJECT_BYTES)
        return torch.nn.Parameter(data, bool(requires_grad))

    def _parameter_with_state(
        self, data: object, requires_grad: object, hooks: object, state: object
    ) -> torch.Tensor:
        return self._with_attributes(self._parameter(data, requires_grad, hooks), state)

    def _from_type(self, function: object, type_: object, arguments: object, state: object) -> torch.Tensor:
        """Make a tensor with attributes."""
        if function is not self._rebuild_v2 or id(type_) not in self._tensor_types:
            refuse("it has a tensor of a custom class")
        found = self.call(function, arguments)
        assert isinstance(found, torch.Tensor)
        assert isinstance(type_, Class)
        return self._with_attributes(found.as_subclass(type_.made), state)

    def _with_attributes(self, tensor: torch.Tensor, state: object) -> torch.Tensor:
        if type(state) is not dict:
            refuse("it has a tensor with attributes of an unexpected kind")
        for name, value in state.items():
            if type(name) is not str or name.startswith("__") or hasattr(torch.nn.Parameter, name):
                refuse(f"it sets {str(name)[:100]!r} of a tensor")
            setattr(tensor, name, value)
        return tensor

    def _size(self, sizes: object) -> torch.Size:
        if type(sizes) not in (tuple, list):
            refuse("it has a size that does not consist of non-negative integers")
        assert isinstance(sizes, tuple | list)
        natural_product(sizes)
        return torch.Size(sizes)


def _check_inert(requires_grad: object, hooks: object) -> None:
    if type(requires_grad) is not bool or not (hooks is None or (type(hooks) is OrderedDict and not hooks)):
        refuse("it has a tensor with hooks")


def _sparse(layout: object, data: object) -> Any:
    parts: tuple[Any, ...] = data if type(data) is tuple else ()
    is_coo = layout is torch.sparse_coo
    if not isinstance(layout, torch.layout):
        refuse("it has a sparse tensor without a layout")
    tensors = 2 if is_coo else 3
    size = parts[tensors] if len(parts) > tensors else None
    if not all(isinstance(each, torch.Tensor) for each in parts[:tensors]) or not isinstance(size, tuple):
        refuse("it has a sparse tensor without its parts")
    natural_product(size)
    if is_coo:
        is_coalesced = bool(parts[3]) if len(parts) > 3 else None
        return _torch.sparse_coo_tensor(*parts[:2], size, check_invariants=True, is_coalesced=is_coalesced)
    return _torch.sparse_compressed_tensor(*parts[:3], size, layout=layout, check_invariants=True)


def _device(kind: object, index: object = None) -> torch.device:
    if type(kind) is not str or not (index is None or (type(index) is int and 0 <= index < 1 << 15)):
        refuse("it has an invalid device")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(name: object) -> torch.layout:
    if type(name) is not str or name not in _LAYOUTS:
        refuse("it has a layout that torch does not know")
    return _LAYOUTS[name]
