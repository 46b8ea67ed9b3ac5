"""Requests to a container: bodies by our own threads, all others by aiohttp. Knows how to ask, not what for."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from urllib.parse import quote, urlencode

import aiohttp

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.azure import answers
from ckpt_async.stores.azure.access import VERSION, Access, Grant
from ckpt_async.stores.azure.errors import AzureLocation, refusal
from ckpt_async.stores.http.answers import MAX_DOCUMENT_BYTES, ask, session_for
from ckpt_async.stores.http.bucket import BucketSession
from ckpt_async.stores.http.messages import Response, server_time
from ckpt_async.stores.interface import Body
from ckpt_async.stores.options import StoreOptions

Query = Mapping[str, str]
NOTHING: Query = {}


class AzureSession(BucketSession[AzureLocation]):
    """The connections to one container."""

    def __init__(self, location: AzureLocation, access: Access, options: StoreOptions) -> None:
        super().__init__(location, options)
        self.access = access
        self._ca_file = os.environ.get("REQUESTS_CA_BUNDLE") or None
        self._client: aiohttp.ClientSession
        self.clock_ahead_s = 0.0  # how far the store's clock is ahead of ours, by its last answer

    async def open(self, *, is_read_only: bool) -> None:  # noqa: ARG002
        with self.location.translating("open", ""):
            await self.access.grant()  # report missing credentials at once
            self._client = await self._exit_stack.enter_async_context(session_for(self.options))
        self.connect(self._ca_file)

    def url(self, key: str | None, operation: str, grant: Grant, query: Query = NOTHING) -> str:
        """Return the URL of a blob, or of the container if there is no key. It contains the signature: never put it
        into a message.
        """
        url = f"{self.location.account.endpoint_url}/{self.location.bucket}"
        if key is not None:
            url += f"/{quote(self.name(key, operation), safe='/~')}"
        said = "&".join(part for part in (urlencode(query, quote_via=quote), grant.query) if part)
        return f"{url}?{said}" if said else url

    def headers(self, grant: Grant, more: Mapping[str, str] = NOTHING) -> dict[str, str]:
        return {"x-ms-version": VERSION, **grant.headers, **more}

    async def put(
        self,
        operation: str,
        key: str,
        query: Query,
        headers: Mapping[str, str],
        body: Body,
        *,
        is_conditional: bool = False,
    ) -> Response:
        """Make one attempt. Once this has returned or raised, nothing reads the body or its buffers any more. A receipt
        or a decision does not queue behind shards.
        """
        url = self.url(key, operation, grant := await self.access.grant(), query)
        sent = {"Content-Length": str(body.size_bytes), "Content-Type": "application/octet-stream"}
        uploads = self.pools.uploads_for(body)
        with self.location.translating(operation, key):
            answer = await uploads.put(url, self.headers(grant, {**sent, **headers}), body)
            return self.heeded(answer, operation, key, is_conditional=is_conditional)

    async def call(
        self,
        method: str,
        operation: str,
        key: str | None,
        query: Query = NOTHING,
        headers: Mapping[str, str] = NOTHING,
        *,
        about: str = "",
        max_size_bytes: int = MAX_DOCUMENT_BYTES,
    ) -> Response:
        """Send a GET, HEAD or DELETE, which aiohttp repeats once if its connection breaks before an answer. `about` is
        what errors name if the request has no key. A body of more than `max_size_bytes` raises ObjectTooLargeError.
        """
        url = self.url(key, operation, grant := await self.access.grant(), query)
        about = key or about
        with self.location.translating(operation, about):
            answer = await ask(
                *(self._client, method, url, self.headers(grant, headers)),
                ca_file=self._ca_file,
                most_bytes=max_size_bytes,
                check=lambda head: answers.check_origin(head) if head.status < 300 else None,
            )
            return self.heeded(answer, operation, about, is_conditional="If-Match" in headers)

    def heeded(self, answer: Response, operation: str, key: str, *, is_conditional: bool = False) -> Response:
        """Return the answer if it reports success, else raise what it means."""
        if answer.status >= 300:
            raise self.refused(answer, operation, key, is_conditional=is_conditional)
        answers.check_origin(answer)
        self.clock_ahead_s = server_time(answer.headers) - time.time()
        return answer

    def refused(
        self, answer: Response, operation: str, key: str, *, is_conditional: bool = False
    ) -> StoreError:
        error = refusal(answer, operation, key, self.location, is_conditional=is_conditional)
        if error.reason is FailureReason.AUTH:
            self.access.forget()
        return error
