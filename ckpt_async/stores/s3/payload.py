"""The stand-in for a body in a request that the SDK makes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiobotocore.awsrequest import AioAWSResponse
from botocore.awsrequest import AWSPreparedRequest, AWSResponse

from ckpt_async.stores.http.messages import Response

HandOver = Callable[[str, Mapping[str, str | bytes]], Awaitable[Response]]  # called with URL and headers


class SdkBody:
    """A body that lets the SDK make and sign the request, which `hand_over` then sends and answers."""

    def __init__(self, hand_over: HandOver) -> None:
        self._hand_over = hand_over

    async def answer(self, url: str, headers: Mapping[str, str | bytes]) -> AWSResponse:
        """Return the answer in the form that the SDK expects."""
        response = await self._hand_over(url, headers)
        return AioAWSResponse(url, response.status, response.headers, Content(response.error))

    def read(self, _size: int = -1) -> bytes:
        """Never called, but the SDK checks that this method exists."""
        raise NotImplementedError("the body is handed over, never read")

    def seek(self, _offset: int, _whence: int = 0) -> int:
        """Rewind: the SDK does this before it follows a redirect to another region."""
        return 0


async def hand_over(request: AWSPreparedRequest, **_: object) -> AWSResponse | None:
    """Handler of the SDK's event before it sends a request: answers in place of the SDK's HTTP client."""
    body = request.body
    return await body.answer(request.url, request.headers) if isinstance(body, SdkBody) else None


class Content:
    """The stream from which the SDK reads an answer's body."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data
