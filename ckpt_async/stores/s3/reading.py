"""Reading without the SDK: small objects by requests modelled on one of the SDK's, ranges by our own threads from URLs
that the SDK has signed, or that are signed in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar

from ckpt_async.errors import StoreError
from ckpt_async.stores.checks import check_size
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.http.failures import telling_failures_of
from ckpt_async.stores.http.messages import Response, total_of_range
from ckpt_async.stores.interface import ObjectInfo, Sink, SmallGet
from ckpt_async.stores.one_by_one import get_one_by_one
from ckpt_async.stores.s3 import answers
from ckpt_async.stores.s3.errors import refusal, translating
from ckpt_async.stores.s3.session import S3Session
from ckpt_async.stores.s3.signing import RequestTemplate, UrlTemplate
from ckpt_async.stores.s3.standing import headers_to_read

# A signed URL is valid for an hour, unless the credentials expire earlier; we reuse it for a minute.
_SIGNED_S, _MAX_SIGNED = 60.0, 256
# For URLs that only the SDK can sign, by a session of S3 Express, which the SDK renews 45 s before it expires.
_SIGNED_BY_SDK_S = 20.0


# The name of the object that the SDK is reading whole, in the task that called it.
_asked: ContextVar[str] = ContextVar("asked", default="")


class Reader:
    """Reads ranges, and small objects in series."""

    def __init__(self, session: S3Session) -> None:
        self._session, self._location = session, session.location
        self._headers = headers_to_read(session.standing)  # they are signed too
        self._small: RequestTemplate | None = None  # the pattern of a GET, as the SDK made it
        session.on_get = self._learn
        self._template: UrlTemplate | None = None
        self._urls: dict[
            str, tuple[str, float]
        ] = {}  # by key: the signed URL, and when (by time.monotonic())

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        """Read a small object by a request modelled on the SDK's. If the answer is not plain, ask again through the
        SDK, which knows redirects and other checksums. After a refusal, the next call uses the SDK, which knows the
        current configuration.
        """
        if (template := self._small) is None:
            return await self._get_by_sdk(key, max_size_bytes)
        name = self._session.name(key, "get_object")
        with translating("get_object", key, self._location):
            credentials = await self._session.credentials()
            url, headers = template.rare("GET", name, {}, credentials, time.time())
            response = await self._session.get(url, headers, max_size_bytes)
            if not answers.is_plain(response):
                if response.status < 500 and response.status != 404:
                    self._small = None
                if response.status >= 400:
                    raise self._told(key, response)
                return await self._get_by_sdk(key, max_size_bytes)
            info = answers.info_of_whole(key, response)
            self._check_size(key, info, max_size_bytes)
            if info.checksum is not None and info.checksum != checksum_of(
                response.error, info.checksum.algorithm
            ):
                message = f"the data does not match the checksum that came with it, {info.checksum}"
                raise self._location.spoilt(message, operation="get_object", key=key)
        return response.error, info

    async def _get_by_sdk(self, key: str, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        asked = _asked.set(self._session.name(key, "get_object"))
        try:
            with translating("get_object", key, self._location):
                response = await self._session.call("get_object", key, ChecksumMode="ENABLED")
                stream = response["Body"]
                try:
                    info = answers.info(key, response)
                    self._check_size(key, info, max_size_bytes)
                    data: bytes = await stream.read()
                finally:
                    stream.close()  # drops the connection, unless the body was read to its end
        finally:
            _asked.reset(asked)
        return data, info

    def _check_size(self, key: str, info: ObjectInfo, max_size_bytes: int) -> None:
        if info.size_bytes > max_size_bytes:
            raise self._location.too_large(info.size_bytes, max_size_bytes, operation="get_object", key=key)

    def _learn(self, url: str, headers: Mapping[str, str | bytes]) -> None:
        if self._small is None and (name := _asked.get()):
            self._small = RequestTemplate.of(url, headers, name, has_body=False)

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        """Read a range of at least one byte."""
        url = await self._signed(key)
        found: list[ObjectInfo] = []

        def check(response: Response) -> None:
            found.append(answers.info_of_range(key, response, offset, size_bytes))

        with telling_failures_of(sink) as guarded, translating("get_object", key, self._location):
            response = await self._session.pools.downloads.get_range(
                url, offset, size_bytes, guarded, check, self._headers
            )
        if not found:
            raise self._refused(key, response)
        return found[0]

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        """Read small objects in series, unless only the SDK can sign."""
        with translating("get_object", "", self._location):
            if self._template is None:  # any key will do
                await self._sign(self._session.name("small", "get_object"))
            credentials = await self._session.signer.credentials()
        template = self._template
        if template is None or credentials is None:
            await get_one_by_one(self, gets, got)
            return

        def signed() -> Iterator[tuple[SmallGet, str]]:
            for each in gets:
                name = self._session.name(each.key, "get_object")
                yield each, template.url(name, credentials, time.time())

        def check(get: SmallGet, response: Response) -> None:
            with translating("get_object", get.key, self._location):
                check_size(total_of_range(response, 0, get.size_bytes), get)

        with telling_failures_of(got) as guarded, translating("get_object", "", self._location):
            refused = await self._session.pools.small_downloads.get_many(
                template.origin, signed(), check, guarded, self._headers
            )
        if refused is not None:
            get, response = refused
            raise self._refused(get.key, response)

    async def _signed(self, key: str) -> str:
        """Return a signed URL, the same for all ranges of an object: signing takes as much CPU as receiving 2 MiB."""
        url, signed_at = self._urls.get(key, ("", 0.0))
        good_s = _SIGNED_BY_SDK_S if self._template is None else _SIGNED_S
        if not url or time.monotonic() >= signed_at + good_s:
            name = self._session.name(key, "get_object")
            with translating("get_object", key, self._location):
                url = await self._sign(name)
            if len(self._urls) >= _MAX_SIGNED:
                self._urls.clear()
            self._urls[key] = url, time.monotonic()
        return url

    async def _sign(self, name: str) -> str:
        credentials = await self._session.signer.credentials()
        if self._template is None or credentials is None:
            url: str = await self._session.client.generate_presigned_url(
                "get_object", {"Bucket": self._location.bucket, "Key": name}
            )
            self._template = UrlTemplate.of(url, name, self._headers)
            return url
        return self._template.url(name, credentials, time.time())

    def _refused(self, key: str, response: Response) -> StoreError:
        """Forget the signed URL and its template, and return the error. The credentials may have been replaced, and the
        SDK knows what else has changed.
        """
        self._urls.pop(key, None)
        self._template = None
        return self._told(key, response)

    def _told(self, key: str, response: Response) -> StoreError:
        error = refusal(response.as_sdk_response(), "get_object", key, self._location)
        return self._session.signer.heed(error)
