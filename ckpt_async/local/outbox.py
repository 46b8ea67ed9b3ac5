"""Notices that wait to be delivered, and those that were delivered.

They are in the same log as the facts that they report, so that a fact and its notice are one record.

A notice leaves only by `delivered`, `dropped`, or because the box is full. The id of a delivered notice is
remembered for a while, so that a fact that is learned again is not reported again.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_async import private
from ckpt_async.core.observe import Notice
from ckpt_async.errors import FolderInUseError, JournalError
from ckpt_async.filesystems import check_local, filesystem_of
from ckpt_async.local.log import Log, Parts, Record, unreadable

LETTER = "n"  # of the records' part with notices
# Limits per sink. A receiver that is away for days must not fill the disk: the oldest notices are dropped
# first, and that is logged.
MAX_WAITING = 10_000
MAX_REMEMBERED = 2_000


@dataclass(frozen=True, slots=True)
class Posted:
    """A notice in the box, after `num_attempts` failed attempts to deliver it."""

    id: str
    sink: str
    body: str
    made_at: float
    num_attempts: int = 0
    next_at: float = 0.0
    is_done: bool = False  # delivered or dropped: it waits no more


@dataclass(frozen=True, slots=True)
class Untold:
    """The notices that wait for one sink; `attempts` is that of the notice that was tried most often."""

    sink: str
    waiting: int
    oldest_at: float
    attempts: int


# --- the table, as a fold of the log -----------------------------------------------------------------------

Table = dict[tuple[str, str], Posted]  # by id and sink, the oldest first


def put(notices: Iterable[Notice], now: float) -> str:
    """Return the part of a record that adds notices. Those whose id is already known change nothing."""
    return _rows(["put", now, [[each.id, each.sink, each.body] for each in notices]])


def apply(table: Table, records: Iterable[Record]) -> None:
    """Apply what was appended to a table. What is applied twice changes nothing. Raises JournalDamagedError."""
    for record in records:
        try:
            for row in record.parts.get(LETTER, ()):
                _apply(table, *row)
        except (TypeError, ValueError) as error:
            raise unreadable(str(record.parts[LETTER]), error) from error


def kept(table: Table) -> str:
    """Return the part of a record that has all that a table has."""
    return _rows(["all", [astuple(each) for each in table.values()]])


def _rows(*rows: Sequence[object]) -> str:
    return json.dumps(rows, separators=(",", ":"))


def _apply(table: Table, what: str, *values: Any) -> None:
    match what, *values:
        case "all", waiting:
            table.clear()
            table.update({(each[0], each[1]): Posted(*each) for each in waiting})
        case "put", made_at, notices:
            for id_, sink, body in notices:
                known = table.setdefault((id_, sink), Posted(id_, sink, body, made_at))
                if known.is_done:  # it is remembered for as long as it keeps being reported
                    table[id_, sink] = replace(known, made_at=made_at)
        case "done", id_, sink:
            _change(table, id_, sink, is_done=True)
        case "failed", id_, sink, num_attempts, next_at:
            _change(table, id_, sink, num_attempts=num_attempts, next_at=next_at)
        case "retry", sink:
            for each in list(_of(table, sink)):
                _change(table, each.id, sink, next_at=0.0)
        case "forget", sink, ids:
            for id_ in ids:
                table.pop((id_, sink), None)
        case _:
            raise ValueError(what)


def _change(table: Table, id_: str, sink: str, **changes: Any) -> None:
    if (known := table.get((id_, sink))) is not None:
        table[id_, sink] = replace(known, **changes)


def _of(table: Table, *sinks: str, is_done: bool = False) -> Iterator[Posted]:
    return (each for each in table.values() if each.sink in sinks and each.is_done == is_done)


def _excess(notices: Iterable[Posted], most: int) -> list[str]:
    """Return the ids of the oldest beyond a number."""
    return [each.id for each in sorted(notices, key=lambda each: each.made_at)[:-most]]


# --- the box -----------------------------------------------------------------------------------------------


class Outbox:
    """The notices in one log. Safe from any thread; every call takes well under a millisecond. Raises JournalError."""

    def __init__(self, log: Log) -> None:
        self._log, self._lock = log, threading.Lock()
        self._table: Table = {}
        self._position = 0

    def put(self, notices: Iterable[Notice], now: float) -> None:
        """Add notices. On return they survive SIGKILL."""
        self._append(put(notices, now))

    def waiting(self, sink: str) -> list[Posted]:
        """Return the first notices that wait for one sink, in the order in which they are due."""
        return heapq.nsmallest(100, _of(self._now(), sink), key=lambda each: each.next_at)

    def num_due(self, sinks: Iterable[str], before: float) -> int:
        """Return how many notices for these sinks are due for a first or further attempt before that time."""
        return sum(each.next_at < before for each in _of(self._now(), *sinks))

    def num_waiting(self, but: Sequence[str]) -> int:
        """Return how many notices wait for all sinks except these."""
        return sum(not each.is_done and each.sink not in but for each in self._now().values())

    def newest(self, most: int) -> list[Posted]:
        """Return the newest notices, delivered or not, newest first."""
        return list(self._now().values())[: -most - 1 : -1]

    def untold(self) -> list[Untold]:
        """Return what waits, by sink."""
        waiting = [each for each in self._now().values() if not each.is_done]
        return [
            Untold(
                sink,
                num,
                min(each.made_at for each in waiting if each.sink == sink),
                max(each.num_attempts for each in waiting if each.sink == sink),
            )
            for sink, num in Counter(each.sink for each in waiting).items()
        ]

    def delivered(self, notice: Posted) -> None:
        """Mark a notice as delivered: its id is remembered, and it is never delivered again."""
        self._append(_rows(["done", notice.id, notice.sink]))

    dropped = delivered  # dropped for good: it must not come back either

    def failed(self, notice: Posted, next_at: float) -> None:
        """Note that an attempt failed; the next one is made no earlier than `next_at`."""
        self._append(_rows(["failed", notice.id, notice.sink, notice.num_attempts + 1, next_at]))

    def retry_now(self, sink: str) -> None:
        """Make all waiting notices due: a new process does not sit out the pause of its predecessor."""
        if any(each.next_at for each in _of(self._now(), sink)):
            self._append(_rows(["retry", sink]))

    def tidy(self, sink: str) -> int:
        """Forget the oldest notices beyond the limits. Returns how many of them had not been delivered."""
        table = self._now()
        waiting = _excess(_of(table, sink), MAX_WAITING)
        done = _excess(_of(table, sink, is_done=True), MAX_REMEMBERED)
        if waiting or done:
            self._append(_rows(["forget", sink, waiting + done]))
        return len(waiting)

    def _append(self, rows: str) -> None:
        self._log.write(time.time(), {LETTER: rows})

    def _now(self) -> Table:
        """Return the table with all that was appended by now, by whatever process. The caller does not change it."""
        with self._lock:
            found = self._log.read(after=self._position)
            if records := found.records(LETTER):
                table = self._table.copy()  # others may be reading the present one
                apply(table, records)
                self._table = table
            self._position = found.place.position
            return self._table


class OwnOutbox(Outbox):
    """An outbox in its own file, for a process that has no journal. Only one process at a time may use it.

    A damaged one is moved aside, loudly, and started anew.

    Raises FolderInUseError if another process has it, JournalError if the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        with contextlib.ExitStack() as held:
            _lock(folder, held)
            path = folder / "events.log"
            log = Log(path, LETTER, _kept, loss="events_damaged: what waited there is lost")
            super().__init__(held.enter_context(contextlib.closing(log)))
            self._held = held.pop_all()

    def tidy(self, sink: str) -> int:
        num_dropped = super().tidy(sink)
        self._log.compact()
        return num_dropped

    def close(self) -> None:
        """Close it. Idempotent."""
        self._held.close()


def _lock(folder: Path, held: contextlib.ExitStack) -> None:
    """Lock the folder, which is made if it is missing, until `held` ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_local(folder, filesystem_of(folder))
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


def _kept(records: list[Record]) -> Iterator[tuple[float, Parts]]:
    table: Table = {}
    apply(table, records)
    yield time.time(), {LETTER: kept(table)}
