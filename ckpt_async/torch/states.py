"""Leaves parts out of a loaded state, finds the model in it, and puts it into a model."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_async.core import naming
from ckpt_async.errors import FormatError, StateMismatchError

logger = logging.getLogger(__name__)

IgnoreKeys = Sequence[str] | Callable[[Any], None]


def checked_keys(ignore_keys: IgnoreKeys) -> IgnoreKeys:
    """Return `ignore_keys` after checking it, so that a mistake raises before anything is loaded."""
    return ignore_keys if callable(ignore_keys) else naming.several(ignore_keys, "ignore_keys")


def drop(state: Any, ignore_keys: IgnoreKeys) -> None:
    """Remove what `ignore_keys` (see `load`) matches from a loaded state, in place."""
    if callable(ignore_keys):
        ignore_keys(state)
        return
    unmatched = {pattern: re.compile(fnmatch.translate(pattern)) for pattern in ignore_keys}
    patterns = dict(unmatched)
    pending: list[tuple[Any, str]] = [(state, "")]
    seen = {id(state)}  # in a file, a dict may contain itself
    while patterns and pending:
        container, prefix = pending.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container) - 1, -1, -1):
            path = f"{prefix}{key}"
            matching = [glob for glob, pattern in patterns.items() if pattern.match(path)]
            for each in matching:
                unmatched.pop(each, None)
            value = container[key]
            if matching:
                del container[key]
            elif isinstance(value, (dict, list)) and id(value) not in seen:
                seen.add(id(value))
                pending.append((value, f"{path}/"))
    for each in unmatched:
        logger.warning("ignore_keys_unmatched glob=%s", each)


def matching(paths: Mapping[str, Sequence[object]], globs: Sequence[str], *, warns: bool = True) -> set[str]:
    """Return the names that a glob matches, by their '/'-joined keys or those of a container they are in.

    A glob that matches nothing is logged as a warning.
    """
    found: set[str] = set()
    for glob in globs:
        pattern = re.compile(fnmatch.translate(glob))
        taken = {
            name
            for name, path in paths.items()
            if any(pattern.match("/".join(map(str, path[:end]))) for end in range(1, len(path) + 1))
        }
        if warns and not taken:
            logger.warning("ignore_keys_unmatched glob=%s", glob)
        found |= taken
    return found


def model_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model's part of a training checkpoint, without the optimizer and the rest.

    It looks where common trainers put the model: `state/model` (Composer), `model`, `model_state_dict`, `state_dict`
    (Lightning), `module` (DeepSpeed). A state that holds only tensors is returned as a whole. Raises FormatError if
    there is no model.
    """
    found: Any = state
    for key in model_path(state):
        found = found[key]
    return found  # type: ignore[no-any-return]


def model_path(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that lead to `model_state`; none if the state itself is the model.

    Raises FormatError if there is no model.
    """
    for path in (("state", "model"), ("model",), ("model_state_dict",), ("state_dict",), ("module",)):
        found: Any = state
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            return path
    if state and all(isinstance(each, torch.Tensor) for each in state.values()):
        return ()
    raise FormatError(f"there is no model in it: it has {', '.join(map(str, list(state)[:20])) or 'nothing'}")


@dataclass(frozen=True, slots=True)
class KeyReport:
    """How a model and a state differ: keys only in the model, keys only in the state, and different shapes."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        parts = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("with a different shape", self.reshaped),
        )
        return "; ".join(
            f"{len(keys)} {what}: {', '.join(keys[:10])}{', …' * (len(keys) > 10)}"
            for what, keys in parts
            if keys
        )


def load_into(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True, ignore_wrappers: bool = False
) -> KeyReport:
    """Load the model's part of a state (see `model_state`) into a model, and return the differences.

    With `strict`, any difference raises StateMismatchError before anything is changed. Without, the keys that fit are
    loaded. With `ignore_wrappers`, keys are the same that differ only by what wrappers add: a leading `module.` (DDP)
    and `_orig_mod.` (torch.compile), on either side.
    """
    found, own = model_state(state), model.state_dict()
    if ignore_wrappers:
        found = _named_as(own, found)
    report = differences(model, found)
    if strict and report:
        is_wrapped = len(own.keys() & found.keys()) < len(own.keys() & _named_as(own, found).keys())
        raise StateMismatchError(
            f"the state does not fit the model: {report}",
            hint="with ignore_wrappers=True, `module.` of DDP and `_orig_mod.` of torch.compile do not count"
            if is_wrapped
            else "",
        )
    fitting = {key: found[key] for key in own.keys() & found.keys() if _fits(found[key], own[key])}
    model.load_state_dict(fitting, strict=False)
    return report


def _named_as(own: Mapping[str, Any], found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `found` under the keys of `own`, where the two differ only by what wrappers add."""
    names = {_bare(key): key for key in own}
    renamed = {names.get(_bare(key), key): value for key, value in found.items()}
    return renamed if len(renamed) == len(found) else found  # two keys would become one


def _bare(key: str) -> str:
    return re.sub(r"^(module\.)+", "", re.sub(r"(^|\.)_orig_mod\.", r"\1", key))


def differences(model: torch.nn.Module, found: Mapping[str, Any]) -> KeyReport:
    own = model.state_dict()
    return KeyReport(
        missing=tuple(sorted(own.keys() - found.keys())),
        unexpected=tuple(sorted(found.keys() - own.keys())),
        reshaped=tuple(
            f"{key} {_look(found[key])} for {_look(own[key])}"
            for key in sorted(own.keys() & found.keys())
            if not _fits(found[key], own[key])
        ),
    )


def _fits(value: Any, own: Any) -> bool:
    if not isinstance(own, torch.Tensor):
        return True
    return isinstance(value, torch.Tensor) and value.shape == own.shape


def _look(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
