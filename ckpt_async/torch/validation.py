"""The user's own verdict on a checkpoint's files, asked before their bytes are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from ckpt_async.errors import CheckpointRefusedError, SettingsError

VARIABLE = "CHECKPOINT_VALIDATION_FUNCTION"

# Offset and length in bytes of what will be read; None: the whole file.
Specs = Sequence[tuple[int, int]] | None
ValidationFunction = Callable[[str, Specs], bool]


def validation_function(
    given: ValidationFunction | None = None, environment: Mapping[str, str] = os.environ
) -> ValidationFunction | None:
    """`given`, else what CHECKPOINT_VALIDATION_FUNCTION names as `package.module.function` (as in Composer), else None.

    Raises SettingsError if the name leads to nothing that can be called: a check that was asked for is never skipped.
    """
    name = environment.get(VARIABLE, "")
    if given is not None or not name:
        return given
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"{VARIABLE}={name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise SettingsError(f"{VARIABLE}={name!r} is not a function")
    function: ValidationFunction = found
    return function


def validate(function: ValidationFunction | None, path: str, specs: Specs) -> None:
    """Ask `function(path, specs)`; raise CheckpointRefusedError unless it says yes. None says yes to everything."""
    if function is not None and not function(path, specs):
        name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        raise CheckpointRefusedError(f"{path} was refused by {name}")
