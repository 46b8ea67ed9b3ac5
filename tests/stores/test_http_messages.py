"""HTTP messages as bytes: whatever arrives is read in exactly one way or not at all."""

import http.client

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_async.stores.http.messages import (
    MAX_ERROR_BYTES,
    MalformedResponseError,
    Response,
    UnusualResponseError,
    complete_response,
    parsed,
    read_by_library,
    whole_number,
    without_interim,
)
from tests.stores.ambiguous import AMBIGUOUS

END = b"\r\n\r\n"
FRAMING = [
    *(b"Content-Length: 2", b"content-length:2", b"Content-Length: 0", b"Content-Length: 99"),
    *(b"Content-Length: 2, 2", b"Content-Length : 2", b" Content-Length: 2", b"Content-Length: +2"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding : chunked"),
]
OTHERS = [
    b"ETag: e",
    b"X",
    b"",
    b":",
    b"X: a\nY: b",
    b"Connection: close",
    b"\xff: \xff",
    b"X: \r",
    b"HTTP/1.1 200 OK",
]
LONG = [b"Content-Length: " + b"9" * 5000, b"Date: " + b"x" * 70_000]
LINES = st.sampled_from([*FRAMING, *OTHERS, *LONG]) | st.binary(max_size=12)
FIRST = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK", b"HTTP/1.1 200", b"HTTP/1.0 503 X", b"HTTP/1.1 100 C"),
        *(b"HTTP/1.1 2x0", b"ICY 200", b"", b"HTTP/1.1 -20"),
    ]
)
BODIES = st.sampled_from(
    [b"", b"o", b"ok", b"okHTTP/1.1 200 OK\r\n", b"2\r\nok\r\n0\r\n\r\n", b"-2\r\nok\r\n"]
)
ANSWERS = st.builds(
    lambda first, lines, body: b"\r\n".join([first, *lines]) + END + body,
    FIRST,
    st.lists(LINES, max_size=4),
    BODIES,
)


@pytest.mark.fault("F71")
@settings(max_examples=1500, deadline=None)
@given(ANSWERS | st.binary(max_size=200))
def test_any_response_is_read_unambiguously_or_rejected(received: bytes) -> None:
    try:
        found = complete_response(without_interim(received))
    except (http.client.HTTPException, UnusualResponseError):
        return
    if found is None:
        return
    answer, _ = found
    head, _, content = without_interim(received).partition(END)
    lines = [line.lower().lstrip() for line in head.split(b"\r\n")]
    framing = [line for line in lines if line.startswith((b"content-length", b"transfer-encoding"))]
    assert len(framing) == 1
    assert framing[0].removeprefix(b"content-length:").strip() == str(len(answer.error)).encode()
    assert content.startswith(answer.error)


@settings(max_examples=500, deadline=None)
@given(ANSWERS | st.binary(max_size=200), st.integers(1, 40))
def test_http_client_reads_or_rejects_any_response(received: bytes, piece_bytes: int) -> None:
    """`http.client` reads what remains when our own parser has given up."""
    pieces = [received[start : start + piece_bytes] for start in range(0, len(received), piece_bytes)]
    try:
        answer = read_by_library(b"", lambda: pieces.pop(0) if pieces else b"")
    except http.client.HTTPException:
        return
    assert isinstance(answer, Response)
    assert len(answer.error) <= MAX_ERROR_BYTES


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=4), st.integers(0, 400))
def test_responses_end_where_their_framing_says(bodies: list[bytes], cut: int) -> None:
    """Responses follow one another on a connection and may be cut anywhere."""
    whole = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies]
    found = complete_response(whole[0][:cut])
    assert (found is None) == (cut < len(whole[0]))
    answer, is_last = complete_response(b"".join(whole)) or pytest.fail("it is whole")
    assert (answer.error, is_last) == (bodies[0], len(bodies) > 1)


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_an_ambiguous_head_is_rejected(kind: str) -> None:
    head, _, _ = AMBIGUOUS[kind].partition(END)
    with pytest.raises(MalformedResponseError):
        parsed(head)


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", " 1", "1 ", "1_0", "\N{ARABIC-INDIC DIGIT THREE}", "1" * 20]
)
def test_invalid_content_lengths_are_rejected(text: str) -> None:
    with pytest.raises(MalformedResponseError):
        whole_number("Content-Length", text)
    assert whole_number("Content-Length", "9" * 19) == 10**19 - 1


def test_several_lines_of_a_name_are_one_list():
    """Google sends each hash of an object on its own line."""
    lines = b"HTTP/1.1 200 OK\r\nx-goog-hash: crc32c=AAAAAA==\r\nX-Goog-Hash: md5=xyz=\r\nContent-Length: 0"
    assert parsed(lines).headers["x-goog-hash"] == "crc32c=AAAAAA==, md5=xyz="
    answer = read_by_library(lines + b"\r\n\r\n", lambda: b"")
    assert answer.headers["x-goog-hash"] == "crc32c=AAAAAA==, md5=xyz="
