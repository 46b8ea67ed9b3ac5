"""GETs of small objects, in series."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ckpt_async.stores.http.downloads import END, NO_HEADERS, request_for, rest_of_refusal
from ckpt_async.stores.http.messages import (
    HEAD_BYTES,
    Response,
    UnusualResponseError,
    content_length,
    end_of_interim,
    keeps_connection,
    lines_of,
    parsed,
    read_by_library,
)
from ckpt_async.stores.http.proxies import told
from ckpt_async.stores.http.series import Line, SeriesConnections
from ckpt_async.stores.interface import SmallGet

Check = Callable[[SmallGet, Response], None]
Got = Callable[[SmallGet, memoryview], None]


class SmallDownloads(SeriesConnections):
    """GETs of small objects, made in series."""

    async def get_many(
        self,
        url: str,
        gets: Iterator[tuple[SmallGet, str]],
        check: Check,
        got: Got,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> tuple[SmallGet, Response] | None:
        """GET objects, each given with its URL at the host of `url`, as `_carry` does. `check` sees each answer, and
        `got` its bytes, which are valid until it returns.
        """
        lines = lines_of(headers)
        requests = (_Request(get, request_for(url, 0, get.size_bytes, lines)) for get, url in gets)
        refused = await self._carry(
            url,
            requests,
            lambda connection, left: _Line(connection, left, self._read_timeout_s, check, got),
        )
        return None if refused is None else (refused[0].get, refused[1])


@dataclass(slots=True)
class _Request:
    get: SmallGet
    head: bytes


class _Line(Line[_Request]):
    def __init__(
        self,
        connection: http.client.HTTPConnection,
        requests: Iterator[_Request],
        timeout_s: float,
        check: Check,
        got: Got,
    ) -> None:
        super().__init__(connection, requests, timeout_s)
        self._check, self._got = check, got
        self._data = bytearray()
        self._view = memoryview(self._data)
        self._end = 0  # of what has been received
        self._answer: Response | None = None  # once its head is complete; its body begins at `_start`
        self._start = 0

    def _next(self) -> _Request | None:
        """Take the next request, which locks its file: a cancelled caller waits for that."""
        self.token.is_telling = True
        self.token.uses(None, is_at_work=True)
        request = next(self._requests, None)
        self.token.is_telling = False
        self.token.uses(None)  # raises if cancelled by now
        return request

    def _to_send(self, request: _Request) -> list[memoryview]:
        self._answer, self._start, self._end = None, 0, 0
        room_bytes = HEAD_BYTES + len(END) + request.get.size_bytes
        if len(self._data) < room_bytes:
            self._data = bytearray(room_bytes)
            self._view = memoryview(self._data)
        return [memoryview(told(self.connection, request.head))]

    def _receive(self) -> None:
        size_bytes = self._request.get.size_bytes
        # All that is missing fits, so that no TLS record is left half read: the selector would not see its rest.
        room = self._view[self._end :]
        if (count := self._receive_into(room)) is None:
            return
        if not count:
            raise self._cut_short()
        self._end += count
        if self._answer is None and not self._has_head():
            return
        assert self._answer is not None
        if self._end - self._start < size_bytes:
            return
        self.is_last |= self._end - self._start > size_bytes
        self._heed(self._answer)

    def _has_head(self) -> bool:
        self._start = end_of_interim(self._data, self._start, self._end)
        end = self._data.find(END, self._start, self._end)
        if (self._end if end < 0 else end) > HEAD_BYTES:
            raise http.client.LineTooLong("answer")
        if end < 0:
            return False
        head = bytes(self._view[self._start : end])
        answer = parsed(head)
        if answer.status >= 300 or self._unsent:
            raise UnusualResponseError
        if content_length(answer) != self._request.get.size_bytes:
            self._telling(lambda: self._check(self._request.get, answer))
            raise http.client.IncompleteRead(b"", self._request.get.size_bytes)
        self.is_last = not keeps_connection(head, answer)
        self._answer, self._start = answer, end + len(END)
        return True

    def _cut_short(self) -> Exception:
        if self._end == 0:
            return http.client.RemoteDisconnected("the server closed the connection without an answer")
        received = max(0, self._end - self._start) if self._answer is not None else 0
        return http.client.IncompleteRead(b"", self._request.get.size_bytes - received)

    def _rest(self) -> Response:
        received = bytes(self._view[self._start : self._end])
        return read_by_library(received, lambda: rest_of_refusal(self.socket, self._view, self._timeout_s))

    def _tell(self, answer: Response) -> None:
        get = self._request.get
        self._check(get, answer)
        self._got(get, self._view[self._start : self._start + get.size_bytes])
