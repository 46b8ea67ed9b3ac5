"""PUTs of small objects, in series."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt_async.stores.http.messages import (
    HEAD_BYTES,
    Response,
    UnusualResponseError,
    complete_response,
    without_interim,
)
from ckpt_async.stores.http.proxies import told
from ckpt_async.stores.http.series import Line, SeriesConnections
from ckpt_async.stores.http.uploads import Exchange


@dataclass(frozen=True, slots=True)
class SmallRequest:
    """A PUT of one small object. `key` is only for the caller."""

    key: str
    head: bytes  # everything before the body
    data: bytes


Answered = Callable[[SmallRequest, Response], None]


class SmallUploads(SeriesConnections):
    """PUTs of small objects, sent in series."""

    async def put_many(
        self, url: str, requests: Iterator[SmallRequest], answered: Answered
    ) -> tuple[SmallRequest, Response] | None:
        """Send `requests` as `_carry` does. `answered` is called for each object that was stored."""
        return await self._carry(
            url,
            requests,
            lambda connection, left: _Line(connection, left, self._read_timeout_s, answered),
        )


class _Line(Line[SmallRequest]):
    def __init__(
        self,
        connection: http.client.HTTPConnection,
        requests: Iterator[SmallRequest],
        timeout_s: float,
        answered: Answered,
    ) -> None:
        super().__init__(connection, requests, timeout_s)
        self._answered = answered
        self._buffer = memoryview(
            bytearray(HEAD_BYTES)
        )  # a whole TLS record: the selector sees no rest of one
        self._received = b""

    def _to_send(self, request: SmallRequest) -> list[memoryview]:
        self._received = b""
        head, data = told(self.connection, request.head), request.data
        # OpenSSL wants to see the same bytes again after it has asked to wait.
        return [memoryview(head + data)] if self._is_tls else [memoryview(head), memoryview(data)]

    def _receive(self) -> None:
        if (count := self._receive_into(self._buffer)) is None:
            return
        self._received = without_interim(self._received + self._buffer[:count])
        if not count and not self._received:
            raise http.client.RemoteDisconnected("the server closed the connection without an answer")
        if not count or (self._received and self._unsent):
            raise UnusualResponseError
        if (found := complete_response(self._received)) is not None:
            answer, self.is_last = found
            self._heed(answer)

    def _rest(self) -> Response:
        exchange = Exchange(self.socket, self._timeout_s)
        return exchange.read_on(self._received, is_amid_body=bool(self._unsent))

    def _tell(self, answer: Response) -> None:
        self._answered(self._request, answer)
