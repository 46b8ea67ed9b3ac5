"""Which machine uses a folder: a small file in it, which whoever runs an engine there renews. It tells what no lock
can: that another machine is at it, on a file system where locks do not reach that far.
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
# An engine renews it about once a second; a cached attribute of a network file system may be some seconds old, so its
# content is read.
WATCH_S = 4.0
POLL_S = 0.1
SIZE_BYTES = 1024


class HostMark:
    """The mark in the private part of a folder. `boot_id` names this machine, until it is started anew."""

    def __init__(self, private: Path, boot_id: str) -> None:
        self._path, self._boot_id = private / NAME, boot_id

    @property
    def trusted(self) -> str:
        """The kind of file system that somebody has vouched for, here or on the machine that was here before."""
        found = self._read().get("trusted")
        return found if isinstance(found, str) else ""

    def take(self, folder: Path, trusted: str) -> None:
        """Say that this machine uses the folder from now on. Raises FolderInUseError while another one does: whether it
        does takes WATCH_S to find out, where another boot was the last.
        """
        before = self._read()
        if before.get("boot_id", self._boot_id) != self._boot_id and self._is_renewed(before):
            raise FolderInUseError(
                f"folder {str(folder)!r} is in use by another machine, {before.get('host')!r}: what both write to it"
                " destroys the journal",
                hint="use a folder on a local disk of each node",
            )
        self.renew(trusted)

    def renew(self, trusted: str) -> None:
        """Best effort: a full disk is told of by others."""
        mark = {"boot_id": self._boot_id, "host": socket.gethostname(), "trusted": trusted}
        data = json.dumps(mark | {"renewed_at": time.time_ns()}).encode().ljust(SIZE_BYTES)
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(descriptor, data, 0)  # all of it, and none is ever missing
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
        """{} if there is none that can be read."""
        try:
            found = json.loads(self._path.read_bytes()[: 4 * SIZE_BYTES])
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}
