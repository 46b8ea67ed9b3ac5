"""How much moves over sockets, as the kernel counts it: what the peer has acknowledged, not what is in buffers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import weakref

from ckpt_async.stores.interface import Moved

# struct tcp_info of linux/tcp.h, since Linux 4.1: tcpi_rtt in µs, tcpi_bytes_acked, tcpi_bytes_received.
_ROUND_TRIP, _BYTES = struct.Struct("68xI"), struct.Struct("120xQQ")


def acknowledged_bytes(connected: socket.socket) -> int | None:
    """Return how many bytes the peer has acknowledged so far; None if the kernel does not report that. Any thread."""
    told = _tcp_info(connected)
    return None if told is None else int(_BYTES.unpack_from(told)[0])


def _tcp_info(connected: socket.socket) -> bytes | None:
    """Return the kernel's account of a connection; None if the socket is closed, or the kernel old or not Linux."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    with contextlib.suppress(OSError):
        told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.size)
        return told if len(told) == _BYTES.size else None
    return None


class Traffic:
    """The traffic of one store's connections. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: weakref.WeakKeyDictionary[socket.socket, int] = weakref.WeakKeyDictionary()
        self._moved_bytes = 0

    def watch(self, connected: socket.socket) -> None:
        """Count this connection from now on. What it moves between the last `read` and its closing is not counted."""
        if hasattr(socket, "TCP_INFO"):
            with self._lock:
                self._seen[connected] = 0

    def read(self) -> Moved | None:
        """Return the total so far and the longest round trip at present, or None if the kernel does not report them."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        round_trip_s = 0.0
        with self._lock:
            for connected, seen in list(self._seen.items()):
                if (told := _tcp_info(connected)) is None:
                    continue
                now = sum(_BYTES.unpack_from(told))
                self._seen[connected] = now
                if now > seen:
                    self._moved_bytes += now - seen
                    round_trip_s = max(round_trip_s, _ROUND_TRIP.unpack_from(told)[0] / 1e6)
            return Moved(self._moved_bytes, round_trip_s)
