"""Which checkpoint a rank uploads next, and what may share the link with it. Pure.

Where uploads are slower than saves, sealed checkpoints pile up. A checkpoint is committed only when every rank has
sent its part, so ranks that choose by themselves send different ones, and commit none. They agree on one:

- While a rank has one sealed checkpoint to send, it sends that one, and asks nobody.
- With more, the ranks send one *target* together: `target.json`, moved forward by compare-and-swap. The first rank
  that is free names the newest that it has sealed. A rank finishes what it has turned to, and asks for the target only
  when it is free: so a slow rank is never sent away from what it has nearly sent.
- The next target is named when this one is decided, or overdue: this rank has waited for the others three times as
  long as its own part took. Ranks that wait look now and then whether another has named it.
- A rank that has waited as long as its own part took sends older ones meanwhile, newest first, and if there are
  none, newer ones, oldest first. What it has sent of them is kept. Sooner, they would only get in the way of the next
  target: what is under way shares the link with it.
- A rank that has not sealed the target sends what it has, and turns to the target when it has sealed it.

Nothing is given up because of the order. What an earlier launch has left is older than all that this one saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId

# The others' part of the target is overdue after so many times the duration of this rank's own upload, but not within
# OVERDUE_S: a commit takes round trips, and polls.
OVERDUE_UPLOADS, OVERDUE_S = 3, 5.0
# How often a rank asks for the target: at least one second apart, and while it waits, eight times during an upload.
ASK_S, ASKS_PER_UPLOAD = 1.0, 8
# A free rank asks for the target before it turns to anything. It sends nothing new meanwhile, but not longer than this.
ASKING_S = 5.0
# So long after an upload has begun, its first bytes are on their way; and so long after its last ones, it is complete.
BEGINNING_S = 2.0
# Up to this many waiting uploads get a connection each, if there are enough. With more, no small one is sent alone,
# because two cost as much as one.
FEW = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """What this rank has turned to. Kept in memory only: after a crash, it asks for the target again."""

    target: CheckpointId | None = None  # as last named or read
    sending: CheckpointId | None = None  # is finished before any other
    since: float = 0.0  # when the rank turned to `sending`
    upload_s: float = 0.0  # how long that took for the last one that it has delivered
    free_at: float = 0.0  # when it delivered that one, or read a target that it has not sealed
    ask_at: float = 0.0  # when to ask for the target again while this rank waits
    retry_at: float = 0.0  # when to ask again although it need not wait: nothing newer could be named


def turned(turn: Turn, owed: Sequence[CheckpointId], now: float, *, is_open: bool, is_alone: bool) -> Turn:
    """Return what the rank has turned to, now that it has these sealed checkpoints to send, oldest first.

    `is_open`: the target is undecided, as far as this rank knows. `is_alone`: it has nobody to agree with.
    """
    if turn.sending is not None:
        if turn.sending in owed:
            return turn
        turn = replace(turn, sending=None, upload_s=now - turn.since, free_at=now)
        turn = replace(turn, ask_at=now + ask_s(turn))
    if turn.target in owed:
        return replace(turn, sending=turn.target, since=now)
    if not owed or is_waiting(turn, now, is_open=is_open):
        return turn
    if is_alone or (len(owed) == 1 and is_news(turn, owed)):
        return replace(turn, sending=owed[-1], since=now)
    return turn


def is_waiting(turn: Turn, now: float, *, is_open: bool) -> bool:
    """Return whether the rank waits for the others' part of the target, or to have sealed it itself."""
    return is_open and now < overdue_at(turn)


def is_resting(turn: Turn, now: float, *, is_open: bool) -> bool:
    """Return whether the rank sends nothing: it waits for the others' part of the target, which is about to come."""
    is_early = now < turn.free_at + turn.upload_s
    return turn.sending is None and is_waiting(turn, now, is_open=is_open) and is_early


def overdue_at(turn: Turn) -> float:
    return turn.free_at + max(OVERDUE_S, OVERDUE_UPLOADS * turn.upload_s)


def is_news(turn: Turn, owed: Sequence[CheckpointId]) -> bool:
    """Return whether the newest of these is newer than the target."""
    return bool(owed) and (turn.target is None or owed[-1] > turn.target)


def ask_s(turn: Turn) -> float:
    return max(ASK_S, turn.upload_s / ASKS_PER_UPLOAD)


def is_asking_due(turn: Turn, owed: Sequence[CheckpointId], now: float, *, is_open: bool) -> bool:
    """Return whether the rank should ask for the target, and name the newest of `owed` unless it waits or another rank
    has named one. `owed` are those of its own launch.
    """
    ask_at = turn.ask_at if is_waiting(turn, now, is_open=is_open) else turn.retry_at
    return turn.sending is None and len(owed) > 1 and is_news(turn, owed) and now >= ask_at


def with_target(turn: Turn, target: CheckpointId | None, now: float, *, may_have_named: bool = True) -> Turn:
    """Return the turn once this target was named or read. `may_have_named`: it did not only look while it waits."""
    turn = replace(turn, ask_at=now + ask_s(turn))
    if target == turn.target:
        return replace(turn, retry_at=now + ASK_S) if may_have_named else turn
    return replace(turn, target=target, free_at=now)


def to_newest(turn: Turn, owed: Sequence[CheckpointId], now: float) -> Turn:
    """Return the turn of a rank that has little time left: it turns to the newest, whatever it was sending."""
    return replace(turn, sending=owed[-1], since=now) if owed else turn


def in_order(turn: Turn, owed: Sequence[CheckpointId]) -> list[CheckpointId]:
    """Return what the rank has to send in the order in which to send it, from those `owed`, oldest first.

    What is newer than the target comes oldest first: otherwise each new save would overtake the one before, and none
    would be finished. What an earlier launch left comes last.
    """
    sending = [id_ for id_ in owed if id_ == turn.sending]
    others = [id_ for id_ in owed if id_ != turn.sending]
    newest = turn.target or max(owed, default=None)
    left = [id_ for id_ in others if newest is not None and id_.generation < newest.generation]
    own = others[len(left) :]
    older = [id_ for id_ in own if turn.target is None or id_ < turn.target]
    return [*sending, *older[::-1], *own[len(older) :], *left[::-1]]


def is_open(local: Local, target: CheckpointId | None) -> bool:
    """Return whether the target is undecided, as far as this rank's journal says. What it has not saved yet is open."""
    if target is None or target.generation != local.generation:
        return False
    known = local.checkpoints.get(target)
    if known is not None:
        return known.decision is None and known.loss is None and not known.superseded
    return local.newest_enqueued is None or target > local.newest_enqueued


# --- the link ----------------------------------------------------------------------------------------------


def places(ordered: Iterable[tuple[CheckpointId, int]], shared_bytes: int) -> dict[CheckpointId, int]:
    """Give checkpoints places by their order; those with the same place share the link. Each comes with the bytes that
    it has to send: small ones, up to so many bytes, share a place, because one alone would not fill the link.
    """
    found: dict[CheckpointId, int] = {}
    place = size_bytes = 0
    for id_, unsent_bytes in ordered:
        found[id_] = place
        size_bytes += unsent_bytes
        if size_bytes > shared_bytes:
            place, size_bytes = place + 1, 0
    return found


def may_share(place: int, moving: Iterable[int]) -> bool:
    """Return whether what has this place may use the link beside uploads whose bytes move: none is more urgent.

    It holds for whole uploads (`UploadQueue`) as for the requests of those under way (`transfer/budgets.py`).
    """
    return all(place <= each for each in moving)


def may_begin(place: int, moving: Iterable[int], *, is_resting: bool, asks_for_s: float | None) -> bool:
    """Return whether the next upload may begin: not while this rank rests, or asks what it is to send (since so long),
    and not beside a more urgent one. One that the store refuses, or whose file cannot be read, holds up no other.
    """
    is_asking = asks_for_s is not None and asks_for_s < ASKING_S
    return not (is_resting or is_asking) and may_share(place, moving)


def series_length(num_waiting: int, num_places: int, longest: int) -> int:
    """Return how many small shards are sent in one series: no more than one place's share of what waits, so that the
    last ones do not wait behind each other while other places are free.
    """
    return min(max(-(-num_waiting // num_places), 2 if num_waiting > FEW else 1), longest)
