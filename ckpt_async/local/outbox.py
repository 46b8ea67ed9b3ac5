"""Notices that wait to be delivered, and those that were delivered.

They are a table in the same database file as the facts that they report, so that a fact and its notice are one
transaction.

A notice leaves only by `delivered`, `dropped`, or because the box is full. The id of a delivered notice is
remembered for a while, so that a fact that is learned again is not reported again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ckpt_async import private
from ckpt_async.core.notices import Notice
from ckpt_async.errors import FolderInUseError, JournalDamagedError, JournalError
from ckpt_async.local import database
from ckpt_async.local.filesystems import check_local, filesystem_of

logger = logging.getLogger(__name__)

# Limits per sink. A receiver that is away for days must not fill the disk: the oldest notices are dropped
# first, and that is logged.
MAX_WAITING = 10_000
MAX_REMEMBERED = 2_000

_DAMAGE_HINT = (
    "the next process that keeps its events there moves the damaged file aside and starts a new one"
)

_TABLE = """
CREATE TABLE IF NOT EXISTS outbox (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    sink TEXT NOT NULL,
    body TEXT NOT NULL,
    made_at REAL NOT NULL,
    num_attempts INTEGER NOT NULL DEFAULT 0,
    next_at REAL NOT NULL DEFAULT 0,
    is_done INTEGER NOT NULL DEFAULT 0,
    UNIQUE (id, sink)
)
"""


def put(connection: sqlite3.Connection, notices: Iterable[Notice], now: float) -> None:
    """Add notices within the caller's transaction. Notices whose id is already known change nothing."""
    connection.execute(_TABLE)
    connection.executemany(
        "INSERT INTO outbox (id, sink, body, made_at) VALUES (?, ?, ?, ?)"
        # A delivered notice is remembered for as long as it keeps being reported.
        " ON CONFLICT (id, sink) DO UPDATE SET made_at = excluded.made_at WHERE is_done",
        [(each.id, each.sink, each.body, now) for each in notices],
    )


@dataclass(frozen=True, slots=True)
class Waiting:
    """A notice to be delivered, after `num_attempts` failed attempts."""

    sequence: int
    body: str
    made_at: float
    num_attempts: int
    next_at: float


@dataclass(frozen=True, slots=True)
class Told:
    """A notice, delivered or not."""

    sink: str
    body: str


@dataclass(frozen=True, slots=True)
class Untold:
    """The notices that wait for one sink; `attempts` is that of the notice that was tried most often."""

    sink: str
    waiting: int
    oldest_at: float
    attempts: int


def look(path: Path, most: int) -> tuple[list[Told], list[Untold]]:
    """Return the newest notices of a database, newest first, and the waiting ones, even while others write to it.
    Creates no file and takes no lock. Raises JournalError.
    """

    def ask(connection: sqlite3.Connection, _: int) -> tuple[list[Told], list[Untold]]:
        if not database.patiently(connection, "SELECT 1 FROM sqlite_master WHERE name = 'outbox'").fetchall():
            return [], []
        newest = "SELECT sink, body FROM outbox ORDER BY sequence DESC LIMIT ?"
        waiting = "SELECT sink, count(*), min(made_at), max(num_attempts) FROM outbox WHERE NOT is_done GROUP BY sink"
        told = database.patiently(connection, newest, (most,)).fetchall()
        untold = database.patiently(connection, waiting).fetchall()
        return [Told(*row) for row in told], [Untold(*row) for row in untold]

    return database.look(path, ask) or ([], [])


class Outbox:
    """The notices in one database. Safe from any thread; every call takes well under a millisecond.

    `lock` guards the connection. `checked` is a context manager around every use of it, which translates errors and
    holds nothing. Raises JournalError.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        lock: threading.Lock,
        checked: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._connection, self._lock, self._checked = connection, lock, checked
        with self._checked(), self._lock:
            database.patiently(connection, _TABLE)

    def put(self, notices: Iterable[Notice], now: float) -> None:
        """Add notices. On return they survive SIGKILL."""
        with self._checked(), self._lock, self._connection:
            database.begin(self._connection)
            put(self._connection, notices, now)

    def waiting(self, sink: str) -> list[Waiting]:
        """Return the first notices that wait for one sink, in the order in which they are due."""
        with self._checked(), self._lock:
            rows = self._connection.execute(
                "SELECT sequence, body, made_at, num_attempts, next_at FROM outbox"
                " WHERE sink = ? AND NOT is_done ORDER BY next_at, sequence LIMIT 100",
                (sink,),
            ).fetchall()
        return [Waiting(*row) for row in rows]

    def num_due(self, sinks: Iterable[str], before: float) -> int:
        """Return how many notices for these sinks are due for a first or further attempt before that time."""
        names = list(sinks)
        marks = ",".join("?" * len(names))
        with self._checked(), self._lock:
            [(found,)] = self._connection.execute(
                f"SELECT count(*) FROM outbox WHERE NOT is_done AND next_at < ? AND sink IN ({marks})",  # noqa: S608 - question marks
                [before, *names],
            ).fetchall()
        return int(found)

    def num_waiting(self, but: Sequence[str]) -> int:
        """Return how many notices wait for all sinks except these."""
        marks = ",".join("?" * len(but))
        with self._checked(), self._lock:
            [(found,)] = self._connection.execute(
                f"SELECT count(*) FROM outbox WHERE NOT is_done AND sink NOT IN ({marks})",  # noqa: S608 - question marks
                tuple(but),
            ).fetchall()
        return int(found)

    def delivered(self, sequence: int) -> None:
        """Mark a notice as delivered: its id is remembered, and it is never delivered again."""
        self._write("UPDATE outbox SET is_done = 1 WHERE sequence = ?", sequence)

    dropped = delivered  # dropped for good: it must not come back either

    def failed(self, sequence: int, next_at: float) -> None:
        """Note that an attempt failed; the next one is made no earlier than `next_at`."""
        self._write(
            "UPDATE outbox SET num_attempts = num_attempts + 1, next_at = ? WHERE sequence = ?",
            next_at,
            sequence,
        )

    def retry_now(self, sink: str) -> None:
        """Make all waiting notices due: a new process does not sit out the pause of its predecessor."""
        self._write("UPDATE outbox SET next_at = 0 WHERE sink = ? AND NOT is_done", sink)

    def tidy(self, sink: str) -> int:
        """Forget the oldest notices beyond the limits. Returns how many of them had not been delivered."""
        excess = (
            "DELETE FROM outbox WHERE sequence IN (SELECT sequence FROM outbox WHERE sink = ? AND is_done = ?"
            " ORDER BY made_at DESC, sequence DESC LIMIT -1 OFFSET ?)"
        )
        with self._checked(), self._lock, self._connection:
            database.begin(self._connection)
            self._connection.execute(_TABLE)
            self._connection.execute(excess, (sink, 1, MAX_REMEMBERED))
            return self._connection.execute(excess, (sink, 0, MAX_WAITING)).rowcount

    def _write(self, statement: str, *values: object) -> None:
        with self._checked(), self._lock:
            database.patiently(self._connection, statement, values)


class OwnOutbox(Outbox):
    """An outbox in its own file, for a process that has no journal. Only one process at a time may use it.

    A damaged one is moved aside, loudly, and started anew.

    Raises FolderInUseError if another process has it, JournalError if the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "events.sqlite"
        with contextlib.ExitStack() as held:
            _lock(folder, held)
            connection = held.enter_context(contextlib.closing(_open_or_replace(path)))
            super().__init__(connection, threading.Lock(), lambda: _translated(path))
            self._held = held.pop_all()

    def close(self) -> None:
        """Close it. Idempotent."""
        with self._lock:
            self._held.close()


def _lock(folder: Path, held: contextlib.ExitStack) -> None:
    """Lock the folder, which is made if it is missing, until `held` ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_local(folder, filesystem_of(str(folder.resolve()), Path("/proc/self/mountinfo")))
        path = folder / "events.lock"
        descriptor = private.open_lock(path)
        held.callback(os.close, descriptor)
        if private.lock(descriptor, path):
            return
    except OSError as error:
        raise JournalError(
            f"the queue of events cannot be stored in {str(folder)!r}: {error.strerror or error}",
            hint="use a writable folder on a local disk",
        ) from error
    raise FolderInUseError(
        f"the queue of events in {str(folder)!r} is in use by another process",
        hint="give each process its own folder",
    )


def _open_or_replace(path: Path) -> sqlite3.Connection:
    """Open the database of a folder whose lock is held. A damaged one is moved aside, with the events in it."""
    try:
        return _open(path)
    except JournalDamagedError as error:
        aside = database.move_aside(path)
        logger.error(  # noqa: TRY400  no bug of ours
            "events_damaged moved_to=%s error=%s; the events that waited there are lost",
            aside,
            error.without_hint,
        )
        return _open(path)


def _open(path: Path) -> sqlite3.Connection:
    with _translated(path), contextlib.ExitStack() as held:
        connection = held.enter_context(contextlib.closing(database.connect(path)))
        database.check(connection, path, damage_hint=_DAMAGE_HINT)
        held.pop_all()
    return connection


def _translated(path: Path) -> AbstractContextManager[None]:
    return database.translated(path, damage_hint=_DAMAGE_HINT)
