"""Which connections are kept for the next request."""

import http.client
import socket
from collections.abc import Iterator

import pytest

from ckpt_async.stores.http.connections import TELLING_BYTES
from ckpt_async.stores.http.downloads import Downloads


@pytest.fixture
def downloads() -> Iterator[Downloads]:
    made = Downloads(max_connections=4, connect_timeout_s=5, read_timeout_s=5, ca_file=None)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("num_before", "moved_bytes", "took_s", "is_kept"),
    [
        (8, TELLING_BYTES, 0.1, True),
        (8, TELLING_BYTES, 1.0, False),
        (8, TELLING_BYTES // 2, 1.0, True),
        (7, TELLING_BYTES, 1.0, True),
    ],
)
def test_a_connection_far_slower_than_usual_is_not_kept(
    downloads: Downloads, num_before: int, moved_bytes: int, took_s: float, is_kept: bool
) -> None:
    """A few bytes do not tell how fast a connection is, and a few requests do not tell what is usual."""
    ends = []

    def connected() -> http.client.HTTPConnection:
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        connection = http.client.HTTPConnection("127.0.0.1", 80)
        connection.sock = ours
        return connection

    for _ in range(num_before):
        downloads._put_back(connected(), TELLING_BYTES, 0.1)
    last = connected()
    downloads._put_back(last, moved_bytes, took_s)
    assert (last.sock is not None) is is_kept
    for end in ends:
        end.close()
