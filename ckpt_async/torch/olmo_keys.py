"""The names of tensors in OLMo's own safetensors files (olmo/safetensors_util.py).

A name is the base64 of a pickle, `((key, …), value_is_pickled)`. `value_is_pickled` means that the value was not a
tensor: its pickle is stored as a tensor of bytes. Neither pickle is run.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckpt_async.core.pickled import ILL_FORMED, Rules, interpret, refuse
from ckpt_async.errors import FormatError, UnsafePickleError
from ckpt_async.torch.plain import PlainRules

_MAX_PICKLE_BYTES = 64 << 20
_MAX_KEYS = 100  # on the path to a value
_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

Allow = Mapping[tuple[str, str], type]


def nested(
    values: Mapping[str, torch.Tensor],
    bytes_of: Callable[[str], bytes],
    what: str,
    allow: Allow | None = None,
) -> dict[str, Any]:
    """Return the state that OLMo has written as these values, or the values themselves if not all names are OLMo's.

    `bytes_of(name)` is called for values that are pickles. `allow` is what `plain.allowed` returns. Raises
    UnsafePickleError, FormatError.
    """
    pickles = {name: data for name in values if (data := _pickle_in(name))}
    if not values or len(pickles) != len(values):
        return dict(values)
    state: dict[Any, Any] = {}
    for name, data in pickles.items():
        path, is_pickled = _key(data, what)
        if is_pickled and values[name].numel() > _MAX_PICKLE_BYTES:
            raise FormatError(f"{what}: {path!r:.200} has more than {_MAX_PICKLE_BYTES} bytes")
        value = _plain(bytes_of(name), f"{what}: {path!r:.200}", allow or {}) if is_pickled else values[name]
        _put(state, path, value, what)
    return state


def _pickle_in(name: str) -> bytes:
    """Return the bytes that look like a pickle, or b'' for any other kind of name."""
    if not name.startswith("gA"):  # decides for most names
        return b""
    try:
        data = base64.b64decode(name, b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
    return data if data.startswith(_PROTOCOLS) and data.endswith(b".") else b""


class _KeyRules(Rules):
    what = "a name of a tensor of OLMo"

    def find(self, *_: str) -> object:
        return None

    def check_keys(self, _: list[Any]) -> None:
        refuse("it has a dict")


def _key(data: bytes, what: str) -> tuple[tuple[str | int, ...], bool]:
    found = _interpreted(data, _KeyRules(), f"{what}: a tensor's name")
    path, is_pickled = found if type(found) is tuple and len(found) == 2 else ((), None)
    is_path = type(path) is tuple and 0 < len(path) <= _MAX_KEYS and {str, int}.issuperset(map(type, path))
    if not is_path or type(is_pickled) is not bool:
        reason = "is a pickle of something other than keys; nothing was run"
        raise UnsafePickleError(f"{what}: a tensor's name {reason}")
    assert isinstance(path, tuple)
    return path, is_pickled


def _plain(data: bytes, what: str, allow: Allow) -> Any:
    rules = PlainRules(allow)
    found = _interpreted(data, rules, what)
    rules.check_data((found,))
    return found


def _interpreted(data: bytes, rules: Rules, what: str) -> Any:
    try:
        return interpret(data, rules)
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{what}: {error.without_hint}", hint=error.hint) from None
    except ILL_FORMED as error:
        raise FormatError(f"{what} is not a pickle: {str(error)[:500]}") from error


def _put(state: dict[Any, Any], path: Iterable[str | int], value: Any, what: str) -> None:
    *above, last = path
    at: Any = state
    for key in above:
        at = at.setdefault(key, {})
        if type(at) is not dict:
            raise FormatError(f"{what}: {last!r:.200} is below a value")
    if last in at:
        raise FormatError(f"{what}: there are two values of {last!r:.200}")
    at[last] = value
