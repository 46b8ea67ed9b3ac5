"""Random number generators: python's, numpy's, torch's and those of the GPUs, captured as plain data and put back.

What `capture_rng` gives is of tensors and numbers only, so that any `torch.load(weights_only=True)` reads it. What
other trainers save is understood too: Composer's `rng`, a list by rank, and OLMo's dict, both with tuples as `random`
and numpy have them.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt_async.errors import FormatError
from ckpt_async.torch.agreement import is_alone, own_rank
from ckpt_async.torch.formats import load

# Composer's key in a state; all of it, and no other that has `rng` in its name: a parameter may be called so.
KEY = "rng"

_KINDS = ("python", "numpy", "torch", "cuda")
_SHARDED = re.compile(rf"rng\.([0-9]+)\.(?:{'|'.join(_KINDS)})(?:\..+)?")


def capture_rng(*, all_ranks: bool = False, group: dist.ProcessGroup | None = None) -> Any:
    """This rank's random number generators, as a dict: `python`, `torch`, `numpy` if it is loaded, `cuda` (a list, of
    all devices that this process sees) if there are any.

    With `all_ranks`, a list of every rank's in the order of ranks, on every rank, for a checkpoint that one rank
    writes. It is a collective then.
    """
    if not all_ranks:
        return _capture()
    if is_alone():
        return [_capture()]
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, _capture(), group=group)
    return states


def restore_rng(states: Any, *, rank: int | None = None) -> bool:
    """Go on with the random numbers where they were captured. False, and nothing is changed, if there are none for this
    rank: there were fewer ranks then.

    `states` is what `capture_rng` gave, for one rank or for all; Composer's list or OLMo's dict; or a state that has
    one of these as `rng`. Of a list this rank's is taken (`rank`, else torch.distributed's, else the launcher's); a
    dict is this rank's own. Generators that are not in it, or for which this process has no library or device, keep
    their state.

    Raises FormatError, before anything is changed, if it is nothing of the kind.
    """
    if isinstance(states, Mapping) and not states.keys() & set(_KINDS):
        if KEY not in states:
            raise FormatError(f"no random number generators in it: it has {_names(states)}")
        states = states[KEY]
    if isinstance(states, Sequence) and not isinstance(states, str | bytes):
        own = own_rank() if rank is None else rank
        if not 0 <= own < len(states) or states[own] is None:
            return False
        states = states[own]
    if not isinstance(states, Mapping) or not states.keys() & set(_KINDS):
        raise FormatError(f"no random number generators in it: it is a {type(states).__name__}")
    _restore(states)
    return True


def ranks_with_rng(names: Iterable[str]) -> list[int]:
    """Which ranks saved theirs into a sharded checkpoint of Composer, by the names in it (`state_dict_metadata` of
    `load_metadata`): `rng.0.torch` counts, a layer called `rng_proj` does not.
    """
    return sorted({int(match[1]) for name in names if (match := _SHARDED.fullmatch(name))})


def save_rng_state(folder: str | os.PathLike[str], rank: int) -> Path:
    """Write this rank's generators into `folder`, for a checkpoint that every rank writes, and return the path: a
    finished file, to be enqueued like any other shard. No collective.
    """
    path = _path(folder, rank)
    torch.save(_capture(), path)
    return path


def load_rng_state(folder: str | os.PathLike[str], rank: int) -> bool:
    """Put back what this rank saved. False, and nothing is changed, if it saved none: there were fewer ranks then."""
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


def _restore(states: Mapping[str, Any]) -> None:
    try:
        python = _python(states["python"]) if "python" in states else None
        numpy = _numpy(states["numpy"]) if states.get("numpy") is not None else None
        cpu = _bytes(states["torch"]) if "torch" in states else None
        cuda = states.get("cuda")
        devices = [_bytes(each) for each in ([cuda] if isinstance(cuda, torch.Tensor) else cuda or ())]
        # What setting them checks is checked on generators that nobody uses.
        if python is not None:
            random.Random().setstate(python)
        if cpu is not None:
            torch.Generator().set_state(cpu)
        if numpy is not None and (module := sys.modules.get("numpy")):
            module.random.RandomState().set_state(numpy)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"not the state of random number generators: {str(error)[:300]}") from error
    if python is not None:
        random.setstate(python)
    if cpu is not None:
        torch.set_rng_state(cpu)
    if numpy is not None and (module := sys.modules.get("numpy")):
        module.random.set_state(numpy)
    if devices and torch.cuda.is_available():
        if isinstance(cuda, torch.Tensor):  # as Composer and OLMo save it: of the device that the rank had
            torch.cuda.set_rng_state(devices[0])
        else:
            torch.cuda.set_rng_state_all(devices[: torch.cuda.device_count()])


def _python(told: Any) -> tuple[Any, ...]:
    """As `random.setstate` wants it: from our dict, or from what `random.getstate` gave, by way of a file or not."""
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
