"""Ranks on several nodes, some of which have not delivered: what `status` and the sweeper's page must report."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId


def save(uploader: Uploader, *steps: int) -> None:
    for step in steps:
        path = uploader.folder / f"{uploader.kind}step-{step}" / f"rank-{uploader.rank}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
        uploader.enqueue(path, step)
        uploader.seal(step)


@contextlib.contextmanager
def lacking_ranks(
    folder: Path, store: Path, nodes: tuple[int, ...], committed: tuple[int, ...]
) -> Iterator[list[Uploader]]:
    """Open a launch whose rank n is on node `nodes[n]`. All ranks have delivered `committed`; the step after that,
    only rank 0.
    """
    start: dict[str, Any] = {
        "world_size": len(nodes),
        "launch_id": "a",
        "close_grace_s": 0,
        "on_error": "warn",
    }
    opened = [
        Uploader(folder / f"node-{node}", f"file://{store}", rank=rank, **start)
        for rank, node in enumerate(nodes)
    ]
    for each in opened:
        save(each, *committed)
    for each in opened:
        each.wait(committed[-1], 60)
    save(opened[0], committed[-1] + 1)
    receipt = store / keys.receipt_key(CheckpointId(1, committed[-1] + 1), 0)
    while not receipt.exists():
        threading.Event().wait(0.02)
    yield opened
    for each in opened:
        each.close(timeout_s=0)
