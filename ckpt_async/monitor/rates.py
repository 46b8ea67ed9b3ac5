"""Rates of growth, from sizes seen at different times."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

# Progress is noted once a second: a shorter window shows those jumps, a longer one hides that the link has
# changed.
WINDOW_S = 15.0
# A lower rate over the window means small files between two parts of a large one: it says nothing about the
# rest.
MIN_BYTES_PER_S = 64 * 1024
# Two looks closer together than this say nothing.
CLOSE_S = 0.5

Key = TypeVar("Key", bound=Hashable)


def eta_s(bytes_per_s: float | None, left_bytes: int) -> float | None:
    """Return how long the rest will take, if that can be estimated."""
    if not left_bytes or bytes_per_s is None or bytes_per_s < MIN_BYTES_PER_S:
        return None
    return left_bytes / bytes_per_s


class Rates(Generic[Key]):
    """The sizes of things at the last looks. Pure: the caller passes the time."""

    def __init__(self) -> None:
        self._seen: dict[Key, deque[tuple[float, int]]] = {}
        self._moved_at_s: float | None = None
        self._done: frozenset[Key] = frozenset()

    def idle_s(self, now_s: float) -> float | None:
        """Return how long nothing has moved, as far as looks can tell; None if there is nothing to move."""
        return None if self._moved_at_s is None else max(0.0, now_s - self._moved_at_s)

    def look(self, now_s: float, sizes: Mapping[Key, int], done: Iterable[Key] = ()) -> dict[Key, float]:
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

    def _of(self, key: Key, now_s: float, size: int) -> float | None:
        seen = self._seen[key]
        if seen and size < seen[-1][1]:
            seen.clear()  # it was started anew
        while len(seen) > 1 and now_s - seen[1][0] >= WINDOW_S:
            seen.popleft()
        if not seen or now_s - seen[-1][0] >= CLOSE_S:
            seen.append((now_s, size))
        begin_s, begin = seen[0]
        return (size - begin) / (now_s - begin_s) if now_s - begin_s >= CLOSE_S else None
