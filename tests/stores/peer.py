"""A scripted HTTP server on loopback, for what a real S3 server cannot be made to do."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def answer(status: int, code: str = "", headers: dict[str, str] | None = None, body: bytes = b"") -> bytes:
    """Return an HTTP answer, with an S3 error body if `code` is given."""
    if code:
        body = f"<Error><Code>{code}</Code><Message>because</Message></Error>".encode()
    lines = {"Content-Length": str(len(body)), "Date": "Sat, 21 Nov 2026 04:00:00 GMT", **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body


RESET = b"reset"
SILENCE = b"silence"


@dataclass
class Peer:
    """A server that answers with `respond(request)`: bytes to send, RESET or SILENCE.

    After `stop_after` bytes of a body it stops reading and responds. With `tls` it speaks HTTPS.
    """

    respond: Callable[[Request], bytes]
    stop_after: int | None = None
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def serve(self):
        tasks: set[asyncio.Task] = set()

        async def accept(reader, writer):
            tasks.add(asyncio.current_task())
            self.num_connections += 1
            self.num_open += 1
            try:
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    while await self._serve_one(reader, writer):
                        pass
            finally:
                self.num_open -= 1
                if not self.num_open:
                    self.all_closed.set()
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=self.tls)
        try:
            port = server.sockets[0].getsockname()[1]
            yield f"http{'s' if self.tls else ''}://127.0.0.1:{port}"
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.wait_closed()

    async def _serve_one(self, reader, writer) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        request = Request(method, path, headers, b"")
        self.requests.append(request)
        self.arrived.set()
        size_bytes = int(headers.get("content-length", 0))
        if self.stop_after is not None:
            size_bytes = min(size_bytes, self.stop_after)
        request.body = await reader.readexactly(size_bytes)
        data = self.respond(request)
        if data == RESET:
            writer.transport.abort()
            return False
        if data == SILENCE:
            await reader.read()
            return False
        if method == "HEAD":
            data = data[: data.index(b"\r\n\r\n") + 4]
        writer.write(data)
        await writer.drain()
        if self.stop_after is not None:
            await asyncio.Event().wait()  # keeps the connection open but reads nothing more
        return b"Connection: close" not in data
