"""Wakes a watcher early: inotify tells that something happened in a folder, and only a scan tells what is there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from collections.abc import Iterable
from pathlib import Path

# inotify(7): files closed after writing, renamed into place, or made; folders made; the folder itself
# renamed.
_CLOSE_WRITE, _MOVED_TO, _CREATE, _MOVE_SELF = 0x8, 0x80, 0x100, 0x800
_MASK = _CLOSE_WRITE | _MOVED_TO | _CREATE | _MOVE_SELF
# A folder of datasets must not use up every watch of the machine.
_MAX_WATCHED = 4096


def _readable(descriptors: Iterable[int], timeout_s: float) -> set[int]:
    """Return the readable descriptors as soon as there is one, not by select(), which takes none above 1,023."""
    poll = select.poll()
    for descriptor in descriptors:
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}


class Waker:
    """Waits for a time, or until something happens in the followed folders. Without inotify, it waits for the time."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._watched: dict[str, int] = {}  # each folder's watch descriptor
        self._is_new = False  # a newly followed folder was not looked at yet
        self._inotify = -1
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            self._add, self._remove = libc.inotify_add_watch, libc.inotify_rm_watch
            self._inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def follow(self, root: Path, folders: list[str]) -> None:
        """Also wake up for what happens directly in these folders.

        If one of them is new, under any name, the next `wait` returns at once: something may have been written to it
        between its listing and now.
        """
        if self._inotify < 0:
            return
        before, self._watched = self._watched, {}
        for folder in folders[:_MAX_WATCHED]:  # a watch follows the folder, not its name
            number = self._add(self._inotify, os.fsencode(root / folder), _MASK)
            if number >= 0:
                self._watched[folder] = number
        self._is_new |= not {*self._watched.values()} <= {*before.values()}
        for number in {*before.values()} - {*self._watched.values()}:
            self._remove(self._inotify, number)

    def wake(self) -> None:
        """End the current `wait`; called from a signal handler or another thread."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"x")

    def wait(self, timeout_s: float, *, rest_s: float = 0.0) -> None:
        """Wait for `timeout_s`, or until something happens. During the first `rest_s`, only `wake` ends it."""
        if rest_s > 0 and _readable([self._read], min(rest_s, timeout_s)):
            os.read(self._read, 1 << 16)
            return
        if self._is_new:
            self._is_new = False
            return
        ready = _readable([self._read, self._inotify], max(0.0, timeout_s))
        if self._read in ready:
            os.read(self._read, 1 << 16)
        if self._inotify in ready:
            with contextlib.suppress(OSError):  # EAGAIN: no more events; only a scan tells what is there
                while os.read(self._inotify, 1 << 16):
                    pass

    def close(self) -> None:
        """Release the descriptors; from then on, `wake` does nothing. Idempotent."""
        descriptors = self._read, self._write, self._inotify
        self._read = self._write = self._inotify = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)
