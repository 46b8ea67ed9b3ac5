"""Fetch files of a checkpoint to a local folder: in parallel, verified as they arrive, resumable after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar, Unpack

from ckpt_async import threads
from ckpt_async.core import errnos
from ckpt_async.core.model import CheckpointId, Checksum
from ckpt_async.core.readings import MAX_READINGS, is_proven
from ckpt_async.errors import (
    CapabilityError,
    CheckpointGoneError,
    CkptAsyncError,
    DamagedCheckpointError,
    DestinationError,
    NoSpaceError,
)
from ckpt_async.restore import discovery
from ckpt_async.restore.checkpoint import Checkpoint, RemoteFile, check_found
from ckpt_async.restore.destination import Destination, PartialFile, discard, locked
from ckpt_async.restore.options import (
    MAX_CONCURRENT_READS,
    FetchLatestOptions,
    FetchOptions,
    FindOptions,
    check,
    part,
)
from ckpt_async.restore.peers import Peers, PeerSource
from ckpt_async.restore.session import (
    HeldLease,
    Session,
    damaged,
    leased,
    session,
    unreliable,
)
from ckpt_async.restore.small_files import SmallFiles
from ckpt_async.restore.sources import FileSource, LocalCopies, LocalSource, StoreSource, Turn
from ckpt_async.threads import in_thread, result_of
from ckpt_async.transfer.together import all_or_none, both
from ckpt_async.transfer.upload import SMALL_BYTES

logger = logging.getLogger(__name__)

# Below this many small files, sharing connections does not pay.
FEW_FILES = 8

P = ParamSpec("P")
T = TypeVar("T")

Where = str | os.PathLike[str] | Callable[[Checkpoint], str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class FetchReport:
    """Where each file is now, and how many of its bytes came from where.

    The sources are `there` (already in the destination), `resumed` (left by an earlier fetch), `local`, `peer` and
    `remote`. Bytes that arrived wrong and were fetched again count once.
    """

    paths: Mapping[str, Path]
    bytes_from: Mapping[str, int]
    duration_s: float

    @property
    def size_bytes(self) -> int:
        return sum(self.bytes_from.values())


def fetch(
    checkpoint: Checkpoint, destination: str | os.PathLike[str], **options: Unpack[FetchOptions]
) -> FetchReport:
    """Fetch the files of a checkpoint (the options `ranks` and `files` choose some) into `destination`, under their
    names in the checkpoint. The options are those of `FetchOptions`.

    Each file is taken from the nearest place that has it: the destination itself; `local_cache`; `folder`, the
    trainer's (through its journal, at the usual path, or in the spool); one of `peers`; the store. A copy is used
    only if it has the size and checksum in the rank's receipt; otherwise the next place is tried. Checkpoints of
    other tools have no checksums, so their copies are accepted by size, but only from `local_cache`.

    Files appear complete, by rename, and are durable on return. A killed fetch resumes when called again with the
    same destination. Several processes may fetch the same files: each file is fetched once, while the other
    processes wait for it. Blocks. A reader's lease holds off retention during the fetch.

    Raises NoSpaceError before anything is fetched if it would not fit; DestinationError if a different file is in
    the way (`overwrite` replaces it); DamagedCheckpointError if the store does not have what was committed (then
    call `find` again: it skips this checkpoint from now on); UnreliableReadError if the data arrives wrong, and
    differently each time; CheckpointGoneError if the checkpoint was pruned.
    """
    check("fetch", options, FetchOptions)
    check_found(checkpoint)

    async def work() -> FetchReport:
        wanted = checkpoint.select(options.get("ranks"), options.get("files"))
        async with session(
            checkpoint.remote,
            checkpoint.store_options,
            num_concurrent_reads=options.get("num_concurrent_reads", MAX_CONCURRENT_READS),
            folder=options.get("folder"),
        ) as opened:
            with contextlib.closing(Peers(options.get("peers", ()), opened.bulk.link.most)) as connected:
                return await _Fetching(opened, checkpoint, destination, connected, options).run(wanted)

    return threads.run(work())


def fetch_latest(
    remote: str, destination: Where, **options: Unpack[FetchLatestOptions]
) -> tuple[Checkpoint, FetchReport] | None:
    """Find the newest checkpoint and fetch it, as `find` and `fetch` do, with the options of both; None if there is
    none.

    If it turns out to be damaged or gone while it is read, the next older one is used instead, unless `step` is
    given. `destination` may be a function of the checkpoint.

    For a single process. Ranks that resume together must agree on a checkpoint: see `ckpt_async.torch`.
    """
    check("fetch_latest", options, FetchLatestOptions)
    choice, how = part(options, FindOptions), part(options, FetchOptions)

    def newest(passing_over: Collection[CheckpointId]) -> Checkpoint | None:
        if passing_over:
            choice["drain_timeout_s"] = 0.0
        choice["passing_over"] = passing_over
        return discovery.find(remote, **choice)

    def use(checkpoint: Checkpoint) -> FetchReport:
        return fetch(checkpoint, where(destination, checkpoint), **how)

    return use_newest(newest, use, may_pass_over=options.get("step") is None)


def where(destination: Where, checkpoint: Checkpoint) -> str | os.PathLike[str]:
    return destination(checkpoint) if callable(destination) else destination


def use_newest(
    newest: Callable[[Collection[CheckpointId]], Checkpoint | None],
    use: Callable[[Checkpoint], T],
    *,
    may_pass_over: bool,
) -> tuple[Checkpoint, T] | None:
    """Call `use` on the checkpoint that `newest` finds, and return both; None if there is none. A checkpoint that
    turns out to be damaged or gone while it is used is passed over for the next older one.
    """
    bad: dict[CheckpointId, str] = {}  # with the reason
    while (checkpoint := newest(bad)) is not None:
        try:
            return checkpoint, use(checkpoint)
        except (DamagedCheckpointError, CheckpointGoneError) as error:
            if not may_pass_over:
                raise
            logger.warning("checkpoint_passed_over %s error=%s", checkpoint.id, error)
            bad[checkpoint.id] = str(error)
    return None


class _Fetching:
    """One call of `fetch`."""

    def __init__(
        self,
        opened: Session,
        checkpoint: Checkpoint,
        destination: str | os.PathLike[str],
        peers: Peers,
        options: FetchOptions,
    ) -> None:
        self._opened, self._checkpoint, self._peers = opened, checkpoint, peers
        self._local = LocalCopies(options.get("folder"), checkpoint, options.get("local_cache"))
        self._is_verified, self._on_progress = options.get("verify", True), options.get("on_progress")
        self._num_at_once = opened.bulk.link.most  # as many as the process can open files
        self._at_once = asyncio.Semaphore(self._num_at_once)
        self._destination = Destination(
            destination,
            checkpoint,
            is_verified=self._is_verified,
            may_overwrite=options.get("overwrite", False),
        )
        self._total_bytes = 0
        self._bytes_from: Counter[str] = Counter()
        self._asked_bytes = 0  # requested but not received yet

    async def run(self, files: list[RemoteFile]) -> FetchReport:
        began = time.monotonic()
        with contextlib.closing(self._destination) as destination:
            await self._run(files, destination)
        paths = {file.name: destination.target(file) for file in files}
        return FetchReport(paths, dict(self._bytes_from), time.monotonic() - began)

    async def _run(self, files: list[RemoteFile], destination: Destination) -> None:
        self._total_bytes = sum(file.size_bytes for file in files)
        await in_thread(destination.make)
        taken = await in_thread(lambda: [file for file in files if destination.is_taken(file)])
        there = await all_or_none(self._was_there(file) for file in taken)
        done = {file.name for file, is_there in zip(taken, there, strict=True) if is_there}
        left = [file for file in files if file.name not in done]
        destination.check_space(left)
        if left:
            try:
                async with leased(self._opened, self._checkpoint) as lease:
                    await self._bring_all(left, lease)
            except (DamagedCheckpointError, CheckpointGoneError):
                destination.take_back(left)
                raise
        await in_thread(destination.sync, files)
        destination.finish()

    async def _was_there(self, file: RemoteFile) -> bool:
        async with self._at_once:
            is_there = await self._look(self._destination.is_there, file)
        if is_there:
            self._note("there", file.size_bytes)
        return is_there

    async def _look(self, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what may take long to read files of the destination in a thread, and make it end if cancelled."""

        def end() -> bool:
            self._destination.give_up()
            return True

        return await result_of(asyncio.ensure_future(asyncio.to_thread(look, *args, **kwargs)), end)

    async def _bring_all(self, files: list[RemoteFile], lease: HeldLease) -> None:
        small = await in_thread(lambda: [file for file in files if self._is_small(file)])
        small = small if len(small) > FEW_FILES else []
        names = {file.name for file in small}
        single = (file for file in files if file.name not in names)
        together = SmallFiles(
            small, self._destination, lease, self._note_small, lambda file: self._bring(file, lease)
        )
        await both(
            together.bring_all(self._opened.bulk, self._num_at_once),
            all_or_none(self._bring(file, lease) for file in single),
        )

    # --- many small files ----------------------------------------------------------------------------------

    def _note_small(self, file: RemoteFile) -> None:
        self._note("remote", file.size_bytes)

    def _is_small(self, file: RemoteFile) -> bool:
        """Return whether the file is small, only the store has it, and it has a checksum to verify it by."""
        is_small = file.checksum is not None and 0 < file.size_bytes <= SMALL_BYTES
        return is_small and not self._local.find(file) and not self._peers.sources(file)

    # --- one file ------------------------------------------------------------------------------------------

    async def _bring(self, file: RemoteFile, lease: HeldLease) -> None:
        destination = self._destination
        algorithm = file.checksum.algorithm if file.checksum else "crc64nvme"
        async with self._at_once:
            try:
                destination.make_parent(file)
                async with locked(destination.partial_path(file), file.size_bytes, algorithm) as partial:
                    resumed_bytes = await self._look(self._prepare, partial, file)
                    if resumed_bytes is None:
                        self._note("there", file.size_bytes)
                        discard(destination.partial_path(file))
                        return
                    got: Counter[str] = Counter()
                    self._note("resumed", resumed_bytes, got)
                    await self._fill(partial, file, lease, got)
                    await in_thread(destination.publish, partial, file)
            except OSError as error:
                if isinstance(error, CkptAsyncError):
                    raise
                if errnos.is_full(error):
                    raise NoSpaceError(
                        f"{str(destination.path)!r} filled up while fetching {file.name!r}",
                        hint="free some space and call again; the fetch will resume",
                    ) from error
                raise DestinationError(f"cannot write {str(destination.target(file))!r}: {error}") from error

    def _prepare(self, partial: PartialFile, file: RemoteFile) -> int | None:
        """Return how many bytes an earlier fetch has left; None if another process has finished the file first."""
        return partial.prepare() if self._destination.begin(partial, file) else None

    async def _fill(
        self, partial: PartialFile, file: RemoteFile, lease: HeldLease, got: Counter[str]
    ) -> None:
        """Fill the file from the nearest source that has the right bytes. `got` counts them by source."""
        remote = StoreSource(self._opened, lease, self._checkpoint, file)
        nearer: list[FileSource] = [LocalSource(path) for path in self._local.find(file)]
        seen: list[Checksum] = []  # checksums of readings that came from the store alone
        peers = self._peers.sources(file)
        for source in (*nearer, *peers, remote):
            is_all_its_own = source is remote and partial.is_empty
            try:
                await self._fill_from(source, partial, got)
            except (CkptAsyncError, OSError) as error:
                if source is remote or errnos.is_full(error):
                    raise
                _tell(source, file, error)
                continue
            if file.checksum is None or partial.checksum() == file.checksum:
                if peers and source is remote:
                    self._peers.instead(got["remote"])
                return
            if is_all_its_own and not self._is_verified:
                logger.warning(
                    "checksum_differs file=%s from=%s; using it anyway, because verify=False",
                    file.name,
                    source.kind,
                )
                return
            if is_all_its_own:
                seen.append(partial.checksum())
            self._begin_again(partial, file, source, got)
        await self._fill_beyond_doubt(partial, file, lease, got, seen)

    def _begin_again(
        self, partial: PartialFile, file: RemoteFile, source: FileSource, got: Counter[str]
    ) -> None:
        _tell(source, file, "the checksum differs")
        self._drop(partial, got)

    def _drop(self, partial: PartialFile, got: Counter[str]) -> None:
        """Drop all that was got of a file. It no longer counts."""
        self._bytes_from -= got
        got.clear()
        partial.forget()

    async def _fill_beyond_doubt(
        self,
        partial: PartialFile,
        file: RemoteFile,
        lease: HeldLease,
        got: Counter[str],
        seen: list[Checksum],
    ) -> None:
        """Read the file from the store alone, each time over new connections, until it is right or wrong beyond
        doubt. `seen` has the checksums of the store's earlier readings.
        """
        checkpoint, wanted = self._checkpoint, file.checksum
        assert wanted is not None
        while True:
            reason = f"{file.key} does not have the checksum of its receipt"
            there = await self._opened.store.head(file.key)
            if there.checksum is not None and there.checksum != wanted:
                raise await damaged(self._opened, checkpoint, f"{reason}, according to the store itself")
            if is_proven(seen):
                raise await damaged(self._opened, checkpoint, f"{reason}, identically over two connections")
            if len(seen) >= MAX_READINGS:
                raise unreliable(f"{reason}, and was read differently each time")
            async with session(checkpoint.remote, checkpoint.store_options) as afresh:
                remote = StoreSource(afresh, lease, checkpoint, file)
                await self._fill_from(remote, partial, got)
            if (checksum := partial.checksum()) == wanted:
                return
            seen.append(checksum)
            self._begin_again(partial, file, remote, got)

    async def _fill_from(self, source: FileSource, partial: PartialFile, got: Counter[str]) -> None:
        missing = deque(partial.missing)

        async def get_some() -> None:
            while missing:
                async with source.turn() as turn:
                    ranges = _next(missing, turn.request_bytes(self._left_bytes()))
                    if ranges:
                        await get(turn, ranges)

        async def get(turn: Turn, ranges: list[tuple[int, int]]) -> None:
            size_bytes = sum(size for _, size in ranges)
            self._asked_bytes += size_bytes
            try:
                await turn.get_range(ranges[0][0], size_bytes, lambda: partial.sink(ranges))
            finally:
                self._asked_bytes -= size_bytes
            self._note(source.kind, size_bytes, got)

        try:
            await all_or_none(get_some() for _ in range(min(len(missing), self._num_at_once)))
        except CapabilityError:  # the server does not support ranges
            self._drop(partial, got)
            async with source.turn() as turn:
                await get(turn, partial.missing)

    def _left_bytes(self) -> int:
        """Return the number of bytes that have not been requested yet."""
        return self._total_bytes - self._bytes_from.total() - self._asked_bytes

    def _note(self, kind: str, size_bytes: int, got: Counter[str] | None = None) -> None:
        if size_bytes:
            self._bytes_from[kind] += size_bytes
            if got is not None:
                got[kind] += size_bytes
            if self._on_progress is not None:
                self._on_progress(self._bytes_from.total(), self._total_bytes)


def _next(missing: deque[tuple[int, int]], most_bytes: int) -> list[tuple[int, int]]:
    """Take adjacent ranges from `missing`, of at most `most_bytes` together, but at least one range if any is left."""
    ranges: list[tuple[int, int]] = []
    size_bytes = 0
    while missing and (
        not ranges or (missing[0][0] == sum(ranges[-1]) and size_bytes + missing[0][1] <= most_bytes)
    ):
        ranges.append(missing.popleft())
        size_bytes += ranges[-1][1]
    return ranges


def _tell(source: FileSource, file: RemoteFile, why: object) -> None:
    """Log that a source did not have the file. A failed peer is reported once, at the end, since it may concern
    many files.
    """
    if isinstance(source, PeerSource):
        source.failed(why)
    logger.log(
        logging.DEBUG if isinstance(source, PeerSource) else logging.WARNING,
        "source_failed file=%s from=%s error=%s; trying another one",
        file.name,
        source.kind,
        why,
    )
