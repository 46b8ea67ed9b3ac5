"""The port of an uploader: metrics, and beside them a page, its data and a probe that change nothing."""

import contextlib
import gzip
import http.client
import json
import os
import queue
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import parser as openmetrics

from ckpt_async import Uploader, cli
from ckpt_async.page import server as page_server
from ckpt_async.page.board import Board
from ckpt_async.page.server import MetricsServer, serve

STATIC = Path(page_server.__file__).parent / "static"
Reply = tuple[int, http.client.HTTPMessage, bytes]


def ask(url: str, path: str = "/", method: str = "GET", **headers: str) -> Reply:
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    try:
        connection.request(
            method, path, headers={key.replace("_", "-"): each for key, each in headers.items()}
        )
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


def tries(limit_s: float = 30.0) -> Iterator[None]:
    """Yield repeatedly, and fail once it is clear that the expected state does not come."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        yield
        threading.Event().wait(0.05)
    pytest.fail("it has not come")


class Told:
    """What the board reports, and how often it was asked."""

    def __init__(self) -> None:
        self.problem, self.num_looks, self.now_s = "", 0, 0.0
        self.cost_s, self.is_broken = 0.0, False

    def look(self) -> dict[str, Any]:
        self.num_looks += 1
        if self.is_broken:
            raise ZeroDivisionError
        self.now_s += self.cost_s
        return {"folders": [], "look": self.num_looks}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[dict[str, Told], MetricsServer]]:
    """Closing a server takes half a second, so all tests share one, whose board is replaced for each test."""
    now: dict[str, Told] = {}
    boards: dict[Told, Board] = {}

    def board() -> Board:
        told = now["told"]
        made = Board(told.look, lambda: told.problem, clock=lambda: told.now_s)
        return boards.setdefault(told, made)

    class Shared(Board):
        def __init__(self) -> None:
            """Do nothing: it has no state of its own."""

        def status(self) -> bytes | None:
            return board().status()

        def health(self) -> str:
            return board().health()

    server = serve(CollectorRegistry(), 0, "127.0.0.1", {}, Shared())
    assert server is not None
    yield now, server
    server.close()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def served(told: Told, shared: tuple[dict[str, Told], MetricsServer]) -> MetricsServer:
    shared[0]["told"] = told
    return shared[1]


@pytest.fixture
def uploader(tmp_path: Path) -> Iterator[Uploader]:
    remote = f"file://{tmp_path}/store/run-a"
    with Uploader(tmp_path / "folder", remote, rank=0, world_size=1, metrics_port=0) as opened:
        path = opened.folder / "step-100" / "rank-0.pt"
        path.parent.mkdir()
        path.write_bytes(os.urandom(1000))
        opened.enqueue(path, 100)
        opened.seal(100)
        opened.wait(100, 60)
        yield opened


def test_metrics_are_served_as_prometheus_asks_for_them(uploader: Uploader) -> None:
    """Content negotiation, gzip, `name[]` and HEAD."""
    assert uploader.metrics_url is not None
    status, headers, body = ask(uploader.metrics_url, "/metrics")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    assert b"ckpt_async_checkpoints_committed_total{" in body
    _, headers, body = ask(
        uploader.metrics_url, "/metrics", Accept="application/openmetrics-text;version=1.0.0"
    )
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert [*openmetrics.text_string_to_metric_families(body.decode())]
    _, headers, body = ask(uploader.metrics_url, "/metrics", Accept_Encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert b"ckpt_async_fenced" in gzip.decompress(body)
    _, _, body = ask(uploader.metrics_url, "/metrics?name[]=ckpt_async_fenced")
    assert {line.split("{")[0] for line in body.decode().splitlines() if line[0] != "#"} == {
        "ckpt_async_fenced"
    }
    status, headers, body = ask(uploader.metrics_url, "/metrics", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 100


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics", "/healthz", "/page.js"])
def test_it_only_looks(served: MetricsServer, path: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = ask(served.url, path, method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    status, headers, body = ask(served.url, path, "HEAD")
    assert (status, body) == (200, b"")
    assert headers["Content-Length"] == str(len(ask(served.url, path)[2]))


def test_nothing_foreign_runs_on_the_page(served: MetricsServer) -> None:
    """Script and style are separate files, and nothing else is allowed: no inline code, no eval, no other host."""
    for path in ("/", "/status.json", "/page.js", "/page.css", "/icon.svg", "/nowhere"):
        _, headers, _ = ask(served.url, path)
        policy = dict(each.split(maxsplit=1) for each in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|style=|https?://", html)
    for name in ("page.js", "page.css"):
        text = (STATIC / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?://|@import", text
        )


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_a_page_of_elsewhere_cannot_read_what_is_for_this_machine(served: MetricsServer, host: str) -> None:
    """DNS rebinding: the foreign page's own name suddenly resolves to 127.0.0.1."""
    for path in ("/", "/status.json", "/metrics", "/healthz"):
        status, _, body = ask(served.url, path, Host=host)
        assert status == 421
        assert b"metrics_address" in body


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9", "run.localhost:80", "127.0.0.1:1", "[::1]:8000", "10.1.2.3", ""]
)
def test_a_tunnel_to_it_works(served: MetricsServer, host: str) -> None:
    assert ask(served.url, "/status.json", Host=host)[0] == 200


def test_where_others_may_connect_any_name_will_do(told: Told) -> None:
    server = serve(CollectorRegistry(), 0, "0.0.0.0", {}, Board(told.look))
    assert server is not None
    try:
        port = urllib.parse.urlsplit(server.url).port
        assert ask(f"http://127.0.0.1:{port}", "/status.json", Host="node-7.cluster:9400")[0] == 200
    finally:
        server.close()


def test_the_probe_says_in_one_line_why_it_does_not_go_on(served: MetricsServer, told: Told) -> None:
    assert ask(served.url, "/healthz")[::2] == (200, b"ok\n")
    told.problem = "the engine has died:\nRuntimeError"
    assert ask(served.url, "/healthz")[::2] == (503, b"the engine has died: RuntimeError\n")
    assert json.loads(ask(served.url, "/status.json")[2])["problem"] == told.problem


def test_many_who_look_cost_no_more_than_one(served: MetricsServer, told: Told) -> None:
    """The run is looked at no more than once a second, and an expensive look is followed by a long pause."""
    for _ in range(5):
        assert json.loads(ask(served.url, "/status.json")[2])["look"] == 1
    told.now_s, told.cost_s = 1.0, 0.5
    assert json.loads(ask(served.url, "/status.json")[2])["look"] == 2
    told.now_s = 26.0
    ask(served.url, "/status.json")
    assert told.num_looks == 2
    told.now_s = 26.6
    ask(served.url, "/status.json")
    assert told.num_looks == 3


def test_a_bug_of_the_page_is_told_once_and_training_goes_on(
    served: MetricsServer, told: Told, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    told.is_broken = True
    for told.now_s in (1.0, 2.0, 3.0):
        assert ask(served.url, "/status.json")[0] == 500
    assert [each.levelname for each in caplog.records] == ["ERROR"]
    assert capfd.readouterr().err == ""
    assert ask(served.url, "/healthz")[0] == 200


def test_a_client_that_says_nothing_holds_up_nobody(
    served: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server closes its connection, and it does not keep the port from being closed."""
    monkeypatch.setattr(page_server._Handler, "timeout", 0.2)
    place = urllib.parse.urlsplit(served.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as silent:
        assert ask(served.url, "/healthz")[0] == 200
        assert silent.recv(1) == b""
    assert threading.active_count() < 50


@pytest.fixture
def dripping(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[MetricsServer, list[socket.socket]]]:
    """A server for four clients, and eight clients that send a byte now and then, and never finish a request."""
    monkeypatch.setattr(page_server._Server, "max_connections", 4)
    server = serve(CollectorRegistry(), 0, "127.0.0.1", {}, Board(told.look))
    assert server is not None
    place = urllib.parse.urlsplit(server.url)
    clients = []
    for _ in range(8):
        clients.append(socket.create_connection((place.hostname, place.port), timeout=30))
        clients[-1].sendall(b"GET / HTTP/1.1\r\nX: ")
    yield server, clients
    server.close()
    for each in clients:
        each.close()


def is_hung_up(client: socket.socket, says: bytes = b"") -> bool:
    """Return whether the client reads the end of the stream. Raises TimeoutError if there is nothing to read yet."""
    try:
        client.sendall(says)
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_however_many_connect_the_probe_is_answered_and_few_descriptors_are_taken(
    dripping: tuple[MetricsServer, list[socket.socket]],
) -> None:
    server, clients = dripping
    for _ in range(3):
        assert ask(server.url, "/healthz")[0] == 200
    assert all(is_hung_up(each) for each in clients[:4]), "the oldest"
    assert sum("process_request_thread" in each.name for each in threading.enumerate()) <= 4


def test_a_client_that_never_comes_to_an_end_is_hung_up_on(
    dripping: tuple[MetricsServer, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, clients = dripping
    monkeypatch.setattr(page_server._Server, "request_s", 0.5)
    place = urllib.parse.urlsplit(server.url)
    clients.append(socket.create_connection((place.hostname, place.port)))
    clients[-1].sendall(b"GET / HTTP/1.1\r\nX: ")
    clients[-1].settimeout(0.05)
    for _ in tries():
        with contextlib.suppress(TimeoutError):
            if is_hung_up(clients[-1], b"a"):
                break


def test_a_disk_that_does_not_answer_collects_nobody(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_async.page.board.PATIENCE_S", 0.1)
    monkeypatch.setattr(page_server._Server, "max_connections", 4)
    begun, goes_on = threading.Event(), threading.Event()

    def look() -> dict[str, Any]:
        begun.set()
        goes_on.wait(30)
        return told.look()

    server = serve(CollectorRegistry(), 0, "127.0.0.1", {}, Board(look))
    assert server is not None
    first = threading.Thread(target=ask, args=(server.url, "/status.json"))
    try:
        first.start()
        assert begun.wait(10)
        for _ in range(5):
            status, _, body = ask(server.url, "/status.json")
            assert (status, body) == (503, b"the folder is being read, and its disk does not answer\n")
        assert ask(server.url, "/healthz")[0] == 200
    finally:
        goes_on.set()
        first.join()
        server.close()


def test_without_a_board_there_are_metrics_only(told: Told) -> None:
    server = serve(CollectorRegistry(), 0, "127.0.0.1", {})
    assert server is not None
    try:
        assert ask(server.url, "/metrics")[0] == 200
        assert ask(server.url, "/status.json")[0] == 404
    finally:
        server.close()


# --- what an uploader reports ------------------------------------------------------------------------------


def test_the_page_and_the_command_tell_the_same(
    uploader: Uploader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert uploader.page_url is not None
    told = json.loads(ask(uploader.page_url, "/status.json")[2])
    assert cli.main(["status", str(uploader.folder), "--json"]) == 0
    command = json.loads(capsys.readouterr().out)
    (folder,) = told["folders"]
    for each in (command, folder):
        each["last_committed"].pop("age_s")
        each.pop("summary")
    assert folder == command
    assert (told["role"], told["problem"], told["remotes"]) == ("uploader", None, [])
    (event,) = told["events"]
    assert (event["step"], event["level"]) == (100, "good")


def test_an_uploader_answers_the_probe_until_a_newer_start_fences_it(uploader: Uploader) -> None:
    assert uploader.page_url is not None
    assert ask(uploader.page_url, "/healthz")[::2] == (200, b"ok\n")
    with Uploader(uploader.folder.parent / "other", uploader.remote, rank=0, world_size=1):
        uploader.enqueue(uploader.folder / "step-100", 101)
        uploader.seal(101)
        for _ in tries():
            if (answer := ask(uploader.page_url, "/healthz"))[0] != 200:
                break
    assert answer[2] == b"fenced: generation 2 of this run has started; this trainer is generation 1\n"


def test_a_dead_engine_fails_the_probe(uploader: Uploader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an engine that is dead for good counts: one that is restarted never gets here."""
    assert uploader.page_url is not None
    with monkeypatch.context() as patch:
        patch.setattr(uploader._engine.runner, "death", RuntimeError("a bug"))
        answer = ask(uploader.page_url, "/healthz")
        assert answer[::2] == (503, b"the engine has died: RuntimeError('a bug')\n")
        (engine,) = json.loads(ask(uploader.page_url, "/status.json")[2])["engines"]
        assert engine["problem"].startswith("the engine has died")


def test_a_store_that_is_away_does_not_fail_the_probe(tmp_path: Path) -> None:
    """Otherwise a liveness probe would restart training for nothing."""
    settings: dict[str, Any] = {"on_error": "warn", "close_grace_s": 0, "retry_max_s": 0.3, "metrics_port": 0}
    uploader = Uploader(tmp_path / "a", f"file://{tmp_path}/store/run", rank=0, world_size=1, **settings)
    try:
        (tmp_path / "store").rename(tmp_path / "away")
        (tmp_path / "store").write_text("no folder")
        (uploader.folder / "x").write_bytes(b"x")
        uploader.enqueue(uploader.folder / "x", 1)
        uploader.seal(1)
        assert uploader.page_url is not None
        for _ in tries():
            told = json.loads(ask(uploader.page_url, "/status.json")[2])
            if told["engines"][0]["attempt_failures"]:
                break
        assert ask(uploader.page_url, "/healthz")[::2] == (200, b"ok\n")
        assert told["folders"][0]["would_lose"]["steps"] == [1]
        assert told["events"][0]["level"] == "warn"
    finally:
        uploader.close(timeout_s=0)


def test_what_events_tell_is_shown_and_who_could_not_be_told(tmp_path: Path) -> None:
    """No metric has the step of the backlog or of what was removed here. Each is shown once, however many receivers
    got it.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}/hook"
    told: queue.Queue[str] = queue.Queue()
    start: dict[str, Any] = {"world_size": 2, "launch_id": "a", "close_grace_s": 0, "on_error": "warn"}
    settings: dict[str, Any] = {"event_backlog_checkpoints": 1, "num_checkpoints_to_keep": 1}
    first, second = (
        Uploader(
            tmp_path / f"node-{rank}",
            f"file://{tmp_path}/store",
            rank=rank,
            metrics_port=0,
            event_webhook=nobody,
            on_event=lambda event: told.put(event.kind),
            event_grace_s=0,
            decision_poll_s=0.02,
            **start,
            **settings,
        )
        for rank in (0, 1)
    )

    def save(uploader: Uploader, step: int) -> None:
        path = uploader.folder / f"{step}-{uploader.rank}.pt"
        path.write_bytes(b"x" * 1000)
        uploader.enqueue(path, step)
        uploader.seal(step)

    def has_told(*kinds: str) -> None:
        missing = {*kinds}
        while missing:
            missing.discard(told.get(timeout=30))

    def look(uploader: Uploader) -> dict[str, Any]:
        assert uploader.page_url is not None
        found: dict[str, Any] = json.loads(ask(uploader.page_url, "/status.json")[2])
        return found

    try:
        save(first, 1)
        has_told("backlog")
        save(second, 1)
        has_told("committed", "backlog")
        save(first, 2)
        save(second, 2)
        has_told("pruned")
        for _ in tries():
            page = look(first)
            (engine,) = page["engines"]
            # What the callback has just been told may not be noted yet.
            if [(each["sink"], each["attempts"] > 0) for each in engine["untold"]] == [("webhook", True)]:
                break
        assert engine["untold"][0]["waiting"] >= 5, "two commits, a pruned one, two of the backlog"
        shown = [(each["what"], each["level"], each["step"]) for each in reversed(page["events"])]
        assert [each for each in shown if each[0] in ("backlog", "pruned")].count(("pruned", "note", 1)) == 1
        assert [each[1] for each in shown if each[0] == "backlog"][:2] == ["warn", "good"]
        assert "waits for rank 1" in next(each["text"] for each in page["events"] if each["level"] == "warn")
        (silent,) = look(second)["engines"]
        assert silent["untold"] == []
    finally:
        for each in (first, second):
            each.close(timeout_s=0)


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_checkpoint_says_which_ranks_it_waits_for_wherever_the_engine_runs(
    tmp_path: Path, runner: str
) -> None:
    """Whatever the checkpoint's name is, it is shown as text."""
    uploader = Uploader(
        *(tmp_path / "folder", f"file://{tmp_path}/store"),
        rank=0,
        world_size=3,
        launch_id="a",
        metrics_port=0,
        runner=runner,
        close_grace_s=0,
        on_error="warn",
    )
    try:
        path = uploader.folder / "rank-0.pt"
        path.write_bytes(b"x")
        uploader.enqueue(path, 7)
        uploader.seal(7)
        assert uploader.page_url is not None
        for _ in tries():
            body = ask(uploader.page_url, "/status.json")[2]
            (found,) = json.loads(body)["folders"][0]["checkpoints"]
            if found["missing_ranks"]:
                break
        assert (found["state"], found["missing_ranks"]) == ("waiting", [1, 2])
        assert json.loads(body)["folders"][0]["would_lose"]["steps"] == []
    finally:
        uploader.close(timeout_s=0)


def test_kinds_on_one_port_share_the_page(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start: dict[str, Any] = {"rank": 0, "world_size": 1, "metrics_port": port}
    with (
        Uploader(tmp_path / "a", f"file://{tmp_path}/s", **start) as full,
        Uploader(tmp_path / "a", f"file://{tmp_path}/s", kind="weights", **start) as weights,
    ):
        assert full.page_url == weights.page_url is not None
        told = json.loads(ask(full.page_url, "/status.json")[2])
        assert [each["kind"] for each in told["engines"]] == [None, "weights"]
        assert set(told["folders"][0]["kinds"]) == {"weights"}
