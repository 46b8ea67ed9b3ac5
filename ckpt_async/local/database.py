"""SQLite as the journals use it: connections that write, read-only looks, and the handling of damaged files.

No other code may open a database file or its `-shm` to copy, hash or sync it. POSIX drops all locks that a process
holds on a file, including SQLite's, when *any* of the process's descriptors for that file is closed
(https://sqlite.org/howtocorrupt.html, 2.2). `tests/faults/test_journal_files.py` enforces this for the whole
package.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from ckpt_async.core import keys
from ckpt_async.errors import JournalDamagedError, JournalError
from ckpt_async.local.folder import is_disk_full, no_space

# How long to wait for writes of other processes, each of which takes well under a millisecond.
BUSY_TIMEOUT_S = 10.0
BUSY_PAUSE_S = 0.0003
# The granularity of a file system's timestamps is at most this, the kernel's tick: changes within it may not
# show.
TICK_S = 0.02

# The size of a new `-shm` file: one region of SQLite's index of the WAL.
INDEX_BYTES = 32 * 1024

DAMAGE_HINT = (
    "restart the trainer or run `ckpt-async drain`; either moves the damaged journal aside and rebuilds it"
    " from the manifests"
)
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
# SQLITE_BUSY also occurs while a WAL is being recovered.
_PASSING = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL})

T = TypeVar("T")


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that may write, in WAL mode; a new file has version 0. Waits for other processes that are
    opening it too. Raises sqlite3.Error, and OSError if the disk is full.
    """
    _check_room_for_index(path)
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=32
    )
    try:
        _switch_to_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        # An automatic checkpoint would fsync in whichever process it happens to run: the trainer's enqueue
        # must not.
        connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
        connection.execute("PRAGMA busy_timeout = 0")  # from now on, `patiently` does the waiting
    except BaseException:
        connection.close()
        raise
    return connection


def _check_room_for_index(path: Path) -> None:
    """Raise OSError if there is no room for the `-shm` file.

    SQLite maps it, having written one byte for every 4 KiB. If the file system's blocks are smaller, the rest is not
    allocated before it is touched; if it cannot be by then, a SIGBUS ends the trainer.
    """
    with contextlib.suppress(OSError):
        if os.stat(f"{path}-shm").st_blocks * 512 >= INDEX_BYTES:
            return
    try:
        with tempfile.TemporaryFile(dir=path.parent) as room:
            os.posix_fallocate(room.fileno(), 0, 2 * INDEX_BYTES)  # a new file's first pages come before it
    except OSError as error:
        if is_disk_full(error):
            raise


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL mode, waiting for other processes that are opening a new journal: SQLite's own `timeout` does
    not cover this switch.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.002)


def version(connection: sqlite3.Connection) -> int:
    """Return the format version; 0 in a new file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def patiently(
    connection: sqlite3.Connection, statement: str, values: Sequence[object] = ()
) -> sqlite3.Cursor:
    """Execute a statement that needs a lock. SQLite's own waiting doubles its pauses up to 100 ms, although the
    holder of the lock needs only a tenth of a millisecond, so this function waits by itself.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return connection.execute(statement, values)
        except sqlite3.OperationalError as error:
            if not _is_passing(error) or time.monotonic() >= deadline:
                raise
        time.sleep(BUSY_PAUSE_S)


def _is_passing(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", -1) & 0xFF in _PASSING


def begin(connection: sqlite3.Connection) -> None:
    """Begin a transaction within `with connection`, which ends it.

    That statement is implemented in C, so no Ctrl-C can leave a transaction open. A generator could be left suspended
    for as long as somebody holds the traceback.
    """
    patiently(connection, "BEGIN IMMEDIATE")


def check(connection: sqlite3.Connection, path: Path, *, damage_hint: str = DAMAGE_HINT) -> None:
    """Raise JournalDamagedError if SQLite finds damage anywhere in the database."""
    [(verdict,)] = patiently(connection, "PRAGMA quick_check(1)").fetchall()
    if verdict != "ok":
        raise JournalDamagedError(f"journal {str(path)!r}: {verdict}", hint=damage_hint)


@contextlib.contextmanager
def translated(path: Path, *, damage_hint: str = DAMAGE_HINT) -> Iterator[None]:
    """Translate SQLite's errors, and those of a full disk, to JournalError, JournalDamagedError or NoSpaceError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        code = getattr(error, "sqlite_errorname", "") or ""
        if code == "SQLITE_FULL" or (isinstance(error, OSError) and is_disk_full(error)):
            common = next((each for each in path.parents if each.name == keys.PRIVATE), path.parent)
            raise no_space(common.parent, common=common) from error
        if isinstance(error, OSError):
            raise
        message = f"journal {str(path)!r}: {error} [{code}]"
        if code.startswith(_DAMAGE):
            raise JournalDamagedError(message, hint=damage_hint) from error
        is_of_disk = code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_PERM"))
        hint = "check the disk and the permissions of the folder" if is_of_disk else ""
        raise JournalError(message, hint=hint) from error


def move_aside(path: Path) -> Path:
    """Rename a damaged database, its WAL and its index, and return the new name; nothing is deleted. The caller
    must know that nobody has it open.
    """
    name = f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(2).hex()}"
    aside = path.with_name(name)
    # The database comes last: without it, the other files would be taken for those of a new one.
    for suffix in ("-shm", "-wal", ""):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    return aside


# --- read-only looks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _State:
    """The facts that show whether somebody else has opened or changed a database."""

    inode: int
    size_bytes: int
    mtime_ns: int
    has_wal: bool

    @classmethod
    def of(cls, path: Path) -> Self | None:
        try:
            facts = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(facts.st_ino, facts.st_size, facts.st_mtime_ns, os.path.exists(f"{path}-wal"))


def look(path: Path, ask: Callable[[sqlite3.Connection, int], T]) -> T | None:
    """Return the result of `ask(connection, inode)` on a database, even while others write to it. Creates no file.
    None if there is no such database, or if its creator was killed before it was complete.

    Raises JournalError, JournalDamagedError.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        before = _State.of(path)
        if before is None:
            return None
        if not before.has_wal and 0.0 <= time.time() - before.mtime_ns / 1e9 < TICK_S:
            time.sleep(TICK_S)  # otherwise a later change might leave no trace
        with translated(path):
            try:
                with contextlib.closing(
                    _connect_readonly(path, is_immutable=not before.has_wal)
                ) as connection:
                    found = ask(connection, before.inode) if version(connection) else None
            except sqlite3.Error as error:
                # Whatever was read while somebody else began or stopped writing may be wrong.
                is_passing = _is_passing(error) or _State.of(path) != before
                if not is_passing or time.monotonic() >= deadline:
                    raise
            else:
                if before.has_wal or _State.of(path) == before:
                    return found
                if time.monotonic() >= deadline:
                    raise JournalError(f"journal {str(path)!r} changes too fast to be read")
        time.sleep(BUSY_PAUSE_S)


def _connect_readonly(path: Path, *, is_immutable: bool) -> sqlite3.Connection:
    """Open the database read-only. Without a WAL nobody has it open, and all content is in the main file; it is
    then opened as immutable, because SQLite would otherwise create a WAL and leave it behind
    (https://sqlite.org/wal.html, 5 "Read-Only Databases").
    """
    if not is_immutable:
        _check_room_for_index(path)
    mode = "mode=ro&immutable=1" if is_immutable else "mode=ro"
    connection = sqlite3.connect(
        f"{path.as_uri()}?{mode}", uri=True, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA busy_timeout = 0")
    return connection
