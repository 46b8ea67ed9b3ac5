"""Conversion between events and the journal's JSON: a list of pairs of kind and body.

Events that come by the thousand share a pair.
"""

from __future__ import annotations

import enum
import itertools
import json
from collections.abc import Iterable, Iterator
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, get_args

from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Enqueued,
    Event,
    FileIdentity,
    JournalRow,
    Outcome,
    RemoteAddress,
    Shard,
    StoredShard,
    Verified,
)
from ckpt_async.core.naming import check_publish_as, check_relative
from ckpt_async.errors import FailureReason, InvalidNameError
from ckpt_async.local.log import Record, unreadable

KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}
LETTER = "e"  # of the records' part with events


def decode(records: Iterable[Record], rank: int) -> list[JournalRow]:
    """Return the events of a rank's journal. Raises JournalDamagedError."""
    rows: list[JournalRow] = []
    for record in records:
        for pair in record.parts.get(LETTER, ()):
            rows += [JournalRow(record.position, rank, record.written_at, each) for each in _decoded(pair)]
    return rows


def encode(events: Iterable[Event]) -> str:
    """Return events as JSON.

    Those that come by the thousand are one flat list, encoded by hand: the trainer waits for it, and it is decoded
    without an object per event. Every other event is a JSON object.
    """
    return f"[{','.join(_encoded(events))}]"


def _encoded(events: Iterable[Event]) -> Iterator[str]:
    for _, series in itertools.groupby(events, _series):
        many = list(series)
        first = many[0]
        if isinstance(first, Enqueued) and not first.shard.publish_as:
            shards = [_shard_items(each.shard) for each in many if isinstance(each, Enqueued)]
            body = f"[{_place(first.checkpoint)},{_quoted(first.name)},{','.join(shards)}]"
        elif isinstance(first, Verified):
            stored = [_stored_items(each.stored) for each in many if isinstance(each, Verified)]
            body = f"[{_place(first.checkpoint)},{','.join(stored)}]"
        else:
            body = _ENCODER.encode(first)
        yield f'["{type(first).__name__}",{body}]'


def _series(event: Event) -> object:
    """Return a key that is equal for neighbouring events that share a list."""
    if isinstance(event, Enqueued) and not event.shard.publish_as:
        return Enqueued, event.checkpoint, event.name
    if isinstance(event, Verified):
        return Verified, event.checkpoint
    return object()


def _place(checkpoint: CheckpointId) -> str:
    return f"{checkpoint.generation},{checkpoint.step}"


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


def _decoded(pair: Any) -> list[Event]:
    """Rebuild events. The journal is our own file, but another version of the program, or a group that may write to the
    folder, may have written it.
    """
    try:
        kind, body = pair
        if isinstance(body, dict):
            return [_event(kind, body)]
        items = iter(body)
        checkpoint = CheckpointId(next(items), next(items))
        if kind == "Enqueued":
            name = next(items)
            return [
                Enqueued(
                    checkpoint,
                    name,
                    _checked(
                        Shard(shard, source, FileIdentity(device, inode, size_bytes, mtime_ns), is_linked)
                    ),
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
    except (InvalidNameError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise unreadable(str(pair), error) from error


def _checked(shard: Shard) -> Shard:
    """Return the shard if its names cannot lead out of the folder. Raises InvalidNameError."""
    check_relative(shard.name, "shard")
    check_relative(shard.source, "source")
    if shard.publish_as:
        check_publish_as(shard.publish_as)
    return shard


def _event(kind: str, fields: dict[str, Any]) -> Event:
    for name in {"checkpoint", "committed", "enqueued"} & fields.keys():
        fields[name] = fields[name] and CheckpointId(**fields[name])
    match kind:
        case "Opened":
            fields["remote"] = RemoteAddress(**fields["remote"])
            fields["settings"] = tuple((name, value) for name, value in fields["settings"])
            fields["earlier"] = tuple((number, nonce) for number, nonce in fields["earlier"])
        case "Enqueued":  # with an exact key
            shard = fields["shard"]
            shard["identity"] = FileIdentity(**shard["identity"])
            fields["shard"] = _checked(Shard(**shard))
        case "Growing":
            check_relative(fields["shard"], "shard")
            if fields["source"] is not None:
                check_relative(fields["source"], "source")
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
