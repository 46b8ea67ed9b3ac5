"""The HTTP port of a process: metrics for Prometheus, a page for people, its data, and a health probe."""

from __future__ import annotations

import ipaddress
import logging
import socket
import socketserver
import threading
from collections.abc import Iterable, Mapping
from functools import cache, partial
from http import HTTPStatus
from importlib import resources
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from ckpt_async.core import launch
from ckpt_async.local.forks import after_fork
from ckpt_async.page.board import Board
from ckpt_async.serving import BoundedServer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

# A connection, which serves one request, is closed if the client is silent for so long.
SILENCE_S = 10.0
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The page may use only its own script, style and server, whatever a name contains.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFE = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)


class MetricsServer:
    """The running server. It answers on daemon threads of its own, even while the engine's event loop is stuck."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="ckpt-async-page", daemon=True)
        self._thread.start()
        host, port = server.server_address[:2]
        text = host if isinstance(host, str) else host.decode()
        self.page_url = f"http://[{text}]:{port}/" if ":" in text else f"http://{text}:{port}/"
        self.url = f"{self.page_url}metrics"

        after_fork.add(self)

    def abandon(self) -> None:
        """Close our copy of the socket in a forked child, which would otherwise keep a dead trainer's port."""
        self._server.socket.close()

    def close(self) -> None:
        """Stop answering and free the port. Idempotent; takes up to half a second."""
        after_fork.discard(self)
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(
    registry: CollectorRegistry,
    port: int,
    address: str,
    environment: Mapping[str, str],
    board: Board | None = None,
) -> MetricsServer | None:
    """Serve `registry`, and the page of `board`, over HTTP.

    The port is none (-1), any free one (0), or `port` + the rank on this node. Returns None, and logs one warning, if
    the port is not available: nothing stops because of metrics.
    """
    if port < 0:
        return None
    try:
        port += (launch.local_rank(environment) or 0) if port else 0
        server = _listen(address, port)
    # The port is busy, there is no such address, the port is above 65,535, or the rank is not a number.
    except (OSError, OverflowError, ValueError) as error:
        logger.warning(
            "metrics_not_served address=%s port=%d error=%s; everything else continues", address, port, error
        )
        return None
    server.set_app(application(registry, board, is_local=_is_loopback(str(server.server_address[0]))))
    started = MetricsServer(server)
    logger.info("metrics_served url=%s", started.url)
    return started


def _listen(address: str, port: int) -> WSGIServer:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, place = found[0][0], found[0][4]

    class Server(_Server):
        address_family = family

    return Server((str(place[0]), port), _Handler)


class _Server(BoundedServer, WSGIServer):
    def server_bind(self) -> None:
        """Bind without asking the DNS for our own name, which may take long and is not needed."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  socketserver's
        """Log at debug level only, since a client that went away is not worth more."""
        logger.debug("page_request_failed client=%s", client_address)


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
        """Do not log requests."""


# --- what is answered --------------------------------------------------------------------------------------


def application(registry: CollectorRegistry, board: Board | None, *, is_local: bool) -> WSGIApplication:
    """Return the routes.

    `is_local`: only this machine can connect, so a foreign host name is a trick of some web page.
    """
    metrics = make_wsgi_app(registry)

    def respond(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method, path = str(environ["REQUEST_METHOD"]), str(environ.get("PATH_INFO") or "/")
        answer = partial(_answer, start_response, is_head=method == "HEAD")
        if method not in ("GET", "HEAD"):
            return answer(HTTPStatus.METHOD_NOT_ALLOWED, b"read-only: use GET or HEAD\n", allow="GET, HEAD")
        if is_local and not _is_here(str(environ.get("HTTP_HOST", ""))):
            text = b"this address is only for this machine: open it as localhost, or set metrics_address\n"
            return answer(HTTPStatus.MISDIRECTED_REQUEST, text)
        if path == "/metrics" or (board is None and path == "/"):
            if method == "GET":
                return metrics(environ, start_response)  # type: ignore[no-any-return]
            return _without_body(metrics, environ, start_response)
        if board is None:
            return answer(HTTPStatus.NOT_FOUND, b"there is only /metrics here\n")
        if path == "/healthz":
            problem = board.health()
            text = f"{' '.join(problem.split()) or 'ok'}\n".encode(errors="replace")
            return answer(HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK, text)
        if path == "/status.json":
            try:
                told = board.status()
            except TimeoutError:
                text = b"the folder is being read, and its disk does not answer\n"
                return answer(HTTPStatus.SERVICE_UNAVAILABLE, text)
            if told is None:
                return answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"a bug: the log has it\n")
            return answer(HTTPStatus.OK, told, "application/json")
        if path in STATIC:
            name, type_ = STATIC[path]
            return answer(HTTPStatus.OK, _static(name), type_)
        return answer(HTTPStatus.NOT_FOUND, b"there is /, /status.json, /metrics and /healthz here\n")

    return respond


def _answer(
    start_response: StartResponse,
    status: HTTPStatus,
    body: bytes,
    type_: str = "text/plain; charset=utf-8",
    *,
    is_head: bool,
    allow: str = "",
) -> list[bytes]:
    headers = [("Content-Type", type_), ("Content-Length", str(len(body))), *SAFE]
    start_response(f"{status.value} {status.phrase}", [*headers, *([("Allow", allow)] if allow else [])])
    return [] if is_head else [body]


def _without_body(
    metrics: WSGIApplication, environ: WSGIEnvironment, start_response: StartResponse
) -> list[bytes]:
    begun: list[tuple[str, list[tuple[str, str]]]] = []

    def begin(status: str, headers: list[tuple[str, str]], *_: object) -> None:
        begun.append((status, headers))

    body = b"".join(metrics({**environ, "REQUEST_METHOD": "GET"}, begin))  # type: ignore[arg-type]
    status, headers = begun[0]
    start_response(status, [*headers, ("Content-Length", str(len(body)))])
    return []


@cache
def _static(name: str) -> bytes:
    return resources.files("ckpt_async.page").joinpath("static", name).read_bytes()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    """Return whether no DNS can have pointed a Host header at us: it is an address, or localhost.

    A foreign page whose own name suddenly means 127.0.0.1 (DNS rebinding) could otherwise read what is here. Only
    browsers always send the header, so a missing one is accepted.
    """
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").rstrip(".").lower()
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
