"""Sends a state that one rank has read to the others, tensor by tensor in chunks, so that no rank holds it twice."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckpt_async.torch.agreement import is_alone, run_on_one

CHUNK_BYTES = 16 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def read_on_one(read: Callable[[], Any], *, rank: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return on every rank of the group what `read` returns on one of them, by default the first. A collective.

    Tensors arrive on the CPU, through a group that can move CPU tensors. The extra memory beyond the state is one
    chunk. An error of that rank is raised on all of them (RankFailedError).
    """
    if is_alone():
        return read()
    source = rank if group is None else dist.get_global_rank(group, rank)
    kept: list[Any] = []
    sent: list[torch.Tensor] = []

    def dissect() -> bytes:
        kept.append(read())
        stream = io.BytesIO()
        _Dissecting(stream, sent).dump(kept[0])
        return stream.getvalue()

    skeleton = run_on_one(dissect, rank=source, group=group)
    if dist.get_rank() != source:
        joining = _Joining(io.BytesIO(skeleton))
        kept.append(joining.load())
        sent = joining.received
    for tensor in sent:
        broadcast(tensor, source, group)
    return kept[0]


class _Dissecting(pickle.Pickler):
    """Pickles everything except the elements of tensors."""

    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream, protocol=5)
        self._tensors = tensors
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) not in _PLAIN or value.layout is not torch.strided or vars(value):
            return None  # pickled as a whole
        number = self._numbers.setdefault(id(value), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(value.detach())
        is_parameter = type(value) is torch.nn.Parameter
        return number, value.dtype, tuple(value.shape), value.requires_grad, is_parameter


class _Joining(pickle.Unpickler):
    """Unpickles what a rank of our own job has dissected, with room for the elements."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.received: list[torch.Tensor] = []
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, told: Any) -> torch.Tensor:
        number, dtype, shape, requires_grad, is_parameter = told
        if number not in self._made:
            room = torch.empty(shape, dtype=dtype)
            self.received.append(room)
            made = (
                torch.nn.Parameter(room, requires_grad)
                if is_parameter
                else room.requires_grad_(requires_grad)
            )
            self._made[number] = made
        return self._made[number]


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Send a tensor on the CPU to the same tensor of the other ranks of a group, in chunks. A collective."""
    if tensor.numel() == 0:
        return
    elements = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for at in range(0, len(elements), CHUNK_BYTES):
        dist.broadcast(elements[at : at + CHUNK_BYTES], src=source, group=group)
