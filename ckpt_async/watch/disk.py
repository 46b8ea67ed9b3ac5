"""Reads a folder into a `Tree`.

Nothing is written, no symbolic link is followed, and what disappears during a scan counts as absent. FIFOs, sockets and
devices have no content, and are no part of a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_async.core import keys
from ckpt_async.formats import Identity, Tree
from ckpt_async.restore.destination import PARTIAL_FOLDER

# Folders that no trainer writes checkpoints to: hidden ones, and Python's.
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
# Where `hf download --local-dir` keeps unfinished files, below the folder that each file will be moved to.
_HUB_FOLDER, _HUB_UNFINISHED = ".cache/huggingface/download", ".incomplete"
# Limits on the file content that is remembered (markers, and ends of files). The `.metadata` of 5 million
# shards is not remembered.
_MAX_REMEMBERED_BYTES = 1 << 20
_MAX_ALL_REMEMBERED_BYTES = 64 << 20
_ONE_BYTES = 512  # overhead of remembering one item, beside its content
# How often everything is read again because folders changed while they were read.
_MAX_READ_ANEW = 3
# The size of a sample.
_NUM_BLOCKS, _BLOCK_BYTES = 16, 4096
# statx(2)
_AT_FDCWD, _NOFOLLOW, _BTIME = -100, 0x100, 0x800


def identity_of(facts: os.stat_result) -> Identity:
    return Identity(facts.st_ino, facts.st_size, facts.st_mtime_ns)


def sample(path: Path) -> int | None:
    """Return the CRC-32 of a few blocks of a file, or of all of a small file; None if it cannot be read.

    Files with different samples differ.
    """
    checksum = 0
    try:
        with path.open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes <= _NUM_BLOCKS * _BLOCK_BYTES:
                return zlib.crc32(file.read(size_bytes))
            last = size_bytes - _BLOCK_BYTES
            for number in range(_NUM_BLOCKS):
                file.seek(last * number // (_NUM_BLOCKS - 1))
                checksum = zlib.crc32(file.read(_BLOCK_BYTES), checksum)
    except OSError:
        return None
    return checksum


def born_ns(path: Path) -> int:
    """Return when a file was made; 0 if the file system, or libc, does not tell.

    An inode that is reused has another birth time. (Python has no statx before 3.15.)
    """
    facts = ctypes.create_string_buffer(256)
    try:
        error = ctypes.CDLL(None).statx(_AT_FDCWD, os.fsencode(path), _NOFOLLOW, _BTIME, facts)
    except AttributeError:
        return 0
    (known,) = struct.unpack_from("I", facts, 0)
    seconds, nanoseconds = struct.unpack_from("qI", facts, 80)
    return 0 if error or not known & _BTIME else int(seconds * 10**9 + nanoseconds)


@dataclass(slots=True)
class _Listing:
    files: dict[str, Identity] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    ctime_ns: dict[str, int] = field(default_factory=dict)
    folders: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)
    fetching: dict[str, str] = field(default_factory=dict)


class Disk:
    """One folder that is scanned repeatedly; the content of files that have not changed is not read twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[str, int, int, Identity], bytes] = {}
        self._known_bytes = 0
        self._memo: dict[tuple[str, str, Identity], Any] = {}

    def scan(self) -> Tree:
        """Return a consistent scan of the folder.

        No folder was changed while it was read, or else its change time says so.
        """
        now_ns = time.time_ns()
        for _ in range(_MAX_READ_ANEW):
            found = self._walk()
            changed = [each for each, was in found.folders.items() if self._time_of(each) != was]
            if not changed:
                break
        changed_ns = {folder: mtime_ns for folder, (_, mtime_ns, _) in found.folders.items()}
        changed_ns |= dict.fromkeys(changed, time.time_ns())
        ctime_ns = {folder: each for folder, (_, _, each) in found.folders.items()} | found.ctime_ns
        files, links = found.files, tuple(sorted(found.links))

        def read(path: str, offset: int, size_bytes: int) -> bytes:
            return self._read(path, offset, size_bytes, files[path])

        self._memo = {key: each for key, each in self._memo.items() if files.get(key[1]) == key[2]}
        return Tree(
            *(files, read, self.folder.name, now_ns, changed_ns, links, self._memo, ctime_ns),
            unreadable=found.unreadable,
            fetching=found.fetching,
            born_ns=lambda path: born_ns(self.folder / path),
        )

    def is_so(self, paths: Iterable[str], tree: Tree) -> bool:
        """Return whether these files are still as that scan saw them, so that what was read of them since is theirs."""
        with contextlib.suppress(OSError):
            return all(identity_of((self.folder / each).lstat()) == tree.files[each] for each in paths)
        return False

    def _walk(self) -> _Listing:
        found, waiting = _Listing(), [""]
        while waiting:
            here = waiting.pop()
            found.folders[here] = self._time_of(here)
            try:
                with os.scandir(self.folder / here) as scanned:
                    entries = list(scanned)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:  # it exists, but its content is unknown
                found.unreadable[here] = error.strerror or str(error)
                continue
            # This is a run's remote or an uploader's folder: its content is being uploaded or already is.
            if here and any(each.name == keys.PRIVATE for each in entries):
                continue
            for entry in entries:
                path = f"{here}/{entry.name}" if here else entry.name
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    found.unreadable[path] = error.strerror or str(error)
                    continue
                if stat.S_ISREG(facts.st_mode):
                    found.files[path] = identity_of(facts)
                    found.ctime_ns[path] = facts.st_ctime_ns
                elif stat.S_ISLNK(facts.st_mode):
                    found.links.append(path)
                elif stat.S_ISDIR(facts.st_mode):
                    if not _is_skipped(entry.name):
                        waiting.append(path)
                    elif entry.name == PARTIAL_FOLDER:
                        found.fetching[here] = path
                    elif entry.name == _HUB_FOLDER.partition("/")[0]:
                        found.fetching |= self._hub_fetches(here)
        return found

    def _hub_fetches(self, here: str) -> dict[str, str]:
        """Return unfinished downloads of the Hugging Face Hub, by the folder that each file will be moved to."""
        found, begin = {}, self.folder / here / _HUB_FOLDER
        for place, _, names in os.walk(begin):
            unfinished = [each for each in names if each.endswith(_HUB_UNFINISHED)]
            if unfinished:
                to = (Path(here) / Path(place).relative_to(begin)).as_posix()
                path = (Path(place) / min(unfinished)).relative_to(self.folder).as_posix()
                found["" if to == "." else to] = path
        return found

    def _time_of(self, folder: str) -> tuple[int, int, int]:
        """Return a folder's inode and when it was changed; zeros if it is gone."""
        with contextlib.suppress(OSError):
            facts = (self.folder / folder).stat()
            return facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns
        return 0, 0, 0

    def _read(self, path: str, offset: int, size_bytes: int, identity: Identity) -> bytes:
        place = (path, offset, size_bytes, identity)
        if (known := self._known.get(place)) is not None:
            return known
        data = b""
        with contextlib.suppress(OSError):
            descriptor = os.open(
                self.folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            )
            try:
                start = offset if offset >= 0 else max(0, identity.size_bytes + offset)
                while size_bytes > len(data):
                    more = os.pread(descriptor, size_bytes - len(data), start + len(data))
                    if not more:
                        break
                    data += more
                if identity_of(os.fstat(descriptor)) != identity:
                    return b""  # it is being written; the next scan sees the result
            finally:
                os.close(descriptor)
            if len(data) <= _MAX_REMEMBERED_BYTES:
                self._known[place] = data
                self._known_bytes += len(data) + _ONE_BYTES
                while self._known_bytes > _MAX_ALL_REMEMBERED_BYTES:
                    self._known_bytes -= len(self._known.pop(next(iter(self._known)))) + _ONE_BYTES
        return data


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED
