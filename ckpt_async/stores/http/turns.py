"""When to close connections that are still used, so that other processes get their turn."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator

from ckpt_async.stores.http.connections import MAX_IDLE_S

# A proxy may serve only so many connections at once, and let the others wait. A small request that took WAITED_S may
# have waited so: then, for SCARCE_S, no connection is kept for later.
WAITED_S, SCARCE_S = 1.0, 10.0
# Who has got its connections does not notice that others wait. If they have been busy with small requests for TURN_S,
# each is closed after the request that it carries now, or within NOW_S.
TURN_S, NOW_S = 5.0, 1.0


class Turns:
    """Watches the small requests to one store, and calls `drop_idle` when others should get its connections."""

    def __init__(self, drop_idle: Callable[[], None]) -> None:
        self._drop_idle = drop_idle
        self._since = self._ended_at = self._scarce_until = -math.inf

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Watch one request, made in this block."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if began < self._scarce_until:
            self._drop_idle()  # those that have carried shards
        try:
            yield
        finally:
            if self._is_over(began, loop.time()):
                self._drop_idle()

    def _is_over(self, began: float, now: float) -> bool:
        if began - self._ended_at >= MAX_IDLE_S:
            self._since = began  # the connections of earlier requests are closed
        self._ended_at = now
        if now - began >= WAITED_S:
            self._scarce_until = now + SCARCE_S
        elif now - self._since >= TURN_S:
            self._scarce_until, self._since = max(self._scarce_until, now + NOW_S), now
        return now < self._scarce_until
