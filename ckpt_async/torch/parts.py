"""Captures a trainer's state from its parts and restores it into them.

A part is anything with `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ckpt_async.core import arguments
from ckpt_async.errors import SettingsError, StateMismatchError
from ckpt_async.torch import rng as generators
from ckpt_async.torch.states import differences, load_into

logger = logging.getLogger(__name__)


def capture(*, rng: bool | Literal["all"] = True, **parts: Any) -> dict[str, Any]:
    """Return the state of these parts, by their names, to be saved.

        state = capture(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader, step=step)

    For a part with `state_dict` it is what that returns; a list, tuple or dict of such parts is captured part by part.
    Anything else is a plain value and kept as it is.

    DDP, DataParallel and torch.compile are unwrapped: the keys are those of the model itself. `rng` adds this rank's
    random number generators as `rng`; "all" adds those of all ranks, in one collective, for a checkpoint that one rank
    writes. The tensors are those of the parts, not copies. Under FSDP, get models and optimizers from
    `torch.distributed.checkpoint.state_dict.get_state_dict`, and the other parts from this function.
    """
    state = {name: _captured(part) for name, part in parts.items()}
    if rng:
        state[generators.KEY] = generators.capture_rng(all_ranks=rng == "all")
    return state


def restore(
    state: Mapping[str, Any], *, strict: bool = True, rng: bool = True, **parts: Any
) -> dict[str, Any]:
    """Put what `capture` returned back into the parts. Return the rest: plain values, and what has no part here.

        rest = restore(state, model=model, optimizer=optimizer, scheduler=scheduler)
        first_step = rest["step"] + 1

    Parts are restored in the order of the arguments; the random number generators come last, because loading may use
    them. With `strict`, a part that is missing in the state, or a model whose keys or shapes differ, raises
    StateMismatchError; without, the log names them and what fits is loaded. Names, keys and shapes are checked before
    anything is changed. With `rng`, a rank that saved no generators keeps its own.
    """
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"state={arguments.shown(state)} is not what `capture` returned",
            hint="`load_latest` returns None where nothing was saved yet: a fresh start",
        )
    wanted: list[tuple[str, Any, Any]] = []
    for name, part in parts.items():
        if name not in state:
            if strict:
                has = ", ".join(map(str, list(state)[:20])) or "nothing"
                raise StateMismatchError(f"the state has no {name!r}: it has {has}", hint="strict=False")
            logger.warning("part_not_in_state name=%s; left as it is", name)
            continue
        wanted += _pairs(name, part, state[name])
    unfit = {path for path, part, own in wanted if not _fits(path, part, own, strict=strict)}
    for path, part, own in wanted:
        if path in unfit:
            load_into(part, {"model": own}, strict=False)
        else:
            part.load_state_dict(own)
    has_rng = rng and generators.KEY in state
    if has_rng and not generators.restore_rng(state[generators.KEY]):
        logger.warning("rng_not_saved_by_this_rank; it keeps its own")
    used = {*parts, *((generators.KEY,) if has_rng else ())}
    return {name: value for name, value in state.items() if name not in used}


def _captured(part: Any) -> Any:
    if hasattr(part, "state_dict"):
        return _itself(part).state_dict()
    if _is_of_parts(part):
        if isinstance(part, Mapping):
            return {name: _captured(each) for name, each in part.items()}
        return [_captured(each) for each in part]
    return part


def _pairs(path: str, part: Any, own: Any) -> list[tuple[str, Any, Any]]:
    """Pair each part with its state. Raises StateMismatchError if the parts differ, SettingsError for plain values."""
    if hasattr(part, "load_state_dict"):
        return [(path, _itself(part), own)]
    if not _is_of_parts(part):
        raise SettingsError(
            f"{path} has no load_state_dict, so its state cannot be restored",
            hint="plain values are in the result of `restore`",
        )
    keys = list(part) if isinstance(part, Mapping) else list(range(len(part)))
    theirs = list(own) if isinstance(own, Mapping) else list(range(len(own)))
    if isinstance(own, Mapping) != isinstance(part, Mapping) or set(keys) != set(theirs):
        raise StateMismatchError(f"{path} has the parts {keys[:20]}, the state {theirs[:20]}")
    return [each for key in keys for each in _pairs(f"{path}/{key}", part[key], own[key])]


def _fits(path: str, part: Any, own: Any, *, strict: bool) -> bool:
    """Return whether a model has the keys and shapes of its state. Any other part checks its state itself."""
    if not isinstance(part, torch.nn.Module):
        return True
    if not isinstance(own, Mapping):
        raise StateMismatchError(f"the state has a {type(own).__name__} as {path!r}, not a model's")
    report = differences(part, own)
    if report and strict:
        raise StateMismatchError(f"the state does not fit {path}: {report}", hint="strict=False")
    if report:
        logger.warning("state_does_not_fit part=%s %s; what fits is loaded", path, report)
    return not report


def _is_of_parts(part: Any) -> bool:
    values = (
        list(part.values()) if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ()
    )
    return bool(values) and all(hasattr(each, "state_dict") or _is_of_parts(each) for each in values)


def _itself(part: Any) -> Any:
    """Return the model inside DDP, DataParallel or torch.compile."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    while isinstance(part, torch.nn.Module):
        inner = part.module if isinstance(part, wrappers) else getattr(part, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            break
        part = inner
    return part
