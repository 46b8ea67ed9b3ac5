"""The latest events of a process, for people who look: in memory only, and few of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

MOST = 100
MAX_TEXT = 500
# A repetition within this time counts as the same event.
SAME_S = 60.0


@dataclass(slots=True)
class Happening:
    """Something that happened, `count` times by now, most recently `at` (Unix time). `level`: good, note, warn or
    bad.
    """

    at: float
    level: str
    what: str
    text: str
    step: int | None = None
    count: int = 1


class Recent:
    """The last hundred happenings. Safe from any thread; an append costs one lock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: deque[Happening] = deque(maxlen=MOST)

    def add(self, level: str, what: str, text: str, *, step: int | None = None) -> None:
        """Add a happening. `what` is its type: if it recurs soon with the same level and step, it is only counted."""
        now, text = self._clock(), text[:MAX_TEXT]
        with self._lock:
            for each in reversed(self._known):
                if now - each.at > SAME_S:
                    break
                if (each.level, each.what, each.step) == (level, what, step):
                    each.at, each.text, each.count = now, text, each.count + 1
                    return
            self._known.append(Happening(now, level, what, text, step))

    def told(self) -> list[dict[str, Any]]:
        """Return the happenings as JSON objects, newest first."""
        with self._lock:
            found = [asdict(each) for each in self._known]
        return sorted(found, key=lambda each: float(each["at"]), reverse=True)
