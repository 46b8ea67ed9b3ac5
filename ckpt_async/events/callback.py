"""Events told to a function of the trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckpt_async.events.event import Event

logger = logging.getLogger(__name__)


class Callback:
    """Calls it once for each event, one after the other. An exception in it is logged, and the event counts as told."""

    name = "callback"
    num_parallel = 1
    max_attempts = 1

    def __init__(self, function: Callable[[Event], object]) -> None:
        self._function = function

    def deliver(self, event: Event) -> None:
        try:
            self._function(event)
        except BaseException:  # sys.exit() too: this thread must live, and the next start would meet the same
            logger.exception("on_event_failed kind=%s id=%s; it is not called again", event.kind, event.id)

    def stop(self) -> None:
        """A function cannot be cut short: its thread is left to itself."""
