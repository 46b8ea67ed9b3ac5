"""The journal: one rank's local append-only event log in SQLite (WAL). It *is* the queue.

It is written by the holder of the rank's lock: a trainer and its own runner process, else `drain` or the sweeper.
Anybody may read it (`journals`). An append survives SIGKILL once it has returned, and power loss after the engine's
`sync`. The trainer never waits for an fsync: as measured, `synchronous=FULL` costs 17 ms at p99 and up to 1.6 s
under load.

The journal is a cache (rule R10): the spool's manifests and the store can rebuild it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, Self

from ckpt_async import private
from ckpt_async.core import keys
from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import (
    CheckpointId,
    Event,
    Forgotten,
    JournalRow,
    MultipartOpened,
    Opened,
    ReceiptStored,
    Verified,
)
from ckpt_async.core.notices import Notice
from ckpt_async.errors import FolderInUseError, JournalDamagedError, JournalError
from ckpt_async.local import database, journal_rows, outbox
from ckpt_async.local.durable import FsyncError, fsync_descriptor, fsync_path
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal_rows import FORMAT_VERSION

logger = logging.getLogger(__name__)

# What a launch at another server of the same URL must not take for granted.
_OF_STORE = (MultipartOpened, Verified, ReceiptStored)
# How long a `.wanted` mark counts. A trainer that waits for a lock renews its mark twenty times a second.
WANTED_S = 5.0
# Number of frames in the WAL from which the engine moves them into the main file, off the trainer's path.
CHECKPOINT_PAGES = 1000

_SCHEMA = (
    """
    CREATE TABLE events (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,
        generation INTEGER NOT NULL,
        step INTEGER NOT NULL,
        written_at REAL NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL
    )
    """,
    "CREATE TABLE progress (body TEXT NOT NULL)",
)
_INSERT = "INSERT INTO events (generation, step, written_at, kind, body) VALUES (?, ?, ?, ?, ?)"


class Journal:
    """One process's handle on the journal of one rank, whose lock it holds.

    All methods may be called from any thread and block for well under a millisecond, except `sync` and `compact`,
    which wait for the disk without blocking any other method. (On a full disk, `compact_on_full_disk` does block them.)

    A damaged journal is moved aside, loudly, and started anew, unless somebody else may have it open
    (`may_replace=False`); then JournalDamagedError is raised.
    """

    # Journals of which this process, a fork, has inherited a connection.
    _of_parents: ClassVar[set[Path]] = set()

    def __init__(
        self, folder: Folder, rank: int, *, may_replace: bool = True, clock: Callable[[], float] = time.time
    ) -> None:
        self.rank = rank
        self._path = folder.private / keys.journal_name(rank)
        if self._path in self._of_parents:
            raise JournalError(
                f"journal {str(self._path)!r} was open in the parent process when this one was forked: SQLite"
                " mistakes the parent's locks and index for this process's",
                hint="open it in a process started by subprocess or multiprocessing's spawn",
            )
        self._clock = clock
        self._lock = threading.Lock()  # guards the connection; never held while waiting for the disk
        self._disk_lock = threading.Lock()
        self._is_abandoned = False
        self._is_synced = self._is_suspect = False
        self._compacting: sqlite3.Connection | None = None
        try:
            self._connection = self._open()
        except JournalDamagedError as error:
            if not may_replace:
                raise
            aside = database.move_aside(self._path)
            logger.error(  # noqa: TRY400  no bug of ours
                "journal_damaged rank=%d moved_to=%s error=%s; rebuilding it from the spool's manifests",
                rank,
                aside,
                error,
            )
            self._connection = self._open()
        # Used by `sync`, and open as long as the connection. SQLite holds no locks on the WAL, and a
        # descriptor reports every write that has failed since it was opened, even if others were told of it
        # too.
        try:
            self._wal = os.open(f"{self._path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._connection.close()
            raise JournalError(f"journal {str(self._path)!r}: its WAL: {error.strerror}") from error
        after_fork.add(self)

    def _open(self) -> sqlite3.Connection:
        with database.translated(self._path):
            connection = database.connect(self._path)
            try:
                if database.version(connection) == 0:
                    self._create(connection)
                journal_rows.check_format(database.version(connection), self._path)
                self._check(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    def _create(self, connection: sqlite3.Connection) -> None:
        with connection:
            database.begin(connection)
            if database.version(connection):
                return  # another process was faster
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")

    def _check(self, connection: sqlite3.Connection) -> None:
        database.check(connection, self._path)
        journal_rows.read(connection, self.rank)

    # --- writing -------------------------------------------------------------------------------------------

    def append(self, events: Iterable[Event], notices: Sequence[Notice] = ()) -> None:
        """Write events, and the notices about them, in one transaction: all or none. On return they survive
        SIGKILL.

        Raises NoSpaceError if the disk is full, JournalError for other problems; nothing was written then.
        """
        rows = self._rows_of(events)
        with self._checked(), self._lock:
            # A single statement is its own transaction, and the trainer waits for it.
            if len(rows) == 1 and not notices:
                database.patiently(self._connection, _INSERT, rows[0])
                return
            with self._connection:
                database.begin(self._connection)
                self._connection.executemany(_INSERT, rows)
                if notices:
                    outbox.put(self._connection, notices, self._clock())

    def outbox(self) -> outbox.Outbox:
        """Return the outbox of the notices that were written here."""
        return outbox.Outbox(self._connection, self._lock, self._checked)

    def _rows_of(self, events: Iterable[Event]) -> list[tuple[int, int, float, str, str]]:
        now = self._clock()
        return [(*place, now, kind, body) for place, kind, body in journal_rows.encode(events)]

    def forget(self, event: Forgotten) -> None:
        """Drop a checkpoint's rows. One `Forgotten` row is kept: that of the newest committed checkpoint."""
        mark = (event.checkpoint.generation, event.checkpoint.step)
        with self._checked(), self._lock, self._connection:
            database.begin(self._connection)
            self._connection.execute("DELETE FROM events WHERE generation = ? AND step = ?", mark)
            if event.committed_at is None:
                return
            newest = self._connection.execute(
                "SELECT generation, step FROM events WHERE kind = 'Forgotten'"
                " ORDER BY generation DESC, step DESC LIMIT 1"
            ).fetchone()
            if newest is not None and tuple(newest) >= mark:
                return
            self._connection.execute("DELETE FROM events WHERE kind = 'Forgotten'")
            self._connection.executemany(_INSERT, self._rows_of([event]))

    def forget_marks(self) -> None:
        """Drop the row that `forget` keeps, because the rank continues with another remote."""
        with self._checked(), self._lock, self._connection:
            database.begin(self._connection)
            self._connection.execute("DELETE FROM events WHERE kind = 'Forgotten'")

    def open_rank(self, event: Opened, unproven: Iterable[CheckpointId] = ()) -> None:
        """Record a new launch; the rows of earlier launches are no longer needed, nor what they say about the store's
        part of `unproven` checkpoints.
        """
        with self._checked(), self._lock, self._connection:
            database.begin(self._connection)
            self._connection.execute("DELETE FROM events WHERE kind = 'Opened'")
            self._connection.executemany(
                "DELETE FROM events WHERE kind = ? AND generation = ? AND step = ?",
                [(kind.__name__, each.generation, each.step) for each in unproven for kind in _OF_STORE],
            )
            self._connection.executemany(_INSERT, self._rows_of([event]))

    def note_progress(self, sent: Iterable[tuple[CheckpointId, str, int]]) -> None:
        """Replace the note of how many bytes of unfinished shards were sent. It is for `status`, not for rules."""
        body = json.dumps([[each.generation, each.step, shard, size] for each, shard, size in sent])
        with self._checked(), self._lock, self._connection:
            database.begin(self._connection)
            self._connection.execute("DELETE FROM progress")
            self._connection.execute("INSERT INTO progress VALUES (?)", (body,))

    # --- the disk ------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """fsync everything appended before the call, so that it survives power loss. Waits for the disk.

        Raises FsyncError if the disk refuses it. The WAL is then rewritten into the main file; until that has
        succeeded, no later call succeeds either.
        """
        self._refuse_fork()
        with self._disk_lock:
            self._check_open()
            if self._is_suspect:
                self._renew()
            try:
                fsync_descriptor(self._wal, f"{self._path}-wal")
                if not self._is_synced:  # once is enough: nobody replaces the WAL while it is open
                    fsync_path(self._path.parent)
            except FsyncError:
                self._is_suspect = True
                with contextlib.suppress(JournalError):
                    self._renew()
                raise
            self._is_synced = True

    def compact(self) -> None:
        """Move the WAL into the main file if it has grown, so that replay time and disk use stay flat. Waits for
        the disk.
        """
        self._refuse_fork()
        with self._disk_lock:
            self._check_open()
            if os.fstat(self._wal).st_size >= CHECKPOINT_PAGES * 4096:
                self._checkpoint("PASSIVE")

    def compact_on_full_disk(self, room: contextlib.AbstractContextManager[None]) -> None:
        """Move all of the WAL into the main file, whose pages it repeats many times, and truncate it. `room` frees the
        space for this; appends wait, because they would take that.
        """
        self._refuse_fork()
        with self._disk_lock, self._lock, room:
            self._check_open()
            self._checkpoint("TRUNCATE")

    def _renew(self) -> None:
        """Move all of the WAL, which memory still has, into the main file and start it anew, because the disk has
        refused some unknown part of it. Appends wait.
        """
        for attempt in range(2):
            try:
                is_busy = self._checkpoint("TRUNCATE")
                break
            except JournalError as error:
                # Every descriptor reports the failure once; SQLite's own reports it here.
                if attempt or "SQLITE_IOERR_FSYNC" not in str(error):
                    raise
        if is_busy:
            raise JournalError(
                f"journal {str(self._path)!r} cannot be rewritten while another process reads it"
            )
        logger.warning("journal_renewed rank=%d: its WAL could not be synced", self.rank)
        self._is_suspect = False

    def _checkpoint(self, how: str) -> bool:
        """Checkpoint through a separate connection, so that no append waits. Returns whether others were in the
        way.
        """
        with database.translated(self._path):
            if self._compacting is None:
                self._compacting = database.connect(self._path)
            [(is_busy, _, _)] = database.patiently(
                self._compacting, f"PRAGMA wal_checkpoint({how})"
            ).fetchall()
        return bool(is_busy)

    # --- reading -------------------------------------------------------------------------------------------

    def rows(self, *, after: int = 0) -> list[JournalRow]:
        """Return the rows after a sequence number, in order. Events that were appended together may share a
        sequence number.
        """
        with self._checked(), self._lock:
            return journal_rows.read(self._connection, self.rank, after)

    def local(self) -> Local:
        """Return this rank's state, replayed from the beginning."""
        return fold(self.rows(), Local(self.rank))

    # --- the handle ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the handle. Idempotent. The journal itself stays."""
        after_fork.discard(self)
        if self._is_abandoned:
            return
        with self._disk_lock, self._lock:
            if self._wal >= 0:
                wal, self._wal = self._wal, -1  # first: Ctrl-C may come when it is closed
                os.close(wal)
            if self._compacting is not None:
                self._compacting.close()
            self._connection.close()

    def abandon(self) -> None:
        """In a forked child: keep the connections, but never use or close them. Closing one here could remove the
        parent's WAL (https://sqlite.org/howtocorrupt.html, 2.6 "Carrying an open database connection across a
        fork").
        """
        self._is_abandoned = True
        self._of_parents.add(self._path)
        for connection in (self._connection, self._compacting):
            if connection is not None:
                # Never closed, not even at interpreter exit.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Refuse use by a fork, and translate errors. It must not take a lock: Ctrl-C may leave a generator suspended
        for as long as somebody holds the traceback.
        """
        self._refuse_fork()
        with database.translated(self._path):
            yield

    def _check_open(self) -> None:
        if self._wal < 0:
            raise JournalError(f"journal {str(self._path)!r} is closed")
        self.check_there()

    def check_there(self) -> None:
        """Raise JournalError if somebody has deleted the journal underneath us, so that nothing appended from then on
        would survive; or has moved its folder, so that the files in it are not where we look for them.
        """
        if self._wal < 0 or (os.fstat(self._wal).st_nlink and os.path.exists(f"{self._path}-wal")):
            return
        raise JournalError(
            f"journal {str(self._path)!r} was deleted, or its folder moved, while this process was using it",
            hint="restart this process; it will continue with what is left in the journal and in the store",
        )

    def _refuse_fork(self) -> None:
        if self._is_abandoned:
            raise JournalError("this journal was opened by the process that this one was forked from")


# --- ownership ---------------------------------------------------------------------------------------------


class RankLock:
    """The right to run an engine for one rank of a folder: an flock, which the kernel releases however its holder
    dies. The file is never replaced, since otherwise two holders could each lock their own file.

    `run`: the right to save for one rank of a run without a remote, beside other runs in the folder.
    """

    def __init__(self, folder: Folder, rank: int, *, run: str | None = None) -> None:
        self.path = folder.private / (keys.lock_name(rank) if run is None else keys.sealed_lock(run, rank))
        self._place = f"folder {str(folder.path)!r}" + (f", kind {folder.kind!r}," if folder.kind else "")
        self.rank = rank
        self._descriptor: int | None = None

    @classmethod
    def inherit(cls, folder: Folder, rank: int, descriptor: int) -> Self:
        """Return the same lock, made from a descriptor that its holder has sent. It is held until both have
        released it.
        """
        lock = cls(folder, rank)
        os.set_inheritable(descriptor, False)
        lock._descriptor = descriptor
        lock._sign(f"process {os.getpid()}, a runner")
        after_fork.add(lock)
        return lock

    def share(self, other: RankLock) -> bool:
        """Hold what another one of this process holds, until both have released it; False if it holds nothing."""
        if other._descriptor is None:
            return False
        self._descriptor = os.dup(other._descriptor)
        after_fork.add(self)
        return True

    @property
    def descriptor(self) -> int:
        """The descriptor to send to a process that shall hold the lock too."""
        assert self._descriptor is not None, "not acquired"
        return self._descriptor

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    @property
    def _wanted(self) -> Path:
        return self.path.with_suffix(".wanted")

    def is_wanted(self) -> bool:
        """Return whether a trainer is waiting for this lock now: a process that has only adopted the journal then
        gives it back. A mark that is not renewed was left by a trainer that was killed while waiting.
        """
        try:
            return abs(time.time() - self._wanted.stat().st_mtime) < WANTED_S
        except FileNotFoundError:
            return False

    def is_removed(self) -> bool:
        """Return whether somebody has removed the folder underneath us."""
        return os.fstat(self.descriptor).st_nlink == 0

    def acquire(self, *, wait_s: float = 0.0, is_trainer: bool = False) -> None:
        """Take the lock, waiting up to `wait_s` for a predecessor that is still ending. A trainer also asks an
        adopter (`drain`, the sweeper) to give it back.

        Raises FolderInUseError, which names the holder.
        """
        descriptor = private.open_lock(self.path)
        try:
            self._wait_for(descriptor, wait_s, is_trainer=is_trainer)
            self._descriptor = descriptor
            self._sign(f"process {os.getpid()}")
            if is_trainer:
                self._wanted.unlink(missing_ok=True)
            after_fork.add(self)
        except BaseException:
            # Ctrl-C, too: otherwise this process would hold the lock, and nobody could release it.
            self._descriptor = None
            after_fork.discard(self)
            os.close(descriptor)
            raise

    def _wait_for(self, descriptor: int, wait_s: float, *, is_trainer: bool) -> None:
        def want() -> bool:
            if is_trainer:
                with contextlib.suppress(OSError):
                    self._wanted.touch()
            return False

        if private.lock(descriptor, self.path, timeout_s=wait_s, poll_s=0.05, is_over=want):
            return
        if is_trainer:
            self._wanted.unlink(missing_ok=True)
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
        raise FolderInUseError(
            f"rank {self.rank} of {self._place} is in use by {holder}",
            hint="only one process at a time may save there for a rank (and kind): stop the other one"
            " or use another folder",
        )

    def _sign(self, holder: str) -> None:
        with contextlib.suppress(OSError):  # only used in messages; the lock is held even if the disk is full
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"{holder}\n".encode(), 0)

    def release(self) -> None:
        """Free the lock. Idempotent."""
        after_fork.discard(self)
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None  # first: Ctrl-C may come when it is closed
            os.close(descriptor)

    def abandon(self) -> None:
        """In a forked child: close our copy, since otherwise a dataloader worker would keep a dead trainer's lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Abandoned(Protocol):
    """A handle of the parent that a forked child must let go of."""

    def abandon(self) -> None: ...


class _AfterFork:
    """Handles that a forked child must let go of. One `register_at_fork` for the life of the process."""

    _is_registered: ClassVar[bool] = False

    def __init__(self) -> None:
        self._handles: set[Abandoned] = set()

    def add(self, handle: Abandoned) -> None:
        if not _AfterFork._is_registered:
            os.register_at_fork(after_in_child=self._abandon_all)
            _AfterFork._is_registered = True
        self._handles.add(handle)

    def discard(self, handle: Abandoned) -> None:
        self._handles.discard(handle)

    def _abandon_all(self) -> None:
        for handle in self._handles:
            handle.abandon()
        self._handles.clear()


after_fork = _AfterFork()
