"""How a body travels: its slices, uncopied, from the caller's buffers to the socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import aiohttp
from aiobotocore.awsrequest import AioAWSResponse
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from botocore.awsrequest import AWSResponse

from ckpt_async.errors import CkptAsyncError, FailureReason, SourceError
from ckpt_async.stores.checksums import Digest
from ckpt_async.stores.http.uploads import Uploads
from ckpt_async.stores.interface import Body, BodyWriter

# Up to here it pays to send headers and body in one packet, though they are copied together for that.
_JOIN_BYTES = 16 << 10


Learn = Callable[[str, Mapping[str, str | bytes]], None]  # URL and headers


@runtime_checkable
class FileRange(Body, Protocol):
    """A body whose bytes are in a file."""

    @property
    def is_paced(self) -> bool:
        """Whether slices may have to wait for a bandwidth cap: then they are no matter for a worker thread."""
        ...

    def send_in_thread(self, outgoing: BodyWriter, digest: Digest | None = None) -> None:
        """A `digest` is given all bytes as they are written; then `checksum` knows without reading them again."""
        ...


class BodyPayload(Payload):
    """A Body as aiohttp and botocore want it: botocore asks for a `read` and never calls it; aiohttp calls
    `write` once, in a task of its own.
    """

    _autoclose = True

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._body = body
        self._size = body.size_bytes
        self._sent_bytes = 0
        self._writing: asyncio.Task[Any] | None = None
        self.failure: CkptAsyncError | None = None
        self.learn: Learn | None = None  # to be told what request the SDK makes of it

    @property
    def size_bytes(self) -> int:
        return self._body.size_bytes

    @property
    def is_sent(self) -> bool:
        return self._sent_bytes == self._body.size_bytes

    def read(self, _size: int = -1) -> bytes:
        raise NotImplementedError("the body is written, never read")

    def seek(self, _offset: int, _whence: int = 0) -> int:
        """The SDK rewinds before it follows a redirect to another region."""
        self._sent_bytes, self._writing = 0, None
        return 0

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise NotImplementedError("the body is written, never decoded")

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Hand every slice to the socket, and ask for the next one only when the kernel has all of it.

        From Python 3.12 on, and on uvloop, the transport keeps a reference to what it could not send at
        once, and slices are views of reused buffers. So its high-water mark is the lowest there is, which makes
        `drain` wait for the last byte: 0, where more than that pauses; 1 for TLS, where so much pauses already
        (with 0 an empty buffer would pause it for ever). And on any failure it is aborted, not closed, for a
        closing transport goes on sending what it refers to.
        """
        if self._writing is not None:
            # aiohttp repeats a PUT by itself when a kept-alive connection turns out to be dead.
            raise aiohttp.ClientConnectionError("one call is one attempt")
        self._writing = asyncio.current_task()
        transport: asyncio.Transport | None = getattr(writer, "transport", None)
        if transport is None:
            raise aiohttp.ClientConnectionError("the connection is gone")
        transport.set_write_buffer_limits(high=0 if _is_plain(transport) else 1)
        is_joined = self._body.size_bytes <= _JOIN_BYTES
        if not is_joined and hasattr(writer, "send_headers"):
            writer.send_headers()  # else the first slice is copied to join it to them
        try:
            await self._send_chunks(writer)
            self._check_complete()
        except BaseException as error:
            if isinstance(error, CkptAsyncError):
                self.failure = error
            transport.abort()
            raise

    @property
    def is_for_thread(self) -> bool:
        """Whether `send_in_thread` may send it."""
        return isinstance(self._body, FileRange) and not self._body.is_paced

    async def put(self, uploads: Uploads, url: str, headers: Mapping[str, str | bytes]) -> AWSResponse:
        """Send it past aiohttp; the answer as the SDK wants it."""
        answer = await uploads.put(url, headers, self)
        return AioAWSResponse(url, answer.status, answer.headers, _Content(answer.error))

    def send_in_thread(self, outgoing: BodyWriter, digest: Digest | None = None) -> None:
        assert isinstance(self._body, FileRange)
        self._body.send_in_thread(outgoing, digest)
        self._sent_bytes = self._body.size_bytes

    async def _send_chunks(self, writer: AbstractStreamWriter) -> None:
        chunks = self._body.chunks()
        try:
            async for chunk in chunks:
                if chunk:
                    await writer.write(chunk)
                    await writer.drain()
                    self._sent_bytes += len(chunk)
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()

    def _check_complete(self) -> None:
        if not self.is_sent:
            raise SourceError(
                f"a body gave {self._sent_bytes} of {self._body.size_bytes} bytes",
                reason=FailureReason.SOURCE_CHANGED,
            )

    async def stop(self) -> None:
        """Return when `write` has ended: aiohttp cancels it, but waits for nobody."""
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            await asyncio.wait([self._writing])


class _Content:
    """What the SDK reads an answer's body from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data


def _is_plain(transport: asyncio.Transport) -> bool:
    return transport.get_extra_info("sslcontext") is None
