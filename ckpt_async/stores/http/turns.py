"""When to close connections that are still used, so that other processes get their turn."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator

from ckpt_async.stores.http.connections import MAX_IDLE_S

# A proxy may serve only so many connections at once, and let the others wait. A quick request that took WAITED_S may
# have waited so: then, for SCARCE_S, no connection is kept for later.
WAITED_S, SCARCE_S = 1.0, 10.0
# Who has got its connections does not notice that others wait. If they have been busy with small requests for TURN_S,
# none is kept for LEAVE_S.
TURN_S, LEAVE_S = 3.0, 0.5


class Turns:
    """Watches the small requests to one store, and calls `drop_idle` when others should get its connections."""

    def __init__(self, drop_idle: Callable[[], None]) -> None:
        self._drop_idle = drop_idle
        # The connections of requests that began earlier are not kept.
        self._keeps_from = self._busy_at = -math.inf

    @contextlib.contextmanager
    def one(self, *, is_quick: bool = True) -> Iterator[None]:
        """Watch one request, made in this block. `is_quick`: if it takes long, it has had to wait."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if began - self._busy_at >= MAX_IDLE_S:
            self._keeps_from = max(began, self._keeps_from)  # those of earlier requests are closed
        self._busy_at = began
        if began < self._keeps_from:
            self._drop_idle()  # those that have carried shards
        try:
            yield
        finally:
            self._ended(began, loop.time(), is_quick=is_quick)

    def _ended(self, began: float, now: float, *, is_quick: bool) -> None:
        self._busy_at = now
        if is_quick and now - began >= WAITED_S:
            self._keeps_from = now + SCARCE_S
        elif now - self._keeps_from >= TURN_S:
            self._keeps_from = now + LEAVE_S
        if began < self._keeps_from:
            self._drop_idle()
