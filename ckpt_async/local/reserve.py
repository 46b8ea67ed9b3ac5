"""Space in a folder that is reserved for a full disk.

Only a commit frees space, and a commit itself needs some: for journal rows, manifests and the symlink. Without the
reserve, a disk full of checkpoints that are waiting for upload would stay full, and no restart could help (table
row F5).
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "reserve"
SIZE_BYTES = 1 << 20  # a few thousand journal rows
ROOMY_BYTES = 64 * SIZE_BYTES  # with less free space, taking the reserve would itself fill the disk


class Reserve:
    """A file without meaningful content in the private part of a folder. Blocking, a few system calls."""

    def __init__(self, private: Path) -> None:
        self._path = private / NAME

    def adjust(self) -> None:
        """Release the reserve if the file system is full, and take it again once there is room. Best effort, never
        raises.
        """
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
            "disk_reserve_given_up size_bytes=%d folder=%s: the disk is full; commits continue with these"
            " reserved bytes",
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
