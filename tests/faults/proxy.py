"""An HTTP proxy on loopback, in a thread of its own, that counts requests and breaks them on purpose.

It forwards every byte unchanged, so that signatures stay valid (clients sign the proxy's own address), and knows just
enough of HTTP/1.1 and S3 to tell requests apart.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import random
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from tests.loop_server import LoopServer

_REFUSALS = {
    "unavailable": (503, "SlowDown"),
    "too_many": (429, "TooManyRequests"),
    "denied": (403, "ExpiredToken"),
    "expired": (400, "ExpiredToken"),
    "too_large": (400, "EntityTooLarge"),
    "archived": (403, "InvalidObjectState"),
}
_CONDITIONS = {"if-none-match", "if-match"}


@dataclass
class Fault:
    """What to do to requests whose method, key and query match.

    `drop_reply`: forward the request, then close without an answer. `cut_reply`: the same after `after_bytes` of the
    answer. `spoil_reply`: answer with an ETag and checksums that are not the object's. `flip_reply`: change one bit in
    the body of a good answer, any bit, or always the same one of the byte at `after_bytes`. `flip_request`: forward the
    request with the last bit of the byte at `after_bytes` changed. `unavailable`, `too_many`, `denied`, `expired`,
    `too_large`, `archived`: answer 503 SlowDown, 429, 403, 400 ExpiredToken, 400 EntityTooLarge (which retries do not
    cure) or 403 InvalidObjectState without forwarding. `reset`: break the connection after `after_bytes` of the
    request's body; `stall`: stop reading after them. `silent`: accept the connection, but never read or answer.
    `continue_then_stop`: say 100 Continue and stop reading. `delay`: forward the answer `delay_s` later. `hold`:
    forward nothing until `release`. `unconditional`: remove If-None-Match and If-Match and sign the request anew,
    as if the store knew neither.
    """

    kind: str
    method: str = ""
    key: str = ""  # a regular expression, searched for in the key
    query: str = ""  # the same for the query
    is_part: bool | None = None
    times: int | None = None  # None means always
    probability: float = 1.0
    after_bytes: int = 0
    delay_s: float = 0.0
    num_hits: int = 0


@dataclass(frozen=True)
class Exchange:
    """One request as it went. `status` is 0 if no answer went back; `body_bytes` counts what was read of its body."""

    method: str
    key: str
    query: str
    part: int | None
    body_bytes: int
    status: int
    fault: str
    upstream_status: int = 0


class FaultProxy(LoopServer):
    """The proxy, as a context manager; clients are given `url` instead of the server's URL."""

    def __init__(
        self, upstream_url: str, seed: int = 0, tls: ssl.SSLContext | None = None, secret_key: str = ""
    ) -> None:
        """With `tls`, clients speak HTTPS to the proxy. `secret_key` is the key that `unconditional` signs with."""
        super().__init__("fault-proxy")
        self._secret_key = secret_key
        parts = urlsplit(upstream_url)
        assert parts.hostname
        self._upstream = (parts.hostname, parts.port or 80)
        self._random = random.Random(seed)
        self._tls = tls
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._released = asyncio.Event()
        self.exchanges: list[Exchange] = []
        self.num_under_way = 0
        self.most_under_way = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    # --- for the test ----------------------------------------------------------------------------------------

    def add(self, fault: Fault) -> Fault:
        with self._changed:
            self._faults.append(fault)
        return fault

    def add_first(self, fault: Fault) -> Fault:
        """Add a fault before all others, which then do not see the requests that it matches."""
        with self._changed:
            self._faults.insert(0, fault)
        return fault

    def heal(self) -> None:
        """Forget all faults, and break the connections that hang in one."""
        with self._changed:
            self._faults.clear()
        self._do(self._break_all())

    def release(self) -> None:
        """Let every held request continue."""
        self._loop.call_soon_threadsafe(self._released.set)

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until exchanges make the condition true."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not is_there():
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"not within {timeout_s} s; last: {self.exchanges[-5:]}"
                self._changed.wait(left_s)

    def sent(self, key: str = "", method: str = "PUT") -> Counter[tuple[str, int | None]]:
        """Return how often each object or part was stored successfully, whether or not the answer went back."""
        found = [each for each in list(self.exchanges) if each.method == method and re.search(key, each.key)]
        return Counter((each.key, each.part) for each in found if each.upstream_status // 100 == 2)

    # --- on the loop -----------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._break_all()
        await self._server.wait_closed()

    async def _break_all(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one of the two sides went away, or the proxy is stopping
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader = up_writer = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if up_writer is None:
                    up_reader, up_writer = await asyncio.open_connection(*self._upstream)
                assert up_reader is not None
                if not await self._exchange(head, reader, writer, up_reader, up_writer):
                    return
        finally:
            if up_writer is not None:
                up_writer.transport.abort()

    async def _exchange(
        self,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> bool:
        """Handle one request; return False if the connection cannot be used any more."""
        method, target, headers = _parse(head)
        parts = urlsplit(target)
        part = _part_of(parse_qs(parts.query))
        key = unquote(parts.path)
        size = int(headers.get("content-length", "0"))
        fault = self._fault_for(method, key, parts.query, part)
        kind = fault.kind if fault else ""
        seen = {"body": 0, "status": 0, "upstream": 0}
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        self._note(None)
        try:
            if kind in _REFUSALS:
                seen["status"], code = _REFUSALS[kind]
                body = f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode()
                lines = f"HTTP/1.1 {seen['status']} No\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                while seen["body"] < size and (data := await reader.read(1 << 18)):
                    seen["body"] += len(data)
                writer.write(lines.encode() + (b"" if method == "HEAD" else body))
                await writer.drain()
                return False
            if kind in ("silent", "continue_then_stop"):
                if kind == "continue_then_stop":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await asyncio.Event().wait()
            if kind == "hold":
                await self._released.wait()
            limit = fault.after_bytes if fault and kind in ("reset", "stall") else None
            up_writer.write(_without_conditions(head, self._secret_key) if kind == "unconditional" else head)
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                up_head = await up_reader.readuntil(b"\r\n\r\n")
                assert b" 100 " in up_head, up_head
            while seen["body"] < size:
                wanted = min(1 << 18, size - seen["body"])
                if limit is not None:
                    wanted = min(wanted, limit - seen["body"])
                    if wanted <= 0:
                        if kind == "stall":
                            await asyncio.Event().wait()
                        return False
                data = await reader.read(wanted)
                if not data:
                    return False
                if (
                    fault
                    and kind == "flip_request"
                    and 0 <= (at := fault.after_bytes - seen["body"]) < len(data)
                ):
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                seen["body"] += len(data)
                up_writer.write(data)
                await up_writer.drain()
            answer = await _read_answer(up_reader, method)
            seen["upstream"] = int(answer.split(b" ", 2)[1])
            if kind == "drop_reply":
                return False
            if fault and kind == "cut_reply":
                writer.write(answer[: fault.after_bytes])
                await writer.drain()
                return False
            if kind == "spoil_reply":
                answer = re.sub(rb"(?im)^((?:etag|x-amz-checksum-[a-z0-9]+): *\S)\S{4}", rb"\1AAAA", answer)
            if fault and kind == "flip_reply":
                answer = self._flipped(answer, fault.after_bytes)
            if fault and kind == "delay":
                await asyncio.sleep(fault.delay_s)
            writer.write(answer)
            seen["status"] = seen["upstream"]
            await writer.drain()
            return b"connection: close" not in answer[:2000].lower()
        finally:
            self.num_under_way -= 1
            self._note(
                Exchange(method, key, parts.query, part, seen["body"], seen["status"], kind, seen["upstream"])
            )

    def _flipped(self, answer: bytes, at: int) -> bytes:
        head, end, body = answer.partition(b"\r\n\r\n")
        if not body or not head.startswith(b"HTTP/1.1 2"):
            return answer
        bit = 1 if at else 1 << self._random.randrange(8)
        spoilt = bytearray(body)
        spoilt[at % len(body) if at else self._random.randrange(len(body))] ^= bit
        return head + end + spoilt

    def _fault_for(self, method: str, key: str, query: str, part: int | None) -> Fault | None:
        with self._changed:
            for fault in self._faults:
                if (fault.method and fault.method != method) or not re.search(fault.key, key):
                    continue
                if not re.search(fault.query, query):
                    continue
                if fault.is_part is not None and fault.is_part != (part is not None):
                    continue
                if fault.times is not None and fault.num_hits >= fault.times:
                    continue
                if self._random.random() < fault.probability:
                    fault.num_hits += 1
                    return fault
        return None

    def _note(self, exchange: Exchange | None) -> None:
        with self._changed:
            if exchange is not None:
                self.exchanges.append(exchange)
            self._changed.notify_all()


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    return method, target, {name.lower(): value.strip() for name, _, value in pairs}


def _part_of(query: dict[str, list[str]]) -> int | None:
    """Return the number of an S3 part or of one of our Azure blocks (see stores/azure/blocks.py)."""
    if number := query.get("partNumber"):
        return int(number[0])
    if id_ := query.get("blockid"):
        return int(base64.b64decode(id_[0]).split(b".")[1])
    return None


def _without_conditions(head: bytes, secret_key: str) -> bytes:
    """Return the request's head without its conditions, signed anew (S3 API reference, "Signature Calculations
    for the Authorization Header").
    """
    method, target, headers = _parse(head)
    if not _CONDITIONS & headers.keys():
        return head
    scope = re.search(r"Credential=[^/]+/([^, ]+)", headers["authorization"])
    signed = re.search(r"SignedHeaders=([^, ]+)", headers["authorization"])
    assert scope
    assert signed
    names = [name for name in signed[1].split(";") if name not in _CONDITIONS]
    path, _, query = target.partition("?")
    parameters = sorted(each if "=" in each else f"{each}=" for each in query.split("&") if each)
    lines = [f"{name}:{' '.join(headers[name].split())}" for name in names]
    request = [
        method,
        path,
        "&".join(parameters),
        *lines,
        "",
        ";".join(names),
        headers["x-amz-content-sha256"],
    ]
    digest = hashlib.sha256("\n".join(request).encode()).hexdigest()
    key = f"AWS4{secret_key}".encode()
    for part in (*scope[1].split("/"), f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope[1]}\n{digest}"):
        key = hmac.digest(key, part.encode(), "sha256")
    kept = [
        line for line in head.split(b"\r\n") if line.partition(b":")[0].lower().decode() not in _CONDITIONS
    ]
    text = re.sub(rb"SignedHeaders=[^, ]+", b"SignedHeaders=" + ";".join(names).encode(), b"\r\n".join(kept))
    return re.sub(rb"Signature=[0-9a-f]+", b"Signature=" + key.hex().encode(), text)


async def _read_answer(reader: asyncio.StreamReader, method: str) -> bytes:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        status = int(first.split(" ", 2)[1])
        if status != 100:
            break
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if method == "HEAD" or status in (204, 304):
        return head
    if headers.get("transfer-encoding", "").lower() == "chunked":
        pieces = [head]
        while True:
            line = await reader.readuntil(b"\r\n")
            data = await reader.readexactly(int(line.split(b";")[0], 16) + 2)
            pieces += [line, data]
            if line.strip() == b"0":
                return b"".join(pieces)
    body = b""
    with contextlib.suppress(asyncio.IncompleteReadError):
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return head + body
