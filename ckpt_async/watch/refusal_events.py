"""Makes an event of each refusal and delivers it. This needs no store, so it works while the store is unreachable."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from ckpt_async.core.observe import Notice
from ckpt_async.core.refusal import Refusal, Refused
from ckpt_async.core.settings import Settings
from ckpt_async.errors import JournalError
from ckpt_async.events import event as events
from ckpt_async.events.delivery import Delivery
from ckpt_async.events.sinks import sinks_of, wants_of
from ckpt_async.local.outbox import OwnOutbox

logger = logging.getLogger(__name__)


class RefusalEvents:
    """The events of one watcher's refusals, kept at `place` until they are delivered. Every node delivers its own.

    Not thread-safe. Raises SettingsError.
    """

    def __init__(self, run: str, node: int, place: Path, settings: Settings) -> None:
        self._run, self._node, self._grace_s = run, node, settings.event_grace_s
        self._unwritten: list[Notice] = []
        self._wants = wants_of(settings)
        self._outbox: OwnOutbox | None = None
        self._delivery: Delivery | None = None
        if not self._wants:
            return
        sinks = sinks_of(settings, os.environ, warns=False)  # the run warns
        try:
            self._outbox = OwnOutbox(place / "events")
            for sink in sinks:
                self._outbox.retry_now(sink.name)
        except JournalError as error:
            logger.error("events_not_reported error=%s; events of refusals are lost", error)  # noqa: TRY400  no bug of ours
            return
        self._delivery = Delivery(self._outbox, sinks)

    def add(self, refused: Refused) -> None:
        if refused.cause is not Refusal.GIVEN_UP:  # the run's own event reports that, once for all nodes
            event = events.refused(self._run, refused, time.time(), node=self._node)
            self._unwritten.extend(events.notices_of(event, self._wants))
            self._write()

    def _write(self) -> None:
        """Put pending events into the outbox.

        What cannot be written now, e.g. on a full disk, is tried again with the next refusal and at the end.
        """
        if self._outbox is None or self._delivery is None or not self._unwritten:
            return
        try:
            self._outbox.put(self._unwritten, time.time())
        except JournalError as error:
            logger.warning("events_not_written num=%d error=%s", len(self._unwritten), error)
            return
        self._unwritten.clear()
        self._delivery.notify()

    def close(self, *, at_once: bool = False) -> None:
        """Deliver what can be delivered within `event_grace_s`; the rest waits for the next launch."""
        self._write()
        if self._delivery is not None:
            self._delivery.close(0.0 if at_once else self._grace_s)
        if self._outbox is not None:
            self._outbox.close()
