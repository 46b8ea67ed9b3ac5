"""Space in a folder that is reserved for a full disk.

Only a commit frees space, and a commit itself needs some: for the journal, manifests and the symlink. Without the
reserve, a disk full of checkpoints that are waiting for upload would stay full, and no restart could help (fault F5).

It is released when a write lacked space, because no statistics tell that: of a quota they know nothing, and on btrfs
what they call free may be of no use. Whoever writes next gets what is released, often the trainer, to whose checkpoint
it is nothing. So it is released in pieces. Each is a file of its own, because on a full btrfs a file can be deleted but
not truncated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "reserve"

PIECE_BYTES = 128 << 10  # some hundred events of the journal; with less space, the disk counts as full
NUM_PIECES = 16  # one operation on a full btrfs may take three
ROOMY_BYTES = 64 << 20  # with less free space, taking the reserve would itself fill the disk
RELEASE_S = 1.0  # not more often: many writes may lack space at once
TAKE_AGAIN_S = 60.0  # after a write lacked space, or the reserve did


class Reserve:
    """Files without meaningful content in the private part of a folder. Blocking, a few system calls; never raises."""

    def __init__(self, private: Path) -> None:
        self._pieces = [private / NAME / str(number) for number in range(NUM_PIECES)]
        self._lacked_at = self._released_at = float("-inf")

    @property
    def is_there(self) -> bool:
        """Whether anything is left of it."""
        return any(each.exists() for each in self._pieces)

    def take(self) -> None:
        """Take what is missing, if there is room."""
        if self.was_needed:
            return
        with contextlib.suppress(OSError):
            facts = os.statvfs(self._pieces[0].parents[1])
            if facts.f_bavail * facts.f_frsize >= ROOMY_BYTES:
                self._pieces[0].parent.mkdir(exist_ok=True)
                for each in self._pieces:
                    self._take(each)

    def release(self, every_s: float = RELEASE_S) -> bool:
        """Release a piece, because a write lacked space. Return whether the same may succeed now."""
        now = self._lacked_at = time.monotonic()
        if now < self._released_at + every_s:
            return True
        for number, each in enumerate(reversed(self._pieces)):
            with contextlib.suppress(OSError):
                each.unlink()
                self._released_at = now
                logger.warning(
                    "disk_reserve_given_up size_bytes=%d left_bytes=%d folder=%s: the disk is full; commits continue"
                    " with these reserved bytes",
                    PIECE_BYTES,
                    (NUM_PIECES - number - 1) * PIECE_BYTES,
                    each.parents[2],
                )
                return True
        return False

    @property
    def was_needed(self) -> bool:
        """Whether a write has lacked space lately: what there is should be used for nothing but commits."""
        return time.monotonic() < self._lacked_at + TAKE_AGAIN_S

    def _take(self, piece: Path) -> None:
        try:
            descriptor = os.open(piece, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return
        try:
            os.posix_fallocate(descriptor, 0, PIECE_BYTES)
        except OSError:  # what it got may be all that is left
            self._lacked_at = time.monotonic()
            piece.unlink()
            raise
        finally:
            os.close(descriptor)
