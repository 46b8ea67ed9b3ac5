"""A shard as a request body: exactly the file reaches the socket, or the attempt fails and says why."""

import asyncio
import contextlib
import errno
import itertools
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trustme

from ckpt_async.errors import FailureReason, SourceError, StoreError
from ckpt_async.local.folder import Folder
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.http import uploads
from ckpt_async.stores.http.connections import let_block
from ckpt_async.stores.http.uploads import Exchange
from ckpt_async.transfer import source as source_module
from ckpt_async.transfer.source import FileBody, Source

MIB = 1 << 20
SIZE = 9 * MIB + 17
OFFSET = MIB + 5
HEAD = b"PUT /key HTTP/1.1\r\n\r\n"
DONE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
PATIENCE_S = 30.0


class Moves:
    """A `Progress` that only records calls."""

    def __init__(self) -> None:
        self.lasts: list[bool] = []

    def sends_through(self, writer: Any) -> None:
        pass

    def may_send_in_thread(self, size_bytes: int, wait: Callable[[float], None]) -> None:
        pass

    def not_sent(self, size_bytes: int) -> None:
        pass

    def moved_in_thread(self, *, is_last: bool = False) -> None:
        self.lasts.append(is_last)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shard.bin"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


@pytest.fixture
def source(path: Path) -> Iterator[Source]:
    folder = Folder(path.parent)
    [(identity, _)] = folder.link([("shard.bin", "shard.bin")], "spool")
    source = Source(folder.open_source("shard.bin", None, identity), identity, str(path))
    yield source
    source.close()


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = trustme.CA()
    near, far = ssl.create_default_context(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.configure_trust(near)
    authority.issue_cert("localhost").configure_cert(far)
    return near, far


class Link:
    """A TCP connection with small buffers, so that the sender has to wait for the reader many times."""

    def __init__(self, contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            near = socket.create_connection(listening.getsockname())
            far, _ = listening.accept()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        self._pool = ThreadPoolExecutor(2)
        if contexts:
            ours, theirs = contexts
            accepting = self._pool.submit(theirs.wrap_socket, far, server_side=True)
            near = ours.wrap_socket(near, server_hostname="localhost")
            far = accepting.result(PATIENCE_S)
        self.near, self.far = near, far
        self.far.settimeout(PATIENCE_S)
        let_block(near, PATIENCE_S)

    def send(self, source: Source, moves: Moves | None = None) -> "Future[Any]":
        progress: Any = moves or Moves()
        body = FileBody(source, OFFSET, SIZE - OFFSET, progress)
        return self._pool.submit(Exchange(self.near, PATIENCE_S).make, HEAD, body)

    def receive(self, size_bytes: int) -> bytes:
        found = bytearray()
        while len(found) < size_bytes and (data := self.far.recv(min(1 << 15, size_bytes - len(found)))):
            found += data
        return bytes(found)

    def finish(self, sending: "Future[Any]") -> None:
        """Receive the whole body and send the answer."""
        self.receive(len(HEAD) + SIZE - OFFSET)
        self.far.sendall(DONE)
        sending.result(PATIENCE_S)

    def drain(self) -> None:
        """Keep reading, so that the sender never has to wait for the reader again."""
        self._pool.submit(self.receive, SIZE)

    def close(self) -> None:
        for each in (self.near, self.far):
            each.close()
        self._pool.shutdown()


@pytest.fixture
def link(request: pytest.FixtureRequest, contexts: Any) -> Iterator[Link]:
    link = Link(contexts if getattr(request, "param", "plain") == "tls" else None)
    yield link
    link.close()


class Kernel:
    """`os.sendfile` that may fail, from a given call on or for a single call."""

    def __init__(self) -> None:
        self.num_calls = self.num_sent = 0
        self.refuses: Callable[[int], int] = lambda _: 0
        self._sendfile = os.sendfile

    def __call__(self, *arguments: int) -> int:
        self.num_calls += 1
        if number := self.refuses(self.num_calls):
            raise OSError(number, os.strerror(number))
        self.num_sent += 1
        return self._sendfile(*arguments)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(os, "sendfile", kernel)
    return kernel


ALL_WAYS = pytest.mark.parametrize(
    ("link", "refused"), [("plain", 0), ("plain", errno.EINVAL), ("tls", 0)], indirect=["link"]
)


@ALL_WAYS
def test_a_range_arrives_at_any_read_speed(
    path: Path, source: Source, link: Link, kernel: Kernel, refused: int
) -> None:
    kernel.refuses = lambda _: refused
    moves = Moves()
    sending = link.send(source, moves)
    assert link.receive(len(HEAD)) == HEAD
    assert link.receive(SIZE - OFFSET) == path.read_bytes()[OFFSET:]
    link.far.sendall(DONE)
    answer, is_last = sending.result(PATIENCE_S)
    assert (answer.status, is_last) == (200, False)
    assert moves.lasts[-1]
    assert not any(moves.lasts[:-1])
    assert bool(kernel.num_sent) == (not refused and not isinstance(link.near, ssl.SSLSocket))


@pytest.mark.parametrize("link", ["plain", "tls"], indirect=True)
def test_the_kernel_waits_for_the_link(source: Source, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Python did, each wait would cost training in the same interpreter a moment. With TLS 1.3, there is something
    to read at once: the session tickets.
    """
    monkeypatch.setattr(uploads, "LISTEN_S", 0.0)
    assert os.get_blocking(link.near.fileno())
    link.finish(link.send(source))
    assert os.get_blocking(link.near.fileno())


def test_a_part_begins_with_slices_as_large_as_the_last_one_came_to_unless_that_failed(
    source: Source, link: Link, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training in the same interpreter loses a moment with each call."""
    monkeypatch.setattr(source_module, "FAST_S", PATIENCE_S)  # fast, whatever the speed of this machine

    def num_calls(*, is_broken: bool = False) -> int:
        before = kernel.num_calls
        kernel.refuses = lambda call: errno.ECONNRESET if is_broken and call == before + 1 else 0
        sending = link.send(source)
        if is_broken:
            link.drain()
            with pytest.raises(ConnectionError):
                sending.result(PATIENCE_S)
        else:
            link.receive(len(HEAD) + SIZE - OFFSET)
            link.far.sendall(DONE)
            sending.result(PATIENCE_S)
        return kernel.num_calls - before

    first, second = num_calls(), num_calls()
    assert (first, second) == (6, 1)
    num_calls(is_broken=True)
    assert source.send_bytes == source_module.FIRST_SEND_BYTES


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
@pytest.mark.parametrize("first_refused", [1, 4])
def test_slices_are_sent_where_sendfile_is_unsupported(
    path: Path, source: Source, link: Link, kernel: Kernel, number: int, first_refused: int
) -> None:
    """Whether sendfile fails from the start or midway, what was already sent must not be sent again."""
    kernel.refuses = lambda call: number if call >= first_refused else 0
    sending = link.send(source)
    assert link.receive(len(HEAD) + SIZE - OFFSET) == HEAD + path.read_bytes()[OFFSET:]
    link.far.sendall(DONE)
    assert sending.result(PATIENCE_S)[0].status == 200
    assert kernel.num_sent == first_refused - 1


@pytest.mark.parametrize(
    ("number", "is_of_the_disk"), [(errno.EIO, True), (errno.EHOSTUNREACH, False), (errno.ECONNRESET, False)]
)
def test_disk_errors_are_distinguished_from_network_errors(
    source: Source, link: Link, kernel: Kernel, number: int, is_of_the_disk: bool
) -> None:
    """One system call covers both disk and network."""
    kernel.refuses = lambda call: number if call == 2 else 0
    sending = link.send(source)
    link.drain()
    with pytest.raises(StoreError if is_of_the_disk else ConnectionError) as failed:
        sending.result(PATIENCE_S)
    if isinstance(failed.value, StoreError):
        assert failed.value.reason is FailureReason.DISK
        assert "shard.bin" in str(failed.value)


@ALL_WAYS
@pytest.mark.parametrize("how", ["truncated", "overwritten"])
def test_a_file_that_changes_during_the_upload_fails_the_attempt(
    path: Path, source: Source, link: Link, kernel: Kernel, refused: int, how: str
) -> None:
    kernel.refuses = lambda _: refused
    sending = link.send(source)
    link.receive(MIB)
    if how == "truncated":
        os.truncate(path, OFFSET + 4 * MIB)
    else:
        with path.open("r+b") as file:
            file.write(b"x")
    link.drain()
    with pytest.raises(SourceError) as failed:
        sending.result(PATIENCE_S)
    assert failed.value.reason is FailureReason.SOURCE_CHANGED


@ALL_WAYS
def test_a_peer_that_disconnects_is_a_connection_error(
    source: Source, link: Link, kernel: Kernel, refused: int
) -> None:
    kernel.refuses = lambda _: refused
    sending = link.send(source)
    link.receive(MIB)
    link.far.close()
    with pytest.raises(ConnectionError):
        sending.result(PATIENCE_S)


@ALL_WAYS
def test_progress_is_reported_often_on_a_slow_link(
    source: Source, link: Link, kernel: Kernel, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog must see bytes move: if it heard only of 4 MiB at a time, it would take 100 KB/s for a stall."""
    monkeypatch.setattr(source_module, "FAST_S", 0.0)  # every call takes longer than this
    kernel.refuses = lambda _: refused
    told_of: list[int] = []

    class Telling(Moves):
        def moved_in_thread(self, *, is_last: bool = False) -> None:
            told_of.append(received[0])

    received, size_bytes = [0], len(HEAD) + SIZE - OFFSET
    sending = link.send(source, Telling())
    while received[0] < size_bytes:
        received[0] += len(link.receive(min(1 << 15, size_bytes - received[0])))
    link.far.sendall(DONE)
    sending.result(PATIENCE_S)
    gaps = [after - before for before, after in itertools.pairwise(told_of)]
    assert len(told_of) > (SIZE - OFFSET) // (256 << 10)
    assert max(gaps) < 2 * MIB


def test_few_system_calls_on_a_fast_link(
    source: Source, link: Link, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "FAST_S", 1000.0)  # no call takes longer than this
    link.finish(link.send(source))
    assert kernel.num_calls < 20


def test_one_part_begins_where_the_last_one_ended(
    source: Source, link: Link, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even while another part is under way; after a failure the speed of the link is unknown again."""
    monkeypatch.setattr(source_module, "FAST_S", 1000.0)  # no call takes longer than this
    link.finish(link.send(source))
    assert source.send_bytes > 2 * MIB
    reached, kernel.num_calls = source.send_bytes, 0
    sending = link.send(source)
    link.receive(len(HEAD) + MIB)
    assert source.send_bytes == reached
    assert kernel.num_calls == 1
    link.far.close()
    with pytest.raises(ConnectionError):
        sending.result(PATIENCE_S)
    assert source.send_bytes == source_module.FIRST_SEND_BYTES


def test_nobody_listens_on_a_fast_link(
    source: Source, link: Link, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check takes the GIL from training."""
    monkeypatch.setattr(uploads, "LISTEN_S", 1000.0)
    monkeypatch.setattr(uploads, "has_unread", lambda _: pytest.fail("it has listened"))
    link.finish(link.send(source))
    assert kernel.num_calls > 1


# --- checksums ---------------------------------------------------------------------------------------------


def test_few_checksums_of_a_shard_are_computed_at_once(
    source: Source, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its parts would wait for theirs at the same time, with nothing on the wire. The buffers are kept."""
    at_once, most, lock, read_into = 0, 0, threading.Lock(), Source.read_into
    buffers: list[memoryview] = []
    monkeypatch.setattr(source_module, "_free_buffers", buffers)

    def counting(source: Source, piece: memoryview, offset: int) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        read_into(source, piece, offset)
        with lock:
            at_once -= 1

    monkeypatch.setattr(Source, "read_into", counting)

    async def main() -> None:
        ranges = [(number * MIB, MIB) for number in range(8)]
        found = await asyncio.gather(*(source.checksum(*each, "crc64nvme") for each in ranges))
        data = path.read_bytes()
        assert found == [checksum_of(data[at : at + size], "crc64nvme") for at, size in ranges]

    asyncio.run(main())
    assert most == source_module.CHECKSUMS_AT_ONCE
    assert 1 <= len(buffers) <= source_module.CHECKSUMS_AT_ONCE


def test_a_fork_shares_none_of_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_free_buffers", [])
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(source_module._slice_buffer()) for _ in range(5)]
        many[0][0] = 1
        if not (child := os.fork()):
            many[0][0] = 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert many[0][0] == 1
    assert len(source_module._free_buffers) == source_module.CHECKSUMS_AT_ONCE


@pytest.mark.parametrize("what", ["checksum", "md5"])
def test_a_cancelled_checksum_reads_no_further_and_nothing_once_it_has_returned(
    source: Source, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The descriptor is closed next, and its number soon belongs to another file."""
    read_into, reached, may_go, reads = Source.read_into, threading.Event(), threading.Event(), list[int]()

    def slow(source: Source, piece: memoryview, offset: int) -> None:
        reached.set()
        assert may_go.wait(PATIENCE_S)
        read_into(source, piece, offset)
        reads.append(offset)

    async def main() -> None:
        work = source.md5(0, SIZE) if what == "md5" else source.checksum(0, SIZE, "crc64nvme")
        working = asyncio.ensure_future(work)
        assert await asyncio.to_thread(reached.wait, PATIENCE_S)
        working.cancel()
        await asyncio.sleep(0.05)
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert reads == [0]

    monkeypatch.setattr(source_module, "SLICE_BYTES", MIB)
    monkeypatch.setattr(source_module, "_free_buffers", [])
    monkeypatch.setattr(Source, "read_into", slow)
    asyncio.run(main())
