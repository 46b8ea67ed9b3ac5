"""Files from other nodes of the same job: a node that lost its disk need not ask the store for what a neighbour has.

A `PeerServer` hands out ranges of this node's files over plain HTTP, in the cluster's own network, to whoever knows its
secret address; it is meant to live for the seconds of a resume. What comes from a peer is compared with the receipt's
checksum like everything else, so a peer can be wrong, slow or dead, but never believed.
"""

from __future__ import annotations

import asyncio
import http.client
import http.server
import os
import random
import re
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Self
from urllib.parse import quote

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.restore.checkpoint import RemoteFile
from ckpt_async.restore.sources import SinkFactory
from ckpt_async.stores.http_messages import Answer
from ckpt_async.stores.http_ranges import Check, Downloads

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
MINIMUM_RATE_BYTES_PER_S = 1 << 20
MAX_FAILURES = 3
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Peer:
    """Where another node's files are, and which it has, by their keys in the store (a key never changes content). A
    plain value, to be sent to other ranks; `url` is a secret among them.
    """

    url: str = field(repr=False)
    keys: frozenset[str]
    name: str = ""

    def has(self, file: RemoteFile) -> bool:
        return file.key in self.keys


class PeerServer:
    """Serves files until closed. Threads of its own; `close` does not wait for ranges on their way."""

    def __init__(self, files: Mapping[str, Path], host: str | None = None) -> None:
        """`files` by their keys. `host` is the name or address under which other nodes reach this one."""
        name = host or socket.gethostname()
        secret = secrets.token_urlsafe(24)
        self._server = _Server(secret, {quote(key): path for key, path in files.items()})
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="ckpt-async-peer",
            daemon=True,
        )
        self._thread.start()
        self.peer = Peer(f"http://{name}:{self._server.server_port}/{secret}", frozenset(files), name)

    def close(self) -> None:
        """Stop serving, also those that are connected. Idempotent."""
        self._server.files = {}
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, secret: str, files: Mapping[str, Path]) -> None:
        self._secret, self.files = secret.encode(), files
        super().__init__(("", 0), _Handler)

    def find(self, target: str) -> Path | None:
        """Only what is served has a name here: a path leads nowhere."""
        secret, _, name = target.removeprefix("/").partition("/")
        return self.files.get(name) if secrets.compare_digest(secret.encode(), self._secret) else None

    def handle_error(self, request: object, client_address: object) -> None:
        """Not to stderr: a reader that goes away is its own business."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        path = self.server.find(self.path)
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if path is None or match is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        start, end = int(match[1]), int(match[2]) + 1
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with os.fdopen(descriptor, "rb") as file:
            total = os.fstat(descriptor).st_size
            if not start < end <= total:
                self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{total}")
            self.end_headers()
            try:
                sent = self.connection.sendfile(file, start, end - start)
            except OSError:
                sent = 0
            self.close_connection = sent < end - start  # cut short: the reader notices

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Not to stderr: the address is a secret, and the reader says what went wrong."""


class Peers:
    """Connections to peers, and what is known of them: one that has failed a few times is not asked again, or each of
    a thousand files would wait for a dead node.
    """

    def __init__(self, peers: Collection[Peer], num_concurrent_reads: int) -> None:
        self._peers = list(peers)
        self._num_failures: Counter[str] = Counter()  # by address
        self._downloads = Downloads(
            max_connections=num_concurrent_reads,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            read_timeout_s=READ_TIMEOUT_S,
            ca_file=None,
        )
        self._at_once = asyncio.Semaphore(num_concurrent_reads)

    def sources(self, file: RemoteFile) -> list[PeerSource]:
        """Those that have the file, in an order of chance, so that many readers spread over them."""
        able = [peer for peer in self._peers if peer.has(file) and file.checksum is not None]
        return [PeerSource(self, peer, file) for peer in random.sample(able, len(able))]

    def close(self) -> None:
        self._downloads.close()

    async def get_range(
        self, peer: Peer, url: str, offset: int, size_bytes: int, sink: SinkFactory, check: Check
    ) -> Answer:
        """One range within a deadline of its own: a peer that only trickles is as good as dead."""
        async with self._at_once:
            if self._num_failures[peer.url] >= MAX_FAILURES:
                raise ConnectionError("it has failed too often")
            try:
                async with asyncio.timeout(READ_TIMEOUT_S + size_bytes / MINIMUM_RATE_BYTES_PER_S):
                    return await self._downloads.get_range(url, offset, size_bytes, sink(), check)
            except (OSError, http.client.HTTPException):
                self._num_failures[peer.url] += 1
                raise


class PeerSource:
    """One file of one peer."""

    kind = "peer"

    def __init__(self, peers: Peers, peer: Peer, file: RemoteFile) -> None:
        self._peers, self._peer, self._file = peers, peer, file

    async def get_range(self, offset: int, size_bytes: int, sink: SinkFactory) -> None:
        url = f"{self._peer.url}/{quote(self._file.key)}"

        def check(answer: Answer) -> None:
            if answer.headers.get("content-range", "").rpartition("/")[2] != str(self._file.size_bytes):
                raise self._failure("its file has another size")

        try:
            answer = await self._peers.get_range(self._peer, url, offset, size_bytes, sink, check)
        except (http.client.HTTPException, ValueError) as error:  # ValueError: an address that is none
            raise self._failure(f"{type(error).__name__}: {error}") from error
        if answer.status >= 300:
            raise self._failure(f"it answered {answer.status}")

    def _failure(self, message: str) -> StoreError:
        return StoreError(
            f"peer {self._peer.name}: {message}", reason=FailureReason.TRANSIENT, key=self._file.key
        )
