"""Reading without the SDK: small objects by requests modelled on one of the SDK's, ranges by our own threads from URLs
that the SDK has signed, or that are signed in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar

from ckpt_async.errors import StoreError
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.stores.s3 import answers
from ckpt_async.stores.s3.errors import refusal
from ckpt_async.stores.s3.session import S3Session
from ckpt_async.stores.s3.signing import Credentials, RequestTemplate, UrlTemplate
from ckpt_async.stores.s3.standing import headers_to_read

# A signed URL is valid for an hour, unless the credentials expire earlier; we reuse it for a minute.
_SIGNED_S, _MAX_SIGNED = 60.0, 256
# For URLs that only the SDK can sign, by a session of S3 Express, which the SDK renews 45 s before it expires.
_SIGNED_BY_SDK_S = 20.0


# The name of the object that the SDK is reading whole, in the task that called it.
_asked: ContextVar[str] = ContextVar("asked", default="")


class Reader:
    """Reads small objects, and signs what our own connections read."""

    def __init__(self, session: S3Session) -> None:
        self._session, self._location = session, session.location
        self.headers = headers_to_read(session.standing)  # they are signed too
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
        with self._location.translating("get_object", key):
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
        return response.error, info

    async def _get_by_sdk(self, key: str, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        asked = _asked.set(self._session.name(key, "get_object"))
        try:
            with self._location.translating("get_object", key):
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

    async def series_template(self) -> tuple[UrlTemplate, Credentials] | None:
        """Return what signs the URLs of many objects, or None if only the SDK can sign."""
        with self._location.translating("get_object", ""):
            if self._template is None:  # any key will do
                await self._sign(self._session.name("small", "get_object"))
            credentials = await self._session.signer.credentials()
        if self._template is None or credentials is None:
            return None
        return self._template, credentials

    async def signed(self, key: str) -> str:
        """Return a signed URL, the same for all ranges of an object: signing takes as much CPU as receiving 2 MiB."""
        url, signed_at = self._urls.get(key, ("", 0.0))
        good_s = _SIGNED_BY_SDK_S if self._template is None else _SIGNED_S
        if not url or time.monotonic() >= signed_at + good_s:
            name = self._session.name(key, "get_object")
            with self._location.translating("get_object", key):
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
            self._template = UrlTemplate.of(url, name, self.headers)
            return url
        return self._template.url(name, credentials, time.time())

    def refused(self, key: str, response: Response) -> StoreError:
        """Forget the signed URL and its template, and return the error. The credentials may have been replaced, and the
        SDK knows what else has changed.
        """
        self._urls.pop(key, None)
        self._template = None
        return self._told(key, response)

    def _told(self, key: str, response: Response) -> StoreError:
        error = refusal(response.as_sdk_response(), "get_object", key, self._location)
        return self._session.signer.heed(error)
