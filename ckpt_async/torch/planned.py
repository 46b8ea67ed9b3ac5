"""A state whose tensors are stood in for, until the whole ones are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt_async.errors import DamagedCheckpointError, FormatError
from ckpt_async.torch.assembly import Box, Whole

WholeOf = Callable[[torch.Tensor, str], Whole]


class Visits:
    """Makes sure that each container of a state is planned once, however often it is in the state."""

    def __init__(self) -> None:
        # By `id`: the container, so that no other gets this `id`, and its result, which is None until known.
        self._found: dict[int, tuple[Any, Any]] = {}
        self._depth = 0

    def once(self, value: Any, name: str, plan: Callable[[], Any]) -> Any:
        if id(value) in self._found:
            found = self._found[id(value)][1]
            if found is None:
                raise FormatError(
                    f"the state contains itself at {name[:200]!r}: it cannot be written as a single file"
                )
            return found
        if self._depth == MAX_DEPTH:
            raise FormatError(f"the state has more than {MAX_DEPTH} containers within each other")
        self._found[id(value)] = (value, None)
        self._depth += 1
        found = plan()
        self._depth -= 1
        self._found[id(value)] = (value, found)
        return found


@dataclass(slots=True)
class Plan:
    """A state in which tensors on the meta device stand in for the whole tensors, which are found by their `id`."""

    state: Any = None
    wholes: dict[int, Whole] = field(default_factory=dict)

    def whole(self, name: str, shape: Sequence[int], dtype: torch.dtype, box: Box | None = None) -> Whole:
        are_sizes = all(type(each) is int and each >= 0 for each in shape)
        # Also if a dimension is 0: torch computes strides for that, too.
        if not are_sizes or math.prod(each or 1 for each in shape) * dtype.itemsize >= 1 << 63:
            raise DamagedCheckpointError(
                f"{name[:200]!r} has a shape that no tensor can have, {tuple(shape)!s:.200}"
            )
        stand_in = torch.empty(tuple(shape), dtype=dtype, device="meta")
        made = Whole(name, stand_in, tuple(shape) if box is None else box)
        self.wholes[id(stand_in)] = made
        return made

    def planned(self, value: Any, name: str, whole_of: WholeOf) -> Any:
        """Return the value with stand-ins for its tensors; `whole_of(tensor, name)` returns the whole of each."""
        return self._planned(value, name, whole_of, Visits())

    def _planned(self, value: Any, name: str, whole_of: WholeOf, visits: Visits) -> Any:
        if isinstance(value, torch.Tensor):
            return whole_of(value, name).stand_in
        if isinstance(value, dict | list) or type(value) is tuple:
            return visits.once(value, name, lambda: self._planned_items(value, name, whole_of, visits))
        return value

    def _planned_items(self, value: Any, name: str, whole_of: WholeOf, visits: Visits) -> Any:
        if isinstance(value, dict):
            for key in value:
                value[key] = self._planned(value[key], f"{name}/{key}", whole_of, visits)
            return value
        found = [self._planned(each, f"{name}/{at}", whole_of, visits) for at, each in enumerate(value)]
        if type(value) is tuple:
            return tuple(found)
        value[:] = found
        return value

    def in_memory(self, tensor: torch.Tensor, name: str) -> Whole:
        made = self.whole(name, tensor.shape, tensor.dtype)
        made.content = tensor
        return made


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
