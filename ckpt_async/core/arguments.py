"""Checks of callers' arguments: each becomes a plain value, or an error of one sentence is raised. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ckpt_async.errors import CkptAsyncError, InvalidNameError, SettingsError

MAX_SHOWN = 80


def shown(value: object) -> str:
    """Return the `repr` of a value for a message, shortened if it is long.

    Also works for numbers that Python refuses to format because they have too many digits.
    """
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def is_whole(number: Any) -> bool:
    """Return whether a value may be taken for a whole number.

    Those of numpy and tensors may; a bool of any library is a mistake.
    """
    if isinstance(number, bool) or "bool" in str(getattr(number, "dtype", "")):
        return False
    try:
        operator.index(number)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def whole(number: Any, name: str, low: int, high: int, error: type[CkptAsyncError] = InvalidNameError) -> int:
    """Return `number` as an int. Raises `error` unless it is a whole number from `low` to `high`."""
    if is_whole(number) and low <= (value := operator.index(number)) <= high:
        return value
    raise error(f"{name}={shown(number)} must be a whole number from {low} to {high}")


def check_spelling(
    given: Iterable[str], known: Collection[str], called_here: Mapping[str, str] | None = None
) -> None:
    """Raise SettingsError for an argument that is nearly one of the `known` ones, or has another name here (as
    `called_here` says). Others may be for somebody else.
    """
    import difflib

    for name in given:
        if name in (called_here or {}):
            raise SettingsError(f"unknown argument {name!r}", hint=f"here it is {(called_here or {})[name]}")
        if name not in known and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.85)):
            raise SettingsError(f"unknown argument {name!r}", hint=f"did you mean {close[0]}?")


def path(value: Any, name: str, error: type[CkptAsyncError] = SettingsError) -> str:
    """Return a path as text. Raises `error` if it is none, or bytes."""
    to_text = getattr(type(value), "__fspath__", None)
    text = to_text(value) if to_text is not None else value
    if isinstance(text, str):
        return text
    what = "must be text, not bytes" if isinstance(text, bytes) else "is not a path"
    raise error(f"{name}={shown(value)} {what}")


def seconds(value: Any, name: str) -> float:
    """Return a number of seconds as a float; infinity means for ever.

    It may be a number of another library. Raises SettingsError for anything else.
    """
    if not isinstance(value, str | bytes | bool):
        try:
            number = float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not math.isnan(number):
            return number
    raise SettingsError(f"{name}={shown(value)} must be a number of seconds")
