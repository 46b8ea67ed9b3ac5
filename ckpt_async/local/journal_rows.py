"""Conversion between events and journal rows: kind and body as text.

Events that come by the thousand share rows; every other event has its own row.
"""

from __future__ import annotations

import enum
import itertools
import json
import sqlite3
from collections.abc import Iterable, Iterator
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any, get_args

from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Enqueued,
    Event,
    FileIdentity,
    JournalRow,
    Opened,
    Outcome,
    RemoteAddress,
    Shard,
    StoredShard,
    Verified,
)
from ckpt_async.errors import FailureReason, JournalDamagedError, JournalError
from ckpt_async.local import database

FORMAT_VERSION = 1
# Maximum number of shards in one row: a row is encoded and decoded as a whole.
ROW_SHARDS = 1000

KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


def check_format(version: int, path: Path) -> None:
    if version != FORMAT_VERSION:
        raise JournalError(
            f"journal {str(path)!r} has format {version}; this program writes {FORMAT_VERSION}",
            hint="finish its uploads with the version of ckpt_async that wrote it: run `ckpt-async drain` of"
            " that version",
        )


def read(connection: sqlite3.Connection, rank: int, after: int = 0) -> list[JournalRow]:
    """Return the rows of a rank's journal after a sequence number. Raises JournalDamagedError."""
    found = database.patiently(
        connection,
        "SELECT sequence, generation, step, written_at, kind, body FROM events WHERE sequence > ?"
        " ORDER BY sequence",
        (after,),
    ).fetchall()
    rows: list[JournalRow] = []
    for sequence, generation, step, written_at, kind, body in found:
        events = _decoded(kind, CheckpointId(generation, step), body)
        rows += [JournalRow(sequence, rank, written_at, event) for event in events]
    return rows


def progress(bodies: Iterable[tuple[str]]) -> dict[tuple[CheckpointId, str], int]:
    """Return what `Journal.note_progress` noted: bytes sent by (checkpoint, shard)."""
    return {
        (CheckpointId(generation, step), shard): size
        for (body,) in bodies
        for generation, step, shard, size in json.loads(body)
    }


def encode(events: Iterable[Event]) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Yield rows for events: generation and step, kind, body.

    Events that come by the thousand share rows. The body of such a row is one flat list, encoded by hand: the
    trainer waits for it, and it is decoded without an object per event. Every other event has its own row, with a
    JSON object.
    """
    for _, series in itertools.groupby(events, _series):
        many = list(series)
        for start in range(0, len(many), ROW_SHARDS):
            some = many[start : start + ROW_SHARDS]
            first = some[0]
            if isinstance(first, Enqueued) and not first.shard.publish_as:
                shards = [_shard_items(each.shard) for each in some if isinstance(each, Enqueued)]
                body = f"[{_quoted(first.name)},{','.join(shards)}]"
            elif isinstance(first, Verified):
                stored = [_stored_items(each.stored) for each in some if isinstance(each, Verified)]
                body = f"[{','.join(stored)}]"
            else:
                body = _ENCODER.encode(first)
            yield _place(first), type(first).__name__, body


def _series(event: Event) -> object:
    """Return a key that is equal for neighbouring events that share a row."""
    if isinstance(event, Enqueued) and not event.shard.publish_as:
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
    """Return the fields of an event or of a value in it: `dataclasses.asdict` without the copies, for which the
    trainer would have to wait.
    """
    if isinstance(value, enum.Enum):
        return value.value
    return {name: getattr(value, name) for name in value.__slots__}


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_fields)


def _decoded(kind: str, checkpoint: CheckpointId, body: str) -> list[Event]:
    """Rebuild the events of a row. The journal is our own file, but another version of the program may have written
    it.
    """
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
        raise JournalDamagedError(
            f"journal: row of kind {kind!r} cannot be read: {error}", hint=database.DAMAGE_HINT
        ) from error


def _event(kind: str, fields: dict[str, Any]) -> Event:
    if "checkpoint" in fields:
        fields["checkpoint"] = CheckpointId(**fields["checkpoint"])
    match kind:
        case "Opened":
            fields["remote"] = RemoteAddress(**fields["remote"])
            fields["settings"] = tuple((name, value) for name, value in fields["settings"])
            fields["earlier"] = tuple((number, nonce) for number, nonce in fields["earlier"])
        case "Enqueued":  # with an exact key
            shard = fields["shard"]
            shard["identity"] = FileIdentity(**shard["identity"])
            fields["shard"] = Shard(**shard)
        case "Sealed":
            fields["metrics"] = tuple((name, value) for name, value in fields["metrics"])
            fields["expected"] = tuple(fields["expected"])
        case "MadeDurable" | "Copied":
            fields["shards"] = tuple(fields["shards"])
        case "Failed":
            fields["reason"] = FailureReason(fields["reason"])
        case "Decided":
            fields["outcome"] = Outcome(fields["outcome"])
        case _:
            pass
    event: Event = KINDS[kind](**fields)
    return event
