"""A shard as a request body: what reaches the socket is the file, or the attempt fails and says why."""

import asyncio
import errno
import os
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.errors import FailureReason, SourceError
from ckpt_async.files import Folder
from ckpt_async.transfer import FileBody, Source

MIB = 1 << 20
SIZE = 9 * MIB + 17
OFFSET = MIB + 5


class Moves:
    """A `Progress` that only takes notes."""

    def __init__(self) -> None:
        self.asked_bytes, self.num_moves, self.is_last = 0, 0, False

    async def may_send(self, size_bytes: int) -> None:
        self.asked_bytes += size_bytes

    def moved(self, *, is_last: bool = False) -> None:
        self.num_moves, self.is_last = self.num_moves + 1, is_last


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shard.bin"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


@pytest.fixture
def source(path: Path) -> Iterator[Source]:
    folder = Folder(path.parent)
    identity, _ = folder.link("shard.bin", "spool/shard.bin")
    source = Source(folder.open_source("shard.bin", None, identity), identity, str(path))
    yield source
    source.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection with small buffers, so that sending has to wait for the reader many times."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        for each in (sender, receiver):
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        yield sender, receiver


async def receive(receiver: socket.socket, size_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < size_bytes:
        data = await asyncio.get_running_loop().sock_recv(receiver, min(1 << 15, size_bytes - len(found)))
        if not data:
            break
        found += data
    return bytes(found)


def send(source: Source, sender: socket.socket, moves: Moves | None = None) -> Awaitable[None]:
    progress: Any = moves or Moves()
    return FileBody(source, OFFSET, SIZE - OFFSET, progress).send_file(sender.fileno())


@pytest.fixture(params=["sendfile", "no sendfile"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems give no pages to send."""
    if request.param == "no sendfile":

        def refuse(*_: object) -> int:
            raise OSError(errno.EINVAL, "not here")

        monkeypatch.setattr(os, "sendfile", refuse)


@pytest.mark.usefixtures("kernel")
def test_the_range_arrives_however_slowly_it_is_read(
    run: Callable[[Any], Any], path: Path, source: Source, pair: Any
) -> None:
    sender, receiver = pair
    moves = Moves()

    async def both() -> bytes:
        _, data = await asyncio.gather(send(source, sender, moves), receive(receiver, SIZE - OFFSET))
        return data

    assert run(both()) == path.read_bytes()[OFFSET:]
    assert moves.asked_bytes == SIZE - OFFSET
    assert moves.is_last
    assert moves.num_moves > 10  # a watchdog sees it move


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("how", ["truncated", "overwritten"])
def test_a_file_that_changes_meanwhile_fails_the_attempt(
    run: Callable[[Any], Any], path: Path, source: Source, pair: Any, how: str
) -> None:
    sender, receiver = pair

    async def both() -> None:
        sending = asyncio.ensure_future(send(source, sender))
        await receive(receiver, MIB)
        if how == "truncated":
            os.truncate(path, OFFSET + 2 * MIB)
        else:
            with path.open("r+b") as file:
                file.write(b"x")
        rest = asyncio.ensure_future(receive(receiver, SIZE))
        try:
            await sending
        finally:
            rest.cancel()

    with pytest.raises(SourceError) as failed:
        run(both())
    assert failed.value.reason is FailureReason.SOURCE_CHANGED


def test_a_reader_that_goes_away_is_an_error_of_the_connection(
    run: Callable[[Any], Any], source: Source, pair: Any
) -> None:
    sender, receiver = pair

    async def both() -> None:
        sending = asyncio.ensure_future(send(source, sender))
        await receive(receiver, MIB)
        receiver.close()
        await sending

    with pytest.raises(ConnectionError):
        run(both())


def test_cancelled_while_it_waits_for_the_reader_it_watches_the_socket_no_more(
    run: Callable[[Any], Any], source: Source, pair: Any
) -> None:
    sender, receiver = pair

    async def both() -> bool:
        sending = asyncio.ensure_future(send(source, sender))
        await receive(receiver, MIB)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return asyncio.get_running_loop().remove_writer(sender.fileno())

    assert run(both()) is False
