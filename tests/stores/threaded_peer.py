"""The common base of the scripted stores: a loopback HTTP server with one thread per connection."""

import contextlib
import email.utils
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class ThreadedPeer:
    """A context manager that runs the server; with `tls` it speaks HTTPS. `ahead_s`: of its clock, before ours."""

    ahead_s = 0.0

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], *, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def date(self) -> str:
        return email.utils.formatdate(time.time() + self.ahead_s, usegmt=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class PeerHandler(BaseHTTPRequestHandler):
    """A handler that treats every method alike and ignores clients that disconnect."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60

    def serve(self) -> None:
        """Read the request and answer it."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, ssl.SSLError):
            super().handle()
