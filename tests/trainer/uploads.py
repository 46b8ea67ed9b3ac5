"""Helpers for tests of the uploader: saving checkpoints, and waiting for their outcome."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from tests.stores.misbehaving import Meddled

QUICK = {
    "decision_poll_s": 0.01,
    "decision_poll_max_s": 0.05,
    "retry_initial_s": 0.01,
    "retry_max_s": 0.05,
    "close_grace_s": 0.0,
    "upload_timeout_s": 20.0,
}


Open = Callable[..., Any]


def write(uploader: Uploader, name: str, data: bytes = b"shard") -> Path:
    path = uploader.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
    return path


def save(uploader: Uploader, step: int, *names: str) -> None:
    for name in names or ("a.pt", "b.pt"):
        uploader.enqueue(write(uploader, f"step-{step}/{name}", f"{step} {name}".encode()), step)
    uploader.seal(step)


def decisions(store: Meddled) -> dict[CheckpointId, str]:
    found = {}
    for key in store.keys(keys.DECISIONS):
        id_ = keys.parse_decision_key(key)
        assert id_ is not None
        found[id_] = json.loads(store.bucket.objects[key].data)["outcome"]
    return found


def wait_until(is_so: Callable[[], bool], uploader: Uploader, timeout_s: float = 10.0) -> None:
    """Wait until the condition holds, checking it at every change that the engine makes."""
    deadline = time.monotonic() + timeout_s
    while not uploader._engine.changed.wait(0.05, unless=is_so):
        assert time.monotonic() < deadline, "not in time"
