"""The trainer's part in events: the user's function is called here, and `close` gives other sinks some time."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_async.events.delivery import SinkDelivery, clock
from ckpt_async.events.event import Event, parse_wants
from ckpt_async.events.sinks import Callback
from ckpt_async.runners import Start
from ckpt_async.trainer.handle import EngineHandle

POLL_S = 0.05


class Events:
    """Calls `on_event` for events from the journal, whichever process the engine runs in. Only on the rank that
    reports events.
    """

    def __init__(
        self, engine: EngineHandle, start: Start, on_event: Callable[[Event], object] | None
    ) -> None:
        self._engine, self._grace_s = engine, start.settings.event_grace_s
        self._sinks = list(parse_wants(start.wants))
        self._delivery: SinkDelivery | None = None
        if on_event is not None and self._sinks:
            self._delivery = SinkDelivery(engine.journal.outbox(), Callback(on_event))
            engine.on_change = self._delivery.notify

    def wait(self, deadline: float) -> None:
        """Wait until everything that can be delivered in this time is delivered, but no longer than
        `event_grace_s`.
        """
        if not self._sinks:
            return
        outbox = self._engine.journal.outbox()
        left_s = max(0.0, min(deadline - time.monotonic(), self._grace_s))
        before = clock() + left_s
        self._engine.wait_until(
            lambda _: not outbox.num_due(self._sinks, before), time.monotonic() + left_s, poll_s=POLL_S
        )

    def close(self) -> None:
        """Stop reporting events. A call of the user's function that is still running is not waited for."""
        if self._delivery is not None:
            self._delivery.close(0.0)
