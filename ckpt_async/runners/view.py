"""An engine in another process, as the trainer sees it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ckpt_async.core.failures import Failing, Failure, Outcomes
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.observe import Observer
from ckpt_async.engine.state import MAX_FAILURES
from ckpt_async.errors import FailureReason, JournalError
from ckpt_async.local.journal import Journal
from ckpt_async.runners import wire
from ckpt_async.runners.wire import Channel, Wants


class ReportedEngine:
    """The trainer's view of an engine in another process: the journal, which is the truth, and what the process
    reports in addition. Its reports, and the trainer's requests, outlive the process.
    """

    def __init__(self, journal: Journal, observer: Observer, on_change: Callable[[], None]) -> None:
        self.fenced_by: int | None = None
        self.absent_ranks: list[int] | None = None
        self.outcomes = Outcomes()
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self.failing: frozenset[Failing] = frozenset()
        self.store_error = ""
        self._reported_failing: frozenset[Failing] = frozenset()  # by the present process
        self.num_due = 0
        self.last_seen_wake = 0
        self._journal, self._observer, self._on_change = journal, observer, on_change
        self._lock = threading.Lock()
        self._local = Local(journal.rank)
        self._missing: dict[CheckpointId, list[int]] = {}
        self._telling = threading.Lock()
        self._wants = self._told = Wants()
        self._num_unread = 0  # messages that the process has not reported to have read
        self._num_uploads = 0
        self._has_ended = False
        self._channel: Channel | None = None

    # --- for the uploader --------------------------------------------------------------------------------------

    @property
    def local(self) -> Local:
        return self.fresh_local()

    def fresh_local(self) -> Local:
        with self._lock:
            if not self._has_ended:
                self._refresh()
            return self._local

    def _refresh(self) -> None:
        self._local = self._journal.follow(self._local)

    def missing_ranks(self, id_: CheckpointId) -> list[int]:
        return self._missing.get(id_, [])

    def wake(self) -> int:
        with self._telling:
            number = self._wants.wake + 1
            self._want(wake=number)
        return number

    def hurry(self, is_hurried: bool) -> None:
        with self._telling:
            self._want(is_hurried=is_hurried, num_hurries=self._wants.num_hurries + is_hurried)

    def turn_to_newest(self) -> None:
        with self._telling:
            self._want(num_turns_to_newest=self._wants.num_turns_to_newest + 1)

    def look_for_members(self) -> None:
        with self._telling:
            self._want(num_looks=self._wants.num_looks + 1)

    def _want(self, **changes: Any) -> None:
        self._wants = self._wants._replace(**changes)
        self._tell()

    def _tell(self) -> None:
        """Send what is wanted now, if that is news. A process that has much to read is told when it has reported to
        have read it, and one that has just died by `attach`, when it is replaced.
        """
        channel = self._channel
        if channel is None or self._told == self._wants or self._num_unread >= wire.MAX_UNREAD:
            return
        with contextlib.suppress(OSError):
            if channel.send("want", self._wants):
                self._told = self._wants
                self._num_unread += 1

    # --- for the thread that follows the process ---------------------------------------------------------------

    def attach(self, channel: Channel) -> None:
        """Use a new process from now on."""
        self._reported_failing = frozenset()  # what failed in an earlier process may not have healed
        with self._telling:
            self._channel, self._told, self._num_unread = channel, Wants(), 0
            self._tell()

    def detach(self) -> None:
        """Note that the process is gone, with all uploads in progress."""
        self._channel = None
        self._observer.uploads_ended(self._num_uploads)
        self._num_uploads = 0

    def end(self) -> None:
        """Keep the journal's last state: no process works for us any more, and the journal may be closed."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                with contextlib.suppress(JournalError):
                    self._refresh()

    def take(self, report: dict[str, Any]) -> None:
        for name, *values in report["observed"]:
            self._observe(name, values)
        for fields in report["decided"]:
            self.outcomes.add(wire.decided_from(fields))
        failing = frozenset((CheckpointId(**id_), action) for id_, action in report["failing"])
        self.failing = (self.failing - self._reported_failing) | failing
        self._reported_failing = failing
        self.failures.extend(map(wire.failure_from, report["failures"]))
        self._missing = {CheckpointId(**id_): ranks for id_, ranks in report["missing"]}
        self.fenced_by, self.absent_ranks = report["fenced_by"], report["absent_ranks"]
        self.store_error, self.num_due = report["store_error"], report["num_due"]
        self.last_seen_wake = max(self.last_seen_wake, report["last_seen_wake"])
        with self._telling:
            self._num_unread -= report["num_read"]
            self._tell()
        self._on_change()

    def _observe(self, name: str, values: list[Any]) -> None:
        if name == "attempt_failed":
            values = [FailureReason(values[0])]
        if name in ("uploads_started", "uploads_ended"):
            self._num_uploads += values[0] if name == "uploads_started" else -values[0]
        getattr(self._observer, name)(*values)
