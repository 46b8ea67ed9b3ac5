"""Checksums that follow their bodies, framed as the SDK frames them and sent only to stores that check them."""

import contextlib
import io
import math
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.httpchecksum import AwsChunkedWrapper, CrtCrc32cChecksum, CrtCrc64NvmeChecksum
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.core.model import Checksum
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, SourceError, StoreError
from ckpt_async.local.folder import Folder
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.checksums import Digest, checksum_of
from ckpt_async.stores.interface import BodyWriter, BytesBody, StoredPart
from ckpt_async.stores.s3 import client, sending, trailer
from ckpt_async.stores.s3.trailer import AwsChunkedBody
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.source import FileBody, Source
from ckpt_async.transfer.upload import PlannedPart, send_part, upload
from tests.faults.proxy import FaultProxy
from tests.seaweed import SeaweedServer
from tests.stores.peer import RESET, Peer, Request, answer
from tests.stores.s3_calls import connected
from tests.stores.s3_calls import credentials as given_credentials  # noqa: F401  a fixture

MIB = 1 << 20
PART_BYTES = 5 * MIB
DATA = random.Random(1).randbytes(3 * PART_BYTES + 17)
TRAILED = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
JUDGES = {"crc64nvme": CrtCrc64NvmeChecksum, "crc32c": CrtCrc32cChecksum}


class Wire(bytearray):
    """A `BodyWriter` that keeps what is written."""

    takes_files = False

    def write(self, piece: memoryview) -> None:
        self.extend(piece)


class Pieces:
    """A body of these pieces, in one reused buffer."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.size_bytes = sum(map(len, pieces))

    def send(self, writer: BodyWriter) -> None:
        buffer = bytearray(max(map(len, self._pieces), default=0))
        for each in self._pieces:
            buffer[: len(each)] = each
            writer.write(memoryview(buffer)[: len(each)])


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 64), st.sampled_from(sorted(JUDGES)))
def test_aws_chunked_framing_matches_the_sdks(pieces: list[bytes], chunk_bytes: int, algorithm: str) -> None:
    """The framing must not depend on how the slices fall, and the announced length must be what is sent."""
    judge = AwsChunkedWrapper(
        io.BytesIO(b"".join(pieces)),
        checksum_cls=JUDGES[algorithm],
        checksum_name=f"x-amz-checksum-{algorithm}",
        chunk_size=chunk_bytes,
    )
    wire: Any = Wire()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trailer, "CHUNK_BYTES", chunk_bytes)
        body = AwsChunkedBody(Pieces(pieces), Digest(algorithm))
        body.send(wire)
        assert wire == judge.read()
        assert len(wire) == body.size_bytes


# --- shards over TLS -----------------------------------------------------------------------------------------------


class Moves:
    """A `Progress` that does nothing."""

    def moved(self, *, is_last: bool = False) -> None:
        pass

    moved_in_thread = moved

    def sends_through(self, writer: Any) -> None:
        pass

    def may_send_in_thread(self, size_bytes: int, wait: Callable[[float], None]) -> None:
        pass

    not_sent = may_send_in_thread


class CountedSource(Source):
    """A source that counts how often it was read only for a checksum."""

    num_checksums = 0

    async def checksum(self, *args: Any, **kwargs: Any) -> Checksum:
        self.num_checksums += 1
        return await super().checksum(*args, **kwargs)

    async def send_to(self, store: Any, key: str = "a/b c", upload_id: str = "u") -> StoredPart:
        progress: Any = Moves()
        return await send_part(store, self, key, upload_id, PlannedPart(1, 0, SMALL), progress)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[CountedSource]:
    path = tmp_path / "shard.bin"
    path.write_bytes(DATA)
    folder = Folder(tmp_path)
    [(identity, _)] = folder.link([("shard.bin", "shard.bin")], "spool")
    source = CountedSource(folder.open_source("shard.bin", None, identity), identity, str(path))
    yield source
    source.close()


def unframed(request: Request) -> tuple[bytes, str]:
    """Return the body and its checksum, wherever the checksum was sent."""
    if request.headers.get("x-amz-content-sha256") != TRAILED:
        return request.body, request.headers["x-amz-checksum-crc64nvme"]
    found, rest = b"", request.body
    while True:
        line, _, rest = rest.partition(b"\r\n")
        if not (size := int(line, 16)):
            break
        found, rest = found + rest[:size], rest[size + 2 :]
    assert int(request.headers["x-amz-decoded-content-length"]) == len(found)
    name, _, value = rest.removesuffix(b"\r\n\r\n").decode().partition(":")
    assert name == request.headers["x-amz-trailer"] == "x-amz-checksum-crc64nvme"
    return found, value


SMALL = 2 * MIB + 5


@contextlib.asynccontextmanager
async def trusting(peer: Peer) -> AsyncIterator[Any]:
    """Yield a store that is known to check trailers, and that learns the SDK's request."""
    async with connected(peer) as store:
        store._sender.trailers_from = -math.inf
        yield store


@pytest.fixture
def secure(tls: ssl.SSLContext, ca_file: str, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)
    return tls


def done(_: Request) -> bytes:
    return answer(200, headers={"ETag": '"e"'})


def kinds(peer: Peer) -> str:
    """Return S for each request by the SDK, H for a checksum in a header, and T for one in a trailer."""
    return "".join(
        "S"
        if "amz-sdk-invocation-id" in each.headers
        else "T"
        if each.headers["x-amz-content-sha256"] == TRAILED
        else "H"
        for each in peer.requests
    )


@pytest.mark.usefixtures("given_credentials")
def test_a_trailer_upload_reads_the_bytes_once(
    run: Any, secure: ssl.SSLContext, source: CountedSource
) -> None:
    """This applies after the SDK's first request, and the answer confirms what was sent."""
    right = checksum_of(DATA[:SMALL], "crc64nvme")

    async def main() -> Peer:
        peer = Peer(done, tls=secure)
        async with trusting(peer) as store:
            for _ in range(3):
                assert (await source.send_to(store)).checksum == right
        return peer

    peer = run(main())
    assert kinds(peer) == "STT"
    assert [unframed(each) for each in peer.requests] == [(DATA[:SMALL], right.value)] * 3
    assert source.num_checksums == 1


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize("why", ["known", "not heeded"])
def test_without_trailer_support_the_checksum_is_a_header(
    run: Any, secure: ssl.SSLContext, source: CountedSource, why: str
) -> None:
    right = checksum_of(DATA[:SMALL], "crc64nvme")

    async def main() -> Peer:
        peer = Peer(done, tls=secure)
        async with trusting(peer) as store:
            if why == "not heeded":
                store._sender.trailers_from = math.inf
            for _ in range(2):
                if why == "known":
                    await store.put_part("a", "u", 1, BytesBody(DATA[:SMALL]), right)
                else:
                    await source.send_to(store)
        return peer

    peer = run(main())
    assert kinds(peer) == "SH"
    assert [unframed(each) for each in peer.requests] == [(DATA[:SMALL], right.value)] * 2


class Clock:
    """The time as the store's module sees it."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize(
    ("status", "code", "reason", "expected"),
    [
        (307, "", FailureReason.TRANSIENT, "STSTT"),
        (400, "IncompleteBody", FailureReason.TRANSIENT, "STSHT"),
        (400, "BadDigest", FailureReason.TRANSIENT, "STHHT"),
        (403, "", FailureReason.TRANSIENT, "STSHT"),
        (404, "NoSuchUpload", FailureReason.NOT_FOUND, "STSTT"),
        (500, "", FailureReason.TRANSIENT, "STHHT"),
        (501, "", FailureReason.TRANSIENT, "STHHT"),
        (503, "SlowDown", FailureReason.THROTTLED, "STTTT"),
    ],
)
def test_after_a_suspicious_refusal_headers_are_used_for_a_while(
    run: Any,
    secure: ssl.SSLContext,
    source: CountedSource,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    reason: FailureReason,
    expected: str,
) -> None:
    """The attempt is retryable whatever the store answered, because the next one has another form."""
    replies = iter([200, status, 200, 200, 200])
    clock = Clock()
    monkeypatch.setattr(sending, "time", clock)

    async def main() -> Peer:
        def respond(_: Request) -> bytes:
            number = next(replies)
            return answer(number, code if number == status else "", {"ETag": '"e"'})

        peer = Peer(respond, tls=secure)
        async with trusting(peer) as store:
            for number in range(5):
                # A redirect is not a refusal.
                clock.passed_s += 700.0 if number == 4 and status >= 400 else 100.0
                if number == 1:
                    with pytest.raises(StoreError) as refused:
                        await source.send_to(store)
                    assert refused.value.reason is reason
                else:
                    await source.send_to(store)
        return peer

    peer = run(main())
    assert kinds(peer) == expected
    right = checksum_of(DATA[:SMALL], "crc64nvme")
    assert [unframed(each) for each in peer.requests] == [(DATA[:SMALL], right.value)] * len(expected)


@pytest.mark.usefixtures("given_credentials")
def test_a_broken_connection_is_a_failed_attempt(
    run: Any, secure: ssl.SSLContext, source: CountedSource
) -> None:
    replies = iter([b"", RESET, b""])

    async def main() -> Peer:
        peer = Peer(lambda request: next(replies) or done(request), tls=secure)
        async with trusting(peer) as store:
            for number in range(3):
                with pytest.raises(StoreError) if number == 1 else contextlib.nullcontext():
                    await source.send_to(store)
        return peer

    assert kinds(run(main())) == "STT"


def test_a_changed_file_does_not_match_its_trailer(source: CountedSource) -> None:
    """The end of the body is not sent, so the store cannot accept it."""
    progress: Any = Moves()
    body = FileBody(source, 0, len(DATA), progress)

    class Overwriting(Wire):
        def write(self, piece: memoryview) -> None:
            if not self:
                Path(source.path).write_bytes(DATA[::-1])
            super().write(piece)

    wire: Any = Overwriting()
    with pytest.raises(SourceError) as failed:
        AwsChunkedBody(body, Digest("crc64nvme")).send(wire)
    assert failed.value.reason is FailureReason.SOURCE_CHANGED
    assert not wire.endswith(b"\r\n\r\n")


# --- which stores heed them ----------------------------------------------------------------------------------------


class Flavoured:
    """A store with its own behaviour for trailers."""

    def __init__(self, flavour: str) -> None:
        self.flavour = flavour
        self.kept: dict[str, tuple[int, str, bool]] = {}

    def respond(self, request: Request) -> bytes:
        is_trailed = request.headers.get("x-amz-content-sha256") == TRAILED
        if request.method == "HEAD":
            size_bytes, checksum, is_odd = self.kept[request.path]
            odd = {"Content-Encoding": "aws-chunked"} if is_odd else {}
            told = {"Content-Length": str(size_bytes), "ETag": '"e"', "x-amz-checksum-crc64nvme": checksum}
            return answer(200, headers={**told, **odd})
        if request.method != "PUT":
            return answer(200)
        if request.headers.get("if-none-match") or request.headers.get("if-match", '"e"') != '"e"':
            return answer(412, "PreconditionFailed")
        if is_trailed:
            if self.flavour == "breaks":
                return RESET
            if self.flavour in ("knows none", "is busy"):
                return (
                    answer(501, "NotImplemented") if self.flavour == "knows none" else answer(503, "SlowDown")
                )
        data, told = unframed(request)
        right = checksum_of(data, "crc64nvme").value
        if told != right and not (is_trailed and self.flavour == "compares nothing"):
            is_busy = is_trailed and self.flavour == "is busy for one"
            return answer(503, "SlowDown") if is_busy else answer(400, "BadDigest")
        size_bytes = len(request.body if is_trailed and self.flavour == "keeps frames" else data)
        keeps_none = is_trailed and self.flavour == "keeps no checksum"
        self.kept[request.path] = (
            size_bytes,
            "" if keeps_none else right,
            is_trailed and self.flavour == "keeps the encoding",
        )
        return done(request)


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize(
    ("flavour", "heeded"),
    [
        ("right", True),
        ("keeps the encoding", True),  # of an object; nobody sees that of a part
        ("keeps frames", False),
        ("keeps no checksum", False),
        ("compares nothing", False),
        ("knows none", False),
        ("is busy", False),
        ("is busy for one", False),
        ("breaks", False),
    ],
)
def test_the_probe_detects_stores_that_check_trailers(
    run: Any, secure: ssl.SSLContext, flavour: str, heeded: bool
) -> None:
    """A store that does not check trailers can still be opened."""

    async def main() -> None:
        peer = Peer(Flavoured(flavour).respond, tls=secure)
        async with peer.serve() as url:
            store: Any = open_store("s3://bucket/run", StoreOptions(endpoint_url=url))
            await store.open()
            try:
                assert store.capabilities.finds_checksums == heeded
                assert store.capabilities.conditional_put
                assert store.capabilities.checksum_algorithm == "crc64nvme"
            finally:
                await store.close()
        assert all("/run/.ckpt-async/probe/" in each.path for each in peer.requests if each.method != "POST")
        assert not any("uploadId" in each.path for each in peer.requests)

    run(main())


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize("how", ["over plain HTTP", "to read"])
def test_trailers_are_probed_only_where_they_would_be_used(
    run: Any, secure: ssl.SSLContext, how: str
) -> None:
    async def main() -> None:
        peer = Peer(Flavoured("right").respond, tls=secure if how == "to read" else None)
        async with peer.serve() as url:
            store: Any = open_store("s3://bucket/run", StoreOptions(endpoint_url=url))
            await store.open(is_read_only=how == "to read")
            await store.close()
            assert not store.capabilities.finds_checksums
        assert not any(each.headers.get("x-amz-content-sha256") == TRAILED for each in peer.requests)

    run(main())


# --- a real store --------------------------------------------------------------------------------------------------


def test_a_real_store_checks_trailers(
    run: Any,
    s3_server: SeaweedServer,
    s3_url: str,
    secure: ssl.SSLContext,
    source: CountedSource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With SeaweedFS over TLS, shards are uploaded in one pass, and one that does not match its trailer is refused."""
    right = checksum_of(DATA, "crc64nvme")

    async def main(url: str) -> None:
        store: Any = open_store(s3_url, StoreOptions(endpoint_url=url))
        await store.open()
        try:
            assert store.capabilities.finds_checksums

            async def send(key: str) -> int:
                before = source.num_checksums
                await upload(
                    PatientStore(store, Settings()),
                    source,
                    key,
                    smallest_part_bytes=PART_BYTES,
                    resume=None,
                    opened=lambda _: None,
                    sent=lambda _: None,
                )
                return source.num_checksums - before

            assert await send("first") == 0
            there = await store.head("first")
            assert (there.size_bytes, there.checksum) == (len(DATA), right)
            headed = await store._session.call("head_object", "first")
            assert "ContentEncoding" not in headed

            monkeypatch.setattr(client, "Digest", Spoiled)
            upload_id = await store.create_multipart("second")
            with pytest.raises(StoreError, match="400: refused"):
                await source.send_to(store, "second", upload_id)
            assert not await store.list_parts("second", upload_id)
        finally:
            await store.close()

    with FaultProxy(s3_server.url, tls=secure) as proxy:
        run(main(proxy.url))


class Spoiled(Digest):
    """A digest of other bytes than those that are sent."""

    def checksum(self) -> Checksum:
        self.update(b"x")
        return super().checksum()
