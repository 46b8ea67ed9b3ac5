"""Ranged GETs over HTTP at the speed of the link: blocking sockets in worker threads, each with one reused buffer.

aiohttp delivers a body in pieces of at most 64 KiB, each a new `bytes` object, all in the event loop. Here a thread
receives into a buffer that it reuses, and `recv_into`, the checksum and the write to disk all release the GIL. The SDK
still determines the request; only the bytes bypass it.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import mmap
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from ckpt_async.stores.http.connections import CancelToken, Connections, in_time, receive_into
from ckpt_async.stores.http.messages import (
    HEAD_BYTES,
    Response,
    content_length,
    end_of_interim,
    host_of,
    keeps_connection,
    lines_of,
    parsed,
    read_by_library,
)
from ckpt_async.stores.http.offload import Offload, OffloadedConnection, OffloadedSocket
from ckpt_async.stores.http.proxies import told
from ckpt_async.stores.http.tls import TlsSocket, trusting
from ckpt_async.stores.interface import Sink

# Large enough that threads writing to one file seldom wait for each other (half as often as with 256 KiB), small enough
# that a slice is still in the core's own cache when its checksum is computed and when it is written.
BUFFER_BYTES = 512 << 10

Check = Callable[[Response], None]
END = b"\r\n\r\n"
# What one connection needs.
MEMORY_BYTES = HEAD_BYTES + len(END) + BUFFER_BYTES
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Downloads(Connections):
    """Downloads of ranges of objects into reused buffers."""

    def __init__(self, *, offload: Offload | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._offload = offload or Offload()

    def close(self) -> None:
        super().close()
        self._offload.close()

    def _over_tls(self, host: str, port: int) -> http.client.HTTPSConnection:
        timeout_s = self._connect_timeout_s
        if (process := self._offload.process()) is not None:
            return OffloadedConnection(host, port, timeout_s, process, self._ca_file, MEMORY_BYTES)
        return TlsConnection(host, port, timeout=timeout_s, context=trusting(self._ca_file))

    def _put_back(
        self, connection: http.client.HTTPConnection, moved_bytes: int = 0, took_s: float = 1.0
    ) -> None:
        if isinstance(connection, TlsConnection):
            self._offload.moved(moved_bytes)
            if self._offload.is_running:
                connection.close()  # the next one is handed to a process
                return
        super()._put_back(connection, moved_bytes, took_s)

    async def get_range(
        self,
        url: str,
        offset: int,
        size_bytes: int,
        sink: Sink,
        check: Check,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Response:
        """GET a range of `url` of at least one byte. `check` sees the answer before any byte reaches `sink`, which is
        called in a worker thread and never after this has returned or raised.

        Raises whatever the socket, `check` or `sink` raise, and IncompleteRead if the body is cut short. A refusal
        (status 300 and above) is returned with its body.
        """
        return await self._in_thread(
            lambda token: self._get_range(token, url, offset, size_bytes, sink, check, lines_of(headers))
        )

    # --- in a worker thread --------------------------------------------------------------------------------

    def _get_range(
        self,
        token: CancelToken,
        url: str,
        offset: int,
        size_bytes: int,
        sink: Sink,
        check: Check,
        lines: str,
    ) -> Response:
        began = time.monotonic()
        buffer = _Buffer(min(BUFFER_BYTES, size_bytes), self._read_timeout_s)
        origin = urlsplit(url)
        connection, is_fresh = self._take(origin)
        request = request_for(url, offset, size_bytes, lines)
        try:
            try:
                head = self._ask(token, connection, request, buffer)
            except (http.client.BadStatusLine, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                if is_fresh:
                    raise
                token.uses(None)
                connection.close()  # the server had closed it between two requests
                connection = self._connect(origin)
                head = self._ask(token, connection, request, buffer)
            answer = parsed(head)
            if answer.status >= 300:
                answer = read_by_library(head + END + buffer.received, buffer.rest_of_refusal)
                connection.close()
                return answer
            check(answer)
            # The answer is chunked or has another length: leftover bytes would be taken for the next answer.
            if content_length(answer) != size_bytes:
                raise http.client.IncompleteRead(b"", size_bytes)
            is_last = len(buffer.received) > size_bytes or not keeps_connection(head, answer)
            for piece in buffer.pieces(size_bytes):
                sink(piece)
            token.uses(None)
            if is_last:
                connection.close()
            else:
                self._put_back(connection, size_bytes, time.monotonic() - began)
            return answer
        except BaseException:
            connection.close()
            raise

    def _ask(
        self, token: CancelToken, connection: http.client.HTTPConnection, request: bytes, buffer: _Buffer
    ) -> bytes:
        """Send the request; return the head of the answer. The part of the body that came with it is in `buffer`."""
        connected: socket.socket = connection.sock or self._dial(connection)
        token.uses(connected)
        connected.sendall(told(connection, request))
        return buffer.receive_head(connected)


class TlsConnection(http.client.HTTPSConnection):
    """An HTTPS connection over a TlsSocket."""

    def __init__(self, host: str, port: int, *, timeout: float, context: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._tls_context = context

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = TlsSocket(self.sock, self._tls_context, self.host)


class _Buffer:
    """The bytes of one answer at a time, received in place: its head, and then up to `room_bytes` of its body."""

    def __init__(self, room_bytes: int, timeout_s: float) -> None:
        self._room_bytes, self._timeout_s = room_bytes, timeout_s
        self._size_bytes = HEAD_BYTES + len(END) + room_bytes
        self._connected: socket.socket
        self._data: bytearray | mmap.mmap  # the connection's own, if another process receives into it
        self._view = memoryview(b"")
        self._start = self._end = 0

    @property
    def received(self) -> memoryview:
        """What has arrived of the body and was not taken yet; valid until more is received."""
        return self._view[self._start : self._end]

    def receive_head(self, connected: socket.socket) -> bytes:
        """Receive the next answer's head, and return it without the empty line at its end."""
        self._connected, self._start, self._end = connected, 0, 0
        if isinstance(connected, OffloadedSocket):
            self._data = connected.memory
        else:
            self._data = bytearray(self._size_bytes)
        self._view = memoryview(self._data)[: self._size_bytes]
        while True:
            count = self._receive(self._end, self._size_bytes)
            if not count:
                raise http.client.RemoteDisconnected("the server closed the connection without an answer")
            self._end += count
            self._start = end_of_interim(self._view, self._start, self._end)
            end = self._data.find(END, self._start, self._end)
            if (self._end if end < 0 else end) > HEAD_BYTES:
                raise http.client.LineTooLong("answer")
            if end >= 0:
                head, self._start = bytes(self._view[self._start : end]), end + len(END)
                return head

    def pieces(self, size_bytes: int) -> Iterator[memoryview]:
        """Yield exactly `size_bytes` of the body, in slices as large as arrive within BLOCK_S: a stall detector must
        hear of a slow link's bytes too. Each is valid until the next.
        """
        left = size_bytes
        while left:
            if self._start == self._end:
                self._start = self._end = 0
            piece = self._view[self._start :][: min(self._room_bytes, left)]
            filled = min(self._end - self._start, len(piece))
            if filled < len(piece):
                end = self._start + len(piece)
                if not (count := self._receive(self._start + filled, end, socket.MSG_WAITALL)):
                    raise http.client.IncompleteRead(b"", left)
                filled += count
                self._end = self._start + filled
            self._start, left = self._start + filled, left - filled
            yield piece[:filled]

    def _receive(self, start: int, end: int, flags: int = 0) -> int:
        """Receive into this part of the buffer."""
        connected = self._connected
        if isinstance(connected, OffloadedSocket):
            return in_time(connected, lambda: connected.receive_at(start, end, flags), self._timeout_s)
        return receive_into(connected, self._view[start:end], self._timeout_s, flags)

    def rest_of_refusal(self) -> bytes:
        return rest_of_refusal(self._connected, self._view, self._timeout_s)


def rest_of_refusal(connected: socket.socket, room: memoryview, timeout_s: float) -> bytes:
    """Receive more of a refusal's body, which may be cut short: only the status matters."""
    with contextlib.suppress(OSError):
        return bytes(room[: receive_into(connected, room, timeout_s)])
    return b""


def request_for(url: str, offset: int, size_bytes: int, lines: str) -> bytes:
    """Return a GET of a range of `url`, with these header lines."""
    end = url.find("/", url.index("://") + len("://"))
    origin, target = (url[:end], url[end:]) if end >= 0 else (url, "/")
    return (
        f"GET {target} HTTP/1.1\r\nHost: {_host_of(origin)}\r\n{lines}"
        f"Range: bytes={offset}-{offset + size_bytes - 1}\r\n\r\n"
    ).encode("latin-1")


@functools.lru_cache(maxsize=64)  # there are few, and parsing a URL is a noticeable part of a small request
def _host_of(origin: str) -> str:
    return host_of(urlsplit(origin))
