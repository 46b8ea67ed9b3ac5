"""Publishes what a watcher has refused to those who do not read its output: events, metrics, the live page.

None of this needs the store. Refusals while the store is unreachable are told at once, and counted as soon as there
are metrics to count them in.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from pathlib import Path

from ckpt_async.core.observe import Notice
from ckpt_async.core.refusal import Refusal, Refused
from ckpt_async.core.settings import Settings
from ckpt_async.errors import JournalError
from ckpt_async.events import event as events
from ckpt_async.events.delivery import Delivery
from ckpt_async.events.sinks import sinks_of, wants_of
from ckpt_async.local.outbox import OwnOutbox
from ckpt_async.monitor.metrics import Metrics

logger = logging.getLogger(__name__)


class Refusals:
    """The refusals of one watcher, from its start to its end.

    Its events are kept at `place` until they are delivered; every node delivers its own. `add` and `close` must be
    called from one thread.

    Raises SettingsError.
    """

    def __init__(self, run: str, node: int, place: Path, settings: Settings) -> None:
        self._run, self._node, self._grace_s = run, node, settings.event_grace_s
        self._lock = threading.Lock()
        self._counts: Counter[Refusal] = Counter()
        self._unshown: list[Refused] = []
        self._unwritten: list[Notice] = []
        self._metrics: Metrics | None = None
        self._wants = wants_of(settings)
        self._outbox: OwnOutbox | None = None
        self._couriers: Delivery | None = None
        if not self._wants:
            return
        sinks = sinks_of(settings, os.environ, warns=False)  # the run warns
        try:
            self._outbox = OwnOutbox(place / "events")
            for sink in sinks:
                self._outbox.retry_now(sink.name)
        except JournalError as error:
            logger.error("events_not_told error=%s; events of refusals are lost", error)  # noqa: TRY400  no bug of ours
            return
        self._couriers = Delivery(self._outbox, sinks)

    def add(self, refused: Refused) -> None:
        """Record something that was refused for the first time."""
        with self._lock:
            self._counts[refused.cause] += 1
            if self._metrics is not None:
                _count(self._metrics, refused)
            else:
                self._unshown.append(refused)
        if refused.cause is Refusal.GIVEN_UP:  # the run's own event reports it, once for all nodes
            return
        event = events.refused(self._run, refused, time.time(), node=self._node)
        self._unwritten.extend(events.notices_of(event, self._wants))
        self._write()

    def _write(self) -> None:
        """Put pending events into the outbox.

        What cannot be written now, e.g. on a full disk, is tried again with the next refusal and at the end.
        """
        if self._outbox is None or self._couriers is None or not self._unwritten:
            return
        try:
            self._outbox.put(self._unwritten, time.time())
        except JournalError as error:
            logger.warning("events_not_written num=%d error=%s", len(self._unwritten), error)
            return
        self._unwritten.clear()
        self._couriers.notify()

    def count_in(self, metrics: Metrics | None) -> None:
        """Count in these metrics from now on, including what was refused before. With None, no metrics are exported."""
        with self._lock:
            self._metrics = metrics
            if metrics is None:
                return
            metrics.watcher_opened()
            for cause, count in self._counts.items():
                metrics.watch_refused(cause, count)
            for refused in self._unshown:
                _show(metrics, refused)
            self._unshown.clear()

    def close(self, *, at_once: bool = False) -> None:
        """Deliver what can be delivered within `event_grace_s`; the rest waits for the next launch."""
        self._write()
        if self._couriers is not None:
            self._couriers.close(0.0 if at_once else self._grace_s)
        if self._outbox is not None:
            self._outbox.close()


def _count(metrics: Metrics, refused: Refused) -> None:
    metrics.watch_refused(refused.cause)
    _show(metrics, refused)


def _show(metrics: Metrics, refused: Refused) -> None:
    what, text = f"refused {refused.path}", f"{refused.path} is refused: {refused.reason}"
    metrics.recent.add("bad", what, text, step=refused.step)
