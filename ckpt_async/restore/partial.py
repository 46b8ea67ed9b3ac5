"""A file that is being fetched: it has its full size, is locked, and resumes after a kill from the complete ranges."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

from ckpt_async.core.model import Checksum
from ckpt_async.local.durable import FsyncError, fsync_descriptor
from ckpt_async.restore.lanes import num_of_cores
from ckpt_async.stores.checksums import Digest, combine
from ckpt_async.stores.interface import Sink

# The unit in which complete ranges are recorded, one per line, so that they are not fetched again after a
# kill. One request asks for several. If a file has more than MAX_RANGES of them, its ranges are a multiple of
# this size.
RANGE_BYTES = 4 << 20
MAX_RANGES = 10_000
READ_BYTES = 1 << 20
SHARE_BYTES = 64 << 20
LOCK_POLL_S = 0.05


class PartialFile:
    """A partial file: `<folder>/<tag>` holds the bytes, `<folder>/<tag>.ranges` records the complete ranges.
    Blocking calls.
    """

    def __init__(self, path: Path, descriptor: int, size_bytes: int, algorithm: str) -> None:
        self._path, self._descriptor = path, descriptor
        self._size_bytes, self.algorithm = size_bytes, algorithm
        step = RANGE_BYTES * max(1, -(-size_bytes // (RANGE_BYTES * MAX_RANGES)))
        self._sizes = {offset: min(step, size_bytes - offset) for offset in range(0, size_bytes, step)}
        self._whole: dict[int, Checksum] = {}
        # A file of one range needs no record: it is published as soon as the range is complete.
        self._is_recorded = len(self._sizes) > 1

    def prepare(self) -> int:
        """Set the file's size, and read what an earlier fetch recorded: a range counts if its bytes still have the
        checksum with which they arrived. Returns the number of bytes that need not be fetched again.
        """
        os.ftruncate(self._descriptor, self._size_bytes)
        if not self._is_recorded:
            return 0
        with (
            contextlib.suppress(FileNotFoundError),
            open(_record_of(self._path), encoding="ascii", errors="replace", opener=_unlinked) as record,
        ):
            for line in record.read().splitlines():
                offset, _, value = line.partition(" ")
                if offset.isdecimal() and int(offset) in self._sizes:
                    recorded = Checksum(self.algorithm, value)
                    if self.checksum_of_range(int(offset)) == recorded:
                        self._whole[int(offset)] = recorded
        return sum(self._sizes[offset] for offset in self._whole)

    @property
    def facts(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    @property
    def is_empty(self) -> bool:
        """Whether the file has no complete range yet."""
        return not self._whole

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Offset and size of every range that has yet to be fetched."""
        return [(offset, size) for offset, size in self._sizes.items() if offset not in self._whole]

    def write(self, piece: memoryview, offset: int) -> None:
        while piece:
            count = os.pwrite(self._descriptor, piece, offset)
            piece, offset = piece[count:], offset + count

    def sink(self, ranges: Sequence[tuple[int, int]]) -> Sink:
        """Return a sink for the bytes of these adjacent ranges. Ranges that an earlier attempt has completed are
        left as they are, because their checksums are known.
        """
        left = deque(ranges)
        position, digest = left[0][0], Digest(self.algorithm)

        def take(piece: memoryview) -> None:
            nonlocal position, digest
            while piece:
                offset, size_bytes = left[0]
                part = piece[: offset + size_bytes - position]
                if offset not in self._whole:
                    digest.update(part)
                    self.write(part, position)
                position, piece = position + len(part), piece[len(part) :]
                if position == offset + size_bytes:
                    if offset not in self._whole:
                        self.finished(offset, digest.checksum())
                    left.popleft()
                    digest = Digest(self.algorithm)

        return take

    def finished(self, offset: int, checksum: Checksum) -> None:
        """Record that the whole range is written."""
        if self._is_recorded:
            with open(_record_of(self._path), "a", encoding="ascii", opener=_unlinked) as record:
                record.write(f"{offset} {checksum.value}\n")
        self._whole[offset] = checksum

    def checksum_of_range(self, offset: int) -> Checksum:
        return _digest(self._descriptor, offset, self._sizes[offset], self.algorithm)

    def checksum(self) -> Checksum:
        """Return the checksum of the whole file, combined from those of its ranges."""
        return combine([(self._whole[offset], size) for offset, size in self._sizes.items()], self.algorithm)

    def forget(self) -> None:
        """Forget all ranges, because the content is wrong: everything is fetched again."""
        self._whole.clear()
        _record_of(self._path).unlink(missing_ok=True)

    def publish(self, target: Path, *, modified_ns: int) -> None:
        """Give the file its time, and move it to its place, atomically. Its bytes are then durable; its name is durable
        once the folder has been fsynced.

        Raises FsyncError and discards the file if the fsync fails: its cached pages may never reach the disk.
        """
        os.utime(self._descriptor, ns=(modified_ns, modified_ns))
        try:
            fsync_descriptor(self._descriptor, target)
        except FsyncError:
            discard(self._path)
            raise
        os.replace(self._path, target)
        if self._is_recorded:
            _record_of(self._path).unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def locked(path: Path, size_bytes: int, algorithm: str) -> AsyncIterator[PartialFile]:
    """Open the partial file once nobody else is fetching it: ranks of a node that need the same file wait here."""
    while True:
        with locked_now(path, size_bytes, algorithm) as partial:
            if partial is not None:
                yield partial
                return
        await asyncio.sleep(LOCK_POLL_S)


@contextlib.contextmanager
def locked_now(path: Path, size_bytes: int, algorithm: str) -> Iterator[PartialFile | None]:
    """Like `locked`, but yield None if another process is fetching the file, or has published it at this very
    moment.
    """
    descriptor = _open(path)
    try:
        if not _try_lock(descriptor):
            yield None
            return
        try:
            is_there = _is_at(path, descriptor)
            yield PartialFile(path, descriptor, size_bytes, algorithm) if is_there else None
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold the descriptor too
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            # The process that finished before us has removed the folder, and may do so again.
            path.parent.mkdir(0o700, exist_ok=True)


def discard(path: Path) -> None:
    """Remove a partial file and what was recorded of it."""
    path.unlink(missing_ok=True)
    _record_of(path).unlink(missing_ok=True)


def discard_unlocked(path: Path) -> None:
    """Like `discard`, unless another process is fetching the file: it would then publish a file that no longer
    exists.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        _record_of(path).unlink(missing_ok=True)
        return
    try:
        if _try_lock(descriptor):
            discard(path)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _unlinked(path: str, flags: int) -> int:
    """Open a file, but none that a symbolic link leads to."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.ranges")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def checksum_of_file(path: Path, algorithm: str, is_over: Callable[[], bool] = lambda: False) -> Checksum:
    """Return the checksum of a regular file, using all cores for a large one.

    Raises OSError; CancelledError as soon as `is_over`, because a large file takes long.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes <= SHARE_BYTES:
            return _digest(descriptor, 0, size_bytes, algorithm, is_over)
        sizes = {at: min(SHARE_BYTES, size_bytes - at) for at in range(0, size_bytes, SHARE_BYTES)}
        with ThreadPoolExecutor(min(num_of_cores(), len(sizes)), "ckpt-async-checksum") as threads:
            shares = threads.map(lambda at: _digest(descriptor, at, sizes[at], algorithm, is_over), sizes)
            return combine(list(zip(shares, sizes.values(), strict=True)), algorithm)
    finally:
        os.close(descriptor)


def _digest(
    descriptor: int, offset: int, size_bytes: int, algorithm: str, is_over: Callable[[], bool] = lambda: False
) -> Checksum:
    digest = Digest(algorithm)
    buffer = memoryview(bytearray(min(READ_BYTES, max(size_bytes, 1))))
    end = offset + size_bytes
    while offset < end:
        if is_over():
            raise CancelledError
        count = os.preadv(descriptor, [buffer[: end - offset]], offset)
        if count == 0:
            break  # the file was truncated underneath us: the checksum will not match
        digest.update(buffer[:count])
        offset += count
    return digest.checksum()
