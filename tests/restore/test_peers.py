"""Files from other nodes: peers are asked before the store, and what they send is never trusted."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ckpt_async import restore
from ckpt_async.restore import Peer, PeerServer, partial, peers
from tests.restore.relay import Relay
from tests.restore.runs import Run, content, files_of, is_whole, shard_key


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
    monkeypatch.setattr(partial, "RANGE_BYTES", 1000)
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
            peer = Peer(f"{peer.url}x", peer.keys, peer.name)
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
        peer = Peer(dead, server.peer.keys, "node", (another.peer.url, server.peer.url, dead))
        report = restore.fetch(checkpoint, tmp_path / "there", peers=[peer])
    assert is_whole(report, files_of(10))
    assert report.bytes_from == {"peer": checkpoint.size_bytes}
    assert caplog.records == []


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
        peer = Peer(server.peer.url, server.peer.keys, "node-7 (10.0.0.7)")
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
    """No path leads outside, no secret can be guessed, no link is followed, and after `close` nothing is served."""
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "link").symlink_to(tmp_path / "secret")
    with _node(tmp_path / "node", {"a.pt": b"content"}) as server:
        server._server.files = {**server._server.files, "link": tmp_path / "node" / "link"}
        parts = urlsplit(server.peer.url)
        assert server.peer.url not in repr(server.peer)
        assert parts.hostname
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)

        def get(target: str, ranges: str = "bytes=0-5") -> tuple[int, bytes]:
            connection.putrequest("GET", target.encode("latin-1").decode("latin-1"))
            if ranges:
                connection.putheader("Range", ranges)
            connection.endheaders()
            response = connection.getresponse()
            return response.status, response.read() if response.status == 206 else response.read()[:0]

        there = f"{parts.path}/{shard_key(10, 'a.pt')}"
        assert get(there) == (206, b"conten")
        assert get(there, "bytes=6-6") == (206, b"t")
        refused = [
            f"{parts.path}/../{tmp_path}/secret",
            f"{parts.path}/{shard_key(10, '../../../secret')}",
            f"{parts.path}/{tmp_path}/secret",
            f"{parts.path}/link",
            f"{parts.path[:-1]}/{shard_key(10, 'a.pt')}",
            f"/{shard_key(10, 'a.pt')}",
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
