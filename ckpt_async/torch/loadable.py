"""Finds what `load` will refuse in a state that is being saved, while it can still be left out."""

from __future__ import annotations

import io
import logging
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, cast

import torch

from ckpt_async.core.pickled import interpret
from ckpt_async.errors import UnsafePickleError
from ckpt_async.torch.codecs import format_of
from ckpt_async.torch.plain import or_trusted
from ckpt_async.torch.torchfile import STORAGE_NAMES, Records, StateRules, Storage

logger = logging.getLogger(__name__)

_PROTOCOL = 2  # that of torch.save
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, deque, tuple, set, frozenset})


class LoadCheck:
    """Looks only at the first value of each kind (mostly: of each type), because pickling all again takes long."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def warn(self, state: Any, name: str) -> None:
        """Log what `load` will refuse in a file of this name that holds this state.

        Never raises: the state is saved, and `weights_only=False` loads it. May be called from any thread.
        """
        how = format_of(name)
        if how is not None and how.is_safetensors:  # there can only be tensors
            return
        try:
            for place, kind, value in _parts(state):
                if kind not in self._seen:
                    self._seen.add(kind)  # first: one that cannot be looked at holds up the others only once
                    if (error := _refusal(value)) is not None:
                        _tell(_key(place), name, error)
        except Exception:  # whatever a class does when it is looked at
            logger.debug("load_check_failed file=%s", name, exc_info=True)


def _tell(key: str, name: str, error: UnsafePickleError) -> None:
    logger.warning(
        "refused_by_load key=%s file=%s: it is saved, but will be refused when it is loaded: %s. To leave it out,"
        " save with ignore_keys=[%r]",
        *(key, name, or_trusted(error), key),
    )


# Where a value is: the place of its container, and its key there. The key is spelled only if it is told.
_Place = tuple["_Place", object] | None


def _key(place: _Place) -> str:
    """Return the '/'-joined key, as `ignore_keys` has it."""
    names: list[str] = []
    while place is not None:
        place, name = place
        # A parameter, for example, would be spelled with all its elements.
        names.append(str(name) if type(name) in _PLAIN else type(name).__qualname__)
    return "/".join(reversed(names))


def _parts(state: Any) -> Iterator[tuple[_Place, Any, Any]]:
    """Yield the place, the kind and the value of everything in the containers, except for plain values."""
    pending: list[tuple[_Place, Any]] = [(None, state)]
    seen: set[int] = set()
    while pending:
        place, value = pending.pop()
        if type(value) not in _CONTAINERS:
            yield place, _kind(value), value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, defaultdict):
            yield place, (defaultdict, value.default_factory), defaultdict(value.default_factory)
        # The rules for a dict's keys and a set's members are stricter.
        is_set = isinstance(value, set | frozenset)
        for each in value if is_set or isinstance(value, dict) else ():
            if type(each) not in _PLAIN:
                yield place, ("key", _kind(each)), {each: None}
        items = () if is_set else value.items() if isinstance(value, dict) else enumerate(value)
        attributes = getattr(value, "__dict__", {}).items()  # `_metadata` of a module's state
        pending += [((place, name), each) for name, each in (*items, *attributes) if type(each) not in _PLAIN]


def _kind(value: Any) -> Any:
    """Return what decides whether a value can be loaded; of objects, that of their first one is taken for all."""
    if not isinstance(value, torch.Tensor):
        return type(value), str(getattr(value, "dtype", ""))
    form = (value.dtype, value.layout, value.is_meta, value.is_nested, value.is_conj(), value.is_neg())
    return type(value), *form, *getattr(value, "__dict__", ())


def _refusal(value: Any) -> UnsafePickleError | None:
    file = io.BytesIO()
    _Pickler(file, _PROTOCOL).dump(value)
    rules = _Rules()
    try:
        rules.check_data((interpret(file.getvalue(), rules),))
    except UnsafePickleError as error:
        return error
    return None


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does, but without the bytes of tensors."""

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if not isinstance(value, torch.UntypedStorage | torch.TypedStorage):
            return None
        dtype: torch.dtype = getattr(value, "dtype", torch.uint8)
        untyped: Any = getattr(value, "_untyped_storage", value)
        kind = getattr(torch, STORAGE_NAMES[dtype]) if dtype in STORAGE_NAMES else torch.UntypedStorage
        return "storage", kind, "", "cpu", untyped.nbytes() // dtype.itemsize


class _Rules(StateRules):
    """Those of `load`, with storages on the meta device."""

    def __init__(self) -> None:
        super().__init__(cast(Records, {}), "meta", None, {})

    def persistent(self, told: Any) -> object:
        dtype = self._storage_dtypes[id(told[1])]
        size_bytes = told[-1] * dtype.itemsize
        return Storage(cast(Any, torch.UntypedStorage)(size_bytes, device="meta"), dtype)
