"""Which checkpoint a rank uploads next. Pure.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId

# The others' part of the target is overdue after so many times the duration of this rank's own upload, but not within
# OVERDUE_S: a commit takes round trips, and polls.
OVERDUE_UPLOADS, OVERDUE_S = 3, 5.0
# How often a rank asks for the target: at least one second apart, and while it waits, eight times during an upload.
ASK_S, ASKS_PER_UPLOAD = 1.0, 8


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
