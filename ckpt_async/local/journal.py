"""The journal: one rank's append-only log of events. It *is* the queue.

It is written by the holder of the rank's lock: a trainer and its own runner process, else `drain` or the sweeper.
Anybody may read it (`journals`). An append survives SIGKILL once it has returned, and power loss after the engine's
`sync`: the trainer never waits for an fsync.

The journal is a cache (rule R10): the spool's manifests and the store can rebuild it.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any, Self, get_args

from ckpt_async import private
from ckpt_async.core import keys
from ckpt_async.core.local_state import Local, compacted, fold
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
from ckpt_async.core.observe import Notice
from ckpt_async.errors import FailureReason, FolderInUseError, InvalidNameError
from ckpt_async.local import outbox
from ckpt_async.local.folder import Folder, unusable
from ckpt_async.local.forks import after_fork
from ckpt_async.local.log import Log, Parts, Record, unreadable

# How long a `.wanted` mark counts. A trainer that waits for a lock renews its mark twenty times a second.
WANTED_S = 5.0
PROGRESS = "p"  # the letter of the records' part with the progress of unfinished shards


class Journal(Log):
    """One process's handle on the journal of one rank, whose lock it holds.

    A damaged journal is moved aside, loudly, and started anew, unless somebody else may have it open
    (`may_replace=False`); then JournalDamagedError is raised.
    """

    def __init__(
        self, folder: Folder, rank: int, *, may_replace: bool = True, clock: Callable[[], float] = time.time
    ) -> None:
        self.rank, self._clock = rank, clock
        letters = EVENTS + outbox.LETTER + PROGRESS
        loss = f"journal_damaged rank={rank}: rebuilding it from the spool's manifests" if may_replace else ""
        super().__init__(folder.private / keys.journal_name(rank), letters, self._kept, loss=loss)
        self._outbox = outbox.Outbox(self)

    def append(self, events: Iterable[Event], notices: Sequence[Notice] = ()) -> None:
        """Write events, and the notices about them, in one record: all or none. On return they survive SIGKILL."""
        now = self._clock()
        parts = {EVENTS: encode_events(events)}
        if notices:
            parts[outbox.LETTER] = outbox.put(notices, now)
        self.write(now, parts)

    def note_progress(self, sent: Iterable[tuple[CheckpointId, str, int]]) -> None:
        """Note how many bytes of unfinished shards were sent. It is for `status`, not for rules."""
        noted = [[each.generation, each.step, shard, size] for each, shard, size in sent]
        self.write(self._clock(), {PROGRESS: json.dumps(noted, separators=(",", ":"))})

    def outbox(self) -> outbox.Outbox:
        """Return the outbox of the notices that were written here."""
        return self._outbox

    def rows(self) -> list[JournalRow]:
        """Return what is in the journal, in order."""
        return decode_rows(self.read().records(EVENTS), self.rank)

    def local(self) -> Local:
        """Return this rank's state, replayed from the beginning."""
        return self.follow(Local(self.rank))

    def follow(self, local: Local) -> Local:
        """Return a state with everything that was appended since."""
        found = self.read(after=local.sequence)
        rows = decode_rows(found.records(EVENTS), self.rank)
        # If it was compacted since, these are all rows, and the first of them starts over.
        return replace(fold(rows, local), sequence=found.place.position)

    def _kept(self, records: list[Record]) -> Iterator[tuple[float, Parts]]:
        rows = compacted(decode_rows(records, self.rank), self.rank)
        table: outbox.Table = {}
        outbox.apply(table, records)
        yield self._clock(), {outbox.LETTER: outbox.kept(table)}
        for at, some in itertools.groupby(rows, lambda row: row.written_at):
            yield at, {EVENTS: encode_events(row.event for row in some)}
        for each in [each for each in records if PROGRESS in each.parts][-1:]:
            yield each.written_at, {PROGRESS: json.dumps(each.parts[PROGRESS])}


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
        try:
            descriptor = private.open_lock(self.path)
        except PermissionError as error:
            raise unusable(self.path.parent, error) from error
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


# --- events as JSON: a list of pairs of kind and body; those that come by the thousand share a pair ---------


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}
EVENTS = "e"  # of the records' part with events


def decode_rows(records: Iterable[Record], rank: int) -> list[JournalRow]:
    """Return the events of a rank's journal. Raises JournalDamagedError."""
    rows: list[JournalRow] = []
    for record in records:
        for pair in record.parts.get(EVENTS, ()):
            rows += [JournalRow(record.position, rank, record.written_at, each) for each in _decoded(pair)]
    return rows


def encode_events(events: Iterable[Event]) -> str:
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
            body = f"[{_checkpoint_items(first.checkpoint)},{_quoted(first.name)},{','.join(shards)}]"
        elif isinstance(first, Verified):
            stored = [_stored_items(each.stored) for each in many if isinstance(each, Verified)]
            body = f"[{_checkpoint_items(first.checkpoint)},{','.join(stored)}]"
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


def _checkpoint_items(checkpoint: CheckpointId) -> str:
    return f"{checkpoint.generation},{checkpoint.step}"


def _shard_items(shard: Shard) -> str:
    of, is_linked = shard.identity, "true" if shard.is_linked else "false"
    names = f"{_quoted(shard.name)},{_quoted(shard.source)}"
    return f"{names},{of.device},{of.inode},{of.size_bytes},{of.mtime_ns},{is_linked}"


def _stored_items(stored: StoredShard) -> str:
    names, checksum = f"{_quoted(stored.name)},{_quoted(stored.key)}", stored.checksum
    return f"{names},{stored.size_bytes},{_quoted(checksum.algorithm)},{_quoted(checksum.value)}"


def _event_fields(value: Any) -> Any:
    """Return the fields of an event or of a value in it: `dataclasses.asdict` without the copies, for which the
    trainer would have to wait.
    """
    if isinstance(value, enum.Enum):
        return value.value
    return {name: getattr(value, name) for name in value.__slots__}


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_event_fields)


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
    event: Event = _KINDS[kind](**fields)
    return event
