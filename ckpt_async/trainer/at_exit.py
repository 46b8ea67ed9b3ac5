"""The open uploaders of this process: each is closed when the interpreter exits, unless it was closed before."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ckpt_async.core import naming
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FolderInUseError, SettingsError
from ckpt_async.runners import Start
from ckpt_async.trainer.exporting import Exporter

logger = logging.getLogger(__name__)

# Time limit for all of them together: the process should end, and the journal has what is left.
EXIT_TIMEOUT_S = 60.0
# For each of them if no thread can be started: most stores need new ones for an upload, which would only be retried.
THREADLESS_TIMEOUT_S = 5.0


class Closes(Protocol):
    """What this module needs of an `Uploader`. `pid` is the process that opened it."""

    folder: Path
    rank: int
    kind: str
    pid: int
    settings: Settings
    exporter: Exporter
    before_exit: Callable[[float], object]

    def close(self, timeout_s: float | None = None) -> None: ...


_open: set[Closes] = set()
_is_registered = False
_is_closing = False


def companions(start: Start) -> list[Closes]:
    """Return the uploaders of this process that are open for the same rank and folder, each for another kind of
    checkpoints.
    """
    place = start.folder, start.rank, os.getpid()
    return [each for each in list(_open) if (str(each.folder), each.rank, each.pid) == place]


def exporters(start: Start) -> list[Exporter]:
    """Return the exporters of the companions."""
    return [each.exporter for each in companions(start)]


def refuse_second(start: Start) -> None:
    """Raise FolderInUseError if this process already has an open uploader of the same kind: waiting for it would
    never end. One that is closing no longer counts as open. Raise SettingsError if one of another kind would move
    the same local symlink.
    """
    latest = naming.fill(start.settings.latest_filename, rank=start.rank)
    for each in companions(start):
        if each.kind == start.kind:
            of_kind = f", kind {start.kind!r}," if start.kind else ""
            raise FolderInUseError(
                f"rank {start.rank} of folder {start.folder!r}{of_kind} is in use by process {os.getpid()}, this very"
                " one",
                hint="close the other Uploader first, as `with Uploader(...)` does, or keep using it; for"
                " another kind of checkpoint, pass its name as `kind=`",
            )
        if latest and latest == naming.fill(each.settings.latest_filename, rank=each.rank):
            raise SettingsError(
                f"latest_filename={start.settings.latest_filename!r} is taken by the Uploader for"
                f" {_called(each.kind)}: each kind of checkpoint needs its own symlink",
                hint="leave latest_filename out for kinds, or give each kind its own, e.g."
                " latest-weights-rank{rank}",
            )


def _called(kind: str) -> str:
    return f"kind {kind!r}" if kind else "the run itself"


def add(uploader: Closes) -> None:
    """Close the uploader at exit, unless it is closed before.

    `atexit` runs when executors already refuse work, which is too late for an asyncio thread.
    `threading._register_atexit` runs earlier (concurrent.futures itself uses it). It is private, hence the guard:
    without it, a trainer that forgets to close loses nothing, because the journal has it.
    """
    global _is_registered  # noqa: PLW0603  one registration for the life of the process
    _open.add(uploader)
    if not _is_registered:
        _is_registered = True
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(_close_all)


def is_closing() -> bool:
    """Return whether the interpreter is exiting, and closes what is open."""
    return _is_closing


def discard(uploader: Closes) -> None:
    _open.discard(uploader)


def _close_all() -> None:
    """Close all open uploaders. Each gets at most the time of a `close` without arguments, and at most what the
    others have left of the common time limit.
    """
    global _is_closing  # noqa: PLW0603  there is one exit
    _is_closing = True
    deadline, longest_s = time.monotonic() + EXIT_TIMEOUT_S, _longest_s()
    for uploader in list(_open):
        if uploader.pid != os.getpid():  # this is a dataloader worker, which must not close it
            continue
        logger.warning(
            "not_closed folder=%s: closing at exit, where an error can no longer change the exit code;"
            " use `with CheckpointSaver(...)` or `with Uploader(...)`",
            uploader.folder,
        )
        try:
            uploader.before_exit(max(0.0, deadline - time.monotonic()))
            left_s = max(0.0, deadline - time.monotonic())
            uploader.close(timeout_s=min(left_s, longest_s, uploader.settings.upload_timeout_s))
        except Exception:  # the others must still be closed
            logger.exception("close_failed folder=%s", uploader.folder)


def _longest_s() -> float:
    """Return how long closing one may take. Warns if that is short."""
    if not any(each.pid == os.getpid() for each in list(_open)):
        return 0.0
    try:
        threading.Thread(target=lambda: None, name="ckpt-async-trial", daemon=True).start()
    except RuntimeError as error:
        logger.warning(
            "no_threads_at_exit error=%s; Python 3.12.0 and 3.12.1 start none: close before the script ends, or"
            " update Python; the next launch finishes what is left",
            error,
        )
        return THREADLESS_TIMEOUT_S
    return EXIT_TIMEOUT_S
