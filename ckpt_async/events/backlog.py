"""Decides when a rank's backlog is worth an event: it crosses a threshold, up or down, or stops moving. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId


@dataclass(frozen=True, slots=True)
class View:
    """The backlog, and how far its uploads have come."""

    num_checkpoints: int = 0
    size_bytes: int = 0
    oldest: CheckpointId | None = None
    num_stored: int = 0
    sent_bytes: int = 0

    @classmethod
    def of(cls, local: Local, sent_bytes: int) -> Self:
        """Count the sealed checkpoints that are not decided: those to be uploaded, and those that wait for other ranks.

        `sent_bytes` are the bytes sent so far of shards whose upload is under way.
        """
        waiting = [
            each for each in local.checkpoints.values() if each.decision is None and each.sealed is not None
        ]
        shards = [shard for each in waiting for shard in each.shards.values()]
        return cls(
            len(waiting),
            sum(each.shard.size_bytes for each in shards if each.stored is None),
            min((each.id for each in waiting), default=None),
            sum(each.stored is not None for each in shards),
            sent_bytes,
        )


class Watch:
    """Compares successive views of the backlog and reports what has changed."""

    def __init__(self, threshold: int, stall_s: float) -> None:
        self._threshold, self._stall_s = threshold, stall_s
        self._is_high = self._is_stalled = False
        self._place: object = None
        self._most_sent_bytes = 0
        self._moved_at = float("-inf")

    def look(self, view: View, now: float) -> list[str]:
        """Return the changes, as a list of states.

        `high` comes at `threshold` checkpoints and `normal` at half of that; `stalled` comes after `stall_s` seconds
        without progress, and `moving` with the next progress.
        """
        found = []
        if not self._is_high and self._threshold and view.num_checkpoints >= self._threshold:
            self._is_high = True
            found.append("high")
        elif self._is_high and view.num_checkpoints <= self._threshold // 2:
            self._is_high = False
            found.append("normal")
        if self._has_moved(view):
            self._moved_at = now
            if self._is_stalled:
                self._is_stalled = False
                found.append("moving")
        elif self._stall_s and not self._is_stalled and now - self._moved_at >= self._stall_s:
            self._is_stalled = True
            found.append("stalled")
        return found

    def _has_moved(self, view: View) -> bool:
        """Return whether uploads have made progress.

        A further checkpoint that waits is no progress, nor are bytes that are sent again because an attempt failed.
        """
        place = view.oldest, view.num_stored
        if place != self._place or view.oldest is None:
            self._place, self._most_sent_bytes = place, view.sent_bytes
            return True
        has_moved = view.sent_bytes > self._most_sent_bytes
        self._most_sent_bytes = max(view.sent_bytes, self._most_sent_bytes)
        return has_moved
