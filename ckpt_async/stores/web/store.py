"""Files published on a web server, `https://host/folder`: read-only, and nothing can be listed.

Small objects are read through aiohttp. Ranges are read by our own threads, as those of
every store, from the address that the server's redirects lead to. No request has credentials or cookies, so any host
may be redirected to. The answer's own status and headers tell a server that serves ranges
from one that answers with the whole file, whose bytes are never taken for the range.
"""

# ruff: noqa: ARG002 - what writes or lists takes what the protocol says, and refuses
from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn
from urllib.parse import quote, urlsplit

import aiohttp
import yarl

from ckpt_async.core.model import Checksum
from ckpt_async.errors import (
    CapabilityError,
    CkptAsyncError,
    FailureReason,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StoreError,
)
from ckpt_async.stores.checks import check_key
from ckpt_async.stores.http.answers import LargeBodyError, body_of, session_for
from ckpt_async.stores.http.connections import trusted_for
from ckpt_async.stores.http.downloads import NO_HEADERS, Downloads
from ckpt_async.stores.http.failures import failure_of, reason_of_status, telling_failures_of
from ckpt_async.stores.http.messages import (
    MalformedResponseError,
    OtherRangeError,
    Response,
    http_date,
    total_of_range,
)
from ckpt_async.stores.http.proxies import proxy_url
from ckpt_async.stores.http.traffic import Traffic
from ckpt_async.stores.interface import (
    REQUEST_TIMEOUT_S,
    Body,
    Capabilities,
    Condition,
    Enough,
    Listing,
    Moved,
    MultipartInfo,
    ObjectInfo,
    Sink,
    SmallGet,
    SmallPut,
)
from ckpt_async.stores.meant import read_only
from ckpt_async.stores.one_by_one import get_one_by_one
from ckpt_async.stores.opening import in_time
from ckpt_async.stores.options import StoreOptions
from ckpt_async.stores.whole import WholeObjects

_CAPABILITIES = Capabilities(
    conditional_put=False,
    multipart=False,
    checksum_algorithm="crc64nvme",
    copies=False,
    lists=False,
    remarks=("read-only", "nothing can be listed: only files with known names are found"),
)
_NO_LISTINGS = "a web server has no listings; `ckpt-async pull` finds a checkpoint there by its known names"
# Ask for the bytes as stored, without caching or compression on the way.
_HEADERS = {"Accept-Encoding": "identity", "Cache-Control": "no-cache", "User-Agent": "ckpt-async"}
_MOST_REDIRECTS = 5
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class _RedirectError(Exception):
    """A redirect is not followed."""


class WebStore(WholeObjects):
    """Files below one URL. Belongs to the event loop that opened it."""

    no_parts = "a web server can only be read"
    no_parts_reason = FailureReason.AUTH

    def __init__(self, url: str, options: StoreOptions, *, ca_file: str | None) -> None:
        super().__init__(url, _CAPABILITIES)
        self._options, self._ca_file = options, ca_file
        self._root = _sendable(url.removesuffix("/")) + "/"
        self._session: aiohttp.ClientSession | None = None
        self._downloads: Downloads | None = None
        self._traffic = Traffic()

    def moved(self) -> Moved | None:
        return self._traffic.read()

    async def open(self, *, is_read_only: bool = False, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Check that the server answers, whatever the answer is. Raises SettingsError unless opened read-only."""
        if not is_read_only:
            raise read_only(self._url)
        options = self._options
        self._session = session_for(options)
        self._downloads = Downloads(
            max_connections=options.max_connections,
            connect_timeout_s=options.connect_timeout_s,
            read_timeout_s=options.read_timeout_s,
            ca_file=self._ca_file,
            traffic=self._traffic,
        )
        try:
            with self._translating("open", ""):
                await in_time(self._reach, request_timeout_s)
        except BaseException:
            await self.close()
            raise

    async def _reach(self) -> None:
        async with self._ask("HEAD", self._root):
            pass

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._downloads is not None:
            self._downloads.close()

    # --- reading -------------------------------------------------------------------------------------------

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        with self._translating("get", key):
            async with self._ask("GET", self._address(key, "get")) as answer:
                self._check(answer, "get", key)
                data = await body_of(answer, max_size_bytes)
                return data, _info(key, answer.headers, len(data))

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        if size_bytes == 0:
            return await self.head(key)  # HTTP cannot express an empty range
        url = self._address(key, "get")
        assert self._downloads is not None, "open() first"
        found: list[ObjectInfo] = []

        def check(answer: Response) -> None:
            _check_plain(answer.headers.get("content-encoding"), "get", key)
            _check_partial(answer.status, answer.headers.get("content-length"), key, offset, size_bytes)
            headers = {"etag": "-", **answer.headers}  # a server need not send an ETag
            total = total_of_range(Response(answer.status, headers), offset, size_bytes)
            found.append(_info(key, answer.headers, total))

        with telling_failures_of(sink) as guarded, self._translating("get", key):
            for num_followed in itertools.count():
                answer = await self._downloads.get_range(url, offset, size_bytes, guarded, check, _HEADERS)
                there = self._next(url, answer.status, answer.headers.get("location"), num_followed)
                if there is None:
                    break
                url = there
        if not found:
            raise self._refusal(answer.status, "get", key)
        return found[0]

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        await get_one_by_one(self, gets, got)

    async def head(self, key: str) -> ObjectInfo:
        """As specified, without a checksum: web servers keep none."""
        with self._translating("head", key):
            async with self._ask("HEAD", self._address(key, "head")) as answer:
                self._check(answer, "head", key)
                if answer.content_length is None:
                    raise StoreError(
                        "the server does not report its size",
                        reason=FailureReason.OTHER,
                        operation="head",
                        key=key,
                    )
                return _info(key, answer.headers, answer.content_length)

    def _address(self, key: str, operation: str) -> str:
        return self._root + quote(check_key(key, operation), safe="/~")

    @contextlib.asynccontextmanager
    async def _ask(
        self, method: str, url: str, headers: Mapping[str, str] = NO_HEADERS
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "open() first"
        for num_followed in itertools.count():
            request = self._session.request(
                *(method, yarl.URL(url, encoded=True)),
                headers={**_HEADERS, **headers},
                allow_redirects=False,
                ssl=trusted_for(url, self._ca_file),
                proxy=proxy_url(url) or None,
            )
            async with request as answer:
                there = self._next(url, answer.status, answer.headers.get("Location"), num_followed)
                if there is None:
                    yield answer
                    return
            url = there

    def _next(self, url: str, status: int, location: str | None, num_followed: int) -> str | None:
        """Return where an answer redirects to, if it does. If the first request is encrypted, so is every other one."""
        if not 300 <= status < 400 or location is None:
            return None
        there = yarl.URL(url, encoded=True).join(yarl.URL(_sendable(location, "?#"), encoded=True))
        if there.scheme not in ("https", urlsplit(self._root).scheme):
            raise _RedirectError(f"redirects to {there.scheme}://{there.host}, which is not encrypted")
        if num_followed == _MOST_REDIRECTS:
            raise _RedirectError(f"redirects more than {_MOST_REDIRECTS} times")
        return str(there)

    def _check(self, answer: aiohttp.ClientResponse, operation: str, key: str) -> None:
        if answer.status == 403:
            # Buckets that may not be listed answer 403 for missing objects. This never leads to a fresh start: if
            # nothing is found, a web server cannot prove that nothing is there.
            raise ObjectNotFoundError(operation=operation, key=key)
        if answer.status >= 300:
            raise self._refusal(answer.status, operation, key)
        if answer.url.raw_path == f"{urlsplit(self._address(key, operation)).path}/":
            raise ObjectNotFoundError("is a folder", operation=operation, key=key)
        if answer.content_type == "text/html" and not key.endswith((".html", ".htm")):
            raise StoreError(
                "the server answered with a web page",
                reason=FailureReason.OTHER,
                operation=operation,
                key=key,
                hint="is the URL correct? A server that answers every URL with a page hides missing files",
            )
        _check_plain(answer.headers.get("Content-Encoding"), operation, key)

    def _refusal(self, status: int, operation: str, key: str) -> StoreError:
        if status in (404, 410):
            return ObjectNotFoundError(operation=operation, key=key)
        reason = FailureReason.OTHER if status == 416 else reason_of_status(status)
        return StoreError(f"the server answered {status}", reason=reason, operation=operation, key=key)

    @contextlib.contextmanager
    def _translating(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except CkptAsyncError:
            raise
        except LargeBodyError as error:
            raise ObjectTooLargeError(str(error), operation=operation, key=key) from error
        except (OtherRangeError, _RedirectError) as error:
            raise StoreError(str(error), reason=FailureReason.OTHER, operation=operation, key=key) from error
        except Exception as error:
            reason, hint = failure_of(error, f"{urlsplit(self._root).scheme}://{urlsplit(self._root).netloc}")
            message = f"{type(error).__name__}: {error}"
            raise StoreError(message, reason=reason, operation=operation, key=key, hint=hint) from error

    # --- what a web server cannot do: refused as if the user lacked the right --------------------------------

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        self._refuse("list", prefix, _NO_LISTINGS)

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        self._refuse("put", key)

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        self._refuse("put", "")

    async def delete(self, keys: Sequence[str]) -> None:
        self._refuse("delete", "")

    async def delete_if(self, key: str, etag: str) -> None:
        self._refuse("delete", key)

    async def copy(self, source: str, etag: str, key: str) -> None:
        self._refuse("copy", key)

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        self._refuse("list_multiparts", prefix, _NO_LISTINGS)

    def _refuse(self, operation: str, key: str, what: str = "a web server can only be read") -> NoReturn:
        raise StoreError(what, reason=FailureReason.AUTH, operation=operation, key=key)


def _sendable(url: str, safe: str = "") -> str:
    """Escape a URL as a browser would, leaving alone what is escaped already: it may be signed."""
    return _NO_ESCAPE.sub("%25", quote(url, safe=f"/:@[]%!$&'()*+,;=~{safe}"))


def _check_plain(encoding: str | None, operation: str, key: str) -> None:
    """Raise StoreError if the body is not the file's own bytes. A server may compress even if nobody asks for it."""
    if encoding not in (None, "identity"):
        raise StoreError(
            f"the server has compressed it ({encoding})",
            reason=FailureReason.OTHER,
            operation=operation,
            key=key,
        )


def _check_partial(status: int, length: str | None, key: str, offset: int, size_bytes: int) -> None:
    """Raise CapabilityError if the answer is the whole file instead of the range: asking again would not help."""
    if status == 200 and (offset, length) != (0, str(size_bytes)):
        raise CapabilityError(
            f"{key!r} cannot be read in parts: the server does not serve ranges, but answers with the whole file",
            hint="download it by other means, or from a server with `Accept-Ranges: bytes`",
        )


def _info(key: str, headers: Mapping[str, str], size_bytes: int) -> ObjectInfo:
    named = {name.lower(): value for name, value in headers.items()}
    modified = named.get("last-modified", "")
    modified_at = None
    with contextlib.suppress(MalformedResponseError):  # nothing depends on it
        modified_at = http_date("Last-Modified", modified) if modified else None
    return ObjectInfo(key, size_bytes, named.get("etag") or f'"{size_bytes:x}-{modified}"', None, modified_at)
