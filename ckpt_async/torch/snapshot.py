"""Copies of a state in CPU memory, so that training can go on while they are written. Their memory is reused."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch

from ckpt_async.errors import FormatError

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# These are never changed in place, so the same object can be used in the copy.
_CONSTANT = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size}
)


class SnapshotBuffers:
    """The memory of one snapshot at a time, kept for the next one; page-locked if there is CUDA. Not thread-safe."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        self._used: list[torch.UntypedStorage] = []
        self._is_pinned = torch.cuda.is_available()

    def take(self, state: Any) -> Any:
        """Return a copy of `state`: tensors in CPU memory, containers and everything else copied as by `copy.deepcopy`.

        Tensors that share memory also share it in the copy, as in what `torch.save` writes. Blocks until everything is
        copied. The copy is valid until the next `take`. Raises FormatError, with the key, for what cannot be copied.
        """
        for storage in self._used:
            self._free.setdefault(storage.nbytes(), []).append(storage)
        self._used = []
        with torch.no_grad():
            taken = _Copier(self).copied(state, "state")
        if self._is_pinned:
            torch.cuda.synchronize()
        self._free.clear()  # buffers that this state does not need
        return taken

    @property
    def size_bytes(self) -> int:
        """The number of bytes held."""
        return sum(each.nbytes() for each in self._used)

    def storage_like(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a storage of the same size with the same bytes, though perhaps not all of them yet: see `take`."""
        free = self._free.get(source.nbytes())
        target = free.pop() if free else self._new(source.nbytes())
        self._used.append(target)
        if source.nbytes():
            _bytes_of(target).copy_(_bytes_of(source), non_blocking=self._is_pinned)
        return target

    def _new(self, size_bytes: int) -> torch.UntypedStorage:
        empty = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._is_pinned and size_bytes > 0)
        return empty.untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Copier:
    """One snapshot being taken. Remembers by identity what was copied already."""

    def __init__(self, buffers: SnapshotBuffers) -> None:
        self._buffers = buffers
        self._storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        self._done: dict[int, Any] = {}
        self._alive: list[Any] = []  # an identity is unique only while its object lives

    def copied(self, value: Any, key: str) -> Any:
        if type(value) in _CONSTANT:
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        self._alive.append(value)
        found: Any
        if isinstance(value, torch.Tensor):
            found = self._tensor(value)
            if vars(value):  # attributes, which torch.save writes too
                vars(found).update(self.copied(dict(vars(value)), key))
        elif type(value) in (dict, OrderedDict, defaultdict):
            return self._mapping(value, key)
        elif type(value) in (list, deque):
            found = self._done[id(value)] = copy.copy(value)
            for place, each in enumerate(value):
                found[place] = self.copied(each, f"{key}/{place}")
            return found
        elif type(value) is tuple:
            found = tuple(self.copied(each, f"{key}/{place}") for place, each in enumerate(value))
        else:
            found = self._other(value, key)
        self._done[id(value)] = found
        return found

    def _mapping(self, value: Mapping[Any, Any], key: str) -> Any:
        found: Any = copy.copy(value)  # with its attributes: `_metadata` of a module's state
        self._done[id(value)] = found
        for name, each in value.items():
            found[name] = self.copied(each, f"{key}/{name}")
        return found

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        is_plain = (
            type(tensor) in _PLAIN
            and tensor.layout is torch.strided
            and not tensor.is_quantized
            and tensor.device.type != "meta"
        )
        if not is_plain:
            return (
                copy.deepcopy(tensor.detach())
                if tensor.device.type in ("cpu", "meta")
                else tensor.detach().cpu()
            )
        plain = tensor.detach().resolve_conj().resolve_neg()
        storage = plain.untyped_storage()
        place = (storage.device, storage.data_ptr())
        target = self._storages.get(place) if place[1] else None
        if target is None or target.nbytes() != storage.nbytes():
            target = self._storages[place] = self._buffers.storage_like(storage)
            self._alive.append(storage)
        found = torch.empty(0, dtype=plain.dtype).set_(
            target, plain.storage_offset(), plain.size(), plain.stride()
        )
        if type(tensor) is torch.nn.Parameter:
            return torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
        return found.requires_grad_(tensor.requires_grad)

    def _other(self, value: Any, key: str) -> Any:
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise FormatError(
                f"{key!r} is a {type(value).__module__}.{type(value).__qualname__} that cannot be copied: {error}",
                hint="leave it out of the state, or save with blocking=True",
            ) from error
