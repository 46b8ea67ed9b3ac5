"""Keep-alive connections to HTTP servers, the threads that use them, and the options of their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import http.client
import math
import os
import select
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import SplitResult

from ckpt_async.niceness import BulkThreads
from ckpt_async.stores.http.proxies import proxy_url, send_through
from ckpt_async.stores.http.tls import BLOCK_S, BLOCKED, trusting
from ckpt_async.stores.http.traffic import Traffic
from ckpt_async.threads import answering, result_of

# How long an idle connection is kept for the next request. Many servers close theirs after 5 s or more, and a request
# that meets the end of its connection has to be made again.
KEEPALIVE_S = 5.0
# Transfers of at least TELLING_BYTES measure how fast a connection is. Once TELLING_REQUESTS of them have shown what is
# usual, a connection slower than SLOW times that is closed.
TELLING_BYTES, SLOW, TELLING_REQUESTS = 1 << 20, 0.25, 8

T = TypeVar("T")


class _CancelledError(Exception):
    """The request was cancelled: nobody waits for it any more."""


class CancelToken:
    """Cancels one request: lets the event loop break the connection that the request's thread is using."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_at_work = self._is_cancelled = False

    def uses(self, connected: socket.socket | None, *, is_at_work: bool = False) -> None:
        """Record that the thread now uses this connection, or none. The thread may call its callbacks only while it has
        a connection or has declared itself at work.
        """
        with self._lock:
            if self._is_cancelled:
                raise _CancelledError
            self._socket, self._is_at_work = connected, is_at_work

    def cancel(self) -> bool:
        """Break the connection. Return whether the thread may still be in one of its callbacks; if not, it will never
        call one again.
        """
        with self._lock:
            self._is_cancelled = True
            if self._socket is None:
                return self._is_at_work
            with contextlib.suppress(OSError):
                _forget_queued(self._socket)
                # Not SSLSocket.shutdown: after that, the thread would take bytes that are still encrypted for the body.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            if (hang_up := getattr(self._socket, "hang_up", None)) is not None:
                hang_up()  # another process may not answer
            return True


class Connections:
    """Keep-alive connections and the threads that use them. A request beyond `max_connections` waits for a thread.
    Threads of bulk connections are as nice as other threads that carry bytes (see `niceness`). `traffic` counts the
    bytes moved.
    """

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
        # With the time since when each is idle.
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the requests
        self._is_closing_idle = False  # whether the loop will call _close_old
        self._is_closed = False
        self._usual_bytes_per_s, self._num_told = 0.0, 0
        self._proxies: dict[str, str] = {}  # for each origin: a look-up searches the whole environment

    def close(self) -> None:
        """Close the idle connections now, and those in use when their requests end. Does not block."""
        with self._lock:
            self._is_closed = True
        self._drop_silent_since(math.inf)
        self._threads.shutdown(wait=False)

    def _drop_silent_since(self, latest: float) -> None:
        with self._lock:
            old = [idle for idle, since in self._idle if since <= latest]
            self._idle = [each for each in self._idle if each[1] > latest]
        for connection in old:
            connection.close()

    async def _in_thread(self, work: Callable[[CancelToken], T]) -> T:
        """Return or raise what `work` does. If cancelled, break its connection, and return only once its thread has let
        go of everything it was given.
        """
        token, self._loop = CancelToken(), asyncio.get_running_loop()
        try:
            done = self._loop.run_in_executor(self._threads, answering(work), token)
        except RuntimeError as error:
            # An executor that cannot start a thread leaves the work queued for its other threads.
            token.cancel()
            if self._is_closed:
                raise
            raise OSError(errno.EAGAIN, f"no thread can be started for it: {error}") from error
        return await result_of(done, token.cancel)

    def _close_old(self) -> None:
        """Close what has been idle for too long, now and every KEEPALIVE_S, until nothing is idle."""
        self._drop_silent_since(time.monotonic() - KEEPALIVE_S)
        with self._lock:
            self._is_closing_idle = bool(self._idle)
        if self._is_closing_idle:
            assert self._loop is not None
            self._loop.call_later(KEEPALIVE_S, self._close_old)

    # --- in a worker thread --------------------------------------------------------------------------------

    def _take(self, url: SplitResult) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection and whether it is fresh. Anything readable on an idle connection is either its end or
        would be mistaken for the next answer, so such a connection is closed.
        """
        while (idle := self._take_idle(url)) is not None:
            if not has_unread(idle.sock):
                return idle, False
            idle.close()
        return self._connect(url), True

    def _take_idle(self, url: SplitResult) -> http.client.HTTPConnection | None:
        wanted = (url.scheme == "https", url.hostname, url.port or (443 if url.scheme == "https" else 80))
        self._drop_silent_since(time.monotonic() - KEEPALIVE_S)
        with self._lock:
            for index, (idle, _) in reversed(list(enumerate(self._idle))):
                if (isinstance(idle, http.client.HTTPSConnection), idle.host, idle.port) == wanted:
                    return self._idle.pop(index)[0]
        return None

    def _connect(self, url: SplitResult) -> http.client.HTTPConnection:
        """Return a connection that is not established yet; `_dial` does that."""
        assert url.hostname is not None
        made: http.client.HTTPConnection
        if url.scheme == "https":
            made = self._over_tls(url.hostname, url.port or 443)
        else:
            made = http.client.HTTPConnection(url.hostname, url.port or 80, timeout=self._connect_timeout_s)
        origin = f"{url.scheme}://{url.netloc}"
        if (proxy := self._proxies.get(origin)) is None:
            proxy = self._proxies[origin] = proxy_url(origin)
        if proxy:
            send_through(proxy, made, url)
        return made

    def _over_tls(self, host: str, port: int) -> http.client.HTTPSConnection:
        context = trusting(self._ca_file)
        return http.client.HTTPSConnection(host, port, timeout=self._connect_timeout_s, context=context)

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
        """Keep the connection for the next request, unless it was far slower than usual with these bytes. The
        connection returned last is reused first.
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
                self._have_old_closed()
                return
        connection.close()

    def _have_old_closed(self) -> None:
        """See to it that the loop calls `_close_old`. The lock is held."""
        if not self._is_closing_idle and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._loop.call_later, KEEPALIVE_S, self._close_old)
                self._is_closing_idle = True


def abort(connection: http.client.HTTPConnection) -> None:
    """Close the connection and drop what the kernel has not sent yet: on a slow link that could be minutes of data."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            _forget_queued(connection.sock)
    connection.close()


def _forget_queued(connected: socket.socket) -> None:
    """Make a later close drop what the kernel has not sent yet."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def unacknowledged_bytes(connected: socket.socket) -> int:
    """Return how many of the bytes that the kernel has taken are unacknowledged (Linux: tcp(7), SIOCOUTQ; 0 elsewhere).
    Raises OSError or ValueError if the socket is closed.
    """
    if not sys.platform.startswith("linux"):
        return 0
    return int.from_bytes(fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def enable_keepalive(made: socket.socket) -> None:
    """Detect a dead peer within about 90 s, and keep middleboxes from forgetting the connection."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 45), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_unread(connected: socket.socket) -> bool:
    """Return whether there is something to read, be it data or the end of the stream."""
    of_tls: Callable[[], int] | None = getattr(connected, "pending", None)
    if of_tls is not None and of_tls():
        return True
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(0))


def trusted_for(url: str, ca_file: str | None) -> ssl.SSLContext | bool:
    """Return the TLS context for a request that aiohttp makes to `url`. On its own, aiohttp would keep using the
    certificates that it read first.
    """
    return trusting(ca_file) if url.startswith("https:") else True


def let_block(connected: socket.socket, timeout_s: float) -> None:
    """Let socket calls return when nothing has moved for BLOCK_S. The kernel does the waiting: with Python's own
    timeouts the socket would be non-blocking, which os.sendfile cannot handle, and for which every wait would be
    another system call and another hand-over of the GIL.
    """
    limit_s = min(timeout_s, BLOCK_S)
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, limit)
    _block(connected)


def _block(connected: socket.socket) -> None:
    """Let the kernel block, and let Python pass on at once that it has not moved anything for too long."""
    if isinstance(connected, ssl.SSLSocket):
        connected.settimeout(0)  # a TLS socket without a timeout would try again for ever
        os.set_blocking(connected.fileno(), True)
    else:
        connected.settimeout(None)


@contextlib.contextmanager
def without_blocking(connected: socket.socket) -> Iterator[None]:
    """Let socket calls return at once, on a socket of `let_block`."""
    connected.settimeout(0)
    try:
        yield
    finally:
        _block(connected)


def receive_into(connected: socket.socket, buffer: memoryview, timeout_s: float, flags: int = 0) -> int:
    """Wait for bytes and return how many came, 0 at the end of the stream. Raises TimeoutError as `in_time` does."""
    return in_time(connected, lambda: connected.recv_into(buffer, 0, flags), timeout_s)


def in_time(connected: socket.socket, receive: Callable[[], int], timeout_s: float) -> int:
    """Return what `receive` does as soon as it is not BLOCKED. Raises TimeoutError after `timeout_s` in which it was.
    The server cannot answer a request that is still in transit, so the time starts anew whenever the amount of
    unacknowledged data changes.
    """
    give_up_at, queued_bytes = time.monotonic() + timeout_s, 0
    while True:
        try:
            return receive()
        except BLOCKED:
            before, queued_bytes = queued_bytes, unacknowledged_bytes(connected)
            if queued_bytes != before:
                give_up_at = time.monotonic() + timeout_s
            elif time.monotonic() >= give_up_at:
                raise TimeoutError(f"no answer within {timeout_s:g} s") from None


def receive(connected: socket.socket, size_bytes: int, timeout_s: float) -> bytes:
    """Receive a few bytes, as `receive_into` does."""
    buffer = memoryview(bytearray(size_bytes))
    return bytes(buffer[: receive_into(connected, buffer, timeout_s)])
