import json
import logging
from typing import Any

import pytest

from ckpt_async import JsonFormatter
from ckpt_async.core.model import CheckpointId


def said(template: str, *args: Any, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord("ckpt_async.x", logging.WARNING, "", 0, template, args, more.get("exc_info"))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return json.loads(line)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("template", "args", "event", "fields"),
    [
        (
            "checkpoint_committed %s name=%s world_size=%d",
            (CheckpointId(2, 100), "ep1", 8),
            "checkpoint_committed",
            {"generation": 2, "step": 100, "name": "ep1", "world_size": 8},
        ),
        ("swept action=%s", ("x step=7 y",), "swept", {"action": "x step=7 y"}),
        (
            "action_failed num_more=%d for_s=%.0f last: %s",
            (3, 59.7, "a"),
            "action_failed",
            {"num_more": 3, "for_s": 60.0},
        ),
        ("closed steps=%s 100%% ratio=%.2f", ([1, 2], 0.333), "closed", {"steps": [1, 2], "ratio": 0.33}),
        ("died error=%r", (ValueError("x"),), "died", {"error": "ValueError('x')"}),
        ("close_failed; the exception is raised", (), "close_failed", {}),
        ("odd_number value=%f", (float("nan"),), "odd_number", {"value": "nan"}),
    ],
)
def test_what_is_in_the_placeholders_becomes_fields(
    template: str, args: tuple[Any, ...], event: str, fields: dict[str, Any]
) -> None:
    line = said(template, *args)
    assert (line["event"], line["fields"]) == (event, fields)
    assert line["message"] == template % args
    assert (line["level"], line["logger"]) == ("warning", "ckpt_async.x")


@pytest.mark.parametrize("text", ["Some library speaks", "%s", "retrying the thing"])
def test_other_messages_are_text_only(text: str) -> None:
    assert "event" not in said(text, *("a=b c",) * text.count("%s"))


def test_lines_stay_lines_whatever_is_in_them() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        line = said(
            "x_failed path=%s", "/a\n\u2028\ud800\x00", exc_info=(type(error), error, error.__traceback__)
        )
    assert line["fields"] == {"path": "/a\n\u2028\ud800\x00"}
    assert "ValueError: a\nb" in line["exception"]
    assert line["time"].endswith("Z")
