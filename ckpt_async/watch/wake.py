"""Wakes a watcher early: inotify tells that something happened in a folder, and only a scan tells what is there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# inotify(7): files closed after writing, renamed into place, or made; folders made; the folder itself
# renamed.
_CLOSE_WRITE, _MOVED_TO, _CREATE, _MOVE_SELF = 0x8, 0x80, 0x100, 0x800
_MASK = _CLOSE_WRITE | _MOVED_TO | _CREATE | _MOVE_SELF
_OVERFLOW, _IGNORED = 0x4000, 0x8000  # events were lost; a watch ended with its folder
_EVENT = struct.Struct("iIII")
# A folder of datasets must not use up every watch of the machine.
_MAX_WATCHED = 4096
# While the folder does not exist, the folder above it is watched, since it may be made there.
_ABOVE = ".."


@dataclass(frozen=True, slots=True)
class News:
    """What happened between two looks: `paths` were made, written or renamed. No event in `folders` was missed."""

    paths: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()

    def is_untouched(self, path: str, folders: Iterable[str]) -> bool:
        """Return whether surely nothing was added to `path`, which has these folders, and nothing else took its place.

        Removals from it do not count.
        """
        above = {"" if str(each) == "." else str(each) for each in PurePosixPath(path).parents}
        return {path, *folders, *above} <= self.folders and not any(
            _is_within(each, path) or _is_within(path, each) for each in self.paths
        )


def _is_within(path: str, folder: str) -> bool:
    return not folder or path == folder or path.startswith(f"{folder}/")


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
        self._steady: frozenset[str] = frozenset()  # followed since before the newest look
        self._paths: set[str] = set()  # paths with events since then
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
        if not self._watched:
            above = next(each for each in root.absolute().parents if each.is_dir())
            if (number := self._add(self._inotify, os.fsencode(above), _MASK)) >= 0:
                self._watched[_ABOVE] = number
        self._is_new |= not {*self._watched.values()} <= {*before.values()}
        self._steady = frozenset(each for each, number in self._watched.items() if before.get(each) == number)
        for number in {*before.values()} - {*self._watched.values()}:
            self._remove(self._inotify, number)

    def wake(self) -> None:
        """End the current `wait`; called from a signal handler or another thread."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"x")

    def news(self) -> News:
        """Return what happened since the last call. Call it when a look begins, and `follow` what the look finds."""
        self._read_events()
        paths, self._paths = frozenset(self._paths), set()
        return News(paths, self._steady)

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
            self._read_events()

    def _read_events(self) -> None:
        names = {number: folder for folder, number in self._watched.items()}
        with contextlib.suppress(OSError):  # EAGAIN: no more events
            while self._inotify >= 0:
                self._understand(os.read(self._inotify, 1 << 16), names)

    def _understand(self, data: bytes, names: dict[int, str]) -> None:
        at = 0
        while at < len(data):
            number, mask, _, name_bytes = _EVENT.unpack_from(data, at)
            at += _EVENT.size + name_bytes
            folder, name = names.get(number), os.fsdecode(data[at - name_bytes : at].rstrip(b"\0"))
            if mask & _OVERFLOW or (mask & _IGNORED and folder == ""):
                self._paths.add("")
            elif folder is not None and not mask & _IGNORED:  # if it is made again, its parent tells
                self._paths.add("/".join(filter(None, (folder, name))))

    def close(self) -> None:
        """Release the descriptors; from then on, `wake` does nothing. Idempotent."""
        descriptors = self._read, self._write, self._inotify
        self._read = self._write = self._inotify = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)
