"""What is known of the link: what all processes of this user on this node move over it, so that none mistakes a larger
share for a gain; and what one process has learned of it, for the next one.

They share a file in memory, with a slot for each process. It is only a hint: a process that cannot open it, or reads
half a number, considers only what it moves itself. The file is never mapped: a full or truncated one would cause a
SIGBUS, which kills the trainer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ckpt_async.core.model import without_slash

logger = logging.getLogger(__name__)

Direction = Literal["up", "down"]

# When the slot was last written (CLOCK_MONOTONIC, the same for all processes), requests under way, bytes moved so far.
_SLOT = struct.Struct("=dQQ")
_NUM_SLOTS = 4096 // _SLOT.size
# A process that moves bytes writes its slot several times a second: one older than BUSY_S moves nothing now. A slot
# older than ABANDONED_S may be taken over, along with its count of bytes: its process has ended, or was idle. So a
# process that was idle for IDLE_S looks whether its slot is still its own.
BUSY_S, IDLE_S, ABANDONED_S = 1.0, 30.0, 60.0


class Node:
    """One process's place on the link, taken when it first moves something. Used on one event loop."""

    def __init__(self, direction: Direction, environment: Mapping[str, str] = os.environ) -> None:
        folder = Path(environment.get("XDG_RUNTIME_DIR") or "/dev/shm")  # noqa: S108  the file's owner is checked
        self._path = folder / f"ckpt-async-{os.getuid()}-{direction}"
        self._file: int | None = None  # its descriptor
        self._slot = self._base_bytes = 0  # its slot, and what that had counted before this process
        self._told_s: float | None = None  # when it last wrote there
        self._told_bytes = 0
        self._is_alone = False

    def tell(self, moved_bytes: int, num_requests: int, now_s: float) -> tuple[int, list[int]]:
        """Report what this process has moved and has under way at this time.

        Returns what all processes have moved, and the number of requests of each other process that is moving bytes
        now.
        """
        slots: list[tuple[float, int, int]] = []
        if not self._is_alone:
            try:
                slots = self._told(moved_bytes, num_requests, now_s)
            except BlockingIOError:
                pass  # another process is joining at this moment: try again at the next look
            except (OSError, ValueError, struct.error) as error:
                self.close()
                logger.debug("link_not_shared path=%s error=%s", self._path, error)
        if not slots:
            return moved_bytes, []
        others = [
            under_way
            for number, (told_s, under_way, _) in enumerate(slots)
            if number != self._slot and abs(now_s - told_s) < BUSY_S and under_way
        ]
        return sum(moved for _, _, moved in slots), others

    def close(self) -> None:
        """Give up the slot to other processes. Idempotent."""
        self._is_alone = True
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError, struct.error):
                told_s, _, moved_bytes = _slots(file)[self._slot]
                if told_s == self._told_s:
                    _write(file, self._slot, -math.inf, 0, moved_bytes)
            with contextlib.suppress(OSError):
                os.close(file)

    def __del__(self) -> None:
        self.close()

    def _told(self, moved_bytes: int, num_requests: int, now_s: float) -> list[tuple[float, int, int]]:
        if self._file is None:
            self._file = _opened(self._path)
        if self._told_s is None or now_s - self._told_s > IDLE_S:
            self._join(self._file, now_s)
        _write(self._file, self._slot, now_s, num_requests, self._base_bytes + moved_bytes)
        self._told_s, self._told_bytes = now_s, moved_bytes
        return _slots(self._file)

    def _join(self, file: int, now_s: float) -> None:
        """Take a free slot, unless this process still has one."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            os.ftruncate(file, _NUM_SLOTS * _SLOT.size)
            slots = _slots(file)
            if slots[self._slot][0] != self._told_s:
                free = (number for number, each in enumerate(slots) if abs(now_s - each[0]) > ABANDONED_S)
                taken = next(free, None)
                if taken is None:
                    raise OSError("all slots are taken")
                self._slot, self._base_bytes = taken, slots[taken][2] - self._told_bytes
            _write(file, self._slot, now_s, 0, slots[self._slot][2])
            self._told_s = now_s
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _opened(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    facts = os.fstat(descriptor)
    if facts.st_uid != os.getuid() or not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise OSError("it belongs to another user, or is not a regular file")
    return descriptor


def _slots(file: int) -> list[tuple[float, int, int]]:
    """Read all slots. Raises struct.error if somebody has truncated the file."""
    data = os.pread(file, _NUM_SLOTS * _SLOT.size, 0)
    return [_SLOT.unpack_from(data, number * _SLOT.size) for number in range(_NUM_SLOTS)]


def _write(file: int, slot: int, told_s: float, num_requests: int, moved_bytes: int) -> None:
    os.pwrite(file, _SLOT.pack(told_s, num_requests, moved_bytes), slot * _SLOT.size)


# --- for the next process: a small file in the folder -------------------------------------------------------


# Networks change without notice, so anything older than this is ignored.
GOOD_FOR_S = 30 * 86400.0
MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KnownLink:
    """How many connections one process needs, and how many bytes per second each of them moves."""

    num_connections: int
    connection_bytes_per_s: float


def known_file_name(direction: Literal["up", "down"]) -> str:
    return f"link-{direction}.json"


def note_known(path: Path, remote: str, known: KnownLink, now_s: float) -> None:
    """Replace what the file at `path` says. Raises OSError."""
    data = json.dumps({"remote": without_slash(remote), **asdict(known), "noted_at": now_s}).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _read_known(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not block on a FIFO
    try:
        return os.read(descriptor, MAX_FILE_BYTES)
    finally:
        os.close(descriptor)


def recall_known(path: Path, remote: str, now_s: float) -> KnownLink | None:
    """Return what the file at `path` says about the link to `remote`; None if it has nothing useful."""
    try:
        found = json.loads(_read_known(path))
        known = KnownLink(int(found["num_connections"]), float(found["connection_bytes_per_s"]))
        is_of_use = found["remote"] == without_slash(remote) and 0 <= now_s - found["noted_at"] < GOOD_FOR_S
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    is_sane = known.num_connections >= 1 and 0 < known.connection_bytes_per_s < math.inf
    return known if is_of_use and is_sane else None
