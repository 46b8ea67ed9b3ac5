"""Bytes have moved once the other side has acknowledged them, not while they wait in the kernel."""

import socket

import pytest

from ckpt_async.stores.http.traffic import Traffic

PATIENCE_S = 30


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        near = socket.create_connection(server.getsockname(), timeout=PATIENCE_S)
        far, _ = server.accept()
    with near, far:
        far.settimeout(PATIENCE_S)
        yield near, far


def _receive(connected: socket.socket, size_bytes: int) -> None:
    while size_bytes:
        size_bytes -= len(connected.recv(size_bytes))


def test_both_ways_are_counted(pair) -> None:
    near, far = pair
    traffic = Traffic()
    traffic.watch(near)
    first = traffic.read()
    assert first is not None
    near.sendall(bytes(1000))
    _receive(far, 1000)
    far.sendall(bytes(500))
    _receive(near, 500)
    second = traffic.read()
    assert second is not None
    assert second.size_bytes - first.size_bytes == 1500
    assert 0 < second.round_trip_s < 1


def test_bytes_in_buffers_have_not_moved(pair) -> None:
    """If nobody reads at the far end, the near kernel accepts more than the far one does."""
    near, far = pair
    traffic = Traffic()
    traffic.watch(near)
    near.setblocking(False)
    taken = 0
    while True:
        try:
            taken += near.send(bytes(1 << 16))
        except BlockingIOError:
            break
    moved = traffic.read()
    assert moved is not None
    assert moved.size_bytes < taken
    near.settimeout(PATIENCE_S)
    _receive(far, taken)
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    moved = traffic.read()
    assert moved is not None
    assert taken <= moved.size_bytes <= taken + 2  # SYN and FIN count as one byte each


def test_a_closed_connection_takes_nothing_away(pair) -> None:
    near, far = pair
    traffic = Traffic()
    traffic.watch(near)
    near.sendall(bytes(1000))
    _receive(far, 1000)
    before = traffic.read()
    near.close()
    assert before is not None
    after = traffic.read()
    assert after is not None
    assert after.size_bytes == before.size_bytes >= 1000
