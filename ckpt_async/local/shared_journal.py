"""The journal that earlier versions shared between all ranks of a folder: read, and taken over rank by rank.

A rank's own journal is created with its rows from the shared one, in one transaction; once it exists, it alone
counts. Only when it is on disk are the rank's rows dropped here, and the file is removed with the last rank's rows.
If the shared journal cannot be read, ranks' own journals start empty and are filled from the manifests; once each
rank with a spool has one, the shared journal is moved aside.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_async.core import keys
from ckpt_async.core.model import JournalRow
from ckpt_async.errors import JournalDamagedError
from ckpt_async.local import database, journal_rows
from ckpt_async.local.folder import spooled_ranks

logger = logging.getLogger(__name__)

# Format 2 had rows for many shards, and no index.
FORMATS = (1, 2)


@dataclass(slots=True)
class Share:
    """What the shared journal has of one rank, as written: rows without their sequence numbers, and the progress."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    progress: list[tuple[str]] = field(default_factory=list)

    def rows(self, rank: int) -> list[JournalRow]:
        return journal_rows.decode(rank, [(number, *each) for number, each in enumerate(self.events, 1)])


def is_there(private: Path) -> bool:
    return os.path.exists(private / keys.SHARED_JOURNAL)


def look(private: Path) -> dict[int, Share]:
    """Return the shared journal's content by rank; empty if there is no such journal. Raises JournalError,
    JournalDamagedError.
    """
    path = private / keys.SHARED_JOURNAL

    def ask(connection: sqlite3.Connection, _: int) -> dict[int, Share]:
        journal_rows.check_format(database.version(connection), path, oldest=FORMATS[0], newest=FORMATS[-1])
        shares: dict[int, Share] = {}
        with _snapshot(connection):
            for rank, *row in connection.execute(
                "SELECT rank, generation, step, written_at, kind, body FROM events ORDER BY sequence"
            ):
                shares.setdefault(rank, Share()).events.append(tuple(row))
            for rank, body in connection.execute("SELECT rank, body FROM progress"):
                shares.setdefault(rank, Share()).progress.append((body,))
        return shares

    return database.look(path, ask) or {}


@contextlib.contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    database.patiently(connection, "BEGIN")
    yield
    connection.execute("COMMIT")


def take(private: Path, rank: int) -> Share | None:
    """Return a rank's share, for the holder of its lock. Returns None if there is none or if the journal is
    unreadable, which is logged.
    """
    try:
        return _checked(private, rank)
    except JournalDamagedError as error:
        logger.error(  # noqa: TRY400  no bug of ours
            "shared_journal_damaged rank=%d error=%s; rebuilding it from the spool's manifests", rank, error
        )
        return None


def _checked(private: Path, rank: int) -> Share | None:
    share = look(private).get(rank)
    if share is not None:
        share.rows(rank)
    return share


def leave(private: Path, rank: int) -> None:
    """Drop a rank's rows, which are in its own journal by now."""
    try:
        _checked(private, rank)
        _drop(private, rank)
    except JournalDamagedError as error:
        _move_aside(private, error)


def leave_damaged(private: Path) -> None:
    """Move the shared journal aside if it is damaged, for a caller that has looked after all ranks, none of which
    had anything left.
    """
    try:
        look(private)
    except JournalDamagedError as error:
        _move_aside(private, error)


def _move_aside(private: Path, error: JournalDamagedError) -> None:
    """Move the shared journal aside, unless a rank remains that may have it open: a trainer of the earlier version,
    or a rank that nobody has adopted.
    """
    if all(os.path.exists(private / keys.journal_name(rank)) for rank in spooled_ranks(private)):
        aside = database.move_aside(private / keys.SHARED_JOURNAL)
        logger.error("shared_journal_damaged moved_to=%s error=%s", aside, error)


def _drop(private: Path, rank: int) -> None:
    """Drop a rank's rows, and remove the file if no rank has rows left and nobody else has it open."""
    path = private / keys.SHARED_JOURNAL
    with database.translated(path), contextlib.closing(database.connect(path)) as connection:
        if database.version(connection):
            with connection:
                database.begin(connection)
                connection.execute("DELETE FROM events WHERE rank = ?", (rank,))
                connection.execute("DELETE FROM progress WHERE rank = ?", (rank,))
        if not _is_empty(connection):
            return
        try:
            # This removes the WAL if we are alone.
            connection.execute("PRAGMA journal_mode = DELETE").fetchall()
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            return
        if _is_empty(connection):
            path.unlink(missing_ok=True)
        connection.execute("ROLLBACK")


def _is_empty(connection: sqlite3.Connection) -> bool:
    if not database.version(connection):
        return True
    return not database.patiently(
        connection, "SELECT EXISTS (SELECT 1 FROM events) OR EXISTS (SELECT 1 FROM progress)"
    ).fetchone()[0]
