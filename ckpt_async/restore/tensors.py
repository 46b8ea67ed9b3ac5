"""The names, types and shapes of a checkpoint's tensors, as its files describe them.

Only a few KiB of each file are read. Torch is not needed, and nothing in the files is executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_async.errors import FormatError, UnsafePickleError
from ckpt_async.restore.checkpoint import RemoteFile, is_metadata
from ckpt_async.restore.dcp_files import MAX_METADATA_BYTES, named_files, named_tensors
from ckpt_async.restore.reading import Reader

_SUFFIX = ".safetensors"
_HEADER_SIZE_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
# Maps safetensors' type names to torch's; any other name stays as it is.
_TYPES = dict(
    pair.split(":")
    for pair in (
        "F64:float64 F32:float32 F16:float16 BF16:bfloat16 BOOL:bool C64:complex64 F8_E4M3:float8_e4m3fn"
        " F8_E5M2:float8_e5m2 I64:int64 I32:int32 I16:int16 I8:int8 U8:uint8 U16:uint16 U32:uint32 U64:uint64"
    ).split()
)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor as a checkpoint describes it: torch's name of its type ("" if unknown), and its full shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype or '?'}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors by name, and the files that do not say which tensors they hold (for example `.pt`)."""

    facts: dict[str, TensorFacts]
    silent_files: tuple[str, ...]


def tensors_of(reader: Reader) -> Tensors:
    """Return the tensors that DCP's `.metadata` and the headers of safetensors files describe. The name of a DCP
    tensor is prefixed with its folder, if the `.metadata` is in a subfolder. Blocks: two reads per safetensors
    file.

    Raises FormatError for a file that is not what its name says.
    """
    files = reader.files.values()
    facts: dict[str, TensorFacts] = {}
    accounted: set[str] = set()
    for file in files:
        if is_metadata(file.name):
            folder = file.name.rpartition("/")[0]
            found, parts = _of_dcp(reader, file)
            facts.update({_join(folder, name): each for name, each in found.items()})
            accounted |= {file.name, *(_join(folder, part) for part in parts)}
    for file in sorted(files, key=lambda each: each.name):
        if file.name.endswith(_SUFFIX) and file.name not in accounted:
            accounted.add(file.name)
            for name, each in _of_safetensors(reader, file).items():
                facts[f"{file.name}:{name}" if name in facts else name] = each
    return Tensors(facts, tuple(sorted(file.name for file in files if file.name not in accounted)))


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _of_dcp(reader: Reader, file: RemoteFile) -> tuple[dict[str, TensorFacts], Iterable[str]]:
    if file.size_bytes > MAX_METADATA_BYTES:
        raise FormatError(f"{file.name} has {file.size_bytes} bytes: too large for DCP metadata")
    data = reader.read(file.name)
    try:
        found = {name: TensorFacts(*told) for name, told in named_tensors(data).items()}
        return found, named_files(data)
    except UnsafePickleError as error:
        raise FormatError(f"{file.name}: {error}") from error


def _of_safetensors(reader: Reader, file: RemoteFile) -> dict[str, TensorFacts]:
    def refuse(reason: str) -> FormatError:
        return FormatError(f"{file.name} is not a safetensors file: {reason}")

    if file.size_bytes < _HEADER_SIZE_BYTES:
        raise refuse(f"it has {file.size_bytes} bytes")
    size_bytes = int.from_bytes(reader.read(file.name, 0, _HEADER_SIZE_BYTES), "little")
    if size_bytes > min(_MAX_HEADER_BYTES, file.size_bytes - _HEADER_SIZE_BYTES):
        raise refuse(f"its header would have {size_bytes} bytes")
    try:
        header = json.loads(reader.read(file.name, _HEADER_SIZE_BYTES, size_bytes))
        return {
            name: TensorFacts(_TYPES.get(told["dtype"], str(told["dtype"])), tuple(map(int, told["shape"])))
            for name, told in header.items()
            if name != "__metadata__"
        }
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise refuse(f"its header cannot be understood ({error!r})") from error
