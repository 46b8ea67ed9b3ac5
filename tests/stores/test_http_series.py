"""Series of small objects sent by one thread: if one series fails the others continue, and nothing is left over."""

import asyncio
import contextlib
import errno
import itertools
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from ckpt_async.stores.http import connections, messages, series, small_uploads
from ckpt_async.stores.http.connections import CancelToken, has_unread
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.http.small_uploads import SmallRequest, SmallUploads
from ckpt_async.stores.http.uploads import head_of
from tests.stores import http_wire
from tests.stores.http_server import PATIENCE_S, Server, Talk, request_of
from tests.stores.http_wire import (
    BAD_ANSWERS,
    BROKEN,
    DATA,
    DONE,
    GOOD_ANSWERS,
    LAST,
    LONG,
    MIB,
    REFUSED,
    content_length,
    receive,
    say_last,
    takes_all,
)

SMALL = [b"%d " % number * 1000 for number in range(20)]
LARGE = DATA * 3  # more than a socket buffers before anyone reads
THREAD = "ckpt-async-series"
KEPT_REFUSAL = GOOD_ANSWERS["refusal"][0]


class Wire(http_wire.Wire):
    """Servers and clients that share a scheme."""

    @contextlib.asynccontextmanager
    async def small_uploads(self, **options: Any) -> AsyncIterator[SmallUploads]:
        settings = {"max_connections": 4, "connect_timeout_s": 5.0, "read_timeout_s": PATIENCE_S}
        uploads = SmallUploads(**{**settings, **options}, ca_file=self._ca_file)
        try:
            yield uploads
        finally:
            uploads.close()

    def puts(self, bodies: Iterable[bytes], name: str = "key") -> Iterator[SmallRequest]:
        for number, data in enumerate(bodies):
            url = urlsplit(f"{self._scheme}://localhost/{name}-{number}")
            yield SmallRequest(name, head_of(url, {"Content-Length": str(len(data))}), data)

    async def put_many(
        self,
        uploads: SmallUploads,
        server: Server,
        bodies: Iterable[bytes],
        answered: Callable[[Response], None] = lambda _: None,
        name: str = "key",
    ) -> Response | None:
        refused = await uploads.put_many(
            self.url(server), self.puts(bodies, name), lambda _, response: answered(response)
        )
        return None if refused is None else refused[1]


class Gate:
    """A point where a thread waits until it is opened."""

    def __init__(self) -> None:
        self._was_reached, self._is_open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self._was_reached.set()
        assert self._is_open.wait(PATIENCE_S)

    def open(self) -> None:
        self._is_open.set()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._was_reached.wait, PATIENCE_S)


@pytest.fixture(params=["http", "https"])
def wire(request: pytest.FixtureRequest, tls: ssl.SSLContext, ca_file: str) -> Wire:
    return Wire(request.param, tls, ca_file)


@pytest.fixture
def plain(tls: ssl.SSLContext, ca_file: str) -> Wire:
    """Provide a wire for tests where the scheme cannot matter."""
    return Wire("http", tls, ca_file)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make deadlines be checked often, and a stuck socket soon."""
    monkeypatch.setattr(series, "TICK_S", 0.01)
    monkeypatch.setattr(connections, "BLOCK_S", 0.05)


def descriptors() -> set[str]:
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{each}"))
    return found


def is_running() -> bool:
    return any(each.name == THREAD for each in threading.enumerate())


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_at, "not in time"
        threading.Event().wait(0.002)


async def until(is_so: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, is_so)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Check that no connection, no thread and no descriptor to wake one is left over."""
    before = descriptors()
    yield
    wait_until(lambda: not is_running() and descriptors() <= before)


# --- one series ----------------------------------------------------------------------------------------------------


def test_a_series_is_sent_in_order_on_one_connection(run: Any, wire: Wire) -> None:
    received: list[bytes] = []
    told: list[tuple[int, int]] = []  # status, and how many had arrived by then

    def answered(answer: Response) -> None:
        told.append((answer.status, len(received) // 2))

    async def main() -> None:
        with wire.server(takes_all(received)) as server:
            async with wire.small_uploads() as uploads:
                assert await wire.put_many(uploads, server, SMALL, answered) is None
                assert len(uploads._idle) == 1
                assert await wire.put_many(uploads, server, [b"", b"more"], answered) is None
            assert server.num_connections == 1

    run(main())
    assert received[1::2] == [*SMALL, b"", b"more"]
    assert [head.split(b" ")[1] for head in received[:40:2]] == [b"/key-%d" % number for number in range(20)]
    assert told == [(200, number) for number in range(1, 23)]


def test_each_body_is_read_when_its_turn_comes(run: Any, wire: Wire) -> None:
    """A body is not read before the previous one is answered, so waiting ones take no memory."""
    events: list[str] = []

    def bodies() -> Iterator[bytes]:
        for number in range(4):
            events.append(f"read {number}")
            yield b"body"

    async def main() -> None:
        with wire.server(takes_all([])) as server:
            async with wire.small_uploads() as uploads:
                await wire.put_many(uploads, server, bodies(), lambda _: events.append("answered"))

    run(main())
    assert events == [word for number in range(4) for word in (f"read {number}", "answered")]


def test_an_empty_series(run: Any, wire: Wire) -> None:
    async def main() -> None:
        with wire.server(takes_all([])) as server:
            async with wire.small_uploads() as uploads:
                assert await wire.put_many(uploads, server, []) is None
                await wire.put_many(uploads, server, SMALL)
            assert server.num_connections == 1

    run(main())


@pytest.mark.parametrize("refusal", [REFUSED, KEPT_REFUSAL], ids=["the last", "kept"])
def test_a_series_ends_at_the_first_refusal(run: Any, wire: Wire, refusal: bytes) -> None:
    received: list[bytes] = []
    answers: list[Response] = []

    def talk(near: socket.socket) -> None:
        for _ in range(7):
            received.append(receive(near, content_length(request_of(near))))
            near.sendall(DONE)
        received.append(receive(near, content_length(request_of(near))))
        near.sendall(refusal)
        assert not near.recv(1)  # nothing more is requested

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                refused = await wire.put_many(uploads, server, SMALL, answers.append)
                assert refused is not None
                assert (refused.status, refused.error) == (503, b"SlowDown")
                assert len(uploads._idle) == (0 if refusal == REFUSED else 1)

    run(main())
    assert received == SMALL[:8]
    assert [each.status for each in answers] == [200] * 7


@pytest.mark.parametrize("answer", [DONE, LAST], ids=["without a word", "as it says"])
def test_a_server_that_closes_connections_in_the_middle_of_a_series(
    run: Any, wire: Wire, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object arrives once, on no more connections than necessary."""
    received: list[bytes] = []
    answers: list[Response] = []
    using: list[socket.socket] = []
    original = CancelToken.uses

    def uses(token: CancelToken, connected: socket.socket | None) -> None:
        using.extend([connected] if connected else [])
        original(token, connected)

    def answered(answer: Response) -> None:
        answers.append(answer)
        if answer.headers.get("connection") != "close":
            # The end must arrive before the next request is started, which would otherwise be lost in
            # transit.
            wait_until(lambda: not series._is_quiet(using[-1]))

    monkeypatch.setattr(CancelToken, "uses", uses)

    async def main() -> None:
        with wire.server(takes_all(received, num_times=1, answer=answer)) as server:
            async with wire.small_uploads() as uploads:
                assert await wire.put_many(uploads, server, SMALL, answered) is None
            assert server.num_connections == len(SMALL)

    run(main())
    assert received[1::2] == SMALL
    assert len(answers) == len(SMALL)


def test_a_connection_that_breaks_in_the_middle_of_a_series(run: Any, wire: Wire) -> None:
    """What was answered before stays answered, and nothing is sent afterwards."""
    received: list[bytes] = []
    answers: list[Response] = []

    def talk(near: socket.socket) -> None:
        takes_all(received, num_times=4)(near)
        received.extend((b"", receive(near, content_length(request_of(near)))))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                with pytest.raises(BROKEN):
                    await wire.put_many(uploads, server, SMALL, answers.append)
                assert not uploads._idle
            assert server.num_connections == 1

    run(main())
    assert received[1::2] == SMALL[:5]
    assert len(answers) == 4


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_closed_idle_connection_is_not_reused(run: Any, wire: Wire, is_reset: bool) -> None:
    received: list[bytes] = []

    def talk(near: socket.socket) -> None:
        takes_all(received, num_times=2)(near)
        if is_reset:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                for _ in range(3):
                    await wire.put_many(uploads, server, [b"one", b"two"])
                    for idle, _ in uploads._idle:
                        await until(lambda idle=idle: has_unread(idle.sock))
            assert server.num_connections == 3

    run(main())
    assert received[1::2] == [b"one", b"two"] * 3


def test_tls_session_tickets_do_not_end_an_idle_connection(
    run: Any, tls: ssl.SSLContext, ca_file: str
) -> None:
    """Session tickets arrive before the first request and must not be taken for the end of the connection."""
    wire = Wire("https", tls, ca_file)

    async def main() -> None:
        with wire.server(takes_all([])) as server:
            async with wire.small_uploads() as uploads:
                url = series.urlsplit(wire.url(server))
                await uploads._in_thread(lambda token: uploads._add_idle(url, token))
                [(idle, _)] = uploads._idle
                await until(lambda: has_unread(idle.sock))
                await wire.put_many(uploads, server, SMALL)
            assert server.num_connections == 1

    run(main())


@pytest.mark.parametrize("num_good", [0, 3])
@pytest.mark.parametrize("who", ["read", "told"])
def test_an_error_raised_by_a_body_or_callback_ends_only_its_series(
    run: Any, wire: Wire, who: str, num_good: int
) -> None:
    """The other series must go on undisturbed."""
    received: dict[bytes, list[bytes]] = defaultdict(list)
    num_answered = 0

    def bodies() -> Iterator[bytes]:
        yield from SMALL[:num_good]
        if who == "read":
            raise LookupError("by the test")
        yield SMALL[num_good]

    def answered(_: Response) -> None:
        nonlocal num_answered
        num_answered += 1
        if who == "told" and num_answered > num_good:
            raise LookupError("by the test")

    async def main() -> None:
        with wire.server(sorts(received)) as server:
            async with wire.small_uploads() as uploads:
                bad, good = await asyncio.gather(
                    wire.put_many(uploads, server, bodies(), answered, "bad"),
                    wire.put_many(uploads, server, SMALL, name="good"),
                    return_exceptions=True,
                )
                assert isinstance(bad, LookupError)
                assert good is None
                assert len(uploads._idle) == 1

    run(main())
    assert received[b"good"] == SMALL
    assert received[b"bad"] == SMALL[: num_good + (who == "told")]


# --- many at once --------------------------------------------------------------------------------------------------


def sorts(received: dict[bytes, list[bytes]]) -> Talk:
    """Accept all bodies, sorted by the first word of their name; one connection must carry names of one word only."""

    def talk(near: socket.socket) -> None:
        names = set()
        while True:
            head = request_of(near)
            name = head.split(b" ")[1].strip(b"/").split(b"-")[0]
            names.add(name)
            assert len(names) == 1
            received[name].append(receive(near, content_length(head)))
            near.sendall(DONE)

    return talk


def test_all_series_share_one_thread(run: Any, wire: Wire) -> None:
    received: dict[bytes, list[bytes]] = defaultdict(list)
    names = [f"n{number}" for number in range(8)]
    threads: set[threading.Thread] = set()

    def bodies() -> Iterator[bytes]:
        for each in SMALL:
            threads.add(threading.current_thread())
            yield each

    async def main() -> None:
        with wire.server(sorts(received)) as server:
            async with wire.small_uploads() as uploads:
                all_here = Gate()
                ahead = asyncio.ensure_future(wire.put_many(uploads, server, held_up(all_here), name="ahead"))
                await all_here.reached()
                sending = [
                    asyncio.ensure_future(
                        wire.put_many(
                            uploads,
                            server,
                            bodies(),
                            lambda _: threads.add(threading.current_thread()),
                            name,
                        )
                    )
                    for name in names
                ]
                await until(lambda: len(uploads._thread._new) == len(names))
                all_here.open()
                assert await asyncio.gather(ahead, *sending) == [None] * 9
            assert server.num_connections == 9

    run(main())
    assert {name: received[name.encode()] for name in names} == dict.fromkeys(names, SMALL)
    assert [each.name for each in threads] == [THREAD]


def held_up(gate: Gate) -> Iterator[bytes]:
    """Yield one body that is only read once the gate opens."""
    gate.wait()
    yield b"body"


@pytest.mark.parametrize("reads", [True, False])
def test_a_silent_server_does_not_delay_other_series(
    run: Any, wire: Wire, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[bytes] = []
    silent = Gate()
    monkeypatch.setattr(series, "TICK_S", 10 * PATIENCE_S)  # a new series must not wait for a tick

    def is_silent(near: socket.socket) -> None:
        head = request_of(near)
        if reads:
            receive(near, content_length(head))
        silent.wait()
        if not reads:
            receive(near, content_length(head))
        near.sendall(DONE)

    async def main() -> None:
        with wire.server(is_silent) as other, wire.server(takes_all(received)) as server:
            async with wire.small_uploads() as uploads:
                held = asyncio.ensure_future(wire.put_many(uploads, other, [LONG]))
                await silent.reached()
                await wire.put_many(uploads, server, SMALL)
                assert not held.done()
                silent.open()
                assert await held is None

    run(main())
    assert received[1::2] == SMALL


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("reads", [True, False])
def test_a_server_that_stops_responding_fails_only_its_series(run: Any, wire: Wire, reads: bool) -> None:
    """The server stops reading, or never answers."""
    may_end = threading.Event()
    is_over = threading.Event()
    answers: list[Response] = []

    def is_silent(near: socket.socket) -> None:
        head = request_of(near)
        if reads:
            receive(near, content_length(head))
        assert may_end.wait(PATIENCE_S)

    async def main() -> None:
        with wire.server(is_silent) as other, wire.server(takes_all([], num_times=MIB)) as server:
            async with wire.small_uploads() as uploads:
                bodies = itertools.takewhile(lambda _: not is_over.is_set(), itertools.repeat(b"body"))
                going_on = asyncio.ensure_future(wire.put_many(uploads, server, bodies, answers.append))
                await until(lambda: bool(answers))
                uploads._read_timeout_s = 0.3
                with pytest.raises(TimeoutError, match="no answer" if reads else "accepted no data"):
                    await wire.put_many(uploads, other, [LONG])
                num_before = len(answers)
                await until(lambda: len(answers) > num_before)
                is_over.set()
                assert await going_on is None
                assert len(uploads._idle) == 1
            may_end.set()

    run(main())


class Clock:
    """The module `time` with its clock moved ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.mark.usefixtures("quick")
def test_time_spent_in_the_thread_does_not_count_as_a_stall(
    run: Any, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that waits because another series' body takes long to read is not late."""
    read, asked, has_answered, clock = Gate(), Gate(), threading.Event(), Clock()
    monkeypatch.setattr(series, "time", clock)

    def talk(near: socket.socket) -> None:
        receive(near, content_length(request_of(near)))
        asked.wait()
        near.sendall(DONE)
        has_answered.set()

    def bodies() -> Iterator[bytes]:
        yield b"body"
        read.wait()
        yield b"body"

    async def main() -> None:
        with wire.server(talk) as slow, wire.server(takes_all([])) as server:
            async with wire.small_uploads() as uploads:
                waiting = asyncio.ensure_future(wire.put_many(uploads, slow, [b"body"]))
                await asked.reached()
                other = asyncio.ensure_future(wire.put_many(uploads, server, bodies()))
                await read.reached()
                asked.open()
                await until(has_answered.is_set)
                clock.ahead_s = 2 * PATIENCE_S
                read.open()
                assert await asyncio.gather(waiting, other) == [None, None]

    run(main())


@pytest.mark.usefixtures("quick")
def test_a_series_that_makes_progress_does_not_time_out(
    run: Any, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two halves of a body and two of an answer each arrive within the read timeout, but not all of them together."""
    clock, gates, seen = Clock(), [Gate() for _ in range(4)], []
    monkeypatch.setattr(series, "time", clock)

    def noting(received: bytes) -> Any:
        seen.append(received)
        return messages.complete_response(received)

    monkeypatch.setattr(small_uploads, "complete_response", noting)

    def talk(near: socket.socket) -> None:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        head = request_of(near)
        for gate in gates[:2]:
            gate.wait()
            receive(near, len(LONG) // 2)
        assert content_length(head) == len(LONG) // 2 * 2
        for gate, piece in zip(gates[2:], (DONE[:20], DONE[20:]), strict=True):
            gate.wait()
            near.sendall(piece)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                sending = asyncio.ensure_future(wire.put_many(uploads, server, [LONG[: len(LONG) // 2 * 2]]))
                for gate in gates:
                    await gate.reached()
                    if gate is gates[-1]:
                        await until(lambda: DONE[:20] in seen)
                    clock.ahead_s += PATIENCE_S * 0.6
                    gate.open()
                assert await sending is None

    run(main())


def test_bodies_larger_than_the_socket_buffer(run: Any, wire: Wire) -> None:
    """All of them are being sent when the first is read, and each arrives whole."""
    received: dict[bytes, list[bytes]] = defaultdict(list)
    all_here = threading.Barrier(3)

    def talk(near: socket.socket) -> None:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        for number in range(2):
            head = request_of(near)
            if number == 0:
                all_here.wait(PATIENCE_S)
            received[head.split(b" ")[1]].append(receive(near, content_length(head)))
            near.sendall(DONE)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                each = [wire.put_many(uploads, server, [LARGE, DATA], name=name) for name in "abc"]
                assert await asyncio.gather(*each) == [None] * 3
            assert server.num_connections == 3

    run(main())
    assert received == {f"/{name}-{n}".encode(): [[LARGE, DATA][n]] for name in "abc" for n in range(2)}


def test_the_thread_does_not_spin_while_it_waits(
    run: Any, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket can almost always take more, which matters only as long as there is more to send."""
    wanted: list[int] = []
    stuck, waiting = Gate(), Gate()

    class Noting(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
        def modify(self, fileobj: Any, events: int, data: Any = None) -> Any:
            wanted.append(events)
            return super().modify(fileobj, events, data)

    def talk(near: socket.socket) -> None:
        head = request_of(near)
        stuck.wait()
        receive(near, content_length(head))
        waiting.wait()
        near.sendall(DONE)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                with monkeypatch.context() as patch:
                    patch.setattr(selectors, "DefaultSelector", Noting)
                    sending = asyncio.ensure_future(wire.put_many(uploads, server, [LONG]))
                    await until(lambda: bool(wanted))
                stuck.open()
                await waiting.reached()
                await until(lambda: wanted[-1] == selectors.EVENT_READ)
                waiting.open()
                assert await sending is None

    run(main())
    assert wanted == [selectors.EVENT_READ | selectors.EVENT_WRITE, selectors.EVENT_READ]


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "is_in_pieces"),
    [(kind, False) for kind in GOOD_ANSWERS]
    # Excess bytes must arrive before the next request is started.
    + [(kind, True) for kind in GOOD_ANSWERS if kind != "more than it says"],
)
def test_responses_of_every_framing_are_read(run: Any, wire: Wire, kind: str, is_in_pieces: bool) -> None:
    """This covers which answers are accepted or refused, and whether the connection is reused."""
    answer, status, content, is_kept = GOOD_ANSWERS[kind]
    piece_bytes = max(1, len(answer) // 1000) if is_in_pieces else len(answer)
    received: list[bytes] = []
    answers: list[Response] = []

    def talk(near: socket.socket) -> None:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            received.append(receive(near, content_length(request_of(near))))
            for start in range(0, len(answer), piece_bytes):
                near.sendall(answer[start : start + piece_bytes])
            if kind == "without a length":
                return  # this is how such an answer ends

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                refused = await wire.put_many(uploads, server, SMALL[:3], answers.append)
                if status >= 300:
                    assert refused is not None
                    assert (refused.status, refused.error) == (status, content)
                    assert len(uploads._idle) == is_kept
                else:
                    assert refused is None
                    assert [(each.status, each.error) for each in answers] == [(status, content)] * 3
                    assert server.num_connections == (1 if is_kept else 3)

    run(main())
    assert received == SMALL[: 1 if status >= 300 else 3]
    assert len(answers) == (0 if status >= 300 else 3)


ODD_REFUSALS = {
    "usual": REFUSED,
    "of the old protocol": b"HTTP/1.0 503 X\r\n\r\nSlowDown",
    "chunked": b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nSlow\r\n4\r\nDown\r\n0\r\n\r\n",
    "cut in a chunk": b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n8\r\nSlowDown\r\n80\r\n",
    "cut short": b"HTTP/1.1 503 X\r\nContent-Length: 80\r\n\r\nSlowDown",
}


@pytest.mark.parametrize(
    ("when", "kind"),
    [("amid the body", kind) for kind in ODD_REFUSALS]
    + [("after it", kind) for kind in ODD_REFUSALS if kind != "cut short"],
)
def test_refusals_of_every_framing_are_read(run: Any, wire: Wire, when: str, kind: str) -> None:
    answers: list[Response] = []

    def talk(near: socket.socket) -> None:
        head = request_of(near)
        receive(near, 1 << 16 if when == "amid the body" else content_length(head))
        say_last(near, ODD_REFUSALS[kind])

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                refused = await wire.put_many(uploads, server, [LONG, b"body"], answers.append)
                assert refused is not None
                assert (refused.status, refused.error) == (503, b"SlowDown")
                assert not uploads._idle
            assert server.num_connections == 1

    run(main())
    assert not answers


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("answer", [REFUSED, KEPT_REFUSAL], ids=["the last", "kept"])
def test_a_refusal_before_the_body_is_sent_is_reported(run: Any, wire: Wire, answer: bytes) -> None:
    """It is heard even if the connection stays open and nobody reads the rest of the body, which is not sent."""
    received = 0
    is_over = threading.Event()

    def talk(near: socket.socket) -> None:
        nonlocal received
        request_of(near)
        near.sendall(answer)
        assert is_over.wait(PATIENCE_S)
        with contextlib.suppress(OSError):
            received = len(receive(near, len(LONG)))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                refused = await wire.put_many(uploads, server, [LONG])
                is_over.set()
                assert refused is not None
                assert (refused.status, refused.error) == (503, b"SlowDown")
                assert not uploads._idle

    run(main())
    assert received < len(LONG)


def test_a_refusal_followed_by_a_reset_is_reported(run: Any, wire: Wire) -> None:
    """A server that closes a connection while a body is in transit resets it; the answer counts, not the reset."""

    def talk(near: socket.socket) -> None:
        request_of(near)
        receive(near, 1 << 16)
        say_last(near, REFUSED)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                refused = await wire.put_many(uploads, server, [LONG])
                assert refused is not None
                assert (refused.status, refused.error) == (503, b"SlowDown")

    run(main())


@pytest.mark.usefixtures("quick")
def test_a_success_before_the_body_is_sent_is_an_error(run: Any, wire: Wire) -> None:
    """Nobody can have stored what has not arrived."""
    is_over = threading.Event()
    answers: list[Response] = []

    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(DONE)
        assert is_over.wait(PATIENCE_S)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                with pytest.raises(ConnectionError, match="200 before it had received the whole body"):
                    await wire.put_many(uploads, server, [LONG], answers.append)
            is_over.set()

    run(main())
    assert not answers


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_an_invalid_response_is_an_error(run: Any, wire: Wire, kind: str) -> None:
    answers: list[Response] = []

    def talk(near: socket.socket) -> None:
        receive(near, content_length(request_of(near)))
        near.sendall(BAD_ANSWERS[kind])

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                with pytest.raises(BROKEN):
                    await wire.put_many(uploads, server, SMALL, answers.append)
                assert not uploads._idle
            assert server.num_connections == 1

    run(main())
    assert not answers


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
            async with wire.small_uploads() as uploads:
                assert await wire.put_many(uploads, server, [LONG, b"body", LONG]) is None
            assert server.num_connections == 1

    run(main())
    assert received == [LONG, b"body", LONG]


@pytest.mark.parametrize("kind", ["an answer", "two answers"])
def test_responses_that_arrive_together(run: Any, wire: Wire, kind: str) -> None:
    """They share a packet, or over TLS several records in one packet, and none may stay where no selector sees it.

    An answer that nobody asked for belongs to no request.
    """
    content = bytes(60_000)  # four records over TLS
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content)
    pieces = [answer, content[:9], content[9:]] if kind == "an answer" else [DONE, KEPT_REFUSAL]
    received: list[bytes] = []
    answers: list[Response] = []

    def talk(near: socket.socket) -> None:
        while True:
            received.append(receive(near, content_length(request_of(near))))
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            for piece in pieces:
                near.sendall(piece)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                assert await wire.put_many(uploads, server, SMALL[:3], answers.append) is None
            assert server.num_connections == (1 if kind == "an answer" else 3)

    run(main())
    assert received == SMALL[:3]
    assert [each.error for each in answers] == [content if kind == "an answer" else b"ok"] * 3


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"\0" * 100_000], ids=["", "SSH", "zeros"])
def test_a_server_that_responds_before_the_request_is_an_error(run: Any, wire: Wire, says: bytes) -> None:
    """The server speaks, or closes the connection, at once, and one connection is enough to notice."""

    def talk(near: socket.socket) -> None:
        near.sendall(says)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                for _ in range(2):
                    with pytest.raises(BROKEN):
                        await wire.put_many(uploads, server, [LONG])
            assert server.num_connections == 2

    run(main())


def test_a_server_that_does_not_speak_tls_is_an_error(
    run: Any, plain: Wire, tls: ssl.SSLContext, ca_file: str
) -> None:
    async def main() -> None:
        with plain.server(lambda _: None) as server:
            wire = Wire("https", tls, ca_file)
            async with wire.small_uploads() as uploads:
                with pytest.raises(BROKEN):
                    await wire.put_many(uploads, server, SMALL)
            assert server.num_connections == 1

    run(main())


# --- cancelled -----------------------------------------------------------------------------------------------------


async def cancelled(sending: asyncio.Future[Any]) -> None:
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


def test_a_cancelled_series_makes_no_more_callbacks(run: Any, wire: Wire) -> None:
    answers: list[Response] = []
    waiting = Gate()

    def talk(near: socket.socket) -> None:
        takes_all([], num_times=4)(near)
        request_of(near)
        waiting.wait()
        near.sendall(DONE)

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                sending = asyncio.ensure_future(wire.put_many(uploads, server, SMALL, answers.append))
                await waiting.reached()
                await cancelled(sending)
                assert len(answers) == 4
                waiting.open()
                await until(lambda: not is_running())
                assert not uploads._idle
            assert server.num_connections == 1
        assert len(answers) == 4

    run(main())


def test_cancelling_waits_for_a_running_callback(run: Any, wire: Wire) -> None:
    """Otherwise the caller would be called back after the cancellation."""
    telling = Gate()
    num_told = 0

    def answered(_: Response) -> None:
        nonlocal num_told
        telling.wait()
        num_told += 1

    async def main() -> None:
        with wire.server(takes_all([])) as server:
            async with wire.small_uploads() as uploads:
                sending = asyncio.ensure_future(wire.put_many(uploads, server, SMALL, answered))
                await telling.reached()
                sending.cancel()
                for _ in range(100):
                    await asyncio.sleep(0)
                assert not sending.done()
                telling.open()
                with pytest.raises(asyncio.CancelledError):
                    await sending
                assert num_told == 1
                await until(lambda: not is_running())
        assert num_told == 1

    run(main())


def test_cancelling_while_it_connects(run: Any, wire: Wire) -> None:
    """The caller does not wait for the connection, which is closed once it is made."""
    connecting = Gate()

    async def main() -> None:
        with wire.server(takes_all([])) as server:
            async with wire.small_uploads() as uploads:
                original = uploads._connect

                def connect(url: Any) -> Any:
                    connecting.wait()
                    return original(url)

                uploads._connect = connect  # type: ignore[method-assign]
                sending = asyncio.ensure_future(wire.put_many(uploads, server, SMALL))
                await connecting.reached()
                await cancelled(sending)
                connecting.open()
                await asyncio.to_thread(uploads._threads.shutdown)
                assert not uploads._idle

    run(main())


def test_cancelling_in_the_middle_of_a_body(run: Any, wire: Wire) -> None:
    """The rest of the body is not sent."""
    stuck = Gate()
    received = 0

    def talk(near: socket.socket) -> None:
        nonlocal received
        request_of(near)
        stuck.wait()
        with contextlib.suppress(OSError):
            received = len(receive(near, len(LONG)))

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                sending = asyncio.ensure_future(wire.put_many(uploads, server, [LONG]))
                await stuck.reached()
                await cancelled(sending)
                await until(lambda: not is_running())
                stuck.open()

    run(main())
    assert received < len(LONG)


def test_cancelling_while_its_body_is_read(run: Any, wire: Wire) -> None:
    """The caller does not wait for the disk, what is eventually read is not sent, and the other series continue."""
    answers: list[Response] = []
    received: dict[bytes, list[bytes]] = defaultdict(list)
    reading = Gate()

    async def main() -> None:
        with wire.server(sorts(received)) as server:
            async with wire.small_uploads() as uploads:
                mine = asyncio.ensure_future(
                    wire.put_many(uploads, server, held_up(reading), answers.append, "mine")
                )
                await reading.reached()
                other = asyncio.ensure_future(wire.put_many(uploads, server, SMALL, name="other"))
                await until(lambda: bool(uploads._thread._new))
                await cancelled(mine)
                reading.open()
                assert await other is None

    run(main())
    assert not answers
    assert received == {b"other": SMALL}


@pytest.mark.parametrize("when", ["before its turn", "before its answer", "before its answer is read"])
def test_cancelling_while_another_body_is_read(run: Any, wire: Wire, when: str) -> None:
    """The caller does not wait for that body either, nor is it told of an answer found later."""
    answers: list[Response] = []
    received: list[bytes] = []
    reading, asked, answered = Gate(), Gate(), Gate()

    def talk(near: socket.socket) -> None:
        received.append(receive(near, content_length(request_of(near))))
        near.sendall(DONE)
        received.append(receive(near, content_length(request_of(near))))
        asked.wait()
        if when == "before its answer is read":
            near.sendall(DONE)
        answered.wait()

    async def main() -> None:
        with wire.server(talk) as server, wire.server(takes_all([])) as others:
            async with wire.small_uploads() as uploads:

                def start() -> asyncio.Future[Any]:
                    return asyncio.ensure_future(wire.put_many(uploads, server, SMALL, answers.append))

                if when != "before its turn":
                    mine = start()
                    await asked.reached()
                other = asyncio.ensure_future(wire.put_many(uploads, others, held_up(reading)))
                await reading.reached()
                if when == "before its turn":
                    mine = start()
                    await until(lambda: bool(uploads._thread._new))
                else:
                    asked.open()
                    await answered.reached()
                await cancelled(mine)
                reading.open()
                assert await other is None
                await until(lambda: not is_running())
                answered.open()

    run(main())
    assert len(answers) == (when != "before its turn")
    assert received == ([] if when == "before its turn" else SMALL[:2])


def test_cancelling_while_a_long_response_is_read(run: Any, wire: Wire) -> None:
    answers: list[Response] = []
    waiting = Gate()

    def talk(near: socket.socket) -> None:
        receive(near, content_length(request_of(near)))
        near.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n")
        waiting.wait()
        near.sendall(b"0\r\n\r\n")

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                sending = asyncio.ensure_future(wire.put_many(uploads, server, SMALL, answers.append))
                await waiting.reached()
                await until(lambda: not is_running())  # the series now belongs to another thread
                await cancelled(sending)
                waiting.open()
                await asyncio.to_thread(uploads._threads.shutdown)

    run(main())
    assert not answers


@pytest.mark.parametrize("answer", [DONE, KEPT_REFUSAL], ids=["taken", "refused"])
def test_cancelling_a_finished_series_keeps_its_connection(run: Any, wire: Wire, answer: bytes) -> None:
    """By then another series may be using it."""
    received: list[bytes] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with wire.server(takes_all(received, answer=answer)) as server:
            async with wire.small_uploads() as uploads:

                def put_back(connection: Any) -> None:
                    original(connection)
                    if threading.current_thread().name == THREAD:  # not the thread that connects
                        loop.call_soon_threadsafe(sending.cancel)

                original, uploads._put_back = uploads._put_back, put_back  # type: ignore[method-assign]
                sending = asyncio.ensure_future(wire.put_many(uploads, server, [b"one"]))
                with pytest.raises(asyncio.CancelledError):
                    await sending
                uploads._put_back = original  # type: ignore[method-assign]
                await wire.put_many(uploads, server, [b"two"])
            assert server.num_connections == 1

    run(main())
    assert received[1::2] == [b"one", b"two"]


# --- the thread ----------------------------------------------------------------------------------------------------


def test_the_thread_ends_when_idle_and_restarts(run: Any, wire: Wire) -> None:
    async def main() -> None:
        with wire.server(takes_all([])) as server:
            async with wire.small_uploads() as uploads:
                before = descriptors()
                for _ in range(3):
                    await wire.put_many(uploads, server, SMALL)
                    await until(lambda: not is_running())
                    assert len(descriptors() - before) == 2  # the connection and the server's end of it
            assert server.num_connections == 1

    run(main())


def test_closing_while_series_are_in_progress(run: Any, wire: Wire) -> None:
    """They continue as long as their connections live."""
    received: list[bytes] = []
    answers: dict[str, list[Response]] = defaultdict(list)
    held = {"usual": Gate(), "last": Gate(), "chunked": Gate()}

    def talk(near: socket.socket) -> None:
        while True:
            head = request_of(near)
            received.append(receive(near, content_length(head)))
            kind = head.split(b"/")[1].split(b"-")[0].decode()
            held[kind].wait()
            near.sendall(GOOD_ANSWERS[kind][0])

    async def main() -> None:
        with wire.server(talk) as server:
            async with wire.small_uploads() as uploads:
                usual, last, chunked = (
                    asyncio.ensure_future(
                        wire.put_many(uploads, server, SMALL[:2], answers[kind].append, kind)
                    )
                    for kind in held
                )
                for each in held.values():
                    await each.reached()
                uploads.close()
                for each in held.values():
                    each.open()
                assert await usual is None
                for each in (last, chunked):
                    with pytest.raises(RuntimeError, match="after shutdown"):
                        await each
                assert not uploads._idle
                with pytest.raises(RuntimeError, match="after shutdown"):
                    await wire.put_many(uploads, server, SMALL)

    run(main())
    assert {kind: len(each) for kind, each in answers.items()} == {"usual": 2, "last": 1, "chunked": 0}


@pytest.mark.parametrize("what", ["socketpair", "selector", "thread", "registering", "waiting"])
def test_a_refused_system_call_is_an_error_not_a_hang(
    run: Any, plain: Wire, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The process may be out of descriptors, memory or threads, and the next series must find everything intact."""
    error = OSError(errno.EMFILE, "by the test")

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    class Refusing(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
        def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
            return refuse() if data and what == "registering" else super().register(fileobj, events, data)

        def select(self, timeout: float | None = None) -> Any:
            return refuse() if what == "waiting" else super().select(timeout)

    async def main() -> None:
        with plain.server(takes_all([])) as server:
            async with plain.small_uploads() as uploads:
                sending = [plain.put_many(uploads, server, [b"body"], name=name) for name in "abc"]
                with monkeypatch.context() as patch:
                    match what:
                        case "socketpair":
                            patch.setattr(socket, "socketpair", refuse)
                        case "selector":
                            patch.setattr(selectors, "DefaultSelector", refuse)
                        case "thread":
                            patch.setattr(series.threading, "Thread", OneRefused(error))
                        case _:
                            patch.setattr(selectors, "DefaultSelector", Refusing)
                    found = await asyncio.gather(*sending, return_exceptions=True)
                assert error in found
                assert set(found) <= {error, None}
                await until(lambda: not is_running())
                assert await plain.put_many(uploads, server, SMALL) is None

    run(main())


class OneRefused:
    """A replacement for `Thread` that does not start the thread of the series."""

    def __init__(self, error: OSError) -> None:
        self._error, self._original = error, threading.Thread

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if options.get("name") == THREAD:
            raise self._error
        return self._original(*arguments, **options)
