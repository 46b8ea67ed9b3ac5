"""An append-only file of records, to which several processes of one machine append, and which anybody may read.

It is text, so that a person can read it. Each line begins with the CRC-32 of what follows in it:

    <CRC-32> ckpt-async-log 1 <id> <start> <size>
    <CRC-32> <letters> [<written at>,<part>,<part>]

A record is one line: all of it counts or nothing. It has one part for each of its letters, so that a reader decodes
only what it needs. Its *position*, where it ends, grows for ever: the first `size` bytes of the file are what
compaction has left of the first `start` bytes of the log. Only compaction replaces the file, and it keeps the `id`.

Nothing here maps the file: on a copy-on-write file system a page of a mapping needs space at each write, and where
there is none, SIGBUS ends the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from ckpt_async import private
from ckpt_async.core import errnos, keys
from ckpt_async.errors import CkptAsyncError, JournalDamagedError, JournalError
from ckpt_async.local.durable import FsyncError, fsync_descriptor, fsync_path
from ckpt_async.local.folder import no_space, not_there
from ckpt_async.local.forks import after_fork

logger = logging.getLogger(__name__)

# A smaller file is not compacted: it is read in a few milliseconds.
COMPACT_BYTES = 4 << 20
# How often compaction catches up with appends before they have to wait for it.
CATCH_UPS = 3

_VERSION = 1
_MAGIC = "ckpt-async-log"
DAMAGE_HINT = (
    "restart its writer (for a journal, the trainer or `ckpt-async drain`), which moves the damaged file aside and"
    " begins a new one; if it is a journal, it rebuilds it from the manifests"
)

Parts = Mapping[str, str]  # JSON by letter


@dataclass(frozen=True, slots=True)
class Place:
    """How far a log was read, and which one that was."""

    id: str
    position: int


@dataclass(frozen=True, slots=True)
class Record:
    position: int
    written_at: float
    parts: Mapping[str, Any]  # by letter


Needed = Callable[[list[Record]], Iterable[tuple[float, Parts]]]


@dataclass(frozen=True, slots=True)
class _Head:
    """What the first line says."""

    id: str
    start: int
    size_bytes: int

    LENGTH: ClassVar[int] = 9 + len(f"{_MAGIC} {_VERSION} ") + 16 + 2 * 17 + 1

    def encode(self) -> bytes:
        return _line(f"{_MAGIC} {_VERSION} {self.id} {self.start:016d} {self.size_bytes:016d}")

    def position(self, offset: int) -> int:
        return self.start + max(0, offset - self.size_bytes)

    def offset(self, after: Place | None) -> int:
        """Return where in the file the records after a place begin: all, if they cannot be told from earlier ones."""
        if after is None or after.id != self.id or after.position < self.start:
            return self.LENGTH
        return self.size_bytes + after.position - self.start


@dataclass(frozen=True, slots=True)
class Content:
    """The records after a place, up to the first one that is not whole."""

    _path: Path
    _head: _Head
    _begin: int
    end: int  # offset in the file
    _lines: list[bytes]

    @classmethod
    def read(cls, descriptor: int, path: Path, after: Place | None = None) -> Self | None:
        """Raises JournalDamagedError if what is not whole is followed by a record that is."""
        head = _head(descriptor, path)
        if head is None:
            return None
        begin = head.offset(after)
        lines = _bytes(descriptor, begin).split(b"\n")[:-1]
        num_right = next((number for number, line in enumerate(lines) if not _is_right(line)), len(lines))
        if any(_is_right(line) for line in lines[num_right:]):
            raise _damaged(path, "there are right records after a wrong one")
        right = lines[:num_right]
        return cls(path, head, begin, begin + sum(map(len, right)) + num_right, right)

    @property
    def place(self) -> Place:
        """Where the next reading continues."""
        return Place(self._head.id, self._head.position(self.end))

    @property
    def is_whole(self) -> bool:
        """Whether these are all records, not only the new ones."""
        return self._begin == _Head.LENGTH

    def records(self, letters: str) -> list[Record]:
        """Return the records that have one of these letters, and only those parts of them."""
        found, end, body = [], self._begin, ""
        try:
            for line in self._lines:
                end += len(line) + 1
                names, _, body = line[9:].decode().partition(" ")
                if not set(letters).isdisjoint(names):
                    written_at, *parts = json.loads(body)
                    named = zip(names, parts, strict=True)
                    wanted = {name: part for name, part in named if name in letters}
                    found.append(Record(self._head.position(end), written_at, wanted))
        except (TypeError, ValueError) as error:
            raise unreadable(body, error) from error
        return found


def look(path: Path, after: Place | None = None) -> Content | None:
    """Return what was appended after a place; all, if there is none, or if it is of another log or was compacted since.
    Takes no lock and changes nothing. None if there is no such file, or if its creator was killed before the first
    record.

    Raises JournalError, JournalDamagedError.
    """
    with _translated(path):
        try:
            # The folder may be another user's, who may have put a FIFO or a link there.
            file = io.FileIO(private.open_file(path, os.O_RDONLY))
        except (FileNotFoundError, NotADirectoryError):
            return None
        with file:
            return _content(file.fileno(), path, after)


def _content(descriptor: int, path: Path, after: Place | None) -> Content | None:
    try:
        return Content.read(descriptor, path, after)
    except JournalDamagedError:
        # Somebody may just have cut off what a killed process had left, and appended.
        return Content.read(descriptor, path, after)


class Log:
    """One process's handle on a log, which is created if it is missing.

    All methods may be called from any thread and block for well under a millisecond, except `sync` and `compact`, which
    wait for the disk without blocking any other method. All raise NoSpaceError if the disk is full, JournalError for
    other problems; nothing was written then. In a forked child the handle cannot be used; the child may open its own.

    `needed` returns what compaction keeps of the records with these letters; it raises JournalDamagedError for what it
    cannot read. A tail that is not whole, because its writer was killed, is cut off; JournalDamagedError is raised for
    what is wrong before the last right record. If nobody else has the log open, which `loss` tells, a damaged one is
    moved aside and begun anew instead, and the log message says what that means.
    """

    def __init__(self, path: Path, letters: str, needed: Needed, *, loss: str = "") -> None:
        self._path, self._letters, self._needed = path, letters, needed
        self._lock = threading.Lock()  # guards the descriptor; never held while waiting for the disk
        self._disk_lock = threading.Lock()
        self._is_suspect = self._is_abandoned = False
        self._id = ""
        self._entry = 0  # the inode whose entry in the folder is durable
        with _translated(path):
            for each in path.parent.glob(f"{path.name}.*.new") if loss else ():
                each.unlink(missing_ok=True)  # what a killed compaction has left
            try:
                self._open()
            except JournalDamagedError as error:
                if not loss:
                    raise
                when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
                aside = path.with_name(f"{path.name}.damaged-{when}-{os.urandom(2).hex()}")
                path.rename(aside)
                told = error.without_hint
                logger.error("%s moved_to=%s error=%s", loss, aside, told)  # noqa: TRY400  no bug of ours
                self._open()
        after_fork.add(self)

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
            self._id = self._recover()
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            next(iter(self._needed(self.read().records(self._letters))), None)
        except BaseException:
            self.close()
            self._id = ""
            raise

    def _recover(self) -> str:
        """Cut off what a killed process has left, and return the log's id."""
        found = Content.read(self._descriptor, self._path)
        if found is None:
            os.ftruncate(self._descriptor, 0)
            head = _Head(os.urandom(8).hex(), _Head.LENGTH, _Head.LENGTH)
            self._write(head.encode(), 0)
            return head.id
        if (left_bytes := os.fstat(self._descriptor).st_size - found.end) > 0:
            logger.warning("log_tail_cut path=%s size_bytes=%d", self._path, left_bytes)
            os.ftruncate(self._descriptor, found.end)
        return found.place.id

    # --- records -------------------------------------------------------------------------------------------

    def write(self, written_at: float, parts: Parts) -> None:
        """Append one record. On return it survives SIGKILL, and with the next `sync` power loss."""
        line = _record(written_at, parts)
        self._check_usable()  # first: in a fork, nobody frees the lock
        with _translated(self._path), self._lock:
            self._check_usable()
            try:
                self._take()
                self._write(line, self._end())
            finally:  # not by a function of ours, before which Ctrl-C may come
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def read(self, *, after: int = 0) -> Content:
        """Return what was appended after a position; all, if it was compacted since. If the file was deleted, or is on
        another device now, what it had.
        """
        self._check_usable()
        with _translated(self._path), self._lock:
            self._check_usable()
            with contextlib.suppress(FileNotFoundError):
                is_mounted_anew = os.stat(self._path).st_dev != os.fstat(self._descriptor).st_dev
                if not is_mounted_anew and not self._is_current():
                    self._reopen()
            found = _content(self._descriptor, self._path, Place(self._id, after) if after else None)
        if found is None:
            raise self._deleted()
        return found

    def _write(self, data: bytes, end: int) -> None:
        try:
            _write_all(self._descriptor, data)
        except BaseException:  # Ctrl-C, too
            # What is left if this fails has no end, and the next append cuts it off.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise

    def _end(self) -> int:
        """Return where the file ends, without what a killed process has left."""
        end = os.fstat(self._descriptor).st_size
        if os.pread(self._descriptor, 1, end - 1) != b"\n":
            end = _bytes(self._descriptor, 0).rfind(b"\n") + 1
            os.ftruncate(self._descriptor, end)
        return end

    # --- the file ------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Lock the file that has the name now, or ours if its folder was moved. The caller has `_lock`, and unlocks."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        while not self._is_current(may_be_moved=True):
            self._reopen()
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def _is_current(self, *, may_be_moved: bool = False) -> bool:
        ours = os.fstat(self._descriptor)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            if may_be_moved and ours.st_nlink:
                return True  # what is appended will be found where it is now
            raise self._deleted() if not ours.st_nlink else not_there(self._path) from None
        if there.st_dev != ours.st_dev:
            raise self._deleted()  # mounted as another device, on which nobody has the lock of this rank
        return there.st_ino == ours.st_ino

    def _reopen(self) -> None:
        """Turn to the file that compaction has put in place of ours. The descriptor keeps its number, because `sync`
        may be using it.
        """
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with io.FileIO(
            self._path, opener=lambda path, _: os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        ) as new:
            head = _head(new.fileno(), self._path)
            if self._id and (head is None or head.id != self._id):
                raise self._deleted()
            self._entry = 0
            os.dup2(new.fileno(), self._descriptor, inheritable=False)

    def check_there(self) -> None:
        """Raise JournalError if somebody has deleted the file underneath us, so that nothing appended from then on
        would survive; or has moved its folder, so that the files in it are not where we look for them.
        """
        if self._is_abandoned:
            return
        with _translated(self._path), self._lock:
            if self._descriptor >= 0 and not self._is_current():
                self._reopen()

    def _deleted(self) -> JournalError:
        return JournalError(
            f"journal {str(self._path)!r} was deleted or replaced, or mounted as another device, while it was in use",
            hint="restart this process; it will continue with what is left in the journal and in the store",
        )

    def _check_usable(self) -> None:
        if self._is_abandoned:
            raise JournalError(
                f"journal {str(self._path)!r} was opened by the process that this one was forked from",
                hint="open it in this process",
            )
        if self._descriptor < 0:
            raise JournalError(f"journal {str(self._path)!r} is closed")

    def close(self) -> None:
        """Close the handle. Idempotent. The file stays."""
        after_fork.discard(self)
        if self._is_abandoned:
            return
        with self._disk_lock, self._lock:
            if self._descriptor >= 0:
                # Marked as closed first: Ctrl-C may come when it is.
                descriptor, self._descriptor = self._descriptor, -1
                os.close(descriptor)

    def abandon(self) -> None:
        """In a forked child: close our copy, with which the child would keep a lock that a killed parent had."""
        if not self._is_abandoned and self._descriptor >= 0:
            os.close(self._descriptor)
        self._is_abandoned = True

    # --- the disk ------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """fsync everything appended before the call, so that it survives power loss. Waits for the disk.

        Raises FsyncError if the disk refuses it: nobody can tell what has reached the disk. Everything is then written
        to a new file, as in `compact`; until that has succeeded, no later call succeeds either.
        """
        self._check_usable()  # first: in a fork, nobody frees the lock
        with self._disk_lock:
            self._check_usable()
            self.check_there()
            if self._is_suspect:
                self._renew()
            try:
                fsync_descriptor(self._descriptor, self._path)
                inode = os.fstat(self._descriptor).st_ino  # afterwards: it may have become another file's
                if self._entry != inode:
                    fsync_path(self._path.parent)
                    self._entry = inode
            except FsyncError:
                self._is_suspect = True
                with contextlib.suppress(JournalError, FsyncError):
                    self._renew()
                raise

    def compact(self) -> None:
        """Keep only the needed records if the file has become large, so that replay time and disk use stay flat. Waits
        for the disk.
        """
        self._check_usable()
        with self._disk_lock, _translated(self._path):
            self._check_usable()
            self.check_there()
            head = _head(self._descriptor, self._path)
            if head and os.fstat(self._descriptor).st_size >= max(COMPACT_BYTES, 2 * head.size_bytes):
                self._rewrite()

    def _renew(self) -> None:
        self._rewrite(is_suspect=True)
        logger.warning("log_renewed path=%s: it could not be synced", self._path)
        self._is_suspect = False

    def _rewrite(self, *, is_suspect: bool = False) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{os.urandom(4).hex()}.new")
        try:
            with _translated(self._path), io.FileIO(self._path) as old, io.FileIO(temporary, "x") as new:
                found = Content.read(old.fileno(), self._path)
                if found is None or (is_suspect and found.end < os.fstat(old.fileno()).st_size):
                    raise _damaged(self._path, "its end cannot be read back")
                records = found.records(self._letters)
                kept = b"".join(_record(*each) for each in self._needed(records))
                head = _Head(found.place.id, found.place.position, _Head.LENGTH + len(kept))
                _write_all(new.fileno(), head.encode() + kept)
                self._replace(old.fileno(), found.end, new.fileno(), temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def _replace(self, old: int, end: int, new: int, temporary: Path) -> None:
        """Copy what is appended to the old file meanwhile, and put the new one in its place. Appends wait only in the
        end.
        """
        for num_left in range(CATCH_UPS, -1, -1):
            fsync_descriptor(new, temporary)
            with self._lock:
                self._check_usable()
                try:
                    self._take()
                    if not os.path.sameopenfile(self._descriptor, old):
                        return  # another process has compacted it
                    data = _bytes(old, end)[: self._end() - end]
                    if data and not num_left:
                        _write_all(new, data)
                        fsync_descriptor(new, temporary)
                    if not data or not num_left:
                        temporary.replace(self._path)
                        self._reopen()
                        break
                finally:
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            _write_all(new, data)
            end += len(data)
        fsync_path(self._path.parent)


# --- the format --------------------------------------------------------------------------------------------


def _line(text: str) -> bytes:
    rest = text.encode()
    return b"%08x %b\n" % (zlib.crc32(rest), rest)


def _record(written_at: float, parts: Parts) -> bytes:
    return _line(f"{''.join(parts)} [{written_at!r},{','.join(parts.values())}]")


def _is_right(line: bytes) -> bool:
    return line[:9] == b"%08x " % zlib.crc32(line[9:])


def _head(descriptor: int, path: Path) -> _Head | None:
    """Return what the first line says; None if its writer was killed."""
    line, has_end, _ = os.pread(descriptor, 2 * _Head.LENGTH, 0).partition(b"\n")
    if not has_end and len(line) < _Head.LENGTH:
        return None
    if not _is_right(line) or not line[9:].startswith(_MAGIC.encode()):
        raise _damaged(path, "its first line is wrong")
    version, id_, start, size_bytes = line.decode().split()[2:6]
    if version != str(_VERSION):
        raise JournalError(
            f"journal {str(path)!r} has format {version}; this program writes {_VERSION}",
            hint="finish its uploads with the version of ckpt_async that wrote it: run `ckpt-async drain` of that"
            " version",
        )
    return _Head(id_, int(start), int(size_bytes))


def _bytes(descriptor: int, offset: int) -> bytes:
    """Return what is in the file from an offset on."""
    found = []
    while data := os.pread(descriptor, max(1, os.fstat(descriptor).st_size - offset), offset):
        found.append(data)
        offset += len(data)
    return b"".join(found)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _damaged(path: Path, what: str) -> JournalDamagedError:
    return JournalDamagedError(f"journal {str(path)!r}: {what}", hint=DAMAGE_HINT)


def unreadable(what: str, error: Exception) -> JournalDamagedError:
    return JournalDamagedError(f"journal: {what[:60]} cannot be read: {error!r}", hint=DAMAGE_HINT)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate errors of the disk. It must not take a lock: Ctrl-C may leave a generator suspended for as long as
    somebody holds the traceback.
    """
    try:
        yield
    except (CkptAsyncError, FsyncError):
        raise
    except OSError as error:
        if errnos.is_full(error):
            common = next((each for each in path.parents if each.name == keys.PRIVATE), path.parent)
            raise no_space(common.parent, common=common) from error
        raise JournalError(
            f"journal {str(path)!r}: {error.strerror or error}",
            hint="check the disk and the permissions of the folder",
        ) from error
