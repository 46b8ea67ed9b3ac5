"""Reading parts of a checkpoint's files without fetching them whole: what a sharded load needs, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ckpt_async.errors import CheckpointGoneError, CkptAsyncError, InvalidNameError
from ckpt_async.restore.checkpoint import Checkpoint, RemoteFile
from ckpt_async.restore.partial import checksum_of_file
from ckpt_async.restore.peers import Peer, PeerSource, peer_downloads
from ckpt_async.restore.session import leased, session
from ckpt_async.restore.sources import FileSource, LocalCopies, LocalSource, StoreSource
from ckpt_async.store import Sink
from ckpt_async.transfer import all_or_none

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A request costs about as long as half a MiB takes; but what is read in vain stays below a twentieth of what is wanted.
MAX_GAP_BYTES = 512 << 10
WASTE_DIVISOR = 20
MAX_RUN_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ReadInto:
    """Fill `buffer` (writable, contiguous bytes) from `offset` of the file `name`."""

    name: str
    offset: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Run:
    """One request: a stretch of a file, and the buffers that parts of it go to."""

    offset: int
    size_bytes: int
    wants: tuple[tuple[int, memoryview], ...]  # by offset in the file


def coalesce(wants: Collection[tuple[int, memoryview]]) -> list[Run]:
    """Few requests for many small reads of one file: neighbours are read together as long as the gaps between them stay
    below a twentieth of what is wanted. A large read is split, so that its parts go in parallel. Pure.
    """
    pieces = [
        (offset + start, buffer[start : start + MAX_RUN_BYTES])
        for offset, buffer in wants
        for start in range(0, len(buffer), MAX_RUN_BYTES)
    ]
    pieces.sort(key=lambda piece: piece[0])
    runs: list[Run] = []
    group: list[tuple[int, memoryview]] = []
    start = end = wanted = 0
    for offset, buffer in pieces:
        far = max(end, offset + len(buffer))
        gap = max(0, offset - end)
        waste = far - start - wanted - len(buffer)
        is_near = gap <= MAX_GAP_BYTES and waste * WASTE_DIVISOR <= wanted + len(buffer)
        if group and not (is_near and far - start <= MAX_RUN_BYTES):
            runs.append(Run(start, end - start, tuple(group)))
            group = []
        if not group:
            start, end, wanted = offset, offset, 0
        group.append((offset, buffer))
        end, wanted = max(end, offset + len(buffer)), wanted + len(buffer)
    if group:
        runs.append(Run(start, end - start, tuple(group)))
    return runs


def scatter(run: Run) -> Sink:
    """Copies the slices of a run, as they arrive in order, into its buffers."""
    position = run.offset

    def sink(piece: memoryview) -> None:
        nonlocal position
        end = position + len(piece)
        for offset, buffer in run.wants:
            first, last = max(offset, position), min(offset + len(buffer), end)
            if first < last:
                buffer[first - offset : last - offset] = piece[first - position : last - position]
        position = end

    return sink


class Reader:
    """Reads from a checkpoint under a lease; made by `ckpt_async.restore.open`. Methods block, from any thread.

    A file that this node still has (right size, right checksum: looked at once, on first use) is read locally; else a
    peer is asked, then the store. What is read in parts from elsewhere cannot be compared with a checksum of the whole.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: str | os.PathLike[str] | None,
        peers: Collection[Peer],
        num_concurrent_reads: int,
    ) -> None:
        self.checkpoint = checkpoint
        self._local, self._peers = LocalCopies(folder, checkpoint), tuple(peers)
        self._num_concurrent_reads = num_concurrent_reads
        self._sources: dict[str, asyncio.Future[list[FileSource]]] = {}
        self._bytes_from: dict[str, int] = {}
        self._ended = asyncio.Event()
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="ckpt-async-reader", daemon=True
        )
        self._thread.start()
        opened.result()

    @property
    def files(self) -> Mapping[str, RemoteFile]:
        return self.checkpoint.files

    @property
    def bytes_from(self) -> Mapping[str, int]:
        """Bytes read so far by where they came from: local, peer, remote."""
        return dict(self._bytes_from)

    def read_into(self, wants: Sequence[ReadInto]) -> None:
        """Fill all the buffers, in parallel and with few requests. What is in them after an error is undefined.

        Raises InvalidNameError if a file or range is not in the checkpoint, before anything is read.
        """
        by_file: dict[str, list[tuple[int, memoryview]]] = {}
        for want in wants:
            file = self.files.get(want.name)
            buffer = want.buffer.cast("B")
            if file is None:
                raise InvalidNameError(f"{self.checkpoint.name} has no file {want.name!r}")
            if want.offset < 0 or want.offset + len(buffer) > file.size_bytes:
                raise InvalidNameError(
                    f"bytes {want.offset}+{len(buffer)} are beyond the {file.size_bytes} of {want.name!r}"
                )
            by_file.setdefault(want.name, []).append((want.offset, buffer))
        self._do(self._read(by_file))

    def read(self, name: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """A range of a file, to its end by default."""
        if name not in self.files:
            raise InvalidNameError(f"{self.checkpoint.name} has no file {name!r}")
        if size_bytes is None:
            size_bytes = max(0, self.files[name].size_bytes - offset)
        data = bytearray(size_bytes)
        self.read_into([ReadInto(name, offset, memoryview(data))])
        return bytes(data)

    def close(self) -> None:
        """Drop the lease and the connections. Idempotent."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the reader's own thread ---------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise CheckpointGoneError("the reader is closed", hint="read within its `with` block")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _run(self, opened: Future[None]) -> None:
        try:
            asyncio.run(self._serve(opened))
        except BaseException as error:
            if opened.done():
                logger.exception("reader_ended")
            else:
                opened.set_exception(error)

    async def _serve(self, opened: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        checkpoint = self.checkpoint
        self._downloads = peer_downloads(self._num_concurrent_reads)
        try:
            async with (
                session(
                    checkpoint.remote,
                    checkpoint.store_options,
                    num_concurrent_reads=self._num_concurrent_reads,
                ) as self._opened,
                leased(self._opened, checkpoint) as self._lease,
            ):
                opened.set_result(None)
                await self._ended.wait()
        finally:
            self._downloads.close()

    async def _read(self, by_file: Mapping[str, list[tuple[int, memoryview]]]) -> None:
        at_once = asyncio.Semaphore(2 * self._num_concurrent_reads)  # local reads have no other bound

        async def read(file: RemoteFile, run: Run) -> None:
            async with at_once:
                await self._read_run(file, run)

        runs = [(self.files[name], run) for name, wants in by_file.items() for run in coalesce(wants)]
        await all_or_none(read(file, run) for file, run in runs)

    async def _read_run(self, file: RemoteFile, run: Run) -> None:
        sources = await self._sources_of(file)
        for source in sources:
            try:
                await source.get_range(run.offset, run.size_bytes, lambda: scatter(run))
            except (CkptAsyncError, OSError) as error:
                if source is sources[-1] or isinstance(error, CheckpointGoneError):
                    raise
                logger.warning("source_failed file=%s from=%s error=%s", file.name, source.kind, error)
                continue
            self._bytes_from[source.kind] = self._bytes_from.get(source.kind, 0) + run.size_bytes
            return

    async def _sources_of(self, file: RemoteFile) -> list[FileSource]:
        """Found once for each file: many reads of it wait for the one look at its checksum."""
        found = self._sources.get(file.name)
        if found is None:
            found = self._sources[file.name] = asyncio.ensure_future(self._look_for_sources(file))
        return await asyncio.shield(found)

    async def _look_for_sources(self, file: RemoteFile) -> list[FileSource]:
        remote = StoreSource(self._opened, self._lease, file)
        for path in self._local.find(file):
            if await asyncio.to_thread(_is_right, path, file):
                return [LocalSource(path), remote]
        return [*(PeerSource(self._downloads, peer, file) for peer in self._peers if peer.has(file)), remote]


def _is_right(path: Path, file: RemoteFile) -> bool:
    try:
        return file.checksum is not None and checksum_of_file(path, file.checksum.algorithm) == file.checksum
    except OSError:
        return False


def open_reader(
    checkpoint: Checkpoint,
    *,
    folder: str | os.PathLike[str] | None = None,
    peers: Collection[Peer] = (),
    num_concurrent_reads: int = 8,
) -> Reader:
    """Open a checkpoint for reading in parts, under a lease that is renewed until `close` or the end of the `with`.

    `folder` is the trainer's: what it still has is read from there. Raises CheckpointGoneError if it was pruned.
    """
    return Reader(checkpoint, folder, peers, num_concurrent_reads)
