"""An in-memory Azure Blob Storage built from its REST reference, for what Azurite lacks (CRC64, Put Block From URL).

It has never been compared with Azure. It requires a signature but does not verify it, because Azurite does that.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from awscrt import checksums

CONTAINER, ACCOUNT, STATS = "ckpt", "peer", "/stats"


@dataclass
class Blob:
    data: Data
    metadata: dict[str, str]
    etag: str
    modified: str


@dataclass
class Account:
    """What the peer stores; `blocks` are the uncommitted blocks, by blob and id."""

    page_size: int = 400
    ahead_s: float = 0.0  # of its clock, before this machine's
    is_kept: bool = True  # otherwise bodies are checked and discarded
    blobs: dict[str, Blob] = field(default_factory=dict)
    blocks: dict[str, dict[str, Data]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    number: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    received_bytes: int = 0
    sent_bytes: int = 0


_ZEROS = memoryview(bytes(64 << 20))


class Zeros:
    """A body that was received and discarded, for measuring speed; it reads as zeros."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, part: slice) -> memoryview:
        start, end, _ = part.indices(self._size_bytes)
        return _ZEROS[: max(0, end - start)]


Data = bytes | Zeros


class RefusedError(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class AzurePeer:
    """The server, as a context manager."""

    def __init__(self, **options: Any) -> None:
        self.account = Account(**options)
        handler = type("Handler", (_Handler,), {"account": self.account})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{ACCOUNT}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def environment(self) -> dict[str, str]:
        key = base64.b64encode(b"secret").decode()
        return {
            "AZURE_STORAGE_CONNECTION_STRING": f"AccountName={ACCOUNT};AccountKey={key};BlobEndpoint={self.url}"
        }

    def forget_blocks(self) -> None:
        """Forget uncommitted blocks, as Azure does after a week."""
        with self.account.lock:
            self.account.blocks.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    account: Account

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == STATS:
            self._say(200, {}, f"{self.account.received_bytes} {self.account.sent_bytes}".encode())
            self._send()
            return
        self.query = {name: values[0] for name, values in parse_qs(parts.query, True).items()}
        _, account, container, *rest = unquote(parts.path).split("/", 3)
        try:
            body = self._body()
        except EOFError:
            self.close_connection = True  # an object is stored whole or not at all
            return
        try:
            if account != ACCOUNT:
                raise RefusedError(403, "AuthenticationFailed")
            if "sig" not in self.query and "Authorization" not in self.headers:
                raise RefusedError(401, "NoAuthenticationInformation")
            if container != CONTAINER:
                raise RefusedError(404, "ContainerNotFound")
            with self.account.lock:
                self._answer(rest[0] if rest else "", body)
        except RefusedError as refusal:
            text = f"<Error><Code>{refusal.code}</Code><Message>By the peer.\nTime:now</Message></Error>"
            self._say(refusal.status, {"x-ms-error-code": refusal.code}, text.encode())
        self._send()

    do_GET = do_HEAD = do_PUT = do_DELETE = _serve  # noqa: N815

    def _now(self) -> str:
        return formatdate(time.time() + self.account.ahead_s, usegmt=True)

    def _body(self) -> Data:
        size = int(self.headers.get("Content-Length", 0))
        if self.account.is_kept or self.query.get("comp") != "block":
            if len(body := self.rfile.read(size)) < size:
                raise EOFError
            self.crc = checksums.crc64nvme(body)
            return body
        self.crc, buffer, left = 0, memoryview(bytearray(1 << 20)), size
        while left and (count := self.rfile.readinto(buffer[: min(left, len(buffer))])):  # type: ignore[attr-defined]
            self.crc, left = checksums.crc64nvme(buffer[:count], self.crc), left - count
        self.account.received_bytes += size - left
        return Zeros(size - left)

    def _answer(self, name: str, body: Data) -> None:
        match self.command, self.query.get("comp"), "x-ms-copy-source" in self.headers:
            case "GET", "list", _:
                self._list()
            case "GET", "blocklist", _:
                self._block_list(name)
            case "GET" | "HEAD", None, _:
                self._get(name)
            case "DELETE", None, _:
                self._check_condition(name, missing="BlobNotFound")
                del self.account.blobs[name]
                self._say(202)
            case "PUT", "block", is_copy:
                self._put_block(name, body, is_copy)
            case "PUT", "blocklist", _:
                self._commit(name, body)
            case "PUT", None, True:
                source = self._source()
                self._say(202, self._store(name, source.data, source.metadata))
            case "PUT", None, False:
                self._check_digest(body)
                if self.headers.get("x-ms-blob-type") != "BlockBlob":
                    raise RefusedError(400, "MissingRequiredHeader")
                self._check_condition(name)
                self._say(201, self._store(name, body, self._metadata()) | self._crc64())
            case _:
                raise RefusedError(400, "UnsupportedHttpVerb")

    # --- writing ---------------------------------------------------------------------------------------------

    def _metadata(self) -> dict[str, str]:
        return {key: value for key, value in self.headers.items() if key.lower().startswith("x-ms-meta-")}

    def _crc64(self) -> dict[str, str]:
        return {"x-ms-content-crc64": base64.b64encode(self.crc.to_bytes(8, "little")).decode()}

    def _check_digest(self, body: bytes) -> None:
        if (told := self.headers.get("x-ms-content-crc64")) and told != self._crc64()["x-ms-content-crc64"]:
            raise RefusedError(400, "Crc64Mismatch")
        told = self.headers.get("Content-MD5")
        if told and told != base64.b64encode(hashlib.md5(body).digest()).decode():
            raise RefusedError(400, "Md5Mismatch")

    def _check_condition(self, name: str, missing: str = "") -> None:
        there = self.account.blobs.get(name)
        if missing and there is None:
            raise RefusedError(404, missing)
        if self.headers.get("If-None-Match") == "*" and there is not None:
            raise RefusedError(409, "BlobAlreadyExists")
        if (wanted := self.headers.get("If-Match")) and (there is None or there.etag != wanted):
            raise RefusedError(412, "ConditionNotMet")

    def _store(self, name: str, data: Data, metadata: dict[str, str]) -> dict[str, str]:
        self.account.blocks.pop(name, None)
        blob = Blob(data, metadata, f'"0x{next(self.account.number):X}"', self._now())
        self.account.blobs[name] = blob
        return {"ETag": blob.etag, "Last-Modified": blob.modified}

    def _source(self) -> Blob:
        source = urlsplit(self.headers["x-ms-copy-source"])
        bearer = self.headers.get("x-ms-copy-source-authorization", "").startswith("Bearer ")
        if "sig=" not in source.query and not bearer:
            raise RefusedError(403, "CannotVerifyCopySource")
        blob = self.account.blobs.get(unquote(source.path).split("/", 3)[3])
        if blob is None:
            raise RefusedError(404, "CannotVerifyCopySource")
        if self.headers.get("x-ms-source-if-match", blob.etag) != blob.etag:
            raise RefusedError(412, "SourceConditionNotMet")
        return blob

    def _put_block(self, name: str, body: Data, is_copy: bool) -> None:
        id_ = self.query["blockid"]
        if is_copy:
            start, end = map(int, self.headers["x-ms-source-range"].removeprefix("bytes=").split("-"))
            body = self._source().data[start : end + 1]
            self.crc = checksums.crc64nvme(body)
        self._check_digest(body)
        staged = self.account.blocks.setdefault(name, {})
        if not body:
            raise RefusedError(400, "InvalidHeaderValue")
        if len(base64.b64decode(id_, validate=True)) > 64 or {len(each) for each in staged} - {len(id_)}:
            raise RefusedError(400, "InvalidBlobOrBlock")
        staged[id_] = body
        self._say(201, self._crc64())

    def _commit(self, name: str, body: bytes) -> None:
        self._check_digest(body)
        self._check_condition(name)
        staged = self.account.blocks.get(name, {})
        chosen = [(each.tag, each.text or "") for each in ET.fromstring(body)]
        if any(tag not in ("Uncommitted", "Latest") or id_ not in staged for tag, id_ in chosen):
            raise RefusedError(400, "InvalidBlockList")
        found = [staged[id_] for _, id_ in chosen]
        data = b"".join(found) if self.account.is_kept else Zeros(sum(map(len, found)))
        self._say(201, self._store(name, data, self._metadata()))

    # --- reading ---------------------------------------------------------------------------------------------

    def _get(self, name: str) -> None:
        if (blob := self.account.blobs.get(name)) is None:
            raise RefusedError(404, "BlobNotFound")
        headers = {**blob.metadata, "ETag": blob.etag, "Last-Modified": blob.modified}
        if (asked := self.headers.get("x-ms-range", self.headers.get("Range"))) is None:
            self._say(200, headers, blob.data)
            return
        start, _, end = asked.removeprefix("bytes=").partition("-")
        data = blob.data[int(start) : int(end) + 1]
        if not data:
            raise RefusedError(416, "InvalidRange")
        said = f"bytes {start}-{int(start) + len(data) - 1}/{len(blob.data)}"
        self._say(206, headers | {"Content-Range": said}, data)

    def _list(self) -> None:
        prefix, marker = self.query.get("prefix", ""), self.query.get("marker", "")
        names = {name: self.account.blobs.get(name) for name in self.account.blobs}
        if "uncommittedblobs" in self.query.get("include", ""):
            names |= {name: self.account.blobs.get(name) for name in self.account.blocks}
        found = sorted(name for name in names if name.startswith(prefix) and name >= marker)
        page, rest = found[: self.account.page_size], found[self.account.page_size :]
        blobs = "".join(self._listed(name, names[name]) for name in page)
        text = (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{CONTAINER}">'
            f"<Prefix>{escape(prefix)}</Prefix><Blobs>{blobs}</Blobs>"
            f"<NextMarker>{escape(rest[0]) if rest else ''}</NextMarker></EnumerationResults>"
        )
        self._say(200, {"Content-Type": "application/xml"}, text.encode())

    def _listed(self, name: str, blob: Blob | None) -> str:
        size = len(blob.data) if blob else 0
        told = f"<Last-Modified>{blob.modified}</Last-Modified><Etag>{blob.etag[1:-1]}</Etag>" if blob else ""
        properties = f"<Properties>{told}<Content-Length>{size}</Content-Length></Properties>"
        encoded = quote(name) if "%" in name else ""
        text = f'<Name Encoded="true">{encoded}</Name>' if encoded else f"<Name>{escape(name)}</Name>"
        return f"<Blob>{text}{properties}</Blob>"

    def _block_list(self, name: str) -> None:
        staged = self.account.blocks.get(name)
        if staged is None and name not in self.account.blobs:
            raise RefusedError(404, "BlobNotFound")
        told = "".join(
            f"<Block><Name>{id_}</Name><Size>{len(data)}</Size></Block>"
            for id_, data in (staged or {}).items()
        )
        self._say(200, {}, f"<BlockList><UncommittedBlocks>{told}</UncommittedBlocks></BlockList>".encode())

    def _say(
        self, status: int, headers: Mapping[str, str] | None = None, body: Data | memoryview = b""
    ) -> None:
        self._reply = status, headers or {}, body

    def _send(self) -> None:
        """Send the reply; called without holding the lock."""
        status, headers, body = self._reply
        self.send_response_only(status)
        self.send_header("Date", self._now())
        self.send_header("x-ms-request-id", str(next(self.account.number)))
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:])
            self.account.sent_bytes += len(body)
