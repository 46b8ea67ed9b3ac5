"""Answers of web servers that are not simply the file: compressed, without times or ETags, at signed addresses."""

import contextlib
import gzip
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores import open_store
from ckpt_async.stores.interface import ObjectInfo
from tests.stores.peer import Peer, Request, answer

DATA = b"hello"
NOON = 1795262400.0
Read = Callable[[Any], Any]


async def get(store: Any) -> ObjectInfo:
    data, info = await store.get("a", max_size_bytes=100)
    assert data == DATA
    return info


async def get_range(store: Any) -> ObjectInfo:
    received = bytearray()
    try:
        info = await store.get_range("a", 0, len(DATA), received.extend)
    except StoreError:
        assert not received, "bytes that are not the file's were handed over"
        raise
    assert received == DATA
    return info


READS: dict[str, Read] = {"head": lambda store: store.head("a"), "get": get, "get_range": get_range}


@pytest.fixture(params=READS)
def read(request: pytest.FixtureRequest) -> Read:
    return READS[request.param]


@contextlib.asynccontextmanager
async def reading(respond: Callable[[Request], bytes]) -> AsyncIterator[Any]:
    async with Peer(respond).serve() as url:
        store = open_store(f"{url}/run")
        await store.open(is_read_only=True)
        try:
            yield store
        finally:
            await store.close()


def file(request: Request, *, body: bytes = DATA, **headers: str) -> bytes:
    """Answer with the file, or the range that was asked for, which is all of it."""
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    if "range" not in request.headers:
        return answer(200, headers=told, body=body)
    return answer(206, headers=told | {"Content-Range": f"bytes 0-{len(body) - 1}/{len(body)}"}, body=body)


@pytest.mark.parametrize("compressed", [gzip.compress(DATA), DATA[::-1]], ids=["other size", "same size"])
def test_what_a_server_has_compressed_is_not_the_file(run: Any, read: Read, compressed: bytes) -> None:
    """Some servers compress although nobody asks for it."""

    async def body() -> None:
        async with reading(lambda request: file(request, body=compressed, Content_Encoding="gzip")) as store:
            with pytest.raises(StoreError, match="compressed it") as raised:
                await read(store)
            assert raised.value.reason is FailureReason.OTHER

    run(body())


@pytest.mark.parametrize(
    "date",
    [
        "Sat, 21 Nov 2026 12:00:00 GMT",
        "Sat, 21 Nov 2026 12:00:00 -0000",
        "Sat, 21 Nov 2026 12:00:00",
        "Sat, 21 Nov 2026 14:00:00 +0200",
    ],
)
def test_a_time_without_a_zone_is_utc(run: Any, read: Read, date: str) -> None:
    async def body() -> None:
        async with reading(lambda request: file(request, Last_Modified=date)) as store:
            assert (await read(store)).last_modified == NOON

    run(body())


@pytest.mark.parametrize("date", ["", "yesterday"])
def test_a_file_without_a_time_is_read(run: Any, read: Read, date: str) -> None:
    async def body() -> None:
        async with reading(lambda request: file(request, **{"Last_Modified": date} if date else {})) as store:
            assert (await read(store)).last_modified is None

    run(body())


def test_a_change_shows_without_etags_even_if_the_size_stays(run: Any, read: Read) -> None:
    """A file is read in many ranges, which must be of one version."""
    dates = ["Sat, 21 Nov 2026 12:00:00 GMT"]

    async def body() -> None:
        async with reading(lambda request: file(request, Last_Modified=dates[-1])) as store:
            before = [(await each(store)).etag for each in (read, *READS.values())]
            dates.append("Sat, 21 Nov 2026 12:00:01 GMT")
            after = (await read(store)).etag
        assert len({*before}) == 1
        assert after not in before

    run(body())


def test_a_signed_address_that_ends_is_asked_for_anew(run: Any, read: Read) -> None:
    """Each serves one request, and only as it was signed."""
    signed: list[str] = []

    def respond(request: Request) -> bytes:
        if request.path == "/run/a":
            signed.append(f"/bucket/a?signature={len(signed)}%2F")
            return answer(302, headers={"Location": signed[-1]})
        if request.path == "/run/":
            return answer(404)
        return file(request) if request.path == signed.pop() else answer(403)

    async def body() -> None:
        async with reading(respond) as store:
            for _ in range(3):
                await read(store)

    run(body())
