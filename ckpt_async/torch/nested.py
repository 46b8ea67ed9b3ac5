"""Rebuilds a nested state from DCP's names: each value has a path of keys, which are positions within lists. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_async.errors import DamagedCheckpointError, FormatError

# Functions that walk through a state recurse once for each level.
MAX_DEPTH = 100


class Nested(dict[Any, Any]):
    """A dict or list on the path to a value; a dict that is itself a value is not one."""


def nest(state: Nested, path: Sequence[Any], value: Any) -> None:
    """Put a value at DCP's path of keys; list elements are keyed by position."""
    if not 0 < len(path) <= MAX_DEPTH:
        raise DamagedCheckpointError(f".metadata has a path of {len(path)} keys")
    at: Any = state
    for key in path[:-1]:
        at = at.setdefault(key, Nested())
        if not isinstance(at, Nested):
            raise DamagedCheckpointError(f".metadata has {_told(path)} below a value")
    if path[-1] in at:
        raise DamagedCheckpointError(f".metadata has two values at {_told(path)}")
    at[path[-1]] = value


def with_lists(value: Any, path: tuple[Any, ...] = ()) -> Any:
    if not isinstance(value, Nested):
        return value
    found = {key: with_lists(each, (*path, key)) for key, each in value.items()}
    if not found or any(type(key) is not int for key in found):
        return found
    places = sorted(found)
    if places != list(range(len(places))):
        missing = next((at for at, place in enumerate(places) if at != place))
        raise FormatError(
            f"the list at {_told(path)} has nothing at position {missing}: torch's DCP does not save an empty dict",
            hint="load it with ckpt_async.torch.load_latest, or torch's dcp.load, into a state of this structure",
        )
    return [found[place] for place in places]


def _told(path: Sequence[Any]) -> str:
    return repr("/".join(map(str, path))[:200])
