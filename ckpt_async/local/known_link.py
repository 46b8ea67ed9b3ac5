"""What one process has learned about the link to a store, kept for the next one in a small file in the folder.

It is only a hint. Its reader measures the rate before relying on it (`transfer/concurrency.py`), so a file that is
old, or half written by another process, does no harm.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ckpt_async.core.model import without_slash

# Networks change without notice, so anything older than this is ignored.
GOOD_FOR_S = 30 * 86400.0
MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KnownLink:
    """How many connections one process needs, and how many bytes per second each of them moves."""

    num_connections: int
    connection_bytes_per_s: float


def file_name(direction: Literal["up", "down"]) -> str:
    return f"link-{direction}.json"


def note(path: Path, remote: str, known: KnownLink, now_s: float) -> None:
    """Replace what the file at `path` says. Raises OSError."""
    data = json.dumps({"remote": without_slash(remote), **asdict(known), "noted_at": now_s}).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not block on a FIFO
    try:
        return os.read(descriptor, MAX_FILE_BYTES)
    finally:
        os.close(descriptor)


def recall(path: Path, remote: str, now_s: float) -> KnownLink | None:
    """Return what the file at `path` says about the link to `remote`; None if it has nothing useful."""
    try:
        found = json.loads(_read(path))
        known = KnownLink(int(found["num_connections"]), float(found["connection_bytes_per_s"]))
        is_of_use = found["remote"] == without_slash(remote) and 0 <= now_s - found["noted_at"] < GOOD_FOR_S
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    is_sane = known.num_connections >= 1 and 0 < known.connection_bytes_per_s < math.inf
    return known if is_of_use and is_sane else None
