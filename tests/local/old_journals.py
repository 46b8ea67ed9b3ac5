"""Journals as earlier versions left them: one file for all ranks of a folder, with each version's exact schema and
rows.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Event
from ckpt_async.local import journal_rows

_TABLES = """
PRAGMA journal_mode = WAL;
BEGIN IMMEDIATE;
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
SCHEMAS = {
    1: f"{_TABLES}CREATE INDEX events_by_checkpoint ON events (rank, generation, step);"
    " PRAGMA user_version = 1; COMMIT;",
    2: f"{_TABLES}PRAGMA user_version = 2; COMMIT;",
}
_INSERT = "INSERT INTO events (rank, generation, step, written_at, kind, body) VALUES (?, ?, ?, ?, ?, ?)"


def write(private: Path, version: int, events: Mapping[int, Iterable[Event]], *, at: float = 5.0) -> Path:
    """Write a journal of `version` with the events of each rank.

    Version 1 had one row with a JSON object per event; version 2 has one row for many shards.
    """
    path = private / keys.SHARED_JOURNAL
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMAS[version])
        for rank, some in events.items():
            connection.executemany(_INSERT, (_rows_1 if version == 1 else _rows_2)(rank, some, at))
            connection.execute("INSERT INTO progress VALUES (?, ?)", (rank, f'[[1,1,"a",{rank}]]'))
        connection.commit()
    return path


def _rows_1(rank: int, events: Iterable[Event], at: float) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for event in events:
        id_ = getattr(event, "checkpoint", CheckpointId(0, 0))
        body = json.dumps(asdict(event), default=lambda each: each.value)
        rows.append((rank, id_.generation, id_.step, at, type(event).__name__, body))
    return rows


def _rows_2(rank: int, events: Iterable[Event], at: float) -> list[tuple[object, ...]]:
    return [(rank, *place, at, kind, body) for place, kind, body in journal_rows.encode(events)]
