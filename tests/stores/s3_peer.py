"""An in-memory Amazon S3 over HTTP that follows its API reference, for what SeaweedFS does not check.

It refuses a request whose signature (version 4, in headers or the query) is wrong or omits a header of S3's, that does
not say who pays, or that lacks the customer key with which an object was stored. A bucket called `name--zone--x-s3` is
a directory bucket (S3 Express One Zone): sessions, CRC32C only, listings of folders in no order. Written from
https://docs.aws.amazon.com/AmazonS3/latest/API, never from Amazon's own answers.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import email.utils
import hashlib
import hmac
import re
import ssl
import threading
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from ckpt_async.stores.checksums import checksum_of
from tests.stores.threaded_peer import PeerHandler, ThreadedPeer

MIB = 1 << 20
PAGE = 1000
ACCESS_KEY, SECRET_KEY = "AKPEER", "secret-of-the-peer"
PAYER = "x-amz-request-payer"
SSE_C = "x-amz-server-side-encryption-customer-"
# "Authorizing Zonal endpoint API operations with CreateSession": all operations except these need a session.
_WITHOUT_SESSION = ("CreateSession", "CopyObject", "UploadPartCopy", "HeadBucket")
COPY_SSE_C = "x-amz-copy-source-server-side-encryption-customer-"


@dataclass
class Stored:
    data: bytes
    etag: str
    checksum: tuple[str, str] | None  # header name and value
    modified: dt.datetime
    key_md5: str  # MD5 of the customer's key, or "" without one


@dataclass
class Upload:
    key: str
    algorithm: str
    initiated: dt.datetime
    key_md5: str
    parts: dict[int, Stored] = field(default_factory=dict)


@dataclass
class Request:
    method: str
    path: str  # as it was sent
    raw_query: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def name(self) -> str:
        """Return the operation's name in the API reference."""
        has, is_object = self.query.keys(), unquote(self.path).strip("/").count("/") > 0
        copies = "Copy" if "x-amz-copy-source" in self.headers else ""
        match self.method, is_object:
            case "GET", False:
                names = {"session": "CreateSession", "uploads": "ListMultipartUploads"}
                return next((name for mark, name in names.items() if mark in has), "ListObjects")
            case "POST", False:
                return "DeleteObjects"
            case "POST", True:
                return "CreateMultipartUpload" if "uploads" in has else "CompleteMultipartUpload"
            case "PUT", True:
                return f"UploadPart{copies}" if "uploadId" in has else f"{copies or 'Put'}Object"
            case "GET", True:
                return "ListParts" if "uploadId" in has else "GetObject"
            case "DELETE", True:
                return "AbortMultipartUpload" if "uploadId" in has else "DeleteObject"
            case _:
                return "HeadObject" if is_object else "HeadBucket"


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class RefusedError(Exception):
    def __init__(self, status: int, code: str, message: str = "because") -> None:
        self.answer = as_xml("Error", f"<Code>{code}</Code><Message>{message}</Message>", status)


def as_xml(root: str, inner: str, status: int = 200) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}>{inner}</{root}>'
    return Answer(status, text.encode(), {"Content-Type": "application/xml"})


def iso(at: dt.datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%S}.000Z"


class S3Peer(ThreadedPeer):
    """A context manager that serves `bucket`; with `wants_payer` it refuses requests that do not pay."""

    def __init__(
        self, bucket: str = "ckpt", *, tls: ssl.SSLContext | None = None, wants_payer: bool = False
    ) -> None:
        super().__init__(_handler(self), tls=tls)
        self.bucket, self.wants_payer = bucket, wants_payer
        self.is_directory = bucket.endswith("--x-s3")
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.sessions: dict[str, tuple[str, str]] = {}  # secret and token by access key
        self.session_s = 300.0
        self.requests: list[Request] = []
        self._lock, self._number = threading.Lock(), 0

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def number(self) -> str:
        self._number += 1
        return f"{self._number:032x}"

    def answer(self, request: Request) -> Answer:
        with self._lock:
            try:
                self._check_signature(request)
                if self.wants_payer and request.headers.get(PAYER) != "requester":
                    raise RefusedError(403, "AccessDenied", "requester pays")
                bucket, _, key = unquote(request.path).removeprefix("/").partition("/")
                if bucket != self.bucket:
                    raise RefusedError(404, "NoSuchBucket")
                method = getattr(self, re.sub("([A-Z][a-z]+)", r"_\1", request.name).lower())
                answer: Answer = method(request) if not key else method(request, key)
            except RefusedError as refused:
                answer = refused.answer
            request.body = b""
            self.requests.append(request)
            return answer

    # --- who asks ------------------------------------------------------------------------------------------

    def _check_signature(self, request: Request) -> None:
        """Check as in https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html, and as for
        queries.
        """
        told = request.headers.get("authorization", "")
        found = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=(.+), SignedHeaders=([a-z0-9;-]+), Signature=([0-9a-f]{64})", told
        )
        pairs = [each if "=" in each else f"{each}=" for each in request.raw_query.split("&") if each]
        if found is not None:
            credential, signed, signature = found.groups()
            stamp, payload = request.headers["x-amz-date"], request.headers["x-amz-content-sha256"]
            token = request.headers.get("x-amz-s3session-token")
        elif "X-Amz-Signature" in request.query:
            asked = request.query
            credential, signed = asked["X-Amz-Credential"], asked["X-Amz-SignedHeaders"]
            stamp, payload, signature = asked["X-Amz-Date"], "UNSIGNED-PAYLOAD", asked["X-Amz-Signature"]
            pairs = [each for each in pairs if not each.startswith("X-Amz-Signature=")]
            token = asked.get("X-Amz-S3session-Token")
        else:
            raise RefusedError(403, "AccessDenied", "nobody has signed this")
        access_key, scope = credential.split("/", 1)
        day, region, service, _ = scope.split("/")
        is_session = self.is_directory and request.name not in _WITHOUT_SESSION
        secret, wanted_token = self.sessions.get(access_key, ("", None)) if is_session else (SECRET_KEY, None)
        if service != ("s3express" if self.is_directory else "s3") or token != wanted_token or not secret:
            raise RefusedError(403, "InvalidToken" if is_session else "AccessDenied", "another's signature")
        names = signed.split(";")
        unsigned = [name for name in request.headers if name.startswith("x-amz-") and name not in names]
        if unsigned or "host" not in names:
            raise RefusedError(403, "AccessDenied", f"not signed: {unsigned}")
        lines = "".join(f"{name}:{request.headers[name].strip()}\n" for name in names)
        canonical = (
            f"{request.method}\n{request.path}\n{'&'.join(sorted(pairs))}\n{lines}\n{signed}\n{payload}"
        )
        key = f"AWS4{secret}".encode()
        for part in (day, region, service, "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        if hmac.digest(key, text.encode(), "sha256").hex() != signature:
            raise RefusedError(403, "SignatureDoesNotMatch")

    def _create_session(self, request: Request) -> Answer:
        if not self.is_directory:
            raise RefusedError(405, "MethodNotAllowed")
        access_key, secret, token = (f"{what}{self.number()}" for what in ("AKS", "secret", "token"))
        self.sessions[access_key] = secret, token
        until = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=self.session_s)
        told = f"<SessionToken>{token}</SessionToken><SecretAccessKey>{secret}</SecretAccessKey>"
        told += f"<AccessKeyId>{access_key}</AccessKeyId><Expiration>{iso(until)}</Expiration>"
        return as_xml("CreateSessionResult", f"<Credentials>{told}</Credentials>")

    def _customers(self, request: Request, prefix: str = SSE_C) -> str:
        """Return the MD5 of the customer's key, or "" without one."""
        names = [f"{prefix}{each}" for each in ("algorithm", "key", "key-md5")]
        told = [request.headers.get(name) for name in names]
        if told == [None] * 3:
            return ""
        if not self.url.startswith("https:"):
            raise RefusedError(400, "InvalidRequest", "keys of customers only over a secure connection")
        key = b64decode(told[1] or "")
        if told[0] != "AES256" or len(key) != 32 or b64encode(hashlib.md5(key).digest()).decode() != told[2]:
            raise RefusedError(400, "InvalidArgument", "The secret key was invalid for the algorithm")
        return str(told[2])

    def _there(self, request: Request, key: str, prefix: str = SSE_C) -> Stored:
        if key not in self.objects:
            raise RefusedError(404, "NoSuchKey")
        found = self.objects[key]
        if (told := self._customers(request, prefix)) != found.key_md5:
            if told and found.key_md5:
                raise RefusedError(403, "AccessDenied", "another key than it was stored with")
            raise RefusedError(400, "InvalidRequest", "stored using a form of Server Side Encryption")
        return found

    def _head_bucket(self, request: Request) -> Answer:
        """Answer what the SDK asks after a refusal: whether it used the wrong region."""
        return Answer(200, b"", {"x-amz-bucket-region": "us-west-2"})

    # --- objects -------------------------------------------------------------------------------------------

    def _stored(self, request: Request, data: bytes) -> Stored:
        """Return the object to store; raise unless the bytes match the checksum that came with them."""
        told = {
            name: value
            for name, value in request.headers.items()
            if re.match("x-amz-checksum-(crc|sha)", name)
        }
        if "x-amz-trailer" in request.headers:
            data, told = _unchunked(data)
        checksum = None
        for name, value in told.items():
            algorithm = name.removeprefix("x-amz-checksum-")
            if algorithm not in (("crc32c",) if self.is_directory else ("crc32c", "crc64nvme")):
                raise RefusedError(400, "InvalidRequest", f"no checksum of a directory bucket: {algorithm}")
            if checksum_of(data, algorithm).value != value:
                raise RefusedError(400, "BadDigest")
            checksum = name, value
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        return Stored(data, f'"{self.number()}"', checksum, now, self._customers(request))

    def _check_conditions(self, request: Request, key: str) -> None:
        if request.headers.get("if-none-match") == "*" and key in self.objects:
            raise RefusedError(412, "PreconditionFailed")
        if (wanted := request.headers.get("if-match")) is not None:
            if key not in self.objects:
                raise RefusedError(404, "NoSuchKey")
            if self.objects[key].etag != wanted:
                raise RefusedError(412, "PreconditionFailed")

    def _told(self, stored: Stored, *, has_checksum: bool = True) -> dict[str, str]:
        told = {"ETag": stored.etag}
        if stored.key_md5:
            told |= {f"{SSE_C}algorithm": "AES256", f"{SSE_C}key-md5": stored.key_md5}
        if stored.checksum is not None and has_checksum:
            told |= {stored.checksum[0]: stored.checksum[1], "x-amz-checksum-type": "FULL_OBJECT"}
        return told

    def _put_object(self, request: Request, key: str) -> Answer:
        stored = self._stored(request, request.body)
        self._check_conditions(request, key)
        self.objects[key] = stored
        return Answer(200, b"", self._told(stored))

    def _get_object(self, request: Request, key: str) -> Answer:
        found = self._there(request, key)
        at = email.utils.format_datetime(found.modified, usegmt=True)
        told = self._told(found, has_checksum="x-amz-checksum-mode" in request.headers) | {
            "Last-Modified": at
        }
        asked = re.fullmatch("bytes=([0-9]+)-([0-9]+)", request.headers.get("range", ""))
        if asked is None:
            return Answer(200, found.data, told)
        first, last = int(asked[1]), min(int(asked[2]), len(found.data) - 1)
        if first >= len(found.data):
            raise RefusedError(416, "InvalidRange")
        told["Content-Range"] = f"bytes {first}-{last}/{len(found.data)}"
        return Answer(206, found.data[first : last + 1], told)

    def _head_object(self, request: Request, key: str) -> Answer:
        return self._get_object(request, key)

    def _delete_object(self, request: Request, key: str) -> Answer:
        self._check_conditions(request, key)
        self.objects.pop(key, None)
        return Answer(204)

    def _delete_objects(self, request: Request) -> Answer:
        if request.headers.get("content-md5") != b64encode(hashlib.md5(request.body).digest()).decode():
            raise RefusedError(400, "InvalidDigest")
        names = [each.text or "" for each in ET.fromstring(request.body).iter() if each.tag.endswith("Key")]
        for name in names:
            self.objects.pop(name, None)
        return as_xml(
            "DeleteResult", "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        )

    def _source(self, request: Request) -> Stored:
        bucket, _, key = unquote(request.headers["x-amz-copy-source"]).partition("/")
        assert bucket == self.bucket
        found = self._there(request, key, COPY_SSE_C)
        if request.headers.get("x-amz-copy-source-if-match", found.etag) != found.etag:
            raise RefusedError(412, "PreconditionFailed")
        return found

    def _copy_object(self, request: Request, key: str) -> Answer:
        made = self._stored(request, self._source(request).data)
        algorithm = request.headers.get("x-amz-checksum-algorithm", "crc32c").lower()
        made.checksum = f"x-amz-checksum-{algorithm}", checksum_of(made.data, algorithm).value
        self.objects[key] = made
        told = f"<ETag>{escape(made.etag)}</ETag><LastModified>{iso(made.modified)}</LastModified>"
        return as_xml("CopyObjectResult", told)

    # --- listings ------------------------------------------------------------------------------------------

    def _page(self, request: Request, names: list[str], mark: str) -> tuple[str, list[str], str]:
        """Return the prefix, the names on this page, and where the next page begins."""
        prefix = request.query.get("prefix", "")
        if self.is_directory and ((prefix and not prefix.endswith("/")) or "start-after" in request.query):
            raise RefusedError(400, "InvalidRequest", "directory buckets list folders, from their beginning")
        found = sorted(name for name in names if name.startswith(prefix))
        found = [name for name in found if name > request.query.get("start-after", "")]
        if self.is_directory:
            found.sort(key=lambda name: hashlib.md5(name.encode()).digest())
        start = int(request.query.get(mark) or 0)
        more = str(start + PAGE) if len(found) > start + PAGE else ""
        return prefix, found[start : start + PAGE], more

    def _list_objects(self, request: Request) -> Answer:
        prefix, names, more = self._page(request, list(self.objects), "continuation-token")
        listed = "".join(
            f"<Contents><Key>{quote(name)}</Key><LastModified>{iso(self.objects[name].modified)}</LastModified>"
            f"<ETag>{escape(self.objects[name].etag)}</ETag><Size>{len(self.objects[name].data)}</Size></Contents>"
            for name in names
        )
        told = f"<Name>{self.bucket}</Name><Prefix>{quote(prefix)}</Prefix><EncodingType>url</EncodingType>"
        told += f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
        if more:
            told += f"<NextContinuationToken>{more}</NextContinuationToken>"
        if "continuation-token" in request.query:
            told += f"<ContinuationToken>{request.query['continuation-token']}</ContinuationToken>"
        if "start-after" in request.query:
            told += f"<StartAfter>{quote(request.query['start-after'])}</StartAfter>"
        return as_xml("ListBucketResult", told + listed)

    def _list_multipart_uploads(self, request: Request) -> Answer:
        if self.is_directory and "upload-id-marker" in request.query:
            raise RefusedError(400, "InvalidRequest")
        by_name = {f"{upload.key}\0{id_}": (id_, upload) for id_, upload in self.uploads.items()}
        prefix, names, more = self._page(request, list(by_name), "key-marker")
        listed = "".join(
            f"<Upload><Key>{quote(upload.key)}</Key><UploadId>{id_}</UploadId>"
            f"<Initiated>{iso(upload.initiated)}</Initiated></Upload>"
            for id_, upload in (by_name[name] for name in names)
        )
        told = (
            f"<Bucket>{self.bucket}</Bucket><Prefix>{quote(prefix)}</Prefix><EncodingType>url</EncodingType>"
        )
        told += f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
        return as_xml("ListMultipartUploadsResult", f"{told}<NextKeyMarker>{more}</NextKeyMarker>{listed}")

    # --- parts ---------------------------------------------------------------------------------------------

    def _upload(self, request: Request, key: str) -> Upload:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None or upload.key != key:
            raise RefusedError(404, "NoSuchUpload")
        return upload

    def _create_multipart_upload(self, request: Request, key: str) -> Answer:
        algorithm, id_ = request.headers["x-amz-checksum-algorithm"].lower(), self.number()
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        self.uploads[id_] = Upload(key, algorithm, now, self._customers(request))
        told = f"<Bucket>{self.bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{id_}</UploadId>"
        return as_xml("InitiateMultipartUploadResult", told)

    def _put_part(self, request: Request, key: str, data: bytes) -> Stored:
        upload = self._upload(request, key)
        part = self._stored(request, data)
        if part.key_md5 != upload.key_md5:
            raise RefusedError(400, "InvalidRequest", "the upload was begun with Server Side Encryption")
        upload.parts[int(request.query["partNumber"])] = part
        return part

    def _upload_part(self, request: Request, key: str) -> Answer:
        return Answer(200, b"", self._told(self._put_part(request, key, request.body)))

    def _upload_part_copy(self, request: Request, key: str) -> Answer:
        first, last = map(int, request.headers["x-amz-copy-source-range"].removeprefix("bytes=").split("-"))
        made = self._put_part(request, key, self._source(request).data[first : last + 1])
        told = f"<ETag>{escape(made.etag)}</ETag><LastModified>{iso(made.modified)}</LastModified>"
        return as_xml("CopyPartResult", told)

    def _list_parts(self, request: Request, key: str) -> Answer:
        upload = self._upload(request, key)
        listed = ""
        for number, part in upload.parts.items():
            field_ = (part.checksum or ("", ""))[0].removeprefix("x-amz-checksum-").upper()
            checksum = f"<Checksum{field_}>{part.checksum[1]}</Checksum{field_}>" if part.checksum else ""
            listed += (
                f"<Part><PartNumber>{number}</PartNumber><LastModified>{iso(part.modified)}</LastModified>"
            )
            listed += f"<ETag>{escape(part.etag)}</ETag><Size>{len(part.data)}</Size>{checksum}</Part>"
        told = f"<Bucket>{self.bucket}</Bucket><Key>{escape(key)}</Key>"
        told += f"<UploadId>{request.query['uploadId']}</UploadId><IsTruncated>false</IsTruncated>"
        return as_xml("ListPartsResult", told + listed)

    def _complete_multipart_upload(self, request: Request, key: str) -> Answer:
        upload = self._upload(request, key)
        if self._customers(request) != upload.key_md5:
            raise RefusedError(400, "InvalidRequest", "the upload was begun with Server Side Encryption")
        text = {each.tag.rpartition("}")[2]: [] for each in ET.fromstring(request.body).iter()}
        for each in ET.fromstring(request.body).iter():
            text[each.tag.rpartition("}")[2]].append(each.text or "")
        numbers = [int(number) for number in text.get("PartNumber", ())]
        if self.is_directory and numbers != list(range(1, len(numbers) + 1)):
            raise RefusedError(400, "InvalidPart", "parts of a directory bucket begin at 1, without gaps")
        for number, etag in zip(numbers, text["ETag"], strict=True):
            if number not in upload.parts or upload.parts[number].etag != etag:
                raise RefusedError(400, "InvalidPart")
        parts = [upload.parts[number].data for number in numbers]
        if any(len(part) < 5 * MIB for part in parts[:-1]):
            raise RefusedError(400, "EntityTooSmall")
        made = self._stored(request, b"".join(parts))
        if made.checksum is None or request.headers.get("x-amz-checksum-type") != "FULL_OBJECT":
            raise RefusedError(400, "InvalidRequest", "without the checksum of the whole")
        del self.uploads[request.query["uploadId"]]
        self.objects[key] = made
        told = f"<Bucket>{self.bucket}</Bucket><Key>{escape(key)}</Key><ETag>{escape(made.etag)}</ETag>"
        return as_xml("CompleteMultipartUploadResult", told)

    def _abort_multipart_upload(self, request: Request, key: str) -> Answer:
        self._upload(request, key)
        del self.uploads[request.query["uploadId"]]
        return Answer(204)


def _unchunked(data: bytes) -> tuple[bytes, dict[str, str]]:
    """Decode an unsigned aws-chunked body and return its bytes and trailer."""
    found = bytearray()
    while True:
        size, _, data = data.partition(b"\r\n")
        size_bytes = int(size, 16)
        if not size_bytes:
            name, _, value = data.decode().strip().partition(":")
            return bytes(found), {name: value}
        found += data[:size_bytes]
        data = data[size_bytes + 2 :]


def _handler(peer: S3Peer) -> type[PeerHandler]:
    class Handler(PeerHandler):
        def serve(self) -> None:
            parts = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            size_bytes = int(headers.get("content-length", 0))
            body = self.rfile.read(size_bytes)
            if len(body) < size_bytes:
                self.close_connection = True
                return
            query = dict(parse_qsl(parts.query, keep_blank_values=True))
            answer = peer.answer(Request(self.command, parts.path, parts.query, query, headers, body))
            told = {
                "Content-Length": str(len(answer.body)),
                "Date": peer.date(),
                **answer.headers,
            }
            head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                self.wfile.write(f"HTTP/1.1 {answer.status} X\r\n{head}\r\n".encode())
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

    return Handler
