"""HTTP messages as bytes: heads of requests, and answers as they are received. No sockets."""

from __future__ import annotations

import contextlib
import datetime as dt
import email.utils
import http.client
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult

# How much of an answer is received at once; its head cannot be larger.
HEAD_BYTES = 64 << 10
MAX_ERROR_BYTES = 64 << 10
_INTERIM = re.compile(rb"HTTP/1\.[0-9] 1[0-9][0-9].*?\r\n\r\n", re.DOTALL)
_STATUS = re.compile(r"[0-9]{3}(?: |\Z)")
# A name extends to the colon (RFC 9110, 5.1); a value has no control characters, and lines are not folded.
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*+")
# No possessive group: before 3.11.5, CPython matches those wrongly (gh-106052).
_HEADERS = re.compile(rf"(?:{_HEADER.pattern}\r\n)*{_HEADER.pattern}|")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_WHOLE = re.compile(r"[0-9]{1,19}")
# The headers that say where an answer ends.
_FRAMING = frozenset({"content-length", "transfer-encoding"})
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Response:
    """Status and headers of an answer (names in lower case). `error` is the body of a refusal."""

    status: int
    headers: Mapping[str, str]
    error: bytes = b""

    def as_sdk_response(self) -> dict[str, Any]:
        """Return the refusal in the form in which the SDK reports one."""
        text = self.error.decode("utf-8", "replace")
        said = {name: re.search(rf"<{name}>([^<]*)</{name}>", text) for name in ("Code", "Message")}
        return {
            "Error": {name: match[1] if match else "" for name, match in said.items()},
            "ResponseMetadata": {"HTTPStatusCode": self.status, "HTTPHeaders": dict(self.headers)},
        }


def host_of(url: SplitResult) -> str:
    """Return the Host header as the SDK signs it: in lower case, without user and without the scheme's default port."""
    host = url.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if url.port in (None, _PORTS.get(url.scheme)) else f"{host}:{url.port}"


def lines_of(headers: Mapping[str, str | bytes]) -> str:
    """Format headers as they appear in a request. Raises ValueError if one of them would span more than one line."""
    lines = "".join(
        f"{name}: {value if isinstance(value, str) else value.decode('latin-1')}\r\n"
        for name, value in headers.items()
    )
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header of the request has a line break in it")
    return lines


class UnusualResponseError(Exception):
    """The answer is not a short one that states its length."""


class MalformedResponseError(http.client.HTTPException):
    """The answer says something that no store says, or could be read in more than one way."""


def complete_response(received: bytes) -> tuple[Response, bool] | None:
    """Return the answer and whether it is the connection's last, or None if more of it is to come."""
    head, has_ended, content = received.partition(b"\r\n\r\n")
    if not has_ended:
        if len(received) > HEAD_BYTES:
            raise http.client.LineTooLong("answer")
        return None
    answer = parsed(head)
    size = content_length(answer)
    if size is None or size > MAX_ERROR_BYTES:
        raise UnusualResponseError
    if len(content) < size:
        return None
    is_last = not keeps_connection(head, answer) or len(content) > size
    return Response(answer.status, answer.headers, content[:size]), is_last


def keeps_connection(head: bytes, answer: Response) -> bool:
    """Return whether another request may follow on the connection."""
    return head.startswith(b"HTTP/1.1") and "close" not in answer.headers.get("connection", "").lower()


def without_interim(received: bytes) -> bytes:
    """Strip interim answers such as 100 Continue, which nobody asked for."""
    return received[end_of_interim(received, 0, len(received)) :]


def end_of_interim(received: bytes | bytearray | memoryview, start: int, end: int) -> int:
    """Return where the answer itself begins, behind the complete interim ones from `start` on."""
    while interim := _INTERIM.match(received, start, end):
        start = interim.end()
    return start


def parsed(head: bytes) -> Response:
    """Parse the head of an answer, given without the empty line at its end. Strict: ambiguous framing would let a part
    of one answer pass for the next (RFC 9112, 11.2). Raises BadStatusLine or MalformedResponseError.
    """
    first, _, lines = head.decode("latin-1").partition("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not _STATUS.match(status):
        raise http.client.BadStatusLine(first)
    all_lines = lines.split("\r\n") if lines else []
    if not _HEADERS.fullmatch(lines):
        line = next((each for each in all_lines if not _HEADER.fullmatch(each)), lines)
        raise MalformedResponseError(f"the answer has a header line {line[:80]!r}")
    headers: dict[str, str] = {}
    for line in all_lines:
        as_written, _, padded = line.partition(":")
        name, value = as_written.lower(), padded.strip(" \t")
        if name in _FRAMING and name in headers:
            raise MalformedResponseError(f"the answer has {name} twice")
        # Several lines with the same name form one list (RFC 9110, 5.3).
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if _FRAMING.issubset(headers):
        raise MalformedResponseError(f"the answer has both {' and '.join(sorted(_FRAMING))}")
    answer = Response(int(status[:3]), headers)
    content_length(answer)
    return answer


def content_length(answer: Response) -> int | None:
    """Return the Content-Length that the head states, or None if it does not."""
    text = answer.headers.get("content-length")
    return None if text is None else whole_number("Content-Length", text)


def whole_number(name: str, text: str) -> int:
    """Parse a whole number of at most 19 digits. Raises MalformedResponseError."""
    if not _WHOLE.fullmatch(text):
        raise MalformedResponseError(f"the {name} of the answer is {text[:80]!r}")
    return int(text)


def http_date(name: str, text: str) -> float:
    """Parse an HTTP date to seconds since the epoch. Raises MalformedResponseError."""
    try:
        at = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        raise MalformedResponseError(f"the {name} of the answer is {text[:80]!r}") from None
    return seconds_of(name, at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC))


def seconds_of(name: str, at: dt.datetime) -> float:
    """Convert a time to seconds since the epoch. Raises MalformedResponseError."""
    try:
        return at.timestamp()
    except (ValueError, OverflowError):
        raise MalformedResponseError(f"the {name} of the answer is {at}") from None


def server_time(headers: Mapping[str, str]) -> float:
    """Return the store's own time. Ages are measured against it, so our clock must not stand in for it."""
    return http_date("Date", headers.get("date", ""))


def check_age(headers: Mapping[str, str]) -> None:
    """Raise if the answer has an age. A store does not state the age of its answer, but caches do (RFC 9111, 5.1)."""
    if headers.get("age", "0") != "0":
        raise MalformedResponseError("the answer comes from a cache: it has an Age header")


def check_below(name: object, prefix: str) -> str:
    """Return a name from a listing of what has `prefix`."""
    if not isinstance(name, str) or not name or not name.startswith(prefix):
        raise MalformedResponseError(f"the store answered with {name!r}, a key outside of {prefix!r}")
    return name


def check_advances(marker: object, asked: object) -> None:
    """Raise if a listing continues where it began."""
    if marker and marker == asked:
        raise MalformedResponseError(
            f"the listing does not advance: it continues again at {str(marker)[:80]!r}"
        )


def xml_document(body: bytes, root: str) -> ET.Element:
    """Return the XML document in an answer, which must have this root element, with namespaces removed."""
    try:
        found = ET.fromstring(body)  # noqa: S314  expat expands no external entities, and stops at those that grow
    except ET.ParseError:
        raise MalformedResponseError(f"expected {root}, got {body[:80]!r}") from None
    for each in found.iter():
        each.tag = each.tag.rpartition("}")[2]
    if found.tag != root:
        raise MalformedResponseError(f"expected {root}, got {body[:80]!r}")
    return found


class OtherRangeError(Exception):
    """The answer is well-formed but not the range asked for."""


def total_of_range(answer: Response, offset: int, size_bytes: int) -> int:
    """Return the size of the whole object from an answer to a GET, as `range_total` does."""
    headers = answer.headers
    if missing := [name for name in ("etag", "content-length") if name not in headers]:
        raise MalformedResponseError(f"the store answered without {', '.join(missing)}")
    length = whole_number("Content-Length", headers["content-length"])
    return range_total(answer.status, headers.get("content-range"), length, offset, size_bytes)


def range_total(
    status: int, content_range: str | None, content_length: int, offset: int, size_bytes: int
) -> int:
    """Return the whole object's size from an answer, which must be the range asked for, else OtherRangeError."""
    if content_range is None and status != 206:
        start, end, total = 0, content_length - 1, content_length
    else:
        match = _CONTENT_RANGE.fullmatch(content_range or "")
        if match is None:
            raise MalformedResponseError(f"the Content-Range of the answer is {(content_range or '')[:80]!r}")
        start, end, total = map(int, match.groups())
        if end - start + 1 != content_length:
            raise MalformedResponseError(
                f"the answer has {content_length} bytes, but calls them {start}-{end}/{total}"
            )
    if (start, end, content_length) != (offset, offset + size_bytes - 1, size_bytes) or total <= end:
        raise OtherRangeError(
            f"asked for bytes {offset}+{size_bytes}, but got {content_length} of {start}-{end}/{total}"
        )
    return total


def read_by_library(received: bytes, receive: Callable[[], bytes]) -> Response:
    """Parse an answer of any form from what was received and what `receive` returns, until that is nothing."""
    response = http.client.HTTPResponse(_Received(received, receive), method="PUT")  # type: ignore[arg-type]
    with contextlib.closing(response):
        response.begin()
        headers: dict[str, str] = {}
        for name, value in response.getheaders():
            known = headers.get(name.lower())
            headers[name.lower()] = value if known is None else f"{known}, {value}"
        try:
            content = response.read(MAX_ERROR_BYTES)
        except http.client.IncompleteRead as error:
            if response.status < 300:
                raise
            content = error.partial  # a partial message is better than none
        except ValueError as error:
            raise MalformedResponseError(f"the answer has an invalid body: {error}") from error
        return Response(response.status, headers, content)


class _Received(io.RawIOBase):
    """A stand-in for the socket that http.client expects."""

    def __init__(self, received: bytes, receive: Callable[[], bytes]) -> None:
        self._data, self._receive = received, receive

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._data or self._receive()
        count = min(len(data), len(buffer))
        buffer[:count], self._data = data[:count], data[count:]
        return count
