"""What a fetch has brought to its destination, for as long as it has not finished: a later fetch of another checkpoint
removes it, so that files of two checkpoints are not mixed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from ckpt_async.core.naming import check_relative
from ckpt_async.errors import CkptAsyncError
from ckpt_async.restore.partial import discard_unlocked

logger = logging.getLogger(__name__)

PREFIX = "fetch-"


class _Brought(NamedTuple):
    """A file that is partial or published: it is the same inode, first under one name, then under the other."""

    name: str
    partial: str
    device: int
    inode: int


class Unfinished:
    """The record of one call of `fetch`: `<folder>/fetch-<random>`, locked while the call runs.

    Its first line names the checkpoint, and each other one a file that the call brings. Blocking calls, from any
    thread.
    """

    def __init__(self, folder: Path, checkpoint: str) -> None:
        self._folder, self._destination = folder, folder.parent
        self._checkpoint = json.dumps(checkpoint)
        self._path = folder / f"{PREFIX}{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._descriptor: int | None = None  # created when there is something to record
        self._brought: list[_Brought] = []

    def take_over(self) -> None:
        """Take over what fetches that have ended have left unfinished: what is of this checkpoint becomes this call's
        own, and what is of another one is removed.
        """
        for path in sorted(self._folder.glob(f"{PREFIX}*")):
            with _of_an_ended_fetch(path) as record:
                if record is None:
                    continue
                checkpoint, brought = _read(record)
                if checkpoint == self._checkpoint:
                    for each in brought:
                        self._add(each)
                else:
                    self._remove(brought)
                    self._remove_unrecorded()
                    told = "unfinished_fetch_removed checkpoint=%s num_files=%d destination=%s"
                    logger.warning(told, checkpoint, len(brought), self._destination)
                path.unlink(missing_ok=True)

    def add(self, name: str, partial: Path, facts: os.stat_result) -> None:
        """Record a file before anything is written to it. The record survives SIGKILL."""
        self._add(_Brought(name, partial.name, facts.st_dev, facts.st_ino))

    def remove_all(self) -> None:
        """Remove what this call, and those that it has taken over, have brought."""
        self._remove(self._brought)
        self.finish()

    def finish(self) -> None:
        """Drop the record: what was brought stays."""
        self._brought.clear()
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the record. If the call has not finished, but has left something, a later one takes it over."""
        if not any(self._is_here(each) for each in self._brought):
            self.finish()
        with self._lock:
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold the descriptor too
                os.close(descriptor)

    def _add(self, file: _Brought) -> None:
        with self._lock:
            if self._descriptor is None:
                self._descriptor = self._created()
            os.write(self._descriptor, f"{json.dumps(file)}\n".encode())
            self._brought.append(file)

    def _created(self) -> int:
        self._folder.mkdir(0o700, exist_ok=True)  # the process that finished before us has removed it
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, f"{self._checkpoint}\n".encode())
        return descriptor

    def _remove(self, brought: list[_Brought]) -> None:
        for file in brought:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, CkptAsyncError):
                discard_unlocked(self._folder / check_relative(file.partial, "file"))
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, CkptAsyncError):
                target = self._destination / check_relative(file.name, "file")
                is_below = Path(os.path.realpath(target.parent)) == target.parent
                if is_below and _is_at(target, file):  # otherwise somebody has put another one in its place
                    target.unlink()

    def _remove_unrecorded(self) -> None:
        """Remove partial files that were created when the process was killed: nothing is written before the record."""
        for path in list(self._folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if not path.name.startswith(PREFIX) and not path.lstat().st_size:
                    discard_unlocked(path)

    def _is_here(self, file: _Brought) -> bool:
        return _is_at(self._folder / file.partial, file) or _is_at(self._destination / file.name, file)


def _is_at(path: Path, file: _Brought) -> bool:
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return (facts.st_dev, facts.st_ino) == (file.device, file.inode)


@contextlib.contextmanager
def _of_an_ended_fetch(path: Path) -> Iterator[IO[str] | None]:
    """Lock the record, unless its fetch is still running or has finished."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as record:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            facts = os.fstat(descriptor)
            is_one = facts.st_nlink > 0 and facts.st_size > 0  # empty: it is about to be locked
            yield record if is_one else None


def _read(record: IO[str]) -> tuple[str, list[_Brought]]:
    first, *lines = record.read().splitlines()
    brought = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):  # the last one may be cut short
            name, partial, device, inode = json.loads(line)
            brought.append(_Brought(str(name), str(partial), int(device), int(inode)))
    return first, brought
