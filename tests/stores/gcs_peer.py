"""An in-memory Google Cloud Storage over HTTP that follows its documentation where no emulator does.

fake-gcs-server (1.54) does not compare checksums, ignores conditions of deletes and rewrites, and has no XML API. The
answers of this peer were written from https://cloud.google.com/storage/docs/json_api/v1 and
.../docs/xml-api/reference-methods, never from Google's own answers. Run as a program, it serves one bucket until it is
killed: `python -m tests.stores.gcs_peer PORT BUCKET`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import email.utils
import hashlib
import json
import re
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from ckpt_async.stores.checksums import checksum_of
from tests.stores.threaded_peer import PeerHandler, ThreadedPeer

MIB = 1 << 20
MIN_PART_BYTES = 5 * MIB
PAGE = 1000


@dataclass
class StoredObject:
    data: bytes
    generation: int
    metadata: dict[str, object]
    updated: dt.datetime

    @property
    def crc32c(self) -> str:
        return checksum_of(self.data, "crc32c").value


@dataclass
class Upload:
    name: str
    initiated: dt.datetime
    headers: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Request:
    method: str
    path: str  # decoded
    raw_path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def is_upload(self) -> bool:
        return self.raw_path.startswith("/upload/")

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.query


@dataclass
class Answer:
    status: int
    body: bytes | memoryview = b""
    headers: list[tuple[str, str]] = field(default_factory=list)
    sent_bytes: int | None = None  # after that many bytes the connection is cut
    is_silent: bool = False  # nothing is sent until the peer is closed
    declares_size: bool = True  # otherwise the body ends with the connection


def as_json(status: int, value: object) -> Answer:
    return Answer(status, json.dumps(value).encode(), [("Content-Type", "application/json; charset=UTF-8")])


def json_error(status: int, reason: str, message: str) -> Answer:
    errors = [{"domain": "global", "reason": reason, "message": message}]
    return as_json(status, {"error": {"code": status, "message": message, "errors": errors}})


def xml_error(status: int, code: str, message: str) -> Answer:
    text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, text.encode(), [("Content-Type", "application/xml; charset=UTF-8")])


def as_xml(root: str, inner: str) -> Answer:
    text = f"<?xml version='1.0' encoding='UTF-8'?><{root} xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>{inner}"
    return Answer(200, f"{text}</{root}>".encode(), [("Content-Type", "application/xml; charset=UTF-8")])


# Sees each request before it has any effect, and the answer it would get; may return a different answer.
Meddle = Callable[[Request, Callable[[], Answer]], Answer]


class GcsPeer(ThreadedPeer):
    """A context manager that serves `bucket`; with `tls` it requires one of `tokens`, which `/token` hands out."""

    def __init__(self, bucket: str = "ckpt", *, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(_handler(self), port=port, tls=tls)
        self.bucket = bucket
        self.objects: dict[str, StoredObject] = {}
        self.uploads: dict[str, Upload] = {}
        self.requests: list[Request] = []
        self.meddle: Meddle = lambda _, serve: serve()
        self.tokens: set[str] = set()
        self.num_tokens = 0
        self.token_refusal: Answer | None = None
        self.rewrite_rounds = 1
        self.closing = threading.Event()
        self._lock, self._num = threading.Lock(), 0
        self._wants_tokens = tls is not None

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        super().__exit__()

    def serve_forever(self) -> None:
        self._server.serve_forever()

    # --- requests ------------------------------------------------------------------------------------------

    def receive(self, request: Request, source: IO[bytes], size_bytes: int) -> bool:
        """Read the body and return whether it is complete."""
        request.body = source.read(size_bytes)
        return len(request.body) == size_bytes

    def answer(self, request: Request) -> Answer:
        self.requests.append(request)
        if request.raw_path == "/token":
            return self._token()
        if self._wants_tokens and request.headers.get("authorization", "")[7:] not in self.tokens:
            return json_error(401, "authError", "Invalid Credentials")
        return self.meddle(request, lambda: self.serve(request))

    def serve(self, request: Request) -> Answer:
        with self._lock:
            for pattern, method in _ROUTES:
                if (match := re.fullmatch(pattern, f"{request.method} {request.raw_path}")) is not None:
                    names = [unquote(each) for each in match.groups()]
                    if names[0] != self.bucket:
                        is_xml = method in (_multipart, _list_uploads)
                        said = "The specified bucket does not exist."
                        return (
                            xml_error(404, "NoSuchBucket", said)
                            if is_xml
                            else json_error(404, "notFound", said)
                        )
                    return method(self, request, *names[1:])
        return Answer(404, b"Not Found\n", [("Content-Type", "text/plain")])

    def _token(self) -> Answer:
        if self.token_refusal is not None:
            return self.token_refusal
        with self._lock:
            self.num_tokens += 1
            token = f"token-{self.num_tokens}"
            self.tokens.add(token)
        return as_json(200, {"access_token": token, "expires_in": 3600, "token_type": "Bearer"})

    def number(self) -> int:
        self._num += 1
        return 1_700_000_000_000_000 + self._num

    def put(self, name: str, data: bytes, metadata: dict[str, object] | None = None) -> StoredObject:
        stored = StoredObject(data, self.number(), metadata or {}, dt.datetime.now(dt.UTC))
        self.objects[name] = stored
        return stored

    def resource(self, name: str) -> dict[str, object]:
        found = self.objects[name]
        return {
            "kind": "storage#object",
            **found.metadata,
            "name": name,
            "bucket": self.bucket,
            "size": str(len(found.data)),
            "generation": str(found.generation),
            "crc32c": found.crc32c,
            "etag": b64encode(str(found.generation).encode()).decode(),
            "updated": found.updated.isoformat().replace("+00:00", "Z"),
        }

    def is_unmet(self, name: str, wanted: str | None) -> bool:
        there = self.objects[name].generation if name in self.objects else 0
        return wanted is not None and int(wanted) != there


def _insert(peer: GcsPeer, request: Request) -> Answer:
    boundary = request.headers["content-type"].rpartition("boundary=")[2].encode()
    assert request.body.endswith(b"\r\n--" + boundary + b"--\r\n")
    _, first, rest = request.body.split(b"--" + boundary + b"\r\n", 2)
    metadata = json.loads(first.partition(b"\r\n\r\n")[2])
    data = rest.partition(b"\r\n\r\n")[2][: -len(boundary) - 8]
    name, wanted, found = metadata.pop("name"), metadata.pop("crc32c", None), checksum_of(data, "crc32c")
    if wanted not in (None, found.value):
        said = f'Provided CRC32C "{wanted}" doesn\'t match calculated CRC32C "{found.value}".'
        return json_error(400, "invalid", said)
    if peer.is_unmet(name, request.query.get("ifGenerationMatch")):
        return json_error(
            412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold."
        )
    peer.put(name, data, metadata)
    return as_json(200, peer.resource(name))


def _list(peer: GcsPeer, request: Request) -> Answer:
    start = request.query.get("pageToken") or request.query.get("startOffset", "")
    prefix, most = request.query.get("prefix", ""), int(request.query.get("maxResults", PAGE))
    names = [name for name in sorted(peer.objects) if name.startswith(prefix) and name >= start]
    found: dict[str, object] = {"kind": "storage#objects"}
    if names[:most]:
        found["items"] = [peer.resource(name) for name in names[:most]]
    if names[most:]:
        found["nextPageToken"] = names[most]
    return as_json(200, found)


def _missing(peer: GcsPeer, name: str) -> Answer:
    return json_error(404, "notFound", f"No such object: {peer.bucket}/{name}")


def _get(peer: GcsPeer, request: Request, name: str) -> Answer:
    return as_json(200, peer.resource(name)) if name in peer.objects else _missing(peer, name)


def _download(peer: GcsPeer, request: Request, name: str) -> Answer:
    if name not in peer.objects:
        return Answer(404, f"No such object: {peer.bucket}/{name}".encode(), [("Content-Type", "text/html")])
    found = peer.objects[name]
    md5 = b64encode(hashlib.md5(found.data).digest()).decode()
    headers = [
        ("x-goog-generation", str(found.generation)),
        ("x-goog-hash", f"crc32c={found.crc32c}"),
        ("x-goog-hash", f"md5={md5}"),
        ("ETag", f'"{found.generation}"'),
        ("Last-Modified", email.utils.format_datetime(found.updated.replace(microsecond=0), usegmt=True)),
    ]
    asked = re.fullmatch("bytes=([0-9]+)-([0-9]+)", request.headers.get("range", ""))
    if asked is None:
        return Answer(200, found.data, headers)
    first, last = int(asked[1]), min(int(asked[2]), len(found.data) - 1)
    if first >= len(found.data):
        return Answer(416, b"The requested range cannot be satisfied.", headers)
    headers.append(("Content-Range", f"bytes {first}-{last}/{len(found.data)}"))
    return Answer(206, found.data[first : last + 1], headers)


def _delete(peer: GcsPeer, request: Request, name: str) -> Answer:
    if name not in peer.objects:
        return _missing(peer, name)
    if peer.is_unmet(name, request.query.get("ifGenerationMatch")):
        return json_error(
            412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold."
        )
    del peer.objects[name]
    return Answer(204)


def _rewrite(peer: GcsPeer, request: Request, name: str, _: str, to: str) -> Answer:
    if name not in peer.objects:
        return _missing(peer, name)
    if peer.is_unmet(name, request.query.get("ifSourceGenerationMatch")):
        return json_error(
            412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold."
        )
    turn = int(request.query.get("rewriteToken", "0")) + 1
    if turn < peer.rewrite_rounds:
        return as_json(200, {"kind": "storage#rewriteResponse", "done": False, "rewriteToken": str(turn)})
    peer.put(to, peer.objects[name].data, dict(peer.objects[name].metadata))
    return as_json(200, {"kind": "storage#rewriteResponse", "done": True, "resource": peer.resource(to)})


# --- XML API -----------------------------------------------------------------------------------------------


def _multipart(peer: GcsPeer, request: Request, name: str) -> Answer:
    if request.method == "POST" and "uploads" in request.query:
        upload_id = f"upload-{peer.number()}"
        peer.uploads[upload_id] = Upload(name, dt.datetime.now(dt.UTC), request.headers)
        told = f"<Bucket>{peer.bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload_id}</UploadId>"
        return as_xml("InitiateMultipartUploadResult", told)
    upload_id = request.query.get("uploadId", "")
    upload = peer.uploads.get(upload_id)
    if upload is None or upload.name != name:
        return xml_error(404, "NoSuchUpload", "The requested upload was not found.")
    match request.method:
        case "PUT":
            return _put_part(upload, request)
        case "GET":
            return _list_parts(peer, upload, upload_id, request)
        case "DELETE":
            del peer.uploads[upload_id]
            return Answer(204)
        case _:
            return _complete(peer, upload, upload_id, request)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _put_part(upload: Upload, request: Request) -> Answer:
    found = checksum_of(request.body, "crc32c").value
    if (wanted := request.headers.get("x-goog-hash")) not in (None, f"crc32c={found}"):
        return xml_error(400, "BadDigest", f"The x-goog-hash {wanted} did not match crc32c={found}.")
    upload.parts[int(request.query["partNumber"])] = request.body
    md5 = b64encode(hashlib.md5(request.body).digest()).decode()
    hashes = [("x-goog-hash", f"crc32c={found}"), ("x-goog-hash", f"md5={md5}")]
    return Answer(200, b"", [("ETag", _etag(request.body)), *hashes])


def _list_parts(peer: GcsPeer, upload: Upload, upload_id: str, request: Request) -> Answer:
    after, most = int(request.query.get("part-number-marker", 0)), int(request.query.get("max-parts", PAGE))
    numbers = [number for number in sorted(upload.parts) if number > after]
    listed = "".join(
        f"<Part><PartNumber>{number}</PartNumber><LastModified>2026-11-22T12:00:00Z</LastModified>"
        f"<ETag>{_etag(upload.parts[number])}</ETag><Size>{len(upload.parts[number])}</Size></Part>"
        for number in numbers[:most]
    )
    more = f"<NextPartNumberMarker>{numbers[most - 1]}</NextPartNumberMarker>" if numbers[most:] else ""
    told = f"<Bucket>{peer.bucket}</Bucket><Key>{escape(upload.name)}</Key><UploadId>{upload_id}</UploadId>"
    return as_xml(
        "ListPartsResult", f"{told}{more}<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{listed}"
    )


def _complete(peer: GcsPeer, upload: Upload, upload_id: str, request: Request) -> Answer:
    asked = re.findall(
        r"<PartNumber>([0-9]+)</PartNumber><ETag>([^<]*)</ETag>", request.body.decode().replace("&quot;", '"')
    )
    for number, etag in asked:
        if int(number) not in upload.parts or _etag(upload.parts[int(number)]) != etag:
            return xml_error(400, "InvalidPart", "One or more of the specified parts could not be found.")
    parts = [upload.parts[int(number)] for number, _ in asked]
    if any(len(part) < MIN_PART_BYTES for part in parts[:-1]):
        return xml_error(
            400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size."
        )
    del peer.uploads[upload_id]
    kept = (
        {"storageClass": upload.headers["x-goog-storage-class"]}
        if "x-goog-storage-class" in upload.headers
        else {}
    )
    made = peer.put(upload.name, b"".join(parts), kept)
    told = f'<Bucket>{peer.bucket}</Bucket><Key>{escape(upload.name)}</Key><ETag>"{made.generation}"</ETag>'
    return as_xml("CompleteMultipartUploadResult", told)


def _list_uploads(peer: GcsPeer, request: Request) -> Answer:
    prefix, most = request.query.get("prefix", ""), int(request.query.get("max-uploads", PAGE))
    after = request.query.get("key-marker", ""), request.query.get("upload-id-marker", "")
    found = sorted((upload.name, id_, upload) for id_, upload in peer.uploads.items())
    found = [each for each in found if each[0].startswith(prefix) and each[:2] > after]
    listed = "".join(
        f"<Upload><Key>{escape(name)}</Key><UploadId>{id_}</UploadId>"
        f"<Initiated>{upload.initiated.isoformat().replace('+00:00', 'Z')}</Initiated></Upload>"
        for name, id_, upload in found[:most]
    )
    more = ""
    if found[most:]:
        name, id_, _ = found[most - 1]
        more = f"<NextKeyMarker>{escape(name)}</NextKeyMarker><NextUploadIdMarker>{id_}</NextUploadIdMarker>"
    told = f"<Bucket>{peer.bucket}</Bucket>{more}<IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
    return as_xml("ListMultipartUploadsResult", told + listed)


_ROUTES = [
    (r"POST /upload/storage/v1/b/([^/]+)/o", _insert),
    (r"GET /storage/v1/b/([^/]+)/o", _list),
    (r"GET /storage/v1/b/([^/]+)/o/([^/]+)", _get),
    (r"DELETE /storage/v1/b/([^/]+)/o/([^/]+)", _delete),
    (r"POST /storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)", _rewrite),
    (r"GET /download/storage/v1/b/([^/]+)/o/([^/]+)", _download),
    (r"GET /([^/]+)", _list_uploads),
    (r"(?:POST|PUT|GET|DELETE) /([^/]+)/(.+)", _multipart),
]


def _handler(peer: GcsPeer) -> type[PeerHandler]:
    class Handler(PeerHandler):
        def serve(self) -> None:
            parts = urlsplit(self.path)
            query = {
                name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()
            }
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, unquote(parts.path), parts.path, query, headers, b"")
            size_bytes = int(headers.get("content-length", 0))
            if not peer.receive(request, self.rfile, size_bytes):
                self.close_connection = True
                return
            answer = peer.answer(request)
            request.body = b""  # the request is kept, and there may be many
            if answer.is_silent:
                peer.closing.wait()
                self.close_connection = True
                return
            lines = {"Date": peer.date()}
            if answer.declares_size:
                lines["Content-Length"] = str(len(answer.body))
            else:
                self.close_connection = True
            told = [*lines.items(), *answer.headers]
            head = "".join(f"{name}: {value}\r\n" for name, value in told)
            whole = f"HTTP/1.1 {answer.status} X\r\n{head}\r\n".encode()
            body = answer.body if self.command != "HEAD" else b""
            if len(body) < MIB or answer.sent_bytes is not None:
                whole, body = whole + body, b""
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                self.wfile.write(whole[: answer.sent_bytes])
                self.wfile.write(body)
            if answer.sent_bytes is not None:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

    return Handler
