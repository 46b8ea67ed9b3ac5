"""A TCP relay on loopback that records every ranged GET passing through it and counts the bytes that come back."""

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Self
from urllib.parse import unquote, urlsplit

_RANGED = re.compile(rb"GET (\S+) HTTP/1\.1\r\n(?:[^\r\n]+\r\n)*?[Rr]ange: bytes=([0-9]+)-([0-9]+)\r\n")


class Relay:
    """Relay between clients and a server, as a context manager; clients are given `url` instead of the server's URL.
    Connections beyond `most` at once are reset.
    """

    def __init__(self, upstream_url: str, most: int | None = None) -> None:
        parts = urlsplit(upstream_url)
        self._upstream = (parts.hostname, parts.port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._carrying: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._ends: set[socket.socket] = set()
        self.ranges: list[tuple[str, int, int]] = []  # key, offset, size
        self.bytes_back = 0
        self._most_back: int | None = None
        self.num_connections = self.num_reset = self._num_open = 0
        self._most = most

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._accepting.join()
        self.break_all()
        for thread in self._carrying:
            thread.join(10)

    def break_all(self) -> None:
        """Break every connection, now."""
        with self._changed:
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def asked(self, key: str) -> list[tuple[int, int]]:
        """Return the offset and size of every ranged GET whose key ends with `key`."""
        with self._changed:
            return [(offset, size) for each, offset, size in self.ranges if each.endswith(key)]

    def wait_for_bytes(self, more: int, timeout_s: float = 30.0) -> None:
        """Wait until this many more bytes have come back."""
        self._wait_until_back(self.bytes_back + more, timeout_s)

    def _wait_until_back(self, wanted: int, timeout_s: float = 30.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.bytes_back >= wanted, timeout_s)

    @contextlib.contextmanager
    def holding_after(self, more: int) -> Iterator[Callable[[], None]]:
        """Hold back all bytes after this many more, except those already in flight, for the duration of the block.
        Yields a function that waits until they have come back.
        """
        with self._changed:
            most = self._most_back = self.bytes_back + more
        try:
            yield lambda: self._wait_until_back(most)
        finally:
            with self._changed:
                self._most_back = None
                self._changed.notify_all()

    def _may_pass(self) -> bool:
        return self._most_back is None or self.bytes_back < self._most_back

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                with self._changed:
                    if is_one_more := self._most is None or self._num_open < self._most:
                        self._num_open += 1
                if not is_one_more:
                    self.num_reset += 1
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    near.close()
                    continue
                thread = threading.Thread(target=self._carry, args=(near,), daemon=True)
                self._carrying.append(thread)
                thread.start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._upstream) as far:
            with self._changed:
                self._ends |= {near, far}
                self.num_connections += 1
            back = threading.Thread(target=self._pump, args=(far, near, True), daemon=True)
            back.start()
            self._pump(near, far, False)
            back.join()
            with self._changed:
                self._ends -= {near, far}
        with self._changed:
            self._num_open -= 1

    def _pump(self, source: socket.socket, target: socket.socket, is_back: bool) -> None:
        told = b""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                with self._changed:
                    if is_back:
                        self._changed.wait_for(self._may_pass)
                        self.bytes_back += len(data)
                    else:
                        told += data
                        for match in _RANGED.finditer(told):
                            path = unquote(match[1].decode().partition("?")[0])
                            first, last = int(match[2]), int(match[3])
                            self.ranges.append((path, first, last - first + 1))
                        told = told[told.rfind(b"\r\n\r\n") + 4 :] if b"\r\n\r\n" in told else told[-8192:]
                    self._changed.notify_all()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
