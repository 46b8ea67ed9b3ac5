"""Rate limit for log messages about one kind of trouble.

Such troubles come by the hundred, for example when a disk is full: the log gets the first one, then how many more.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# The shortest time between two lines about one kind of trouble.
AGAIN_S = 60.0


@dataclass(slots=True)
class _Trouble:
    told_at: float
    num_untold: int = 0
    last: str = ""


class Troubles:
    """Which kinds of trouble were logged, and how many troubles of each kind were only counted."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Trouble] = {}

    def is_new(self, kind: Hashable, text: str, now: float) -> bool:
        """Return whether to log this trouble now; if not, it is counted."""
        known = self._known.get(kind)
        if known is None:
            self._known[kind] = _Trouble(now)
            return True
        known.num_untold, known.last = known.num_untold + 1, text
        return False

    def due(self, now: float, *, is_end: bool = False) -> list[tuple[int, float, str]]:
        """Return what was counted and is due to be logged.

        For each kind: how many more there were, within how many seconds, and the text of the last one. A kind that did
        not recur within AGAIN_S is forgotten, so that its next trouble is new.
        """
        found = []
        for kind, each in list(self._known.items()):
            for_s = now - each.told_at
            if for_s < AGAIN_S and not is_end:
                continue
            if each.num_untold:
                found.append((each.num_untold, for_s, each.last))
                self._known[kind] = _Trouble(now)
            else:
                del self._known[kind]
        return found
