"""What files that OLMo's ranks wrote with torch.save under FSDP contain besides a trainer's state.

They contain parts of sharded tensors (`ShardedTensor`), and what a flat parameter says about the parameters in it.
Their classes are replaced by classes that only keep the fields: no process group is needed, and no foreign code runs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ckpt_async.core.pickled import Class, Function, refuse
from ckpt_async.torch.plain import Names, member_by_name, natural_product
from ckpt_async.torch.torchfile import StateRules

_SHARD = "torch.distributed._shard"
_MAX_DIMENSIONS = 64


class Kept:
    """Stands in for an object of one of torch's classes, and keeps its fields."""

    def __setstate__(self, state: object) -> None:
        if type(state) is tuple and len(state) == 2 and state[0] is None:  # the class has slots
            state = state[1]
        if type(state) is dict:
            vars(self).update((name, value) for name, value in state.items() if type(name) is str)


class MemoryFormat(enum.Enum):
    """Replaces torch's MEM_FORMAT_ENCODING."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


class ShardParamInfo(NamedTuple):
    """Where a parameter's elements are in a rank's part of the flat parameter; both ends of the range are inclusive."""

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


class Shards:
    """What one rank has of a tensor: a list of `(offsets, part)`, and the size of the whole."""

    def __init__(self, size: tuple[int, ...], parts: list[tuple[tuple[int, ...], torch.Tensor]]) -> None:
        self.size, self.parts = size, parts


CLASSES: Mapping[tuple[str, str], type] = {
    (f"{_SHARD}.sharded_tensor.shard", "Shard"): Kept,
    (f"{_SHARD}.metadata", "ShardMetadata"): Kept,
    (f"{_SHARD}.sharded_tensor.metadata", "ShardedTensorMetadata"): Kept,
    (f"{_SHARD}.sharded_tensor.metadata", "TensorProperties"): Kept,
    (f"{_SHARD}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): MemoryFormat,
    (f"{_SHARD}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"): Kept,
    (f"{_SHARD}.sharding_spec.api", "EnumerableShardingSpec"): Kept,
    ("torch.distributed.remote_device", "_remote_device"): Kept,
    # torch 2.2 renamed the module.
    ("torch.distributed.fsdp.flat_param", "_ShardParamInfo"): ShardParamInfo,
    ("torch.distributed.fsdp._flat_param", "_ShardParamInfo"): ShardParamInfo,
}


class ShardedRules(StateRules):
    what = "tensors, their shards and plain data"

    def names(self) -> Names:
        self._sharded_tensor, self._group_state = Class(Shards), Class(Kept)
        self._wrapper = Function(lambda *_: refuse("it makes a tensor without elements"))
        return super().names() | {
            (f"{_SHARD}.sharded_tensor.api", "ShardedTensor"): self._sharded_tensor,
            ("torch._utils", "_rebuild_wrapper_subclass"): self._wrapper,
            ("builtins", "getattr"): Function(self._attribute),
            ("__builtin__", "getattr"): Function(self._attribute),
        }

    def _attribute(self, class_: object, name: object) -> object:
        """Resolve `getattr`, which a pickle uses to name a class within a class."""
        if class_ is self._sharded_tensor and name == "ProcessGroupState":
            return self._group_state
        return member_by_name(class_, name)

    def new(self, class_: object, arguments: object) -> object:
        if class_ is self._sharded_tensor:
            refuse("it makes a ShardedTensor from nothing")
        return super().new(class_, arguments)

    def call(self, function: object, arguments: object) -> object:
        if function is self._sharded_tensor:
            refuse("it makes a ShardedTensor from nothing")
        return super().call(function, arguments)

    def _from_type(self, function: object, type_: object, arguments: object, state: object) -> Any:
        """Make the parts of a ShardedTensor from its state: `(its shards, its metadata, …)`."""
        if type_ is not self._sharded_tensor or function is not self._wrapper:
            return super()._from_type(function, type_, arguments, state)
        if type(state) is not tuple or len(state) < 2 or type(state[0]) is not list:
            refuse("it has a ShardedTensor without shards")
        size = _numbers(getattr(state[1], "size", None))
        parts = [_part(each, size) for each in state[0]]
        return Shards(size, parts)


def _part(shard: object, whole: tuple[int, ...]) -> tuple[tuple[int, ...], torch.Tensor]:
    told, tensor = getattr(shard, "metadata", None), getattr(shard, "tensor", None)
    offsets = _numbers(getattr(told, "shard_offsets", None))
    sizes = _numbers(getattr(told, "shard_sizes", None))
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes or len(offsets) != len(whole):
        refuse("it has a shard whose shape differs from the one that it states")
    return offsets, tensor


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        refuse("it has a shard without a shape")
    natural_product(value, _MAX_DIMENSIONS)
    return tuple(value)
