"""Tracks the disk space that is left to the trainer, which has priority.

Links to files that the trainer has deleted keep their space in use, and copies take more.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ckpt_async.core.units import in_units
from ckpt_async.errors import NoSpaceError
from ckpt_async.formats import Tree

# The share of the disk that is kept free in addition to the next checkpoint, for logs and other files. It is
# never more than the size of such a checkpoint, which is little of a large disk.
RESERVE = 0.05


class Room:
    """The space on the disk that has `place`, where links and copies are. Its calls block.

    `min_free_bytes` is what the user wants to be left free; 0 means the next checkpoint and a reserve.
    """

    def __init__(self, folder: Path, place: Path, min_free_bytes: int = 0) -> None:
        self._folder, self._place, self.min_free_bytes = folder, place, min_free_bytes
        self._save_bytes = self._begun_bytes = 0

    def expect(self, save_bytes: int, last_ns: int, tree: Tree) -> None:
        """Expect the next checkpoint to have this size. Files written after `last_ns` are part of it already."""
        self._save_bytes = save_bytes
        self._begun_bytes = sum(each.size_bytes for each in tree.files.values() if each.mtime_ns > last_ns)

    def lacking_bytes(self) -> int:
        """Return how much space the trainer lacks for what it writes next; 0 if it writes to another disk."""
        if not self._is_the_trainer_s():
            return 0
        free_bytes, floor_bytes = self._space(self._save_bytes)
        if not self.min_free_bytes:
            floor_bytes -= min(self._begun_bytes, self._save_bytes)
        return max(0, floor_bytes - free_bytes)

    def is_enough_without(self, size_bytes: int) -> bool:
        """Return whether the trainer would still have enough space if `size_bytes` were taken."""
        free_bytes, floor_bytes = self._space(self._save_bytes)
        return not self._is_the_trainer_s() or free_bytes - size_bytes >= floor_bytes

    def check_copy(self, size_bytes: int) -> None:
        """Raise NoSpaceError if a copy of this size would leave too little space."""
        free_bytes, floor_bytes = self._space(max(size_bytes, self._save_bytes))
        if free_bytes - size_bytes < floor_bytes:
            raise NoSpaceError(
                f"a copy of {in_units(size_bytes)} would leave less than {in_units(floor_bytes)} of the disk free",
                hint="let the watcher make links (as the trainer's user, with --state on the same disk), or free space",
            )

    def _space(self, save_bytes: int) -> tuple[int, int]:
        """Return how much is free, and how much has to be; only the reserve on a disk that has nothing but copies."""
        facts = os.statvfs(self._place)
        reserve_bytes = min(save_bytes, int(facts.f_blocks * facts.f_frsize * RESERVE))
        next_bytes = save_bytes if self._is_the_trainer_s() else 0
        free_bytes = facts.f_bavail * facts.f_frsize if facts.f_blocks else sys.maxsize  # some do not tell
        return free_bytes, self.min_free_bytes or next_bytes + reserve_bytes

    def _is_the_trainer_s(self) -> bool:
        with contextlib.suppress(OSError):
            return self._folder.stat().st_dev == self._place.stat().st_dev
        return False


def held_only_by(folder: Path) -> int:
    """Return how many bytes would be freed with the files below a folder, i.e. those with no other link."""
    size_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if facts.st_nlink == 1:  # folders have at least two, or blocks of their own
                size_bytes += facts.st_blocks * 512
    return size_bytes
