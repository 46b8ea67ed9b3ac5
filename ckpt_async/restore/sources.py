"""The places that a file's bytes may come from, nearest first: this node's own copy, a peer node, the store."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, Self

from ckpt_async.core import keys
from ckpt_async.core.model import without_slash
from ckpt_async.errors import (
    CkptAsyncError,
    FailureReason,
    ObjectArchivedError,
    ObjectNotFoundError,
    StoreError,
)
from ckpt_async.local import journals
from ckpt_async.local.folder import place_of
from ckpt_async.restore.checkpoint import Checkpoint, RemoteFile
from ckpt_async.restore.session import MAX_REQUEST_BYTES, HeldLease, Pace, Session, damaged
from ckpt_async.stores.interface import Sink
from ckpt_async.threads import in_thread
from ckpt_async.transfer.patient import PatientStore

# A store gives these refusals itself, but so do proxies and other servers that answer in its place.
_REFUSALS = (FailureReason.OTHER, FailureReason.NOT_FOUND)

SLICE_BYTES = 1 << 20
# Begins a range from its start and returns a sink, which takes the slices in a worker thread.
SinkFactory = Callable[[], Sink]


class FileSource(Protocol):
    """A source of ranges of one file. It is never trusted: the bytes are compared with the file's checksum."""

    @property
    def kind(self) -> str:
        """local | peer | remote: for reports."""
        ...

    def turn(self) -> AbstractAsyncContextManager[Turn]:
        """Wait until a range may be requested."""
        ...


class Turn(Protocol):
    """One slot among a source's concurrent reads; requests in one turn run one after the other."""

    def request_bytes(self, left_bytes: int) -> int:
        """Return how many bytes to request, given that nobody has requested `left_bytes` yet."""
        ...

    async def get_range(self, offset: int, size_bytes: int, sink: SinkFactory) -> None:
        """Pass a range to a sink, in order. `sink` makes the receiver: a new one for every attempt, which is not
        called any more once this method has returned, raised or been cancelled. Raises CkptAsyncError or OSError;
        then another source is tried.
        """
        ...


def _is_refusal(error: StoreError) -> bool:
    return error.reason in _REFUSALS and not isinstance(error, ObjectArchivedError)


class StoreSource:
    """The store itself, read under the reader's lease. Raises DamagedCheckpointError or CheckpointGoneError if it
    does not have the file as it was committed.
    """

    kind = "remote"

    def __init__(self, opened: Session, lease: HeldLease, checkpoint: Checkpoint, file: RemoteFile) -> None:
        self._opened, self._lease, self._checkpoint, self._file = opened, lease, checkpoint, file

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        async with self._opened.bulk.turn() as store:
            yield _StoreTurn(self, store, self._opened.pace)

    async def get_range(self, store: PatientStore, offset: int, size_bytes: int, sink: SinkFactory) -> None:
        @contextlib.asynccontextmanager
        async def receive() -> AsyncIterator[Sink]:
            self._lease.check()
            try:
                yield sink()
            except StoreError as error:
                await self._check_meant(error)
                raise

        try:
            await store.get_range(self._file.key, offset, size_bytes, receive)
        except StoreError as error:
            if reason := await self._damage(error):
                raise await damaged(self._opened, self._checkpoint, reason) from error
            raise

    async def _check_meant(self, error: StoreError) -> None:
        """Raise a transient error if the store does have the object as it was committed: then the refusal did not
        come from the store, or was not meant for this request.
        """
        if _is_refusal(error):
            there = await self._opened.store.head(self._file.key)
            if there.size_bytes == self._file.size_bytes:
                raise StoreError(
                    f"{error}; but HEAD shows that the object exists", reason=FailureReason.TRANSIENT
                ) from error

    async def _damage(self, error: StoreError) -> str:
        """Return how the object differs from what was committed, after a refused read; "" if it does not. A range
        beyond the object's end is refused in the same way as many other requests.
        """
        key = self._file.key
        if not _is_refusal(error):
            return ""
        try:
            there = await self._opened.store.head(key)
        except ObjectNotFoundError:
            return f"{key} is missing"
        if there.size_bytes == self._file.size_bytes:
            return ""
        return f"{key} has {there.size_bytes} bytes instead of {self._file.size_bytes}"


class _StoreTurn:
    def __init__(self, source: StoreSource, store: PatientStore, pace: Pace) -> None:
        self._source, self._store, self._pace = source, store, pace

    def request_bytes(self, left_bytes: int) -> int:
        if not self._store.link.connection_bytes_per_s:
            # Small requests: after the first look at the link the concurrency may drop, while running
            # requests continue.
            return 0
        return self._pace.request_bytes(left_bytes, self._store.concurrency)

    async def get_range(self, offset: int, size_bytes: int, sink: SinkFactory) -> None:
        began = time.monotonic()
        await self._source.get_range(self._store, offset, size_bytes, sink)
        self._pace.took(size_bytes, time.monotonic() - began)


class AnyTime:
    """A source whose reads wait for nothing but the source itself: it is always their turn."""

    def turn(self) -> AbstractAsyncContextManager[Self]:
        return contextlib.nullcontext(self)

    def request_bytes(self, left_bytes: int) -> int:
        return min(left_bytes, MAX_REQUEST_BYTES)


class LocalSource(AnyTime):
    """A file on this node that has the right size and, if `facts` are given, has not changed since."""

    kind = "local"

    def __init__(self, path: Path, facts: os.stat_result | None = None) -> None:
        self._path, self._facts = path, facts

    async def get_range(self, offset: int, size_bytes: int, sink: SinkFactory) -> None:
        await in_thread(self._read, offset, size_bytes, sink())

    def read_into(self, wants: Iterable[tuple[int, memoryview]]) -> None:
        """Fill these buffers, each from its offset, without an intermediate copy. Blocks."""
        with self._opened() as descriptor:
            for offset, buffer in wants:
                left = buffer
                while left:
                    count = self._fill(descriptor, left, offset + len(buffer) - len(left))
                    left = left[count:]

    def _read(self, offset: int, size_bytes: int, sink: Sink) -> None:
        buffer = memoryview(bytearray(min(SLICE_BYTES, size_bytes)))
        end = offset + size_bytes
        with self._opened() as descriptor:
            while offset < end:
                count = self._fill(descriptor, buffer[: end - offset], offset)
                sink(buffer[:count])
                offset += count

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if self._facts is not None and not _is_same(self._facts, os.fstat(descriptor)):
                raise OSError(errno.ESTALE, "the file has changed since it was verified", str(self._path))
            yield descriptor
        finally:
            os.close(descriptor)

    def _fill(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        count = os.preadv(descriptor, [buffer], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file was truncated while being read", str(self._path))
        return count


def _is_same(a: os.stat_result, b: os.stat_result) -> bool:
    return os.path.samestat(a, b) and (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


class LocalCopies:
    """The copies that this node may still have of a checkpoint.

    These are the trainer's own files, found through the journal and at their usual paths, and the spool's links. In
    addition, `local_cache` has a copy of this very checkpoint if its user says so: it is a folder named like the
    checkpoint, or contains one.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        checkpoint: Checkpoint,
        local_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        cache = None if local_cache is None else place_of(local_cache)
        is_itself = cache is not None and cache.name == checkpoint.name
        self._cache = cache if cache is None or is_itself else cache / checkpoint.name
        self._folder = place_of(folder) if folder is not None else None
        self._checkpoint = checkpoint
        self._sources = dict(_sources(self._folder, checkpoint)) if self._folder else {}
        self._privates = _privates(self._folder) if self._folder else []

    def find(self, file: RemoteFile) -> list[Path]:
        """Return regular files of the right size, the likeliest first. Their bytes are not read. A file without a
        checksum is therefore looked for only in the cache, because the files of other steps have the same size.
        """
        cached = [] if self._cache is None else [self._cache / file.name]
        if self._folder is None or file.checksum is None:
            return [path for path in cached if has_size(path, file.size_bytes)]
        candidates = [self._sources.get(file.name), f"{self._checkpoint.name}/{file.name}", file.name]
        paths = [self._folder / each for each in candidates if each is not None]
        paths += [
            private / keys.spool_checkpoint(self._checkpoint.id, rank) / file.name
            for private in self._privates
            for rank in file.ranks
        ]
        return [path for path in dict.fromkeys([*cached, *paths]) if has_size(path, file.size_bytes)]


def has_size(path: Path, size_bytes: int) -> bool:
    """Return whether there is a regular file (no symlink) of this size."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(there.st_mode) and there.st_size == size_bytes


def _privates(folder: Path) -> list[Path]:
    return [journals.private_of(folder, kind) for kind in journals.kinds(folder)]


def _sources(folder: Path, checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    """Yield where the trainer wrote the checkpoint's files, as far as the journals remember; if several kinds
    match, the right one comes last. It is only a hint.
    """
    try:
        found = journals.read_all(folder)
    except CkptAsyncError:
        return
    locals_ = [reading.local() for readings in found.values() for reading in readings.values()]
    there = without_slash(checkpoint.remote)
    for local in sorted(locals_, key=lambda each: bool(each.remote and each.remote.url == there)):
        known = local.checkpoints.get(checkpoint.id)
        for each in known.shards.values() if known is not None else ():
            yield each.shard.name, each.shard.source
