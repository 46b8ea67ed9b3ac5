"""Series of small objects received by one thread: each arrives as it is in the store, and nothing is called late."""

import asyncio
import contextlib
import http.client
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import pytest

from ckpt_async.stores.http import series
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.http.small_downloads import SmallDownloads
from ckpt_async.stores.interface import SmallGet
from tests.stores import http_wire
from tests.stores.ambiguous import AMBIGUOUS
from tests.stores.http_server import PATIENCE_S, Server, Talk, request_of

SIZE_BYTES = 40_000  # more than two TLS records
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SLOW_DOWN = b"<Error><Code>SlowDown</Code></Error>"


def content(number: int, size_bytes: int = SIZE_BYTES) -> bytes:
    return (b"%05d" % number) * (size_bytes // 5)


def answer(body: bytes, *lines: bytes, status: int = 206, size_bytes: int | None = None) -> bytes:
    size = len(body) if size_bytes is None else size_bytes
    head = b"\r\n".join([b"HTTP/1.1 %d X" % status, b"Content-Length: %d" % size, *lines])
    return head + b"\r\n\r\n" + body


def number_of(head: bytes) -> int:
    return int(head.split(b" ")[1].removeprefix(b"/").partition(b"?")[0])


class Wire(http_wire.Wire):
    @contextlib.asynccontextmanager
    async def downloads(self, **options: Any) -> AsyncIterator[SmallDownloads]:
        settings = {"max_connections": 4, "connect_timeout_s": 5.0, "read_timeout_s": PATIENCE_S}
        downloads = SmallDownloads(**{**settings, **options}, ca_file=self._ca_file)
        try:
            yield downloads
        finally:
            downloads.close()

    async def get(
        self,
        downloads: SmallDownloads,
        server: Server,
        numbers: Iterable[int],
        got: Callable[[int, bytes], object],
        check: Callable[[int, Response], object] = lambda *_: None,
    ) -> tuple[int, Response] | None:
        """Request objects with these numbers, each of SIZE_BYTES."""
        refused = await downloads.get_many(
            self.url(server, ""),
            ((SmallGet(str(n), SIZE_BYTES), self.url(server, f"{n}?signed=1")) for n in numbers),
            lambda get, response: check(int(get.key), response),
            lambda get, data: got(int(get.key), bytes(data)),
            {"x-asked": "so"},
        )
        return None if refused is None else (int(refused[0].key), refused[1])


@pytest.fixture(params=["http", "https"])
def wire(request: pytest.FixtureRequest, tls: ssl.SSLContext, ca_file: str) -> Wire:
    return Wire(request.param, tls, ca_file)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    give_up = threading.Event()
    for thread in threading.enumerate():
        if thread.name == "ckpt-async-series":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    give_up.set()


def numbered(asked: list[int], instead: dict[int, bytes] | None = None, *, closes: bool = True) -> Talk:
    """Answer with the objects. What is in `instead` is said for that object, and the connection may be closed then."""

    def talk(near: Any) -> None:
        while True:
            number = number_of(request_of(near))
            asked.append(number)
            if instead is not None and number in instead:
                http_wire.say_last(near, instead[number])
                if closes:
                    return
            else:
                near.sendall(answer(content(number)))

    return talk


def test_a_series_arrives_in_order_on_one_connection(run: Any, wire: Wire) -> None:
    """Each answer is checked before its bytes are passed on, and the next is taken only then."""
    told: list[tuple[str, int]] = []
    heads: list[bytes] = []

    def talk(near: Any) -> None:
        while True:
            heads.append(request_of(near))
            near.sendall(answer(content(number_of(heads[-1]))))

    def taken() -> Iterator[int]:
        for number in range(5):
            told.append(("taken", number))
            yield number

    def got(number: int, data: bytes) -> None:
        assert data == content(number)
        told.append(("got", number))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.downloads() as downloads:
                checked = lambda number, response: told.append((response.headers["content-length"], number))  # noqa: E731
                assert await wire.get(downloads, server, taken(), got, checked) is None
                assert await wire.get(downloads, server, [], got) is None
                assert len(downloads._idle) == 1
            assert server.num_connections == 1

    run(main())
    assert told == [(what, number) for number in range(5) for what in ("taken", str(SIZE_BYTES), "got")]
    for head in heads:
        assert b"\r\nx-asked: so\r\n" in head
        assert b"\r\nRange: bytes=0-%d\r\n" % (SIZE_BYTES - 1) in head


@pytest.mark.parametrize("step_bytes", [1, 7, 4096])
def test_answers_may_arrive_in_any_pieces(run: Any, wire: Wire, step_bytes: int) -> None:
    found: dict[int, bytes] = {}

    def talk(near: Any) -> None:
        for _ in range(2):
            whole = CONTINUE + answer(content(number_of(request_of(near))))
            # The head and the end of the body in small pieces.
            for at in range(0, 300, step_bytes):
                near.sendall(whole[at : min(at + step_bytes, 300)])
            near.sendall(whole[300:-20])
            for at in range(len(whole) - 20, len(whole), step_bytes):
                near.sendall(whole[at : at + step_bytes])

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.downloads() as downloads:
                assert await wire.get(downloads, server, [1, 2], found.__setitem__) is None

    run(main())
    assert found == {1: content(1), 2: content(2)}


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_refusal_ends_the_series_and_names_its_object(run: Any, wire: Wire, is_kept: bool) -> None:
    asked: list[int] = []
    found: list[int] = []
    refusal = answer(SLOW_DOWN, *([] if is_kept else [b"Connection: close"]), status=503)

    async def main() -> None:
        with wire.server(numbered(asked, {3: refusal}, closes=not is_kept)) as server:
            async with wire.downloads() as downloads:
                refused = await wire.get(downloads, server, range(6), lambda number, _: found.append(number))
                assert refused is not None
                assert (refused[0], refused[1].status, refused[1].error) == (3, 503, SLOW_DOWN)
                assert await wire.get(downloads, server, [7], lambda number, _: found.append(number)) is None

    run(main())
    assert asked == [0, 1, 2, 3, 7]
    assert found == [0, 1, 2, 7]


BAD = AMBIGUOUS | {
    "nothing": b"",
    "broken": b"HTTP/1.1 2",
    "cut short": answer(content(3)[:-1], size_bytes=SIZE_BYTES),
    "of another length": answer(content(3) + b"!"),
    "chunked": b"HTTP/1.1 206 X\r\nTransfer-Encoding: chunked\r\n\r\n9c40\r\n"
    + content(3)
    + b"\r\n0\r\n\r\n",
    "without a length": b"HTTP/1.1 206 X\r\n\r\n" + content(3),
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
    "an endless head": b"HTTP/1.1 206 X\r\n" + b"x: y\r\n" * 20_000,
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_answer_ends_the_series(run: Any, wire: Wire, bad: str) -> None:
    """Later objects are not requested, and the next series gets a working connection."""
    asked: list[int] = []
    found: list[int] = []

    async def main() -> None:
        with wire.server(numbered(asked, {3: BAD[bad]})) as server:
            async with wire.downloads() as downloads:
                with pytest.raises((http.client.HTTPException, OSError)):
                    await wire.get(downloads, server, range(6), lambda number, _: found.append(number))
                assert found == [0, 1, 2]
                await wire.get(downloads, server, [7], lambda number, _: found.append(number))

    run(main())
    assert asked == [0, 1, 2, 3, 7]
    assert found == [0, 1, 2, 7]


@pytest.mark.parametrize("how", ["says so", "silently", "sends more than asked for", "speaks HTTP/1.0"])
def test_a_connection_that_cannot_go_on_is_replaced(run: Any, wire: Wire, how: str) -> None:
    """Leftover bytes must never pass for the beginning of the next answer."""
    found: dict[int, bytes] = {}
    has_closed = threading.Event()

    def talk(near: Any) -> None:
        number = number_of(request_of(near))
        match how:
            case "says so":
                http_wire.say_last(near, answer(content(number), b"Connection: close"))
            case "silently":
                http_wire.say_last(near, answer(content(number)))
            case "sends more than asked for":
                near.sendall(answer(content(number)) + answer(b"evil"))
                near.recv(1)
            case _:
                http_wire.say_last(near, answer(content(number)).replace(b"1.1", b"1.0"))
        near.close()
        has_closed.set()

    def got(number: int, data: bytes) -> None:
        found[number] = data
        if how == "silently":  # the next request would otherwise be lost on its way
            assert has_closed.wait(PATIENCE_S)
            has_closed.clear()

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.downloads() as downloads:
                for number in range(3):
                    await wire.get(downloads, server, [number], got)
            assert server.num_connections == 3

    run(main())
    assert found == {number: content(number) for number in range(3)}


@pytest.mark.parametrize("who", ["taken", "checked", "got"])
def test_an_error_raised_by_a_callback_ends_only_its_series(run: Any, wire: Wire, who: str) -> None:
    good: list[int] = []

    def fails(at: str) -> None:
        if who == at:
            raise LookupError("by the test")

    def taken() -> Iterator[int]:
        yield 100
        fails("taken")

    async def main() -> None:
        with wire.server(numbered([])) as server:
            async with wire.downloads() as downloads:
                bad, rest = await asyncio.gather(
                    wire.get(
                        downloads, server, taken(), lambda *_: fails("got"), lambda *_: fails("checked")
                    ),
                    wire.get(downloads, server, range(20), lambda number, _: good.append(number)),
                    return_exceptions=True,
                )
                assert isinstance(bad, LookupError)
                assert rest is None

    run(main())
    assert good == list(range(20))


@pytest.mark.parametrize("who", ["taken", "got"])
def test_cancelling_waits_for_a_running_callback(run: Any, wire: Wire, who: str) -> None:
    """What is locked when its turn comes must not be locked after the caller has gone, and nothing is written then."""
    is_in, may_go, calls = threading.Event(), threading.Event(), []

    def waits(at: str) -> None:
        if at == who:
            is_in.set()
            assert may_go.wait(PATIENCE_S)
        calls.append(at)

    def taken() -> Iterator[int]:
        for number in range(3):
            waits("taken")
            yield number

    async def main() -> None:
        with wire.server(numbered([])) as server:
            async with wire.downloads() as downloads:
                getting = asyncio.ensure_future(wire.get(downloads, server, taken(), lambda *_: waits("got")))
                assert await asyncio.to_thread(is_in.wait, PATIENCE_S)
                getting.cancel()
                for _ in range(100):
                    await asyncio.sleep(0)
                assert not getting.done()
                may_go.set()
                with pytest.raises(asyncio.CancelledError):
                    await getting
                assert calls == (["taken"] if who == "taken" else ["taken", "got"])
        assert len(calls) == (1 if who == "taken" else 2)

    run(main())


def test_cancelling_while_an_answer_is_awaited_breaks_the_connection(run: Any, wire: Wire) -> None:
    asked, may_end = threading.Event(), threading.Event()

    def talk(near: Any) -> None:
        request_of(near)
        asked.set()
        assert may_end.wait(PATIENCE_S)
        near.sendall(answer(content(0)))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.downloads() as downloads:
                getting = asyncio.ensure_future(wire.get(downloads, server, range(3), pytest.fail))
                assert await asyncio.to_thread(asked.wait, PATIENCE_S)
                getting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await getting
                may_end.set()
                assert not downloads._idle

    run(main())


def test_a_silent_server_ends_only_its_series(run: Any, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "TICK_S", 0.01)
    may_end, found = threading.Event(), []

    def is_silent(near: Any) -> None:
        request_of(near)
        near.sendall(answer(b"", size_bytes=SIZE_BYTES))
        assert may_end.wait(PATIENCE_S)

    async def main() -> None:
        with wire.server(is_silent) as other, wire.server(numbered([])) as server:
            async with wire.downloads(read_timeout_s=0.3) as downloads:
                with pytest.raises(TimeoutError, match="no answer within"):
                    await wire.get(downloads, other, [1], pytest.fail)
                await wire.get(downloads, server, range(3), lambda number, _: found.append(number))
            may_end.set()

    run(main())
    assert found == [0, 1, 2]
