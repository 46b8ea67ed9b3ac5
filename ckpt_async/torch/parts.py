"""Captures a trainer's state from its parts and restores it into them.

A part is anything with `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ckpt_async.core import arguments
from ckpt_async.errors import SettingsError, StateMismatchError
from ckpt_async.torch import rng as generators
from ckpt_async.torch.states import differences, load_into

logger = logging.getLogger(__name__)

# What torch's optimizers, and those made after them, keep for every element of a parameter.
_PER_ELEMENT = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "prev", "step_size", "ax"),
    )
)


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

    Before anything is changed, everything is checked: the parts, the keys and shapes of models, the groups and shapes
    of optimizers, the random number generators. With `strict`, what is missing or differs raises StateMismatchError;
    without, the log names it and what fits is loaded (an optimizer whole or not at all). Only other parts know what
    fits them, so they come first; if one raises, StateMismatchError names it, and models, optimizers and generators are
    unchanged. The generators come last, because loading may use them. With `rng`, a rank that saved none keeps its own.

    The parts get copies: training does not change `state`, which can be restored again.
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
    has_rng = rng and generators.KEY in state
    set_rng = generators.checked_rng(state[generators.KEY]) if has_rng else None
    copied = [(path, part, _copied(part, own)) for path, part, own in wanted]
    for path, part, own in sorted(copied, key=lambda each: _is_known(each[1])):
        if path not in unfit:
            _load(path, part, own)
        elif _is_model(part):
            load_into(part, {"model": own}, strict=False)
    if set_rng is not None:
        set_rng()
    elif has_rng:
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
    if not isinstance(own, Mapping | list | tuple):
        raise StateMismatchError(f"{path} has the parts {keys[:20]}, the state a {type(own).__name__}")
    theirs = list(own) if isinstance(own, Mapping) else list(range(len(own)))
    if isinstance(own, Mapping) != isinstance(part, Mapping) or set(keys) != set(theirs):
        raise StateMismatchError(f"{path} has the parts {keys[:20]}, the state {theirs[:20]}")
    return [each for key in keys for each in _pairs(f"{path}/{key}", part[key], own[key])]


def _is_model(part: Any) -> bool:
    return isinstance(part, torch.nn.Module)


def _is_optimizer(part: Any) -> bool:
    """Return whether this is an optimizer that loads as torch's do. Of others, nothing is known."""
    return getattr(type(part), "load_state_dict", None) is torch.optim.Optimizer.load_state_dict


def _is_known(part: Any) -> bool:
    return _is_model(part) or _is_optimizer(part)


def _fits(path: str, part: Any, own: Any, *, strict: bool) -> bool:
    """Return whether the state is one that a model or optimizer can load. Any other part checks its state itself."""
    if not _is_known(part):
        return True
    if not isinstance(own, Mapping) or not (_is_model(part) or _is_of_optimizer(own)):
        kind = "a model's" if _is_model(part) else "an optimizer's"
        raise StateMismatchError(f"the state has a {type(own).__name__} as {path!r}, not {kind}")
    if _is_model(part):
        report, otherwise, hint = str(differences(part, own)), "what fits is loaded", "strict=False"
    else:
        report, otherwise = _optimizer_differences(part, own), "left as it is"
        hint = "strict=False leaves it as it is; its own load_state_dict checks no shapes"
    if report and strict:
        raise StateMismatchError(f"the state does not fit {path}: {report}", hint=hint)
    if report:
        logger.warning("state_does_not_fit part=%s %s; %s", path, report, otherwise)
    return not report


def _is_of_optimizer(own: Mapping[str, Any]) -> bool:
    groups, values = own.get("param_groups"), own.get("state")
    are_groups = isinstance(groups, list) and all(
        isinstance(each, Mapping) and "params" in each for each in groups
    )
    return are_groups and isinstance(values, Mapping)


def _optimizer_differences(optimizer: torch.optim.Optimizer, own: Mapping[str, Any]) -> str:
    """Return how a state differs from what the optimizer can use: groups, order, shapes. torch checks only groups."""
    ours, theirs = optimizer.param_groups, own["param_groups"]
    if len(theirs) != len(ours):
        return f"{len(theirs)} groups of parameters for {len(ours)}"
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if len(their["params"]) != len(our["params"]):
            return f"{len(their['params'])} parameters in group {number} for {len(our['params'])}"
        names, own_names = their.get("param_names") or (), our.get("param_names") or ()
        # Other names prove nothing: they may come from DDP or torch.compile.
        if names != own_names and sorted(names) == sorted(own_names):
            return f"the parameters of group {number} are in another order"
    numbers = itertools.chain.from_iterable(each["params"] for each in theirs)
    parameters = dict(
        zip(numbers, itertools.chain.from_iterable(each["params"] for each in ours), strict=True)
    )
    wrong = [
        f"{key} {tuple(value.shape)} for {tuple(parameters[number].shape)} of parameter {number}"
        for number, values in own["state"].items()
        if number in parameters and isinstance(values, Mapping)
        for key, value in values.items()
        if key in _PER_ELEMENT and isinstance(value, torch.Tensor) and value.shape != parameters[number].shape
    ]
    more = ", …" * (len(wrong) > 10)
    return f"{len(wrong)} with a different shape: {', '.join(wrong[:10])}{more}" if wrong else ""


def _copied(part: Any, own: Any) -> Any:
    """Return a state that the part may keep, except for tensors, which `_load` copies for optimizers."""
    if not _is_known(part):
        return copy.deepcopy(own)
    if _is_optimizer(part):
        return own
    copied = copy.copy(own)  # with the attributes that torch adds to a model's state
    for key, value in own.items():
        if not isinstance(value, torch.Tensor):
            copied[key] = copy.deepcopy(value)
    return copied


def _load(path: str, part: Any, own: Any) -> None:
    try:
        part.load_state_dict(own)
    except Exception as error:
        if _is_known(part):
            raise
        raise StateMismatchError(
            f"{path} does not take its state: {type(error).__name__}: {error}",
            hint="models, optimizers and random numbers are unchanged",
        ) from error
    if _is_optimizer(part):
        # It holds the tensors of the state that it did not have to move. (Copied before, all would be in memory twice.)
        for parameter, values in part.state.items():
            part.state[parameter] = copy.deepcopy(values)


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
