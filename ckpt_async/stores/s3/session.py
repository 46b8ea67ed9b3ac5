"""The SDK's client of one bucket, with our own connections beside it. Knows how to ask, not what for."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import functools
import hashlib
import logging
import os
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import botocore.exceptions
import botocore.httpsession
import botocore.parsers
import botocore.utils
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.parsers import AioResponseParserFactory, AioRestXMLParser
from aiobotocore.session import AioSession
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.handlers import add_expect_header
from botocore.loaders import Loader, create_loader

from ckpt_async.errors import StoreError
from ckpt_async.stores.http.answers import body_of
from ckpt_async.stores.http.bucket import BucketSession
from ckpt_async.stores.http.connections import enable_keepalive
from ckpt_async.stores.http.messages import MalformedResponseError, Response, content_length
from ckpt_async.stores.http.tls import trusting
from ckpt_async.stores.options import StoreOptions
from ckpt_async.stores.s3 import answers
from ckpt_async.stores.s3.answers import SdkResponse
from ckpt_async.stores.s3.credentials import Signer
from ckpt_async.stores.s3.errors import S3Location, unmet
from ckpt_async.stores.s3.payload import Content, hand_over
from ckpt_async.stores.s3.signing import Credentials
from ckpt_async.stores.s3.standing import AddStanding

logger = logging.getLogger(__name__)

# A bucket name that can be part of a host name, even under a certificate for a single level.
_HOST_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
# A time as S3 writes it in XML.
_ISO_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{3}|\.\d{6})?Z")


KEEPS_VERSIONS = (
    "the bucket keeps versions: what is pruned takes space until a lifecycle rule expires noncurrent versions, and no"
    " listing shows it"
)


class S3Session(BucketSession[S3Location]):
    """The connections to one bucket."""

    def __init__(self, location: S3Location, options: StoreOptions, standing: Mapping[str, str]) -> None:
        super().__init__(location, options)
        self.standing = standing
        self.client: Any = None
        # Whether the store compares an ETag in `If-Match` as it has sent it. Ceph compares what is between the quotes.
        self.is_etag_quoted = True
        self.keeps_versions = False  # as far as answers have shown
        self.signer = Signer(options.profile)
        # Called with the URL and headers of each GetObject that the SDK makes.
        self.on_get: Callable[[str, Mapping[str, str | bytes]], None] = lambda *_: None

    async def open(self, *, is_read_only: bool) -> None:  # noqa: ARG002
        with self.location.translating("open", ""):
            session = AioSession(profile=self.options.profile)
            session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
            session.register_component("response_parser_factory", _ParserFactory())
            client = _create_client(session, self.options, self.location)
            self.client = await self._exit_stack.enter_async_context(client)
            await self.signer.find(session)
        self.connect(_ca_file(session))
        events = self.client.meta.events
        events.register("provide-client-params.s3", AddStanding(self.standing))
        for operation in ("PutObject", "UploadPart"):
            events.register(f"before-send.s3.{operation}", hand_over)
        events.register("before-send.s3.GetObject", self._tell_of_get)
        # The SDK waits for "100 Continue" without any timeout (rule R14), and sending a body in vain is cheaper than a
        # round trip for each one that is accepted.
        events.unregister("before-call.s3", add_expect_header)
        events.register("before-call.s3.DeleteObjects", _add_content_md5)
        events.register_first("choose-signer.s3", _keep_signature_version)
        events.register("before-call.s3.HeadBucket", _do_not_redirect)

    async def close(self) -> None:
        self.signer.close()
        await super().close()
        self.client = None

    def match(self, etag: str) -> dict[str, str]:
        """Return the parameter by which a request is refused unless the object still has this ETag."""
        return {"IfMatch": etag if self.is_etag_quoted else etag.strip('"')}

    async def credentials(self) -> Credentials:
        """Return the credentials for requests that bypass the SDK."""
        if (found := await self.signer.credentials()) is None:
            raise botocore.exceptions.NoCredentialsError
        return found

    def _tell_of_get(self, request: AWSPreparedRequest, **_: object) -> None:
        self.on_get(request.url, request.headers)

    async def get(self, url: str, headers: Mapping[str, str], max_size_bytes: int) -> Response:
        """Send a request that was not made by the SDK through its HTTP client, and thus its connections and proxies.
        The content is left out of the answer if it exceeds `max_size_bytes` or its length is not stated.
        """
        request = AWSPreparedRequest("GET", url, headers, None, True)
        answer = await self.client._endpoint.http_session.send(request)  # noqa: SLF001  there is no other way to it
        response = Response(answer.status_code, answer.headers)
        if response.status < 300:
            size_bytes = content_length(response)
            if size_bytes is None or size_bytes > max_size_bytes:
                answer.raw.close()
                return response
        return replace(response, error=await answer.content)

    @contextlib.contextmanager
    def _heeding(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            self.signer.heed(error)
            raise

    async def call(
        self, operation: str, key: str | None, about: str = "", /, **parameters: Any
    ) -> SdkResponse:
        """Make a request through the SDK. `about` is what errors name if the request has no key."""
        if key is not None:
            parameters["Key"] = self.name(key, operation)
        with (
            self._heeding(),
            self.location.translating(operation, key or about, unmet(parameters)),
        ):
            await self.signer.credentials()  # otherwise the SDK would ask for them once per request
            request = getattr(self.client, operation)
            response: SdkResponse = await request(Bucket=self.location.bucket, **parameters)
            try:
                answers.check_needed(operation, response)
            except MalformedResponseError:
                if "Body" in response:
                    response["Body"].close()
                raise
        if response.get("VersionId", "null") != "null" and not self.keeps_versions:
            self.keeps_versions = True
            _say_versions(self.location.bucket)
        return response


@functools.cache
def _say_versions(bucket: str) -> None:
    """Warn once in this process."""
    logger.warning("bucket_keeps_versions bucket=%s; %s", bucket, KEEPS_VERSIONS)


def _create_client(session: AioSession, options: StoreOptions, location: S3Location) -> Any:
    style = options.addressing_style
    if style == "auto" and location.endpoint_url is not None:
        style = "path"
    elif style == "auto" and _HOST_NAME.fullmatch(location.bucket):
        style = "virtual"  # like "auto", but URLs signed for reading contain the region too
    settings: dict[str, Any] = {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.read_timeout_s,
        "max_pool_connections": options.max_connections,
        "retries": {"mode": "standard", "total_max_attempts": 1},  # test_s3_errors checks it
        # The SDK's own checksums are sent as trailers, which many S3-compatible stores refuse; ours is a header.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": style, "payload_signing_enabled": False},
        "http_session_cls": _HttpSession,
    }
    try:
        config = AioConfig(**settings, connector_args={"socket_factory": _create_socket})
    except botocore.exceptions.ParamValidationError:
        config = AioConfig(**settings)  # an older aiobotocore cannot set socket options
    return session.create_client(
        "s3", region_name=options.region, endpoint_url=location.endpoint_url, config=config
    )


def _ca_file(session: AioSession) -> str:
    ca_file = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    return ca_file or str(botocore.httpsession.where())


@functools.cache
def _loader(data_path: str | None) -> Loader:
    """Return the SDK's description of S3, parsed once per process: parsing is half the time of opening a store."""
    return create_loader(data_path)


class _Parser(AioRestXMLParser):  # type: ignore[misc]
    """A stricter parser. The SDK's own takes any document for an answer without fields, and may raise any error on one
    that it cannot read.
    """

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
        if protocol_name != "rest-xml":
            return super().create_parser(protocol_name)
        return _Parser(**self._defaults, timestamp_parser=_timestamp)


def _timestamp(value: Any) -> dt.datetime:
    """Parse a time. The SDK's parser guesses the format, which takes three quarters of the time of a listing."""
    if isinstance(value, str) and _ISO_UTC.fullmatch(value):
        with contextlib.suppress(ValueError):
            return dt.datetime.fromisoformat(value)
    found: dt.datetime = botocore.utils.parse_timestamp(value)
    return found


class _HttpSession(AIOHTTPSession):  # type: ignore[misc]
    """An HTTP session that follows no Location, which would take the session token to another host: the SDK itself
    signs anew for the host that it derives from the region in the answer. Bodies are bounded. Certificates are read
    once per process, and again if their file changes, for connections made from then on.
    """

    async def send(self, request: AWSPreparedRequest) -> AWSResponse:
        unread = copy.copy(request)
        unread.stream_output = True
        answer = await super().send(unread)
        if request.stream_output and answer.status_code < 300:
            return answer
        body = Content(await body_of(answer.raw))
        return AioAWSResponse(answer.url, answer.status_code, answer.headers, body)

    async def _get_session(self, proxy_url: str | None) -> SimpleNamespace:
        session = await super()._get_session(proxy_url)
        how = {"allow_redirects": False, "ssl": self._build_verify_context()}
        return SimpleNamespace(request=functools.partial(session.request, **how))

    def _build_verify_context(self) -> ssl.SSLContext:
        return trusting(botocore.httpsession.get_cert_path(self._verify))


def _add_content_md5(params: dict[str, Any], **_: object) -> None:
    """Add a digest of the body, which DeleteObjects must have; older S3-compatible stores accept only MD5."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = b64encode(digest).decode()


def _do_not_redirect(context: dict[str, Any], **_: object) -> None:
    """Do not follow redirects. When redirected, the SDK asks where the bucket is; if that request is redirected as
    well, it would ask again, hundreds of times.
    """
    context.setdefault("s3_redirect", {})["redirected"] = True


def _keep_signature_version(signature_version: str, **_: object) -> str | None:
    """Keep signature version 4. By default, the SDK signs URLs with version 2 in all older regions. AWS has retired
    that for new buckets, and never accepted it for objects encrypted with a KMS key.
    """
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None


def _create_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    enable_keepalive(made)
    return made
