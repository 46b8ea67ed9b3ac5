"""Tracks the disk space that is left to the trainer, which has priority.

Links to files that the trainer has deleted keep their space in use, and copies take more.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ckpt_async.core.units import in_units
from ckpt_async.errors import NoSpaceError

# Unless the user says how much is to stay free, it is room for this many saves, as for a trainer's own uploader.
NUM_SAVES = 2


class Room:
    """The space on the disk that has `place`, where links and copies are. Its calls block.

    `min_free_bytes` is what the user wants to be left free; 0 means NUM_SAVES saves of `save_bytes`, the size of the
    trainer's largest recent checkpoint.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self.min_free_bytes = self.save_bytes = 0

    @property
    def _least_bytes(self) -> int:
        return self.min_free_bytes or NUM_SAVES * self.save_bytes

    def lacking_bytes(self, taken_bytes: int = 0) -> int:
        """Return how much too little would be free if `taken_bytes` were taken."""
        facts = os.statvfs(self._place)
        if not facts.f_blocks:  # some network file systems do not say
            return 0
        return max(0, self._least_bytes + taken_bytes - facts.f_bavail * facts.f_frsize)

    def check_copy(self, size_bytes: int) -> None:
        """Raise NoSpaceError if a copy of this size would leave too little space."""
        self.save_bytes = max(self.save_bytes, size_bytes)
        if self.lacking_bytes(size_bytes):
            raise NoSpaceError(
                f"a copy of {in_units(size_bytes)} would leave less than {in_units(self._least_bytes)} of the disk"
                " free",
                hint="let the watcher make links (as the trainer's user, with --state on the same disk), or free space",
            )


def pinned_bytes(folder: Path) -> int:
    """Return how many bytes would be freed with the files below a folder, i.e. those with no other link."""
    size_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if facts.st_nlink == 1:  # folders have at least two, or blocks of their own
                size_bytes += facts.st_blocks * 512
    return size_bytes
