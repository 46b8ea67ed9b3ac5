"""A loopback server that sends whatever a test wants, byte by byte."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Self

Talk = Callable[[socket.socket], None]


PATIENCE_S = 30.0


class Server:
    """A server that runs `talk` with each connection, in a separate thread, and then closes the connection."""

    def __init__(self, talk: Talk, tls: ssl.SSLContext | None = None) -> None:
        self._talk, self._tls = talk, tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.num_connections = 0
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._threads.append(threading.Thread(target=self._accept, daemon=True))
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                self.num_connections += 1
                self._threads.append(threading.Thread(target=self._serve, args=(near,), daemon=True))
                self._threads[-1].start()

    def _serve(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            if self._tls is None:
                self._talk(near)
                return
            with self._tls.wrap_socket(near, server_side=True) as encrypted:
                self._talk(encrypted)


def request_of(near: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = near.recv(1)
        if not data:
            raise ConnectionResetError
        head += data
    return head
