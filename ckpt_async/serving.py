"""HTTP servers beside a training process: few connections, none of them for ever."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections import Counter
from typing import Any

HANG_UP_S = 0.2


class BoundedServer(socketserver.ThreadingMixIn, socketserver.BaseServer):
    """A server with a thread for each of at most `max_connections` connections: each takes a descriptor too. Beyond
    that, a new one replaces an existing one. A connection is closed after `request_s`, unless it is allowed more.
    """

    daemon_threads = True
    request_queue_size = 128
    max_connections = 32
    request_s = 30.0

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(self.max_connections)
        self._until_s: dict[socket.socket, float] = {}  # open connections, oldest first
        super().__init__(*args)

    def allow(self, request: socket.socket, for_s: float) -> None:
        """Let a connection go on for so long from now, unless it is being closed."""
        with self._lock:
            if request in self._until_s:
                self._until_s[request] = time.monotonic() + for_s

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for one connection. Called on the accepting thread."""
        if not self._places.acquire(blocking=False) and not self._take_place():
            return self.shutdown_request(request)
        with self._lock:
            self._until_s[request] = time.monotonic() + self.request_s
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._until_s.pop(request, None)
        self._places.release()

    def service_actions(self) -> None:
        """Close connections whose time is up. Called whenever the server polls."""
        now = time.monotonic()
        with self._lock:
            late = [each for each, until_s in self._until_s.items() if now > until_s]
        for each in late:
            self._hang_up(each)

    def _take_place(self) -> bool:
        """Close the oldest connection of the client that has the most, and take its place.

        This way nobody who takes all places can shut out a probe.
        """
        while True:
            with self._lock:
                hosts = {each: _host_of(each) for each in self._until_s}
            if not hosts:
                return False  # those that were closed are still finishing
            num = Counter(hosts.values())
            self._hang_up(max(hosts, key=lambda each: num[hosts[each]]))
            if self._places.acquire(timeout=HANG_UP_S):
                return True

    def _hang_up(self, request: socket.socket) -> None:
        """Shut the connection down; its thread notices, and closes it."""
        with self._lock:
            self._until_s.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


def _host_of(connected: socket.socket) -> str:
    try:
        return str(connected.getpeername()[0])
    except OSError:  # the client has gone
        return ""
