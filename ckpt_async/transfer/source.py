"""A shard's bytes, for checksums and request bodies, read slice by slice.

They are read through small reused buffers and never mapped: truncating a mapped file causes a SIGBUS that kills the
trainer, while here it is an error. Memory use does not grow with the shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterator

from ckpt_async import filesystems
from ckpt_async.core import errnos
from ckpt_async.core.model import Checksum, FileIdentity
from ckpt_async.core.units import MIB
from ckpt_async.errors import FailureReason, LocalReadError, SourceError
from ckpt_async.local.folder import check_unchanged
from ckpt_async.stores.bodies import LocalWriter
from ckpt_async.stores.checksums import Digest
from ckpt_async.stores.interface import BodyWriter, Sink
from ckpt_async.threads import result_of
from ckpt_async.transfer.progress import Progress

# How much is read and checksummed at a time. Training in the same interpreter loses a moment with each slice; two of
# them are in memory.
SLICE_BYTES = 16 * MIB
# How much is checksummed and encrypted at a time. A quarter of it would stay in the CPU's cache, but the threads would
# hand over the GIL 7,700 times per GiB instead of 3,000; the CPU time is the same.
THREAD_SLICE_BYTES = 2 * MIB
# How much the kernel is asked to send at a time: at most, at first, and at least. Training in the same interpreter
# loses a moment with each call.
SEND_BYTES, FIRST_SEND_BYTES, MIN_SEND_BYTES = 32 * MIB, 256 << 10, 64 << 10
# If a call took longer than this, the next one sends less: on a slow link, a large one would look like a stall.
FAST_S = 0.1
# Checksums run at 8 GiB/s. More of one shard at once would only make all its parts wait for their checksums at the same
# time, with nothing on the wire: measured, 8 at once cost about a quarter of the throughput of a 1 GiB file.
CHECKSUMS_AT_ONCE = 2
# How much is read in one go for a checksum: even at 10 MB/s, a bad disk, this takes far less than `stall_timeout_s`.
CHECKSUM_BYTES = 64 * MIB


_free_buffers: list[memoryview] = []


@contextlib.contextmanager
def _slice_buffer() -> Iterator[memoryview]:
    """Lend a buffer of SLICE_BYTES.

    Fresh memory costs a page fault for every 4 KiB, so as many buffers are kept as one shard uses.
    """
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
    """An open shard, checked to be the file that was enqueued. Must be closed."""

    def __init__(self, descriptor: int, identity: FileIdentity, path: str) -> None:
        self.descriptor, self.identity, self.path = descriptor, identity, path
        self._checksums = asyncio.Semaphore(CHECKSUMS_AT_ONCE)
        self._on_read: list[Callable[[], None]] = []
        self.send_bytes = FIRST_SEND_BYTES  # per call, as its last part left it, since all parts share a link

    @property
    def size_bytes(self) -> int:
        return self.identity.size_bytes

    def close(self) -> None:
        os.close(self.descriptor)

    def check(self) -> None:
        """Raise SourceError if the file has changed since it was enqueued. Called after the last read."""
        check_unchanged(self.descriptor, self.identity, self.path)

    async def checksum(
        self, offset: int, size_bytes: int, algorithm: str, moved: Callable[[], None] = lambda: None
    ) -> Checksum:
        """Return the checksum of a range, read in a worker thread.

        `moved` is called along the way, because a shard that is not sent in parts takes longer than a stall may last.
        """
        digest, end = Digest(algorithm), offset + size_bytes
        self._on_read.append(moved)
        try:
            async with self._checksums:
                while offset < end:
                    stretch = min(CHECKSUM_BYTES, end - offset)
                    await self._digest(digest.update, offset, stretch)
                    offset += stretch
                    for each in self._on_read:
                        each()  # a range that waits for its turn has not stalled either
        finally:
            self._on_read.remove(moved)
        return digest.checksum()

    async def md5(self, offset: int, size_bytes: int) -> str:
        """Return the MD5 of a range in hex, read in a worker thread: a part's ETag if the store gives no checksum."""
        digest = hashlib.md5(usedforsecurity=False)
        await self._digest(digest.update, offset, size_bytes)
        return digest.hexdigest()

    async def _digest(self, update: Sink, offset: int, size_bytes: int) -> None:
        """Read a range in a worker thread. If cancelled, make the thread stop and wait for that: the descriptor is
        closed next.
        """
        writer = LocalWriter(update)

        def read() -> None:
            for piece in self._pieces(offset, size_bytes):
                writer.write(piece)

        await result_of(asyncio.ensure_future(asyncio.to_thread(read)), writer.cancel)

    def _pieces(self, offset: int, size_bytes: int) -> Iterator[memoryview]:
        end = offset + size_bytes
        with _slice_buffer() as buffer:
            while offset < end:
                piece = buffer[: min(len(buffer), end - offset)]
                self.read_into(piece, offset)
                offset += len(piece)
                yield piece

    def read(self) -> bytes:
        """Read a small shard as a whole."""
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

    def read_into(self, piece: memoryview, offset: int) -> None:
        """Fill `piece` from the file. If the file ends early, it was truncated, and SourceError is raised."""
        filled = 0
        while filled < len(piece):
            try:
                count = os.preadv(self.descriptor, [piece[filled:]], offset + filled)
            except OSError as error:
                raise self.unreadable(error) from error
            if count == 0:
                raise self.truncated()
            filled += count

    def unreadable(self, error: OSError) -> LocalReadError:
        return LocalReadError(
            f"shard {self.path!r} cannot be read: {error.strerror}",
            hint=errnos.meaning_of(error, is_local=filesystems.is_local(self.path))[1],
        )

    def truncated(self) -> SourceError:
        return SourceError(
            f"shard {self.path!r} was truncated while being read", reason=FailureReason.SOURCE_CHANGED
        )


class FileBody:
    """A range of a shard as a request body."""

    def __init__(self, source: Source, offset: int, size_bytes: int, progress: Progress) -> None:
        self._source, self._offset, self._size_bytes, self._progress = source, offset, size_bytes, progress

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def mode(self) -> int:
        """The file's permission bits."""
        return os.fstat(self._source.descriptor).st_mode

    def send(self, writer: BodyWriter) -> None:
        """Send the body.

        If possible, the kernel sends the file's own pages: measured, that halves the CPU of an upload. They were read
        for the checksum a moment ago, so this rarely waits for the disk; if the file was written to since then, the
        store finds that the checksum is wrong. Otherwise the bytes go through one small buffer.
        """
        self._progress.sends_through(writer)
        try:
            self._source.send_bytes = self._send(writer)
        except BaseException:
            self._source.send_bytes = FIRST_SEND_BYTES
            raise
        self._source.check()

    def _send(self, writer: BodyWriter) -> int:
        """Send the body and return how much was sent per call in the end."""
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
        """Return how much the kernel took; None if it cannot send this file."""
        try:
            count = writer.send_file(self._source.descriptor, offset, size_bytes)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            if error.errno in errnos.UNSUPPORTED:  # as by FUSE with direct I/O
                return None
            raise self._source.unreadable(error) from error
        if count == 0:
            raise self._source.truncated()
        return count
