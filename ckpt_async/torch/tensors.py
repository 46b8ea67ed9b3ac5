"""Tensors behind a JSON header: safetensors files, and ML Flashpoint's optimised form. Reading runs nothing in them."""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from ckpt_async.errors import FormatError, UnsafePickleError
from ckpt_async.torch import flashpoint, olmo_keys

# Keyed by torch's own names, so that a name from a file is never looked up in a module.
_TORCH_DTYPES = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}

_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_ENTRY_BYTES = 50  # what a header has of a tensor, besides its name
DTYPES = {
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
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def load_safetensors(path: Path, map_location: object) -> dict[str, Any]:
    """Load the tensors by their names; if OLMo has named them, in OLMo's nested structure."""
    if not isinstance(map_location, (str, torch.device, type(None))):
        raise FormatError(
            f"{path}: a safetensors file can only be loaded to a single device",
            hint="map_location='cpu', 'cuda:0', …",
        )
    with path.open("rb") as file:
        tensors = {}
        places = _places(file, str(path))
        for name, (place, start) in places.items():
            file.seek(start + place.begin)
            tensors[name] = place.read(file, f"{path}: {name[:200]!r}").to(map_location)

        def bytes_of(name: str) -> bytes:
            place, start = places[name]
            file.seek(start + place.begin)
            return file.read(place.end - place.begin)

        return olmo_keys.nested(tensors, bytes_of, str(path))


def safetensors_places(file: IO[bytes], what: str) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
    """Return the dtype and shape of each tensor, and the offset of its elements in the file. Raises FormatError."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
    for name, (place, start) in _places(file, what).items():
        if start + place.end > _size_of(file):
            raise FormatError(f"{what}: {name[:200]!r} is cut short")
        found[name] = place.dtype, tuple(place.shape), start + place.begin
    return found


def _places(file: IO[bytes], what: str) -> dict[str, tuple[_Place, int]]:
    """Return the header's entry for each tensor, and where the elements of all of them begin."""
    try:
        header, start = _read_header(file)
        header.pop("__metadata__", None)
        places = {
            name: _Place(DTYPES[entry["dtype"]], entry["shape"], *entry["data_offsets"])
            for name, entry in header.items()
        }
        _check_apart(places.values())
    except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise FormatError(f"{what} is not a safetensors file: {str(error)[:500]}") from error
    return {name: (place, start) for name, place in places.items()}


def save_safetensors(state: Any, file: IO[bytes], what: str) -> None:
    """Write a dict of tensors as the safetensors library would, so that `load_file` of any reader reads it.

    Nested dicts are flattened to '.'-joined keys. Tensors that share memory are written once for each name. A tensor is
    copied, one at a time, only if it is not contiguous or not on the CPU. Raises FormatError, which names the key,
    before anything is written.
    """
    tensors = flattened(state, what)
    head, order = safetensors_head(tensors)
    file.write(head)
    for name in order:
        tensor = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        if size_bytes := tensor.numel() * tensor.dtype.itemsize:
            # torch works without numpy, so this must, too.
            file.write(memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B"))


def flattened(state: Any, what: str, *, are_stand_ins: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by their '.'-joined keys.

    Stand-ins are on the meta device. Raises FormatError, which names the key, for anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    left_bytes = _MAX_HEADER_BYTES

    def add(value: Any, name: str) -> None:
        nonlocal left_bytes
        left_bytes -= len(name) + _ENTRY_BYTES
        if left_bytes < 0:  # a dict that is shared has as many names as there are ways to it
            raise FormatError(
                f"{what}: the names of its tensors take more than {_MAX_HEADER_BYTES} bytes, which no safetensors"
                " library reads",
                hint="write a .pt file, or leave keys out with ignore_keys",
            )
        if isinstance(value, Mapping):
            for key, each in value.items():
                add(each, f"{name}.{key}" if name else str(key))
            return
        if problem := _not_writable(value, are_stand_ins):
            raise FormatError(
                f"{what}: {name!r} is {problem}, which a safetensors file cannot hold",
                hint="weights_only=True keeps only the model's tensors, ignore_keys leaves keys out, and a .pt"
                " file can hold everything",
            )
        if name in tensors or name in ("", "__metadata__"):
            raise FormatError(
                f"{what}: {name!r} is not a valid tensor name in a safetensors file, or occurs twice"
            )
        tensors[name] = value

    add(state, "")
    return tensors


def safetensors_head(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """Return the head of a safetensors file with these tensors, and the order in which their elements follow."""
    # The library's order, in which each tensor begins at an aligned offset.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def _not_writable(value: Any, is_stand_in: bool) -> str:
    """Return what makes the value unwritable; '' if it can be written."""
    if not isinstance(value, torch.Tensor):
        return f"not a tensor but {type(value).__name__}"
    if hasattr(value, "to_local"):  # DTensor and similar
        return f"a part of a sharded tensor ({type(value).__name__})"
    if (value.is_meta and not is_stand_in) or value.is_nested or value.layout is not torch.strided:
        return "a tensor that is meta, nested or sparse"
    return "" if value.dtype in _DTYPE_NAMES else f"a tensor of {value.dtype}"


def _check_apart(places: Iterable[_Place]) -> None:
    """Refuse overlapping tensors: a byte shared by a million tensors would be read into memory a million times."""
    last_end = 0
    for place in sorted(places, key=lambda each: (each.begin, each.end)):
        if place.begin < last_end:
            raise ValueError("tensors that overlap")
        last_end = place.end


def flashpoint_tensor(data: bytes) -> torch.Tensor:
    """Return the tensor stored in ML Flashpoint's optimised form. Runs nothing in it.

    The form is: the length of the header (4 bytes, little-endian), the header (JSON with `dtype` and `shape`, or up to
    0.0.10 the pickle of its `TensorHeader`), the elements.
    """
    try:
        (header_bytes,) = struct.unpack("<I", data[:4])
        start = 4 + header_bytes
        if start > len(data):
            raise ValueError(f"a header of {header_bytes} bytes")
        header = flashpoint.read_header(data[4:start])
        dtype = _TORCH_DTYPES[header["dtype"].removeprefix("torch.")]
        place = _Place(dtype, header["shape"], 0, len(data) - start)
    except (AttributeError, LookupError, TypeError, ValueError, struct.error, UnsafePickleError) as error:
        raise FormatError(f"not an optimised tensor of ML Flashpoint: {str(error)[:500]}") from error
    file = io.BytesIO(data)
    file.seek(start)
    return place.read(file, "optimised tensor")


@dataclass(frozen=True, slots=True)
class _Place:
    """What a header says about one tensor: its elements are the bytes from `begin` to `end`."""

    dtype: torch.dtype
    shape: Sequence[int]
    begin: int
    end: int

    def __post_init__(self) -> None:
        if len(self.shape) > _MAX_DIMENSIONS:
            raise ValueError(f"{len(self.shape)} dimensions")
        if not all(type(each) is int and each >= 0 for each in (*self.shape, self.begin, self.end)):
            raise ValueError("a size or offset that is not a non-negative integer")
        # Also checked beside a 0, where the number of bytes reveals nothing.
        if math.prod(max(1, each) for each in self.shape) >= 1 << 63:
            raise ValueError(f"a shape of {self.shape}")
        if self.end - self.begin != math.prod(self.shape) * self.dtype.itemsize:
            raise ValueError(f"{self.end - self.begin} bytes for {self.dtype} of shape {self.shape}")

    def read(self, file: IO[bytes], what: str) -> torch.Tensor:
        size_bytes = file.seek(0, os.SEEK_CUR) + self.end - self.begin
        if size_bytes > _size_of(file):  # before memory is allocated for it
            raise FormatError(f"{what} is cut short")
        if self.begin == self.end:
            return torch.empty(tuple(self.shape), dtype=self.dtype)
        data = bytearray(self.end - self.begin)
        if cast(io.BufferedReader, file).readinto(data) != len(data):
            raise FormatError(f"{what} is cut short")
        return torch.frombuffer(data, dtype=self.dtype).reshape(tuple(self.shape))


def _read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Return the JSON object that follows its length, and where it ends."""
    (size_bytes,) = struct.unpack("<Q", file.read(8))
    if size_bytes > min(_MAX_HEADER_BYTES, _size_of(file)):
        raise ValueError(f"a header of {size_bytes} bytes")
    try:
        header = json.loads(file.read(size_bytes))
    except RecursionError:
        raise ValueError("a header nested too deeply") from None
    if not isinstance(header, dict):
        raise TypeError("a header that is not an object")
    return header, 8 + size_bytes


def _size_of(file: IO[bytes]) -> int:
    position = file.tell()
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size_bytes
