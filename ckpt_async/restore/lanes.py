"""How much to request at once: what one connection delivers in a short time, so that all requests end together."""

from __future__ import annotations

import os

from ckpt_async.core.units import MIB

# How long a request should take. A longer one loses more with a broken connection, or may end after all the
# others; a shorter one loses more to round trips.
REQUEST_S = 1.0
# How long the last request may run alone: on a fast link this loses less than many small requests would.
LAST_S = 0.1
# On a fast link the requests themselves are the cost: with 16 MiB, loopback loses a tenth of its throughput.
MAX_REQUEST_BYTES = 32 * MIB
# Weight of the newest request in the measured rate, against all those before.
NEWEST = 0.25


class Pace:
    """The measured pace of one reader's connections. Used on one event loop."""

    def __init__(self) -> None:
        self._bytes_per_s = 0.0  # of one connection; 0: unknown so far

    def request_bytes(self, left_bytes: int, num_at_once: int) -> int:
        """Return how many bytes to request next, when nobody has requested `left_bytes` yet and `num_at_once`
        requests run concurrently. As long as the rate is unknown, the result is 0: the least possible.
        """
        share = max(left_bytes // (2 * num_at_once), int(self._bytes_per_s * LAST_S))
        return min(int(self._bytes_per_s * REQUEST_S), share, MAX_REQUEST_BYTES)

    def took(self, size_bytes: int, took_s: float) -> None:
        """Note that a request has transferred this many bytes in this time."""
        rate = size_bytes / max(took_s, 1e-6)
        self._bytes_per_s += (rate - self._bytes_per_s) * (NEWEST if self._bytes_per_s else 1.0)


def num_of_cores() -> int:
    """Return the number of cores this process may use, which is the best number of threads when the cores limit the
    rate: more threads only compete for the GIL and the caches. Measured on two cores: a download over TLS takes an
    eighth longer with three threads than with two, and a third longer with eight; many small files take twice as
    long with eight.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
