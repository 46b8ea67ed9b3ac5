"""PutObject and UploadPart: requests made by the SDK or from its template, sent by our own threads."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_async.core.model import Checksum
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.checksums import Digest, checksum_of
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.http.small_uploads import SmallRequest
from ckpt_async.stores.interface import Body, ObjectInfo, SmallPut
from ckpt_async.stores.s3 import answers
from ckpt_async.stores.s3.answers import CHECKSUM_FIELDS, SdkResponse
from ckpt_async.stores.s3.errors import refusal, unmet
from ckpt_async.stores.s3.payload import SdkBody
from ckpt_async.stores.s3.session import S3Session
from ckpt_async.stores.s3.signing import NO_QUERY, RequestTemplate
from ckpt_async.stores.s3.trailer import AwsChunkedBody

# How long no trailers are sent after a refusal that they may have caused. The sets below hold the reasons for which
# neither the template nor a trailer is to blame.
_DISTRUST_S = 600.0
_CONDITIONS = {"IfNoneMatch": "if-none-match", "IfMatch": "if-match"}
_NOT_OF_TEMPLATES = frozenset({FailureReason.CHECKSUM, FailureReason.PRECONDITION})
_NOT_OF_TRAILERS = frozenset({FailureReason.THROTTLED, FailureReason.NOT_FOUND, FailureReason.TIMEOUT})


@dataclass(frozen=True, slots=True)
class Put:
    """A request with a body."""

    operation: str
    key: str
    parameters: Mapping[str, Any]  # for the SDK
    query: Mapping[str, str] = field(default_factory=lambda: NO_QUERY)  # of the URL

    @property
    def conditions(self) -> dict[str, str]:
        """The condition as headers, with names in lower case."""
        return {
            header: self.parameters[name] for name, header in _CONDITIONS.items() if name in self.parameters
        }


class Sender:
    """Learns templates from the requests that the SDK makes. If the store was seen to honour trailers, checksums follow
    the parts.
    """

    def __init__(self, session: S3Session) -> None:
        self._session, self._location = session, session.location
        self.templates: dict[str, RequestTemplate] = {}  # by operation
        self.trailers_from = math.inf  # time.monotonic() from which they may be used

    @property
    def finds_checksums(self) -> bool:
        """Whether checksums of parts are sent after them, so that their bytes are read only once."""
        return "upload_part" in self.templates and time.monotonic() >= self.trailers_from

    async def put(self, put: Put, body: Body, checksum: Checksum) -> SdkResponse:
        """Make one attempt. Once this has returned or raised, nothing reads the body or its buffers any more."""
        if (template := self.templates.get(put.operation)) is None:
            return await self._put_by_sdk(put, body, checksum)
        name = self._session.name(put.key, put.operation)
        with self._location.translating(put.operation, put.key):
            credentials = await self._session.credentials()
            now, size_bytes = time.time(), body.size_bytes
            if conditions := put.conditions:
                told = {**conditions, **template.of_body(size_bytes, checksum)}
                url, headers = template.rare("PUT", name, told, credentials, now)
            else:
                url, headers = template.request(name, size_bytes, checksum, credentials, now, put.query)
            response = await self._session.pools.uploads_for(body).put(url, headers, body)
        if response.status >= 300:
            raise self._refused(put, response)
        if b"<Error>" in response.error:
            raise self._again(put, f"{response.status}, but with an error: {response.error[:80]!r}")
        return self._parsed(put.operation, put.key, response)

    async def put_found(self, put: Put, body: Body, digest: Digest) -> SdkResponse:
        """Like `put`, with a checksum that is that of `digest` once the body is sent, which then follows it."""
        if (template := self.templates.get(put.operation)) is None or not self.finds_checksums:
            raise self._again(put, "a checksum can no longer follow the part")
        response = await self.try_trailer(template, put, body, digest)
        if response.status >= 300:
            error = self._refused(put, response)
            if response.status >= 400 and error.reason not in _NOT_OF_TRAILERS:
                self.trailers_from = time.monotonic() + _DISTRUST_S
                error = self._again(put, f"{response.status}: refused with a trailing checksum")
            raise error
        return self._parsed(put.operation, put.key, response)

    async def try_trailer(self, template: RequestTemplate, put: Put, body: Body, digest: Digest) -> Response:
        name = self._session.name(put.key, put.operation)
        with self._location.translating(put.operation, put.key):
            credentials = await self._session.credentials()
            url, headers = template.request_with_trailer(
                name, body.size_bytes, digest.algorithm, credentials, time.time(), put.query
            )
            return await self._session.pools.uploads_for(body).put(url, headers, AwsChunkedBody(body, digest))

    async def put_many(
        self, template: RequestTemplate, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]
    ) -> None:
        """Send objects one after the other on one connection, up to the first that fails."""

        def requests() -> Iterator[SmallRequest]:
            for put in puts:
                name = self._session.name(put.key, "put_object")
                head = template.head(name, len(put.data), put.checksum, credentials, time.time())
                yield SmallRequest(put.key, head, put.data)

        def answered(request: SmallRequest, response: Response) -> None:
            parsed = self._parsed("put_object", request.key, response)
            stored(ObjectInfo(request.key, len(request.data), parsed["ETag"], answers.checksum(parsed)))

        with self._location.translating("put_object", ""):
            credentials = await self._session.credentials()
            refused = await self._session.pools.small_uploads.put_many(template.origin, requests(), answered)
        if refused is not None:
            request, response = refused
            raise self._refused(Put("put_object", request.key, {}), response)

    async def learn_parts(self, key: str, algorithm: str) -> None:
        """Learn the template for parts without sending one. Otherwise the SDK would send the first parts, which would
        wait for their checksums while nothing is on the wire: measured, a sixth of the time of a shard of 1 GiB.
        """
        query = {"partNumber": "1", "uploadId": "none"}
        put = Put("upload_part", key, {"UploadId": "none", "PartNumber": 1}, query)

        async def learn(url: str, headers: Mapping[str, str | bytes]) -> Response:
            self._learn(put, url, headers)
            return Response(200, {"etag": '"not sent"'})

        with contextlib.suppress(StoreError):
            await self._call(put, SdkBody(learn), 0, checksum_of(b"", algorithm))

    async def _put_by_sdk(self, put: Put, body: Body, checksum: Checksum) -> SdkResponse:
        async def send(url: str, headers: Mapping[str, str | bytes]) -> Response:
            self._learn(put, url, headers)
            return await self._session.pools.uploads_for(body).put(url, headers, body)

        return await self._call(put, SdkBody(send), body.size_bytes, checksum)

    async def _call(self, put: Put, payload: SdkBody, size_bytes: int, checksum: Checksum) -> SdkResponse:
        return await self._session.call(
            put.operation,
            put.key,
            Body=payload,
            ContentLength=size_bytes,
            **checksum_parameters(checksum),
            **put.parameters,
        )

    def _learn(self, put: Put, url: str, headers: Mapping[str, str | bytes]) -> None:
        if not put.conditions and put.operation not in self.templates:
            name = self._session.name(put.key, put.operation)
            if (template := RequestTemplate.of(url, headers, name, put.query)) is not None:
                self.templates[put.operation] = template

    def _refused(self, put: Put, response: Response) -> StoreError:
        """Return the error that a refusal means. If the request may be at fault, the SDK makes the next one: it knows
        redirects, regions and the current configuration.
        """
        error = refusal(
            response.as_sdk_response(), put.operation, put.key, self._location, unmet(put.parameters)
        )
        if response.status < 500 and error.reason not in _NOT_OF_TEMPLATES:
            self.templates.pop(put.operation, None)
        if response.status < 400:
            return self._again(put, f"the store answered {response.status}")
        return self._session.signer.heed(error)

    def _again(self, put: Put, message: str) -> StoreError:
        return self._location.error(
            message, reason=FailureReason.TRANSIENT, operation=put.operation, key=put.key
        )

    def _parsed(self, operation: str, key: str, response: Response) -> SdkResponse:
        parsed = answers.past_sdk(response)
        with self._location.translating(operation, key):
            answers.check_needed(operation, parsed)
        return parsed


def checksum_parameters(checksum: Checksum) -> dict[str, str]:
    return {CHECKSUM_FIELDS[checksum.algorithm]: checksum.value}
