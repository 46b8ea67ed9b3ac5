"""S3 and its relatives, over aiobotocore.

A body is never copied in Python: its slices go straight to the socket, past the SDK's checksums and body
signing. What guards the bytes instead is our own full-object checksum, which the store compares with what
arrived: computed beforehand and sent as a header, or, over TLS and where the store was seen to heed them, as
the bytes are sent, and as a trailer.

This module must not know retries: one call is one attempt. (Only what has no body and changes nothing, a GET,
HEAD or abort, is repeated once by aiohttp when its connection breaks before an answer.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import math
import os
import re
import secrets
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import botocore.exceptions
import botocore.httpsession
import botocore.parsers
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.parsers import AioResponseParserFactory, AioRestXMLParser
from aiobotocore.session import AioSession
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.handlers import add_expect_header
from botocore.loaders import Loader, create_loader

from ckpt_async.core.keys import PROBES, longest_keys
from ckpt_async.core.model import Checksum
from ckpt_async.errors import (
    CkptAsyncError,
    FailureReason,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from ckpt_async.stores import StoreOptions, check_key, check_prefix, check_size
from ckpt_async.stores.checksums import Digest, checksum_of
from ckpt_async.stores.http.connections import enable_keepalive, has_proxy
from ckpt_async.stores.http.downloads import Downloads
from ckpt_async.stores.http.messages import MalformedResponseError, Response
from ckpt_async.stores.http.series import SmallUploads
from ckpt_async.stores.http.uploads import Uploads
from ckpt_async.stores.interface import (
    Body,
    BodyWriter,
    BytesBody,
    Capabilities,
    Condition,
    Create,
    Enough,
    Expected,
    Listing,
    Match,
    MultipartInfo,
    ObjectInfo,
    Sink,
    SmallGet,
    SmallPut,
    StoredPart,
    known,
    put_one_by_one,
)
from ckpt_async.stores.s3 import answers
from ckpt_async.stores.s3.answers import CHECKSUM_FIELDS, Pages, SdkResponse
from ckpt_async.stores.s3.errors import S3Location, hint_for, reason_of, refusal, translating
from ckpt_async.stores.s3.payload import BodyPayload
from ckpt_async.stores.s3.signing import NO_QUERY, RequestTemplate, UrlTemplate
from ckpt_async.stores.s3.trailer import AwsChunkedBody
from ckpt_async.threads import in_thread

T = TypeVar("T")
P = ParamSpec("P")

# A bucket that can be part of a host name, also under a certificate for one level.
_HOST_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")

# How a condition is refused: 409 is S3's answer to two at once, and 404 that of an If-Match on nothing
# (S3 user guide, "Conditional writes").
_UNMET = {"IfNoneMatch": frozenset({409, 412}), "IfMatch": frozenset({404, 409, 412})}

# A signed URL is good for an hour, unless the credentials are not.
_SIGNED_S, _MAX_SIGNED = 60.0, 256

_DELETE_BATCH = 1000  # DeleteObjects takes no more (S3 API reference)

# For so long no trailers are sent after a refusal that may be their fault; and what is not.
_DISTRUST_S = 600.0
_NOT_OF_TRAILERS = frozenset({FailureReason.THROTTLED, FailureReason.NOT_FOUND, FailureReason.TIMEOUT})


class S3Store:
    """Objects below `prefix` of one bucket. Belongs to the event loop that opened it.

    `put` answers with the size it sent: S3 stores a body whole, exactly Content-Length bytes, or not at all.
    """

    def __init__(
        self, bucket: str, prefix: str, options: StoreOptions, *, endpoint_url: str | None, url: str
    ) -> None:
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        self._options = options
        self._endpoint_url = endpoint_url
        self._location = S3Location(bucket, self._root, endpoint_url)
        self._url = url
        self._exit_stack = contextlib.AsyncExitStack()
        self._client: Any = None
        self._downloads: Downloads  # these are made with the client
        self._uploads: Uploads
        self._small_uploads: SmallUploads
        self._credentials: Any = None
        self._patterns: dict[str, RequestTemplate] = {}  # by operation
        self._get_pattern: UrlTemplate | None = None
        self._is_proxied = False  # whoever follows that pattern
        self._trailers_from: dict[str, float] = {}  # by operation: when they may be used, by time.monotonic()
        self._capabilities: Capabilities | None = None
        self._urls_to_get: dict[str, tuple[str, bool, float]] = {}  # by key; and when it was signed

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "open() first"
        return self._capabilities

    async def open(self, *, is_read_only: bool = False) -> None:
        """Connect, then find out by seven requests on two objects below `.ckpt_async/probe/` what the store
        enforces, over TLS by three more on a third one at the same time; all are deleted again.

        A store that compares neither CRC64NVME nor CRC32C with what arrived is taken all the same, with the
        one that `head` answers: such a store only repeats our checksum, so `put` cannot tell that bytes
        changed on the way, and only reading the object back can.
        """
        await self._connect()
        if is_read_only:
            # Not probed: what a writer would have to rely on is not claimed.
            self._capabilities = Capabilities(
                conditional_put=False, multipart=True, checksum_algorithm="crc64nvme"
            )
            return
        try:
            self._capabilities = await self._probe()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._exit_stack.aclose()
        self._client = None

    async def put(
        self, key: str, body: Body, checksum: Expected, *, condition: Condition = None
    ) -> ObjectInfo:
        payload = BodyPayload(body)
        conditions = _condition_parameters(condition)
        response = None if conditions else await self._put_by_pattern("put_object", key, payload, checksum)
        if response is None:
            response = await self._send(
                "put_object", key, payload, checksum, **conditions, **self._options.put_args
            )
        return ObjectInfo(key, body.size_bytes, response["ETag"], answers.checksum(response))

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        pattern = self._patterns.get("put_object")
        if pattern is None:
            await put_one_by_one(self, puts, stored)
            return
        put = SmallPut("", b"", Checksum("", ""))  # the one under way

        def requests() -> Iterator[tuple[bytes, bytes]]:
            nonlocal put
            for put in puts:
                name = self._root + check_key(put.key, "put_object")
                yield pattern.head(name, len(put.data), put.checksum, credentials, time.time()), put.data

        def answered(answer: Response) -> None:
            response = self._past_sdk("put_object", put.key, answer)
            checksum = answers.checksum(response)
            stored(ObjectInfo(put.key, len(put.data), response["ETag"], checksum))

        with translating("put_object", "", self._location):
            credentials = await self._credentials.get_frozen_credentials()
            refused = await self._small_uploads.put_many(pattern.origin, requests(), answered)
        if refused is not None:
            self._check_pattern("put_object", refused)
            raise refusal(refused.as_sdk_response(), "put_object", put.key, self._location)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        """As promised; where the store kept a checksum, the bytes were compared with it."""
        with translating("get_object", key, self._location):
            response = await self._call("get_object", key, ChecksumMode="ENABLED")
            stream = response["Body"]
            try:
                info = answers.info(key, response)
                if info.size_bytes > max_size_bytes:
                    raise self._location.too_large(
                        info.size_bytes, max_size_bytes, operation="get_object", key=key
                    )
                data: bytes = await stream.read()
            finally:
                stream.close()  # drops the connection unless the body was read to its end
        return data, info

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        if size_bytes == 0:
            return await self.head(key)  # HTTP cannot ask for an empty range
        url, is_proxied = await self._url_to_get(key)
        if is_proxied:
            return await self._get_range_through_sdk(key, offset, size_bytes, sink)
        found: list[ObjectInfo] = []

        def check(answer: Response) -> None:
            found.append(answers.info_of_range(key, answer, offset, size_bytes))

        with _telling_failures_of(sink) as guarded, translating("get_object", key, self._location):
            answer = await self._downloads.get_range(url, offset, size_bytes, guarded, check)
        if not found:
            self._forget_url_to_get(key)
            raise refusal(answer.as_sdk_response(), "get_object", key, self._location)
        return found[0]

    async def get_many(self, gets: Sequence[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        urls = [await self._url_to_get(each.key) for each in gets]
        if any(is_proxied for _, is_proxied in urls):
            for each in gets:
                data, _ = await self.get(each.key, max_size_bytes=each.size_bytes)
                check_size(len(data), each)
                await in_thread(got, each, memoryview(data))
            return

        def check(number: int, answer: Response) -> None:
            each = gets[number]
            with translating("get_object", each.key, self._location):
                check_size(answers.total_of_range(answer, 0, each.size_bytes), each)

        with _telling_failures_of(got) as guarded, translating("get_object", "", self._location):
            refused = await self._downloads.get_many(
                [(url, each.size_bytes) for (url, _), each in zip(urls, gets, strict=True)],
                check,
                lambda number, data: guarded(gets[number], data),
            )
        if refused is not None:
            number, answer = refused
            self._forget_url_to_get(gets[number].key)
            raise refusal(answer.as_sdk_response(), "get_object", gets[number].key, self._location)

    async def _url_to_get(self, key: str) -> tuple[str, bool]:
        """Signed, and whether a proxy is in the way. Found out once for all ranges of an object: it takes as much CPU
        as receiving 2 MiB.
        """
        url, is_proxied, signed_at = self._urls_to_get.get(key, ("", False, -math.inf))
        if time.monotonic() >= signed_at + _SIGNED_S:
            with translating("get_object", key, self._location):
                url, is_proxied = await self._sign_to_get(self._root + check_key(key, "get_object"))
            if len(self._urls_to_get) >= _MAX_SIGNED:
                self._urls_to_get.clear()
            self._urls_to_get[key] = url, is_proxied, time.monotonic()
        return url, is_proxied

    async def _sign_to_get(self, name: str) -> tuple[str, bool]:
        if self._get_pattern is None:
            url: str = await self._client.generate_presigned_url(
                "get_object", {"Bucket": self._bucket, "Key": name}
            )
            self._get_pattern, self._is_proxied = UrlTemplate.of(url, name), has_proxy(url)
            return url, self._is_proxied
        credentials = await self._credentials.get_frozen_credentials()
        return self._get_pattern.url(name, credentials, time.time()), self._is_proxied

    def _forget_url_to_get(self, key: str) -> None:
        """After a refusal: credentials may have been replaced, and the SDK knows what else has changed."""
        self._urls_to_get.pop(key, None)
        self._get_pattern = None

    async def _get_range_through_sdk(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        """The slow way, which knows of proxies."""
        with translating("get_object", key, self._location):
            response = await self._call("get_object", key, Range=f"bytes={offset}-{offset + size_bytes - 1}")
        stream = response["Body"]
        try:
            with translating("get_object", key, self._location):
                info = answers.info(key, response)
                status = response["ResponseMetadata"]["HTTPStatusCode"]
                total_bytes = answers.range_total(
                    status, response.get("ContentRange"), info.size_bytes, offset, size_bytes
                )
            # Past the SDK's reader, which joins what arrived into pieces of the size asked for.
            raw: Any = getattr(stream, "raw_stream", stream)
            content = raw.content
            received = 0
            while received < size_bytes:
                with translating("get_object", key, self._location):
                    data, _ = await content.readchunk()
                    if not data and content.at_eof():
                        raise self._location.error(
                            f"the body ended after {received} of {size_bytes} bytes",
                            reason=FailureReason.TRANSIENT,
                            operation="get_object",
                            key=key,
                        )
                if data:
                    sink(memoryview(data))
                    received += len(data)
        finally:
            stream.close()
        return replace(info, size_bytes=total_bytes)

    async def head(self, key: str) -> ObjectInfo:
        response = await self._call("head_object", key, ChecksumMode="ENABLED")
        with translating("head_object", key, self._location):
            return answers.info(key, response)

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        check_prefix(prefix, "list_objects_v2")
        asked = {"Prefix": self._root + prefix}
        if start := _server_start(prefix, start_after):
            asked["StartAfter"] = self._root + start
        found: dict[str, ObjectInfo] = {}
        server_time, is_whole = 0.0, False
        async for page in self._pages(answers.OBJECTS, **asked):
            with self._reading(answers.OBJECTS, prefix):
                # The first page's time: an age measured against a later one would be too great.
                server_time = server_time or answers.server_time(page)
                for each in answers.objects(page, asked["Prefix"]):
                    key = each.key.removeprefix(self._root)
                    if key in found:
                        raise MalformedResponseError(f"the listing has {key!r} twice")
                    found[key] = replace(each, key=key)
            is_whole = not page["IsTruncated"]
            if not is_whole and enough is not None and _is_in_order(found) and enough(tuple(found.values())):
                break
        # The order and the start are ours to keep: see _server_start.
        return Listing(tuple(found[key] for key in sorted(found) if key > start_after), server_time, is_whole)

    async def delete(self, keys: Sequence[str]) -> None:
        names = [self._root + check_key(key, "delete_objects") for key in keys]
        for start in range(0, len(names), _DELETE_BATCH):
            batch = names[start : start + _DELETE_BATCH]
            # Not quietly: a silent answer is also that of whoever has deleted nothing.
            objects = [{"Key": name} for name in batch]
            response = await self._call("delete_objects", None, keys[start], Delete={"Objects": objects})
            with translating("delete_objects", keys[start], self._location):
                error = answers.check_deleted(response, batch)
            if error is not None:
                code = error.get("Code", "")
                raise self._location.error(
                    f"{code}: {error.get('Message', '')}",
                    reason=reason_of(code, 0),
                    operation="delete_objects",
                    key=error.get("Key", "").removeprefix(self._root),
                    hint=hint_for(code, "delete_objects", self._location),
                )

    async def create_multipart(self, key: str) -> str:
        response = await self._call(
            "create_multipart_upload",
            key,
            ChecksumAlgorithm=self.capabilities.checksum_algorithm.upper(),
            ChecksumType="FULL_OBJECT",
            **self._options.put_args,
        )
        upload_id: str = response["UploadId"]
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Body, checksum: Expected
    ) -> StoredPart:
        payload = BodyPayload(body)
        query = {"partNumber": str(number), "uploadId": upload_id}
        response = await self._put_by_pattern("upload_part", key, payload, checksum, query)
        if response is None:
            response = await self._send(
                "upload_part", key, payload, checksum, UploadId=upload_id, PartNumber=number
            )
        return StoredPart(number, body.size_bytes, response["ETag"], answers.checksum(response))

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        listed: list[SdkResponse] = []
        async for page in self._pages(answers.PARTS, key, UploadId=upload_id):
            listed.extend(page.get("Parts", ()))
        with self._reading(answers.PARTS, key):
            return answers.parts(listed)

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        """As promised. S3 forgets an upload it has completed: then the object itself is asked whether it is
        what this call would have made.
        """
        try:
            response = await self._call(
                "complete_multipart_upload",
                key,
                UploadId=upload_id,
                MultipartUpload={"Parts": [_part_parameters(part) for part in parts]},
                ChecksumType="FULL_OBJECT",
                MpuObjectSize=size_bytes,
                **_checksum_parameters(checksum),
            )
        except ObjectNotFoundError:
            with contextlib.suppress(ObjectNotFoundError):
                info = await self.head(key)
                if info.size_bytes == size_bytes and info.checksum == checksum:
                    return info
            raise
        return ObjectInfo(key, size_bytes, response["ETag"], answers.checksum(response))

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(ObjectNotFoundError):
            await self._call("abort_multipart_upload", key, UploadId=upload_id)

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        check_prefix(prefix, "list_multipart_uploads")
        uploads: list[MultipartInfo] = []
        asked = {"Prefix": self._root + prefix}
        async for page in self._pages(answers.UPLOADS, **asked):
            with self._reading(answers.UPLOADS, prefix):
                found = answers.uploads(page, asked["Prefix"])
                uploads += [replace(each, key=each.key.removeprefix(self._root)) for each in found]
        return uploads

    async def _pages(self, pages: Pages, key: str | None = None, **asked: Any) -> AsyncIterator[SdkResponse]:
        """All pages of a listing; each has shown that it is what was asked for."""
        named = {"Bucket": self._bucket, **({} if key is None else {"Key": self._root + key})}
        following: dict[str, Any] | None = {}
        while following is not None:
            asked |= following
            about = key or asked["Prefix"].removeprefix(self._root)
            page = await self._call(pages.operation, key, about, **asked)
            with self._reading(pages, about):
                following = answers.next_page(pages, {**asked, **named}, page)
            yield page

    def _reading(self, pages: Pages, key: str) -> contextlib.AbstractContextManager[None]:
        return translating(pages.operation, key, self._location)

    # --- requests ------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        with translating("open", "", self._location):
            session = AioSession(profile=self._options.profile)
            session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
            session.register_component("response_parser_factory", _ParserFactory())
            self._client = await self._exit_stack.enter_async_context(self._create_client(session))
            self._credentials = await session.get_credentials()
        connections = self._connections(session)
        self._downloads, self._uploads = Downloads(**connections), Uploads(**connections)
        self._small_uploads = SmallUploads(**connections)
        for each in (self._downloads, self._uploads, self._small_uploads):
            self._exit_stack.callback(each.close)
        for operation in ("PutObject", "UploadPart"):
            self._client.meta.events.register(f"before-send.s3.{operation}", self._send_in_thread)
        # The SDK waits for "100 Continue" without any timeout (rule R14), and a body sent in vain is cheaper
        # than a round trip for each one that is taken.
        self._client.meta.events.unregister("before-call.s3", add_expect_header)
        self._client.meta.events.register("before-call.s3.DeleteObjects", _add_content_md5)
        self._client.meta.events.register_first("choose-signer.s3", _keep_signature_version)

    def _create_client(self, session: AioSession) -> Any:
        options = self._options
        style = options.addressing_style
        if style == "auto" and self._endpoint_url is not None:
            style = "path"
        elif style == "auto" and _HOST_NAME.fullmatch(self._bucket):
            style = "virtual"  # as "auto", but URLs that are signed for reading name the region too
        settings: dict[str, Any] = {
            "connect_timeout": options.connect_timeout_s,
            "read_timeout": options.read_timeout_s,
            "max_pool_connections": options.max_connections,
            "retries": {"mode": "standard", "total_max_attempts": 1},  # counted by test_s3_errors
            # The SDK's own checksums go as trailers, which many relatives of S3 refuse; ours is a header.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"addressing_style": style, "payload_signing_enabled": False},
        }
        try:
            config = AioConfig(
                **settings,
                connector_args={"socket_factory": _create_socket},
                http_session_cls=_HttpSession,
            )
        except (botocore.exceptions.ParamValidationError, TypeError):
            config = AioConfig(**settings)  # aiobotocore before 2.27 has no way to set socket options
        return session.create_client(
            "s3", region_name=options.region, endpoint_url=self._endpoint_url, config=config
        )

    def _connections(self, session: AioSession) -> dict[str, Any]:
        ca_file = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        return {
            "max_connections": self._options.max_connections,
            "connect_timeout_s": self._options.connect_timeout_s,
            "read_timeout_s": self._options.read_timeout_s,
            "ca_file": ca_file or botocore.httpsession.where(),
        }

    async def _send_in_thread(self, request: AWSPreparedRequest, **_: object) -> AWSResponse | None:
        """The SDK asks before it sends. None: it shall send as always, that is through aiohttp."""
        payload, url = request.body, request.url
        if not isinstance(payload, BodyPayload) or has_proxy(url):
            return None
        if payload.learn is not None:
            payload.learn(url, request.headers)
        return await payload.put(self._uploads, url, request.headers) if payload.is_for_thread else None

    async def _call(
        self, operation: str, key: str | None, about: str = "", /, **parameters: Any
    ) -> SdkResponse:
        """`about`: what errors name where the request has no key."""
        if key is not None:
            parameters["Key"] = self._root + check_key(key, operation)
        unmet = next((statuses for name, statuses in _UNMET.items() if name in parameters), frozenset[int]())
        with translating(operation, key or about, self._location, unmet=unmet):
            response: SdkResponse = await getattr(self._client, operation)(Bucket=self._bucket, **parameters)
            answers.check_needed(operation, response)
        return response

    def _past_sdk(self, operation: str, key: str, answer: Response) -> SdkResponse:
        response = answers.past_sdk(answer)
        with translating(operation, key, self._location):
            answers.check_needed(operation, response)
        return response

    async def _put_by_pattern(
        self,
        operation: str,
        key: str,
        payload: BodyPayload,
        checksum: Expected,
        query: Mapping[str, str] = NO_QUERY,
    ) -> SdkResponse | None:
        """A request past the SDK. None if it is the SDK's business: the first one (which becomes the pattern), one
        whose body is not for a thread, and one that the store sends elsewhere, or refuses maybe for its trailer.
        """
        name = self._root + check_key(key, operation)
        pattern = self._patterns.get(operation)
        if pattern is None:
            payload.learn = partial(self._learn_pattern, operation, name, query)
        if pattern is None or not payload.is_for_thread:
            return None
        if time.monotonic() < self._trailers_from.get(operation, math.inf):
            checksum = await known(checksum)
        with translating(operation, key, self._location):
            credentials = await self._credentials.get_frozen_credentials()
            if isinstance(checksum, Checksum):
                url, headers = pattern.request(
                    name, payload.size_bytes, checksum, credentials, time.time(), query
                )
                answer = await self._uploads.put(url, headers, payload)
            else:
                algorithm = self.capabilities.checksum_algorithm
                url, headers = pattern.request_with_trailer(
                    name, payload.size_bytes, algorithm, credentials, time.time(), query
                )
                answer = await self._uploads.put(url, headers, AwsChunkedBody(payload, algorithm))
        if answer.status >= 300:
            self._check_pattern(operation, answer)
            if answer.status >= 400:
                error = refusal(answer.as_sdk_response(), operation, key, self._location)
                if isinstance(checksum, Checksum) or error.reason in _NOT_OF_TRAILERS:
                    raise error
                self._trailers_from[operation] = time.monotonic() + _DISTRUST_S
            payload.seek(0)
            return None
        response = self._past_sdk(operation, key, answer)
        _check_sent(operation, key, payload, self._location)
        return response

    def _learn_pattern(
        self,
        operation: str,
        name: str,
        query: Mapping[str, str],
        url: str,
        headers: Mapping[str, str | bytes],
    ) -> None:
        if (pattern := RequestTemplate.of(url, headers, name, query)) is not None:
            self._patterns[operation] = pattern

    def _check_pattern(self, operation: str, answer: Response) -> None:
        """After a refusal that may be the request's fault the SDK makes the next one: it knows redirects, regions and
        what else the configuration says by then.
        """
        if answer.status < 500:
            self._patterns.pop(operation, None)

    async def _send(
        self, operation: str, key: str, payload: BodyPayload, checksum: Expected, **parameters: Any
    ) -> SdkResponse:
        """A call with a body. On return or raise nothing reads the body or its buffers any more."""
        checksum = await known(checksum)
        try:
            response = await self._call(
                operation,
                key,
                Body=payload,
                ContentLength=payload.size_bytes,
                **_checksum_parameters(checksum),
                **parameters,
            )
        except StoreError:
            if payload.failure is not None:
                raise payload.failure from None  # the connection broke because of it
            raise
        finally:
            await payload.stop()
        _check_sent(operation, key, payload, self._location)
        return response

    # --- probe ---------------------------------------------------------------------------------------------

    async def _probe(self) -> Capabilities:
        # As long as any key of a run's: what the store does not take is found out here.
        name = f"{PROBES}{secrets.token_hex(8)}".ljust(max(map(len, longest_keys())) - len("-a"), "0")
        keys = key, spoiled, trailed = f"{name}-a", f"{name}-b", f"{name}-c"
        try:
            capabilities = await self._try_out(key, spoiled, trailed)
        except StoreError as error:
            if error.reason is not FailureReason.TIMEOUT:
                await self._delete_probes(*keys)
            raise
        await self._delete_probes(*keys)
        return capabilities

    async def _try_out(self, key: str, spoiled: str, trailed: str) -> Capabilities:
        created, algorithm, is_enforced = await self._probe_checksums(key, spoiled)
        (is_conditional, info), trailed_operations = await _gather(
            self._probe_conditions(key, algorithm, created), self._probe_trailers(trailed, spoiled, algorithm)
        )
        if is_enforced:
            self._trailers_from = dict.fromkeys(trailed_operations, -math.inf)
        elif info.checksum is not None:
            algorithm = info.checksum.algorithm
        return Capabilities(conditional_put=is_conditional, multipart=True, checksum_algorithm=algorithm)

    async def _probe_conditions(
        self, key: str, algorithm: str, created: ObjectInfo
    ) -> tuple[bool, ObjectInfo]:
        is_refused, is_stale_refused, info = await _gather(
            self._is_refused(key, algorithm, Create()),
            self._is_refused(key, algorithm, Match('"0123456789abcdef0123456789abcdef"')),
            self._within(self.head(key)),
        )
        # A store that refuses every If-Match enforces nothing either.
        is_swapped = not await self._is_refused(key, algorithm, Match(created.etag))
        return is_refused and is_stale_refused and is_swapped, info

    async def _probe_trailers(self, key: str, spoiled: str, algorithm: str) -> Sequence[str]:
        """The operations by which a body is stored without its frames, and compared with the checksum that follows it.
        Whatever else becomes of it is no reason not to open the store.
        """
        pattern = self._patterns.get("put_object")
        if pattern is None or not pattern.origin.startswith("https:"):
            return ()

        async def put(key: str, summed: bytes) -> int:
            credentials = await self._credentials.get_frozen_credentials()
            url, headers = pattern.request_with_trailer(
                self._root + key, 1, algorithm, credentials, time.time()
            )
            return (
                await self._uploads.put(url, headers, AwsChunkedBody(_ProbeBody(summed), algorithm))
            ).status

        async def stored() -> SdkResponse:
            if await put(key, b"a") >= 300:
                return {}
            return await self._call("head_object", key, ChecksumMode="ENABLED")

        try:
            with translating("put_object", key, self._location):
                # SeaweedFS calls it 400 IncompleteBody. They differ in nothing but their checksums.
                status, response = await self._within(_gather(put(spoiled, b"b"), stored()))
        except StoreError:
            return ()
        is_right = (response.get("ContentLength"), answers.checksum(response)) == (
            1,
            checksum_of(b"a", algorithm),
        )
        if status != 400 or not is_right:
            return ()
        await self._learn_of_parts(key, algorithm)
        # SeaweedFS 4.48 keeps "aws-chunked" as the object's encoding. That of a part goes nowhere.
        return ("upload_part",) if response.get("ContentEncoding") else ("upload_part", "put_object")

    async def _learn_of_parts(self, key: str, algorithm: str) -> None:
        """Without sending one. Else the first ones would be the SDK's and wait for their checksums, with nothing on the
        wire meanwhile: measured, a sixth of the time of a shard of 1 GiB.
        """
        query = {"partNumber": "1", "uploadId": "none"}

        def learn(url: str, headers: Mapping[str, str | bytes]) -> None:
            self._learn_pattern("upload_part", self._root + key, query, url, headers)
            raise StoreError("not to be sent", reason=FailureReason.OTHER)

        payload = BodyPayload(BytesBody(b""))
        payload.learn = learn
        with contextlib.suppress(StoreError):
            await self._send(
                "upload_part", key, payload, checksum_of(b"", algorithm), UploadId="none", PartNumber=1
            )

    async def _delete_probes(self, *keys: str) -> None:
        """Best effort: credentials that may not delete are allowed, and keep what they write."""
        with contextlib.suppress(StoreError):
            await self._within(self.delete(keys))

    async def _probe_checksums(self, key: str, spoiled: str) -> tuple[ObjectInfo, str, bool]:
        """Create the probe object; returns it, the best algorithm, and whether the store compares it."""
        accepted: tuple[ObjectInfo, str, bool] | None = None
        for algorithm in CHECKSUM_FIELDS:
            right, wrong = checksum_of(b"a", algorithm), checksum_of(b"b", algorithm)
            written, spoilt = await asyncio.gather(
                self._within(self.put(key, BytesBody(b"a"), right)),
                self._within(self.put(spoiled, BytesBody(b"a"), wrong)),
                return_exceptions=True,
            )
            for outcome in (written, spoilt):
                if isinstance(outcome, BaseException) and not _is_verdict(outcome):
                    raise outcome
            if isinstance(written, BaseException):
                refusal = written
            elif isinstance(spoilt, IntegrityError):
                return written, algorithm, True
            else:
                accepted = accepted or (written, algorithm, False)
        if accepted is None:
            raise refusal
        return accepted

    async def _is_refused(self, key: str, algorithm: str, condition: Condition) -> bool:
        body = BytesBody(secrets.token_bytes(8))
        try:
            await self._within(self.put(key, body, checksum_of(body.data, algorithm), condition=condition))
        except PreconditionFailedError:
            return True
        except StoreError as error:
            # Headers that the store does not know are an answer too: it enforces nothing.
            if not _is_verdict(error):
                raise
        return False

    async def _within(self, request: Coroutine[Any, Any, T]) -> T:
        limit_s = self._options.connect_timeout_s + self._options.read_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await request
        except TimeoutError as error:
            raise StoreError(
                f"no answer within {limit_s:g} s",
                reason=FailureReason.TIMEOUT,
                operation="open",
                hint=f"is {self._endpoint_url or 'AWS'} reachable from here?",
            ) from error


@dataclass(frozen=True, slots=True)
class _ProbeBody:
    """An "a" that passes for something else."""

    summed: bytes
    size_bytes: int = 1

    def send_in_thread(self, outgoing: BodyWriter, digest: Digest) -> None:
        digest.update(self.summed)
        outgoing.write(memoryview(b"a"))


def _check_sent(operation: str, key: str, payload: BodyPayload, location: S3Location) -> None:
    """Before an answer is believed."""
    if not payload.is_sent:
        raise location.error(
            "the store answered before it had the whole body",
            reason=FailureReason.TRANSIENT,
            operation=operation,
            key=key,
        )


# --- values <-> parameters ---------------------------------------------------------------------------------


def _checksum_parameters(checksum: Checksum) -> dict[str, str]:
    return {CHECKSUM_FIELDS[checksum.algorithm]: checksum.value}


def _condition_parameters(condition: Condition) -> dict[str, str]:
    match condition:
        case None:
            return {}
        case Create():
            return {"IfNoneMatch": "*"}
        case Match(etag):
            return {"IfMatch": etag}


def _part_parameters(part: StoredPart) -> dict[str, Any]:
    checksum = _checksum_parameters(part.checksum) if part.checksum is not None else {}
    return {"PartNumber": part.number, "ETag": part.etag, **checksum}


class _SinkError(CkptAsyncError):
    """Carries what a sink raised past the translation of the store's own errors."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextlib.contextmanager
def _telling_failures_of(sink: Callable[P, None]) -> Iterator[Callable[P, None]]:
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            sink(*args, **kwargs)
        except Exception as error:
            raise _SinkError(error) from error

    try:
        yield guarded
    except _SinkError as error:
        raise error.cause from None


def _is_in_order(keys: Iterable[str]) -> bool:
    """Directory buckets list in no order: S3 user guide, "Differences for directory buckets"."""
    return all(one < other for one, other in itertools.pairwise(keys))


def _server_start(prefix: str, start_after: str) -> str:
    """How far a server may be asked to skip, so that it skips no key beyond `start_after`.

    SeaweedFS 4.48 orders folder by folder, as if "/" came before all other characters ("a/z/1" before
    "a/z-1"), and skips a folder of just the name it starts after. So the start ends before the first
    character below "/", and then where the next one is above it.
    """
    if not start_after.startswith(prefix):
        return ""
    low = (i for i in range(len(prefix), len(start_after)) if start_after[i] < "/")
    end = next(low, len(start_after)) - 1
    while end > len(prefix) and start_after[end] == "/":
        end -= 1
    return start_after[:end] if end > len(prefix) else ""


def _is_verdict(error: BaseException) -> bool:
    """Whether a probe's failure says something of the store's abilities, not of this connection."""
    return isinstance(error, StoreError) and error.reason in (FailureReason.CHECKSUM, FailureReason.OTHER)


# --- the client's ways -------------------------------------------------------------------------------------


@functools.cache
def _loader(data_path: str | None) -> Loader:
    """The SDK's descriptions of S3, parsed once in a process: that is half of what opening a store takes."""
    return create_loader(data_path)


_contexts: dict[tuple[str, int], ssl.SSLContext] = {}


class _Parser(AioRestXMLParser):  # type: ignore[misc]
    """Left alone, it takes any document for an answer without fields, and ends with any error at one it cannot read."""

    async def parse(self, response: dict[str, Any], shape: Any) -> Any:
        if response["status_code"] < 300 and shape is not None:
            answers.check_document(shape.name, response["body"])
        try:
            return await super().parse(response, shape)
        except botocore.exceptions.BotoCoreError:
            raise
        except Exception as error:
            raise MalformedResponseError(f"the answer cannot be read: {error}") from error


class _ParserFactory(AioResponseParserFactory):  # type: ignore[misc]
    def create_parser(self, protocol_name: str) -> Any:
        return (
            _Parser(**self._defaults) if protocol_name == "rest-xml" else super().create_parser(protocol_name)
        )


class _HttpSession(AIOHTTPSession):  # type: ignore[misc]
    """Whom to trust is read once in a process: that takes 10 ms of CPU, and every store would do it again."""

    def _build_verify_context(self) -> ssl.SSLContext:
        if not self._verify:
            made: ssl.SSLContext = super()._build_verify_context()
            return made
        path: str = botocore.httpsession.get_cert_path(self._verify)
        key = path, os.stat(path).st_mtime_ns
        if (found := _contexts.get(key)) is None:
            _contexts.clear()
            found = _contexts[key] = super()._build_verify_context()
        return found


def _add_content_md5(params: dict[str, Any], **_: object) -> None:
    """DeleteObjects must carry a digest of its body; older relatives of S3 take only this one."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = b64encode(digest).decode()


def _keep_signature_version(signature_version: str, **_: object) -> str | None:
    """Left alone, the SDK signs URLs the old way (version 2) in all older regions. AWS has retired that for new
    buckets, and never took it for objects that a KMS key encrypts.
    """
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None


def _create_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    enable_keepalive(made)
    return made


async def _gather(*requests: Coroutine[Any, Any, Any]) -> Sequence[Any]:
    """All results, or the first failure once every request has ended."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
