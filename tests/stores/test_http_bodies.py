"""Large bodies over TLS past aiohttp: connections used again, broken, refused, cancelled, or not to be used at all."""

import asyncio
import contextlib
import os
import random
import select
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from ckpt_async import StoreOptions, Uploader, restore
from ckpt_async.checksums import checksum_of
from ckpt_async.demo.seaweed import SeaweedServer
from ckpt_async.errors import FailureReason, ObjectNotFoundError, SourceError
from ckpt_async.files import Folder
from ckpt_async.stores import open_store
from ckpt_async.stores.http_bodies import Uploads
from ckpt_async.transfer import FileBody, Source
from tests.faults.proxy import FaultProxy
from tests.restore.test_http_ranges import PATIENCE_S, _request, _Server

MIB = 1 << 20
DATA = random.Random(1).randbytes(3 * MIB + 17)
DONE = b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 2\r\n\r\nok'
REFUSED = b"HTTP/1.1 503 X\r\nContent-Length: 8\r\nConnection: close\r\n\r\nSlowDown"


class Slices:
    """A body of one reused buffer, that tells where it is."""

    def __init__(self, data: bytes = DATA, good_bytes: int | None = None) -> None:
        self._data, self._good_bytes = data, len(data) if good_bytes is None else good_bytes
        self.is_being_sent = False
        self.threads: set[str] = set()

    def send_in_thread(self, write: Callable[[memoryview], object]) -> None:
        self.is_being_sent = True
        self.threads.add(threading.current_thread().name)
        buffer = bytearray(1 << 16)
        try:
            for start in range(0, len(self._data), len(buffer)):
                if start >= self._good_bytes:
                    raise SourceError("it was overwritten", reason=FailureReason.SOURCE_CHANGED)
                piece = self._data[start : start + len(buffer)]
                buffer[: len(piece)] = piece
                write(memoryview(buffer)[: len(piece)])
        finally:
            self.is_being_sent = False


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return str(tmp_path / "ca.pem")


@contextlib.asynccontextmanager
async def opened(ca_file: str, **options: Any) -> AsyncIterator[Uploads]:
    settings = {"max_connections": 4, "connect_timeout_s": 5.0, "read_timeout_s": PATIENCE_S}
    uploads = Uploads(**{**settings, **options}, ca_file=ca_file)
    try:
        yield uploads
    finally:
        uploads.close()


def put(uploads: Uploads, server: _Server, body: Slices, size_bytes: int = len(DATA)) -> Any:
    headers = {"Content-Length": str(size_bytes), "x-amz-meta": b"kept"}
    return uploads.put(f"https://localhost:{server.port}/key?partNumber=1", headers, body)


def receive(near: socket.socket, size_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < size_bytes and (data := near.recv(min(1 << 16, size_bytes - len(found)))):
        found += data
    return bytes(found)


def takes_all(received: list[bytes], num_times: int = 100) -> Callable[[socket.socket], None]:
    def talk(near: socket.socket) -> None:
        for _ in range(num_times):
            received.extend((_request(near), receive(near, len(DATA))))
            near.sendall(DONE)

    return talk


def test_it_arrives_whole_and_from_a_thread(run: Any, tls: ssl.SSLContext, ca_file: str) -> None:
    received: list[bytes] = []
    body = Slices()

    async def main() -> None:
        with _Server(takes_all(received), tls) as server:
            async with opened(ca_file) as uploads:
                for _ in range(3):
                    answer = await put(uploads, server, body)
                    assert (answer.status, answer.headers["etag"], answer.error) == (200, '"e"', b"ok")
            assert server.num_connections == 1  # used again

    run(main())
    head = received[0].decode()
    assert head.startswith("PUT /key?partNumber=1 HTTP/1.1\r\n")
    assert f"Content-Length: {len(DATA)}\r\n" in head
    assert "x-amz-meta: kept\r\n" in head
    assert received[1::2] == [DATA] * 3
    assert threading.main_thread().name not in body.threads


def test_a_server_that_closes_idle_connections(run: Any, tls: ssl.SSLContext, ca_file: str) -> None:
    """Then the body goes to a fresh one at once: no attempt is lost."""
    received: list[bytes] = []

    async def main() -> None:
        with _Server(takes_all(received, num_times=1), tls) as server:
            async with opened(ca_file) as uploads:
                for _ in range(3):
                    assert (await put(uploads, server, Slices())).status == 200
                    ready, _, _ = select.select([uploads._idle[0].sock], [], [], PATIENCE_S)
                    assert ready  # the end has arrived
            assert server.num_connections == 3

    run(main())
    assert received[1::2] == [DATA] * 3


@pytest.mark.parametrize("answer", [REFUSED, REFUSED.replace(b"Connection: close\r\n", b"")])
def test_a_refusal_before_the_body_is_sent(
    run: Any, tls: ssl.SSLContext, ca_file: str, answer: bytes
) -> None:
    """It is heard, and the rest is not sent."""
    size_bytes = 64 * len(DATA)
    received = 0

    def talk(near: socket.socket) -> None:
        nonlocal received
        _request(near)
        receive(near, 1 << 16)
        near.sendall(answer)
        with contextlib.suppress(OSError):
            received = len(receive(near, size_bytes))

    async def main() -> None:
        with _Server(talk, tls) as server:
            async with opened(ca_file) as uploads:
                found = await put(uploads, server, Slices(DATA * 64), size_bytes)
                assert (found.status, found.error) == (503, b"SlowDown")
                assert not uploads._idle

    run(main())
    assert received < size_bytes - (1 << 16)


def test_a_connection_that_breaks(run: Any, tls: ssl.SSLContext, ca_file: str) -> None:
    def talk(near: socket.socket) -> None:
        _request(near)
        receive(near, 1 << 16)

    async def main() -> None:
        with _Server(talk, tls) as server:
            async with opened(ca_file) as uploads:
                with pytest.raises(OSError):
                    await put(uploads, server, Slices(DATA * 8), 8 * len(DATA))
            assert server.num_connections == 1  # one call is one attempt

    run(main())


def test_a_file_that_changes_meanwhile(run: Any, tls: ssl.SSLContext, ca_file: str) -> None:
    """The server must not take what it has for a whole body."""
    received: list[bytes] = []
    has_ended = threading.Event()

    def talk(near: socket.socket) -> None:
        _request(near)
        with contextlib.suppress(OSError):
            received.append(receive(near, len(DATA)))
        has_ended.set()

    async def main() -> None:
        with _Server(talk, tls) as server:
            async with opened(ca_file) as uploads:
                with pytest.raises(SourceError):
                    await put(uploads, server, Slices(good_bytes=MIB))
                assert await asyncio.to_thread(has_ended.wait, PATIENCE_S)

    run(main())
    assert all(len(each) <= MIB for each in received)


def test_cancelled_it_lets_go_of_the_body(run: Any, tls: ssl.SSLContext, ca_file: str) -> None:
    """Whoever cancels closes the file next."""
    is_under_way, may_end = threading.Event(), threading.Event()

    def talk(near: socket.socket) -> None:
        _request(near)
        receive(near, 1 << 16)
        is_under_way.set()
        may_end.wait(PATIENCE_S)  # reads no more: the body is stuck

    async def main() -> None:
        body = Slices(DATA * 8)
        with _Server(talk, tls) as server:
            async with opened(ca_file) as uploads:
                sending = asyncio.ensure_future(put(uploads, server, body, 8 * len(DATA)))
                assert await asyncio.to_thread(is_under_way.wait, PATIENCE_S)
                assert body.is_being_sent
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending
                assert not body.is_being_sent
            may_end.set()

    run(main())


def test_a_server_that_reads_no_more(run: Any, tls: ssl.SSLContext, ca_file: str) -> None:
    may_end = threading.Event()

    def talk(near: socket.socket) -> None:
        _request(near)
        may_end.wait(PATIENCE_S)

    async def main() -> None:
        with _Server(talk, tls) as server:
            async with opened(ca_file, read_timeout_s=0.2) as uploads:
                with pytest.raises(TimeoutError):
                    await put(uploads, server, Slices(DATA * 8), 8 * len(DATA))
            may_end.set()

    run(main())


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The addresses that bodies went to past aiohttp."""
    found: list[str] = []
    original = Uploads.put

    async def noting(self: Uploads, url: str, *rest: Any) -> Any:
        found.append(url)
        return await original(self, url, *rest)

    monkeypatch.setattr(Uploads, "put", noting)
    return found


@pytest.mark.parametrize("way", ["free", "capped", "proxied", "small"])
def test_a_shard_over_tls(
    s3_server: SeaweedServer,
    s3_url: str,
    tls: ssl.SSLContext,
    ca_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    noted: list[str],
    way: str,
) -> None:
    """It comes back as it was; what a thread cannot do (wait for a bandwidth cap, use a proxy) is done as before."""
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)
    shard = tmp_path / "folder" / "shard.bin"
    shard.parent.mkdir()
    shard.write_bytes(random.Random(2).randbytes(MIB - 1 if way == "small" else 11 * MIB + 3))
    with FaultProxy(s3_server.url, tls=tls) as proxy:
        options = StoreOptions(endpoint_url=proxy.url)
        if way == "proxied":
            monkeypatch.setattr("ckpt_async.stores.s3.has_proxy", lambda _: True)
        with Uploader(
            shard.parent,
            s3_url,
            rank=0,
            world_size=1,
            store_options=options,
            part_size_bytes=5 * MIB,
            max_bytes_per_s=1e9 if way == "capped" else 0,
        ) as uploader:
            uploader.enqueue(shard, step=1)
            uploader.seal(1)
            uploader.wait(1, timeout_s=60)
        found = restore.fetch_latest(s3_url, tmp_path / "back", store_options=options)
    assert found is not None
    assert (tmp_path / "back" / "shard.bin").read_bytes() == shard.read_bytes()
    assert len(noted) == {"free": 3, "small": 1}.get(way, 0)


def test_a_truncated_shard_over_tls(
    s3_server: SeaweedServer,
    s3_url: str,
    tls: ssl.SSLContext,
    ca_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    noted: list[str],
    run: Any,
) -> None:
    """Through the store it is still the shard's failure, not the connection's."""
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)
    path = tmp_path / "shard.bin"
    path.write_bytes(DATA)
    folder = Folder(tmp_path)
    identity, _ = folder.link("shard.bin", "spool/shard.bin")
    source = Source(folder.open_source("shard.bin", None, identity), identity, str(path))
    os.truncate(path, 2 * MIB)

    async def main(endpoint_url: str) -> None:
        store = open_store(s3_url, StoreOptions(endpoint_url=endpoint_url))
        await store.open(is_read_only=True)
        try:
            progress: Any = Unpaced()
            with pytest.raises(SourceError, match="truncated"):
                await store.put(
                    "key", FileBody(source, 0, len(DATA), progress), checksum_of(DATA, "crc64nvme")
                )
            with pytest.raises(ObjectNotFoundError):
                await store.head("key")
        finally:
            await store.close()

    with FaultProxy(s3_server.url, tls=tls) as proxy, contextlib.closing(source):
        run(main(proxy.url))
    assert noted


class Unpaced:
    """A `Progress` that nobody watches."""

    is_paced = False

    def moved_in_thread(self, *, is_last: bool = False) -> None:
        pass
