"""Prints a command's messages on stderr, which are neither results nor log records.

Each is a line of text or, with `--log-format json`, an object like those of the log.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import traceback
from collections.abc import Sequence

_is_json = False  # one command runs in a process at a time


def set_form(arguments: Sequence[str]) -> None:
    """Choose text or JSON by the command line, even if that makes no sense otherwise."""
    global _is_json  # noqa: PLW0603
    pairs = itertools.pairwise(arguments)
    _is_json = "--log-format=json" in arguments or ("--log-format", "json") in pairs


def say(
    text: str,
    event: str,
    *,
    level: int = logging.WARNING,
    exception: BaseException | None = None,
    **fields: str | int,
) -> None:
    """Print one line at once, with the traceback of an `exception` before it, or in its field.

    If the line cannot be written (a log on a full disk, a reader that is gone), nothing fails.
    """
    if _is_json:
        from ckpt_async.core.json_log import FIELDS, JsonFormatter

        raised = (type(exception), exception, exception.__traceback__) if exception else None
        record = logging.LogRecord("ckpt_async.cli", level, "", 0, text, None, raised)
        setattr(record, FIELDS, (event, fields))
        text = JsonFormatter().format(record)
    elif exception is not None:
        text = f"{''.join(traceback.format_exception(exception))}{text}"
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
