"""Keep-alive connections to HTTP servers and the threads that use them, and what their sockets are told."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import http.client
import os
import select
import socket
import ssl
import struct
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from ckpt_async.niceness import BulkThreads
from ckpt_async.stores.http.traffic import Traffic
from ckpt_async.threads import result_of

# Below what servers and what is in between (NAT, load balancers) keep a silent connection for.
MAX_IDLE_S = 30.0
# Of so many bytes and more, the time says how fast a connection is; a slow one has this part of what is usual, which
# takes so many requests to know.
TELLING_BYTES, SLOW, TELLING_REQUESTS = 1 << 20, 0.25, 8
# A call on a blocking socket returns after this long at the latest, so that somebody looks at the clock.
BLOCK_S = 1.0
# What such a call raises then: on a plain socket, on TLS.
BLOCKED = (BlockingIOError, TimeoutError)

T = TypeVar("T")


class _CancelledError(Exception):
    """Whoever waited for the request has gone."""


class CancelToken:
    """Of one request: lets the event loop break the connection beneath the thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_at_work = self._is_cancelled = False

    def uses(self, connected: socket.socket | None, *, is_at_work: bool = False) -> None:
        """The thread has a connection from here on, or none any more. Only with one, or while it says that it is at
        work, does it call what it was given.
        """
        with self._lock:
            if self._is_cancelled:
                raise _CancelledError
            self._socket, self._is_at_work = connected, is_at_work

    def cancel(self) -> bool:
        """Break it off. Whether the thread may still be at the sink: else it never will be again."""
        with self._lock:
            self._is_cancelled = True
            if self._socket is None:
                return self._is_at_work
            with contextlib.suppress(OSError):
                _forget_queued(self._socket)
                # Not SSLSocket's own, after which the thread would take what is still encrypted for the body.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            return True


class Connections:
    """Keep-alive connections and the threads that use them. Whoever asks for more than `max_connections` at once waits
    for a thread. Bulk ones are as nice as the bytes that they carry (see `niceness`). `traffic` counts what moves.
    """

    _OVER_TLS: type[http.client.HTTPSConnection] = http.client.HTTPSConnection

    def __init__(
        self,
        *,
        max_connections: int,
        connect_timeout_s: float,
        read_timeout_s: float,
        ca_file: str | None,
        is_bulk: bool = True,
        traffic: Traffic | None = None,
    ) -> None:
        self._connect_timeout_s, self._read_timeout_s = connect_timeout_s, read_timeout_s
        self._ca_file, self._traffic = ca_file, traffic
        threads = BulkThreads if is_bulk else ThreadPoolExecutor
        self._threads: ThreadPoolExecutor = threads(max_connections, "ckpt-async-http")
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []  # and since when
        self._is_closed = False
        self._usual_bytes_per_s, self._num_told = 0.0, 0

    def close(self) -> None:
        """Release connections; those in use when their requests end. Does not block."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[CancelToken], T]) -> T:
        """What `work` returns or raises. Cancelled, its connection is broken off, and its thread has let go of what it
        was given when this returns.
        """
        token = CancelToken()
        try:
            done = asyncio.get_running_loop().run_in_executor(self._threads, work, token)
        except RuntimeError as error:
            token.cancel()  # an executor that cannot start a thread keeps the work for one that it has
            if self._is_closed:
                raise
            raise OSError(errno.EAGAIN, f"no thread for it: {error}") from error
        return await result_of(done, token.cancel)

    # --- in a worker thread --------------------------------------------------------------------------------

    def _take(self, url: SplitResult) -> tuple[http.client.HTTPConnection, bool]:
        """And whether it is fresh. What can be read between two requests is the end, or would pass for an answer."""
        while (idle := self._take_idle(url)) is not None:
            if not has_unread(idle.sock):
                return idle, False
            idle.close()
        return self._connect(url), True

    def _take_idle(self, url: SplitResult) -> http.client.HTTPConnection | None:
        wanted = (url.scheme == "https", url.hostname, url.port or (443 if url.scheme == "https" else 80))
        found, silent_since = None, time.monotonic() - MAX_IDLE_S
        with self._lock:
            old = [idle for idle, since in self._idle if since < silent_since]
            self._idle = [each for each in self._idle if each[1] >= silent_since]
            for index, (idle, _) in reversed(list(enumerate(self._idle))):
                if (isinstance(idle, http.client.HTTPSConnection), idle.host, idle.port) == wanted:
                    found, _ = self._idle.pop(index)
                    break
        for idle in old:
            idle.close()
        return found

    def _connect(self, url: SplitResult) -> http.client.HTTPConnection:
        """A connection that is made with its first request."""
        assert url.hostname is not None
        if url.scheme != "https":
            return http.client.HTTPConnection(url.hostname, url.port or 80, timeout=self._connect_timeout_s)
        return self._OVER_TLS(
            url.hostname, url.port or 443, timeout=self._connect_timeout_s, context=trusting(self._ca_file)
        )

    def _dial(self, connection: http.client.HTTPConnection) -> socket.socket:
        connection.connect()
        connected: socket.socket = connection.sock
        enable_keepalive(connected)
        let_block(connected, self._read_timeout_s)
        if self._traffic is not None:
            self._traffic.watch(connected)
        return connected

    def _put_back(
        self, connection: http.client.HTTPConnection, moved_bytes: int = 0, took_s: float = 1.0
    ) -> None:
        """Keep it for the next request, unless it was far slower than usual with these bytes: the last one to come
        back is the first to be taken.
        """
        rate = moved_bytes / max(took_s, 1e-6) if moved_bytes >= TELLING_BYTES else 0.0
        with self._lock:
            usual = self._usual_bytes_per_s
            is_slow = 0 < rate < SLOW * usual and self._num_told >= TELLING_REQUESTS
            if rate:
                self._num_told += 1
                self._usual_bytes_per_s = usual + (rate - usual) / 8 if usual else rate
            if not self._is_closed and connection.sock is not None and not is_slow:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()


def abort(connection: http.client.HTTPConnection) -> None:
    """Close it. What the kernel has not sent yet is not sent: on a thin link that is minutes of it."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            _forget_queued(connection.sock)
    connection.close()


def _forget_queued(connected: socket.socket) -> None:
    """When it is closed."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def unacknowledged_bytes(connected: socket.socket) -> int:
    """Of what the kernel has taken (Linux: tcp(7), SIOCOUTQ; 0 elsewhere). Raises OSError or ValueError if it is
    closed.
    """
    if not sys.platform.startswith("linux"):
        return 0
    return int.from_bytes(fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def enable_keepalive(made: socket.socket) -> None:
    """Notice a dead peer within about 90 s, and keep what is in between from forgetting the connection."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 45), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_unread(connected: socket.socket) -> bool:
    """Whether there is something to read, or the end."""
    of_tls: Callable[[], int] | None = getattr(connected, "pending", None)
    if of_tls is not None and of_tls():
        return True
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(0))


def trusting(ca_file: str | None) -> ssl.SSLContext:
    """Shared by all connections, for reading the certificates takes 10 ms of CPU; read again when they change."""
    changed_ns = os.stat(ca_file).st_mtime_ns if ca_file else 0
    with _making_context:
        return _context(ca_file, changed_ns)


def trusted_for(url: str, ca_file: str | None) -> ssl.SSLContext | bool:
    """`trusting`, for a request that aiohttp makes to `url`: without it, that keeps whom it has trusted at first."""
    return trusting(ca_file) if url.startswith("https:") else True


_making_context = threading.Lock()


@functools.lru_cache(maxsize=4)
def _context(ca_file: str | None, _changed_ns: int) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


def let_block(connected: socket.socket, timeout_s: float) -> None:
    """Let calls return when nothing has moved for BLOCK_S. Python's own timeouts make a plain socket non-blocking:
    os.sendfile does not know what to do with that, and it takes two system calls for whatever has arrived. The kernel's
    mean nothing to TLS.
    """
    limit_s = min(timeout_s, BLOCK_S)
    if isinstance(connected, ssl.SSLSocket):
        connected.settimeout(limit_s)
        return
    connected.settimeout(None)
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, limit)


def receive_into(connected: socket.socket, buffer: memoryview, timeout_s: float, flags: int = 0) -> int:
    """Wait for bytes; how many came, 0 at the end. Raises TimeoutError after `timeout_s` without any. Nobody can answer
    what is still on its way: that time counts once it has arrived, or does not get on any more.
    """
    give_up_at, queued_bytes = time.monotonic() + timeout_s, 0
    while True:
        try:
            return connected.recv_into(buffer, 0, flags)
        except BLOCKED:
            before, queued_bytes = queued_bytes, unacknowledged_bytes(connected)
            if queued_bytes != before:
                give_up_at = time.monotonic() + timeout_s
            elif time.monotonic() >= give_up_at:
                raise TimeoutError(f"no answer within {timeout_s:g} s") from None


def receive(connected: socket.socket, size_bytes: int, timeout_s: float) -> bytes:
    """`receive_into`, for a few bytes."""
    buffer = memoryview(bytearray(size_bytes))
    return bytes(buffer[: receive_into(connected, buffer, timeout_s)])


def has_proxy(url: str) -> bool:
    """Whether the environment sends requests to `url` through a proxy: then the SDK's HTTP client must make them."""
    return bool(proxy_of(url))


def proxy_of(url: str) -> str:
    """The proxy, without the name and password that may be in its URL; "" if there is none."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    return proxy.rpartition("@")[2] if proxy and not urllib.request.proxy_bypass(parts.netloc) else ""
