"""Files from other nodes: peers are asked before the store, and nobody else can ask them."""

import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ckpt_async import restore
from ckpt_async.restore import Peer, PeerServer, peers
from ckpt_async.restore import destination as destinations
from tests.restore.relay import Relay
from tests.restore.runs import Run, content, files_of, is_whole, shard_key
from tests.stores.http_server import Server, request_of


def _committed(run: Run) -> restore.Checkpoint:
    run.commit(10)
    checkpoint = restore.find(run.url)
    assert checkpoint is not None
    return checkpoint


@contextmanager
def _node(folder: Path, names: dict[str, bytes]) -> Iterator[PeerServer]:
    """Serve these files as a node does."""
    files = {}
    for name, data in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files[shard_key(10, name)] = path
    with PeerServer(files, host="127.0.0.1") as server:
        yield server


def test_a_wiped_node_is_refilled_by_its_peers(
    counted_run: Run, relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two nodes has half of the files, in many ranges. No byte of a shard may come from the store."""
    monkeypatch.setattr(destinations, "RANGE_BYTES", 1000)
    checkpoint = _committed(counted_run)
    with (
        _node(tmp_path / "a", files_of(10)[0]) as first,
        _node(tmp_path / "b", files_of(10)[1]) as second,
    ):
        report = restore.fetch(checkpoint, tmp_path / "there", peers=[first.peer, second.peer])
        with restore.open(checkpoint, peers=[first.peer, second.peer]) as reader:
            for name in ("rank-0.pt", "rank-1.pt"):
                assert reader.read(name, 7, 100) == content(10, name)[7:107]
            assert reader.bytes_from == {"peer": 200}
    assert is_whole(report, files_of(10))
    assert report.bytes_from == {"peer": checkpoint.size_bytes}
    assert relay.asked(".pt") == []


@pytest.mark.parametrize(
    "bad", ["wrong bytes", "cut short", "gone", "closed", "wrong secret", "dead", "no address", "other size"]
)
def test_a_bad_peer_is_replaced_by_the_store(run_: Run, tmp_path: Path, bad: str) -> None:
    """The reader turns to another peer and then to the store, and the bytes that arrive are right."""
    checkpoint = _committed(run_)
    files = {name: data for theirs in files_of(10).values() for name, data in theirs.items()}
    with ExitStack() as stack:
        server = stack.enter_context(_node(tmp_path / "bad", files))
        peer = server.peer
        for name, data in files.items():
            path = tmp_path / "bad" / name
            match bad:
                case "wrong bytes":
                    path.write_bytes(bytes(3000))
                case "cut short":
                    path.write_bytes(data[:1000])
                case "other size":
                    path.write_bytes(data + b"more")
                case "gone":
                    path.unlink()
        if bad == "closed":
            server.close()
        if bad == "wrong secret":
            peer = replace(peer, secret="x")
        if bad == "dead":
            with socket.create_server(("127.0.0.1", 0)) as closed:
                peer = Peer(f"http://127.0.0.1:{closed.getsockname()[1]}/x", peer.keys)
        if bad == "no address":
            peer = Peer("http://127.0.0.1:99999/x", peer.keys)
        report = restore.fetch(checkpoint, tmp_path / "one", peers=[peer])
        assert is_whole(report, files_of(10))
        assert report.bytes_from == {"remote": checkpoint.size_bytes}
        good = stack.enter_context(_node(tmp_path / "good", files))
        report = restore.fetch(checkpoint, tmp_path / "two", peers=[peer, good.peer])
        assert is_whole(report, files_of(10))
        assert report.bytes_from == {"peer": checkpoint.size_bytes}
    assert run_.damages() == {}


def test_a_silent_peer_is_asked_only_a_few_times(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every single file would wait for the timeout."""
    monkeypatch.setattr(peers, "READ_TIMEOUT_S", 0.3)
    files = {0: {f"{number}.pt": content(number, "x", 100) for number in range(40)}}
    run_.commit(10, files)
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts connections and never answers
        peer = Peer(
            f"http://127.0.0.1:{deaf.getsockname()[1]}/x",
            frozenset(file.key for file in checkpoint.files.values()),
        )
        report = restore.fetch(checkpoint, tmp_path / "there", peers=[peer], num_concurrent_reads=2)
        deaf.setblocking(False)
        num_connections = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                deaf.accept()[0].close()
                num_connections += 1
    assert is_whole(report, files)
    assert 1 <= num_connections <= peers.MAX_FAILURES + 2


@pytest.mark.fault("F63")
def test_another_address_is_tried_if_one_does_not_respond(
    run_: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one attempt is lost, even if a stranger answers at that address; all files then
    come from the address that works.
    """
    checkpoint = _committed(run_)
    files = {name: data for theirs in files_of(10).values() for name, data in theirs.items()}
    with (
        _node(tmp_path / "node", files) as server,
        _node(tmp_path / "another", {}) as another,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        assert server.peer is not None
        assert another.peer is not None
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
        closed.close()
        more = (another.peer.url, server.peer.url, dead)
        peer = Peer(dead, server.peer.keys, "node", more, server.peer.secret)
        report = restore.fetch(checkpoint, tmp_path / "there", peers=[peer])
    assert is_whole(report, files_of(10))
    assert report.bytes_from == {"peer": checkpoint.size_bytes}
    assert caplog.records == []


@pytest.mark.fault("F63")
@pytest.mark.parametrize("how", ["dead", "wrong bytes"])
def test_a_failing_peer_is_logged_once_by_name(
    run_: Run, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However many files the peer should have sent, one line says so, and how much came from the store instead."""
    names = {f"{number:02}.pt": content(number, "x", 1 << 16) for number in range(40)}
    run_.commit(10, {0: names})
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    with _node(tmp_path / "node", {name: bytes(1 << 16) for name in names}) as server:
        assert server.peer is not None
        peer = replace(server.peer, name="node-7 (10.0.0.7)")
        if how == "dead":
            server.close()
        report = restore.fetch(checkpoint, tmp_path / "there", peers=[peer])
    assert is_whole(report, {0: names})
    assert report.bytes_from == {"remote": checkpoint.size_bytes}
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert line.startswith("peers_failed num=1 of=1 from_store_instead_mib=2.5 node-7 (10.0.0.7): ")
    caplog.clear()
    with restore.open(checkpoint, peers=[Peer("http://127.0.0.1:1/x", peer.keys, "node-8")]) as reader:
        for name, data in names.items():
            assert reader.read(name) == data
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("peers_failed num=1 of=1 from_store_instead_mib=2.5 node-8: ")


def test_a_peer_that_trickles_is_dropped(run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte arrives before the socket times out, so the range's own deadline has to end the read."""
    monkeypatch.setattr(peers, "READ_TIMEOUT_S", 0.5)
    run_.commit(10, {0: {"a.pt": content(1, "a")}})
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    over = threading.Event()

    def trickle(listening: socket.socket) -> None:
        near, _ = listening.accept()
        with near:
            near.recv(10_000)
            near.sendall(
                b"HTTP/1.1 206 X\r\nContent-Length: 3000\r\nContent-Range: bytes 0-2999/3000\r\n\r\n"
            )
            try:
                while not over.wait(0.05):
                    near.sendall(b"x")
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle, args=(listening,))
        thread.start()
        peer = Peer(f"http://127.0.0.1:{listening.getsockname()[1]}/x", frozenset([shard_key(10, "a.pt")]))
        report = restore.fetch(checkpoint, tmp_path / "there", peers=[peer])
        over.set()
        thread.join(10)
    assert is_whole(report, {0: {"a.pt": content(1, "a")}})
    assert report.bytes_from == {"remote": 3000}


def test_a_peer_serves_only_the_registered_files(tmp_path: Path) -> None:
    """No path leads outside, no link is followed, and after `close` nothing is served."""
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "link").symlink_to(tmp_path / "secret")
    with _node(tmp_path / "node", {"a.pt": b"content"}) as server:
        server._server.files = {**server._server.files, "link": tmp_path / "node" / "link"}
        parts = urlsplit(server.peer.url)
        secret = server.peer.secret
        assert secret not in repr(server.peer)
        assert parts.hostname
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)

        def get(target: str, ranges: str = "bytes=0-5") -> tuple[int, bytes]:
            connection.putrequest("GET", target.encode("latin-1").decode("latin-1"))
            if ranges:
                connection.putheader("Range", ranges)
            connection.putheader("Authorization", peers.signed(secret, target, ranges, int(time.time())))
            connection.endheaders()
            response = connection.getresponse()
            return response.status, response.read() if response.status == 206 else response.read()[:0]

        there = f"/{shard_key(10, 'a.pt')}"
        assert get(there) == (206, b"conten")
        assert get(there, "bytes=6-6") == (206, b"t")
        refused = [
            f"/../{tmp_path}/secret",
            f"/{shard_key(10, '../../../secret')}",
            f"/{tmp_path}/secret",
            "/link",
            "/",
            "//",
        ]
        for target in refused:
            assert get(target) == (404, b""), target
        for ranges in ("bytes=0-7", "bytes=3-2", "bytes=9-99"):
            assert get(there, ranges)[0] == 416
        for ranges in ("", "bytes=-5", "bytes=0-", "bytes=0-1,3-4", "nonsense"):
            assert get(there, ranges)[0] == 404
        assert get(there) == (206, b"conten")
        server.close()
        assert get(there)[0] == 404  # the connection is still open
        connection.close()


def _answer(url: str, request: bytes) -> bytes:
    """Return what a server answers to a request, up to the end of its head."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connected:
        connected.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received and (more := connected.recv(65536)):
            received += more
    return received.partition(b"\r\n\r\n")[0]


@pytest.mark.fault("F143")
def test_a_captured_request_reads_nothing_else(run_: Run, tmp_path: Path) -> None:
    """Whoever sees a request on its way learns no secret, and can ask for nothing but the same bytes, and not for
    long.
    """
    run_.commit(10, {0: {"a.pt": content(1, "a"), "b.pt": content(1, "b")}})
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    heads: list[bytes] = []
    with _node(tmp_path / "node", {"a.pt": content(1, "a"), "b.pt": content(1, "b")}) as server:
        assert server.peer is not None
        place = urlsplit(server.peer.url)

        def relay(near: socket.socket) -> None:
            with socket.create_connection((place.hostname, place.port)) as far:
                heads.append(request_of(near))
                far.sendall(heads[-1])
                far.settimeout(0.5)
                with contextlib.suppress(TimeoutError):
                    while data := far.recv(65536):
                        near.sendall(data)

        with Server(relay) as seen:
            peer = replace(
                server.peer, url=f"http://127.0.0.1:{seen.port}", keys=frozenset([shard_key(10, "a.pt")])
            )
            with restore.open(checkpoint, peers=[peer]) as reader:
                assert reader.read("a.pt", 0, 1000) == content(1, "a")[:1000]
                assert reader.bytes_from == {"peer": 1000}
        (head,) = heads
        assert server.peer.secret.encode() not in head
        assert _answer(server.peer.url, head).startswith(b"HTTP/1.1 206")
        said = next(line for line in head.split(b"\r\n") if line.startswith(b"Authorization:"))
        at = said.split()[2]
        for changed in (
            head.replace(b"a.pt", b"b.pt"),
            head.replace(b"bytes=0-999", b"bytes=0-998"),
            head.replace(at, b"%d" % (int(at) + 1)),
            head.replace(said + b"\r\n", b""),
            head.replace(said, b"Authorization: \xff"),
        ):
            assert changed != head
            assert _answer(server.peer.url, changed).startswith(b"HTTP/1.1 404")
        old = peers.signed(server.peer.secret, f"/{shard_key(10, 'a.pt')}", "bytes=0-999", int(at) - 7200)
        assert _answer(server.peer.url, head.replace(said, b"Authorization: " + old.encode())).startswith(
            b"HTTP/1.1 404"
        )


@pytest.mark.fault("F143")
def test_a_peer_listens_only_where_it_was_asked_to(tmp_path: Path) -> None:
    with PeerServer({"a": tmp_path}, "127.0.0.2") as server:
        assert server.peer is not None
        parts = urlsplit(server.peer.url)
        assert _answer(server.peer.url, b"GET /a HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404")
        with pytest.raises(ConnectionRefusedError):
            _answer(f"http://127.0.0.3:{parts.port}", b"")


def test_a_named_peer_listens_at_its_interfaces(tmp_path: Path) -> None:
    """What the name means here may be something else than elsewhere; the same holds for an address behind NAT."""
    for host in ("node-7.example", "192.0.2.7"):
        with PeerServer({"a": tmp_path}, host) as server:
            assert server.peer is not None
            for address in peers.own_addresses(os.environ):
                there = f"http://{peers.in_url(address)}:{urlsplit(server.peer.url).port}"
                assert _answer(there, b"GET /a HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404")


def _is_hung_up(client: socket.socket) -> bool:
    try:
        client.sendall(b"a")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.fault("F143")
def test_a_client_that_drips_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "READ_TIMEOUT_S", 0.3)
    with PeerServer({"a": tmp_path}, "127.0.0.1") as server:
        assert server.peer is not None
        parts = urlsplit(server.peer.url)
        with socket.create_connection((parts.hostname, parts.port), timeout=0.05) as client:
            client.sendall(b"GET /a HTTP/1.1\r\nX: ")
            assert any(_is_hung_up(client) for _ in range(200))


@pytest.mark.fault("F143")
def test_many_clients_of_a_peer_take_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection takes a thread and a descriptor of a training process."""
    monkeypatch.setattr(peers._Server, "max_connections", 4)
    with PeerServer({"a": tmp_path}, "127.0.0.1") as server, ExitStack() as stack:
        assert server.peer is not None
        parts = urlsplit(server.peer.url)
        for _ in range(12):
            stack.enter_context(socket.create_connection((parts.hostname, parts.port)))
        assert _answer(server.peer.url, b"GET /a HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404")
        assert sum("process_request_thread" in each.name for each in threading.enumerate()) <= 4
