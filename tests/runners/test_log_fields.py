"""The log of a runner process, as JSON in the trainer."""

import json
import logging
from pathlib import Path
from typing import Any

from ckpt_async import JsonFormatter, Uploader
from tests.events.saves import QUICK, save


def test_the_log_of_a_runner_process_has_its_fields_as_json_too(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonFormatter().format(record)))

    logger, handler = logging.getLogger("ckpt_async"), Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with Uploader(tmp_path / "folder", f"file://{tmp_path}/run", runner="process", **QUICK) as uploader:
            save(uploader, 7)
            uploader.wait(7)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    [told] = [each["fields"] for each in lines if each.get("event") == "checkpoint_committed"]
    expected = {
        "generation": 1,
        "step": 7,
        "name": "step-7",
        "world_size": 1,
        "num_shards": 1,
        "size_bytes": 100,
    }
    assert told == expected
