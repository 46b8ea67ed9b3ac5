"""The folder that files are fetched to: which are there already, which are unfinished, and which are published.

A file that is being fetched has its full size, is locked, and resumes after a kill from the complete ranges. What a
fetch has brought is recorded for as long as the fetch has not finished: a later fetch of another checkpoint removes it,
so that files of two checkpoints are not mixed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

from ckpt_async.core.model import Checksum
from ckpt_async.core.naming import check_relative
from ckpt_async.errors import CkptAsyncError, DestinationError, InTheWayError, NoSpaceError
from ckpt_async.local.durable import FsyncError, fsync_descriptor, fsync_path
from ckpt_async.local.folder import place_of
from ckpt_async.restore.checkpoint import Checkpoint, RemoteFile
from ckpt_async.restore.session import num_of_cores
from ckpt_async.restore.sources import has_size
from ckpt_async.stores import folder_of
from ckpt_async.stores.checksums import Digest, combine
from ckpt_async.stores.interface import Sink

logger = logging.getLogger(__name__)

# Below the destination, so on the same file system: finished files are renamed into place.
PARTIAL_FOLDER = ".ckpt-async-partial"
PREFIX = "fetch-"
# The unit in which complete ranges are recorded, one per line, so that they are not fetched again after a
# kill. One request asks for several. If a file has more than MAX_RANGES of them, its ranges are a multiple of
# this size.
RANGE_BYTES = 4 << 20
MAX_RANGES = 10_000
READ_BYTES = 1 << 20
SHARE_BYTES = 64 << 20
LOCK_POLL_S = 0.05


class Destination:
    """The folder for the files of one checkpoint. Blocking calls; raises DestinationError for problems in the
    folder.
    """

    def __init__(
        self, path: str | os.PathLike[str], checkpoint: Checkpoint, *, is_verified: bool, may_overwrite: bool
    ) -> None:
        self.path = place_of(path)
        self._checkpoint = checkpoint
        self._is_verified, self._may_overwrite = is_verified, may_overwrite
        self._partials = self.path / PARTIAL_FOLDER
        self._new: list[Path] = []
        # What is fetched gets one time, whatever the order in which it arrives: a marker that is older than the files
        # for which it stands tells `watch` that they are being rewritten.
        self._began_ns = time.time_ns()
        of = (
            f"{checkpoint.remote} generation {checkpoint.generation} step {checkpoint.step} {checkpoint.name}"
        )
        self._unfinished = Unfinished(self._partials, of)
        self._made: set[str] = set()  # below the destination
        self._targets: dict[str, Path] = {}
        self._partial_paths: dict[str, Path] = {}
        self._is_over = False

    def make(self) -> None:
        if folder_of(self._checkpoint.remote) == self.path:
            raise DestinationError(
                f"the destination {str(self.path)!r} is the remote itself; name another folder"
            )
        self._new = [each for each in (self.path, *self.path.parents) if not each.exists()]
        try:
            self._partials.mkdir(0o700, parents=True, exist_ok=True)
            self._check_ours()
            self._unfinished.take_over()
        except OSError as error:
            raise DestinationError(f"cannot write to {str(self.path)!r}: {error.strerror}") from error

    def _check_ours(self) -> None:
        """Raise DestinationError if the folder of partial files is not our own: its records say what may be deleted."""
        facts = self._partials.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            raise DestinationError(f"{str(self._partials)!r} is a symbolic link")
        with tempfile.TemporaryFile(dir=self.path) as mine:  # a server may map users to others
            if facts.st_uid != os.fstat(mine.fileno()).st_uid:
                raise DestinationError(
                    f"{str(self._partials)!r} belongs to another user, number {facts.st_uid}",
                    hint="use another destination, or remove that folder if no fetch of that user is running",
                )

    def target(self, file: RemoteFile) -> Path:
        if (target := self._targets.get(file.name)) is None:
            target = self._targets[file.name] = self.path / check_relative(file.name, "file")
        return target

    def partial_path(self, file: RemoteFile) -> Path:
        """Return the path of the partial file. It depends on the content, so that leftovers of another checkpoint's
        fetch are never mixed in.
        """
        if (path := self._partial_paths.get(file.name)) is None:
            told = f"{self._checkpoint.remote}\n{file.key}\n{file.size_bytes}\n{file.checksum}\n{file.name}"
            path = self._partials / hashlib.sha256(told.encode()).hexdigest()[:32]
            self._partial_paths[file.name] = path
        return path

    def give_up(self) -> None:
        """Let `is_there` and `begin` end soon, with CancelledError: they may be reading a large file. Any thread."""
        self._is_over = True

    def is_taken(self, file: RemoteFile) -> bool:
        """Return whether anything has the file's name."""
        return os.path.lexists(self.target(file))

    def is_there(self, file: RemoteFile) -> bool:
        """Return whether the file itself is there. Raises DestinationError if another file is, unless it may be
        overwritten.
        """
        target = self.target(file)
        try:
            if not os.path.lexists(target):
                return False
            if has_size(target, file.size_bytes) and self._is_right(target, file):
                return True
            if self._may_overwrite and not target.is_dir():
                return False
        except OSError as error:
            raise DestinationError(f"cannot read {str(target)!r}: {error.strerror}") from error
        raise InTheWayError(
            f"{str(target)!r} exists and is not the file of {self._checkpoint.name}; it was left alone",
            hint="use another destination, or pass overwrite=True (--overwrite)",
        )

    def _is_right(self, path: Path, file: RemoteFile) -> bool:
        if file.checksum is None or not self._is_verified:
            return True
        return checksum_of_file(path, file.checksum.algorithm, lambda: self._is_over) == file.checksum

    def check_space(self, files: list[RemoteFile]) -> None:
        """Raise NoSpaceError if the files do not fit."""
        begun: set[str] = set()
        with contextlib.suppress(FileNotFoundError):  # the process that finished last has removed it
            begun.update(os.listdir(self._partials))
        needed_bytes = sum(file.size_bytes for file in files)
        for file in files if begun else ():
            path = self.partial_path(file)
            if path.name in begun:
                with contextlib.suppress(OSError):
                    needed_bytes -= min(file.size_bytes, os.stat(path).st_blocks * 512)
        facts = os.statvfs(self.path)
        free_bytes = facts.f_bavail * facts.f_frsize
        if needed_bytes > free_bytes:
            raise NoSpaceError(
                f"{str(self.path)!r} has {free_bytes} bytes free, but {needed_bytes} are needed",
                hint="free space, or fetch only some ranks or files",
            )

    def make_parent(self, file: RemoteFile) -> None:
        folder, _, _ = file.name.rpartition("/")
        if folder in self._made:
            return
        target = self.target(file)
        if Path(os.path.realpath(target.parent)) != target.parent:
            raise DestinationError(
                f"a symbolic link on the path to {str(target)!r} leads out of the destination"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        self._made.add(folder)

    def begin(self, partial: PartialFile, file: RemoteFile) -> bool:
        """Return whether the file is to be fetched: another process may just have finished it."""
        if self.is_there(file):
            return False
        self._unfinished.add(file.name, self.partial_path(file), partial.facts)
        return True

    def publish(self, partial: PartialFile, file: RemoteFile) -> None:
        partial.publish(self.target(file), modified_ns=self._began_ns)

    def sync(self, files: list[RemoteFile]) -> None:
        """Make the names durable, including those of new folders, and of files that another process has published
        but may not have synced yet.
        """
        folders = {self.path, *(each.parent for each in self._new)}
        for file in files:
            folder = self.target(file).parent
            while folder not in folders:
                folders.add(folder)
                folder = folder.parent
        try:
            for folder in folders:
                fsync_path(folder)
        except FsyncError as error:
            self.take_back(files)  # else the next call would find the files there and trust a second fsync
            raise DestinationError(f"{error.filename}: {error.strerror}") from error

    def take_back(self, files: list[RemoteFile]) -> None:
        """Remove the published and partial files, and those of unfinished fetches before: a checkpoint that cannot be
        fetched must leave nothing that could be taken for part of another one.
        """
        for file in files:
            discard_unlocked(self.partial_path(file))
        self._unfinished.remove_all()

    def finish(self) -> None:
        """Everything is there and durable."""
        self._unfinished.finish()

    def close(self) -> None:
        self._unfinished.close()
        with contextlib.suppress(OSError):
            self._partials.rmdir()  # fails if it is not empty: of a fetch that is running, or unfinished


# --- what is unfinished ----------------------------------------------------------------------------------


class _Brought(NamedTuple):
    """A file that is partial or published: it is the same inode, first under one name, then under the other."""

    name: str
    partial: str
    device: int
    inode: int


class Unfinished:
    """The record of one call of `fetch`: `<folder>/fetch-<random>`, locked while the call runs.

    Its first line names the checkpoint, and each other one a file that the call brings. Blocking calls, from any
    thread.
    """

    def __init__(self, folder: Path, checkpoint: str) -> None:
        self._folder, self._destination = folder, folder.parent
        self._checkpoint = json.dumps(checkpoint)
        self._path = folder / f"{PREFIX}{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._descriptor: int | None = None  # created when there is something to record
        self._brought: list[_Brought] = []

    def take_over(self) -> None:
        """Take over what fetches that have ended have left unfinished: what is of this checkpoint becomes this call's
        own, and what is of another one is removed.
        """
        for path in sorted(self._folder.glob(f"{PREFIX}*")):
            with _of_an_ended_fetch(path) as record:
                if record is None:
                    continue
                checkpoint, brought = _read(record)
                if checkpoint == self._checkpoint:
                    for each in brought:
                        self._add(each)
                else:
                    self._remove(brought)
                    self._remove_unrecorded()
                    told = "unfinished_fetch_removed checkpoint=%s num_files=%d destination=%s"
                    logger.warning(told, checkpoint, len(brought), self._destination)
                path.unlink(missing_ok=True)

    def add(self, name: str, partial: Path, facts: os.stat_result) -> None:
        """Record a file before anything is written to it. The record survives SIGKILL."""
        self._add(_Brought(name, partial.name, facts.st_dev, facts.st_ino))

    def remove_all(self) -> None:
        """Remove what this call, and those that it has taken over, have brought."""
        self._remove(self._brought)
        self.finish()

    def finish(self) -> None:
        """Drop the record: what was brought stays."""
        self._brought.clear()
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the record. If the call has not finished, but has left something, a later one takes it over."""
        if not any(self._is_here(each) for each in self._brought):
            self.finish()
        with self._lock:
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold the descriptor too
                os.close(descriptor)

    def _add(self, file: _Brought) -> None:
        with self._lock:
            if self._descriptor is None:
                self._descriptor = self._created()
            os.write(self._descriptor, f"{json.dumps(file)}\n".encode())
            self._brought.append(file)

    def _created(self) -> int:
        self._folder.mkdir(0o700, exist_ok=True)  # the process that finished before us has removed it
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, f"{self._checkpoint}\n".encode())
        return descriptor

    def _remove(self, brought: list[_Brought]) -> None:
        for file in brought:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, CkptAsyncError):
                discard_unlocked(self._folder / check_relative(file.partial, "file"))
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, CkptAsyncError):
                target = self._destination / check_relative(file.name, "file")
                is_below = Path(os.path.realpath(target.parent)) == target.parent
                if is_below and _is_at(
                    target, file.device, file.inode
                ):  # otherwise somebody has put another one in its place
                    target.unlink()

    def _remove_unrecorded(self) -> None:
        """Remove partial files that were created when the process was killed: nothing is written before the record."""
        for path in list(self._folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if not path.name.startswith(PREFIX) and not path.lstat().st_size:
                    discard_unlocked(path)

    def _is_here(self, file: _Brought) -> bool:
        places = (self._folder / file.partial, self._destination / file.name)
        return any(_is_at(path, file.device, file.inode) for path in places)


@contextlib.contextmanager
def _of_an_ended_fetch(path: Path) -> Iterator[IO[str] | None]:
    """Lock the record, unless its fetch is still running or has finished."""
    with contextlib.suppress(FileNotFoundError), _locked(path, os.O_RDWR) as descriptor:
        if descriptor is not None and os.fstat(descriptor).st_size > 0:  # empty: it is about to be locked
            with open(descriptor, encoding="utf-8", errors="replace", closefd=False) as record:
                yield record
            return
    yield None


def _read(record: IO[str]) -> tuple[str, list[_Brought]]:
    first, *lines = record.read().splitlines()
    brought = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):  # the last one may be cut short
            name, partial, device, inode = json.loads(line)
            brought.append(_Brought(str(name), str(partial), int(device), int(inode)))
    return first, brought


# --- one file --------------------------------------------------------------------------------------------


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
    with _locked(path, os.O_RDWR | os.O_CREAT) as descriptor:
        yield None if descriptor is None else PartialFile(path, descriptor, size_bytes, algorithm)


@contextlib.contextmanager
def _locked(path: Path, flags: int) -> Iterator[int | None]:
    """Yield a descriptor of the file, locked; None if another process holds it, or has given or taken its name away."""
    descriptor = _open(path, flags)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        try:
            facts = os.fstat(descriptor)
            yield descriptor if _is_at(path, facts.st_dev, facts.st_ino) else None
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold the descriptor too
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    while True:
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            # The process that finished before us has removed the folder, and may do so again.
            path.parent.mkdir(0o700, exist_ok=True)


def _is_at(path: Path, device: int, inode: int) -> bool:
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return (facts.st_dev, facts.st_ino) == (device, inode)


def discard(path: Path) -> None:
    """Remove a partial file and what was recorded of it."""
    path.unlink(missing_ok=True)
    _record_of(path).unlink(missing_ok=True)


def discard_unlocked(path: Path) -> None:
    """Like `discard`, unless another process is fetching the file: it would then publish a file that no longer
    exists.
    """
    try:
        with _locked(path, os.O_RDWR) as descriptor:
            if descriptor is not None:
                discard(path)
    except FileNotFoundError:
        _record_of(path).unlink(missing_ok=True)


def _unlinked(path: str, flags: int) -> int:
    """Open a file, but none that a symbolic link leads to."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.ranges")


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
