"""Writes a state to torch's files or safetensors one tensor after the other, without holding the tensors in memory.

The state has stand-ins on the meta device. A function supplies the bytes of the tensors, in an order that this module
chooses.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from ckpt_async.errors import FormatError
from ckpt_async.torch.assembly import Whole
from ckpt_async.torch.tensors import flattened, safetensors_head
from ckpt_async.torch.torchfile import STORAGE_NAMES

Wholes = Mapping[int, Whole]  # by the `id` of the stand-in
Contents = Callable[[Sequence[Whole]], Iterator[tuple[Whole, memoryview]]]

_FOLDER = "archive"  # torch's name for it in a file without a name
_ALIGNMENT_BYTES = 64
_PADDING_ID = b"FB"  # torch's own
_LOCAL_HEADER_BYTES, _ZIP64_BYTES = 30, 20
_LARGE_BYTES = 1 << 30


def write_safetensors(state: Any, wholes: Wholes, contents: Contents, file: IO[bytes], what: str) -> int:
    """Write the state, and return the number of tensors.

    Raises FormatError, which names the key, for anything else in the state.
    """
    tensors = flattened(state, what, are_stand_ins=True)
    head, order = safetensors_head(tensors)
    file.write(head)
    for _, data in contents([wholes[id(tensors[name])] for name in order]):
        file.write(data)
    return len(order)


def write_torch(state: Any, wholes: Wholes, contents: Contents, file: IO[bytes], what: str) -> int:
    """Write the state as torch.save would, and return the number of tensors. `file` must be seekable."""
    with zipfile.ZipFile(file, "w") as archive:
        order: dict[int, Whole] = {}
        _write_record(archive, "data.pkl", _pickled(state, wholes, order, what))
        _write_record(archive, "byteorder", b"little")
        chosen = list(order.values())
        stream = contents(chosen)
        ahead = next(stream, None)
        for key, whole in enumerate(chosen):
            with _record(archive, f"data/{key}", whole.size_bytes) as record:
                while ahead is not None and ahead[0] is whole:
                    record.write(ahead[1])
                    ahead = next(stream, None)
        _write_record(archive, "version", b"3\n")
    return len(order)


def _record(archive: zipfile.ZipFile, name: str, size_bytes: int) -> IO[bytes]:
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    info.file_size = size_bytes
    is_large = size_bytes > _LARGE_BYTES
    position = archive.fp.tell() if archive.fp is not None else 0
    start = position + _LOCAL_HEADER_BYTES + len(info.filename) + 4 + _ZIP64_BYTES * is_large
    padding = -start % _ALIGNMENT_BYTES
    info.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w", force_zip64=is_large)


def _write_record(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with _record(archive, name, len(data)) as record:
        record.write(data)


class _Storage:
    """Stands in for a storage while its tensor is pickled."""

    def __init__(self, key: int, whole: Whole) -> None:
        self.key, self.whole = key, whole


def _pickled(state: Any, wholes: Wholes, order: dict[int, Whole], what: str) -> bytes:
    data = io.BytesIO()
    pickler = _Pickler(data, wholes, order)
    try:
        pickler.dump(state)
    except (pickle.PicklingError, AttributeError, RecursionError, TypeError) as error:
        raise FormatError(f"{what}: a part of the state cannot be saved: {str(error)[:500]}") from error
    return data.getvalue()


class _Pickler(pickle.Pickler):
    """The counterpart of torch.save's pickler for stand-ins."""

    def __init__(self, file: IO[bytes], wholes: Wholes, order: dict[int, Whole]) -> None:
        super().__init__(file, protocol=2)
        self._wholes, self._order = wholes, order

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        whole = self._wholes.get(id(obj))
        if whole is None:
            raise TypeError("a tensor in a container that is neither a dict nor a list")
        key = len(self._order)  # pickle asks only once for each tensor
        self._order[id(obj)] = whole
        shape, strides = tuple(obj.shape), tuple(torch.empty(obj.shape, device="meta").stride())
        fixed: tuple[Any, ...] = (_Storage(key, whole), 0, shape, strides, False, OrderedDict())
        if whole.dtype in STORAGE_NAMES:
            return torch._utils._rebuild_tensor_v2, fixed  # noqa: SLF001  what torch itself writes
        return torch._utils._rebuild_tensor_v3, (*fixed, whole.dtype)  # noqa: SLF001

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        name = STORAGE_NAMES.get(obj.whole.dtype)
        count = obj.whole.stand_in.numel()
        if name is None:
            return ("storage", torch.UntypedStorage, str(obj.key), "cpu", obj.whole.size_bytes)
        return ("storage", getattr(torch, name), str(obj.key), "cpu", count)
