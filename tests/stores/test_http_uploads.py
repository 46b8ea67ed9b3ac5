"""Uploads that bypass aiohttp, over connections reused, broken, refused, cancelled, answered oddly or unusable."""

import asyncio
import contextlib
import os
import random
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.auth
import pytest

from ckpt_async import StoreOptions, Uploader, restore
from ckpt_async.errors import ObjectNotFoundError, SourceError
from ckpt_async.local.folder import Folder
from ckpt_async.stores import open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.http import connections, messages
from ckpt_async.stores.http import uploads as http_bodies
from ckpt_async.stores.http.uploads import Uploads
from ckpt_async.stores.interface import BodyWriter, BytesBody
from ckpt_async.transfer.source import FileBody, Source
from tests.faults.proxy import FaultProxy
from tests.seaweed import SeaweedServer
from tests.stores.http_server import PATIENCE_S, request_of
from tests.stores.http_wire import (
    BAD_ANSWERS,
    BROKEN,
    DATA,
    DONE,
    GOOD_ANSWERS,
    LONG,
    MIB,
    REFUSED,
    Slices,
    Wire,
    content_length,
    receive,
    say_last,
    takes_all,
)


@pytest.fixture(params=["http", "https"])
def wire(request: pytest.FixtureRequest, tls: ssl.SSLContext, ca_file: str) -> Wire:
    return Wire(request.param, tls, ca_file)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a stuck socket be checked soon, and an early answer at once, as bodies on loopback take too little time."""
    monkeypatch.setattr(connections, "BLOCK_S", 0.05)
    monkeypatch.setattr(http_bodies, "LISTEN_S", 0.0)


# --- one body ------------------------------------------------------------------------------------------------------


def test_a_body_arrives_complete_and_is_sent_from_a_thread(run: Any, wire: Wire) -> None:
    received: list[bytes] = []
    body = Slices()

    async def main() -> None:
        with wire.server(takes_all(received)) as server:
            async with wire.uploads() as uploads:
                for _ in range(3):
                    answer = await wire.put(uploads, server, body)
                    assert (answer.status, answer.headers["etag"], answer.error) == (200, '"e"', b"ok")
            assert server.num_connections == 1  # the connection was reused

    run(main())
    head = received[0].decode()
    assert head.startswith("PUT /key?partNumber=1 HTTP/1.1\r\nHost: localhost:")
    assert f"Content-Length: {len(DATA)}\r\n" in head
    assert "x-amz-meta: kept\r\n" in head
    assert received[1::2] == [DATA] * 3
    assert threading.main_thread().name not in body.threads


def test_an_empty_body(run: Any, wire: Wire) -> None:
    received: list[bytes] = []

    async def main() -> None:
        with wire.server(takes_all(received)) as server:
            async with wire.uploads() as uploads:
                assert (await wire.put(uploads, server, Slices(b""))).status == 200

    run(main())
    assert received[1] == b""


def test_an_idle_connection_closed_by_the_server_is_replaced(run: Any, wire: Wire) -> None:
    """The body then goes to a new connection at once, so no attempt is lost."""
    received: list[bytes] = []

    async def main() -> None:
        with wire.server(takes_all(received, num_times=1)) as server:
            async with wire.uploads() as uploads:
                for _ in range(3):
                    assert (await wire.put(uploads, server)).status == 200
                    ready, _, _ = select.select([uploads._idle[0][0].sock], [], [], PATIENCE_S)
                    assert ready  # the end of the connection has arrived
            assert server.num_connections == 3

    run(main())
    assert received[1::2] == [DATA] * 3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("reads_on", [True, False])
@pytest.mark.parametrize("answer", [REFUSED, REFUSED.replace(b"Connection: close\r\n", b"")])
def test_a_refusal_before_the_body_is_sent_is_reported(
    run: Any, wire: Wire, answer: bytes, reads_on: bool
) -> None:
    """It is heard even if the connection stays open and nobody reads the rest of the body, which is not sent."""
    received = 0
    is_over = threading.Event()

    def talk(near: socket.socket) -> None:
        nonlocal received
        request_of(near)
        receive(near, 1 << 16)
        near.sendall(answer)
        if not reads_on:
            assert is_over.wait(PATIENCE_S)
        with contextlib.suppress(OSError):
            received = len(receive(near, 2 * len(LONG)))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                found = await wire.put(uploads, server, Slices(LONG * 2))
                is_over.set()
                assert (found.status, found.error) == (503, b"SlowDown")
                assert not uploads._idle

    run(main())
    assert received < 2 * len(LONG) - (1 << 16)


def test_a_refusal_followed_by_a_reset_is_reported(run: Any, wire: Wire) -> None:
    """A server that closes a connection while a body is in transit resets it; the answer counts, not the reset."""

    def talk(near: socket.socket) -> None:
        request_of(near)
        receive(near, 1 << 16)
        say_last(near, REFUSED)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                # The body is a single slice, so nobody checks for an answer between two slices.
                found = await wire.put(uploads, server, Slices(LONG, slice_bytes=len(LONG)))
                assert (found.status, found.error) == (503, b"SlowDown")

    run(main())


@pytest.mark.parametrize(
    "cut",
    [
        b"HTTP/1.1 403 No\r\nContent-Length: 800\r\n\r\n<Code>AccessDenied</Code>",
        b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n19\r\n<Code>AccessDenied</Code>\r\n80\r\n<Mess",
    ],
)
def test_a_truncated_refusal_is_still_a_refusal(run: Any, wire: Wire, cut: bytes) -> None:
    def talk(near: socket.socket) -> None:
        request_of(near)
        say_last(near, cut)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                found = await wire.put(uploads, server, Slices(LONG))
                assert found.as_sdk_response()["Error"]["Code"] == "AccessDenied"

    run(main())


@pytest.mark.usefixtures("quick")
def test_a_success_before_the_body_is_sent_is_an_error(run: Any, wire: Wire) -> None:
    """Nobody can have stored what has not arrived."""
    is_over = threading.Event()

    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(DONE)
        assert is_over.wait(PATIENCE_S)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                with pytest.raises(ConnectionError, match="200 before it had received the whole body"):
                    await wire.put(uploads, server, Slices(LONG))
            is_over.set()

    run(main())


def test_a_broken_connection_is_an_error(run: Any, wire: Wire) -> None:
    def talk(near: socket.socket) -> None:
        request_of(near)
        receive(near, 1 << 16)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                with pytest.raises(ConnectionError):
                    await wire.put(uploads, server, Slices(LONG))
            assert server.num_connections == 1  # one call is one attempt

    run(main())


def test_stop_iteration_within_a_request_is_an_error_and_no_hang(run: Any, wire: Wire) -> None:
    """No future takes StopIteration, so nobody would hear of it."""

    async def main() -> None:
        async with wire.uploads() as uploads:
            with pytest.raises(RuntimeError, match="StopIteration"):
                await asyncio.wait_for(uploads._in_thread(lambda token: next(iter(()))), PATIENCE_S)

    run(main())


def test_a_file_that_changes_during_the_upload_is_an_error(run: Any, wire: Wire) -> None:
    """The server must not take what it has received for a complete body."""
    received: list[bytes] = []
    has_ended = threading.Event()

    def talk(near: socket.socket) -> None:
        request_of(near)
        with contextlib.suppress(OSError):
            received.append(receive(near, len(DATA)))
        has_ended.set()

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                with pytest.raises(SourceError):
                    await wire.put(uploads, server, Slices(good_bytes=MIB))
                assert await asyncio.to_thread(has_ended.wait, PATIENCE_S)

    run(main())
    assert all(len(each) <= MIB for each in received)


def test_a_cancelled_upload_releases_the_body(run: Any, wire: Wire) -> None:
    """The caller closes the file right after cancelling."""
    is_under_way, may_end = threading.Event(), threading.Event()

    def talk(near: socket.socket) -> None:
        request_of(near)
        receive(near, 1 << 16)
        is_under_way.set()
        may_end.wait(PATIENCE_S)  # stops reading, so the body is stuck

    async def main() -> None:
        body = Slices(LONG)
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                sending = asyncio.ensure_future(wire.put(uploads, server, body))
                assert await asyncio.to_thread(is_under_way.wait, PATIENCE_S)
                assert body.is_being_sent
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending
                assert not body.is_being_sent
            may_end.set()

    run(main())


class Held(Slices):
    """A body that waits for a bandwidth cap."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def send(self, writer: BodyWriter) -> None:
        writer.write(memoryview(DATA)[:MIB])
        self.waits.set()
        writer.wait(3600)
        writer.write(memoryview(DATA)[MIB:])


def test_who_waits_for_a_bandwidth_cap_is_woken_by_cancelling(run: Any, wire: Wire) -> None:
    body = Held()

    async def main() -> None:
        with wire.server(takes_all([])) as server:
            async with wire.uploads() as uploads:
                sending = asyncio.ensure_future(wire.put(uploads, server, body))
                assert await asyncio.to_thread(body.waits.wait, PATIENCE_S)
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(sending, PATIENCE_S)

    run(main())


def test_who_waits_for_a_bandwidth_cap_hears_a_refusal(run: Any, wire: Wire) -> None:
    def talk(near: socket.socket) -> None:
        request_of(near)
        receive(near, MIB)
        say_last(near, REFUSED)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                found = await asyncio.wait_for(wire.put(uploads, server, Held()), PATIENCE_S)
                assert (found.status, found.error) == (503, b"SlowDown")

    run(main())


def test_a_short_body_is_not_taken_for_a_whole_one(run: Any, wire: Wire) -> None:
    class Short(Slices):
        def send(self, writer: BodyWriter) -> None:
            writer.write(memoryview(DATA)[:MIB])

    async def main() -> None:
        with wire.server(takes_all([])) as server:
            async with wire.uploads() as uploads:
                with pytest.raises(SourceError, match=f"gave {MIB} of {len(DATA)} bytes"):
                    await wire.put(uploads, server, Short())
                assert not uploads._idle

    run(main())


@pytest.mark.parametrize("reads", [True, False])
def test_a_server_that_stops_responding_is_an_error(run: Any, wire: Wire, reads: bool) -> None:
    """The server stops reading, or never answers."""
    may_end = threading.Event()

    def talk(near: socket.socket) -> None:
        head = request_of(near)
        if reads:
            receive(near, content_length(head))
        may_end.wait(PATIENCE_S)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads(read_timeout_s=0.2) as uploads:
                with pytest.raises(TimeoutError):
                    await wire.put(uploads, server, Slices(LONG))
            may_end.set()

    run(main())


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [5, MIB])
@pytest.mark.parametrize("kind", GOOD_ANSWERS)
def test_responses_of_every_framing_are_read(run: Any, wire: Wire, kind: str, piece_bytes: int) -> None:
    """This also covers whether the connection is reused."""
    answer, status, content, is_kept = GOOD_ANSWERS[kind]

    def talk(near: socket.socket) -> None:
        while True:
            receive(near, content_length(request_of(near)))
            for start in range(0, len(answer), piece_bytes):
                near.sendall(answer[start : start + piece_bytes])
            if kind == "without a length":
                return  # this is how such an answer ends

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                for _ in range(2):
                    found = await wire.put(uploads, server, Slices(b"body"))
                    assert (found.status, found.error) == (status, content)
            assert server.num_connections == (1 if is_kept else 2)

    run(main())


@pytest.mark.fault("F71")
@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_an_invalid_response_is_an_error(run: Any, wire: Wire, kind: str) -> None:
    def talk(near: socket.socket) -> None:
        receive(near, content_length(request_of(near)))
        near.sendall(BAD_ANSWERS[kind])

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                with pytest.raises(BROKEN):
                    await wire.put(uploads, server, Slices(b"body"))
                assert not uploads._idle
            assert server.num_connections == 1

    run(main())


def test_interim_responses_during_the_body(run: Any, wire: Wire) -> None:
    """A server may send an unsolicited 100 Continue, which is no refusal."""
    received: list[bytes] = []

    def talk(near: socket.socket) -> None:
        while True:
            head = request_of(near)
            near.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            received.append(receive(near, content_length(head)))
            near.sendall(DONE)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                for _ in range(2):
                    assert (await wire.put(uploads, server, Slices(LONG))).status == 200
            assert server.num_connections == 1

    run(main())
    assert received == [LONG] * 2


class Clock:
    """The module `time`, which records when it has been read often enough."""

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks
        self.was_looked_at = threading.Event()

    def monotonic(self) -> float:
        self._num_looks -= 1
        if self._num_looks <= 0:
            self.was_looked_at.set()
        return time.monotonic()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["usual", "chunked"])
def test_a_response_may_pause(run: Any, wire: Wire, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket's own timeout only serves to check the clock: an answer has `read_timeout_s`."""
    clock = Clock(6)  # more often than the pieces of the answer account for
    answer = GOOD_ANSWERS[kind][0]

    def talk(near: socket.socket) -> None:
        receive(near, content_length(request_of(near)))
        near.sendall(answer[:-1])
        assert clock.was_looked_at.wait(PATIENCE_S)
        near.sendall(answer[-1:])

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                monkeypatch.setattr(connections, "time", clock)
                assert (await wire.put(uploads, server, Slices(b"body"))).error == b"ok"

    run(main())


@pytest.mark.usefixtures("quick")
def test_a_body_may_pause(run: Any, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending resumes with exactly the next byte, even if the body is sent together with the head."""
    clock = Clock(4)
    received: list[bytes] = []

    def talk(near: socket.socket) -> None:
        assert clock.was_looked_at.wait(PATIENCE_S)
        takes_all(received, num_times=1)(near)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                monkeypatch.setattr(http_bodies, "time", clock)
                await wire.put(uploads, server, Slices(LONG, slice_bytes=len(LONG)))

    run(main())
    assert received[1] == LONG


def test_an_endless_response_head_is_an_error(run: Any, wire: Wire) -> None:
    """It must not be collected until memory runs out."""
    is_over = threading.Event()

    def talk(near: socket.socket) -> None:
        receive(near, content_length(request_of(near)))
        near.sendall(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000)
        assert is_over.wait(PATIENCE_S)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                with pytest.raises(http_bodies.http.client.LineTooLong):
                    await wire.put(uploads, server, Slices(b"body"))
            is_over.set()

    run(main())


# --- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers", [{"a": "b\r\nx-evil: 1"}, {"a": b"b\nx-evil: 1"}, {"a\r\nx-evil": "1"}, {"a": "b\rc"}]
)
def test_a_line_break_in_a_header_is_rejected(run: Any, wire: Wire, headers: dict[str, str | bytes]) -> None:
    """It would start another header or even another request."""
    heard: list[bytes] = []

    async def main() -> None:
        with wire.server(takes_all(heard)) as server:
            async with wire.uploads() as uploads:
                with pytest.raises(ValueError, match="line break"):
                    await uploads.put(wire.url(server), {"Content-Length": "4", **headers}, Slices(b"body"))

    run(main())
    assert not heard


@pytest.mark.parametrize(
    "url",
    [
        "https://bucket.s3.amazonaws.com/key",
        "https://Store.Local:443/b/key",
        "http://store.local:80/b/key",
        "http://store.local:443/b/key",
        "https://user:word@store.local:9000/b/key",
        "http://[::1]:8333/b/key",
        "https://[FE80::1]/b/key",
    ],
)
def test_the_host_header_matches_the_one_the_sdk_signs(url: str) -> None:
    """Otherwise a server that computes the signature from the header would find it wrong."""
    assert messages.host_of(urlsplit(url)) == botocore.auth._host_from_url(url)


def test_an_ipv6_address_without_a_port(ca_file: str) -> None:
    uploads = Uploads(max_connections=1, connect_timeout_s=1, read_timeout_s=1, ca_file=ca_file)
    for url, port in (("http://[::1]/b", 80), ("https://[::1]/b", 443), ("http://[::1]:8333/b", 8333)):
        connection = uploads._connect(urlsplit(url))
        assert (connection.host, connection.port) == ("::1", port)
    uploads.close()


# --- through the store ---------------------------------------------------------------------------------------------


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the addresses of bodies that were sent without aiohttp."""
    found: list[str] = []
    original = Uploads.put

    async def noting(self: Uploads, url: str, *rest: Any) -> Any:
        if "shard.bin" in url or "/key" in url:
            found.append(url)
        return await original(self, url, *rest)

    monkeypatch.setattr(Uploads, "put", noting)
    return found


@pytest.mark.parametrize("way", ["free", "capped", "small"])
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
    """The shard reads back unchanged."""
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)
    shard = tmp_path / "folder" / "shard.bin"
    shard.parent.mkdir()
    shard.write_bytes(random.Random(2).randbytes(MIB - 1 if way == "small" else 11 * MIB + 3))
    with FaultProxy(s3_server.url, tls=tls) as proxy:
        options = StoreOptions(endpoint_url=proxy.url)
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
    assert len(noted) == {"free": 3, "capped": 3, "small": 1}[way]


def test_a_record_does_not_queue_behind_shards(s3_url: str, run: Any) -> None:
    """All ranks wait for receipts and decisions."""

    async def main() -> None:
        store = open_store(s3_url, StoreOptions(max_connections=1))
        await store.open()
        shard = Held()
        try:
            sending = asyncio.ensure_future(store.put("shard", shard, checksum_of(DATA, "crc64nvme")))
            assert await asyncio.to_thread(shard.waits.wait, PATIENCE_S)
            await store.put("record", BytesBody(b"1"), checksum_of(b"1", "crc64nvme"))
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        finally:
            await store.close()

    run(main())


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
    """Even through the store this is reported as a failure of the shard, not of the connection."""
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)
    path = tmp_path / "shard.bin"
    path.write_bytes(DATA)
    folder = Folder(tmp_path)
    [(identity, _)] = folder.link([("shard.bin", "shard.bin")], "spool")
    source = Source(folder.open_source("shard.bin", None, identity), identity, str(path))
    os.truncate(path, 2 * MIB)

    async def main(endpoint_url: str) -> None:
        store = open_store(s3_url, StoreOptions(endpoint_url=endpoint_url))
        await store.open(is_read_only=True)
        try:
            progress: Any = Unpaced()
            body = FileBody(source, 0, len(DATA), progress)
            with pytest.raises(SourceError, match="truncated"):
                await store.put("key", body, checksum_of(DATA, "crc64nvme"))
            with pytest.raises(ObjectNotFoundError):
                await store.head("key")
        finally:
            await store.close()

    with FaultProxy(s3_server.url, tls=tls) as proxy, contextlib.closing(source):
        run(main(proxy.url))
    assert noted


class Unpaced:
    """A `Progress` that nobody watches."""

    def sends_through(self, writer: Any) -> None:
        pass

    def may_send_in_thread(self, size_bytes: int, wait: Any) -> None:
        pass

    def moved_in_thread(self, *, is_last: bool = False) -> None:
        pass


# --- what the kernel has taken -------------------------------------------------------------------------------------


@pytest.mark.fault("F86")
@pytest.mark.usefixtures("quick")
def test_what_is_still_on_its_way_needs_no_answer_yet(run: Any, wire: Wire) -> None:
    """On a slow link the kernel's buffers of 4 MiB take minutes to empty."""
    size_bytes = 2 * MIB

    def talk(near: socket.socket) -> None:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        left = content_length(request_of(near))
        while left:
            left -= len(near.recv(min(left, 96 << 10)))
            assert not select.select([], [], [], 0.05)[0]  # reads slowly
        near.sendall(DONE)

    async def main() -> float:
        with wire.server(talk) as server:
            async with wire.uploads(read_timeout_s=0.4) as uploads:
                began = time.monotonic()
                assert (await wire.put(uploads, server, Slices(bytes(size_bytes)))).status == 200
                return time.monotonic() - began

    assert run(main()) > 0.8  # otherwise this would test nothing


def test_a_large_piece_may_take_longer_than_the_store_may_take_no_data(run: Any, wire: Wire) -> None:
    """Over TLS, a piece is taken as a whole."""

    def talk(near: socket.socket) -> None:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        left = content_length(request_of(near))
        while left:
            if left > 6 * MIB:  # the kernel can take the rest at once
                assert not select.select([], [], [], 0.5)[0]  # longer than one call may block
            for _ in range(24):
                left -= len(near.recv(min(left, 64 << 10)))
        near.sendall(DONE)

    class Whole(Slices):
        def send(self, writer: BodyWriter) -> None:
            writer.write(memoryview(bytes(self.size_bytes)))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads(read_timeout_s=0.4) as uploads:
                assert (await wire.put(uploads, server, Whole(bytes(12 * MIB)))).status == 200

    run(main())


class Queued(Slices):
    """A body that signals when much of it waits in the kernel."""

    def __init__(self) -> None:
        super().__init__(bytes(32 * MIB))
        self.waits = threading.Event()

    def send(self, writer: BodyWriter) -> None:
        for _ in range(0, self.size_bytes, MIB // 4):
            writer.write(memoryview(bytes(MIB // 4)))
            if writer.queued_bytes() >= 2 * MIB:
                self.waits.set()


@pytest.mark.fault("F86")
def test_of_a_request_that_is_given_up_nothing_more_is_sent(run: Any, wire: Wire) -> None:
    """The bytes of an abandoned attempt would take bandwidth from the next one."""
    may_read, arrived, body = threading.Event(), [], Queued()

    def talk(near: socket.socket) -> None:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        request_of(near)
        assert may_read.wait(PATIENCE_S)
        arrived.append(0)
        with contextlib.suppress(OSError):
            while data := near.recv(MIB):
                arrived[0] += len(data)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.uploads() as uploads:
                sending = asyncio.ensure_future(wire.put(uploads, server, body))
                assert await asyncio.to_thread(body.waits.wait, PATIENCE_S)
                sending.cancel()
                await asyncio.wait([sending])
                may_read.set()

    run(main())
    assert arrived[0] < 2 * MIB
