"""Read parts of a checkpoint's files without fetching them whole: only what a sharded load needs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from ckpt_async.errors import CheckpointGoneError, CkptAsyncError, InvalidNameError
from ckpt_async.restore.checkpoint import Checkpoint, RemoteFile, check_found
from ckpt_async.restore.destination import checksum_of_file
from ckpt_async.restore.options import MAX_CONCURRENT_READS, ReadOptions, check
from ckpt_async.restore.peers import Peers, PeerSource
from ckpt_async.restore.session import damaged, leased, session
from ckpt_async.restore.sources import FileSource, LocalCopies, LocalSource, StoreSource
from ckpt_async.stores.interface import Sink
from ckpt_async.threads import in_thread, outcome
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)

# A request costs about as much time as half a MiB of transfer, so small gaps are read too, as long as the
# wasted bytes stay below a twentieth of the wanted ones.
MAX_GAP_BYTES = 512 << 10
WASTE_DIVISOR = 20
MIN_RUN_BYTES, MAX_RUN_BYTES = 4 << 20, 32 << 20

# Local reads of at least this average size get one system call each; smaller ones share a call and are
# copied.
DIRECT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ReadInto:
    """A request to fill `buffer` (writable, contiguous bytes) from `offset` of the file `name`."""

    name: str
    offset: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Run:
    """One request: a stretch of a file, and the buffers that its parts go to."""

    offset: int
    size_bytes: int
    wants: tuple[tuple[int, memoryview], ...]  # by offset in the file


def coalesce(wants: Collection[tuple[int, memoryview]], most_bytes: int = MAX_RUN_BYTES) -> list[Run]:
    """Combine many small reads of one file into few requests: neighbours are read together as long as the gaps
    between them stay below a twentieth of what is wanted. A large read is split, so that its parts are read in
    parallel. Pure.
    """
    pieces = [
        (offset + start, buffer[start : start + most_bytes])
        for offset, buffer in wants
        for start in range(0, len(buffer), most_bytes)
    ]
    pieces.sort(key=lambda piece: piece[0])
    runs: list[Run] = []
    group: list[tuple[int, memoryview]] = []
    start = end = wanted = waste = 0
    for offset, buffer in pieces:
        far = max(end, offset + len(buffer))
        gap, new = max(0, offset - end), far - max(end, offset)
        is_near = gap <= MAX_GAP_BYTES and (waste + gap) * WASTE_DIVISOR <= wanted + new
        if group and not (is_near and far - start <= most_bytes):
            runs.append(Run(start, end - start, tuple(group)))
            group = []
        if not group:
            start, far, gap, new, wanted, waste = offset, offset + len(buffer), 0, len(buffer), 0, 0
        group.append((offset, buffer))
        end, wanted, waste = far, wanted + new, waste + gap
    if group:
        runs.append(Run(start, end - start, tuple(group)))
    return runs


def scatter(run: Run) -> Sink:
    """Return a sink that copies the slices of a run, which arrive in order, into its buffers."""
    position, num_filled = run.offset, 0

    def sink(piece: memoryview) -> None:
        nonlocal position, num_filled
        end = position + len(piece)
        for offset, buffer in run.wants[num_filled:]:
            if offset >= end:
                break
            first, last = max(offset, position), min(offset + len(buffer), end)
            if first < last:
                buffer[first - offset : last - offset] = piece[first - position : last - position]
        position = end
        while num_filled < len(run.wants) and _end(run.wants[num_filled]) <= position:
            num_filled += 1

    return sink


def _end(want: tuple[int, memoryview]) -> int:
    return want[0] + len(want[1])


class Reader:
    """A reader of a checkpoint under a lease; made by `ckpt_async.restore.open`. Methods block, and may be called
    from any thread.

    A file that this node still has (right size and checksum, checked once, on first use) is read locally, otherwise
    from a peer, then from the store. Partial reads from elsewhere cannot be compared with the checksum of the whole
    file.
    """

    def __init__(self, checkpoint: Checkpoint, options: ReadOptions) -> None:
        check_found(checkpoint)
        self.checkpoint = checkpoint
        self._folder = options.get("folder")
        self._local = LocalCopies(self._folder, checkpoint, options.get("local_cache"))
        self._num_concurrent_reads = options.get("num_concurrent_reads", MAX_CONCURRENT_READS)
        self._peers = Peers(options.get("peers", ()), self._num_concurrent_reads)
        self._sources: dict[str, asyncio.Future[list[FileSource]]] = {}
        self._verified: set[str] = set()
        self._reads: set[asyncio.Task[object]] = set()
        self._closing = threading.Lock()
        self._is_closed = False
        self._bytes_from: dict[str, int] = {}
        self._ended = asyncio.Event()
        self._cancel: Callable[[], object] = lambda: None  # until there is something to cancel
        opened: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="ckpt-async-reader", daemon=True
        )
        self._thread.start()
        try:
            self._loop = outcome(opened)
        except BaseException:  # Ctrl-C, perhaps while the store does not respond
            self._is_closed = True
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._cancel()
            self._thread.join()
            raise

    @property
    def files(self) -> Mapping[str, RemoteFile]:
        return self.checkpoint.files

    @property
    def bytes_from(self) -> Mapping[str, int]:
        """Bytes read so far, by source: local, peer, remote."""
        return dict(self._bytes_from)

    def read_into(self, wants: Sequence[ReadInto]) -> None:
        """Fill all the buffers, in parallel and with few requests. Blocks. After an error their contents are
        undefined.

        Raises InvalidNameError if a file or range is not in the checkpoint, before anything is read;
        DamagedCheckpointError if a file is missing or truncated in the store.
        """
        by_file: dict[str, list[tuple[int, memoryview]]] = {}
        for want in wants:
            file = self.files.get(want.name)
            buffer = want.buffer.cast("B")
            if file is None:
                raise InvalidNameError(f"{self.checkpoint.name} has no file {want.name!r}")
            if want.offset < 0 or want.offset + len(buffer) > file.size_bytes:
                raise InvalidNameError(
                    f"bytes {want.offset}+{len(buffer)} are beyond the {file.size_bytes} bytes of {want.name!r}"
                )
            by_file.setdefault(want.name, []).append((want.offset, buffer))
        self._do(self._read(by_file))

    def read(self, name: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """Read a range of a file, to its end by default."""
        if name not in self.files:
            raise InvalidNameError(f"{self.checkpoint.name} has no file {name!r}")
        if size_bytes is None:
            size_bytes = max(0, self.files[name].size_bytes - offset)
        data = bytearray(size_bytes)
        self.read_into([ReadInto(name, offset, memoryview(data))])
        return bytes(data)

    def has_copy(self, name: str) -> bool:
        """Return whether this node has a file of the right size that may be this one. Its bytes are not read."""
        return bool(self._local.find(self.files[name]))

    def is_verified(self, name: str) -> bool:
        """Return whether everything read of this file so far came from a local copy with the receipt's checksum."""
        return name in self._verified

    def damaged(self, reason: str) -> CkptAsyncError:
        """Return the error to raise when bytes from the store are wrong beyond doubt. Later readers are told."""
        found: list[CkptAsyncError] = []

        async def tell() -> None:
            found.append(await damaged(self._opened, self.checkpoint, reason))

        self._do(tell())
        return found[0]

    def close(self) -> None:
        """Drop the lease and the connections; reads in progress are aborted. Idempotent."""
        with self._closing:
            if not self._is_closed and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._ended.set)
            self._is_closed = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the reader's own thread ---------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        closed = CheckpointGoneError("the reader is closed", hint="read within its `with` block")
        with self._closing:
            if self._is_closed or not self._thread.is_alive():  # as in a forked child
                work.close()
                raise closed
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            outcome(future)
        except CancelledError:
            raise closed from None
        except BaseException:
            future.cancel()
            raise

    def _run(self, opened: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            asyncio.run(self._serve(opened))
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error)
            elif not isinstance(error, asyncio.CancelledError):
                logger.exception("reader_ended")

    async def _serve(self, opened: Future[asyncio.AbstractEventLoop]) -> None:
        checkpoint, task = self.checkpoint, asyncio.current_task()
        assert task is not None
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if self._is_closed:
            return
        with contextlib.closing(self._peers):
            async with (
                session(
                    checkpoint.remote,
                    checkpoint.store_options,
                    num_concurrent_reads=self._num_concurrent_reads,
                    folder=self._folder,
                ) as self._opened,
                leased(self._opened, checkpoint) as self._lease,
            ):
                await self._lease.taken()
                opened.set_result(asyncio.get_running_loop())
                await self._ended.wait()
                for read in self._reads:
                    read.cancel()
                await asyncio.gather(*self._reads, return_exceptions=True)

    async def _read(self, by_file: Mapping[str, list[tuple[int, memoryview]]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        at_once = asyncio.Semaphore(2 * self._num_concurrent_reads)  # nothing else limits local reads

        async def read(file: RemoteFile, run: Run) -> None:
            async with at_once:
                await self._read_run(file, run)

        size_bytes = sum(len(buffer) for wants in by_file.values() for _, buffer in wants)
        most_bytes = self._opened.pace.request_bytes(size_bytes, self._opened.bulk.concurrency)
        most_bytes = max(MIN_RUN_BYTES, min(most_bytes, MAX_RUN_BYTES))
        runs = [
            (self.files[name], run) for name, wants in by_file.items() for run in coalesce(wants, most_bytes)
        ]
        await all_or_none(read(file, run) for file, run in runs)

    async def _read_run(self, file: RemoteFile, run: Run) -> None:
        sources = await self._sources_of(file)
        for source in sources:
            try:
                if isinstance(source, LocalSource) and run.size_bytes >= len(run.wants) * DIRECT_BYTES:
                    await in_thread(source.read_into, run.wants)
                else:
                    async with source.turn() as turn:
                        await turn.get_range(run.offset, run.size_bytes, lambda: scatter(run))
            except (CkptAsyncError, OSError) as error:
                if source is sources[-1]:
                    raise
                if isinstance(source, PeerSource):
                    source.failed(error)  # reported in one line when the reader is closed
                else:
                    logger.warning("source_failed file=%s from=%s error=%s", file.name, source.kind, error)
                continue
            if source is not sources[0]:
                self._verified.discard(file.name)
            if isinstance(sources[0], PeerSource) and source is sources[-1]:
                self._peers.instead(run.size_bytes)
            self._bytes_from[source.kind] = self._bytes_from.get(source.kind, 0) + run.size_bytes
            return

    async def _sources_of(self, file: RemoteFile) -> list[FileSource]:
        """Return the file's sources, found once: concurrent reads wait for the one check of its checksum."""
        found = self._sources.get(file.name)
        if found is None:
            found = self._sources[file.name] = asyncio.ensure_future(self._look_for_sources(file))
        return await asyncio.shield(found)

    async def _look_for_sources(self, file: RemoteFile) -> list[FileSource]:
        remote = StoreSource(self._opened, self._lease, self.checkpoint, file)
        for path in self._local.find(file):
            facts = await asyncio.to_thread(_facts_if_right, path, file, lambda: self._is_closed)
            if facts is not None:
                if file.checksum is not None:
                    self._verified.add(file.name)
                return [LocalSource(path, facts), remote]
        return [*self._peers.sources(file), remote]


def _facts_if_right(path: Path, file: RemoteFile, is_over: Callable[[], bool]) -> os.stat_result | None:
    try:
        facts = os.stat(path, follow_symlinks=False)
        if file.checksum is None or checksum_of_file(path, file.checksum.algorithm, is_over) == file.checksum:
            return facts
    except OSError:
        pass
    return None


def open_reader(checkpoint: Checkpoint, **options: Unpack[ReadOptions]) -> Reader:
    """Open a checkpoint for reading in parts, under a lease that is renewed until `close` or the end of the `with`.

    The options are those of `ReadOptions`. Raises CheckpointGoneError if the checkpoint was pruned.
    """
    check("open", options, ReadOptions)
    return Reader(checkpoint, options)
