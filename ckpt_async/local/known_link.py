"""What a process has found out about the link to a store, for the next one: a small file in the folder.

It is advice. Who follows it looks at the rate before he relies on it (`transfer/concurrency.py`), so that a file that
is old, or half written by another process, does no harm.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

# Networks change, and nobody knows when: what is older than this is not worth a look.
GOOD_FOR_S = 30 * 86400.0
MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KnownLink:
    """How many connections one process needs, and what each of them moves."""

    num_connections: int
    connection_bytes_per_s: float


def file_name(direction: Literal["up", "down"]) -> str:
    return f"link-{direction}.json"


def note(path: Path, remote: str, known: KnownLink, now_s: float) -> None:
    """Replace what is known in file `path`. Raises OSError."""
    data = json.dumps({"remote": remote, **asdict(known), "noted_at": now_s}).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # in a FIFO nothing is waited for
    try:
        return os.read(descriptor, MAX_FILE_BYTES)
    finally:
        os.close(descriptor)


def recall(path: Path, remote: str, now_s: float) -> KnownLink | None:
    """What the file at `path` says of the link to `remote`; None if nothing of use."""
    try:
        found = json.loads(_read(path))
        known = KnownLink(int(found["num_connections"]), float(found["connection_bytes_per_s"]))
        is_of_use = found["remote"] == remote and 0 <= now_s - found["noted_at"] < GOOD_FOR_S
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    is_sane = known.num_connections >= 1 and 0 < known.connection_bytes_per_s < math.inf
    return known if is_of_use and is_sane else None
