"""One watcher works on a folder, the others stand by: a lock beside the folder, which dies with its holder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import socket
from pathlib import Path

from ckpt_async.errors import JournalError

logger = logging.getLogger(__name__)


class FolderLock:
    """An flock: of the machine on a local file system, of all of them on NFS and Lustre (mounted with `-o flock`).
    Where there can be none, it is at `otherwise`, and keeps apart only the watchers of one machine.
    """

    def __init__(self, path: Path, otherwise: Path, remote: str) -> None:
        self.path = path
        self._otherwise = otherwise
        # A hash, as a remote may have a password in it.
        self._remote = hashlib.sha256(remote.rstrip("/").encode()).hexdigest()[:16]
        self._descriptor = -1

    def try_take(self) -> bool:
        """Whether it is ours. Raises JournalError where there can be none."""
        if self._descriptor >= 0:
            return True
        try:
            return self._try_take()
        except JournalError as error:
            if self.path == self._otherwise:
                raise
            logger.warning("%s; locking %s: run one watcher of this folder only", error, self._otherwise)
            self.path = self._otherwise
            return self._try_take()

    def _try_take(self) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(
                f"{str(self.path)!r} cannot be made: {error.strerror}",
                hint="the watcher needs a place of its own: --state DIR on a local disk, best that of the folder",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            raise JournalError(f"{str(self.path)!r} cannot be locked: {error.strerror}") from error
        os.truncate(descriptor, 0)
        text = f"{socket.gethostname()} pid {os.getpid()}\n{self._remote}\n"
        os.pwrite(descriptor, text.encode(), 0)
        self._descriptor = descriptor
        return True

    def holder(self) -> str:
        return self._lines()[0] or "somebody"

    def is_for_another_remote(self) -> bool:
        """Whether its holder says so. It may be about to write who it is."""
        return self._lines()[1] not in ("", self._remote)

    def _lines(self) -> tuple[str, str]:
        with contextlib.suppress(OSError):
            holder, _, remote = self.path.read_text(errors="replace").strip().partition("\n")
            return holder, remote
        return "", ""

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
