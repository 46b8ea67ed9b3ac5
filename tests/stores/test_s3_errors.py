"""How S3Store handles answers that a healthy server does not give, over real sockets."""

import asyncio
import traceback

import pytest

from ckpt_async.core.model import Checksum
from ckpt_async.errors import (
    FailureReason,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionFailedError,
    SourceError,
    StoreError,
)
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.interface import BytesBody, Create, Match
from tests.stores import documents
from tests.stores.bodies import ChangedBody, ReusingBody, crc, put
from tests.stores.peer import RESET, SILENCE, Peer, answer
from tests.stores.s3_calls import CALLS, MIB, connected
from tests.stores.s3_calls import credentials as given_credentials  # noqa: F401  a fixture


def tasks() -> set[asyncio.Task]:
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer(500, "InternalError"), FailureReason.TRANSIENT),
        (answer(503, "SlowDown"), FailureReason.THROTTLED),
        (answer(429), FailureReason.THROTTLED),
        (answer(403, "AccessDenied"), FailureReason.AUTH),
        (answer(403, "RequestTimeTooSkewed"), FailureReason.AUTH),
        (RESET, FailureReason.TRANSIENT),
    ],
    ids=["500", "503", "429", "403", "skew", "reset"],
)
def test_each_call_makes_one_attempt(run, call, reply, reason):
    """Retries are up to the engine; an SDK with retries of its own would multiply them."""

    async def body():
        peer = Peer(lambda _: reply)
        async with connected(peer) as store:
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
        assert raised.value.reason is reason
        # aiohttp itself repeats an idempotent request without a body once if no answer came.
        is_repeated = reply == RESET and call in (
            "get",
            "head",
            "list",
            "list_parts",
            "abort_multipart",
            "delete_if",
            "copy",
            "copy_part",
            "list_multiparts",
        )
        assert len(peer.requests) == (2 if is_repeated else 1)

    run(body())


HTML = b"<html><title>Please log in</title></html>"
ELSEWHERE = {"Location": "http://127.0.0.1:1/login"}


@pytest.mark.fault("F10")
@pytest.mark.parametrize(
    ("reply", "reason", "hint"),
    [
        (answer(503), FailureReason.THROTTLED, ""),
        (answer(502), FailureReason.TRANSIENT, ""),
        (answer(501, "NotImplemented"), FailureReason.OTHER, ""),
        (answer(400, "RequestTimeout"), FailureReason.TIMEOUT, ""),
        (answer(400, "IncompleteBody"), FailureReason.TRANSIENT, ""),
        (answer(400, "EntityTooLarge"), FailureReason.OTHER, ""),
        (answer(400, "BadDigest"), FailureReason.CHECKSUM, ""),
        (answer(400, "XAmzContentChecksumMismatch"), FailureReason.CHECKSUM, ""),
        (answer(400, "ExpiredToken"), FailureReason.AUTH, "expired"),
        (answer(401), FailureReason.AUTH, "lack permission for put_object"),
        (answer(403, "InvalidAccessKeyId"), FailureReason.AUTH, "access key"),
        (answer(403, "SignatureDoesNotMatch"), FailureReason.AUTH, "secret key"),
        (answer(403, "AccessDenied"), FailureReason.AUTH, "bucket/run/"),
        (answer(403, "RequestTimeTooSkewed"), FailureReason.AUTH, "Sat, 21 Nov 2026 04:00:00 GMT"),
        (answer(404, "NoSuchBucket"), FailureReason.NOT_FOUND, "no bucket bucket"),
        (answer(409, "OperationAborted"), FailureReason.TRANSIENT, ""),
        (answer(400, "AuthorizationHeaderMalformed"), FailureReason.OTHER, "region"),
        (answer(307, "TemporaryRedirect"), FailureReason.TRANSIENT, ""),
        (answer(302, headers=ELSEWHERE), FailureReason.TRANSIENT, "login page"),
        (answer(400, body=HTML), FailureReason.TRANSIENT, "login page"),
        (answer(404, body=HTML), FailureReason.TRANSIENT, "login page"),
        (answer(407, body=HTML), FailureReason.TRANSIENT, "login page"),
        (answer(413, body=HTML), FailureReason.OTHER, ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort", FailureReason.TIMEOUT, ""),
        (b"not HTTP at all\r\n\r\n", FailureReason.TRANSIENT, ""),
    ],
)
def test_refusals_are_classified(run, reply, reason, hint):
    async def body():
        read_timeout_s = 0.2 if reason is FailureReason.TIMEOUT else 20.0
        async with connected(Peer(lambda _: reply), read_timeout_s=read_timeout_s) as store:
            with pytest.raises(StoreError) as raised:
                await put(store, "a", b"hello")
        assert raised.value.reason is reason
        assert hint in raised.value.hint
        assert raised.value.key == "a"

    run(body())


@pytest.mark.parametrize(
    "reply",
    [
        answer(302, headers=ELSEWHERE, body=HTML),
        answer(307, "TemporaryRedirect"),
        answer(400, body=HTML),
        answer(407, body=HTML),
    ],
)
def test_somebody_else_who_answers_amid_a_run_fails_no_part(run, reply):
    """This happens without the SDK, and then in the SDK, which asks where the bucket is: the attempt is retryable."""
    replies = (
        [answer(200, headers={"ETag": '"e"'})] * 2 + [reply] * 2 + [answer(200, headers={"ETag": '"e"'})]
    )

    async def body():
        left = iter(replies)
        peer = Peer(
            lambda request: (
                next(left) if request.method == "PUT" else reply.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            )
        )
        async with connected(peer) as store:
            for number in range(len(replies)):
                sending = store.put_part("a", "u", 1, BytesBody(b"hello"), crc(b"hello"))
                if number in (2, 3):
                    with pytest.raises(StoreError) as raised:
                        await sending
                    assert raised.value.reason is FailureReason.TRANSIENT
                else:
                    await sending
        assert len(peer.requests) <= len(replies) + 2

    run(body())


@pytest.mark.parametrize(
    ("condition", "status", "code", "error"),
    [
        (Create(), 412, "PreconditionFailed", PreconditionFailedError),
        (Create(), 409, "ConditionalRequestConflict", PreconditionFailedError),
        (Match('"e"'), 412, "PreconditionFailed", PreconditionFailedError),
        (Match('"e"'), 404, "NoSuchKey", PreconditionFailedError),
        (Match('"e"'), 404, "NoSuchBucket", StoreError),
        (Create(), 404, "NoSuchKey", ObjectNotFoundError),
        (None, 404, "NoSuchKey", ObjectNotFoundError),
    ],
)
def test_a_failed_condition_is_a_result_not_an_error(run, condition, status, code, error):
    async def body():
        async with connected(Peer(lambda _: answer(status, code))) as store:
            with pytest.raises(StoreError) as raised:
                await put(store, "a", b"1", condition=condition)
        assert type(raised.value) is error

    run(body())


@pytest.mark.parametrize(
    ("call", "status", "code", "hint"),
    [
        ("complete_multipart", 500, "InternalError", "aborted"),
        ("list", 400, "InvalidArgument", "session token"),
    ],
)
def test_what_ceph_answers_is_explained(run, call, status, code, hint):
    async def body():
        async with connected(Peer(lambda _: answer(status, code))) as store:
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
        assert hint in raised.value.hint

    run(body())


@pytest.mark.fault("F150")
@pytest.mark.parametrize(("etag", "is_deleted"), [('"e"', True), ('"f"', False)])
def test_an_ignored_condition_deletes_nothing_else(run, etag, is_deleted):
    """Ceph and LocalStack delete whatever is there."""

    async def body():
        peer = Peer(
            lambda request: answer(204 if request.method == "DELETE" else 200, headers={"ETag": etag})
        )
        async with connected(peer) as store:
            if is_deleted:
                await store.delete_if("a", '"e"')
            else:
                with pytest.raises(PreconditionFailedError):
                    await store.delete_if("a", '"e"')
        assert any(each.method == "DELETE" for each in peer.requests) is is_deleted

    run(body())


@pytest.mark.fault("F153")
@pytest.mark.parametrize(("version", "is_kept"), [("3HL4kqtJlcpXroDTDm", True), ("null", False)])
def test_a_bucket_that_keeps_versions_is_told(run, caplog, version, is_kept):
    """What is deleted there stays, and is paid for."""

    async def body():
        headers = {"ETag": '"e"', "x-amz-version-id": version}
        async with Peer(lambda _: answer(200, headers=headers)).serve() as url:
            store = open_store("s3://versioned/run", StoreOptions(endpoint_url=url))
            await store.open()
            found = store.capabilities
            await store.close()
        assert any("keeps versions" in remark for remark in found.remarks) is is_kept
        assert caplog.text.count("keeps versions") == is_kept

    run(body())


@pytest.mark.parametrize("code", ["QuotaExceeded", "XMinioStorageFull"])
def test_a_full_store_is_not_blamed_on_the_credentials(run, code):
    async def body():
        async with connected(Peer(lambda _: answer(403, code))) as store:
            with pytest.raises(StoreError) as raised:
                await put(store, "a", b"1")
        assert raised.value.reason is FailureReason.DISK
        assert "quota" in raised.value.hint

    run(body())


@pytest.mark.parametrize(
    ("call", "status", "code", "error", "reason"),
    [
        ("head", 404, "", ObjectNotFoundError, FailureReason.NOT_FOUND),
        ("head", 403, "", StoreError, FailureReason.AUTH),
        ("head", 400, "", StoreError, FailureReason.AUTH),
        ("list_parts", 404, "NoSuchUpload", ObjectNotFoundError, FailureReason.NOT_FOUND),
        ("list", 404, "NoSuchBucket", StoreError, FailureReason.NOT_FOUND),
        ("complete_multipart", 200, "InternalError", StoreError, FailureReason.TRANSIENT),
        ("complete_multipart", 200, "SlowDown", StoreError, FailureReason.THROTTLED),
        ("complete_multipart", 200, "BadDigest", IntegrityError, FailureReason.CHECKSUM),
        ("complete_multipart", 400, "InvalidPart", IntegrityError, FailureReason.CHECKSUM),
    ],
)
def test_error_responses_of_other_calls(run, call, status, code, error, reason):
    """A 200 that contains an error is an error (S3 API reference, CompleteMultipartUpload)."""

    async def body():
        async with connected(Peer(lambda _: answer(status, code))) as store:
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
        assert (type(raised.value), raised.value.reason) == (error, reason)

    run(body())


@pytest.mark.parametrize("reply", [b"", b"<CompleteMultipartUploadResult/>"])
def test_completion_without_a_result_is_rejected(run, reply):
    async def body():
        async with connected(Peer(lambda _: answer(200, body=reply))) as store:
            with pytest.raises(StoreError) as raised:
                await CALLS["complete_multipart"](store)
        assert raised.value.reason is FailureReason.TRANSIENT

    run(body())


@pytest.mark.parametrize("call", ["put", "get", "get_range", "head", "create_multipart", "put_part"])
def test_an_empty_success_is_an_error(run, call):
    """An intermediary may answer 200 to everything."""

    async def body():
        async with connected(Peer(lambda _: answer(200))) as store:
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
        assert raised.value.reason is FailureReason.TRANSIENT

    run(body())


WHOLE = answer(200, headers={"ETag": "e"}, body=b"0123456789")
NOT_DELETED = documents.deleted(extra=documents.item("Error", Key="run/a", Code="AccessDenied"))


def list_sub(store):
    return store.list("sub/")


@pytest.mark.parametrize(
    ("reply", "call", "key"),
    [
        *((answer(200), CALLS[call], "a") for call in ("put", "get", "get_range", "head", "put_part")),
        (answer(403), CALLS["head"], "a"),
        (RESET, CALLS["head"], "a"),
        (WHOLE, CALLS["get"], "a"),
        (WHOLE, lambda store: store.get_range("a", 2, 3, lambda _: None), "a"),
        (answer(200, body=documents.objects(prefix="run/sub/", IsTruncated=True)), list_sub, "sub/"),
        (answer(200), list_sub, "sub/"),
        (answer(200), CALLS["list"], ""),
        (answer(200, body=documents.parts(IsTruncated=True)), CALLS["list_parts"], "a"),
        (answer(200, body=NOT_DELETED), CALLS["delete"], "a"),
    ],
)
def test_an_error_names_the_object_by_its_full_url(run, reply, call, key):
    """The message is for people; the error's `key` is the requested one."""

    async def body():
        async with connected(Peer(lambda _: reply)) as store:
            with pytest.raises(StoreError, match=f"'s3://bucket/run/{key}': ") as raised:
                await call(store)
        assert raised.value.key == key

    run(body())


@pytest.mark.parametrize(("found", "is_ours"), [(crc(b"hello"), True), (crc(b"other"), False)])
def test_completing_an_unknown_upload_looks_up_the_object(run, found, is_ours):
    """S3 forgets an upload once it is completed, so a lost reply must not look like a lost upload."""

    def respond(request):
        if request.method == "POST":
            return answer(404, "NoSuchUpload")
        size = {"Content-Length": "5", "ETag": '"e"', "x-amz-checksum-crc64nvme": found.value}
        return answer(200, headers=size)

    async def body():
        async with connected(Peer(respond)) as store:
            if is_ours:
                assert (await CALLS["complete_multipart"](store)).checksum == found
            else:
                with pytest.raises(ObjectNotFoundError):
                    await CALLS["complete_multipart"](store)

    run(body())


def test_a_composite_checksum_is_ignored(run):
    """A checksum of the form "…-N" says nothing about the whole object."""
    for headers in (
        {"x-amz-checksum-crc32c": "mnG7TA==-2"},
        {"x-amz-checksum-crc32c": "mnG7TA==", "x-amz-checksum-type": "COMPOSITE"},
    ):

        async def body(headers=headers):
            reply = answer(200, headers={"ETag": '"e"', "Content-Length": "5", **headers})
            async with connected(Peer(lambda _: reply)) as store:
                assert (await store.head("a")).checksum is None

        run(body())


def test_requests_carry_no_needless_headers(run):
    """The checksum is sent as a header, the body unsigned and unencoded, and nothing waits for 100 Continue."""

    async def body():
        peer = Peer(lambda _: answer(200, headers={"ETag": '"e"'}))
        async with connected(peer, put_args={"StorageClass": "STANDARD_IA"}) as store:
            info = await store.put("a b", ReusingBody(b"x" * MIB, 1 << 16), Checksum("crc32c", "AAAAAA=="))
        (request,) = peer.requests
        assert info.checksum is None
        assert request.path == "/bucket/run/a%20b"
        assert request.body == b"x" * MIB
        assert request.headers["content-length"] == str(MIB)
        assert request.headers["x-amz-checksum-crc32c"] == "AAAAAA=="
        assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert request.headers["x-amz-storage-class"] == "STANDARD_IA"
        assert {"expect", "transfer-encoding", "content-encoding", "x-amz-trailer"}.isdisjoint(
            request.headers
        )

    run(body())


def test_deletion_reports_the_error_of_each_key(run):
    """DeleteObjects answers 200 and reports failures in the body."""
    refused = documents.item("Error", Key="run/b", Code="AccessDenied")
    reply = answer(200, body=documents.deleted("run/a", extra=refused))

    async def body():
        peer = Peer(lambda _: reply)
        async with connected(peer) as store:
            with pytest.raises(StoreError) as raised:
                await store.delete(["a", "b"])
        assert (raised.value.reason, raised.value.key) == (FailureReason.AUTH, "b")
        assert "content-md5" in peer.requests[0].headers

    run(body())


@pytest.mark.parametrize(("first", "num_pages"), [(("a", "c"), 1), (("c", "a"), 2)])
def test_a_listing_stops_when_the_caller_has_enough(run, first, num_pages):
    """If a listing is not in key order (directory buckets), nothing is known before its end."""

    def page(request):
        is_first = "continuation-token" not in request.path
        keys_ = first if is_first else ("d", "b")
        token = "t" if is_first else None
        page = documents.objects(
            *(f"run/{key}" for key in keys_), IsTruncated=is_first, NextContinuationToken=token
        )
        return answer(200, body=page)

    async def body():
        asked = []
        peer = Peer(page)
        async with connected(peer) as store:
            listing = await store.list(
                "", enough=lambda objects: not asked.append([each.key for each in objects])
            )
        assert len(peer.requests) == num_pages
        assert asked == ([["a", "c"]] if num_pages == 1 else [])
        assert [each.key for each in listing.objects] == sorted(
            [*first, *(("d", "b") if num_pages == 2 else ())]
        )
        assert listing.is_whole == (num_pages == 2)
        async with connected(Peer(page)) as store:
            assert (await store.list("", enough=lambda _: False)).is_whole

    run(body())


# --- connections -------------------------------------------------------------------------------------------


@pytest.mark.fault("F8")
@pytest.mark.parametrize("call", CALLS)
def test_a_silent_server_and_cancellation_leave_no_task(run, call):
    """The engine enforces every deadline by cancellation (rule R14)."""

    async def body():
        peer = Peer(lambda _: SILENCE)
        async with connected(peer) as store:
            before = tasks()
            calling = asyncio.ensure_future(CALLS[call](store))
            await peer.arrived.wait()
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await peer.all_closed.wait()
            assert {task.get_coro().__qualname__ for task in tasks() - before} <= {
                "Peer.serve.<locals>.accept"
            }

    run(body())


def test_cancelling_in_the_middle_of_a_body(run):
    """Even if the peer stops reading, nothing may read the body after the call has ended."""
    loop = began = None

    class Watched(ReusingBody):
        is_closed = False

        def send(self, writer):
            loop.call_soon_threadsafe(began.set)
            try:
                super().send(writer)
            finally:  # like a real read, it takes time to end
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
                self.is_closed = True

    async def body():
        nonlocal loop, began
        loop, began = asyncio.get_running_loop(), asyncio.Event()
        peer = Peer(lambda _: SILENCE)

        async def read_nothing(reader, writer):
            peer.arrived.set()
            await stop.wait()
            writer.transport.abort()

        stop = asyncio.Event()
        server = await asyncio.start_server(read_nothing, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        store = open_store("s3://bucket/run", StoreOptions(endpoint_url=url))
        await store._session.open(is_read_only=True)
        watched = Watched(bytes(64 * MIB), MIB)
        calling = asyncio.ensure_future(store.put("a", watched, crc(b"")))
        await began.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert watched.is_closed
        stop.set()
        await store.close()
        server.close()
        await server.wait_closed()

    run(body())


def test_an_error_of_the_source_closes_the_connection(run):
    """After a half-sent request, whatever is sent next on the connection would be taken for its body."""

    async def body():
        peer = Peer(lambda _: answer(200, headers={"ETag": '"e"'}))
        async with connected(peer) as store:
            broken = ChangedBody(4 * MIB, 2 * MIB)
            with pytest.raises(SourceError) as raised:
                await store.put("a", broken, crc(b""))
            assert raised.value is broken.error
            await peer.all_closed.wait()
            await put(store, "a", b"1")
        assert peer.num_connections == 2

    run(body())


def test_a_response_before_the_whole_body_is_not_a_success(run):
    """The 200 comes from something that did not read what we sent."""

    async def body():
        peer = Peer(lambda _: answer(200, headers={"ETag": '"e"'}), stop_after=MIB)
        async with connected(peer) as store:
            with pytest.raises(StoreError) as raised:
                await store.put("a", ReusingBody(bytes(64 * MIB), MIB), crc(b""))
            assert raised.value.reason is FailureReason.TRANSIENT
            assert "'s3://bucket/run/a'" in str(raised.value)

    run(body())


def test_a_reset_in_the_middle_of_a_body_is_an_error(run):
    async def body():
        peer = Peer(lambda _: RESET, stop_after=MIB)
        async with connected(peer) as store:
            with pytest.raises(StoreError) as raised:
                await store.put("a", ReusingBody(bytes(64 * MIB), MIB), crc(b""))
        assert raised.value.reason is FailureReason.TRANSIENT
        assert len(peer.requests) == 1

    run(body())


def test_a_reset_of_a_reused_connection_is_not_retried_here(run):
    """aiohttp itself resends an idempotent request when a kept-alive connection turns out to be dead.

    For a conditional PUT the second answer would be misleading (rule R13).
    """

    async def body():
        replies = iter([answer(200, headers={"ETag": '"e"'}), RESET, answer(412, "PreconditionFailed")])
        peer = Peer(lambda _: next(replies))
        async with connected(peer) as store:
            await put(store, "a", b"1")
            with pytest.raises(StoreError) as raised:
                await put(store, "b", b"1", condition=Create())
        assert raised.value.reason is FailureReason.TRANSIENT
        assert [request.path for request in peer.requests if request.body] == [
            "/bucket/run/a",
            "/bucket/run/b",
        ]

    run(body())


def test_a_truncated_download_is_an_error(run):
    head = b"HTTP/1.1 206 X\r\nETag: e\r\nContent-Length: 5\r\nContent-Range: bytes 0-4/5\r\n\r\nhe"

    async def body():
        async with connected(Peer(lambda _: head), read_timeout_s=0.2) as store:
            with pytest.raises(StoreError) as raised:
                await store.get_range("a", 0, 5, lambda _: None)
        assert raised.value.reason is FailureReason.TIMEOUT

    run(body())


def test_a_server_that_ignores_ranges_is_rejected(run):
    """The first bytes of the object are not the requested ones."""

    async def body():
        async with connected(Peer(lambda _: answer(200, headers={"ETag": "e"}, body=b"hello"))) as store:
            with pytest.raises(StoreError):
                await store.get_range("a", 2, 3, lambda _: None)
            received = bytearray()
            await store.get_range("a", 0, 5, received.extend)
            assert received == b"hello"

    run(body())


def test_get_compares_the_bytes_with_the_stores_checksum(run):
    async def body():
        headers = {"ETag": "e", "x-amz-checksum-crc64nvme": crc(b"other").value}
        async with connected(Peer(lambda _: answer(200, headers=headers, body=b"hello"))) as store:
            with pytest.raises(IntegrityError):
                await store.get("a", max_size_bytes=9)

    run(body())


# --- open --------------------------------------------------------------------------------------------------


async def open_failure(url: str, **options) -> StoreError:
    store = open_store(url, StoreOptions(**options))
    with pytest.raises(StoreError) as raised:
        await store.open()
    await store.close()
    return raised.value


@pytest.mark.fault("O17")
@pytest.mark.parametrize("answers", [True, False])
def test_the_first_error_message_is_short(run, answers):
    """The probe's keys are as long as possible, but messages about them must not be."""

    async def body():
        async with Peer(lambda _: answer(404, "NoSuchBucket")).serve() as url:
            error = await open_failure(
                "s3://bucket/run", endpoint_url=url if answers else "http://127.0.0.1:1"
            )
        assert "s3://bucket/run/.ckpt-async/probe/" in str(error)
        assert len(str(error)) < 300
        assert "0" * 16 not in str(error)
        assert "there is no bucket bucket" in str(error) or "reachable from here" in str(error)

    run(body())


@pytest.mark.parametrize(
    ("name", "value", "reason", "hint"),
    [
        ("AWS_ACCESS_KEY_ID", "wrong", FailureReason.AUTH, "access key"),
        ("AWS_SECRET_ACCESS_KEY", "wrong", FailureReason.AUTH, "secret key"),
    ],
)
def test_wrong_credentials_are_reported_at_open(run, s3_server, monkeypatch, name, value, reason, hint):
    for each, known in s3_server.environment().items():
        monkeypatch.setenv(each, known)
    monkeypatch.setenv(name, value)
    error = run(open_failure(f"s3://{s3_server.bucket}/run"))
    assert error.reason is reason
    assert hint in error.hint


def test_a_missing_bucket_is_reported_at_open(run, s3_url):
    error = run(open_failure("s3://no-such-bucket/run"))
    assert error.reason is FailureReason.NOT_FOUND
    assert "no-such-bucket" in error.hint


def test_missing_credentials_are_reported_at_open(run, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = run(open_failure("s3://bucket/run", endpoint_url="http://127.0.0.1:9"))
    assert error.reason is FailureReason.AUTH
    assert "credentials" in error.hint


def test_a_missing_profile_is_reported_at_open(run):
    error = run(open_failure("s3://bucket/run", profile="nobody", endpoint_url="http://127.0.0.1:9"))
    assert error.reason is FailureReason.AUTH


def test_an_unreachable_endpoint_is_reported_at_open(run):
    error = run(open_failure("s3://bucket/run", endpoint_url="http://127.0.0.1:9"))
    assert error.reason is FailureReason.TRANSIENT
    assert "http://127.0.0.1:9" in error.hint


def test_a_silent_endpoint_is_reported_at_open(run):
    async def body():
        async with Peer(lambda _: SILENCE).serve() as url:
            return await open_failure(
                "s3://bucket/run", endpoint_url=url, connect_timeout_s=0.1, read_timeout_s=0.1
            )

    assert run(body()).reason is FailureReason.TIMEOUT


@pytest.mark.fault("F32", "F150")
@pytest.mark.parametrize(
    ("kept", "current", "checked", "expected"),
    [
        ("crc64nvme", None, (), (False, "crc64nvme", False)),
        ("crc32c", None, (), (False, "crc32c", False)),
        ("crc32c", '"e"', ("crc32c",), (True, "crc32c", False)),
        ("crc64nvme", '"e"', ("crc64nvme", "crc32c"), (True, "crc64nvme", False)),
        ("sha1", "e", (), (True, "crc64nvme", True)),  # Ceph
        ("sha1", "no ETag is ever right", (), (False, "crc64nvme", True)),
    ],
)
def test_the_probe_detects_what_the_store_enforces(run, kept, current, checked, expected):
    """A store that accepts every PUT must not be trusted with create-once; `current` is the If-Match that it takes."""

    def respond(request):
        if request.method != "PUT":
            checksum = "AAAAAAAAAAA=" if kept == "crc64nvme" else "AAAAAA=="
            return answer(200, headers={"ETag": '"e"', f"x-amz-checksum-{kept}": checksum})
        if current and request.headers.get("if-none-match") == "*":
            return answer(412, "PreconditionFailed")
        if current and request.headers.get("if-match", current) != current:
            return answer(412, "PreconditionFailed")
        for name in checked:
            value = request.headers.get(f"x-amz-checksum-{name}")
            from ckpt_async.stores.checksums import checksum_of

            if value is not None and checksum_of(request.body, name).value != value:
                return answer(400, "BadDigest")
        return answer(200, headers={"ETag": '"e"'})

    async def body():
        peer = Peer(respond)
        async with peer.serve() as url:
            store = open_store("s3://bucket/run", StoreOptions(endpoint_url=url))
            await store.open()
            found = store.capabilities
            await store.close()
        assert (found.conditional_put, found.checksum_algorithm, found.reads_back) == expected
        assert all("/run/.ckpt-async/probe/" in each.path for each in peer.requests if each.method != "POST")
        # The answer does not say what was deleted. Nothing depends on it, so it is asked once.
        [deleting] = [each for each in peer.requests if each.method == "POST"]
        assert deleting.body.count(b"<Key>run/.ckpt-async/probe/") == 3

    run(body())


def test_a_store_that_takes_no_checksum_is_told_by_name(run):
    """Backblaze B2 has refused checksums like this."""

    async def body():
        said = "Unsupported header 'x-amz-checksum-crc32c' received for this API call."
        refused = f"<Error><Code>InvalidArgument</Code><Message>{said}</Message></Error>".encode()
        async with Peer(lambda _: answer(400, body=refused)).serve() as url:
            with pytest.raises(StoreError, match="Unsupported header") as raised:
                await open_store("s3://bucket/run", StoreOptions(endpoint_url=url)).open()
            assert "neither CRC64NVME nor CRC32C" in str(raised.value)
            assert raised.value.reason is FailureReason.OTHER

    run(body())


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_errors_name_the_proxy_but_not_its_password(run, monkeypatch, scheme):
    """The proxy itself may be unreachable, or be what refuses."""

    async def body() -> tuple[str, str]:
        peer = Peer(lambda _: answer(407))
        async with peer.serve() as url:
            proxy = url.replace("//", "//me:secret@")
            monkeypatch.setenv(f"{scheme.upper()}_PROXY", proxy)
            monkeypatch.delenv("NO_PROXY", raising=False)
            monkeypatch.delenv("no_proxy", raising=False)
            store = open_store("s3://bucket/run", StoreOptions(endpoint_url=f"{scheme}://store.example"))
            await store._session.open(is_read_only=True)
            with pytest.raises(StoreError) as raised:
                await store.head("a")
            await store.close()
            assert raised.value.reason is FailureReason.TRANSIENT
            assert "407" in str(raised.value)
            return url, "".join(traceback.format_exception(raised.value))

    url, message = run(body())
    assert f"the proxy {url.removeprefix('http://')}" in message
    assert "secret" not in message
