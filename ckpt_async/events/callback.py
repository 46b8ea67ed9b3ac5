"""Events delivered to a function in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckpt_async.core.arguments import shown
from ckpt_async.errors import SettingsError
from ckpt_async.events.event import Event

OnEvent = Callable[[Event], object]

logger = logging.getLogger(__name__)


class Callback:
    """Calls the function for one event after another. If it raises, this is logged and the event counts as told."""

    # A sweeper's function is a sink of its own: an event told to it is still told to the trainer's.
    of_trainer, of_sweeper = "callback", "sweeper"
    num_parallel = 1
    max_attempts = 1

    def __init__(self, function: OnEvent, name: str = of_trainer) -> None:
        self._function, self.name = function, name

    def deliver(self, event: Event) -> None:
        try:
            self._function(event)
        except (
            BaseException
        ):  # sys.exit() too: this thread must live, and the next launch would meet it again
            logger.exception(
                "on_event_failed kind=%s id=%s; not calling it again for this event", event.kind, event.id
            )

    def stop(self) -> None:
        """Do nothing: a function cannot be cut short, so its thread is abandoned."""


def check_callable(on_event: object) -> None:
    """Raise SettingsError unless `on_event` is a function or None."""
    if on_event is not None and not callable(on_event):
        raise SettingsError(f"on_event={shown(on_event)} is not callable")
