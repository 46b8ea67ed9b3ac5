"""PUTs that bypass the SDK are signed as the SDK signs, carry all configuration, and happen only where that is safe."""

import asyncio
import datetime as dt
from collections.abc import Mapping
from typing import Any
from unittest import mock
from urllib.parse import quote, urlsplit

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from botocore.utils import percent_encode_sequence
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.errors import FailureReason, IntegrityError, StoreError
from ckpt_async.local.folder import Folder
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.http.uploads import head_of
from ckpt_async.stores.interface import BytesBody, Create, Match, SmallPut
from ckpt_async.stores.s3.signing import RequestTemplate, UrlTemplate
from ckpt_async.transfer.source import FileBody, Source
from tests.faults.proxy import Fault, FaultProxy
from tests.stores.bodies import put
from tests.stores.peer import SILENCE, Peer, Request, answer
from tests.stores.s3_calls import connected
from tests.stores.s3_calls import credentials as given_credentials  # noqa: F401  a fixture

TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
KEYS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)
CHECKSUM = checksum_of(b"x", "crc64nvme")


# Headers that the signer adds itself.
SIGNERS_OWN = {"authorization", "host", "x-amz-date", "x-amz-security-token"}


def address(place: str, key: str, query: dict[str, str]) -> str:
    """Return the URL as the SDK writes it."""
    asked = percent_encode_sequence(query)
    return f"{place}/{quote(key, safe='/~')}" + (f"?{asked}" if asked else "")


def in_order(url: str) -> list[str]:
    """Split a URL for comparison, because the parts of its query may come in any order."""
    address, _, asked = url.partition("?")
    return [address, *sorted(asked.split("&"))]


def sent_by_sdk(
    url: str,
    headers: Mapping[str, str],
    credentials: Any,
    at: dt.datetime,
    *,
    is_trailed: bool = False,
    method: str = "PUT",
) -> AWSRequest:
    request = AWSRequest(method, url, headers=dict(headers))
    if is_trailed:
        request.context["checksum"] = {"request_algorithm": {"in": "trailer"}}
    request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
    with mock.patch.object(botocore.auth, "get_current_datetime", return_value=at):
        botocore.auth.S3SigV4Auth(credentials, "s3", "eu-central-1").add_auth(request)
    return request


PLACES = [
    "https://bucket.s3.eu-central-1.amazonaws.com",
    "http://127.0.0.1:8333/bucket",
    "https://Store.Local:443/bucket",
    "http://[::1]:8333/bucket",
]
QUERIES = st.one_of(
    st.just({}), st.fixed_dictionaries({"partNumber": st.integers(1, 10_000).map(str), "uploadId": KEYS})
)


@given(
    st.sampled_from(PLACES),
    KEYS,
    KEYS,
    st.tuples(QUERIES, QUERIES),
    st.dictionaries(st.sampled_from(["x-amz-tagging", "x-amz-storage-class", "content-type"]), TEXT),
    st.one_of(st.none(), TEXT),
    st.integers(1_577_836_800, 2_840_140_800),
)
def test_signatures_match_the_sdks(
    place: str,
    first: str,
    second: str,
    queries: tuple[dict[str, str], dict[str, str]],
    more: dict[str, str],
    token: str | None,
    now: int,
) -> None:
    """For any key, part, headers, token and time, the SDK's own signer gives the expected result."""
    credentials = ReadOnlyCredentials("AKID", "secret/+key", token)
    fixed = {**more, "User-Agent": "ckpt"}
    start, at = (dt.datetime.fromtimestamp(each, dt.UTC) for each in (1_767_225_600, now))
    pattern_url = address(place, first, queries[0])
    of_first = {
        **fixed,
        "Content-Length": "7",
        "x-amz-checksum-crc64nvme": "AAAA",
        "amz-sdk-request": "attempt=1",
    }
    known = sent_by_sdk(pattern_url, of_first, ReadOnlyCredentials("OLD", "older", "gone"), start)
    pattern = RequestTemplate.of(pattern_url, dict(known.headers), first, queries[0])
    assert pattern is not None
    url, headers = pattern.request(second, 1, CHECKSUM, credentials, now, queries[1])
    ours = {name: value for name, value in headers.items() if name not in SIGNERS_OWN}
    wanted = sent_by_sdk(url, ours, credentials, at)
    assert in_order(url) == in_order(address(place, second, queries[1]))
    assert headers["authorization"] == wanted.headers["Authorization"]
    host = botocore.auth._host_from_url(url)
    assert {name.lower(): value for name, value in wanted.headers.items()} | {"host": host} == headers
    assert fixed.items() - {("User-Agent", "ckpt")} <= headers.items()
    assert headers["x-amz-checksum-crc64nvme"] == CHECKSUM.value
    url, headers = pattern.request(second, 1, CHECKSUM, credentials, now)
    assert pattern.head(second, 1, CHECKSUM, credentials, now) == head_of(urlsplit(url), headers)

    url, headers = pattern.request_with_trailer(second, 7, "crc32c", credentials, now, queries[1])
    ours = {name: value for name, value in headers.items() if name not in SIGNERS_OWN}
    wanted = sent_by_sdk(url, ours, credentials, at, is_trailed=True)
    assert {name.lower(): value for name, value in wanted.headers.items()} | {"host": host} == headers
    assert in_order(url) == in_order(address(place, second, queries[1]))
    assert (
        headers.items()
        >= {
            "content-encoding": "aws-chunked",
            "x-amz-trailer": "x-amz-checksum-crc32c",
            "x-amz-decoded-content-length": "7",
            "content-length": str(len(b"7\r\n0123456\r\n0\r\nx-amz-checksum-crc32c:AAAAAA==\r\n\r\n")),
        }.items()
    )
    assert not any(name.startswith("x-amz-checksum-") for name in headers)

    for method, own in (
        ("GET", {}),
        ("PUT", {"if-match": '"a  b"', **pattern.of_body(7, CHECKSUM)}),
    ):
        url, headers = pattern.rare(method, second, own, credentials, now)
        ours = {name: value for name, value in headers.items() if name not in SIGNERS_OWN}
        wanted = sent_by_sdk(url, ours, credentials, at, method=method)
        assert {name.lower(): value for name, value in wanted.headers.items()} | {"host": host} == headers
        assert in_order(url) == in_order(address(place, second, {}))
        assert own.items() <= headers.items()


@pytest.mark.parametrize(
    "change",
    [
        {"If-None-Match": "*"},
        {"x-amz-content-sha256": "e3b0c442"},
        {"Authorization": "AWS4-ECDSA-P256-SHA256 Credential=A/20260101/s3/aws4_request, SignedHeaders=host"},
        {
            "Authorization": "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/s3express/aws4_request, Signature=1"
        },
        {"x-amz-s3session-token": "t"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_requests_sent_another_way_are_no_template(change: dict[str, str]) -> None:
    """Requests with conditions on one object, or signatures of another kind, are left to the SDK."""
    told = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/s3/aws4_request, SignedHeaders=host",
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
    }
    assert RequestTemplate.of("http://s3/bucket/key", told, "key") is not None
    assert RequestTemplate.of("http://s3/bucket/key", told | change, "key") is None
    assert RequestTemplate.of("http://s3/bucket/key?x-id=PutObject", told, "key") is None
    part = {"partNumber": "1", "uploadId": "u"}
    assert RequestTemplate.of("http://s3/bucket/key?uploadId=u&partNumber=1", told, "key", part) is not None
    for query in (
        "",
        "?partNumber=1",
        "?partNumber=2&uploadId=u",
        "?partNumber=1&uploadId=u&x-id=UploadPart",
    ):
        assert RequestTemplate.of(f"http://s3/bucket/key{query}", told, "key", part) is None
    assert RequestTemplate.of("http://s3/bucket/other", told, "key") is None


class Moves:
    """A `Progress` without a cap."""

    def sends_through(self, writer: Any) -> None:
        pass

    def may_send_in_thread(self, size_bytes: int, wait: Any) -> None:
        pass

    def not_sent(self, size_bytes: int) -> None:
        pass

    def moved_in_thread(self, *, is_last: bool = False) -> None:
        pass


@pytest.fixture
def source(tmp_path: Any) -> Any:
    (tmp_path / "a.bin").write_bytes(b"a small shard")
    folder = Folder(tmp_path)
    [(identity, _)] = folder.link([("a.bin", "a.bin")], "spool")
    source = Source(folder.open_source("a.bin", None, identity), identity, str(tmp_path / "a.bin"))
    yield source
    source.close()


def body_of(source: Any) -> Any:
    moves: Any = Moves()
    return FileBody(source, 0, source.size_bytes, moves)


def test_a_templated_request_carries_all_configuration(
    run: Any, s3_url: str, s3_server: Any, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost encryption or tags would be noticed by an auditor, not by a test that compares bytes."""
    right = checksum_of(b"a small shard", "crc64nvme")

    async def body(url: str) -> Any:
        store: Any = open_store(
            f"{s3_url}/run", StoreOptions(endpoint_url=url, put_args={"Metadata": {"owner": "me"}})
        )
        await store.open()
        try:
            refuse: Any = mock.AsyncMock(side_effect=AssertionError("through the SDK"))
            with monkeypatch.context() as patch:
                patch.setattr(store._sender, "_put_by_sdk", refuse)
                there = await store.put("a~b/c d+é", body_of(source), right)
                with pytest.raises(IntegrityError):
                    await store.put("spoiled", body_of(source), CHECKSUM)
            headed = await store._session.client.head_object(
                Bucket=s3_server.bucket, Key=f"{store._root}a~b/c d+é"
            )
            return there, headed, await store.head("a~b/c d+é")
        finally:
            await store.close()

    with FaultProxy(s3_server.url) as proxy:
        there, headed, info = run(body(proxy.url))
    assert headed["Metadata"] == {"owner": "me"}
    assert (there.etag, there.size_bytes, there.checksum) == (info.etag, info.size_bytes, right)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("unavailable", FailureReason.THROTTLED),
        ("denied", FailureReason.AUTH),
        ("drop_reply", FailureReason.TRANSIENT),
    ],
)
def test_refusals_are_classified_as_through_the_sdk(
    run: Any, s3_url: str, s3_server: Any, source: Any, kind: str, reason: FailureReason
) -> None:
    right = checksum_of(b"a small shard", "crc64nvme")

    async def body(proxy: FaultProxy) -> None:
        store: Any = open_store(f"{s3_url}/run", StoreOptions(endpoint_url=proxy.url))
        await store.open()
        try:
            assert "put_object" in store._sender.templates
            await put(store, "b", b"before")
            proxy.add(Fault(kind, method="PUT", key="a.bin", times=1))
            with pytest.raises(StoreError) as failed:
                await store.put("a.bin", body_of(source), right)
            assert failed.value.reason is reason
            await store.put("a.bin", body_of(source), right)
        finally:
            await store.close()

    with FaultProxy(s3_server.url) as proxy:
        run(body(proxy))
        assert proxy.sent("a.bin").total() == (2 if kind == "drop_reply" else 1)


# --- which requests are whose --------------------------------------------------------------------------------------

DATA = b"a small shard"
RIGHT = checksum_of(DATA, "crc64nvme")
WAYS: dict[str, Any] = {
    "put": lambda store, source: store.put("a~b/c d+é", body_of(source), RIGHT),
    "part": lambda store, source: store.put_part("a~b/c d+é", "u+/ ~=", 7, body_of(source), RIGHT),
    "many": lambda store, _: store.put_many([SmallPut("a~b/c d+é", DATA, RIGHT)], lambda _: None),
}
# Headers that belong to one request or to the HTTP client, not to the template.
OF_ONE = {
    "accept",
    "accept-encoding",
    "authorization",
    "x-amz-date",
    "amz-sdk-invocation-id",
    "amz-sdk-request",
}


def is_by_sdk(request: Request) -> bool:
    return "amz-sdk-invocation-id" in request.headers


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize("way", WAYS)
def test_only_the_first_request_is_the_sdks_and_the_next_ones_match_it(
    run: Any, source: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost encryption, tags or session tokens would otherwise only be noticed by an auditor."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    put_args = {"Metadata": {"owner": "me"}, "ServerSideEncryption": "aws:kms", "Tagging": "a=b%20c"}

    async def body() -> list[Request]:
        peer = Peer(lambda _: answer(200, headers={"ETag": '"e"'}))
        async with connected(peer, put_args=put_args) as store:
            for _ in range(3):
                await WAYS[way](store, source)
        return peer.requests

    first, *others = run(body())
    assert [is_by_sdk(each) for each in (first, *others)] == [True, False, False]
    for each in others:
        assert (each.method, in_order(each.path), each.body) == ("PUT", in_order(first.path), DATA)
        ours, theirs = (
            {name: value for name, value in request.headers.items() if name not in OF_ONE}
            for request in (each, first)
        )
        assert ours == theirs
    assert ("x-amz-tagging" in first.headers) == (way != "part")
    assert first.headers["x-amz-security-token"] == "token"


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("status", [307, 400, 403, 404, 500, 503])
def test_after_a_suspicious_refusal_the_sdk_sends_the_request(
    run: Any, source: Any, way: str, status: int
) -> None:
    """The SDK knows redirects, regions and the current configuration, and its request becomes the new template."""
    replies = iter([200, status, 200, 200, 200])

    async def body() -> list[bool]:
        def respond(_: Request) -> bytes:
            return answer(next(replies), headers={"ETag": '"e"'})

        peer = Peer(respond)
        async with connected(peer) as store:
            await WAYS[way](store, source)
            with pytest.raises(StoreError) as refused:
                await WAYS[way](store, source)
            assert status != 307 or refused.value.reason is FailureReason.TRANSIENT
            await WAYS[way](store, source)
            await WAYS[way](store, source)
        assert all(each.body == DATA for each in peer.requests)
        return [is_by_sdk(each) for each in peer.requests]

    expected = {307: [True, False, True, False], 500: [True, False, False, False]}
    expected[503], expected[400] = expected[500], expected[307]
    expected[403] = expected[404] = expected[307]
    assert run(body()) == expected[status]


@pytest.mark.usefixtures("given_credentials")
def test_each_operation_has_its_own_template(run: Any, source: Any) -> None:
    """Objects are encrypted and tagged but their parts are not, and a conditional request is no template for others."""

    async def body() -> list[bool]:
        peer = Peer(lambda _: answer(200, headers={"ETag": '"e"'}))
        async with connected(peer, put_args={"Tagging": "a=b"}) as store:
            await put(store, "a", DATA, condition=Create())
            assert not store._sender.templates
            for _ in range(2):
                for way in ("part", "put"):
                    await WAYS[way](store, source)
            await put(store, "a", DATA, condition=Create())
            await store.put("a", BytesBody(DATA), RIGHT)
        return [is_by_sdk(each) for each in peer.requests]

    assert run(body()) == [True, True, True, False, False, False, False]


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize("condition", [Create(), Match('"e+/"')])
def test_conditional_requests_match_the_sdks(
    run: Any, source: Any, condition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")

    async def body() -> list[Request]:
        peer = Peer(lambda _: answer(200, headers={"ETag": '"e"'}))
        async with connected(peer, put_args={"Tagging": "a=b%20c"}) as store:
            await put(store, "a b", DATA, condition=condition)
            await WAYS["put"](store, source)
            await put(store, "a b", DATA, condition=condition)
        return peer.requests

    first, _, ours = run(body())
    assert [is_by_sdk(each) for each in (first, ours)] == [True, False]
    assert (ours.method, ours.path, ours.body) == (first.method, first.path, first.body)
    assert _lasting(ours) == _lasting(first)
    assert {"if-match", "if-none-match"} & ours.headers.keys()


def _lasting(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name not in OF_ONE}


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (412, "PreconditionFailed", FailureReason.PRECONDITION),
        (409, "ConditionalRequestConflict", FailureReason.PRECONDITION),
        (404, "NoSuchBucket", FailureReason.NOT_FOUND),
        (501, "NotImplemented", FailureReason.OTHER),
        (503, "SlowDown", FailureReason.THROTTLED),
    ],
)
def test_refused_conditions_are_told_as_through_the_sdk(
    run: Any, source: Any, status: int, code: str, reason: FailureReason
) -> None:
    async def main() -> None:
        def respond(request: Request) -> bytes:
            is_conditional = "if-none-match" in request.headers
            return answer(status, code) if is_conditional else answer(200, headers={"ETag": '"e"'})

        peer = Peer(respond)
        async with connected(peer) as store:
            for _ in range(2):  # through the SDK, then without it
                with pytest.raises(StoreError) as refused:
                    await put(store, "a", DATA, condition=Create())
                assert refused.value.reason is reason
                await WAYS["put"](store, source)
        conditional = [is_by_sdk(each) for each in peer.requests if "if-none-match" in each.headers]
        assert conditional == [True, False]

    run(main())


# --- small objects ----------------------------------------------------------------------------------------------------

HELD = {"ETag": '"e"', "Last-Modified": "Tue, 24 Nov 2026 12:00:00 GMT"}


def _get_thrice(run: Any, replies: list[bytes], **put_args: Any) -> tuple[list[Any], list[Request]]:
    """Return the results of three GETs of one object, and the requests that they took."""
    left, brought = iter(replies), []

    async def main() -> list[Request]:
        peer = Peer(lambda _: next(left))
        async with connected(peer, **put_args) as store:
            for _ in range(3):
                try:
                    brought.append(await store.get("a~b/c d+é", max_size_bytes=20))
                except StoreError as error:
                    brought.append(error)
        return peer.requests

    return brought, run(main())


@pytest.mark.usefixtures("given_credentials")
def test_gets_match_the_sdks(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    monkeypatch.setenv("CKPT_ASYNC_S3_REQUEST_PAYER", "requester")
    told = HELD | {"x-amz-checksum-crc64nvme": RIGHT.value, "x-amz-checksum-type": "FULL_OBJECT"}
    brought, requests = _get_thrice(run, [answer(200, body=DATA, headers=told)] * 3)
    assert [is_by_sdk(each) for each in requests] == [True, False, False]
    for each in requests[1:]:
        assert (each.method, each.path, each.body) == ("GET", requests[0].path, b"")
        assert _lasting(each) == _lasting(requests[0])
    assert brought[0] == brought[1] == brought[2]
    assert (brought[0][0], brought[0][1].checksum) == (DATA, RIGHT)
    assert requests[1].headers["x-amz-checksum-mode"] == "ENABLED"
    assert requests[1].headers["x-amz-request-payer"] == "requester"


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize(
    ("reply", "reason", "by_sdk"),
    [
        (
            answer(404, "NoSuchKey"),
            FailureReason.NOT_FOUND,
            [True, False, False],
        ),
        (
            answer(404, "NoSuchBucket"),
            FailureReason.NOT_FOUND,
            [True, False, False],
        ),
        (answer(404, body=b"not ours"), FailureReason.TRANSIENT, [True, False, False]),
        (answer(403, "AccessDenied"), FailureReason.AUTH, [True, False, True]),
        (answer(400, "ExpiredToken"), FailureReason.AUTH, [True, False, True]),
        (answer(503, "SlowDown"), FailureReason.THROTTLED, [True, False, False]),
        (answer(200, body=DATA, headers={}), FailureReason.TRANSIENT, [True, False, False]),
        (
            answer(200, body=DATA, headers=HELD | {"x-amz-checksum-crc64nvme": CHECKSUM.value}),
            FailureReason.CHECKSUM,
            [True, False, False],
        ),
        (answer(200, body=3 * DATA, headers=HELD), FailureReason.OTHER, [True, False, False]),
        (
            b'HTTP/1.1 200 OK\r\nETag: "e"\r\nConnection: close\r\nContent-Length: 13\r\n\r\na sm',
            FailureReason.TRANSIENT,
            [True, False, False],
        ),
    ],
    ids=range(10),
)
def test_odd_answers_to_gets_are_told_as_through_the_sdk(
    run: Any, reply: bytes, reason: FailureReason, by_sdk: list[bool]
) -> None:
    good = answer(200, body=DATA, headers=HELD)
    brought, requests = _get_thrice(run, [good, reply, good])
    assert [is_by_sdk(each) for each in requests] == by_sdk
    assert brought[1].reason is reason
    through_sdk, _ = _get_thrice(run, [reply, good, good])
    assert (type(brought[1]), brought[1].reason) == (type(through_sdk[0]), through_sdk[0].reason)
    assert brought[2][0] == DATA


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize(
    "headers",
    [{"x-amz-checksum-crc32": "AAAAAA=="}, {"x-amz-checksum-sha256": f"{'A' * 43}="}],
    ids=["CRC32", "SHA-256"],
)
def test_checksums_that_only_the_sdk_knows_it_compares(run: Any, headers: dict[str, str]) -> None:
    good, other = answer(200, body=DATA, headers=HELD), answer(200, body=DATA, headers=HELD | headers)
    brought, requests = _get_thrice(run, [good, other, other, good])
    assert [is_by_sdk(each) for each in requests] == [True, False, True, False]
    assert brought[1].reason is FailureReason.CHECKSUM
    assert brought[2][0] == DATA


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize(
    "reply",
    [
        b'HTTP/1.1 200 OK\r\nETag: "e"\r\nTransfer-Encoding: chunked\r\n\r\nd\r\na small shard\r\n0\r\n\r\n',
        b'HTTP/1.1 200 OK\r\nETag: "e"\r\nConnection: close\r\n\r\na sm',
        b'HTTP/1.0 200 OK\r\nETag: "e"\r\nConnection: close\r\n\r\na sm',
    ],
    ids=["chunked", "up to its end", "HTTP/1.0"],
)
def test_an_answer_that_does_not_say_how_long_it_is_is_not_believed(run: Any, reply: bytes) -> None:
    """Such an answer may have been cut short."""
    good = answer(200, body=DATA, headers=HELD)
    brought, requests = _get_thrice(run, [good, reply, reply, good])
    assert [is_by_sdk(each) for each in requests] == [True, False, True, False]
    assert brought[1].reason is FailureReason.TRANSIENT
    assert "ContentLength" in str(brought[1])
    assert brought[2][0] == DATA


@pytest.mark.usefixtures("given_credentials")
def test_a_pattern_is_learned_from_the_request_for_the_same_object(run: Any) -> None:
    """Names of other objects requested at the same time may have the same ending."""

    async def main() -> None:
        def respond(request: Request) -> bytes:
            is_first = len(peer.requests) == 1
            return SILENCE if is_first else answer(200, body=request.path.encode(), headers=HELD)

        peer = Peer(respond)
        async with peer.serve() as url:
            store: Any = open_store("s3://bucket", StoreOptions(endpoint_url=url))
            await store._session.open(is_read_only=True)
            waiting = asyncio.ensure_future(store.get("x", max_size_bytes=100))
            await peer.arrived.wait()
            store._reader._small = None  # something else was refused
            for key in ("step1/x", "step1/x", "y"):
                data, _ = await store.get(key, max_size_bytes=100)
                assert data.decode().partition("?")[0] == f"/bucket/{key}"
            waiting.cancel()
            await asyncio.wait([waiting])
            await store.close()

    run(main())


@pytest.mark.usefixtures("given_credentials")
def test_an_error_in_a_200_is_no_stored_object(run: Any, source: Any) -> None:
    async def main() -> None:
        replies = iter([answer(200, headers={"ETag": '"e"'})])
        error = answer(200, "InternalError", headers={"ETag": '"e"'})

        peer = Peer(lambda _: next(replies, error))
        async with connected(peer) as store:
            await WAYS["put"](store, source)
            with pytest.raises(StoreError, match="InternalError") as refused:
                await put(store, "a", DATA, condition=Create())
            assert refused.value.reason is FailureReason.TRANSIENT

    run(main())


@pytest.mark.usefixtures("given_credentials")
@pytest.mark.parametrize("lacks", ["ETag", "nothing"])
def test_a_series_stops_at_a_response_without_an_etag(run: Any, source: Any, lacks: str) -> None:
    """An intermediary may answer 200."""
    stored: list[str] = []

    async def body() -> int:
        def respond(request: Request) -> bytes:
            is_odd = lacks == "ETag" and request.path.endswith("/2")
            return answer(200, headers={} if is_odd else {"ETag": '"e"'})

        peer = Peer(respond)
        async with connected(peer) as store:
            await WAYS["put"](store, source)
            puts = [SmallPut(str(number), DATA, RIGHT) for number in range(4)]
            sending = store.put_many(puts, lambda info: stored.append(info.key))
            if lacks == "ETag":
                with pytest.raises(StoreError, match="without ETag"):
                    await sending
            else:
                await sending
        return len(peer.requests)

    assert run(body()) == (4 if lacks == "ETag" else 5)
    assert stored == (["0", "1"] if lacks == "ETag" else ["0", "1", "2", "3"])


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bucket", "region", "origin"),
    [
        ("bkt", None, "https://bkt.s3.amazonaws.com/"),
        ("bkt", "us-east-1", "https://bkt.s3.amazonaws.com/"),
        ("bkt", "us-west-2", "https://bkt.s3.us-west-2.amazonaws.com/"),
        ("bkt", "eu-central-1", "https://bkt.s3.eu-central-1.amazonaws.com/"),
        ("b.kt", "eu-central-1", "https://s3.eu-central-1.amazonaws.com/b.kt/"),
        ("bkt", "cn-north-1", "https://bkt.s3.cn-north-1.amazonaws.com.cn/"),
    ],
)
def test_presigned_urls_name_the_region_and_use_signature_v4(
    run: Any, monkeypatch: pytest.MonkeyPatch, bucket: str, region: str | None, origin: str
) -> None:
    """By default the SDK uses version 2 in all older regions, and the global endpoint."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)

    async def main() -> str:
        store: Any = open_store(f"s3://{bucket}/run", StoreOptions(region=region))
        await store.open(is_read_only=True)
        try:
            return str(await store._reader.signed("a b"))
        finally:
            await store.close()

    url = run(main())
    assert url.startswith(f"{origin}run/a%20b?")
    assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in url


@given(
    st.sampled_from(PLACES),
    KEYS,
    KEYS,
    st.one_of(st.none(), TEXT),
    st.integers(1_767_225_600, 1_800_000_000),
    st.sampled_from([{}, {"x-id": "GetObject"}]),
    st.sampled_from([{}, {"x-amz-request-payer": "requester"}, {"x-amz-b": "c+/=", "x-amz-a": "requester"}]),
)
def test_presigned_urls_match_the_sdks(
    place: str,
    first: str,
    second: str,
    token: str | None,
    now: int,
    more: dict[str, str],
    headers: dict[str, str],
) -> None:
    def signed(key: str, credentials: Any, at: int) -> str:
        request = AWSRequest("GET", address(place, key, more), headers=dict(headers))
        moment = dt.datetime.fromtimestamp(at, dt.UTC)
        with mock.patch.object(botocore.auth, "get_current_datetime", return_value=moment):
            botocore.auth.S3SigV4QueryAuth(credentials, "s3", "eu-central-1", expires=3600).add_auth(request)
        return str(request.url)

    known = signed(first, ReadOnlyCredentials("OLD", "older", "gone"), 1_767_225_600)
    pattern = UrlTemplate.of(known, first, headers)
    assert pattern is not None
    assert UrlTemplate.of(known, first, {**headers, "x-amz-other": "1"}) is None
    credentials = ReadOnlyCredentials("AKID", "secret/+key", token)
    assert in_order(pattern.url(second, credentials, now + 0.5)) == in_order(signed(second, credentials, now))


V4 = "X-Amz-Algorithm=AWS4-HMAC-SHA256"
SCOPE = "X-Amz-Credential=A/20260101/eu/s3/aws4_request"
HOST = "X-Amz-SignedHeaders=host"


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("key", "AWSAccessKeyId=AK&Signature=x&Expires=1"),
        ("other", f"{V4}&{SCOPE}&{HOST}"),
        ("key", f"{V4}&{SCOPE.replace('/s3/', '/s3express/')}&{HOST}"),
        ("key", f"{V4}&{SCOPE}&{HOST}&X-Amz-S3session-Token=t"),
        ("key", f"{V4}&{SCOPE}&{HOST}%3Brange"),
        ("key", f"{V4.replace('HMAC', 'ECDSA-P256')}&{SCOPE.replace('eu/', '')}&{HOST}"),
    ],
    ids=["version 2", "another key", "S3 Express", "its session", "more headers", "version 4a"],
)
def test_other_presigned_urls_are_left_to_the_sdk(key: str, asked: str) -> None:
    assert UrlTemplate.of(f"https://s3/bucket/key?{V4}&{SCOPE}&{HOST}", "key") is not None
    assert UrlTemplate.of(f"https://s3/bucket/{key}?{asked}", "key") is None
