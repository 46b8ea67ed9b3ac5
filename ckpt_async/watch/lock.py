"""The lock by which one watcher works on a folder and others stand by. It is beside the folder, and dies with its
holder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

from ckpt_async import private
from ckpt_async.errors import JournalError

logger = logging.getLogger(__name__)


class FolderLock:
    """An flock: for one machine on a local file system, for all machines on NFS and Lustre (mounted with `-o flock`).

    If there can be none at `path`, it is taken at `otherwise`, where it only keeps apart the watchers of one machine.
    """

    def __init__(self, path: Path, otherwise: Path) -> None:
        self.path, self._otherwise, self._descriptor = path, otherwise, -1

    def try_take(self) -> bool:
        """Return whether the lock is ours now. Raises JournalError if there can be no lock."""
        if self._descriptor >= 0:
            return True
        try:
            return self._try_take()
        except JournalError as error:
            if self.path == self._otherwise:
                raise
            logger.warning(
                "lock_moved path=%s error=%s; run only one watcher of this folder", self._otherwise, error
            )
            self.path = self._otherwise
            return self._try_take()

    def _try_take(self) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = private.open_lock(self.path)
        except OSError as error:
            raise JournalError(
                f"{str(self.path)!r} cannot be created: {error.strerror}",
                hint="give the watcher its own state folder: --state DIR on a local disk, preferably the disk"
                " that the folder is on",
            ) from error
        try:
            if not private.lock(descriptor, self.path):
                os.close(descriptor)
                return False
            self._sign(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise JournalError(f"{str(self.path)!r} cannot be locked: {error.strerror}") from error
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def _sign(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):  # the lock is held even if the disk is full
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{socket.gethostname()} pid {os.getpid()}\n".encode(), 0)

    def holder(self) -> str:
        with contextlib.suppress(OSError):
            return self.path.read_text(errors="replace").strip() or "somebody"
        return "somebody"

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
