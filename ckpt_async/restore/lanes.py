"""How much is asked for at once: what a connection brings in a moment, so that all of them end together."""

from __future__ import annotations

import os

MIB = 1 << 20
# What a request should take: more would be lost with a connection, or come after all others; less would be lost on the
# way to the store and back.
REQUEST_S = 1.0
# So long may the last one run alone: less is lost so than by many small requests on a fast link.
LAST_S = 0.1
# On a fast link it is the requests that cost: with 16 MiB, a tenth of the throughput on loopback.
MAX_REQUEST_BYTES = 32 * MIB
# What the newest request says of the link, against what those before have said.
NEWEST = 0.25


class Pace:
    """What the connections of one reader bring. Used on one event loop."""

    def __init__(self) -> None:
        self._bytes_per_s = 0.0  # of one connection; 0: not known yet

    def request_bytes(self, left_bytes: int, num_at_once: int) -> int:
        """How much to ask for next, of what nobody has asked for yet, while so many requests are made at once: as
        little as can be while nothing is known.
        """
        share = max(left_bytes // (2 * num_at_once), int(self._bytes_per_s * LAST_S))
        return min(int(self._bytes_per_s * REQUEST_S), share, MAX_REQUEST_BYTES)

    def took(self, size_bytes: int, took_s: float) -> None:
        """A request has brought this much in this time."""
        rate = size_bytes / max(took_s, 1e-6)
        self._bytes_per_s += (rate - self._bytes_per_s) * (NEWEST if self._bytes_per_s else 1.0)


def num_of_cores() -> int:
    """More threads only take the interpreter's lock and the caches from each other, if it is the cores that bound the
    rate: measured on two cores, with three a download over TLS takes an eighth longer than with two, with eight a
    third; many small files take twice as long with eight.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
