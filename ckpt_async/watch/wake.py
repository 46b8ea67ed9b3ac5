"""Waking early: inotify tells that something happened in a folder. What is there, only a scan says."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
from pathlib import Path

# inotify(7): files closed after writing, renamed into place, made; folders made.
_CLOSE_WRITE, _MOVED_TO, _CREATE, _ISDIR = 0x8, 0x80, 0x100, 0x40000000
_MASK = _CLOSE_WRITE | _MOVED_TO | _CREATE
# A folder of datasets must not take every watch of the machine.
_MAX_WATCHED = 4096
_EVENT = struct.Struct("iIII")


class Waker:
    """Waits for a time, or until something happens in the folders that were given. Without inotify, for the time."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._watched: set[str] = set()
        self._inotify = -1
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            self._add = libc.inotify_add_watch
            self._inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def follow(self, root: Path, folders: list[str]) -> None:
        """Also be woken by what happens right in these. A folder that was deleted leaves by itself."""
        if self._inotify < 0:
            return
        for folder in folders:
            if len(self._watched) < _MAX_WATCHED and folder not in self._watched:
                path = os.fsencode(root / folder)
                if self._add(self._inotify, path, _MASK) >= 0:
                    self._watched.add(folder)
        self._watched &= {*folders}

    def wake(self) -> None:
        """From a signal handler or another thread."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"x")

    def wait(self, timeout_s: float) -> None:
        watched = [self._read, *([self._inotify] if self._inotify >= 0 else [])]
        ready, _, _ = select.select(watched, [], [], max(0.0, timeout_s))
        for descriptor in ready:
            with contextlib.suppress(OSError):
                os.read(descriptor, 1 << 16)

    def close(self) -> None:
        for descriptor in (self._read, self._write, self._inotify):
            if descriptor >= 0:
                os.close(descriptor)
