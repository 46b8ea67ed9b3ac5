"""A shard's bytes: checksums, and bodies of requests, read slice by slice.

They are read through small reused buffers, never mapped: truncating a mapped file is a SIGBUS that kills the trainer,
while here it is an error. Memory does not grow with the shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator

from ckpt_async.core.model import Checksum, FileIdentity
from ckpt_async.errors import FailureReason, SourceError, StoreError
from ckpt_async.local.folder import check_identity
from ckpt_async.stores.checksums import Digest
from ckpt_async.stores.interface import BodyWriter, Sink
from ckpt_async.transfer.progress import Progress

MIB = 1 << 20
# Read and checksummed at a time: training in the same interpreter loses a moment with each, and two such are in memory.
SLICE_BYTES = 8 * MIB
# What is checksummed and encrypted at a time stays in the cache; with less, threads hand the interpreter's lock round
# more often. With half or four times as much, an upload over TLS takes a twelfth more CPU.
THREAD_SLICE_BYTES = 512 << 10
# What the kernel is asked to send at a time, at most: with each call training in the same interpreter loses a moment.
SEND_BYTES, FIRST_SEND_BYTES, MIN_SEND_BYTES = 8 * MIB, 256 << 10, 64 << 10
# It is asked for less where that took longer: on a slow link, so much that it would pass for a stall.
FAST_S = 0.1
# Checksums run at 8 GiB/s. More of one shard at once would only make all its parts wait for theirs at the same
# time, with nothing on the wire: measured, 8 at once cost about a quarter of the throughput of a 1 GiB file.
CHECKSUMS_AT_ONCE = 2
TURN_S = 0.1
# Read in one go while checksumming: at 10 MB/s, a bad disk, still well below `stall_timeout_s`.
CHECKSUM_BYTES = 64 * MIB
# Some file systems (FUSE with direct I/O) give no pages to send.
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


_free_buffers: list[memoryview] = []


@contextlib.contextmanager
def _slice_buffer() -> Iterator[memoryview]:
    """Of SLICE_BYTES. Fresh memory costs a page fault for every 4 KiB: as many are kept as one shard uses."""
    try:
        buffer = _free_buffers.pop()
    except IndexError:
        buffer = memoryview(mmap.mmap(-1, SLICE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    try:
        yield buffer
    finally:
        if len(_free_buffers) < CHECKSUMS_AT_ONCE:
            _free_buffers.append(buffer)


class Source:
    """An open shard, checked to be the file that was enqueued. Close it."""

    def __init__(self, descriptor: int, identity: FileIdentity, path: str) -> None:
        self.descriptor, self.identity, self.path = descriptor, identity, path
        self._checksums = asyncio.Semaphore(CHECKSUMS_AT_ONCE)
        self._turns, self._num_slices_read = threading.Semaphore(CHECKSUMS_AT_ONCE), 0
        self._on_read: list[Callable[[], None]] = []
        self.send_bytes = FIRST_SEND_BYTES  # at a time: what its last part has come to, for they share a link

    @property
    def size_bytes(self) -> int:
        return self.identity.size_bytes

    def close(self) -> None:
        os.close(self.descriptor)

    def check(self) -> None:
        """Raise SourceError if the file was changed since it was enqueued. Done after the last read."""
        check_identity(self.descriptor, self.identity, self.path)

    async def checksum(
        self, offset: int, size_bytes: int, algorithm: str, moved: Callable[[], None] = lambda: None
    ) -> Checksum:
        """Checksum of a range, read in a worker thread. `moved` is called as it goes: where there are no parts, a
        shard takes longer than any stall may last.
        """
        digest, end = Digest(algorithm), offset + size_bytes
        self._on_read.append(moved)
        try:
            async with self._checksums:
                while offset < end:
                    stretch = min(CHECKSUM_BYTES, end - offset)
                    await asyncio.to_thread(self.read_out, digest.update, offset, stretch)
                    offset += stretch
                    for each in self._on_read:
                        each()  # who waits for its turn has not stalled either
        finally:
            self._on_read.remove(moved)
        return digest.checksum()

    def read_out(
        self,
        sink: Sink,
        offset: int,
        size_bytes: int,
        moved: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Give a range to `sink`, in the calling thread. `moved` is called as long as some thread gets on with this
        shard, `check` now and then, which ends it by raising.
        """
        num_slices_read = self._num_slices_read
        check()
        while not self._turns.acquire(timeout=TURN_S):
            check()
            if num_slices_read != self._num_slices_read:
                num_slices_read = self._num_slices_read
                moved()  # who waits for its turn has not stalled either
        try:
            for piece in self._pieces(offset, size_bytes):
                sink(piece)
                self._num_slices_read += 1
                moved()
                check()
        finally:
            self._turns.release()

    async def md5(self, offset: int, size_bytes: int) -> str:
        """MD5 of a range in hex, read in a worker thread: a part's ETag, where the store says nothing else."""
        return await asyncio.to_thread(self._md5, offset, size_bytes)

    def _md5(self, offset: int, size_bytes: int) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        self.read_out(digest.update, offset, size_bytes)
        return digest.hexdigest()

    def _pieces(self, offset: int, size_bytes: int) -> Iterator[memoryview]:
        end = offset + size_bytes
        with _slice_buffer() as buffer:
            while offset < end:
                piece = buffer[: min(len(buffer), end - offset)]
                self.read_into(piece, offset)
                offset += len(piece)
                yield piece

    def read(self) -> bytes:
        """All of a small shard."""
        data = b""
        while len(data) < self.size_bytes:
            try:
                more = os.pread(self.descriptor, self.size_bytes - len(data), len(data))
            except OSError as error:
                raise self.unreadable(error) from error
            if not more:
                raise self.truncated()
            data += more
        return data

    def read_into(self, piece: memoryview, offset: int, flags: int = 0) -> None:
        """Fill `piece`; a file that ends early was truncated."""
        filled = 0
        while filled < len(piece):
            try:
                count = os.preadv(self.descriptor, [piece[filled:]], offset + filled, flags)
            except BlockingIOError:
                raise
            except OSError as error:
                raise self.unreadable(error) from error
            if count == 0:
                raise self.truncated()
            filled += count

    def unreadable(self, error: OSError) -> StoreError:
        return StoreError(f"shard {self.path!r} cannot be read: {error.strerror}", reason=FailureReason.DISK)

    def truncated(self) -> SourceError:
        return SourceError(
            f"shard {self.path!r} was truncated while it was read", reason=FailureReason.SOURCE_CHANGED
        )


class FileBody:
    """A range of a shard as a request body."""

    def __init__(self, source: Source, offset: int, size_bytes: int, progress: Progress) -> None:
        self._source, self._offset, self._size_bytes, self._progress = source, offset, size_bytes, progress

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read(self, sink: Sink, check: Callable[[], None]) -> None:
        """As promised; of one shard, few at once."""
        self._source.read_out(sink, self._offset, self._size_bytes, self._progress.moved_in_thread, check)

    def send(self, writer: BodyWriter) -> None:
        """Where it can, the kernel sends the file's own pages: measured, that halves the CPU of an upload. They were
        read for the checksum a moment ago, so that this rarely waits for the disk; what is written to the file
        meanwhile fails that checksum in the store. Else it goes through one small buffer.
        """
        self._progress.queued_bytes = writer.queued_bytes
        try:
            self._source.send_bytes = self._send(writer)
        except BaseException:
            self._source.send_bytes = FIRST_SEND_BYTES
            raise
        self._source.check()

    def _send(self, writer: BodyWriter) -> int:
        """How much was sent at a time in the end."""
        offset, end = self._offset, self._offset + self._size_bytes
        takes_files, buffer = writer.takes_files, memoryview(b"")
        now, send_bytes = time.monotonic(), self._source.send_bytes
        while offset < end:
            most = SEND_BYTES if takes_files else THREAD_SLICE_BYTES
            size_bytes = min(send_bytes, most, end - offset)
            self._progress.may_send_in_thread(size_bytes, writer.wait)
            count = self._send_file(writer, offset, size_bytes) if takes_files else None
            if count is None:
                takes_files = False
                buffer = buffer or memoryview(bytearray(min(THREAD_SLICE_BYTES, end - offset)))
                piece = buffer[:size_bytes]
                self._source.read_into(piece, offset)
                writer.write(piece)
                count = len(piece)
            if count < size_bytes:
                self._progress.not_sent(size_bytes - count)
            offset += count
            began, now = now, time.monotonic()
            is_fast = now - began < FAST_S
            send_bytes = min(2 * send_bytes, SEND_BYTES) if is_fast else max(send_bytes // 2, MIN_SEND_BYTES)
            self._progress.moved_in_thread(is_last=offset == end)
        return send_bytes

    def _send_file(self, writer: BodyWriter, offset: int, size_bytes: int) -> int | None:
        """How much the kernel took; None where it sends no files."""
        try:
            count = writer.send_file(self._source.descriptor, offset, size_bytes)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            if error.errno in _NO_SENDFILE:
                return None
            raise self._source.unreadable(error) from error
        if count == 0:
            raise self._source.truncated()
        return count
