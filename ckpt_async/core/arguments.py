"""What callers pass, as the plain value that it means, or a refusal in one sentence. Pure."""

from __future__ import annotations

import math
import operator
from typing import Any

from ckpt_async.errors import CkptAsyncError, InvalidNameError, SettingsError

MAX_SHOWN = 80


def shown(value: object) -> str:
    """For a message: not all of what is long, and no more digits than Python writes."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def is_whole(number: Any) -> bool:
    """Whether it may be taken for a whole number: numpy's may, and a tensor's; a bool of anybody's is a mistake."""
    if isinstance(number, bool) or "bool" in str(getattr(number, "dtype", "")):
        return False
    try:
        operator.index(number)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def whole(number: Any, name: str, low: int, high: int, error: type[CkptAsyncError] = InvalidNameError) -> int:
    """Raises `error` unless it is one, from `low` to `high`."""
    if is_whole(number) and low <= (value := operator.index(number)) <= high:
        return value
    raise error(f"{name}={shown(number)} must be a whole number from {low} to {high}")


def seconds(value: Any, name: str) -> float:
    """A number of seconds, also of another library; infinite is for ever. Raises SettingsError."""
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
