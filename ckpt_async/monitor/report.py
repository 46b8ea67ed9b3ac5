"""The `status` of a folder as JSON: the same structure for `ckpt-async status --json` and the page."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import NoJournalError
from ckpt_async.local import journals
from ckpt_async.local.journals import Follower, RankState
from ckpt_async.monitor.status import CheckpointStatus, Status, has_owner, view

Json = dict[str, Any]

# At most this many of the ranks that a checkpoint waits for are named.
MAX_RANKS = 100

Missing = Callable[[str, CheckpointId], Sequence[int]]


def _nobody(kind: str, id_: CheckpointId) -> Sequence[int]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True)
class Seen:
    """One kind of a folder's checkpoints, at one look. `owned` are the ranks that a live process holds; the rates
    are known from the second look on.
    """

    status: Status
    owned: Collection[int] = ()
    bytes_per_s: Mapping[CheckpointId, float] = field(default_factory=dict)
    missing: Mapping[CheckpointId, Sequence[int]] = field(default_factory=dict)
    idle_s: float | None = None  # how long no byte of the pending data has moved


class FolderWatch:
    """Reads a folder's journals repeatedly, even beside live trainers, without creating or sending anything. For
    one thread at a time.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.realpath(folder)
        self._followers: dict[str, Follower] = {}
        self._rates: dict[str, Rates[CheckpointId]] = {}

    def look(self, missing: Missing = _nobody, *, now: float | None = None) -> dict[str, Seen]:
        """Return what is there now, by kind of checkpoints. `missing` returns the ranks that a checkpoint waits
        for.

        Raises NoJournalError if there is no journal, JournalError if one cannot be read.
        """
        now = time.time() if now is None else now
        found: dict[str, Seen] = {}
        for kind in journals.kinds(self.folder):
            follower = self._followers.setdefault(kind, Follower(self.folder, kind))
            with contextlib.suppress(NoJournalError):  # before the kind's first uploader has opened
                found[kind] = self._seen(kind, follower.look(), missing, now)
        if not found:
            raise journals.none_in(self.folder)
        return found

    def _seen(self, kind: str, states: Sequence[RankState], missing: Missing, now: float) -> Seen:
        status = view(states, now)
        rates, now_s = self._rates.setdefault(kind, Rates()), time.monotonic()
        unfinished = {each.id: each.uploaded_bytes for each in status.pending if each.state != "waiting"}
        done = {each.id for each in status.pending if each.state == "waiting"}
        if status.last_committed is not None:
            done.add(status.last_committed)
        return Seen(
            status,
            {rank for rank in status.ranks if has_owner(self.folder, rank, kind)},
            rates.look(now_s, unfinished, done),
            {each.id: missing(kind, each.id) for each in status.pending if each.state == "waiting"},
            rates.idle_s(now_s),
        )


# --- as JSON -----------------------------------------------------------------------------------------------


def folder_json(folder: str, by_kind: Mapping[str, Seen], now: float) -> Json:
    """Return the status of the run itself, with that of each kind in `kinds`."""
    own = by_kind.get("", Seen(view([], now)))
    return {
        "folder": os.path.realpath(folder),
        **_kind_json(folder, own),
        "kinds": {kind: _kind_json(folder, each) for kind, each in by_kind.items() if kind},
    }


def _kind_json(folder: str, seen: Seen) -> Json:
    found = seen.status
    committed = found.last_committed
    at_risk = found.at_risk
    return {
        "remote": found.remote,
        "summary": found.summary,
        "last_committed": None
        if committed is None
        else {
            **id_json(committed),
            "committed_at": found.last_committed_at,
            "age_s": max(0.0, found.now - found.last_committed_at),
        },
        "would_lose": {
            "steps": [each.id.step for each in at_risk],
            "size_bytes": sum(each.size_bytes for each in at_risk),
        },
        "queue": {
            state: {"shards": count, "bytes": size_bytes}
            for state, (count, size_bytes) in found.queue.items()
        },
        **_speed_json(
            sum(seen.bytes_per_s.values()) if seen.bytes_per_s else None,
            sum(each.size_bytes - each.uploaded_bytes for each in found.pending),
        ),
        "idle_s": None if seen.idle_s is None else round(seen.idle_s, 1),
        "ranks": [{"rank": rank, "is_running": rank in seen.owned} for rank in found.ranks],
        "checkpoints": [
            {**_checkpoint_json(each, seen), "hint": hint_for(each, seen.owned, folder) or None}
            for each in found.checkpoints
        ],
    }


def id_json(checkpoint: CheckpointId) -> Json:
    return {"generation": checkpoint.generation, "step": checkpoint.step}


def _speed_json(bytes_per_s: float | None, left_bytes: int) -> Json:
    left_s = eta_s(bytes_per_s, left_bytes)
    return {
        "bytes_per_s": None if bytes_per_s is None else round(bytes_per_s),
        "eta_s": None if left_s is None else round(left_s, 1),
    }


def _checkpoint_json(each: CheckpointStatus, seen: Seen) -> Json:
    missing = seen.missing.get(each.id, ())
    return {
        **id_json(each.id),
        "name": each.name,
        "state": each.state,
        "ranks": list(each.ranks),
        "world_size": each.world_size,
        "missing_ranks": list(missing[:MAX_RANKS]),
        "shards": each.num_shards,
        "shards_verified": each.num_verified,
        "size_bytes": each.size_bytes,
        "uploaded_bytes": each.uploaded_bytes,
        "percent": each.percent,
        **_speed_json(seen.bytes_per_s.get(each.id), each.size_bytes - each.uploaded_bytes),
        "begun_at": each.begun_at,
        "decided_at": each.decided_at,
        "failure": each.failure or None,
        "num_to_copy": each.num_to_copy,
    }


def hint_for(each: CheckpointStatus, owned: Collection[int], folder: str) -> str:
    """Return what to do about a checkpoint with a failure, or with copies that nobody makes. There is no command to
    retry one: shards that can still be sent are retried anyway, and an abort is never taken back (rule R4).
    """
    again = "to keep it, save it again as another step or after a restart"
    is_owned = bool({*owned}.intersection(each.ranks))
    match each.state:
        case "committed" if each.num_to_copy:
            return (
                "" if is_owned else f"`ckpt-async drain {folder}` makes the copies, and says why if it cannot"
            )
        case "aborted":
            return f"given up for good, on all ranks; {again}"
        case "lost":
            return f"will be given up for good, on all ranks: {again}"
        case "uploading" | "open" if each.failure and is_owned:
            return "failed uploads are retried every half minute"
        case "uploading" | "open" if each.failure:
            return f"`ckpt-async drain {folder}` retries it now"
        case _:
            return ""


# --- rates of growth, from sizes seen at different times ----------------------------------------------------


# Progress is noted once a second: a shorter window shows those jumps, a longer one hides that the link has
# changed.
WINDOW_S = 15.0
# A lower rate over the window means small files between two parts of a large one: it says nothing about the
# rest.
MIN_BYTES_PER_S = 64 * 1024
# Two looks closer together than this say nothing.
CLOSE_S = 0.5

RateKey = TypeVar("RateKey", bound=Hashable)


def eta_s(bytes_per_s: float | None, left_bytes: int) -> float | None:
    """Return how long the rest will take, if that can be estimated."""
    if not left_bytes or bytes_per_s is None or bytes_per_s < MIN_BYTES_PER_S:
        return None
    return left_bytes / bytes_per_s


class Rates(Generic[RateKey]):
    """The sizes of things at the last looks. Pure: the caller passes the time."""

    def __init__(self) -> None:
        self._seen: dict[RateKey, deque[tuple[float, int]]] = {}
        self._moved_at_s: float | None = None
        self._done: frozenset[RateKey] = frozenset()

    def idle_s(self, now_s: float) -> float | None:
        """Return how long nothing has moved, as far as looks can tell; None if there is nothing to move."""
        return None if self._moved_at_s is None else max(0.0, now_s - self._moved_at_s)

    def look(
        self, now_s: float, sizes: Mapping[RateKey, int], done: Iterable[RateKey] = ()
    ) -> dict[RateKey, float]:
        """Return the bytes per second of each thing that was seen before; things that are not in `sizes` are
        forgotten. `done` are the things that have all their bytes, so that one that came and went between two looks
        counts as movement too.
        """
        before = {key: seen[-1][1] for key, seen in self._seen.items() if seen}
        done_before, self._done = self._done, frozenset(done)
        has_grown = any(before.get(key, 0) != size for key, size in sizes.items())
        if not sizes:
            self._moved_at_s = None
        elif self._moved_at_s is None or has_grown or self._done - done_before:
            self._moved_at_s = now_s
        self._seen = {key: self._seen.get(key, deque()) for key in sizes}
        return {key: rate for key, size in sizes.items() if (rate := self._of(key, now_s, size)) is not None}

    def _of(self, key: RateKey, now_s: float, size: int) -> float | None:
        seen = self._seen[key]
        if seen and size < seen[-1][1]:
            seen.clear()  # it was started anew
        while len(seen) > 1 and now_s - seen[1][0] >= WINDOW_S:
            seen.popleft()
        if not seen or now_s - seen[-1][0] >= CLOSE_S:
            seen.append((now_s, size))
        begin_s, begin = seen[0]
        return (size - begin) / (now_s - begin_s) if now_s - begin_s >= CLOSE_S else None
