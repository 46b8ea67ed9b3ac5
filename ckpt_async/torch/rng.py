"""Random number generators: Python's, numpy's, torch's and those of the GPUs, captured as plain data and restored.

`capture_rng` returns only tensors and numbers, so that any `torch.load(weights_only=True)` reads them. What other
trainers save is understood, too: Composer's `rng`, a list by rank, and OLMo's dict, both with the tuples of `random`
and numpy.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt_async.errors import FormatError
from ckpt_async.torch.agreement import is_alone, own_rank
from ckpt_async.torch.formats import load

# Composer's key in a state. Other keys that contain `rng` do not count: a parameter may have such a name.
KEY = "rng"

_KINDS = ("python", "numpy", "torch", "cuda")
_SHARDED = re.compile(rf"rng\.([0-9]+)\.(?:{'|'.join(_KINDS)})(?:\..+)?")


def capture_rng(*, all_ranks: bool = False) -> Any:
    """Return this rank's random number generators, as a dict.

    Its keys are `python`, `torch`, `numpy` if it is loaded, and `cuda` (a list, of all devices that this process sees)
    if there are any. With `all_ranks`, return on every rank a list of every rank's dict in the order of ranks, for a
    checkpoint that one rank writes; this is a collective.
    """
    if not all_ranks:
        return _capture()
    if is_alone():
        return [_capture()]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, _capture())
    return states


def restore_rng(states: Any, *, rank: int | None = None) -> bool:
    """Continue the random numbers where they were captured. Return False, and change nothing, if this rank has none.

    That is the case if there were fewer ranks when they were captured. `states` is what `capture_rng` returned, for one
    rank or for all; Composer's list or OLMo's dict; or a state that has one of these as `rng`. From a list this rank's
    element is taken (`rank`, or else torch.distributed's, or else the launcher's); a dict is this rank's own.
    Generators that are not in it, or for which this process has no library or device, keep their state.

    Raises FormatError, before anything is changed, if it is none of these.
    """
    set_all = checked_rng(states, rank=rank)
    if set_all is not None:
        set_all()
    return set_all is not None


def checked_rng(states: Any, *, rank: int | None = None) -> Callable[[], None] | None:
    """Check what `restore_rng` is given, and return what restores it; None if this rank has none."""
    if isinstance(states, Mapping) and not states.keys() & set(_KINDS):
        if KEY not in states:
            raise FormatError(f"there are no random number generators in it: it has {_names(states)}")
        states = states[KEY]
    if isinstance(states, Sequence) and not isinstance(states, str | bytes):
        own = own_rank() if rank is None else rank
        if not 0 <= own < len(states) or states[own] is None:
            return None
        states = states[own]
    if not isinstance(states, Mapping) or not states.keys() & set(_KINDS):
        raise FormatError(f"there are no random number generators in it: it is a {type(states).__name__}")
    return _checked(states)


def ranks_with_rng(names: Iterable[str]) -> list[int]:
    """Return which ranks saved their generators into a sharded checkpoint of Composer, by the names in it.

    The names are those of `state_dict_metadata` of `load_metadata`: `rng.0.torch` counts, a layer called `rng_proj`
    does not.
    """
    return sorted({int(match[1]) for name in names if (match := _SHARDED.fullmatch(name))})


def save_rng_state(folder: str | os.PathLike[str], rank: int) -> Path:
    """Write this rank's generators into `folder`, for a checkpoint that every rank writes, and return the file's path.

    The file is complete, and is to be enqueued like any other shard. Not a collective.
    """
    path = _path(folder, rank)
    torch.save(_capture(), path)
    return path


def load_rng_state(folder: str | os.PathLike[str], rank: int) -> bool:
    """Restore what this rank saved.

    Return False, and change nothing, if it saved none because there were fewer ranks then.
    """
    path = _path(folder, rank)
    return path.exists() and restore_rng(load(path))


def _path(folder: str | os.PathLike[str], rank: int) -> Path:
    return Path(folder) / f"rng-rank{rank}.pt"


def _names(states: Mapping[Any, Any]) -> str:
    return ", ".join(str(each)[:100] for each in list(states)[:20]) or "nothing"


def _capture() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if numpy := sys.modules.get("numpy"):
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "name": name,
            "words": torch.tensor(keys.tolist()),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _checked(states: Mapping[str, Any]) -> Callable[[], None]:
    try:
        python = _python(states["python"]) if "python" in states else None
        numpy = _numpy(states["numpy"]) if states.get("numpy") is not None else None
        cpu = _bytes(states["torch"]) if "torch" in states else None
        cuda = states.get("cuda")
        devices = [_bytes(each) for each in ([cuda] if isinstance(cuda, torch.Tensor) else cuda or ())]
        # Setting a state also checks it, so it is set on unused generators first.
        if python is not None:
            random.Random().setstate(python)
        if cpu is not None:
            torch.Generator().set_state(cpu)
        if numpy is not None and (module := sys.modules.get("numpy")):
            module.random.RandomState().set_state(numpy)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"not the state of random number generators: {str(error)[:300]}") from error

    def set_all() -> None:
        if python is not None:
            random.setstate(python)
        if cpu is not None:
            torch.set_rng_state(cpu)
        if numpy is not None and (module := sys.modules.get("numpy")):
            module.random.set_state(numpy)
        if devices and torch.cuda.is_available():
            if isinstance(
                cuda, torch.Tensor
            ):  # as Composer and OLMo save it: only that of the rank's own device
                torch.cuda.set_rng_state(devices[0])
            else:
                torch.cuda.set_rng_state_all(devices[: torch.cuda.device_count()])

    return set_all


def _python(told: Any) -> tuple[Any, ...]:
    """Return the state as `random.setstate` wants it, from our dict or from what `random.getstate` returned."""
    if isinstance(told, Mapping):
        return told["version"], tuple(told["words"].tolist()), told["gauss"]
    version, words, gauss = told
    return version, tuple(words), gauss


def _numpy(told: Any) -> tuple[Any, ...]:
    if isinstance(told, Mapping) and "words" in told:
        told = (told["name"], told["words"], told["position"], told["has_gauss"], told["gauss"])
    name, words, *others = told
    import numpy as np

    return name, np.array(words.tolist() if hasattr(words, "tolist") else words, dtype=np.uint32), *others


def _bytes(told: Any) -> torch.Tensor:
    if not isinstance(told, torch.Tensor) or told.dtype != torch.uint8 or told.dim() != 1:
        raise TypeError(f"a {type(told).__name__} where torch's generators have bytes")
    return told.cpu()
