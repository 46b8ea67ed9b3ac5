"""The package's log as JSON, one object per line. Pure.

Log messages have the form `event key=value key=value; more words`. The values of the placeholders become fields, and
numbers stay numbers.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import math
import re
from typing import Any

# The record attribute with the event and fields of a message that was formatted in another process.
FIELDS = "ckpt_async_fields"

_PLACE = re.compile(r"(?:(\w+)=)?%([-#0 +]*[0-9]*(?:\.[0-9]+)?)([a-zA-Z%])")
_EVENT = re.compile(r"([a-z0-9]+(?:_[a-z0-9]+)+)(?=[ ;:]|$)|([a-z0-9]+)(?= \w+=| %s)")


class JsonFormatter(logging.Formatter):
    """A JSON formatter for any handler: `handler.setFormatter(ckpt_async.JsonFormatter())`.

    Each object has `time` (UTC), `level`, `logger` and `message`; `event` and `fields` if the message has them; and
    `exception` if there is one. Fields are named as in the message; a checkpoint becomes `generation` and `step`. Never
    raises.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")
        said: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := event_and_fields(record):
            said["event"], said["fields"] = found
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def event_and_fields(record: logging.LogRecord) -> tuple[str, dict[str, Any]] | None:
    """Return a record's event and fields; None if its message does not have the form of this package's messages."""
    if (carried := getattr(record, FIELDS, None)) is not None:
        event, fields = carried
        return str(event), dict(fields)
    template = str(record.msg)
    match = _EVENT.match(template)
    if match is None:
        return None
    return match[1] or match[2], _fields(template, record.args)


def _fields(template: str, args: object) -> dict[str, Any]:
    if not isinstance(args, tuple):
        return {}
    fields: dict[str, Any] = {}
    values = iter(args)
    for key, flags, conversion in _PLACE.findall(template):
        if conversion == "%":
            continue
        value = next(values, None)
        if key:
            fields[key] = (
                repr(value) if conversion == "r" and not isinstance(value, str) else _plain(value, flags)
            )
        elif value is not None and hasattr(value, "generation") and hasattr(value, "step"):
            fields |= {"generation": value.generation, "step": value.step}
    return fields


def _plain(value: object, flags: str) -> Any:
    """Return a JSON value; a float is rounded as in the message: to 0.1 for `%.1f`."""
    if isinstance(value, float):
        digits = flags.partition(".")[2]
        return round(value, int(digits or 6)) if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        values = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_plain(each, flags) for each in values]
    return str(value)
