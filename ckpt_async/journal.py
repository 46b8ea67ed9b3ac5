"""The journal: a local append-only event log in SQLite (WAL). It *is* the queue.

One per folder, shared by all ranks of a node and by every process that enqueues, uploads or looks. An append
survives SIGKILL when it returns; it survives power loss after the engine's `sync` (rule: the trainer never
waits for an fsync; measured, `synchronous=FULL` costs p99 17 ms and up to 1.6 s under load).

It is a cache (rule R10): the spool's manifests and the store can rebuild it.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import itertools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, get_args

from ckpt_async import keys
from ckpt_async.errors import FailureReason, FolderInUseError, JournalError, NoJournalError
from ckpt_async.files import Folder, fsync_path, no_space
from ckpt_async.model import (
    CheckpointId,
    Checksum,
    Enqueued,
    Event,
    FileIdentity,
    Forgotten,
    JournalRow,
    Local,
    Opened,
    Outcome,
    RemoteAddress,
    Shard,
    StoredShard,
    Verified,
    fold,
)

# 2: rows for many shards, and no index, for which every append would pay. A journal of version 1 is read, and becomes
# one of version 2 by the first append.
FORMAT_VERSION = 2
# Shards in one row at most: a row is encoded and decoded as a whole.
ROW_SHARDS = 1000
# Waiting for another process's write; each of them takes well under a millisecond.
BUSY_TIMEOUT_S = 10.0
BUSY_PAUSE_S = 0.0003
# A trainer that waits for a lock renews its mark twenty times a second.
WANTED_S = 5.0
# Frames in the WAL before the engine moves them into the main file, off the trainer's path.
CHECKPOINT_PAGES = 1000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    rank INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    step INTEGER NOT NULL,
    written_at REAL NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS progress (rank INTEGER PRIMARY KEY, body TEXT NOT NULL);
"""
_INSERT = "INSERT INTO events (rank, generation, step, written_at, kind, body) VALUES (?, ?, ?, ?, ?, ?)"


class Journal:
    """One process's handle. All methods may be called from any thread and block for well under a
    millisecond, but for `sync`, which waits for the disk.
    """

    def __init__(self, folder: Folder, *, clock: Callable[[], float] = time.time) -> None:
        self._open(folder.path, clock, _connect)

    @classmethod
    def open_readonly(cls, folder: str | os.PathLike[str]) -> Self:
        """Open a folder's journal to look at it, also beside live writers. Makes no file; writing raises
        JournalError, and later appends may not be seen.

        Raises NoJournalError if there is none.
        """
        journal = cls.__new__(cls)
        journal._open(Path(os.path.realpath(folder)), time.time, _connect_readonly)  # noqa: SLF001  our own
        return journal

    def _open(
        self, folder: Path, clock: Callable[[], float], connect: Callable[[Path], sqlite3.Connection]
    ) -> None:
        self._folder = folder
        self._path = folder / keys.PRIVATE / "journal.sqlite"
        self._clock = clock
        self._lock = threading.Lock()
        self._is_abandoned = False
        with self._translated():
            self._connection = connect(self._path)
            self._version = _version(self._connection)
        after_fork.add(self)

    # --- writing -------------------------------------------------------------------------------------------

    def append(self, rank: int, events: Iterable[Event]) -> None:
        """Write events in one transaction: all or none. On return they survive SIGKILL.

        Raises NoSpaceError if the disk is full, JournalError for other trouble; then nothing was written.
        """
        now = self._clock()
        rows = [(rank, *place, now, kind, body) for place, kind, body in _encode(events)]
        with self._translated(), self._lock:
            if self._version != FORMAT_VERSION:
                with self._transaction():
                    self._connection.execute("DROP INDEX IF EXISTS events_by_checkpoint")
                    self._connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
                self._version = FORMAT_VERSION
            if len(rows) == 1:  # one statement is a transaction of its own, and the trainer waits for it
                self._patiently(_INSERT, rows[0])
                return
            with self._transaction():
                self._connection.executemany(_INSERT, rows)

    def forget(self, rank: int, event: Forgotten) -> None:
        """Drop a checkpoint's rows. One `Forgotten` row stays per rank: that of the newest committed one."""
        checkpoint = event.checkpoint
        with self._translated(), self._lock, self._transaction():
            self._connection.execute(
                "DELETE FROM events WHERE rank = ? AND generation = ? AND step = ?",
                (rank, checkpoint.generation, checkpoint.step),
            )
            if event.committed_at is None:
                return
            mark = (checkpoint.generation, checkpoint.step)
            newest = self._connection.execute(
                "SELECT generation, step FROM events WHERE rank = ? AND kind = 'Forgotten'"
                " ORDER BY generation DESC, step DESC LIMIT 1",
                (rank,),
            ).fetchone()
            if newest is not None and tuple(newest) >= mark:
                return
            self._connection.execute("DELETE FROM events WHERE rank = ? AND kind = 'Forgotten'", (rank,))
            self._connection.execute(
                "INSERT INTO events (rank, generation, step, written_at, kind, body)"
                " VALUES (?, ?, ?, ?, 'Forgotten', ?)",
                (rank, *mark, self._clock(), _ENCODER.encode(event)),
            )

    def forget_marks(self, rank: int) -> None:
        """Drop what `forget` keeps: the rank goes on with another remote."""
        with self._translated(), self._lock, self._transaction():
            self._connection.execute("DELETE FROM events WHERE rank = ? AND kind = 'Forgotten'", (rank,))

    def open_rank(self, rank: int, event: Opened) -> None:
        """Record a new start; the rows of earlier starts are not needed any more."""
        with self._translated(), self._lock, self._transaction():
            self._connection.execute("DELETE FROM events WHERE rank = ? AND kind = 'Opened'", (rank,))
            self._connection.execute(
                "INSERT INTO events (rank, generation, step, written_at, kind, body)"
                " VALUES (?, 0, 0, ?, 'Opened', ?)",
                (rank, self._clock(), _ENCODER.encode(event)),
            )

    def note_progress(self, rank: int, sent: Iterable[tuple[CheckpointId, str, int]]) -> None:
        """Replace the note of how many bytes of unfinished shards were sent: for `status`, not for rules."""
        body = json.dumps([[each.generation, each.step, shard, size] for each, shard, size in sent])
        with self._translated(), self._lock, self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO progress VALUES (?, ?)", (rank, body))

    def sync(self) -> None:
        """fsync what was appended before the call: it then survives power loss. Waits for the disk."""
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                fsync_path(f"{self._path}{suffix}")
        fsync_path(self._path.parent)

    def compact(self) -> None:
        """Move the WAL into the main file if it has grown: replay and disk use stay flat. Waits for the disk."""
        try:
            if os.path.getsize(f"{self._path}-wal") < CHECKPOINT_PAGES * 4096:
                return
        except FileNotFoundError:
            return
        with self._translated(), self._lock:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    # --- reading -------------------------------------------------------------------------------------------

    def rows(self, *, after: int = 0, rank: int | None = None) -> list[JournalRow]:
        """What is past a sequence number, in order; of all ranks or one. Events that were appended together may share a
        sequence number.
        """
        with self._translated(), self._lock:
            found = self._patiently(
                "SELECT sequence, rank, generation, step, written_at, kind, body FROM events"
                " WHERE sequence > ? AND rank = ifnull(?, rank) ORDER BY sequence",
                (after, rank),
            ).fetchall()
        rows: list[JournalRow] = []
        for sequence, owner, generation, step, written_at, kind, body in found:
            events = _decode(kind, CheckpointId(generation, step), body)
            rows += [JournalRow(sequence, owner, written_at, event) for event in events]
        return rows

    def local(self, rank: int) -> Local:
        """This rank's state, replayed from the beginning."""
        return fold(self.rows(rank=rank), Local(rank))

    def progress(self, rank: int) -> dict[tuple[CheckpointId, str], int]:
        """What `note_progress` noted last: bytes sent by (checkpoint, shard)."""
        with self._translated(), self._lock:
            found = self._patiently("SELECT body FROM progress WHERE rank = ?", (rank,)).fetchone()
        noted = json.loads(found[0]) if found else []
        return {(CheckpointId(generation, step), shard): size for generation, step, shard, size in noted}

    def ranks(self) -> list[int]:
        """Ranks that have any rows."""
        with self._translated(), self._lock:
            found = self._patiently("SELECT DISTINCT rank FROM events ORDER BY rank").fetchall()
        return [rank for (rank,) in found]

    def data_version(self) -> int:
        """A number that changes when another connection has written: a cheap question to poll."""
        with self._translated(), self._lock:
            return int(self._patiently("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        """Close the handle. Idempotent. The journal itself stays."""
        after_fork.discard(self)
        if self._is_abandoned:
            return
        with self._lock:
            self._connection.close()

    def abandon(self) -> None:
        """In a forked child: keep the connection but never use or close it. Closing it here could take the
        parent's WAL away (https://sqlite.org/howtocorrupt.html, 2.6 "Carrying an open database connection
        across a fork").
        """
        _abandoned.append(self._connection)
        self._is_abandoned = True

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._patiently("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite rolls back by itself when the disk is full
                self._connection.execute("ROLLBACK")
            raise

    def _patiently(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """Execute a statement that wants a lock. SQLite's own waiting doubles its pauses up to 100 ms, while whoever
        holds the lock needs a tenth of a millisecond; so this does its own.
        """
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                return self._connection.execute(statement, values)
            except sqlite3.OperationalError as error:
                is_busy = (
                    error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                )  # also while a WAL is recovered
                if not is_busy or time.monotonic() >= deadline:
                    raise
            time.sleep(BUSY_PAUSE_S)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        if self._is_abandoned:
            raise JournalError("this journal was opened by another process, of which this one is a fork")
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorname", "") or ""
            if code == "SQLITE_FULL":
                raise no_space(self._folder) from error
            hint = ""
            if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                hint = "move the file away and start again: the spool's manifests rebuild it"
            elif code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_PERM")):
                hint = "check the disk and the permissions of the folder"
            raise JournalError(f"journal {str(self._path)!r}: {error} [{code}]", hint=hint) from error


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=32
    )
    try:
        _switch_to_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        # A checkpoint fsyncs in whichever process it happens to strike: never the trainer's enqueue.
        connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
        version = _version(connection)
        if version == 0:
            connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {FORMAT_VERSION}; COMMIT;"
            )
        else:
            _check_format(version, path)
        connection.execute("PRAGMA busy_timeout = 0")  # from now on `_patiently` waits
    except BaseException:
        connection.close()
        raise
    return connection


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Wait for other processes that open a new journal now: SQLite's own `timeout` does not cover the switch."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.002)


def _connect_readonly(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise _no_journal(path)
    # Without a WAL nobody has the journal open, and all of it is in the main file. Read as immutable then, for
    # SQLite would make a WAL and leave it behind (https://sqlite.org/wal.html, 5 "Read-Only Databases").
    mode = "mode=ro" if os.path.exists(f"{path}-wal") else "mode=ro&immutable=1"
    connection = sqlite3.connect(
        f"{path.as_uri()}?{mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        version = _version(connection)
        if version == 0:
            raise _no_journal(path)  # its maker was killed before the first row
        _check_format(version, path)
        connection.execute("PRAGMA busy_timeout = 0")
    except BaseException:
        connection.close()
        raise
    return connection


def _no_journal(path: Path) -> NoJournalError:
    return NoJournalError(
        f"there is no journal in {str(path.parent.parent)!r}",
        hint="give the folder that the uploader was opened with",
    )


def _version(connection: sqlite3.Connection) -> int:
    """0 in a new file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _check_format(version: int, path: Path) -> None:
    if not 1 <= version <= FORMAT_VERSION:
        raise JournalError(
            f"journal {str(path)!r} has format {version}; this program writes {FORMAT_VERSION}",
            hint="finish it with the version of ckpt_async that wrote it (`ckpt-async drain`)",
        )


# --- events <-> rows ---------------------------------------------------------------------------------------

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


def _encode(events: Iterable[Event]) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Rows for events: generation and step, kind, body. What comes by the thousand shares rows, whose body is one flat
    list, written by hand: it is read without an object for each, and the trainer waits for it. All else has a row and a
    JSON object of its own.
    """
    for _, series in itertools.groupby(events, _series):
        many = list(series)
        for start in range(0, len(many), ROW_SHARDS):
            some = many[start : start + ROW_SHARDS]
            first = some[0]
            if isinstance(first, Enqueued):
                shards = [_shard_items(each.shard) for each in some if isinstance(each, Enqueued)]
                body = f"[{_quoted(first.name)},{','.join(shards)}]"
            elif isinstance(first, Verified):
                stored = [_stored_items(each.stored) for each in some if isinstance(each, Verified)]
                body = f"[{','.join(stored)}]"
            else:
                body = _ENCODER.encode(first)
            yield _place(first), type(first).__name__, body


def _series(event: Event) -> object:
    """Equal for neighbours that share a row."""
    if isinstance(event, Enqueued):
        return Enqueued, event.checkpoint, event.name
    if isinstance(event, Verified):
        return Verified, event.checkpoint
    return object()


def _place(event: Event) -> tuple[int, int]:
    return (0, 0) if isinstance(event, Opened) else (event.checkpoint.generation, event.checkpoint.step)


def _shard_items(shard: Shard) -> str:
    of, is_linked = shard.identity, "true" if shard.is_linked else "false"
    names = f"{_quoted(shard.name)},{_quoted(shard.source)}"
    return f"{names},{of.device},{of.inode},{of.size_bytes},{of.mtime_ns},{is_linked}"


def _stored_items(stored: StoredShard) -> str:
    names, checksum = f"{_quoted(stored.name)},{_quoted(stored.key)}", stored.checksum
    return f"{names},{stored.size_bytes},{_quoted(checksum.algorithm)},{_quoted(checksum.value)}"


def _fields(value: Any) -> Any:
    """Of an event or what is in it: `dataclasses.asdict` without the copies, for which the trainer would wait."""
    if isinstance(value, enum.Enum):
        return value.value
    return {name: getattr(value, name) for name in value.__slots__}


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_fields)


def _decode(kind: str, checkpoint: CheckpointId, body: str) -> list[Event]:
    """Rebuild a row's events. The journal is our own file, but a program of another version may have written it."""
    try:
        fields = json.loads(body)
        if isinstance(fields, dict):
            return [_event(kind, fields)]
        items = iter(fields)
        if kind == "Enqueued":
            name = next(items)
            return [
                Enqueued(
                    checkpoint,
                    name,
                    Shard(shard, source, FileIdentity(device, inode, size_bytes, mtime_ns), is_linked),
                )
                for shard, source, device, inode, size_bytes, mtime_ns, is_linked in zip(
                    *[items] * 7, strict=True
                )
            ]
        if kind == "Verified":
            return [
                Verified(checkpoint, StoredShard(name, key, size_bytes, Checksum(algorithm, value)))
                for name, key, size_bytes, algorithm, value in zip(*[items] * 5, strict=True)
            ]
        raise ValueError("a list")
    except (KeyError, StopIteration, TypeError, ValueError) as error:
        raise JournalError(
            f"journal: row of kind {kind!r} cannot be read: {error}",
            hint="move the journal away and start again: the spool's manifests rebuild it",
        ) from error


def _event(kind: str, fields: dict[str, Any]) -> Event:
    if "checkpoint" in fields:
        fields["checkpoint"] = CheckpointId(**fields["checkpoint"])
    match kind:
        case "Opened":
            remote = fields.get("remote")
            fields["remote"] = RemoteAddress(**remote) if remote else None
            fields["settings"] = tuple((name, value) for name, value in fields.get("settings", ()))
        case "Enqueued":  # of version 1
            shard = fields["shard"]
            shard["identity"] = FileIdentity(**shard["identity"])
            fields["shard"] = Shard(**shard)
        case "Sealed":
            fields["metrics"] = tuple((name, value) for name, value in fields["metrics"])
        case "MadeDurable":
            fields["shards"] = tuple(fields["shards"])
        case "Verified":  # of version 1
            stored = fields["stored"]
            stored["checksum"] = Checksum(**stored["checksum"])
            fields["stored"] = StoredShard(**stored)
        case "Failed":
            fields["reason"] = FailureReason(fields["reason"])
        case "Decided":
            fields["outcome"] = Outcome(fields["outcome"])
        case _:
            pass
    event: Event = _KINDS[kind](**fields)
    return event


# --- ownership ---------------------------------------------------------------------------------------------


class RankLock:
    """The right to run an engine for one rank of a folder: an flock, freed by the kernel when its holder
    dies, however it dies. The file is never replaced, or two holders could each lock their own.
    """

    def __init__(self, folder: Folder, rank: int) -> None:
        self._path = folder.private / keys.lock_name(rank)
        self.rank = rank
        self._descriptor: int | None = None

    @classmethod
    def inherit(cls, folder: Folder, rank: int, descriptor: int) -> Self:
        """The same lock, from a descriptor that its holder has sent: it is held until both have released it."""
        lock = cls(folder, rank)
        os.set_inheritable(descriptor, False)
        lock._descriptor = descriptor
        lock._sign(f"process {os.getpid()}, a runner")
        after_fork.add(lock)
        return lock

    @property
    def descriptor(self) -> int:
        """To send to a process that shall hold the lock too."""
        assert self._descriptor is not None, "not acquired"
        return self._descriptor

    @property
    def _wanted(self) -> Path:
        return self._path.with_suffix(".wanted")

    def is_wanted(self) -> bool:
        """Whether a trainer waits for this lock now: whoever only adopted the journal gives it back. A mark that is not
        renewed was left by one that was killed while it waited.
        """
        try:
            return abs(time.time() - self._wanted.stat().st_mtime) < WANTED_S
        except FileNotFoundError:
            return False

    def is_removed(self) -> bool:
        """Whether somebody has removed the folder beneath us."""
        return os.fstat(self.descriptor).st_nlink == 0

    def acquire(self, *, wait_s: float = 0.0, is_trainer: bool = False) -> None:
        """Take the lock, waiting up to `wait_s` for a predecessor that is still ending. A trainer also asks an
        adopter (`drain`, the sweeper) to give it back.

        Raises FolderInUseError naming the holder.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if is_trainer:
                    with contextlib.suppress(OSError):
                        self._wanted.touch()
                if time.monotonic() >= deadline:
                    if is_trainer:
                        self._wanted.unlink(missing_ok=True)
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
                    os.close(descriptor)
                    raise FolderInUseError(
                        f"rank {self.rank} of folder {str(self._path.parent.parent)!r} is in use by {holder}",
                        hint="one uploader per rank and folder; stop the other one or use another folder",
                    ) from None
                time.sleep(0.05)
        self._descriptor = descriptor
        self._sign(f"process {os.getpid()}")
        if is_trainer:
            self._wanted.unlink(missing_ok=True)
        after_fork.add(self)

    def _sign(self, holder: str) -> None:
        with contextlib.suppress(OSError):  # only for messages; the lock is held also on a full disk
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"{holder}\n".encode(), 0)

    def release(self) -> None:
        """Free the lock. Idempotent."""
        after_fork.discard(self)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def abandon(self) -> None:
        """In a forked child: close our copy, or a dataloader worker would keep a dead trainer's lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Abandoned(Protocol):
    """Something of the parent's that a forked child must let go of."""

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
_abandoned: list[sqlite3.Connection] = []
