"""A webhook's receiver: a real HTTP server that can fail in the ways that servers do."""

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """A receiver. `says` lists how it answers the next requests: 'hang', 'reset', 'drop', 'garbage' or a status; an
    empty list means 200.
    """

    url: str = ""
    says: list[int | str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of requests that got 200
    raw: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)  # of all requests
    is_over: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, num: int, timeout_s: float = 20.0) -> list[dict[str, Any]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.bodies) >= num, timeout_s), self.bodies
            return list(self.bodies)

    def kinds(self) -> list[tuple[str, int | None]]:
        return [(each["kind"], each["step"]) for each in self.bodies]


@contextlib.contextmanager
def receiving(context: ssl.SSLContext | None = None, port: int = 0) -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            receiver.says.append(500)  # a redirect was followed
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with receiver.changed:
                receiver.raw.append((body, dict(self.headers)))
                what = receiver.says.pop(0) if receiver.says else 200
            if what == "hang":
                receiver.is_over.wait(30)
            if what == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if what == "garbage":
                self.wfile.write(b"220 smtp.example.com\r\n\r\n")
            if isinstance(what, str):
                self.close_connection = True
                self.connection.close()
                return
            self.send_response(what)
            if what // 100 == 3:
                self.send_header("Location", receiver.url + "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()
            if what == 200:
                with receiver.changed:
                    receiver.bodies.append(json.loads(body))
                    receiver.changed.notify_all()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", port), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "https" if context else "http"
    receiver.url = f"{scheme}://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def wait_until(is_so: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
