"""Troubles of one kind come by the hundred, when a disk is full say: the log has the first, then how many more."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# Between two lines about one kind of trouble.
AGAIN_S = 60.0


@dataclass(slots=True)
class _Trouble:
    told_at: float
    num_untold: int = 0
    last: str = ""


class Troubles:
    """What was told of, and what was not."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Trouble] = {}

    def is_new(self, kind: Hashable, text: str, now: float) -> bool:
        """Whether this is to be told now; else it is counted."""
        known = self._known.get(kind)
        if known is None:
            self._known[kind] = _Trouble(now)
            return True
        known.num_untold, known.last = known.num_untold + 1, text
        return False

    def due(self, now: float, *, is_end: bool = False) -> list[tuple[int, float, str]]:
        """What was counted and is to be told by now: how many times more, in how many seconds, and the last of them. A
        kind that did not come again for as long is forgotten: the next of it is new.
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
