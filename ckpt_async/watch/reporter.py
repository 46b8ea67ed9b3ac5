"""What a watcher reports: events as they happen, each refusal once to all who ask for it, and a report at its end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckpt_async.core import errnos
from ckpt_async.core.refusal import Refusal, Refused
from ckpt_async.formats import Found
from ckpt_async.monitor.metrics import Metrics
from ckpt_async.watch.announcement import Announcement
from ckpt_async.watch.entries import Entry

logger = logging.getLogger(__name__)

# What cannot be read for a moment (a folder that another node is deleting, too many open files) only counts
# as refused after this long.
UNREADABLE_S = 30.0
# How long a complete checkpoint may wait for previous ones to be decided before that is reported.
HELD_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Event:
    """What a person or a script is told. `event` is committed, there, refused or incomplete; `cause` is of refusals."""

    event: str
    path: str
    step: int
    name: str
    format: str
    reason: str = ""
    size_bytes: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a watcher has done by its end.

    `unfinished` were handed in and are not decided: the next launch, or `ckpt-async drain STATE`, finishes them.
    `incomplete` are those without a marker so far, by path, with the reason. `is_cut_short`: the time to finish was
    over before the store, or the other nodes, had answered. `unknown`: by folder, tensor files that no format takes.
    `num_there`: found in the store already; with `is_once` also those in the folder that a previous launch has
    committed.
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


class Reporter:
    """Reports each thing once, and keeps what goes into the final report.

    `refusals` has everything that was refused. `publish` is called once for each, too.
    """

    def __init__(
        self,
        on_event: Callable[[Event], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_event, self._clock = on_event, clock
        self.publish: Callable[[Refused], None] = lambda _: None
        self.refusals: dict[tuple[str, Refusal, int | None, int], Refused] = {}
        self.counts: Counter[str] = Counter()
        self.incomplete: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self.unknown: dict[str, str] = {}  # by folder: why its first tensor file is not taken
        self._not_stored: dict[tuple[str, int | None], Refused] = {}  # the newest refusal of a path and step
        self._metrics: Metrics | None = None
        self._said: set[tuple[str, str]] = set()
        self._since: dict[tuple[str, str], float] = {}

    # --- checkpoints ---------------------------------------------------------------------------------------

    @property
    def refused(self) -> dict[str, str]:
        """What was refused and did not reach the store after all, by path with the reason."""
        return {path: each.reason for (path, _), each in self._not_stored.items()} | self.unreadable

    def stored(self, event: str, entry: Entry) -> None:
        """Report that an entry is in the store: `committed` now, or `there` before.

        This makes up for an earlier refusal, but not for files that came too late for this very entry.
        """
        self.counts[event] += 1
        here = entry.path or ".", entry.step
        if here in self._not_stored and self._not_stored[here].version < entry.number:
            del self._not_stored[here]
        self._on_event(_event_of(event, entry, size_bytes=entry.size_bytes))

    def refuse(self, what: Entry | Found | Announcement, cause: Refusal, reason: str) -> None:
        """Report that something, or a part of it that came too late, is not taken."""
        number = what.number if isinstance(what, Entry) else 0
        refused = Refused(what.path or ".", cause, reason, what.step, what.name, number)
        self._not_stored[refused.path, refused.step] = refused
        if self.record(refused):
            self._on_event(_event_of("refused", what, reason, cause=cause.value))

    def note_incomplete(self, found: Found, why: str, *, is_finished: bool) -> None:
        """Report a candidate that will not become a checkpoint.

        `is_finished`: its trainer was done with it, so that some mistake has lost it.
        """
        if is_finished:
            self.record(Refused(found.path or ".", Refusal.INCOMPLETE, why, found.step, found.name))
        if self._is_first("incomplete", f"{found.path} {why}"):
            self._on_event(_event_of("incomplete", found, why))

    # --- files that are no checkpoint ----------------------------------------------------------------------

    def note_unknown(self, folder: str, reason: str) -> None:
        """Report a tensor file that no format takes, the first of each folder."""
        folder = folder or "."
        if folder not in self.unknown:
            self.unknown[folder] = reason
            self.say("not_taken", folder, reason)
            self.record(Refused(folder, Refusal.UNKNOWN, reason))

    def note_unreadable(self, unreadable: Mapping[str, str], *, is_last: bool = False) -> None:
        """Report what cannot be read now, with the reasons: a checkpoint may be there.

        `is_last`: no further scan follows, so it counts as refused at once.
        """
        self.unreadable = {path or ".": f"it cannot be read: {why}" for path, why in unreadable.items()}
        for path, reason in self.unreadable.items():
            self.say("path_unreadable", path, f"{path}: {reason}; nothing in it is uploaded")
            if self._lasts("unreadable", path, UNREADABLE_S) or is_last:
                self.record(Refused(path, Refusal.UNREADABLE, reason))
        for key in [
            each for each in self._since if each[0] == "unreadable" and each[1] not in self.unreadable
        ]:
            del self._since[key]

    # --- metrics -------------------------------------------------------------------------------------------

    def count_in(self, metrics: Metrics | None) -> None:
        """Count refusals in these metrics from now on, including all until now. With None, none are exported."""
        self._metrics = metrics
        if metrics is not None:
            metrics.watcher_opened()
            for each in self.refusals.values():
                _count(metrics, each)

    def record(self, refused: Refused) -> bool:
        """Count and publish a refusal. Return whether it is a new one."""
        key = refused.path, refused.cause, refused.step, refused.version
        if key in self.refusals:
            return False
        self.refusals[key] = refused
        if self._metrics is not None:
            _count(self._metrics, refused)
        self.publish(refused)
        return True

    # --- warnings ------------------------------------------------------------------------------------------

    def note_held_up(self, entry: Entry, waits_for: str) -> None:
        """Note that a complete checkpoint, and all after it, wait for others; reported once that lasts."""
        if self._lasts("held_up", f"{entry.number}", HELD_UP_S):
            self.say(
                "held_up",
                f"{entry.number}",
                f"{entry.path or entry.name} (step {entry.step}) and later saves are not handed in yet: they wait"
                f" for {waits_for}, because previous saves must be committed or given up first",
            )

    def trouble(self, error: Exception) -> None:
        """Report an error that may pass; raise it if it will not pass by itself."""
        if isinstance(error, OSError) and not errnos.is_full(error):
            raise error
        self.say("attempt_failed", str(error), f"{error}; trying again")

    def say(self, event: str, what: str, message: str) -> None:
        """Log a warning, once for each `what` of an event."""
        if self._is_first(event, what):
            template = f"{event}: %s"  # an event of the log, as `JsonFormatter` expects it
            logger.warning(template, message)

    def _is_first(self, event: str, what: str) -> bool:
        is_first = (event, what) not in self._said
        self._said.add((event, what))
        return is_first

    def _lasts(self, event: str, what: str, duration_s: float) -> bool:
        now = self._clock()
        return now - self._since.setdefault((event, what), now) >= duration_s


def _event_of(
    event: str, what: Entry | Found | Announcement, reason: str = "", *, size_bytes: int = 0, cause: str = ""
) -> Event:
    return Event(event, what.path or ".", what.step, what.name, what.format, reason, size_bytes, cause)


def _count(metrics: Metrics, refused: Refused) -> None:
    metrics.watch_refused(refused.cause)
    what, text = f"refused {refused.path}", f"{refused.path} is refused: {refused.reason}"
    metrics.recent.add("bad", what, text, step=refused.step)
