"""The mark of the machine that uses a folder: a small file that the running engine renews.

It shows what no lock can: that another machine is using the folder, on a file system where locks do not reach that
machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ckpt_async.errors import FolderInUseError

NAME = "host.json"
# An engine renews the mark about once a second. A cached attribute of a network file system may be some
# seconds old, so the file's content is compared instead.
WATCH_S = 4.0
POLL_S = 0.1
SIZE_BYTES = 1024


class HostMark:
    """The mark in the private part of a folder. `boot_id` identifies this machine until its next boot."""

    def __init__(self, private: Path, boot_id: str) -> None:
        self._path, self._boot_id = private / NAME, boot_id

    @property
    def trusted(self) -> str:
        """The type of file system that a user has vouched for, on this machine or on the one that used the folder
        before.
        """
        found = self._read().get("trusted")
        return found if isinstance(found, str) else ""

    def take(self, folder: Path, trusted: str) -> None:
        """Claim the folder for this machine. Raises FolderInUseError while another machine uses it; finding that
        out takes WATCH_S if the mark is of another boot.
        """
        before = self._read()
        if before.get("boot_id", self._boot_id) != self._boot_id and self._is_renewed(before):
            raise FolderInUseError(
                f"folder {str(folder)!r} is in use by another machine, {before.get('host')!r}: concurrent"
                " writes destroy the journal",
                hint="use a folder on a local disk of each node",
            )
        self.renew(trusted)

    def renew(self, trusted: str) -> None:
        """Renew the mark. Best effort: a full disk is reported elsewhere."""
        mark = {"boot_id": self._boot_id, "host": socket.gethostname(), "trusted": trusted}
        data = json.dumps(mark | {"renewed_at": time.time_ns()}).encode().ljust(SIZE_BYTES)
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                # One write of constant size: the file is never truncated in between.
                os.pwrite(descriptor, data, 0)
            finally:
                os.close(descriptor)

    def _is_renewed(self, before: dict[str, Any]) -> bool:
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            now = self._read()
            if now and now.get("boot_id") != self._boot_id and now != before:
                return True
        return False

    def _read(self) -> dict[str, Any]:
        """Return the mark; {} if there is none, or it is unreadable."""
        try:
            found = json.loads(self._path.read_bytes()[: 4 * SIZE_BYTES])
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}
