"""Requests to one bucket: small ones by aiohttp, bytes over our own connections. Knows how to ask, not what for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import quote, urlencode

import aiohttp
import google.auth.exceptions

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.gcs.credentials import Anonymous, Credentials, GoogleCredentials
from ckpt_async.stores.gcs.errors import GcsLocation, refusal
from ckpt_async.stores.http.answers import MAX_DOCUMENT_BYTES, ask, session_for
from ckpt_async.stores.http.bucket import BucketSession
from ckpt_async.stores.http.downloads import NO_HEADERS
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.options import StoreOptions


class GcsSession(BucketSession[GcsLocation]):
    """The connections to one bucket."""

    def __init__(self, location: GcsLocation, options: StoreOptions) -> None:
        super().__init__(location, options)
        assert location.endpoint_url is not None
        self.endpoint = location.endpoint_url.rstrip("/")
        self.is_tls = self.endpoint.startswith("https:")
        self.credentials: Credentials = Anonymous()
        self._ca_file = os.environ.get("REQUESTS_CA_BUNDLE") or None  # as google-auth does
        self._http: aiohttp.ClientSession

    async def open(self, *, is_read_only: bool) -> None:
        with self.location.translating("open", ""):
            # Over plain HTTP there can only be an emulator, which must not get any real credentials.
            if self.is_tls:
                try:
                    self.credentials = await GoogleCredentials.find()
                except google.auth.exceptions.DefaultCredentialsError:
                    # Anybody can read public buckets; but explicitly named credentials are meant to be used.
                    if not is_read_only or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
                        raise
            self._http = await self._exit_stack.enter_async_context(session_for(self.options))
        self.connect(self._ca_file)

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
        with self.location.translating(operation, key):
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
