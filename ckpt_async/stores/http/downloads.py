"""Ranged GETs over HTTP at the speed of the link: blocking sockets in worker threads, each with one reused buffer.

aiohttp delivers a body in pieces of at most 64 KiB, each a new `bytes` object, all in the event loop. Here a thread
receives into a buffer that it reuses, and `recv_into`, the checksum and the write to disk all release the GIL. The SDK
still determines the request; only the bytes bypass it.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from urllib.parse import SplitResult, urlsplit

from ckpt_async.stores.http.connections import CancelToken, Connections, receive, receive_into
from ckpt_async.stores.http.messages import (
    HEAD_BYTES,
    Response,
    content_length,
    host_of,
    keeps_connection,
    lines_of,
    parsed,
    read_by_library,
    without_interim,
)
from ckpt_async.stores.http.tls import TlsConnection
from ckpt_async.stores.interface import Sink

# Large enough that threads writing to one file seldom wait for each other (half as often as with 256 KiB), small enough
# that a slice is still in the core's own cache when its checksum is computed and when it is written.
BUFFER_BYTES = 512 << 10

Check = Callable[[Response], None]
END = b"\r\n\r\n"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Downloads(Connections):
    """Downloads of ranges of objects into reused buffers."""

    _OVER_TLS = TlsConnection

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
            lambda token: self._get(token, urlsplit(url), offset, size_bytes, sink, check, lines_of(headers))
        )

    async def get_many(
        self,
        gets: Sequence[tuple[str, int]],
        check: Callable[[int, Response], None],
        got: Callable[[int, memoryview], None],
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> tuple[int, Response] | None:
        """GET small objects, each given by URL and size, one after the other. If one is refused, stop and return its
        index and answer. `check` sees each answer and `got` its bytes, both in a worker thread and never after this has
        returned or raised. Raises what `get_range` raises.
        """
        return await self._in_thread(lambda token: self._get_many(token, gets, check, got, lines_of(headers)))

    # --- in a worker thread --------------------------------------------------------------------------------

    def _get_many(
        self,
        token: CancelToken,
        gets: Sequence[tuple[str, int]],
        check: Callable[[int, Response], None],
        got: Callable[[int, memoryview], None],
        lines: str,
    ) -> tuple[int, Response] | None:
        for number, (url, size_bytes) in enumerate(gets):
            data = bytearray()
            answer = self._get(
                token, urlsplit(url), 0, size_bytes, data.extend, partial(check, number), lines
            )
            if answer.status >= 300:
                return number, answer
            token.uses(None, is_at_work=True)  # raises if cancelled by now
            got(number, memoryview(data))
            token.uses(None)
        return None

    def _get(
        self,
        token: CancelToken,
        url: SplitResult,
        offset: int,
        size_bytes: int,
        sink: Sink,
        check: Check,
        lines: str,
    ) -> Response:
        began = time.monotonic()
        connection, is_fresh = self._take(url)
        asked = f"{lines}Range: bytes={offset}-{offset + size_bytes - 1}\r\n"
        try:
            try:
                head, content = self._ask(token, connection, url, asked)
            except (http.client.BadStatusLine, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                if is_fresh:
                    raise
                token.uses(None)
                connection.close()  # the server had closed it between two requests
                connection = self._connect(url)
                head, content = self._ask(token, connection, url, asked)
            answer = parsed(head)
            connected: socket.socket = connection.sock
            if answer.status >= 300:
                answer = read_by_library(head + END + content, partial(self._rest_of_refusal, connected))
                connection.close()
                return answer
            check(answer)
            # The answer is chunked or has another length: leftover bytes would be taken for the next answer.
            if content_length(answer) != size_bytes:
                raise http.client.IncompleteRead(b"", size_bytes)
            self._receive(connected, content[:size_bytes], size_bytes, sink)
            token.uses(None)
            if keeps_connection(head, answer) and len(content) <= size_bytes:
                self._put_back(connection, size_bytes, time.monotonic() - began)
            else:
                connection.close()
            return answer
        except BaseException:
            connection.close()
            raise

    def _ask(
        self, token: CancelToken, connection: http.client.HTTPConnection, url: SplitResult, lines: str
    ) -> tuple[bytes, bytes]:
        """Send the request; return the head of the answer and the part of the body that came with it."""
        connected: socket.socket = connection.sock or self._dial(connection)
        token.uses(connected)
        target = f"{url.path}?{url.query}" if url.query else url.path
        connected.sendall(f"GET {target} HTTP/1.1\r\nHost: {host_of(url)}\r\n{lines}\r\n".encode("latin-1"))
        received = b""
        while True:
            head, has_ended, content = received.partition(END)
            if has_ended:
                return head, content
            if len(received) > HEAD_BYTES:
                raise http.client.LineTooLong("answer")
            if not (data := receive(connected, HEAD_BYTES, self._read_timeout_s)):
                raise http.client.RemoteDisconnected("the server closed the connection without an answer")
            received = without_interim(received + data)

    def _receive(self, connected: socket.socket, content: bytes, size_bytes: int, sink: Sink) -> None:
        """Hand over exactly `size_bytes`, which begin with `content`, in slices as large as arrive within BLOCK_S: a
        stall detector must hear of a slow link's bytes too.
        """
        buffer = memoryview(bytearray(min(BUFFER_BYTES, size_bytes)))
        filled, left = len(content), size_bytes
        buffer[:filled] = content
        while left:
            piece = buffer[: min(len(buffer), left)]
            if filled < len(piece):
                count = receive_into(connected, piece[filled:], self._read_timeout_s, socket.MSG_WAITALL)
                if not count:
                    raise http.client.IncompleteRead(b"", left)
                filled += count
            sink(piece[:filled])
            left, filled = left - filled, 0

    def _rest_of_refusal(self, connected: socket.socket) -> bytes:
        """Receive more of a refusal's body, which may be cut short: only the status matters."""
        with contextlib.suppress(OSError):
            return receive(connected, HEAD_BYTES, self._read_timeout_s)
        return b""
