"""Large bodies over TLS at the speed of the link: blocking sockets in worker threads.

Through asyncio every byte is encrypted into one buffer of memory, copied out of it, and copied again if the kernel does
not take it at once, all in the event loop: measured, 0.9 s of CPU per GiB. A blocking TLS socket encrypts straight to
the kernel, without the GIL: 0.6 s. The SDK still makes and signs the request; only the bytes go past it.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import select
import ssl
from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from ckpt_async.stores.http_ranges import MAX_ERROR_BYTES, Answer, Connections, Flight

# How long a store that refuses a body half-way may take to say why.
_LAST_WORDS_S = 1.0


class ThreadBody(Protocol):
    """A body that a worker thread can send."""

    def send_in_thread(self, write: Callable[[memoryview], object]) -> None:
        """Hand every slice to `write`, which blocks; a slice is valid until it returns."""
        ...


class Uploads(Connections):
    """PUTs of bodies."""

    async def put(self, url: str, headers: Mapping[str, str | bytes], body: ThreadBody) -> Answer:
        """One attempt. On return or raise nothing asks for slices of the body any more.

        Raises whatever the socket or `body` raise. A refusal is returned.
        """
        return await self._in_thread(lambda flight: self._put(flight, urlsplit(url), headers, body))

    # --- in a worker thread --------------------------------------------------------------------------------

    def _put(
        self, flight: Flight, url: SplitResult, headers: Mapping[str, str | bytes], body: ThreadBody
    ) -> Answer:
        connection = self._take_living(url)
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(self._read_timeout_s)
            flight.uses(connection.sock)
            target = f"{url.path}?{url.query}" if url.query else url.path
            has_host = any(name.lower() == "host" for name in headers)  # some versions of the SDK give it
            connection.putrequest("PUT", target, skip_host=has_host, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = self._send(connection, body)
            flight.uses(None)
        except BaseException:
            connection.close()
            raise
        self._put_back(connection)
        return answer

    def _send(self, connection: http.client.HTTPConnection, body: ThreadBody) -> Answer:
        def write(piece: memoryview) -> None:
            if _is_readable(connection) and (told := _last_words(connection)):
                raise _RefusedError(told)
            connection.sock.sendall(piece)

        try:
            body.send_in_thread(write)
        except _RefusedError as error:
            connection.close()
            return error.answer
        return self._answer(connection)

    def _answer(self, connection: http.client.HTTPConnection) -> Answer:
        with connection.getresponse() as response:
            told = {name.lower(): value for name, value in response.getheaders()}
            answer = Answer(response.status, told, response.read(MAX_ERROR_BYTES))
            if not response.isclosed():
                connection.close()  # what is left would be the next answer's
        return answer

    def _take_living(self, url: SplitResult) -> http.client.HTTPConnection:
        """One that the server has not closed meanwhile: a body is not sent twice in one attempt. What can be read
        between two requests is the end.
        """
        while True:
            connection, is_fresh = self._take(url)
            if is_fresh or not _is_readable(connection):
                return connection
            connection.close()


class _RefusedError(Exception):
    """The server has answered before it had the body, and may close the connection on the rest."""

    def __init__(self, told: bytes) -> None:
        super().__init__()
        response = http.client.HTTPResponse(_Received(told))  # type: ignore[arg-type]
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        self.answer = Answer(response.status, headers, response.read(MAX_ERROR_BYTES))


class _Received:
    """What http.client takes for a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _is_readable(connection: http.client.HTTPConnection) -> bool:
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _last_words(connection: http.client.HTTPConnection) -> bytes:
    """What the server has said amid the body, or nothing if it was a matter of TLS's own (a session ticket)."""
    connected, timeout_s = connection.sock, connection.sock.gettimeout()
    connected.settimeout(0)
    try:
        told = bytearray(connected.recv(MAX_ERROR_BYTES))
    except ssl.SSLWantReadError:
        connected.settimeout(timeout_s)
        return b""
    connected.settimeout(_LAST_WORDS_S)
    with contextlib.suppress(OSError):
        while len(told) < MAX_ERROR_BYTES and (more := connected.recv(MAX_ERROR_BYTES)):
            told += more
    if not told:
        raise ConnectionResetError("the server has closed the connection")
    return bytes(told)
