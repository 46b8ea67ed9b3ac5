"""Small requests by aiohttp, and the one place where it reads bodies of answers, for every store: bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import aiohttp
import yarl

from ckpt_async.stores.http.connections import trusted_for
from ckpt_async.stores.http.messages import MAX_ERROR_BYTES, Response
from ckpt_async.stores.http.proxies import proxy_url
from ckpt_async.stores.options import StoreOptions

# A page of a listing has 1,000 names of up to 1 KiB, which may be escaped: 6 MiB.
MAX_DOCUMENT_BYTES = 16 << 20


class LargeBodyError(Exception):
    """A body has more bytes than its request allows."""

    def __init__(self, size_bytes: int, most_bytes: int) -> None:
        super().__init__(f"the answer has more than {most_bytes} bytes")
        self.size_bytes, self.most_bytes = size_bytes, most_bytes


async def body_of(answer: aiohttp.ClientResponse, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the body of an answer; of a refusal, the first MAX_ERROR_BYTES. Each attempt has a deadline for all of it.

    Raises LargeBodyError, closing the connection, if there are more than `most_bytes`; nothing is read if the answer
    says so itself.
    """
    is_refusal = answer.status >= 300
    most_bytes = MAX_ERROR_BYTES if is_refusal else most_bytes
    data, size_bytes = bytearray(), 0
    if answer.method != "HEAD" and not is_refusal:
        size_bytes = answer.content_length or 0
    try:
        while size_bytes <= most_bytes and (piece := await answer.content.readany()):
            data += piece
            size_bytes = max(size_bytes, len(data))
    except BaseException:
        answer.close()
        raise
    if size_bytes > most_bytes:
        answer.close()
        if not is_refusal:
            raise LargeBodyError(size_bytes, most_bytes)
    return bytes(data[:most_bytes])


def session_for(options: StoreOptions) -> aiohttp.ClientSession:
    """Return a session without cookies and compression: checksums cover what is stored."""
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=options.connect_timeout_s, sock_read=options.read_timeout_s
    )
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=options.max_connections),
        timeout=timeout,
        headers={"User-Agent": "ckpt-async"},
        skip_auto_headers=["Accept-Encoding", "Content-Type"],
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    *,
    ca_file: str | None,
    body: bytes = b"",
    most_bytes: int = MAX_DOCUMENT_BYTES,
    check: Callable[[Response], None] | None = None,
) -> Response:
    """Make a request and return the answer with its whole body, whatever it is, in `error`; no redirect is followed.

    `check` is given what came before the body. Raises what it raises, what aiohttp raises, and as `body_of`.
    """
    async with session.request(
        *(method, yarl.URL(url, encoded=True)),
        headers=headers,
        data=body or None,
        allow_redirects=False,
        ssl=trusted_for(url, ca_file),
        proxy=proxy_url(url) or None,
    ) as answer:
        told = {name.lower(): ", ".join(answer.headers.getall(name)) for name in answer.headers}
        if check is not None:
            check(Response(answer.status, told))
        return Response(answer.status, told, await body_of(answer, most_bytes))
