"""Ranged GETs over HTTP at the speed of the link: blocking sockets in worker threads, one reused buffer each.

aiohttp hands a body over in pieces of at most 64 KiB, each a `bytes` of its own, all in the event loop. Here a thread
receives into a buffer that it uses again and again, and `recv_into`, the checksum and the write to disk all release the
GIL. The SDK still makes and signs the request, http.client reads the head of the answer; only the bytes go past both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import os
import select
import socket
import ssl
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from ckpt_async.politeness import BulkThreads
from ckpt_async.stores.http.messages import (
    HEAD_BYTES,
    Answer,
    content_length,
    host_of,
    keeps_connection,
    parsed,
    read_by_library,
    without_interim,
)
from ckpt_async.stores.interface import Sink

# Large enough that threads which write to one file seldom wait for each other (half as often as with 256 KiB), small
# enough that a slice is still in the core's own cache when its checksum is computed and when it is written.
BUFFER_BYTES = 512 << 10
# A slow link fills no buffer in this time; whoever watches for stalls wants to hear of it all the same.
FLUSH_S = 1.0
# Below what servers and what is in between (NAT, load balancers) keep a silent connection for.
MAX_IDLE_S = 30.0
T = TypeVar("T")


Check = Callable[[Answer], None]
# Waits for some bytes (or until the buffer is full, where the kernel can), puts them into the buffer, returns how many,
# 0 at the end.
Receive = Callable[[memoryview, bool], int]
END = b"\r\n\r\n"


class _CancelledError(Exception):
    """Whoever waited for the range has gone."""


class Flight:
    """One range on its way: lets the event loop break the connection beneath the thread."""

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
                # Not SSLSocket's own, after which the thread would take what is still encrypted for the body.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            return True


class Connections:
    """Keep-alive connections and the threads that use them. Whoever asks for more than `max_connections` at once waits
    for a thread.
    """

    def __init__(
        self, *, max_connections: int, connect_timeout_s: float, read_timeout_s: float, ca_file: str | None
    ) -> None:
        self._connect_timeout_s, self._read_timeout_s = connect_timeout_s, read_timeout_s
        self._ca_file = ca_file
        self._threads = BulkThreads(max_connections, "ckpt-async-http")
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []  # and since when
        self._is_closed = False

    def close(self) -> None:
        """Release connections; those of ranges still on their way when they end. Does not block."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[Flight], T]) -> T:
        """What `work` returns or raises, as `_landed`."""
        flight = Flight()
        loop = asyncio.get_running_loop()
        return await self._landed(flight, loop.run_in_executor(self._threads, work, flight))

    async def _landed(self, flight: Flight, done: asyncio.Future[T]) -> T:
        """What `done` becomes. Cancelled, the flight's connection is broken off, and its thread has let go of what it
        was given when this returns.
        """
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if flight.cancel():
                while not done.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({done})
            if not done.cancel() and not done.cancelled():
                done.exception()  # seen: the cancellation is what counts
            raise

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
        return http.client.HTTPSConnection(
            url.hostname, url.port or 443, timeout=self._connect_timeout_s, context=_trusting(self._ca_file)
        )

    def _put_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._is_closed and connection.sock is not None:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()


class Downloads(Connections):
    """Ranges of objects, received into buffers that are used again and again."""

    async def get_range(self, url: str, offset: int, size_bytes: int, sink: Sink, check: Check) -> Answer:
        """GET a range of `url`, at least one byte. `check` sees the answer before any byte reaches `sink`, which is
        called in a worker thread and never again once this has returned or raised.

        Raises whatever the socket, `check` or `sink` raise; IncompleteRead if the body is cut short. A refusal (status
        300 and above) is returned with its body.
        """
        return await self._in_thread(
            lambda flight: self._get(flight, urlsplit(url), offset, size_bytes, sink, check)
        )

    async def get_many(
        self,
        gets: Sequence[tuple[str, int]],
        check: Callable[[int, Answer], None],
        got: Callable[[int, memoryview], None],
    ) -> tuple[int, Answer] | None:
        """GET small objects, each by URL and size, one after the other, until one is refused: then its number and
        answer. `check` sees each answer, and `got` the bytes, in a worker thread and never again once this has returned
        or raised. Raises as `get_range`.
        """
        return await self._in_thread(lambda flight: self._get_many(flight, gets, check, got))

    # --- in a worker thread --------------------------------------------------------------------------------

    def _get_many(
        self,
        flight: Flight,
        gets: Sequence[tuple[str, int]],
        check: Callable[[int, Answer], None],
        got: Callable[[int, memoryview], None],
    ) -> tuple[int, Answer] | None:
        for number, (url, size_bytes) in enumerate(gets):
            data = bytearray()
            answer = self._get(flight, urlsplit(url), 0, size_bytes, data.extend, partial(check, number))
            if answer.status >= 300:
                return number, answer
            flight.uses(None, is_at_work=True)  # not if it is cancelled by now
            got(number, memoryview(data))
            flight.uses(None)
        return None

    def _get(
        self, flight: Flight, url: SplitResult, offset: int, size_bytes: int, sink: Sink, check: Check
    ) -> Answer:
        connection, is_fresh = self._take(url)
        try:
            try:
                head, content = self._ask(flight, connection, url, offset, size_bytes)
            except (http.client.BadStatusLine, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                if is_fresh:
                    raise
                flight.uses(None)
                connection.close()  # the server had closed it between two requests
                connection = self._connect(url)
                head, content = self._ask(flight, connection, url, offset, size_bytes)
            answer = parsed(head)
            receive = self._receiver(connection.sock)
            if answer.status >= 300:
                answer = read_by_library(head + END + content, lambda: _what_comes(receive))
                connection.close()
                return answer
            check(answer)
            # Chunked, or of another length: what is left would be the next answer's.
            if content_length(answer) != size_bytes:
                raise http.client.IncompleteRead(b"", size_bytes)
            self._receive(receive, content[:size_bytes], size_bytes, sink)
            flight.uses(None)
            if keeps_connection(head, answer) and len(content) <= size_bytes:
                self._put_back(connection)
            else:
                connection.close()
            return answer
        except BaseException:
            connection.close()
            raise

    def _ask(
        self,
        flight: Flight,
        connection: http.client.HTTPConnection,
        url: SplitResult,
        offset: int,
        size_bytes: int,
    ) -> tuple[bytes, bytes]:
        """The head of the answer, and what came with it."""
        is_fresh = connection.sock is None
        if is_fresh:
            dial(connection)
        connected: socket.socket = connection.sock
        if is_fresh:
            self._let_wait(connected)
        flight.uses(connected)
        target = f"{url.path}?{url.query}" if url.query else url.path
        asked = f"Host: {host_of(url)}\r\nRange: bytes={offset}-{offset + size_bytes - 1}\r\n\r\n"
        connected.sendall(f"GET {target} HTTP/1.1\r\n{asked}".encode("ascii"))
        receive, received = self._receiver(connected), b""
        while True:
            head, has_ended, content = received.partition(END)
            if has_ended:
                return head, content
            if len(received) > HEAD_BYTES:
                raise http.client.LineTooLong("answer")
            if not (data := _some(receive)):
                raise http.client.RemoteDisconnected("the server has closed the connection without an answer")
            received = without_interim(received + data)

    def _receive(self, receive: Receive, content: bytes, size_bytes: int, sink: Sink) -> None:
        """Hand over exactly `size_bytes`, which begin with `content`, in slices as large as arrive within a second."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, size_bytes)))
        filled, left = len(content), size_bytes
        buffer[:filled] = content
        while left:
            piece, flush_at = buffer[: min(len(buffer), left)], time.monotonic() + FLUSH_S
            rest, filled = piece[filled:], 0
            while rest:
                count = receive(rest, True)
                if not count:
                    raise http.client.IncompleteRead(b"", left)
                rest = rest[count:]
                if time.monotonic() >= flush_at:
                    break
            piece = piece[: len(piece) - len(rest)]
            sink(piece)
            left -= len(piece)

    def _let_wait(self, connected: socket.socket) -> None:
        """Until something has arrived. Not by Python's own timeouts, with which there are two system calls, and two
        turns with the GIL, for whatever has just arrived; TLS knows no other.
        """
        if isinstance(connected, ssl.SSLSocket):
            connected.settimeout(self._read_timeout_s)
            return
        connected.settimeout(None)
        limit = timeval(min(FLUSH_S, self._read_timeout_s))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def _receiver(self, connected: socket.socket) -> Receive:
        if isinstance(connected, ssl.SSLSocket):
            return lambda buffer, _: connected.recv_into(buffer)

        def receive(buffer: memoryview, is_all: bool) -> int:
            silent_until = time.monotonic() + self._read_timeout_s
            while True:
                try:
                    return connected.recv_into(buffer, 0, socket.MSG_WAITALL if is_all else 0)
                except BlockingIOError:
                    if time.monotonic() >= silent_until:
                        raise TimeoutError("timed out") from None

        return receive


def dial(connection: http.client.HTTPConnection) -> None:
    """Connect. Blocks."""
    connection.connect()
    notice_a_dead_peer(connection.sock)


def notice_a_dead_peer(made: socket.socket) -> None:
    """Within about a minute and a half: it keeps what is in between from forgetting the connection, too."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 45), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_unread(connected: socket.socket) -> bool:
    """Whether there is something to read, or the end."""
    if isinstance(connected, ssl.SSLSocket) and connected.pending():
        return True
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(0))


def _trusting(ca_file: str | None) -> ssl.SSLContext:
    """Shared by all connections, for reading the certificates takes 10 ms of CPU; read again when they change."""
    changed_ns = os.stat(ca_file).st_mtime_ns if ca_file else 0
    with _making_context:
        return _context(ca_file, changed_ns)


_making_context = threading.Lock()


@functools.lru_cache(maxsize=4)
def _context(ca_file: str | None, _changed_ns: int) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


def _some(receive: Receive) -> bytes:
    """What has arrived, once there is something; nothing at the end."""
    buffer = bytearray(HEAD_BYTES)
    return bytes(memoryview(buffer)[: receive(memoryview(buffer), False)])


def _what_comes(receive: Receive) -> bytes:
    """Of a refusal, whose body may be cut short: its status counts."""
    with contextlib.suppress(OSError):
        return _some(receive)
    return b""


def timeval(duration_s: float) -> bytes:
    """For the kernel's own timeouts of a socket."""
    return struct.pack("ll", int(duration_s), int(duration_s % 1 * 1e6))


def has_proxy(url: str) -> bool:
    """Whether the environment sends requests to `url` through a proxy: then the SDK's HTTP client must make them."""
    parts = urlsplit(url)
    return parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.netloc)
