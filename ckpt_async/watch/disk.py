"""Reads a folder into a `Tree`. Nothing is written, no symlink followed, and what vanishes meanwhile is not there."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import Any

from ckpt_async.watch.tree import Identity, Tree

# Folders that no trainer writes checkpoints to: hidden ones, and Python's.
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
# What is remembered of files' contents: marks, and ends of files. A `.metadata` of 5 million shards is not.
_MAX_REMEMBERED_BYTES = 1 << 20
_MAX_REMEMBERED = 20_000


def identity_of(facts: os.stat_result) -> Identity:
    return Identity(facts.st_ino, facts.st_size, facts.st_mtime_ns)


class Disk:
    """One folder, looked at again and again: contents of files that have not changed are not read twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[str, int, int, Identity], bytes] = {}
        self._memo: dict[tuple[str, str, Identity], Any] = {}

    def look(self) -> Tree:
        files: dict[str, Identity] = {}
        changed_ns: dict[str, int] = {}
        links: list[str] = []
        now_ns = time.time_ns()
        waiting = [""]
        while waiting:
            here = waiting.pop()
            with contextlib.suppress(OSError), os.scandir(self.folder / here) as entries:
                changed_ns[here] = (
                    (self.folder / here).stat().st_mtime_ns
                )  # first: it may change while it is read
                for entry in entries:
                    path = f"{here}/{entry.name}" if here else entry.name
                    with contextlib.suppress(OSError):
                        facts = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(facts.st_mode):
                            files[path] = identity_of(facts)
                        elif stat.S_ISLNK(facts.st_mode):
                            links.append(path)
                        elif stat.S_ISDIR(facts.st_mode) and not _is_skipped(entry.name):
                            waiting.append(path)

        def read(path: str, offset: int, size_bytes: int) -> bytes:
            return self._read(path, offset, size_bytes, files[path])

        self._memo = {key: each for key, each in self._memo.items() if files.get(key[1]) == key[2]}
        return Tree(files, read, self.folder.name, now_ns, changed_ns, tuple(sorted(links)), self._memo)

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
                    return b""  # it is being written; the next look sees what it has become
            finally:
                os.close(descriptor)
            if len(data) <= _MAX_REMEMBERED_BYTES:
                while len(self._known) >= _MAX_REMEMBERED:
                    self._known.pop(next(iter(self._known)))
                self._known[place] = data
        return data


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED
