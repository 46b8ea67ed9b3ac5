"""Files from other nodes of the same job: a node that lost its disk need not ask the store for what a neighbour
has.

A `PeerServer` serves ranges of this node's files over plain HTTP to any client that knows its secret, which signs each
request and is never sent. A peer may be wrong, slow or dead: what it sends is compared with the receipt's checksum like
everything else. But a checksum is no signature, and anybody can make other bytes with the same one. So peers, and the
network between them, are trusted as the job's own NCCL traffic is, which is not encrypted either: whoever can change
packets there can read and replace weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import http.client
import http.server
import ipaddress
import logging
import os
import random
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.local.folder import boot_id
from ckpt_async.restore.checkpoint import Peer, RemoteFile
from ckpt_async.restore.sources import AnyTime, SinkFactory
from ckpt_async.serving import BoundedServer
from ckpt_async.stores.http.downloads import Check, Downloads
from ckpt_async.stores.http.failures import MAX_SKEW_S
from ckpt_async.stores.http.messages import Response

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
MINIMUM_RATE_BYTES_PER_S = 1 << 20
MAX_FAILURES = 3
# Peers are near, so a few connections fill this node's network.
MOST_AT_ONCE = 8
# How many failed peers the one log line about them names.
MOST_TOLD = 5
LOOPBACK = "127.0.0.1"
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


def signed(secret: str, target: str, ranges: str, at_s: int) -> str:
    """Return the Authorization header of a GET. It is good for that range of that file, for a quarter of an hour."""
    message = f"GET\n{target}\n{ranges}\n{at_s}"
    return f"ckpt-async {at_s} {hmac.digest(secret.encode(), message.encode(), 'sha256').hex()}"


def allowed_s(size_bytes: int) -> float:
    """Return how long a request may take. Who only trickles is as good as dead."""
    return READ_TIMEOUT_S + size_bytes / MINIMUM_RATE_BYTES_PER_S


class PeerServer:
    """A server of files, over IPv6 and IPv4, on its own threads. `close` does not wait for ranges that are being
    sent. It listens at the addresses that it offers, and at the loopback address.

    `peer` is for other nodes, or None if this node has no address that they could use; `local_peer` is for
    processes on this machine.
    """

    def __init__(self, files: Mapping[str, Path], host: str | None = None) -> None:
        """Serve `files`, given by their keys. `host` is the name or address under which other nodes reach this one;
        the default is the addresses of its interfaces, see `addresses`. Those are also listened at if `host` is no
        address of this node: what a name means here, or who translates an address, is not what matters elsewhere.
        """
        hosts = [host] if host else own_addresses(os.environ)
        places = hosts if host and _is_own(host) else own_addresses(os.environ)
        secret = secrets.token_urlsafe(24)
        self._server = _Server([LOOPBACK, *places], secret, {quote(key): path for key, path in files.items()})
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="ckpt-async-peer",
            daemon=True,
        )
        self._thread.start()
        keys = frozenset(files)

        def url(host: str) -> str:
            return f"http://{in_url(host)}:{self._server.port}"

        self.local_peer = Peer(url(LOOPBACK), keys, socket.gethostname(), secret=secret)
        self.peer: Peer | None = None
        if hosts:
            name = f"{socket.gethostname()} ({', '.join(hosts)})"
            first, *others = map(url, hosts)
            self.peer = Peer(first, keys, name, tuple(others), secret)

    def close(self) -> None:
        """Stop serving, including to connected clients. Idempotent."""
        self._server.files = {}
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_own(host: str) -> bool:
    """Return whether this is an address, not a name, at which this node can listen."""
    with contextlib.suppress(ValueError, OSError):
        ipaddress.ip_address(host)
        _listen([host])[0].close()
        return True
    return False


def _listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Listen at the first of these addresses, and at the same port of all others. Raises OSError."""
    made: list[socket.socket] = []
    for address in dict.fromkeys(addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        port = made[0].getsockname()[1] if made else 0
        try:
            made.append(socket.create_server((address, port), family=family, backlog=128))
        except OSError as error:  # the port is taken there, or the interface has just gone
            if not made:
                raise
            logger.warning("peer_address_not_served address=%s error=%s; the others are", address, error)
    return made


class _Server(BoundedServer):
    max_connections, request_s = 256, READ_TIMEOUT_S

    def __init__(self, addresses: Sequence[str], secret: str, files: Mapping[str, Path]) -> None:
        super().__init__("", _Handler)
        self._secret, self.files = secret, files
        self._listening = _listen(addresses)
        self.port: int = self._listening[0].getsockname()[1]
        self._ready = selectors.DefaultSelector()
        for each in self._listening:
            each.setblocking(False)
            self._ready.register(each, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return what becomes readable when somebody connects to any of the addresses."""
        return self._ready.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        for key, _ in self._ready.select(0):
            accepted: tuple[socket.socket, Any] = key.fileobj.accept()  # type: ignore[union-attr]
            return accepted
        raise BlockingIOError

    def shutdown_request(self, request: Any) -> None:
        request.close()

    def server_close(self) -> None:
        super().server_close()
        self._ready.close()
        for each in self._listening:
            each.close()

    def find(self, target: str, ranges: str, authorization: str) -> Path | None:
        """Return the file with this name, if the request is signed. Only served files have names, so no path can lead
        anywhere else.
        """
        at_s = re.fullmatch(r"ckpt-async ([0-9]{1,12}) .*", authorization)
        if at_s is None or abs(time.time() - int(at_s[1])) > MAX_SKEW_S:
            return None
        wanted = signed(self._secret, target, ranges, int(at_s[1]))
        is_signed = hmac.compare_digest(authorization.encode(), wanted.encode())
        return self.files.get(target.removeprefix("/")) if is_signed else None

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing to stderr: a reader that disconnects is no error here."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_TIMEOUT_S
    server: _Server

    def handle_one_request(self) -> None:
        self.server.allow(self.connection, READ_TIMEOUT_S)
        super().handle_one_request()

    def do_GET(self) -> None:
        ranges = self.headers.get("Range", "")
        path = self.server.find(self.path, ranges, self.headers.get("Authorization", ""))
        match = _RANGE.fullmatch(ranges)
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
            self.server.allow(self.connection, allowed_s(end - start))
            try:
                sent = self.connection.sendfile(file, start, end - start)
            except OSError:
                sent = 0
            self.close_connection = sent < end - start  # truncated: the reader notices

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Print nothing to stderr: the reader reports what went wrong."""


class Peers:
    """Connections to peers, and which peers have failed. A peer that has failed a few times is not asked again,
    since otherwise each of a thousand files would wait for a dead node.
    """

    def __init__(self, peers: Collection[Peer], num_concurrent_reads: int) -> None:
        num_at_once = min(num_concurrent_reads, MOST_AT_ONCE)
        self._peers = list(peers)
        self._num_failures: Counter[str] = Counter()  # by address
        # Those that may still answer, per peer.
        self._urls = {peer.url: [peer.url, *peer.more_urls] for peer in peers}
        self._has_answered: set[str] = set()
        self._told: dict[Peer, str] = {}
        self._instead_bytes = 0
        self._downloads = Downloads(
            max_connections=num_at_once,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            read_timeout_s=READ_TIMEOUT_S,
            ca_file=None,
        )
        self._at_once = asyncio.Semaphore(num_at_once)

    def sources(self, file: RemoteFile) -> list[PeerSource]:
        """Return the peers that have the file, in random order, so that many readers spread over them."""
        able = [peer for peer in self._peers if peer.has(file) and file.checksum is not None]
        return [PeerSource(self, peer, file) for peer in random.sample(able, len(able))]

    def failed(self, peer: Peer, why: object) -> None:
        """Note that a peer's files must come from elsewhere. Reported once for each peer, on `close`."""
        self._told.setdefault(
            peer, f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
        )

    def instead(self, size_bytes: int) -> None:
        """Note how many bytes came from the store because peers that should have sent them did not."""
        self._instead_bytes += size_bytes

    def close(self) -> None:
        self._downloads.close()
        if self._told:
            each = [f"{peer.name or 'a peer'}: {why}" for peer, why in self._told.items()]
            more = f"; and {len(each) - MOST_TOLD} more" if len(each) > MOST_TOLD else ""
            logger.warning(
                "peers_failed num=%d of=%d from_store_instead_mib=%.1f %s",
                len(each),
                len(self._peers),
                self._instead_bytes / (1 << 20),
                "; ".join(each[:MOST_TOLD]) + more,
            )

    async def get_range(
        self, peer: Peer, name: str, offset: int, size_bytes: int, sink: SinkFactory, check: Check
    ) -> Response:
        """Fetch one range within its own deadline: a peer that only trickles is as good as dead."""
        async with self._at_once:
            while True:
                if self._num_failures[peer.url] >= MAX_FAILURES:
                    raise ConnectionError("it has failed too often")
                url = self._urls[peer.url][0]
                try:
                    async with asyncio.timeout(allowed_s(size_bytes)):
                        target, at_s = f"/{name}", int(time.time())
                        ranges = f"bytes={offset}-{offset + size_bytes - 1}"
                        headers = {"Authorization": signed(peer.secret, target, ranges, at_s)}
                        answer = await self._downloads.get_range(
                            f"{url}{target}", offset, size_bytes, sink(), check, headers
                        )
                except (OSError, http.client.HTTPException):
                    if self._leads_elsewhere(peer, url):
                        continue
                    self._num_failures[peer.url] += 1
                    raise
                if answer.status < 300:
                    self._has_answered.add(url)
                elif self._leads_elsewhere(peer, url):
                    continue
                return answer

    def _leads_elsewhere(self, peer: Peer, url: str) -> bool:
        """Return whether another address of the peer is left to try, after dropping one that has never answered."""
        left = self._urls[peer.url]
        if url in self._has_answered or (len(left) == 1 and left[0] == url):
            return False
        if left[0] == url:
            del left[0]
        return True


class PeerSource(AnyTime):
    """One file of one peer, as a source."""

    kind = "peer"

    def __init__(self, peers: Peers, peer: Peer, file: RemoteFile) -> None:
        self._peers, self._peer, self._file = peers, peer, file

    async def get_range(self, offset: int, size_bytes: int, sink: SinkFactory) -> None:
        def check(answer: Response) -> None:
            if answer.headers.get("content-range", "").rpartition("/")[2] != str(self._file.size_bytes):
                raise self._failure("its file has a different size")

        try:
            answer = await self._peers.get_range(
                self._peer, quote(self._file.key), offset, size_bytes, sink, check
            )
        except (http.client.HTTPException, ValueError) as error:  # ValueError: an invalid address
            raise self._failure(f"{type(error).__name__}: {error}") from error
        if answer.status >= 300:
            raise self._failure(f"it answered {answer.status}")

    def failed(self, why: object) -> None:
        self._peers.failed(self._peer, why)

    def _failure(self, message: str) -> StoreError:
        return StoreError(
            f"peer {self._peer.name}: {message}", reason=FailureReason.TRANSIENT, key=self._file.key
        )


# At most this many addresses of a node that does not answer are tried.
MOST_ADDRESSES = 4

_SIOCGIFFLAGS, _SIOCGIFADDR, _IFF_UP = 0x8913, 0x8915, 1  # linux/sockios.h, linux/if.h


def own_addresses(env: Mapping[str, str]) -> list[str]:
    """Return this node's addresses, the likeliest first.

    If GLOO_SOCKET_IFNAME is set and its interfaces have addresses, those are returned and no others; otherwise the
    address from which MASTER_ADDR is reached, then this node's other ones. Loopback addresses never count, since
    they would lead other nodes to themselves; the result is empty if there is nothing else.
    """
    there = list(interface_addresses())
    chosen = {name for name in env.get("GLOO_SOCKET_IFNAME", "").split(",") if name}
    if of_chosen := usable(address for name, address in there if name in chosen):
        return of_chosen
    towards_master = _towards(env.get("MASTER_ADDR", ""))
    return usable([*towards_master, *(address for _, address in there)])


def usable(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that mean this node on other nodes too, without duplicates. Pure."""
    found: list[str] = []
    for each in addresses:
        address = ipaddress.ip_address(each)
        if not (address.is_loopback or address.is_link_local or address.is_unspecified) and each not in found:
            found.append(each)
    return found[:MOST_ADDRESSES]


def in_url(host: str) -> str:
    """Return a host name or address in the form that a URL needs."""
    return f"[{host}]" if ":" in host else host


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield name and address of every interface that is up, with one IPv4 address each. On systems other than
    Linux, yield the addresses that this host's name resolves to.
    """
    if not Path("/proc/net").exists():
        with contextlib.suppress(OSError):
            yield from (("", str(each[4][0])) for each in socket.getaddrinfo(socket.gethostname(), None))
        return
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        up = [name for name in names if _ask(asking, _SIOCGIFFLAGS, name)[16] & _IFF_UP]
        for name in up:
            with contextlib.suppress(OSError):  # it has no address
                yield name, socket.inet_ntoa(_ask(asking, _SIOCGIFADDR, name)[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, *_, name = line.split()
            if name in up:
                yield name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))


def _ask(asking: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(asking, request, struct.pack("256s", name.encode()[:15]))


def _towards(host: str) -> Sequence[str]:
    """Return the addresses from which this node would talk to `host`. Nothing is sent."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM) if host else ():
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                found.append(str(probe.getsockname()[0]).partition("%")[0])
    return found


def machine() -> str:
    """Return an identifier shared by exactly those processes that reach each other through loopback addresses."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def place(folder: Path) -> str:
    """Return an identifier shared by all processes that share this folder on one machine. A host name alone is not
    enough, because images and containers use the same one many times over.
    """
    path = Path(os.path.realpath(folder))
    above = next((each for each in (path, *path.parents) if each.exists()), path)
    facts = above.stat()
    return f"{socket.gethostname()} {boot_id()} {facts.st_dev}:{facts.st_ino}/{os.path.relpath(path, above)}"
