"""Ranged GETs that bypass the SDK, over connections that are reused, broken, cancelled, encrypted or unusable."""

import asyncio
import contextlib
import os
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiobotocore.httpsession
import pytest

from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.http import connections
from ckpt_async.stores.http import downloads as http_ranges
from ckpt_async.stores.http.downloads import BUFFER_BYTES, Check, Downloads
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.http.offload import Offload
from ckpt_async.stores.http.tls import TlsSocket
from tests.restore.runs import content
from tests.stores.ambiguous import AMBIGUOUS
from tests.stores.http_server import PATIENCE_S, Server, Talk, request_of


def _started_offload() -> Offload:
    offload = Offload(1)
    offload.start()
    return offload


@pytest.fixture(params=["http", "https", "offloaded"])
def tls(
    request: pytest.FixtureRequest, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> ssl.SSLContext | None:
    """With "offloaded", a process decrypts."""
    if request.param == "http":
        return None
    if request.param == "offloaded":
        monkeypatch.setattr(http_ranges, "Offload", _started_offload)
        monkeypatch.delattr(http_ranges, "TlsSocket")  # nothing is decrypted here
    return _serving(certificate)


# For the tests that plain HTTP would make no sense for.
ENCRYPTED = pytest.mark.parametrize("tls", ["https", "offloaded"], indirect=True)


def _answer(size_bytes: int, body: bytes, status: int = 206) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, size_bytes, body)


def _answers(num_times: int) -> Talk:
    """Send this many complete answers of ten bytes on each connection, then close it silently."""

    def talk(near: socket.socket) -> None:
        for _ in range(num_times):
            request_of(near)
            near.sendall(_answer(10, b"0123456789"))

    return talk


@contextlib.asynccontextmanager
async def _downloads(**options: Any) -> AsyncIterator[Downloads]:
    settings = {"max_connections": 4, "connect_timeout_s": 5.0, "read_timeout_s": 20.0, "ca_file": None}
    downloads = Downloads(**settings | options)
    try:
        yield downloads
    finally:
        downloads.close()


async def _get(
    downloads: Downloads,
    server: Server,
    scheme: str = "http",
    size_bytes: int = 10,
    heard: Callable[[], None] = lambda: None,
    check: Check = lambda _: None,
) -> bytes:
    found: list[bytes] = []

    def sink(piece: memoryview) -> None:
        assert len(piece) <= BUFFER_BYTES
        found.append(bytes(piece))
        heard()

    url = f"{scheme}://localhost:{server.port}/key?signed=1"
    answer = await downloads.get_range(url, 5, size_bytes, sink, check)
    assert answer.status == 206
    return b"".join(found)


def test_connections_are_reused(run: Any) -> None:
    async def main() -> None:
        with Server(_answers(100)) as server:
            async with _downloads() as downloads:
                assert [await _get(downloads, server) for _ in range(5)] == [b"0123456789"] * 5
            assert server.num_connections == 1

    run(main())


def test_each_server_has_its_own_connections(run: Any) -> None:
    """With two servers on one machine, nothing meant for one may go to the other."""

    async def main() -> None:
        with Server(_answers(100)) as first, Server(_answers(100)) as second:
            async with _downloads() as downloads:
                for server in (first, second, first, second):
                    await _get(downloads, server)
            assert (first.num_connections, second.num_connections) == (1, 1)

    run(main())


@pytest.mark.parametrize("num_answers", [1, 2])
def test_an_idle_connection_closed_by_the_server_is_replaced(run: Any, num_answers: int) -> None:
    """If the server silently closes it between two requests, the request is repeated once on a new connection."""

    async def main() -> None:
        with Server(_answers(num_answers)) as server:
            async with _downloads() as downloads:
                for _ in range(6):
                    assert await _get(downloads, server) == b"0123456789"
            assert server.num_connections == -(-6 // num_answers)

    run(main())


def test_a_server_that_never_responds_is_asked_once(run: Any) -> None:
    """A fresh connection that breaks is an error, not a reason to ask again."""

    async def main() -> None:
        with Server(lambda near: None) as server:
            async with _downloads() as downloads:
                with pytest.raises((http_ranges.http.client.HTTPException, OSError)):
                    await _get(downloads, server)
            assert server.num_connections == 1

    run(main())


BAD_ANSWERS = {
    "cut short": _answer(10, b"01234"),
    "shorter": _answer(5, b"01234"),
    "longer": _answer(11, b"01234567890"),
    "chunked": b"HTTP/1.1 206 X\r\nTransfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n0\r\n\r\n",
    "without a length": b"HTTP/1.1 206 X\r\nConnection: close\r\n\r\n0123456789",
    "nonsense": b"SSH-2.0-OpenSSH\r\n\r\n",
    "chunked, and of the right length": b"HTTP/1.1 206 X\r\nTransfer-Encoding: chunked\r\nContent-Length: 10\r\n\r\n"
    b"5\r\nhello\r\n0\r\n\r\n",
    **{kind: each.replace(b"200 OK", b"206 X") for kind, each in AMBIGUOUS.items()},
}


@pytest.mark.fault("F71")
@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_an_invalid_response_is_an_error(run: Any, bad: str) -> None:
    """Its connection is not reused, because the rest of the response would be taken for the next answer."""
    is_first = True

    def talk(near: socket.socket) -> None:
        nonlocal is_first
        request_of(near)
        was_first, is_first = is_first, False  # before the answer: the next request may arrive at once
        near.sendall(BAD_ANSWERS[bad] if was_first else _answer(10, b"0123456789"))
        if was_first and bad != "cut short":
            near.settimeout(PATIENCE_S)
            assert near.recv(1) == b""  # the client closes it

    async def main() -> None:
        with Server(talk) as server:
            async with _downloads() as downloads:
                with pytest.raises(http_ranges.http.client.HTTPException):
                    await _get(downloads, server)
                assert await _get(downloads, server) == b"0123456789"

    run(main())


LAST_ANSWERS = {
    "it says so": b"HTTP/1.1 206 X\r\nConnection: Close\r\nContent-Length: 10\r\n\r\n0123456789",
    "an old server": b"HTTP/1.0 206 X\r\nContent-Length: 10\r\n\r\n0123456789",
    "more than was asked for": _answer(10, b"0123456789more"),
}


async def _get_twice(talk: Talk, *, num_connections: int) -> None:
    with Server(talk) as server:
        async with _downloads() as downloads:
            assert [await _get(downloads, server) for _ in range(2)] == [b"0123456789"] * 2
        assert server.num_connections == num_connections


@pytest.mark.parametrize("last", LAST_ANSWERS)
def test_a_connection_close_response_ends_its_connection(run: Any, last: str) -> None:
    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(LAST_ANSWERS[last])
        near.settimeout(PATIENCE_S)
        assert near.recv(1) == b""  # the client closes it

    run(_get_twice(talk, num_connections=2))


EVIL = _answer(10, b"other text")


@pytest.mark.fault("F72")
def test_unsolicited_bytes_are_not_read_as_the_next_response(
    run: Any, tls: ssl.SSLContext | None, certificate: Path
) -> None:
    """Bytes that arrive between two requests may have been smuggled in by an intermediary."""
    has_first = threading.Event()
    is_first = True

    def talk(near: socket.socket) -> None:
        nonlocal is_first
        while True:
            request_of(near)
            near.sendall(_answer(10, b"0123456789"))
            if is_first:
                is_first = False
                assert has_first.wait(PATIENCE_S)
                near.sendall(EVIL)

    async def main() -> None:
        with Server(talk, tls) as server:
            async with _downloads(ca_file=str(certificate.with_name("c.pem"))) as downloads:
                assert await _get(downloads, server, _scheme(tls)) == b"0123456789"
                [(idle, _)] = downloads._idle
                has_first.set()
                readable, _, _ = await asyncio.to_thread(select.select, [idle.sock], [], [], PATIENCE_S)
                assert readable
                assert await _get(downloads, server, _scheme(tls)) == b"0123456789"
            assert server.num_connections == 2

    run(main())


@pytest.mark.fault("F72")
@ENCRYPTED
def test_unsolicited_bytes_already_decrypted_are_detected(
    run: Any, tls: ssl.SSLContext, certificate: Path
) -> None:
    """If the end of the body and the extra bytes share a TLS record, the socket itself has nothing left to read."""
    size_bytes = 3 * BUFFER_BYTES
    is_first = True

    def talk(near: socket.socket) -> None:
        nonlocal is_first
        while True:
            request_of(near)
            near.sendall(_answer(size_bytes, bytes(size_bytes)) + (EVIL if is_first else b""))
            is_first = False

    async def main() -> None:
        with Server(talk, tls) as server:
            async with _downloads(ca_file=str(certificate.with_name("c.pem"))) as downloads:
                for _ in range(2):
                    assert await _get(downloads, server, "https", size_bytes) == bytes(size_bytes)
            assert server.num_connections == 2

    run(main())


@pytest.mark.fault("F72")
def test_a_long_idle_connection_is_not_reused(run: Any, monkeypatch: Any) -> None:
    """An intermediary may have dropped the connection without notice."""

    async def main() -> None:
        with Server(_answers(100)) as server:
            async with _downloads() as downloads:
                for keepalive_s, num_connections in ((3600.0, 1), (3600.0, 1), (-1.0, 2), (3600.0, 2)):
                    monkeypatch.setattr(connections, "KEEPALIVE_S", keepalive_s)
                    assert await _get(downloads, server) == b"0123456789"
                    assert server.num_connections == num_connections
                    assert len(downloads._idle) == 1

    run(main())


@pytest.mark.fault("F99")
def test_idle_connections_are_closed_although_nobody_asks_for_another(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "KEEPALIVE_S", 0.1)
    closed: list[threading.Event] = []
    both_asked = threading.Barrier(2)

    def talk(near: socket.socket) -> None:
        request_of(near)
        both_asked.wait(PATIENCE_S)
        near.sendall(_answer(10, b"0123456789"))
        assert near.recv(1) == b""
        closed.pop().set()

    async def main() -> None:
        with Server(talk) as server:
            async with _downloads() as downloads:
                for _ in range(2):  # also those that come after a time without any
                    events = [threading.Event(), threading.Event()]
                    closed.extend(events)
                    await asyncio.gather(_get(downloads, server), _get(downloads, server))
                    for event in events:
                        assert await asyncio.to_thread(event.wait, PATIENCE_S / 3)

    run(main())


def test_idle_connections_use_tcp_keepalive(run: Any) -> None:
    """The kernel sends the probes, even while nobody waits for an answer."""

    async def main() -> None:
        with Server(_answers(1)) as server:
            async with _downloads() as downloads:
                await _get(downloads, server)
                [(idle, _)] = downloads._idle
                assert idle.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert idle.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60

    run(main())


def test_a_response_head_may_arrive_in_pieces(run: Any) -> None:
    """This includes an unsolicited interim answer, and headers in an unusual spelling."""
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    whole = interim + b"HTTP/1.1 206 X\r\ncontent-length:10\r\nX: :\r\n\r\n0123456789"

    def talk(near: socket.socket) -> None:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            request_of(near)
            for byte in whole:
                near.sendall(bytes([byte]))

    run(_get_twice(talk, num_connections=1))


def test_an_endless_response_head_is_an_error(run: Any) -> None:
    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(b"HTTP/1.1 206 X\r\n")
        while True:
            near.sendall(b"X: y\r\n" * 1000)  # until the client has had enough and closes

    async def main() -> None:
        with Server(talk) as server:
            async with _downloads() as downloads:
                with pytest.raises(http_ranges.http.client.LineTooLong):
                    await _get(downloads, server)

    run(main())


def test_a_refusal_is_returned_as_a_response(run: Any) -> None:
    """The response has its body and the shape in which the SDK would report it; the sink is not called."""

    def talk(near: socket.socket) -> None:
        request_of(near)
        body = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"
        near.sendall(_answer(len(body), body, 503))

    async def main() -> None:
        with Server(talk) as server:
            async with _downloads() as downloads:
                answer = await downloads.get_range(
                    f"http://localhost:{server.port}/x", 0, 10, pytest.fail, pytest.fail
                )
        assert isinstance(answer, Response)
        response = answer.as_sdk_response()
        assert response["Error"] == {"Code": "SlowDown", "Message": "later"}
        assert response["ResponseMetadata"]["HTTPStatusCode"] == 503

    run(main())


def _scheme(tls: ssl.SSLContext | None) -> str:
    return "https" if tls else "http"


_HEAD = b"HTTP/1.1 206 X\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    "size_bytes", [1, 10, 16 << 10, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 3 << 20]
)
@pytest.mark.parametrize("num_with_head", [0, 1, 5000, 1 << 20])
def test_every_byte_once_and_in_order(
    run: Any, tls: ssl.SSLContext | None, certificate: Path, size_bytes: int, num_with_head: int
) -> None:
    """This holds however much of the body comes with the head, or only after the client has begun to wait for it."""
    body = content(1, "x", size_bytes)
    has_head = threading.Semaphore(0)

    def talk(near: socket.socket) -> None:
        for _ in range(2):
            request_of(near)
            near.sendall(_HEAD % size_bytes + body[:num_with_head])
            assert has_head.acquire(timeout=PATIENCE_S)
            near.sendall(body[num_with_head:])

    async def main() -> None:
        with Server(talk, tls) as server:
            async with _downloads(ca_file=str(certificate.with_name("c.pem"))) as downloads:
                for _ in range(2):  # the second time on the same connection
                    got = await _get(
                        downloads, server, _scheme(tls), size_bytes, check=lambda _: has_head.release()
                    )
                    assert got == body
            assert server.num_connections == 1

    run(main())


def test_bytes_beyond_the_range_are_not_delivered(
    run: Any, tls: ssl.SSLContext | None, certificate: Path
) -> None:
    """Whatever else the server sends after the range must be ignored."""
    body = content(1, "x", BUFFER_BYTES + 1)

    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(_HEAD % len(body) + body + b"more")
        near.recv(1)

    async def main() -> None:
        with Server(talk, tls) as server:
            async with _downloads(ca_file=str(certificate.with_name("c.pem"))) as downloads:
                assert await _get(downloads, server, _scheme(tls), len(body)) == body

    run(main())


def test_a_slow_trickle_of_bytes_succeeds(run: Any, tls: ssl.SSLContext | None, certificate: Path) -> None:
    """A trickle fills no buffer, but the stall watchdog must hear of it long before the body ends."""
    heard = threading.Event()

    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(_answer(BUFFER_BYTES, b""))
        num_sent = 0
        while not heard.wait(0.01):
            near.sendall(b"x")
            num_sent += 1
        near.sendall(b"x" * (BUFFER_BYTES - num_sent))

    async def main() -> None:
        with Server(talk, tls) as server:
            ca_file = str(certificate.with_name("c.pem"))
            async with _downloads(ca_file=ca_file) as downloads, asyncio.timeout(PATIENCE_S):
                assert (
                    await _get(downloads, server, _scheme(tls), BUFFER_BYTES, heard.set)
                    == b"x" * BUFFER_BYTES
                )

    run(main())


@pytest.mark.parametrize("num_sent", [0, 5])
def test_a_server_that_stops_sending_is_an_error(
    run: Any, tls: ssl.SSLContext | None, certificate: Path, num_sent: int
) -> None:
    """If the body stops midway, that is an error after the read timeout; a short body is never taken for whole."""

    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(_answer(10, b"01234"[:num_sent]))
        near.recv(1)

    async def main() -> None:
        with Server(talk, tls) as server:
            options = {"ca_file": str(certificate.with_name("c.pem")), "read_timeout_s": 0.3}
            async with _downloads(**options) as downloads, asyncio.timeout(PATIENCE_S):
                with pytest.raises(TimeoutError, match="no answer within"):
                    await _get(downloads, server, _scheme(tls))

    run(main())


def test_over_tls_the_kernel_is_asked_for_many_records_at_once(
    run: Any, monkeypatch: Any, certificate: Path
) -> None:
    """Records have 16 KiB, and asking the kernel twice for each costs as much as decrypting it."""
    asked = 0
    take = TlsSocket._take

    def counted(*arguments: Any) -> int:
        nonlocal asked
        asked += 1
        return take(*arguments)

    monkeypatch.setattr(TlsSocket, "_take", counted)
    size_bytes = 64 * BUFFER_BYTES

    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(_answer(size_bytes, bytes(size_bytes)))

    async def main() -> None:
        with Server(talk, _serving(certificate)) as server:
            async with _downloads(ca_file=str(certificate.with_name("c.pem"))) as downloads:
                await _get(downloads, server, "https", size_bytes)

    run(main())
    assert asked < size_bytes / (16 << 10) / 3


def _half_a_record(near: socket.socket, context: ssl.SSLContext) -> bytes:
    """Perform a handshake, send the head of an answer, and return half of the next record."""
    arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(arrived, leaving, server_side=True)
    request = b""
    while not request.endswith(b"\r\n\r\n"):
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
            request += tls.read()
            continue
        near.sendall(leaving.read())
        arrived.write(near.recv(1 << 16))
    tls.write(_answer(1000, b""))
    near.sendall(leaving.read())
    tls.write(bytes(1000))
    return leaving.read()[:500]


@ENCRYPTED
def test_half_a_record_that_trickles_is_no_answer(run: Any, tls: ssl.SSLContext, certificate: Path) -> None:
    """Half a record cannot be decrypted, however long its bytes keep coming."""
    is_over = threading.Event()

    def talk(near: socket.socket) -> None:
        for byte in _half_a_record(near, tls):
            near.sendall(bytes([byte]))
            if is_over.wait(0.02):
                return

    async def main() -> None:
        options = {"ca_file": str(certificate.with_name("c.pem")), "read_timeout_s": 0.3}
        with Server(talk) as server:
            async with _downloads(**options) as downloads, asyncio.timeout(PATIENCE_S):
                with pytest.raises(TimeoutError, match="no answer within"):
                    await _get(downloads, server, "https", 1000)
            is_over.set()

    run(main())


@ENCRYPTED
@pytest.mark.parametrize(
    ("first", "error"), [(b"", TimeoutError), (b"HTTP/1.1 400 plain\r\n\r\n", ssl.SSLError)]
)
def test_a_server_that_speaks_no_tls_is_an_error(
    run: Any, tls: ssl.SSLContext, certificate: Path, first: bytes, error: type[Exception]
) -> None:
    """If the server says nothing, the error comes within the connect timeout."""

    def talk(near: socket.socket) -> None:
        near.sendall(first)
        while near.recv(1 << 10):
            pass

    async def main() -> None:
        options = {"ca_file": str(certificate.with_name("c.pem")), "connect_timeout_s": 0.3}
        with Server(talk) as server:
            async with _downloads(**options) as downloads, asyncio.timeout(PATIENCE_S):
                with pytest.raises(error):
                    await _get(downloads, server, "https")

    run(main())


@ENCRYPTED
def test_a_server_that_closes_amid_the_handshake_is_an_error(
    run: Any, tls: ssl.SSLContext, certificate: Path
) -> None:
    def talk(near: socket.socket) -> None:
        near.recv(10)

    async def main() -> None:
        with Server(talk) as server:
            async with _downloads(ca_file=str(certificate.with_name("c.pem"))) as downloads:
                with pytest.raises((ssl.SSLEOFError, ConnectionError)):
                    await _get(downloads, server, "https")

    run(main())


def _serving(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def _certificate(folder: Path) -> Path:
    """Create a self-signed certificate for localhost, with key and certificate in one file."""
    made = folder / "made.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [
            *command.split(),
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            made,
            "-out",
            folder / "c.pem",
        ],
        check=True,
        capture_output=True,
    )
    made.write_bytes(made.read_bytes() + (folder / "c.pem").read_bytes())
    return made


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _certificate(tmp_path_factory.mktemp("tls"))


def test_ca_certificates_are_loaded_once_until_they_change(
    run: Any, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This covers our own connections and the SDK's, however many stores there are."""
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(certificate.with_name("c.pem").read_bytes())
    made: list[str] = []

    def noting(place: Any, name: str) -> None:
        make = getattr(place, name)

        def noted(**options: Any) -> Any:
            made.append(name)
            return make(**options)

        monkeypatch.setattr(place, name, noted)

    noting(ssl, "create_default_context")
    noting(aiobotocore.httpsession, "create_urllib3_context")  # the SDK's own: not used
    context = _serving(certificate)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(ca_file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")

    def talk(near: socket.socket) -> None:
        while True:
            head = request_of(near)
            near.sendall(b"HTTP/1.1 200 X\r\nETag: x\r\nContent-Length: 10\r\n\r\n")
            if not head.startswith(b"HEAD"):
                near.sendall(b"0123456789")

    async def use() -> None:
        with Server(talk, context) as server:
            options = StoreOptions(endpoint_url=f"https://localhost:{server.port}", region="x")
            store = open_store("s3://bucket/x", options)
            await store.open(is_read_only=True)
            try:
                assert (await store.head("key")).size_bytes == 10
                await store.get_range("key", 0, 10, lambda _: None)
            finally:
                await store.close()

    for _ in range(2):
        run(use())
    assert made == ["create_default_context"]
    os.utime(ca_file, (1, 1))
    run(use())
    assert made == ["create_default_context"] * 2


@ENCRYPTED
def test_ranges_over_tls(run: Any, tls: ssl.SSLContext, certificate: Path) -> None:
    """Certificates are verified against the configured CA and no other."""
    ca_file = str(certificate.with_name("c.pem"))

    async def main() -> None:
        with Server(_answers(2), tls) as server:
            async with _downloads(ca_file=ca_file) as downloads:
                for _ in range(4):
                    assert await _get(downloads, server, "https") == b"0123456789"
            assert server.num_connections == 2
            async with _downloads() as downloads:
                with pytest.raises(ssl.SSLCertVerificationError):
                    await _get(downloads, server, "https")

    run(main())


@pytest.mark.parametrize("after_bytes", [None, 0, 3 << 20])
def test_a_cancelled_range_ends_promptly(
    run: Any, tls: ssl.SSLContext | None, certificate: Path, after_bytes: int | None
) -> None:
    """This covers cancellation before the answer, after its head, and in the middle of the body.

    As soon as the cancelled call returns, the thread is free and the sink is no longer called, even though the server
    goes on sending.
    """
    reached = threading.Event()

    def talk(near: socket.socket) -> None:
        request_of(near)
        if after_bytes is None:
            reached.set()
            near.recv(1)
            return
        near.sendall(_answer(1 << 30, b""))
        near.sendall(bytes(after_bytes))
        reached.set()
        if after_bytes:
            near.settimeout(2)  # with a closed window, the server cannot tell that the client is gone
            while True:
                near.sendall(bytes(1 << 16))
        near.recv(1)

    async def main() -> None:
        with Server(talk, tls) as server:
            async with _downloads(
                max_connections=1, ca_file=str(certificate.with_name("c.pem"))
            ) as downloads:
                pieces, has_returned = 0, False

                def sink(piece: memoryview) -> None:
                    nonlocal pieces
                    assert not has_returned
                    pieces += 1

                url = f"{_scheme(tls)}://localhost:{server.port}/x"
                for _ in range(3):  # there is one thread, which must be free again
                    reached.clear()
                    task = asyncio.ensure_future(downloads.get_range(url, 0, 1 << 30, sink, lambda _: None))
                    await asyncio.to_thread(reached.wait, PATIENCE_S)
                    assert reached.is_set()
                    task.cancel()
                    has_returned = False
                    with pytest.raises(asyncio.CancelledError):
                        async with asyncio.timeout(PATIENCE_S / 2):
                            await task
                    has_returned = True
                    seen = pieces
                    await asyncio.to_thread(downloads._threads.submit(lambda: None).result, PATIENCE_S)
                    assert pieces == seen
                    has_returned = False

    run(main())


def test_cancelling_waits_for_a_working_sink(run: Any) -> None:
    """The call must not return before the sink does, because what it writes to is closed next."""
    inside, leave, over = threading.Event(), threading.Event(), threading.Event()

    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(_answer(10, b"0123456789"))
        near.recv(1)

    def sink(piece: memoryview) -> None:
        inside.set()
        leave.wait(PATIENCE_S)
        over.set()

    async def main() -> None:
        with Server(talk) as server:
            async with _downloads() as downloads:
                url = f"http://localhost:{server.port}/x"
                task = asyncio.ensure_future(downloads.get_range(url, 0, 10, sink, lambda _: None))
                await asyncio.to_thread(inside.wait, PATIENCE_S)
                task.cancel()
                done, _ = await asyncio.wait({task}, timeout=0.2)
                assert not done
                leave.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert over.is_set()

    run(main())


def test_cancelling_while_waiting_for_a_thread(run: Any) -> None:
    """A cancelled call does not wait for the calls ahead of it, and neither does one that is still connecting."""
    asked = threading.Event()

    def talk(near: socket.socket) -> None:
        request_of(near)
        asked.set()
        near.recv(1)

    async def main() -> None:
        with Server(talk) as server:
            async with _downloads(max_connections=1) as downloads:
                first = asyncio.ensure_future(_get(downloads, server))
                await asyncio.to_thread(asked.wait, PATIENCE_S)
                second = asyncio.ensure_future(_get(downloads, server))
                await asyncio.sleep(0)
                second.cancel()
                with pytest.raises(asyncio.CancelledError):
                    async with asyncio.timeout(10):
                        await second
                assert not first.done()
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
            assert server.num_connections == 1

    run(main())


def test_an_error_of_the_sink_is_raised(run: Any) -> None:
    def refuse(piece: memoryview) -> None:
        raise OSError(28, "full")

    async def main() -> None:
        with Server(_answers(1)) as server:
            async with _downloads() as downloads:
                with pytest.raises(OSError, match="full"):
                    await downloads.get_range(
                        f"http://localhost:{server.port}/x", 0, 10, refuse, lambda _: None
                    )

    run(main())
