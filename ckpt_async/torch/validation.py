"""The user's own check of a checkpoint's files, called before their bytes are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from ckpt_async.errors import CheckpointRefusedError, SettingsError

VARIABLE = "CHECKPOINT_VALIDATION_FUNCTION"

# Offsets and lengths in bytes of what will be read; None: the whole file.
Specs = Sequence[tuple[int, int]] | None
ValidationFunction = Callable[[str, Specs], bool]


def validation_function(
    given: ValidationFunction | None = None, environment: Mapping[str, str] = os.environ
) -> ValidationFunction | None:
    """Return `given`, or else the function that CHECKPOINT_VALIDATION_FUNCTION names, or else None.

    The variable has the form `package.module.function`, as in Composer. Raises SettingsError if it does not lead to
    something that can be called: a check that was asked for is never skipped.
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


def remote_validation_function(given: ValidationFunction | None) -> ValidationFunction | None:
    """Return `given`, for files that are read in ranges where they are: it is told their addresses in the store.

    Raises SettingsError if the environment names a function instead, whose contract is a local path.
    """
    if given is None and (name := os.environ.get(VARIABLE)):
        raise SettingsError(
            f"{VARIABLE}={name!r} is called with local paths, but a sharded checkpoint is read from the store",
            hint="fetch it (restore.fetch) and load the folder with torch.distributed.checkpoint, or pass validate=, a"
            " function that is called with addresses in the store, and unset the variable",
        )
    return given


def validate(function: ValidationFunction | None, path: str, specs: Specs) -> None:
    """Call `function(path, specs)`; raise CheckpointRefusedError unless it returns true. None accepts everything."""
    if function is not None and not function(path, specs):
        name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        raise CheckpointRefusedError(f"{path} was refused by {name}")
