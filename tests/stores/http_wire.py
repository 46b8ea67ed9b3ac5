"""Servers and clients of one scheme, and possible answers of servers to a body."""

import contextlib
import random
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from typing import Any

from ckpt_async.errors import FailureReason, SourceError
from ckpt_async.stores.http import messages
from ckpt_async.stores.http import uploads as http_bodies
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.http.uploads import Uploads
from ckpt_async.stores.interface import BodyWriter
from tests.stores.ambiguous import AMBIGUOUS
from tests.stores.http_server import PATIENCE_S, Server, Talk, request_of

MIB = 1 << 20


DATA = random.Random(1).randbytes(3 * MIB + 17)


LONG = DATA * 8  # more than a loopback connection buffers before anyone reads


DONE = b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 2\r\n\r\nok'


REFUSED = b"HTTP/1.1 503 X\r\nContent-Length: 8\r\nConnection: close\r\n\r\nSlowDown"


LAST = REFUSED.replace(b"503 X", b"200 OK")


BROKEN = (OSError, http_bodies.http.client.HTTPException)


class Slices:
    """A body with one reused buffer that records whether, and in which threads, it is being sent."""

    def __init__(self, data: bytes = DATA, good_bytes: int | None = None, slice_bytes: int = 1 << 16) -> None:
        self._data, self._good_bytes = data, len(data) if good_bytes is None else good_bytes
        self._slice_bytes, self.size_bytes = slice_bytes, len(data)
        self.is_being_sent = False
        self.threads: set[str] = set()

    def send(self, writer: BodyWriter) -> None:
        self.is_being_sent = True
        self.threads.add(threading.current_thread().name)
        buffer = bytearray(self._slice_bytes)
        try:
            for start in range(0, len(self._data), len(buffer)):
                if start >= self._good_bytes:
                    raise SourceError("it was overwritten", reason=FailureReason.SOURCE_CHANGED)
                piece = self._data[start : start + len(buffer)]
                buffer[: len(piece)] = piece
                writer.write(memoryview(buffer)[: len(piece)])
        finally:
            self.is_being_sent = False


class Wire:
    """Servers and clients that share a scheme."""

    def __init__(self, scheme: str, tls: ssl.SSLContext, ca_file: str) -> None:
        self._scheme, self._tls, self._ca_file = scheme, tls if scheme == "https" else None, ca_file

    def server(self, talk: Talk) -> Server:
        return Server(talk, self._tls)

    def url(self, server: Server, key: str = "key?partNumber=1") -> str:
        return f"{self._scheme}://localhost:{server.port}/{key}"

    @contextlib.asynccontextmanager
    async def uploads(self, **options: Any) -> AsyncIterator[Uploads]:
        settings = {"max_connections": 4, "connect_timeout_s": 5.0, "read_timeout_s": PATIENCE_S}
        uploads = Uploads(**{**settings, **options}, ca_file=self._ca_file)
        try:
            yield uploads
        finally:
            uploads.close()

    async def put(self, uploads: Uploads, server: Server, body: Slices | None = None) -> Response:
        body = body or Slices()
        headers = {"Content-Length": str(body.size_bytes), "x-amz-meta": b"kept"}
        return await uploads.put(self.url(server), headers, body)


def receive(near: socket.socket, size_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < size_bytes and (data := near.recv(min(1 << 16, size_bytes - len(found)))):
        found += data
    return bytes(found)


def say_last(near: socket.socket, answer: bytes) -> None:
    """Send the answer before an immediate close, which would lose bytes still waiting for an acknowledgement."""
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    near.sendall(answer)


def takes_all(received: list[bytes], num_times: int = 100, answer: bytes = DONE) -> Talk:
    """Accept this many bodies on each connection, then close it silently."""

    def talk(near: socket.socket) -> None:
        for _ in range(num_times):
            head = request_of(near)
            received.extend((head, receive(near, content_length(head))))
            near.sendall(answer)

    return talk


def content_length(head: bytes) -> int:
    return int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])


GOOD_ANSWERS = {
    "usual": (DONE, 200, b"ok", True),
    "spelled otherwise": (b"HTTP/1.1 200\r\netag:e\r\nCONTENT-LENGTH:  2 \r\n\r\nok", 200, b"ok", True),
    "after others": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nX: y\r\n\r\n" + DONE,
        200,
        b"ok",
        True,
    ),
    "refusal": (REFUSED.replace(b"Connection: close\r\n", b""), 503, b"SlowDown", True),
    "last": (LAST, 200, b"SlowDown", False),
    "of the old protocol": (DONE.replace(b"1.1", b"1.0"), 200, b"ok", False),
    "more than it says": (DONE + b"!", 200, b"ok", False),
    "chunked": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        200,
        b"ok",
        False,
    ),
    "without a body": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", False),
    "without a length": (b"HTTP/1.1 200 OK\r\n\r\nok", 200, b"ok", False),
    "large": (
        b"HTTP/1.1 400 No\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000),
        400,
        bytes(messages.MAX_ERROR_BYTES),
        False,
    ),
}


BAD_ANSWERS = AMBIGUOUS | {
    "nothing": b"",
    "cut in the head": DONE[:20],
    "cut in the body": DONE[:-1],
    "cut in a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok",
    "only others": b"HTTP/1.1 100 Continue\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    "a chunk of less than nothing": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n",
}
