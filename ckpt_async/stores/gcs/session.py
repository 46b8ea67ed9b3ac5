"""Requests to one bucket: small ones by aiohttp, bytes over our own connections. Knows how to ask, not what for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from urllib.parse import quote, urlencode

import aiohttp
import google.auth.exceptions

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.checks import check_key
from ckpt_async.stores.gcs.credentials import Anonymous, Credentials, GoogleCredentials
from ckpt_async.stores.gcs.errors import GcsLocation, refusal, translating
from ckpt_async.stores.http.answers import MAX_DOCUMENT_BYTES, ask, session_for
from ckpt_async.stores.http.connections import trusted_for
from ckpt_async.stores.http.downloads import NO_HEADERS
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.http.pools import Pools
from ckpt_async.stores.options import StoreOptions


class GcsSession:
    """The connections to one bucket. Belongs to the event loop that opened it."""

    pools: Pools  # made by `open`
    _ca_file: str | None
    _http: aiohttp.ClientSession

    def __init__(self, location: GcsLocation, options: StoreOptions) -> None:
        assert location.endpoint_url is not None
        self.location, self.options = location, options
        self.endpoint = location.endpoint_url.rstrip("/")
        self.is_tls = self.endpoint.startswith("https:")
        self.credentials: Credentials = Anonymous()
        self._exit_stack = contextlib.AsyncExitStack()

    async def open(self, *, is_read_only: bool) -> None:
        with translating("open", "", self.location):
            # Over plain HTTP there can only be an emulator, which must not get any real credentials.
            if self.is_tls:
                try:
                    self.credentials = await GoogleCredentials.find()
                except google.auth.exceptions.DefaultCredentialsError:
                    # Anybody can read public buckets; but explicitly named credentials are meant to be used.
                    if not is_read_only or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
                        raise
            self._connect()

    def _connect(self) -> None:
        self._ca_file = os.environ.get("REQUESTS_CA_BUNDLE") or None  # as google-auth does
        self.pools = Pools(self.options, self._ca_file)
        self._exit_stack.callback(self.pools.close)
        # Reading certificates takes long, so do it before any request has to wait for that.
        trusted_for(self.endpoint, self._ca_file)
        self._http = session_for(self.options)
        self._exit_stack.push_async_callback(self._http.close)

    async def close(self) -> None:
        await self._exit_stack.aclose()

    def name(self, key: str, operation: str) -> str:
        """Return the name of an object in its bucket. Raises StoreError for a key that could lead out of the root."""
        return self.location.root + check_key(key, operation)

    def json_url(self, name: str | None, what: str = "", **query: str) -> str:
        """Return the JSON API's URL of an object, or of all objects; `what` names an action on it."""
        path = f"{self.endpoint}/storage/v1/b/{self.location.bucket}/o"
        path += "" if name is None else f"/{quoted(name)}"
        return _with_query(f"{path}{what}", query)

    def media_url(self, name: str) -> str:
        """Return the URL of an object's bytes. Without "/download", Google may redirect there (status 302)."""
        return f"{self.endpoint}/download/storage/v1/b/{self.location.bucket}/o/{quoted(name)}?alt=media"

    def upload_url(self, **query: str) -> str:
        path = f"{self.endpoint}/upload/storage/v1/b/{self.location.bucket}/o"
        return _with_query(path, {"uploadType": "multipart", **query})

    def xml_url(self, name: str | None, query: Mapping[str, str]) -> str:
        """Return the XML API's URL of an object, or of the bucket."""
        path = f"{self.endpoint}/{self.location.bucket}"
        path += "" if name is None else f"/{quote(name, safe='/~')}"
        return _with_query(path, query)

    async def call(
        self,
        operation: str,
        key: str,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        body: bytes = b"",
    ) -> Response:
        """Send a `request`, raising its refusal as an error."""
        answer = await self.request(operation, key, method, url, headers=headers, body=body)
        if answer.status >= 300:
            raise self.refused(answer, operation, key)
        return answer

    async def request(
        self,
        operation: str,
        key: str,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        body: bytes = b"",
        max_size_bytes: int = MAX_DOCUMENT_BYTES,
    ) -> Response:
        """Send a small request and return its answer whole: the body, whatever it is, is in `error`. Raises
        ObjectTooLargeError if that of a successful answer has more than `max_size_bytes`.
        """
        with translating(operation, key, self.location):
            headers = {**await self.credentials.headers(), **headers}
            return await ask(
                *(self._http, method, url, headers),
                ca_file=self._ca_file,
                body=body,
                most_bytes=max_size_bytes,
            )

    def refused(self, answer: Response, operation: str, key: str) -> StoreError:
        """Return the error that a refusal means. A token that had been valid is renewed for the next attempt."""
        if answer.status == 401 and self.credentials.were_refused():
            return self.location.error(
                "401: the token is no longer valid; the next attempt gets a new one",
                reason=FailureReason.TRANSIENT,
                operation=operation,
                key=key,
            )
        return refusal(answer, operation, key, self.location)


def quoted(name: str) -> str:
    """Quote a name as a single path segment."""
    return quote(name, safe="~")


def _with_query(url: str, query: Mapping[str, str]) -> str:
    if not query:
        return url
    asked = urlencode({name: value for name, value in query.items() if value}, quote_via=quote, safe="~")
    bare = "&".join(name for name, value in query.items() if not value)  # as in "?uploads"
    return f"{url}?{'&'.join(filter(None, (bare, asked)))}"
