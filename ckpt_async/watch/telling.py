"""What a watcher tells, and what it reports when it ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt_async.watch.entries import Entry
from ckpt_async.watch.formats import Found

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Told:
    """Something that a person or a script wants to know. `event`: committed, there, refused, incomplete, changed."""

    event: str
    path: str
    step: int
    name: str
    format: str
    reason: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a watcher has done when it ends. `unfinished` were handed in and are not decided: the next start, or
    `ckpt-async drain STATE`, finishes them. `incomplete` have no mark yet, by their paths, and why. `is_cut_short`: the
    time to finish was over before the store, or the other nodes, had answered. `num_there`: found in the store; of
    `is_once` also those in the folder that an earlier start has committed.
    """

    num_committed: int
    num_there: int
    refused: Mapping[str, str]
    incomplete: Mapping[str, str]
    unfinished: tuple[str, ...]
    stood_by: bool = False
    is_cut_short: bool = False
    is_empty: bool = False  # nothing was ever found, complete or not


class Teller:
    """Tells each thing once, and keeps what is to be reported."""

    def __init__(self, tell: Callable[[Told], None]) -> None:
        self._tell = tell
        self._said: set[tuple[str, str]] = set()
        self.counts: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self.incomplete: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}

    def tell(self, event: str, what: Entry | Found, reason: str = "") -> None:
        """Once for each thing and reason."""
        path = what.path or "."
        number = str(what.number) if isinstance(what, Entry) else ""
        if (path, event + number + reason) in self._said:
            return
        self._said.add((path, event + number + reason))
        size_bytes = what.size_bytes if isinstance(what, Entry) else 0
        self._tell(Told(event, path, what.step, what.name, what.format, reason, size_bytes))

    def refuse(self, what: Entry | Found, reason: str) -> None:
        self.refused[what.path or "."] = reason
        self.tell("refused", what, reason)

    def pass_over(self, unreadable: Mapping[str, str]) -> None:
        """What cannot be looked at now, and why: a checkpoint may be there."""
        self.unreadable = {path or ".": f"it cannot be read: {why}" for path, why in unreadable.items()}
        for path, reason in self.unreadable.items():
            self.say("unreadable", path, f"{path}: {reason}; nothing in it is uploaded")

    def say(self, kind: str, what: str, message: str) -> None:
        """A warning in the log, once for each `what` of a kind."""
        if (kind, what) not in self._said:
            self._said.add((kind, what))
            logger.warning(message)
