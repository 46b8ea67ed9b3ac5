"""The stand-in for a body in a request that the SDK makes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from aiobotocore.awsrequest import AioAWSResponse
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from botocore.awsrequest import AWSResponse

from ckpt_async.errors import CkptAsyncError
from ckpt_async.stores.bodies import LocalWriter, send_in_thread
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.interface import Body

HandOver = Callable[[str, Mapping[str, str | bytes]], Awaitable[Response]]  # called with URL and headers


class SdkBody(Payload):
    """A body that lets the SDK make and sign the request, which `hand_over` then sends and answers. Only through a
    proxy does the SDK's HTTP client send it, by calling `write` once, in a task of its own.
    """

    _autoclose = True

    def __init__(self, body: Body, hand_over: HandOver) -> None:
        super().__init__(body)
        self._body, self._hand_over = body, hand_over
        self._size = body.size_bytes
        self._writing: asyncio.Task[Any] | None = None
        self.is_cut_short = False
        self.failure: CkptAsyncError | None = None

    async def answer(self, url: str, headers: Mapping[str, str | bytes]) -> AWSResponse:
        """Return the answer in the form that the SDK expects."""
        response = await self._hand_over(url, headers)
        return AioAWSResponse(url, response.status, response.headers, Content(response.error))

    def read(self, _size: int = -1) -> bytes:
        """Never called, but the SDK checks that this method exists."""
        raise NotImplementedError("the body is written, never read")

    def seek(self, _offset: int, _whence: int = 0) -> int:
        """Rewind: the SDK does this before it follows a redirect to another region."""
        self._writing, self.is_cut_short = None, False
        return 0

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise NotImplementedError("the body is written, never decoded")

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send the body, copying each slice: the transport keeps what it cannot send yet, and slices share a buffer."""
        if self._writing is not None:
            # aiohttp repeats a PUT on its own if a keep-alive connection turns out to be dead.
            raise aiohttp.ClientConnectionError("one call is one attempt")
        self._writing, self.is_cut_short = asyncio.current_task(), True
        try:
            await send_in_thread(self._body, _TransportWriter(writer))
        except CkptAsyncError as error:
            self.failure = error  # aiohttp reports only that the connection broke
            raise
        self.is_cut_short = False

    async def stop(self) -> None:
        """Return once `write` has ended: aiohttp cancels it, but does not wait for it."""
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            await asyncio.wait([self._writing])


class _TransportWriter(LocalWriter):
    """Passes slices from a worker thread to aiohttp's connection."""

    def __init__(self, writer: AbstractStreamWriter) -> None:
        loop = asyncio.get_running_loop()

        def take(piece: memoryview) -> None:
            asyncio.run_coroutine_threadsafe(writer.write(bytes(piece)), loop).result()

        super().__init__(take)
        self._transport: asyncio.Transport | None = getattr(writer, "transport", None)

    def cancel(self) -> bool:
        if self._transport is not None:
            self._transport.abort()  # the thread may be waiting for a peer that accepts nothing
        return super().cancel()


class Content:
    """The stream from which the SDK reads an answer's body."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data
