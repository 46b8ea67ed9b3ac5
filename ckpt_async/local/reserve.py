"""Space in a folder that is reserved for a full disk.

Only a commit frees space, and a commit itself needs some: for the journal, manifests and the symlink. Without the
reserve, a disk full of checkpoints that are waiting for upload would stay full, and no restart could help (table
row F5).

Whoever writes next gets the space that is released, often the trainer, to whose checkpoint it is nothing. So only half
of what is left is released at a time, and only when hardly anything is free.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "reserve"
SIZE_BYTES = 1 << 20  # a few thousand events of the journal
FULL_BYTES = SIZE_BYTES // 8  # with less free space, the disk counts as full
BLOCK_BYTES = 4096
ROOMY_BYTES = 64 * SIZE_BYTES  # with less free space, taking the reserve would itself fill the disk


class Reserve:
    """A file without meaningful content in the private part of a folder. Blocking, a few system calls."""

    def __init__(self, private: Path) -> None:
        self._path = private / NAME

    def adjust(self) -> None:
        """Release half of the reserve if the file system is full, and take all of it again once there is room. Best
        effort, never raises.
        """
        with contextlib.suppress(OSError):
            free_bytes = self._free_bytes()
            if free_bytes < FULL_BYTES:
                self._give_up_half()
            elif free_bytes >= ROOMY_BYTES:
                self._take()

    def is_disk_full(self) -> bool:
        """Return whether what is left should be used for nothing but commits."""
        with contextlib.suppress(OSError):
            return self._free_bytes() < FULL_BYTES
        return False

    def _free_bytes(self) -> int:
        facts = os.statvfs(self._path.parent)
        return facts.f_bavail * facts.f_frsize

    def _give_up_half(self) -> None:
        size_bytes = self._path.stat().st_size
        if size_bytes < BLOCK_BYTES:
            return
        os.truncate(self._path, size_bytes // 2)
        logger.warning(
            "disk_reserve_given_up size_bytes=%d left_bytes=%d folder=%s: the disk is full; commits continue with"
            " these reserved bytes",
            size_bytes - size_bytes // 2,
            size_bytes // 2,
            self._path.parent.parent,
        )

    def _take(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < SIZE_BYTES:
                os.posix_fallocate(descriptor, 0, SIZE_BYTES)
        finally:
            os.close(descriptor)
