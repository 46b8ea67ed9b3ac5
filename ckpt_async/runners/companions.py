"""The runners of this process that have a runner process, so that other kinds of their rank can join it: one
process runs the engines of all kinds, within common limits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ckpt_async.runners.wire import Channel

Place = tuple[str, int]  # folder and rank


class Companion(Protocol):
    """A runner whose process others may join."""

    group: int | None  # process group of the runner process
    log_path: Path

    @property
    def open_channel(self) -> Channel | None:
        """The connection to the process; None if it is ending."""


_there: dict[Place, list[Companion]] = {}
_lock = threading.Lock()


@contextmanager
def of(place: Place) -> Iterator[list[Companion]]:
    """Yield the companions of a place, to read and to change, under a lock. Start a process only within this block,
    so that other kinds join it.
    """
    with _lock:
        try:
            yield _there.setdefault(place, [])
        finally:
            if not _there[place]:
                del _there[place]


def join(companion: Companion) -> Channel | None:
    """Return our own connection to the process of another runner; None if it is gone, or about to go."""
    channel = companion.open_channel
    if channel is None:
        return None
    ours, theirs = Channel.pair()
    try:
        if channel.send("join", descriptors=(theirs.fileno(),)):
            return ours
    except OSError:
        pass
    finally:
        theirs.close()
    ours.close()
    return None


def _forget_parents() -> None:
    global _lock  # noqa: PLW0603  a thread that is not here any more may hold it
    _lock = threading.Lock()
    _there.clear()


os.register_at_fork(after_in_child=_forget_parents)
