"""Waking early: inotify tells that something happened in a folder. What is there, only a scan says."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from pathlib import Path

# inotify(7): files closed after writing, renamed into place, made; folders made.
_CLOSE_WRITE, _MOVED_TO, _CREATE = 0x8, 0x80, 0x100
_MASK = _CLOSE_WRITE | _MOVED_TO | _CREATE
# A folder of datasets must not take every watch of the machine.
_MAX_WATCHED = 4096


class Waker:
    """Waits for a time, or until something happens in the folders that were given. Without inotify, for the time."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._watched: dict[str, int] = {}  # the kernel's number of each folder's watch
        self._is_new = False  # a folder is followed that nobody has looked at since
        self._inotify = -1
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            self._add, self._remove = libc.inotify_add_watch, libc.inotify_rm_watch
            self._inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def follow(self, root: Path, folders: list[str]) -> None:
        """Also be woken by what happens right in these. Where one is new, of whatever name, the next
        `wait` returns at once: something may have been written to it between its listing and now.
        """
        if self._inotify < 0:
            return
        before, self._watched = self._watched, {}
        for folder in folders[:_MAX_WATCHED]:  # a watch is the folder's, not its name's
            number = self._add(self._inotify, os.fsencode(root / folder), _MASK)
            if number >= 0:
                self._watched[folder] = number
        self._is_new |= not {*self._watched.values()} <= {*before.values()}
        for number in {*before.values()} - {*self._watched.values()}:
            self._remove(self._inotify, number)

    def wake(self) -> None:
        """From a signal handler or another thread."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"x")

    def wait(self, timeout_s: float) -> None:
        if self._is_new:
            self._is_new = False
            return
        watched = [self._read, *([self._inotify] if self._inotify >= 0 else [])]
        ready, _, _ = select.select(watched, [], [], max(0.0, timeout_s))
        for descriptor in ready:
            with contextlib.suppress(OSError):
                os.read(descriptor, 1 << 16)

    def close(self) -> None:
        for descriptor in (self._read, self._write, self._inotify):
            if descriptor >= 0:
                os.close(descriptor)
