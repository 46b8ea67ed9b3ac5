"""Copies of a state in CPU memory, so that training can go on while they are written. Their memory is reused."""

from __future__ import annotations

import contextlib
import copy
import logging
import mmap
import os
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ckpt_async.errors import CkptAsyncError, FormatError, SettingsError
from ckpt_async.threads import promptly

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# These are never changed in place, so the same object can be used in the copy.
_CONSTANT = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size}
)


class SnapshotBuffers:
    """The memory of one snapshot at a time, kept for the next; page-locked for what is on a GPU. Not thread-safe."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self.reader: Future[Any] | None = (
            None  # done when the last snapshot has been read, if somebody says so
        )

    @promptly()
    def take(self, state: Any, *, keeps_sharing: bool = True) -> Any:
        """Return a copy of `state`: tensors in CPU memory, containers and everything else copied as by `copy.deepcopy`.

        Tensors that share memory also share it in the copy, as in what `torch.save` writes; all of that memory is
        copied, even if no tensor uses some of it. Without `keeps_sharing` the elements of each tensor are copied, which
        is what torch.distributed.checkpoint writes.

        Blocks until everything is copied. The copy is valid until the next `take`, and not in a forked process. Raises
        FormatError, with the key, for what cannot be copied; SettingsError if the last snapshot is still being read.
        """
        if self.reader is not None and not self.reader.done():
            raise SettingsError("the last save still reads these buffers", hint="wait for its future first")
        self._memory.reuse()
        copier = _Copier(self._memory, keeps_sharing=keeps_sharing)
        try:
            with torch.no_grad():
                return copier.copied(state, "state")
        finally:
            for device in copier.devices:
                torch.cuda.synchronize(device)
            self._memory.drop_unused()

    @property
    def size_bytes(self) -> int:
        """The number of bytes held."""
        return self._memory.size_bytes


class _Copier:
    """One snapshot being taken. Remembers by identity what was copied already."""

    def __init__(self, memory: HostMemory, *, keeps_sharing: bool) -> None:
        self._memory, self._keeps_sharing = memory, keeps_sharing
        self.devices: set[torch.device] = set()  # those that may still be copying
        self._targets: dict[tuple[Any, ...], torch.UntypedStorage] = {}
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
            found = self._named(lambda: self._tensor(value, key), value, key)
            # Attributes, which torch.save writes too. A ShardedTensor has nothing else.
            if type(value) in _PLAIN or not hasattr(value, "local_shards"):
                self._copy_attributes(found, value, key)
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
            found = self._named(lambda: copy.deepcopy(value), value, key)
        self._done[id(value)] = found
        return found

    def _mapping(self, value: Mapping[Any, Any], key: str) -> Any:
        found: Any = copy.copy(value)
        self._done[id(value)] = found
        found.clear()
        for name, each in value.items():
            # A key may be a parameter, as in an optimizer's `state`.
            found[name if type(name) in _CONSTANT else self.copied(name, key)] = self.copied(
                each, f"{key}/{name}"
            )
        self._copy_attributes(found, value, key)  # `_metadata` of a module's state, for example
        return found

    def _copy_attributes(self, target: Any, source: Any, key: str) -> None:
        attributes: dict[str, Any] = getattr(source, "__dict__", {})
        for name, each in attributes.items():
            if type(each).__name__ != "PyCapsule":  # a cache of nested tensors in torch 2.11
                vars(target)[name] = self.copied(each, f"{key}.{name}")

    def _special(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.detach().cpu()
        try:
            return copy.deepcopy(tensor.detach())
        except (RuntimeError, NotImplementedError):  # a sparse layout, a nested tensor, some subclasses
            return tensor.detach().clone()

    def _tensor(self, tensor: torch.Tensor, key: str) -> torch.Tensor:
        if type(tensor) in _PLAIN:  # nearly all of them; each `hasattr` below takes as long as a small copy
            return self._plain(tensor)
        if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
            return copy.deepcopy(tensor)
        if hasattr(tensor, "trigger_wait"):
            # An AsyncCollectiveTensor, whose elements may not have arrived yet.
            tensor = tensor.trigger_wait()
        if hasattr(tensor, "__tensor_flatten__"):  # DTensor and other wrappers
            names, context = tensor.__tensor_flatten__()
            inner = {name: self.copied(getattr(tensor, name), f"{key}.{name}") for name in names}
            kind: Any = type(tensor)
            return cast(
                torch.Tensor,
                kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride()),
            )
        if hasattr(tensor, "local_shards"):
            return self._sharded(tensor)
        return self._plain(tensor) if type(tensor) in _PLAIN else self._special(tensor)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
        if not is_dense or tensor.device.type == "meta":
            return self._special(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        found = self._with_its_storage(plain) if self._keeps_sharing else self._alone(plain)
        if type(tensor) is torch.nn.Parameter:
            return torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
        return found.requires_grad_(tensor.requires_grad)

    def _sharded(self, tensor: Any) -> torch.Tensor:
        """Return a copy of a ShardedTensor, as its own `cpu` makes it."""
        from torch.distributed._shard.sharded_tensor.shard import Shard

        with_all = copy.deepcopy(tensor.metadata())
        shards = [
            Shard(self._alone(each.tensor), copy.deepcopy(each.metadata)) for each in tensor.local_shards()
        ]
        for each in (*with_all.shards_metadata, *(shard.metadata for shard in shards)):
            each.placement._device = torch.device("cpu")  # noqa: SLF001
        return cast(
            torch.Tensor,
            type(tensor)._init_from_local_shards_and_global_metadata(  # noqa: SLF001
                shards,
                sharded_tensor_metadata=with_all,
                process_group=tensor._process_group,  # noqa: SLF001
            ),
        )

    def _with_its_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        place = (storage.device, storage.data_ptr(), storage.nbytes())
        target = self._targets.get(place) if place[1] else None
        if target is None:
            target = self._targets[place] = self._new(storage.nbytes(), storage.device)
            self._alive.append(storage)
            if storage.nbytes():
                self._copy(target, storage)
        return torch.empty(0, dtype=tensor.dtype).set_(
            target, tensor.storage_offset(), tensor.size(), tensor.stride()
        )

    def _alone(self, tensor: torch.Tensor) -> torch.Tensor:
        # The strides of the original if it is dense, so that its bytes can be copied as they are.
        strides = (tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")).stride()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride())
        target = self._targets.get(place) if place[1] else None
        is_new = target is None
        if target is None:
            target = self._targets[place] = self._new(tensor.numel() * tensor.itemsize, tensor.device)
            self._alive.append(tensor)
        found = torch.empty(0, dtype=tensor.dtype).set_(target, 0, tensor.size(), strides)
        if is_new and tensor.numel():
            self._copy(found, tensor)
        return found

    def _new(self, size_bytes: int, source: torch.device) -> torch.UntypedStorage:
        return self._memory.storage(size_bytes, is_page_locked=source.type == "cuda")

    def _copy(self, target: Any, source: Any) -> None:
        """Copy a tensor to a tensor, or a storage to a storage."""
        is_on_gpu = source.device.type == "cuda"
        if is_on_gpu:
            self.devices.add(source.device)
        target.copy_(source, non_blocking=is_on_gpu)

    def _named(self, work: Callable[[], Any], value: Any, key: str) -> Any:
        try:
            return work()
        except (CkptAsyncError, OSError, MemoryError):
            raise
        except Exception as error:
            raise FormatError(
                f"{key!r} is a {type(value).__module__}.{type(value).__qualname__} that cannot be copied: {error}",
                hint="leave it out of the state; only if it can be pickled, blocking=True saves it, without a copy",
            ) from error


# From here on, memory is mapped for its own; below, torch allocates it.
MAPPED_BYTES = 1 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices

logger = logging.getLogger(__name__)


class HostMemory:
    """The memory of one copy at a time. Not thread-safe."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage | _Mapped]] = {}
        self._used: list[tuple[tuple[int, bool], torch.UntypedStorage | _Mapped]] = []

    def reuse(self) -> None:
        """Declare that nobody needs what was handed out so far."""
        for kind, each in self._used:
            self._free.setdefault(kind, []).append(each)
        self._used = []

    def storage(self, size_bytes: int, *, is_page_locked: bool) -> torch.UntypedStorage:
        """Return a storage of exactly this size. If it cannot be page-locked, it is ordinary memory, with a warning."""
        kind = (size_bytes, is_page_locked and size_bytes > 0)
        free = self._free.get(kind)
        found = free.pop() if free else _new(*kind)
        self._used.append((kind, found))
        return found.storage if isinstance(found, _Mapped) else found

    def drop_unused(self) -> None:
        self._free.clear()

    @property
    def size_bytes(self) -> int:
        """The number of bytes in use."""
        return sum(size_bytes for (size_bytes, _), _ in self._used)


def _new(size_bytes: int, is_page_locked: bool) -> torch.UntypedStorage | _Mapped:
    if size_bytes >= MAPPED_BYTES:
        return _Mapped(size_bytes, is_page_locked=is_page_locked)
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_page_locked).untyped_storage()


class _Mapped:
    """A mapping of its own, in huge pages where the kernel has them: a fraction of the page faults, and of the work of
    page-locking them.
    """

    def __init__(self, size_bytes: int, *, is_page_locked: bool) -> None:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.storage = tensor.untyped_storage()
        if is_page_locked and _is_page_locked_now(tensor):
            # A fork copies page-locked memory at once and whole; DataLoader's workers have no use for it.
            memory.madvise(mmap.MADV_DONTFORK)
            _not_in_forks.add(memory)
            # It holds the mapping, which must not go first. At exit, CUDA may be gone already.
            weakref.finalize(self, _unlock, tensor.data_ptr(), memory, os.getpid()).atexit = False


# A forked process has nothing at these addresses, or something else, which must not be unmapped there.
_not_in_forks: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_of_the_parent: list[mmap.mmap] = []
os.register_at_fork(after_in_child=lambda: _of_the_parent.extend(_not_in_forks))


def _is_page_locked_now(tensor: torch.Tensor) -> bool:
    error = int(_cuda().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE))
    if error:
        # CUDA keeps the error for whoever asks next, which must not be training.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        logger.warning("page_locking_failed size_bytes=%d cuda_error=%d", tensor.nbytes, error)
    return not error


def _unlock(place: int, _memory: mmap.mmap, pid: int) -> None:
    if os.getpid() == pid:
        _cuda().cudaHostUnregister(place)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
