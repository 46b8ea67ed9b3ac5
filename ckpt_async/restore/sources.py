"""Where a file's bytes may come from, nearest first: this node's own copy, a peer node, the store."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ckpt_async import keys
from ckpt_async.errors import CkptAsyncError, NoJournalError
from ckpt_async.journal import Journal
from ckpt_async.model import Local, fold
from ckpt_async.requests import Progress
from ckpt_async.restore.checkpoint import Checkpoint, RemoteFile
from ckpt_async.restore.session import HeldLease, Session
from ckpt_async.store import Sink

SLICE_BYTES = 1 << 20


class FileSource(Protocol):
    """Gives ranges of one file. It is trusted with nothing: what it gave is compared with the file's checksum."""

    @property
    def kind(self) -> str:
        """local | peer | remote: for reports."""
        ...

    async def get_range(self, offset: int, size_bytes: int, sink: SinkFactory) -> None:
        """Hand over a range in order. `sink` makes the receiver; made anew for every attempt. Raises CkptAsyncError or
        OSError: then another source is tried.
        """
        ...


class SinkFactory(Protocol):
    """Begins a range from its start and returns what takes its slices, in a worker thread."""

    def __call__(self) -> Sink: ...


class StoreSource:
    """The store itself, under the reader's lease."""

    kind = "remote"

    def __init__(self, opened: Session, lease: HeldLease, file: RemoteFile) -> None:
        self._opened, self._lease, self._file = opened, lease, file

    async def get_range(self, offset: int, size_bytes: int, sink: SinkFactory) -> None:
        async def attempt(progress: Progress) -> None:
            self._lease.check()
            inner = sink()

            def told(piece: memoryview) -> None:
                inner(piece)
                progress.moved_in_thread()

            await self._opened.store.get_range(self._file.key, offset, size_bytes, told)

        await self._opened.bulk.bulk("get", size_bytes, attempt)


class LocalSource:
    """A file of this node that has the right size."""

    kind = "local"

    def __init__(self, path: Path) -> None:
        self.path = path

    async def get_range(self, offset: int, size_bytes: int, sink: SinkFactory) -> None:
        await asyncio.to_thread(self._read, offset, size_bytes, sink())

    def _read(self, offset: int, size_bytes: int, sink: Sink) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            buffer = memoryview(bytearray(min(SLICE_BYTES, size_bytes)))
            end = offset + size_bytes
            while offset < end:
                count = os.preadv(descriptor, [buffer[: end - offset]], offset)
                if count == 0:
                    raise OSError(f"{self.path} was cut short while it was read")
                sink(buffer[:count])
                offset += count
        finally:
            os.close(descriptor)


class LocalCopies:
    """What this node may still have of a checkpoint: the trainer's own files, by the journal and by their usual places,
    and the spool's links.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, checkpoint: Checkpoint) -> None:
        self._folder = Path(os.path.realpath(folder)) if folder is not None else None
        self._checkpoint = checkpoint
        self._sources = dict(_sources(self._folder, checkpoint)) if self._folder else {}

    def find(self, file: RemoteFile) -> list[Path]:
        """Regular files of the right size, the likeliest first. Their bytes are not looked at."""
        if self._folder is None:
            return []
        candidates = [self._sources.get(file.name), f"{self._checkpoint.name}/{file.name}", file.name]
        paths = [self._folder / each for each in candidates if each is not None]
        private = self._folder / keys.PRIVATE
        paths += [
            private / keys.spool_checkpoint(self._checkpoint.id, rank) / file.name for rank in file.ranks
        ]
        return [path for path in dict.fromkeys(paths) if has_size(path, file.size_bytes)]


def has_size(path: Path, size_bytes: int) -> bool:
    """Whether there is a regular file (no symlink) of this size."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(there.st_mode) and there.st_size == size_bytes


def _sources(folder: Path, checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    """Where the trainer wrote the checkpoint's files, as long as the journal remembers. It is only a hint."""
    try:
        journal = Journal.open_readonly(folder)
    except (NoJournalError, CkptAsyncError):
        return
    try:
        for rank in journal.ranks():
            local = fold(journal.rows(), Local(rank)).checkpoints.get(checkpoint.id)
            for each in local.shards.values() if local is not None else ():
                yield each.shard.name, each.shard.source
    finally:
        journal.close()
