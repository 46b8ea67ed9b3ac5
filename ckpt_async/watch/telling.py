"""What a watcher reports while it runs and when it ends."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckpt_async.core import errnos
from ckpt_async.core.refusal import Refusal, Refused
from ckpt_async.formats import Found
from ckpt_async.watch.announcement import Announcement
from ckpt_async.watch.entries import Entry

logger = logging.getLogger(__name__)

# What cannot be read for a moment (a folder that another node is deleting, too many open files) only counts
# as refused after this long.
UNREADABLE_S = 30.0
# Nodes that are restarted for a good reason begin fewer new launches than this within the time.
MANY_STARTS, MANY_STARTS_S = 5, 60.0
# How long a complete checkpoint may wait for earlier ones to be decided before that is reported.
HELD_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Told:
    """An event of interest to a person or a script.

    `event` is one of committed, there, refused, incomplete, changed.
    """

    event: str
    path: str
    step: int
    name: str
    format: str
    reason: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a watcher has done by its end.

    `unfinished` were handed in and are not decided: the next launch, or `ckpt-async drain STATE`, finishes them.
    `incomplete` are those without a mark so far, by path, with the reason. `is_cut_short`: the time to finish was
    over before the store, or the other nodes, had answered. `unknown`: by folder, tensor files that no format takes.
    `num_there`: found in the store already; with `is_once`
    also those in the folder that an earlier launch has committed.
    """

    num_committed: int
    num_there: int
    refused: Mapping[str, str]
    incomplete: Mapping[str, str]
    unfinished: tuple[str, ...]
    stood_by: bool = False
    is_cut_short: bool = False
    is_empty: bool = False  # nothing was ever found, complete or not
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def took_none(self) -> bool:
        """Whether files of checkpoints were seen, and none was taken: some option is missing."""
        return bool(self.unknown) and not (self.num_committed or self.num_there or self.unfinished)


class Teller:
    """Reports each thing once, and keeps what goes into the final report.

    `on_refused` is called once for each refusal, too.
    """

    def __init__(self, tell: Callable[[Told], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self.on_refused: Callable[[Refused], None] = lambda _: None
        self._counted: set[tuple[str, Refusal, int | None, int]] = set()
        self._unreadable_since: dict[str, float] = {}
        self._held_up_since: dict[int, float] = {}  # by entry number
        self._joined: deque[float] = deque(maxlen=MANY_STARTS)
        self._said: set[tuple[str, str]] = set()
        self._changed: dict[int, str] = {}  # by the number of an entry that is not decided: a file
        self.counts: Counter[str] = Counter()
        self._refused: dict[tuple[str, int], str] = {}  # by path and step
        self._left_out: dict[tuple[str, int], tuple[int, str]] = {}  # the same keys: entry number and reason
        self.incomplete: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self.unknown: dict[str, str] = {}  # by folder: why its first tensor file is not taken

    @property
    def refused(self) -> dict[str, str]:
        """What was refused and did not reach the store after all, by path with the reason; includes files left out."""
        left_out = {path: reason for (path, _), (_, reason) in self._left_out.items()}
        return left_out | {path: reason for (path, _), reason in self._refused.items()}

    def settled(self, event: str, entry: Entry) -> None:
        """Report that an entry is in the store: `committed` now, or `there` before. This makes up for an earlier
        refusal.
        """
        self.counts[event] += 1
        self._changed.pop(entry.number, None)
        here = entry.path or ".", entry.step
        self._refused.pop(here, None)
        if here in self._left_out and self._left_out[here][0] < entry.number:
            del self._left_out[here]
        self.tell(event, entry)

    def tell(self, event: str, what: Entry | Found | Announcement, reason: str = "") -> None:
        """Report an event, once for each thing and reason."""
        path = what.path or "."
        number = str(what.number) if isinstance(what, Entry) else ""
        said = path, f"{event}{number}{reason}"
        if said in self._said:
            return
        self._said.add(said)
        size_bytes = what.size_bytes if isinstance(what, Entry) else 0
        self._tell(Told(event, path, what.step, what.name, what.format, reason, size_bytes))

    def note_changed(self, entry: Entry, path: str) -> None:
        """Note that a file was changed in place while its checkpoint is being committed.

        It is reported if the checkpoint is refused. If it is committed, its bytes were sent before.
        """
        self._changed.setdefault(entry.number, path)

    def refuse(self, what: Entry | Found | Announcement, refusal: Refusal, reason: str) -> None:
        """Report that something is not taken."""
        path = what.path or "."
        self._refused[path, what.step] = reason
        number = what.number if isinstance(what, Entry) else 0
        if isinstance(what, Entry) and (changed := self._changed.pop(number, "")):
            self.tell("changed", what, f"{changed} was changed in place after its checkpoint was complete")
        self._count(Refused(path, refusal, reason, what.step, what.name, number))
        self.tell("refused", what, reason)

    def leave_out(self, entry: Entry, reason: str) -> None:
        """Report that a part of a checkpoint came too late."""
        path = entry.path or "."
        self._left_out[path, entry.step] = entry.number, reason
        self._count(Refused(path, Refusal.CHANGED, reason, entry.step, entry.name, entry.number))
        self.tell("changed", entry, reason)

    def tell_incomplete(self, found: Found, why: str, *, is_finished: bool) -> None:
        """Report a candidate that will not become a checkpoint.

        `is_finished`: its trainer was done with it, so that some mistake has lost it.
        """
        if is_finished:
            self._count(Refused(found.path or ".", Refusal.INCOMPLETE, why, found.step, found.name))
        self.tell("incomplete", found, why)

    def pass_by(self, folder: str, reason: str) -> None:
        """Report a tensor file that no format takes, the first of each folder."""
        folder = folder or "."
        if folder not in self.unknown:
            self.unknown[folder] = reason
            self.say("not_taken", folder, reason)
            self._count(Refused(folder, Refusal.UNKNOWN, reason))

    def pass_over(self, unreadable: Mapping[str, str]) -> None:
        """Report what cannot be read now, with the reasons: a checkpoint may be there."""
        self.unreadable = {path or ".": f"it cannot be read: {why}" for path, why in unreadable.items()}
        now = self._clock()
        self._unreadable_since = {path: self._unreadable_since.get(path, now) for path in self.unreadable}
        self._counted = {
            each for each in self._counted if each[1] is not Refusal.UNREADABLE or each[0] in self.unreadable
        }
        for path, reason in self.unreadable.items():
            self.say("path_unreadable", path, f"{path}: {reason}; nothing in it is uploaded")
            if now - self._unreadable_since[path] >= UNREADABLE_S:
                self._count(Refused(path, Refusal.UNREADABLE, reason))

    def end(self) -> None:
        """Refuse what cannot be read now; called when no further scan will follow."""
        for path, reason in self.unreadable.items():
            self._count(Refused(path, Refusal.UNREADABLE, reason))

    def _count(self, refused: Refused) -> None:
        key = refused.path, refused.cause, refused.step, refused.version
        if key not in self._counted:
            self._counted.add(key)
            self.on_refused(refused)

    def note_joined(self, node: int, num_nodes: int) -> None:
        """Note that this node has joined a new launch that another node has begun."""
        now = self._clock()
        self._joined.append(now)
        if len(self._joined) == MANY_STARTS and now - self._joined[0] < MANY_STARTS_S:
            self.say(
                "many_starts",
                "",
                "the nodes keep beginning new launches, and whatever is not committed is sent again each time: does"
                f" another watcher also use --node {node}/{num_nodes}, or a different number of nodes? Each needs its"
                f" own --node I/{num_nodes}",
            )

    def hold_up(self, entry: Entry, waits_for: str) -> None:
        """Note that a complete checkpoint, and all after it, wait for others; reported once that lasts."""
        now = self._clock()
        if now - self._held_up_since.setdefault(entry.number, now) >= HELD_UP_S:
            self.say(
                "held_up",
                str(entry.number),
                f"{entry.path or entry.name} (step {entry.step}) and later saves are not handed in yet: they wait"
                f" for {waits_for}, because earlier saves must be committed or given up first",
            )

    def trouble(self, error: Exception) -> None:
        """Report an error that may pass; raise it if it will not pass by itself."""
        if isinstance(error, OSError) and not errnos.is_full(error):
            raise error
        self.say("attempt_failed", str(error), f"{error}; trying again")

    def say(self, event: str, what: str, message: str) -> None:
        """Log a warning, once for each `what` of an event."""
        if (event, what) not in self._said:
            self._said.add((event, what))
            template = f"{event}: %s"  # an event of the log, as `JsonFormatter` expects it
            logger.warning(template, message)
