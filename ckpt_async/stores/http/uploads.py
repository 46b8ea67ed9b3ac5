"""Sending bodies at the speed of the link: blocking sockets in worker threads.

Through asyncio, every byte of a TLS connection is encrypted into a buffer, copied out of it, and copied again if the
kernel does not take it at once, all in the event loop: measured, 0.9 s of CPU per GiB. A blocking TLS socket encrypts
straight to the kernel, without the GIL: 0.6 s. A plain socket has the kernel send the file's pages, in few system
calls. The SDK still determines the request; only the bytes bypass it.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import SplitResult, urlsplit

from ckpt_async.stores.bodies import check_complete
from ckpt_async.stores.http.connections import (
    CancelToken,
    Connections,
    abort,
    has_unread,
    receive,
    unacknowledged_bytes,
    without_blocking,
)
from ckpt_async.stores.http.messages import (
    HEAD_BYTES,
    Response,
    UnusualResponseError,
    complete_response,
    host_of,
    lines_of,
    read_by_library,
    without_interim,
)
from ckpt_async.stores.http.proxies import told
from ckpt_async.stores.http.tls import BLOCKED
from ckpt_async.stores.http.traffic import acknowledged_bytes
from ckpt_async.stores.interface import Body

_UNREACHABLE = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN}
)
# How often to check, in the middle of a body, whether the store has answered. Until the socket accepts no more data,
# there is no hurry.
LISTEN_S = 0.1
_MAX_POLL_S = 60.0  # poll(2) takes milliseconds, as an int


class Uploads(Connections):
    """PUTs (or POSTs) of bodies."""

    async def put(
        self, url: str, headers: Mapping[str, str | bytes], body: Body, *, method: str = "PUT"
    ) -> Response:
        """Make one attempt. Once this has returned or raised, nothing asks the body for slices any more.

        Raises whatever the socket or `body` raise. A refusal is returned.
        """
        head = head_of(urlsplit(url), headers, method)
        return await self._in_thread(lambda token: self._put(token, head, urlsplit(url), body))

    # --- in a worker thread --------------------------------------------------------------------------------

    def _put(self, token: CancelToken, head: bytes, url: SplitResult, body: Body) -> Response:
        began = time.monotonic()
        connection, is_fresh = self._take(url)  # a body is never sent twice in one attempt
        try:
            connected = self._dial(connection) if is_fresh else connection.sock
            token.uses(connected)
            answer, is_last = Exchange(connected, self._read_timeout_s).make(told(connection, head), body)
            token.uses(None)
        except BaseException:
            abort(connection)
            raise
        if is_last:
            connection.close()
        else:
            self._put_back(connection, body.size_bytes, time.monotonic() - began)
        return answer


class Exchange:
    """One request and its answer. It is also the BodyWriter of the request's body."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket, self._timeout_s = connected, timeout_s
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._head = b""  # of the request, until it is sent
        self._sent_bytes = 0  # of the body
        self._received = b""
        self._listen_at = 0.0

    def make(self, head: bytes, body: Body) -> tuple[Response, bool]:
        """Send the request; return the answer and whether it is the connection's last."""
        self._head = head
        try:
            body.send(self)
            if self._head:
                self.write(memoryview(b""))
        except _AnsweredError:
            return self._refusal(), True
        check_complete(body, self._sent_bytes)
        return self._answer()

    def read_on(self, received: bytes, *, is_amid_body: bool) -> Response:
        """Read the rest of the answer that begins with `received`. The connection cannot be used after that."""
        self._received = received
        return self._refusal() if is_amid_body else self._answer()[0]

    # --- BodyWriter ----------------------------------------------------------------------------------------

    @property
    def takes_files(self) -> bool:
        return not self._is_tls

    def write(self, piece: memoryview) -> None:
        self._sent_bytes += len(piece)
        if self._head:
            head = self._begin()
            if not self._is_tls:
                # Send both in one packet and with one system call.
                sent = self._until_some(lambda: self._socket.sendmsg([head, piece]))
                head, piece = head[sent:], piece[max(0, sent - len(head)) :]
            self._send_all(memoryview(head))
        else:
            self._listen_now_and_then()
        self._send_all(piece)

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> int:
        if self._head:
            self._send_all(memoryview(self._begin()), socket.MSG_MORE if hasattr(socket, "MSG_MORE") else 0)
        else:
            self._listen_now_and_then()
        connected = self._socket.fileno()
        count = self._until_some(lambda: os.sendfile(connected, descriptor, offset, size_bytes))
        self._sent_bytes += count
        return count

    def wait(self, duration_s: float) -> None:
        """Wait, but stop as soon as there is something to read, if only that the connection was broken."""
        until = time.monotonic() + duration_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            if poll.poll(min(left_s, _MAX_POLL_S) * 1000):
                self._listen()

    def queued_bytes(self) -> int:
        with contextlib.suppress(OSError, ValueError):  # the socket is closed
            return unacknowledged_bytes(self._socket)
        return 0

    def acknowledged_bytes(self) -> int | None:
        return acknowledged_bytes(self._socket)

    def _begin(self) -> bytes:
        """Return the head, which is about to be sent."""
        head, self._head = self._head, b""
        self._listen_at = time.monotonic() + LISTEN_S
        return head

    def _send_all(self, piece: memoryview, flags: int = 0) -> None:
        while piece:
            piece = piece[self._until_some(partial(self._socket.send, piece, flags)) :]

    def _until_some(self, send: Callable[[], int]) -> int:
        """Call `send` until the socket takes something, and return what `send` returned. A TLS socket takes a piece
        only as a whole, which may take long; as long as the peer acknowledges bytes, they move.
        """
        give_up_at, acknowledged = 0.0, None
        while True:
            try:
                return send()
            except BLOCKED:
                before, acknowledged = acknowledged, self.acknowledged_bytes()
                if not give_up_at or acknowledged != before:
                    give_up_at = time.monotonic() + self._timeout_s
            except OSError as error:
                if not _is_of_connection(error):
                    raise
                self._listen()  # the store may have said why
                raise ConnectionError(f"the connection broke: {error}") from error
            self._listen()
            if time.monotonic() >= give_up_at:
                raise TimeoutError(f"the store accepted no data for {self._timeout_s:g} s")

    def _listen_now_and_then(self) -> None:
        now = time.monotonic()
        if now >= self._listen_at:
            self._listen_at = now + LISTEN_S
            self._listen()

    def _listen(self) -> None:
        """Raise _AnsweredError if the store has answered before it has the whole body: it may never read the rest."""
        if has_unread(self._socket):
            self._received = without_interim(self._received + self._receive_what_is_there())
            if self._received:
                raise _AnsweredError

    def _receive_what_is_there(self) -> bytes:
        """Receive what is available; nothing if that was only a message of TLS itself (a session ticket)."""
        try:
            with without_blocking(self._socket):
                data = self._socket.recv(HEAD_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return b""
        except OSError as error:
            raise ConnectionError(f"the connection broke: {error}") from error
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    # --- the answer ----------------------------------------------------------------------------------------

    def _answer(self) -> tuple[Response, bool]:
        while True:
            self._received = without_interim(self._received)
            try:
                if (found := complete_response(self._received)) is not None:
                    return found
            except UnusualResponseError:
                return read_by_library(self._received, self._receive), True
            if not (data := self._receive()):
                raise http.client.RemoteDisconnected("the server closed the connection without an answer")
            self._received += data

    def _refusal(self) -> Response:
        """Read an answer that came in the middle of the body. It may be cut short, and its end may never come."""

        def receive_some() -> bytes:
            with contextlib.suppress(OSError):
                return self._socket.recv(HEAD_BYTES)  # waits for BLOCK_S at most
            return b""

        answer = read_by_library(self._received, receive_some)
        if answer.status < 300:
            raise ConnectionError(f"the store answered {answer.status} before it had received the whole body")
        return answer

    def _receive(self) -> bytes:
        return receive(self._socket, HEAD_BYTES, self._timeout_s)


class _AnsweredError(Exception):
    """The server has answered before it had the whole body, and may close the connection on the rest."""


def head_of(url: SplitResult, headers: Mapping[str, str | bytes], method: str = "PUT") -> bytes:
    target = f"{url.path}?{url.query}" if url.query else url.path
    if not any(name.lower() == "host" for name in headers):
        headers = {"Host": host_of(url), **headers}  # some versions of the SDK set it themselves
    return f"{method} {target} HTTP/1.1\r\n{lines_of(headers)}\r\n".encode("latin-1")


def _is_of_connection(error: OSError) -> bool:
    """Return whether the error is the connection's, not that of the file that the kernel was asked to send."""
    return isinstance(error, ConnectionError | ssl.SSLError) or error.errno in _UNREACHABLE
