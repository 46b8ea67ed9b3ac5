"""numpy's arrays, scalars and dtypes in pickles, in the spellings of numpy 1 and numpy 2.

Only numbers and texts are accepted. Arrays of objects are not, because these are pickles themselves. numpy is imported
only when a state contains something of it. numpy fills its arrays itself (`__setstate__`), with a shape, a dtype and
bytes that fit each other.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ckpt_async.core.pickled import Function, refuse
from ckpt_async.errors import FormatError

_CODE = re.compile(r"[biufcSU][0-9]{1,9}")
_ORDERS = ("<", ">", "|", "=")
_MODULES = ("numpy.core", "numpy._core")
_NAMES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"{module}.multiarray", name) for module in _MODULES for name in ("_reconstruct", "scalar")),
    *((f"{module}.numeric", "_frombuffer") for module in _MODULES),
}
_MAX_DIMENSIONS = 32  # numpy 1's limit


def is_there(module: str, name: str) -> bool:
    """Return whether a state may contain this name of numpy. Raises FormatError if so and numpy is not installed."""
    if (module, name) not in _NAMES:
        return False
    if "numpy" not in sys.modules and find_spec("numpy") is None:
        raise FormatError("it has arrays of numpy, which is not installed", hint="pip install numpy")
    return True


class ArrayRules:
    """`new_object` registers an object that may be given a state, `spend` counts its bytes."""

    def __init__(self, new_object: Callable[[Any], Any], spend: Callable[[int], None]) -> None:
        import numpy as np

        self._numpy: Any = np
        self._new_object, self._spend = new_object, spend
        self._array_type = Function(_not_called)

    def names(self) -> dict[tuple[str, str], object]:
        found: dict[tuple[str, str], object] = {
            ("numpy", "ndarray"): self._array_type,
            ("numpy", "dtype"): Function(self._dtype),
        }
        for module in _MODULES:
            found[f"{module}.multiarray", "_reconstruct"] = Function(self._reconstruct)
            found[f"{module}.multiarray", "scalar"] = Function(self._scalar)
            found[f"{module}.numeric", "_frombuffer"] = Function(self._frombuffer)
        return found

    def is_key(self, key: object) -> bool:
        numbers = (self._numpy.integer, self._numpy.floating, self._numpy.bool_, self._numpy.str_)
        return isinstance(key, numbers)

    def build(self, target: Any, state: object) -> bool:
        """Give an array or a dtype its state. Return whether `target` was one."""
        if isinstance(target, self._numpy.dtype):
            self._build_dtype(target, state)
        elif type(target) is self._numpy.ndarray:
            self._build_array(target, state)
        else:
            return False
        return True

    def _dtype(self, code: object, align: object = False, copy: object = True) -> Any:
        if type(code) is not str or not _CODE.fullmatch(code) or not (_is(align, 0, 1) and _is(copy, 0, 1)):
            refuse(f"it has arrays of {str(code)[:100]!r}: only numbers and strings are plain data")
        # A copy, because BUILD changes its byte order in place.
        return self._new_object(self._numpy.dtype(code, False, True))

    def _build_dtype(self, target: Any, state: object) -> None:
        sizes = (target.itemsize, target.alignment) if target.kind in "SU" else (-1, -1)
        if type(state) is not tuple or len(state) != 8 or not _is(state[0], 3) or not _is(state[1], *_ORDERS):
            refuse("it has a dtype with a state of an unexpected kind")
        is_of_fields = any(each is not None for each in state[2:5])
        # Another size would make arrays that exist already extend beyond their memory.
        if is_of_fields or not (_is(state[5], sizes[0]) and _is(state[6], sizes[1])):
            refuse("it has a dtype with fields, or with a size that differs from the one in its name")
        target.__setstate__((3, state[1], None, None, None, *sizes, target.flags))

    def _reconstruct(self, type_: object, shape: object, code: object) -> Any:
        is_empty = type(shape) is tuple and len(shape) == 1 and _is(shape[0], 0)
        if type_ is not self._array_type or not is_empty or not _is(code, b"b", "b"):
            refuse("it makes an array in a different way from numpy")
        return self._new_object(self._numpy.ndarray((0,), "b"))

    def _build_array(self, target: Any, state: object) -> None:
        if type(state) is not tuple or len(state) != 5 or not _is(state[0], 1):
            refuse("it has an array with a state of an unexpected kind")
        _, shape, dtype, is_fortran, content = state
        self._check_fits(shape, dtype, content)
        if not _is(is_fortran, 0, 1):
            refuse("it has an array without an order")
        self._spend(len(content))
        target.__setstate__((1, shape, dtype, bool(is_fortran), content))

    def _frombuffer(self, content: object, dtype: object, shape: object, order: object) -> Any:
        """Make an array as protocol 5 spells it."""
        size_bytes = self._check_fits(shape, dtype, content)
        if not _is(order, "C", "F"):
            refuse("it has an array without an order")
        self._spend(1024)
        if size_bytes == 0:
            return self._numpy.empty(shape, dtype)
        return self._numpy.frombuffer(content, dtype).reshape(shape, order=order)

    def _scalar(self, dtype: object, content: object) -> Any:
        self._check_fits((), dtype, content)
        self._spend(64)
        return self._numpy.frombuffer(content, dtype)[0]

    def _check_fits(self, shape: object, dtype: Any, content: Any) -> int:
        if type(shape) is not tuple or len(shape) > _MAX_DIMENSIONS:
            refuse("it has an array without a shape")
        if not all(type(each) is int and 0 <= each < 1 << 63 for each in shape):
            refuse("it has an array whose shape does not consist of non-negative integers")
        if not isinstance(dtype, self._numpy.dtype) or type(content) not in (bytes, bytearray):
            refuse("it has an array of something other than bytes")
        if dtype.hasobject or dtype.itemsize == 0 or math.prod(each or 1 for each in shape) >= 1 << 62:
            refuse("it has an array of elements that do not exist")
        size_bytes = math.prod(shape) * int(dtype.itemsize)
        if size_bytes != len(content):
            refuse(f"it has {len(content)} bytes for an array of {size_bytes}")
        return size_bytes


def _is(value: object, *choices: object) -> bool:
    """Return whether `value` is one of `choices`.

    Never compares a dtype, which would convert the other side to a dtype.
    """
    return type(value) in (bool, int, str, bytes) and value in choices


def _not_called(*_: object) -> object:
    refuse("it calls numpy.ndarray")
