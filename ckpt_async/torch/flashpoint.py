"""ML Flashpoint's format around the tensors of an object: a block that says how they are stored, and a header for each.

    object   8 bytes, little-endian: the number of bytes after the block; 8 bytes: `MLF_TENS` or `TORCH___`; zeros up
             to 4096; then what `.metadata` names, by offsets from here
    tensor   in MLF_TENS: the header's length (4 bytes, little-endian), the header, the elements in C order. The header
             is JSON with `dtype` and `shape`; up to 0.0.10 the pickle of a `TensorHeader` with the same two fields.
             In TORCH___: what torch.save writes.

Nothing is run: the pickle may name only TensorHeader, torch's dtypes and torch.Size.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from ckpt_async.core.pickled import ILL_FORMED, Class, Function, Rules, interpret, refuse
from ckpt_async.errors import UnsafePickleError

# Part of the names of objects that ranks have written.
OBJECT_NAME = re.compile(r"src[0-9]+")

_MAX_TEXT_BYTES = 1 << 20  # the limit of its own reader


def read_header(data: bytes) -> dict[str, Any]:
    """Return `dtype` (a name) and `shape` (a list). Raises UnsafePickleError, ValueError, TypeError."""
    if len(data) > _MAX_TEXT_BYTES:
        raise ValueError(f"a header of {len(data)} bytes")
    if data[:1] == b"{":
        try:
            found = json.loads(data)
        except RecursionError:
            raise ValueError("a header nested too deeply") from None
        return found if isinstance(found, dict) else {}
    try:
        made: Any = interpret(data, _HeaderRules())
        return {"dtype": str(made.dtype), "shape": list(made.shape)}
    except ILL_FORMED as error:
        raise UnsafePickleError(f"its header is neither JSON nor a TensorHeader: {error}") from error


class _Header:
    dtype: torch.dtype
    shape: torch.Size


class _HeaderRules(Rules):
    what = "a tensor's header"

    def find(self, module: str, name: str) -> object:
        if (module, name) == ("ml_flashpoint.core.tensor_header", "TensorHeader"):
            return Class(_Header)
        if (module, name) == ("torch", "Size"):
            return Function(_size, tuple)
        found = vars(torch).get(name) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else None

    def build(self, target: object, state: object) -> object:
        if type(target) is not _Header or vars(target) or type(state) is not dict:
            refuse("it gives a state to something that is not a new header")
        if type(state.get("dtype")) is not torch.dtype or type(state.get("shape")) not in (torch.Size, tuple):
            refuse("it is a header without a dtype and a shape")
        target.dtype, target.shape = state["dtype"], state["shape"]
        return target

    def check_keys(self, keys: list[Any]) -> None:
        if {type(key) for key in keys} != {str}:
            refuse("it has a key that is not a name")


def _size(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    return sizes  # its content is checked together with the header's shape
