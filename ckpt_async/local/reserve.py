"""Space of a folder that is set aside for a full disk.

What frees space is a commit, and a commit needs some: for rows of the journal, manifests, the symlink. A disk that is
full of checkpoints still to be uploaded would otherwise stay full, and no restart could help (table row F5).
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "reserve"
SIZE_BYTES = 1 << 20  # some thousand rows of the journal
ROOMY_BYTES = 64 * SIZE_BYTES  # taking it where there is less would be what fills the disk


class Reserve:
    """A file without content in the private part of a folder. Blocking, a few system calls."""

    def __init__(self, private: Path) -> None:
        self._path = private / NAME

    def adjust(self) -> None:
        """Give it up if the file system is full, take it again once there is room. Best effort, never raises."""
        with contextlib.suppress(OSError):
            facts = os.statvfs(self._path.parent)
            free_bytes = facts.f_bavail * facts.f_frsize
            if free_bytes < SIZE_BYTES:
                self._give_up()
            elif free_bytes >= ROOMY_BYTES:
                self._take()

    def _give_up(self) -> None:
        try:
            self._path.unlink()
        except FileNotFoundError:
            return
        logger.warning(
            "disk_reserve_given_up size_bytes=%d folder=%s: the disk is full; commits continue with these last bytes",
            SIZE_BYTES,
            self._path.parent.parent,
        )

    def _take(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < SIZE_BYTES:
                os.posix_fallocate(descriptor, 0, SIZE_BYTES)
        finally:
            os.close(descriptor)
