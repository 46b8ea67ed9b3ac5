"""What moves over sockets, as the kernel counts it: what the other side has acknowledged, not what is in buffers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import weakref

from ckpt_async.stores.interface import Moved

# struct tcp_info of linux/tcp.h, since Linux 4.1: tcpi_rtt in µs, tcpi_bytes_acked, tcpi_bytes_received.
_ROUND_TRIP, _BYTES = struct.Struct("68xI"), struct.Struct("120xQQ")


class Traffic:
    """Of the connections of one store. Threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: weakref.WeakKeyDictionary[socket.socket, int] = weakref.WeakKeyDictionary()
        self._moved_bytes = 0

    def watch(self, connected: socket.socket) -> None:
        """From here on; what moves after the last look at a connection that is then closed is not counted."""
        if hasattr(socket, "TCP_INFO"):
            with self._lock:
                self._seen[connected] = 0

    def read(self) -> Moved | None:
        """All so far, and the longest round trip now; None where the kernel does not say."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        round_trip_s = 0.0
        with self._lock:
            for connected, seen in list(self._seen.items()):
                with contextlib.suppress(OSError, struct.error):  # closed; an old kernel
                    told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.size)
                    now = sum(_BYTES.unpack_from(told))
                    self._seen[connected] = now
                    if now > seen:
                        self._moved_bytes += now - seen
                        round_trip_s = max(round_trip_s, _ROUND_TRIP.unpack_from(told)[0] / 1e6)
            return Moved(self._moved_bytes, round_trip_s)
