"""Helpers that save checkpoints for the tests of events."""

from typing import Any

from ckpt_async import Uploader

QUICK: dict[str, Any] = {
    "decision_poll_s": 0.02,
    "decision_poll_max_s": 0.1,
    "close_grace_s": 0.0,
    "event_grace_s": 5.0,
}


def save(uploader: Uploader, *steps: int, **more: Any) -> None:
    for step in steps:
        path = uploader.folder / f"step-{step}-{uploader.rank}.pt"
        path.write_bytes(b"x" * 100)
        uploader.enqueue(path, step)
        uploader.seal(step, **more)
