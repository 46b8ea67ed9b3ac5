"""Sending large objects in parts, by Google's XML API (https://cloud.google.com/storage/docs/multipart-uploads)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from ckpt_async.core.model import Checksum
from ckpt_async.stores.bodies import PassingWriter
from ckpt_async.stores.checksums import Digest, combine
from ckpt_async.stores.gcs import answers
from ckpt_async.stores.gcs.session import GcsSession
from ckpt_async.stores.http.messages import MalformedResponseError, check_advances, xml_document
from ckpt_async.stores.interface import Body, BodyWriter, MultipartInfo, StoredPart

# An object's properties are fixed when its upload begins.
_HEADERS = {
    "cacheControl": "cache-control",
    "contentType": "content-type",
    "kmsKeyName": "x-goog-encryption-kms-key-name",
    "predefinedAcl": "x-goog-acl",
    "storageClass": "x-goog-storage-class",
}
# How the XML API spells the JSON API's names.
_ACLS = {
    "authenticatedRead": "authenticated-read",
    "bucketOwnerFullControl": "bucket-owner-full-control",
    "bucketOwnerRead": "bucket-owner-read",
    "projectPrivate": "project-private",
    "publicRead": "public-read",
}


class Multiparts:
    """The unfinished uploads of one bucket."""

    def __init__(self, session: GcsSession) -> None:
        self._session, self._location = session, session.location
        # Whether the store was seen to answer with the CRC32C of what arrived. If so, then over TLS, where computing
        # the checksum beforehand takes a fifth of the CPU, it is computed while the bytes are sent, and compared with
        # that answer.
        self.answers_checksums = False

    async def create(self, key: str) -> str:
        name = self._session.name(key, "create_multipart")
        url = self._session.xml_url(name, {"uploads": ""})
        headers = dict(_told(self._session.options.put_args))
        answer = await self._session.call("create_multipart", key, "POST", url, headers=headers)
        with self._location.translating("create_multipart", key):
            return answers.upload_id(answer, name)

    async def put(
        self, key: str, upload_id: str, number: int, body: Body, checksum: Checksum | None
    ) -> StoredPart:
        """Make one attempt. Once this has returned or raised, nothing reads the body or its buffers any more."""
        digest = Digest(answers.ALGORITHM)
        sent, told = body, {}
        if checksum is None:
            sent = DigestedBody(body, digest)
        else:
            told["x-goog-hash"] = f"{checksum.algorithm}={checksum.value}"
        url = self._url(key, "put_part", {"partNumber": str(number), "uploadId": upload_id})
        with self._location.translating("put_part", key):
            headers = {
                **await self._session.credentials.headers(),
                "content-length": str(body.size_bytes),
                **told,
            }
            answer = await self._session.pools.uploads_for(body).put(url, headers, sent)
        if answer.status >= 300:
            raise self._session.refused(answer, "put_part", key)
        with self._location.translating("put_part", key):
            if not (etag := answer.headers.get("etag", "")):
                raise MalformedResponseError("the store answered without ETag")
        found, wanted = answers.hash_of(answer), checksum or digest.checksum()
        self.answers_checksums = found is not None
        if found != wanted and (found is not None or checksum is None):
            message = f"the store has {found}, but {wanted} was sent"
            raise self._location.spoilt(message, operation="put_part", key=key)
        return StoredPart(number, body.size_bytes, etag, wanted)

    async def parts(self, key: str, upload_id: str) -> list[StoredPart]:
        name = self._session.name(key, "list_parts")
        found: list[StoredPart] = []
        following = "0"
        while following:
            marker, asked = following, {"uploadId": upload_id, "part-number-marker": following}
            url = self._session.xml_url(name, asked)
            answer = await self._session.call("list_parts", key, "GET", url)
            with self._location.translating("list_parts", key):
                page, following = answers.parts(answer, name, upload_id)
                check_advances(following, marker)
            found += page
        return sorted(found, key=lambda part: part.number)

    def check_whole(self, key: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int) -> None:
        """Raise IntegrityError unless the parts combine to this checksum and size. Nothing is checked if the checksum
        of any part is unknown; it is known for each part that this process has sent or compared.
        """
        checksums = [(part.checksum, part.size_bytes) for part in parts if part.checksum is not None]
        if len(checksums) == len(parts):
            whole = combine(checksums, answers.ALGORITHM), sum(part.size_bytes for part in parts)
            if whole != (checksum, size_bytes):
                message = (
                    f"the parts come to {whole[1]} bytes with {whole[0]}, not {size_bytes} with {checksum}"
                )
                raise self._location.spoilt(message, operation="complete_multipart", key=key)

    async def complete(self, key: str, upload_id: str, parts: Sequence[StoredPart]) -> None:
        listed = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag></Part>"
            for part in parts
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        answer = await self._session.call(
            "complete_multipart",
            key,
            "POST",
            self._url(key, "complete_multipart", {"uploadId": upload_id}),
            headers={"content-type": "application/xml"},
            body=body,
        )
        with self._location.translating("complete_multipart", key):
            xml_document(answer.error, "CompleteMultipartUploadResult")

    async def abort(self, key: str, upload_id: str) -> None:
        url = self._url(key, "abort_multipart", {"uploadId": upload_id})
        await self._session.call("abort_multipart", key, "DELETE", url)

    async def uploads(self, prefix: str, *, may_have_none: bool) -> list[MultipartInfo]:
        """List the uploads under `prefix`. `may_have_none` is for a store that may not know the XML API, such as an
        emulator: then a plain 404 means that it has none. Otherwise, such an answer comes from a middlebox.
        """
        root = self._location.root + prefix
        found: list[MultipartInfo] = []
        following: dict[str, str] = {}
        while True:
            marker = following
            url = self._session.xml_url(None, {"uploads": "", "prefix": root, **marker})
            answer = await self._session.request("list_multiparts", prefix, "GET", url)
            if answer.status == 404 and may_have_none and b"<Code>" not in answer.error:
                return []
            if answer.status >= 300:
                raise self._session.refused(answer, "list_multiparts", prefix)
            with self._location.translating("list_multiparts", prefix):
                page, following = answers.uploads(answer, root)
                check_advances(following, marker)
            for each in page:
                key = each.key.removeprefix(self._location.root)
                found.append(MultipartInfo(key, each.upload_id, each.initiated_at))
            if not following:
                return found

    def _url(self, key: str, operation: str, query: Mapping[str, str]) -> str:
        return self._session.xml_url(self._session.name(key, operation), query)


class DigestedBody:
    """A body whose bytes are added to `digest` as they are sent."""

    def __init__(self, body: Body, digest: Digest) -> None:
        self._body, self._digest = body, digest

    @property
    def size_bytes(self) -> int:
        return self._body.size_bytes

    def send(self, writer: BodyWriter) -> None:
        self._body.send(_DigestingWriter(writer, self._digest))


class _DigestingWriter(PassingWriter):
    """A writer that updates a digest with what it passes on."""

    def __init__(self, writer: BodyWriter, digest: Digest) -> None:
        super().__init__(writer)
        self._digest = digest

    def write(self, piece: memoryview) -> None:
        self._digest.update(piece)  # before it is encrypted, while it is in the cache
        super().write(piece)


def _told(put_args: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in {"contentType": "application/octet-stream", **put_args}.items():
        if isinstance(value, Mapping):
            yield from ((f"x-goog-meta-{key}", str(text)) for key, text in value.items())
        else:
            yield _HEADERS[name], _ACLS.get(str(value), str(value))
