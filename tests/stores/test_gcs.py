"""How GcsStore handles answers that a healthy store does not give, and how it authenticates.

The tests use real sockets and their own peer, never Google.
"""

import contextlib
import json
import random
import sys
import time
import tracemalloc

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ckpt_async import Uploader, cli
from ckpt_async.core.model import RemoteAddress
from ckpt_async.errors import (
    FailureReason,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionFailedError,
    SettingsError,
    StoreError,
)
from ckpt_async.stores import StoreOptions, address_of, open_store, options_of
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.http.failures import SOMEBODY_ELSE
from ckpt_async.stores.interface import BytesBody, Create, Match, SmallGet, SmallPut, StoredPart
from tests.stores.bodies import put
from tests.stores.gcs_peer import Answer, GcsPeer, Request, as_json, json_error, xml_error

MIB = 1 << 20
BIG = bytes(5 * MIB)


def crc(data: bytes):
    return checksum_of(data, "crc32c")


@contextlib.asynccontextmanager
async def opened(peer: GcsPeer, **options):
    store = open_store(f"gs://{peer.bucket}/run", StoreOptions(endpoint_url=peer.url, **options))
    await store.open()
    peer.requests.clear()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def peer():
    with GcsPeer() as peer:
        yield peer


PART = StoredPart(1, 5, '"e"', crc(b"hello"))
CALLS = {
    "put": lambda store: put(store, "a", b"hello"),
    "put_many": lambda store: store.put_many([SmallPut("a", b"hello", crc(b"hello"))], lambda _: None),
    "get": lambda store: store.get("a", max_size_bytes=9),
    "get_range": lambda store: store.get_range("a", 0, 5, lambda _: None),
    "get_many": lambda store: store.get_many([SmallGet("a", 5)], lambda *_: None),
    "head": lambda store: store.head("a"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete(["a"]),
    "delete_if": lambda store: store.delete_if("a", "1"),
    "copy": lambda store: store.copy("a", "1", "b"),
    "create_multipart": lambda store: store.create_multipart("a"),
    "put_part": lambda store: store.put_part("a", "u", 1, BytesBody(b"hello"), crc(b"hello")),
    "list_parts": lambda store: store.list_parts("a", "u"),
    "complete_multipart": lambda store: store.complete_multipart("a", "u", [PART], crc(b"hello"), 5),
    "abort_multipart": lambda store: store.abort_multipart("a", "u"),
    "list_multiparts": lambda store: store.list_multiparts(""),
}
# aiohttp repeats an idempotent request once when its connection breaks before an answer.
REPEATED = {"get", "head", "list", "delete", "delete_if", "list_parts", "abort_multipart", "list_multiparts"}
CUT = Answer(200, sent_bytes=0)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (json_error(500, "backendError", "Backend Error"), FailureReason.TRANSIENT),
        (xml_error(503, "SlowDown", "because"), FailureReason.THROTTLED),
        (Answer(429), FailureReason.THROTTLED),
        (json_error(403, "rateLimitExceeded", "because"), FailureReason.THROTTLED),
        (json_error(403, "forbidden", "because"), FailureReason.AUTH),
        (xml_error(401, "AuthenticationRequired", "because"), FailureReason.AUTH),
        (Answer(408), FailureReason.TIMEOUT),
        (Answer(302, b"", [("Location", "http://127.0.0.1:1/")]), FailureReason.TRANSIENT),
        (Answer(400, b"<html>Bad Request</html>"), FailureReason.TRANSIENT),
        (Answer(407, b"<html>Log in</html>"), FailureReason.TRANSIENT),
        (Answer(404, b"<html>Not Found</html>"), FailureReason.TRANSIENT),
        (CUT, FailureReason.TRANSIENT),
    ],
    ids=[
        "500",
        "503",
        "429",
        "403-rate",
        "403",
        "401",
        "408",
        "302",
        "400-foreign",
        "407",
        "404-foreign",
        "cut",
    ],
)
def test_each_call_makes_one_attempt_and_says_why_it_failed(run, peer, call, reply, reason):
    async def body():
        async with opened(peer) as store:
            peer.meddle = lambda *_: reply
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
        assert raised.value.reason is reason, raised.value
        num_attempts = 2 if reply is CUT and call in REPEATED else 1
        # One more request distinguishes a missing object from somebody else's 404.
        num_attempts += reply.status == 404 and call in ("get", "get_range", "get_many")
        assert len(peer.requests) == num_attempts

    run(body())


def test_a_login_page_is_not_the_stores_refusal(run, peer):
    """The credentials were blamed for what a proxy forbids."""

    async def body():
        async with opened(peer) as store:
            peer.meddle = lambda *_: Answer(403, b"<html>Log in</html>")
            for call in CALLS.values():
                with pytest.raises(StoreError, match="does not look like one of a store") as raised:
                    await call(store)
                assert (raised.value.reason, raised.value.hint) == (FailureReason.AUTH, SOMEBODY_ELSE)

    run(body())


FOREIGN = [
    b"",
    b"<html>Please log in</html>",
    b"{}",
    b"[]",
    b"null",
    b'{"kind": "storage#bucket"}',
    b"<Error><Code>NoSuchKey</Code></Error>",
    b'{"kind": "storage#objects", "items": {}}',
    b'{"kind": "storage#object", "name": "run/other", "size": "5", "generation": "7"}',
]


@pytest.mark.parametrize(
    "call", sorted(set(CALLS) - {"delete", "delete_if", "abort_multipart", "put_part", "get_many"})
)
@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_answer_is_not_read_as_the_stores(run, peer, call, content):
    """Proxies and login pages also answer 200, which does not mean that an object exists or was stored."""

    async def body():
        async with opened(peer) as store:
            peer.meddle = lambda *_: Answer(200, content, [("Content-Type", "text/html")])
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
        # The answer to a GET of the bytes is refused for what it lacks, or for not being the requested range.
        assert raised.value.reason in (FailureReason.TRANSIENT, FailureReason.OTHER)

    run(body())


def test_a_listing_truncated_at_any_byte_is_rejected(run, peer):
    async def body():
        async with opened(peer) as store:
            for number in range(3):
                await put(store, f"a/{number}", b"x")
            path = f"/storage/v1/b/{peer.bucket}/o"
            whole = peer.serve(Request("GET", path, path, {"prefix": "run/a/"}, {}, b""))
            for size in range(0, len(whole.body), 7):
                peer.meddle = lambda *_, size=size: Answer(200, whole.body[:size], whole.headers)
                with pytest.raises(StoreError):
                    await store.list("a/")
            # The same goes for an answer that the connection cuts off.
            for size in (0, 10, 200, len(whole.body)):
                peer.meddle = lambda *_, size=size: Answer(200, whole.body, whole.headers, sent_bytes=size)
                with pytest.raises(StoreError):
                    await store.list("a/")

    run(body())


@pytest.mark.parametrize("what", ["no token to continue", "a cache", "another prefix", "twice"])
def test_a_listing_that_cannot_be_right_is_rejected(run, peer, what):
    item = {"name": "run/a", "size": "1", "generation": "1", "updated": "2026-11-22T12:00:00Z"}
    listing: dict[str, object] = {"kind": "storage#objects", "items": [item]}
    headers = []
    match what:
        case "no token to continue":
            listing["nextPageToken"] = "x"  # the same token again and again
            listing["items"] = []
        case "a cache":
            headers = [("Age", "3")]
        case "another prefix":
            item["name"] = "other/a"
        case _:
            listing["items"] = [item, item]

    async def body():
        async with opened(peer) as store:
            answer = as_json(200, listing)
            peer.meddle = lambda *_: Answer(200, answer.body, answer.headers + headers)
            with pytest.raises(StoreError):
                await store.list("")

    run(body())


# --- bytes -------------------------------------------------------------------------------------------------


def test_a_byte_that_changes_on_the_way_is_refused_by_the_store(run, peer):
    def flip(request, serve):
        if request.is_upload or request.is_part:
            at = request.body.index(b"hello")
            request.body = request.body[:at] + b"jello" + request.body[at + 5 :]
        return serve()

    async def body():
        async with opened(peer) as store:
            upload_id = await store.create_multipart("a")
            peer.meddle = flip
            for call in (CALLS["put"](store), CALLS["put_many"](store)):
                with pytest.raises(IntegrityError):
                    await call
            with pytest.raises(IntegrityError):
                await store.put_part("a", upload_id, 1, BytesBody(b"hello"), crc(b"hello"))
            assert not await store.list_parts("a", upload_id)
        assert not peer.objects

    run(body())


@pytest.mark.parametrize("call", ["put", "put_many"])
def test_an_object_with_other_bytes_is_taken_back(run, peer, call):
    """An emulator that compares nothing stores them, but its answer has the checksum of what it holds."""

    def spoil(request, serve):
        if request.is_upload:
            request.body = request.body.replace(crc(b"hello").value.encode(), crc(b"jello").value.encode())
            request.body = request.body.replace(b"hello", b"jello")
        return serve()

    async def body():
        async with opened(peer) as store:
            peer.meddle = spoil
            with pytest.raises(IntegrityError) as raised:
                await CALLS[call](store)
        assert raised.value.key == "a"
        assert not peer.objects

    run(body())


@pytest.mark.parametrize("is_last_lost", [False, True])
def test_a_completed_object_with_other_bytes_is_taken_back(run, peer, is_last_lost):
    """Completing takes no checksum, so what the store then holds is checked afterwards."""

    def spoil(request, serve):
        answer = serve()
        if request.method == "POST" and "uploadId" in request.query:
            peer.put("run/a", b"other")
            if is_last_lost:
                answer.sent_bytes = 0
        return answer

    async def body():
        async with opened(peer) as store:
            upload_id = await store.create_multipart("a")
            part = await store.put_part("a", upload_id, 1, BytesBody(b"hello"), crc(b"hello"))
            peer.meddle = spoil
            with pytest.raises(StoreError):
                await store.complete_multipart("a", upload_id, [part], crc(b"hello"), 5)
            peer.meddle = lambda _, serve: serve()
            if is_last_lost:
                # On a retry the upload is gone, and the object is not ours.
                with pytest.raises(ObjectNotFoundError):
                    await store.complete_multipart("a", upload_id, [part], crc(b"hello"), 5)
            else:
                assert not peer.objects

    run(body())


def test_completing_is_recognised_after_a_lost_reply(run, peer):
    def lose(request, serve):
        answer = serve()
        answer.sent_bytes = 0
        return answer

    async def body():
        async with opened(peer) as store:
            upload_id = await store.create_multipart("a")
            part = await store.put_part("a", upload_id, 1, BytesBody(b"hello"), crc(b"hello"))
            peer.meddle = lose
            with pytest.raises(StoreError) as raised:
                await store.complete_multipart("a", upload_id, [part], crc(b"hello"), 5)
            assert raised.value.reason is FailureReason.TRANSIENT
            peer.meddle = lambda _, serve: serve()
            info = await store.complete_multipart("a", upload_id, [part], crc(b"hello"), 5)
            assert (info.size_bytes, info.checksum) == (5, crc(b"hello"))

    run(body())


def test_a_byte_that_changes_on_the_way_back_is_found(run, peer):
    def flip(request, serve):
        answer = serve()
        return Answer(answer.status, answer.body.replace(b"hello", b"jello"), answer.headers)

    async def body():
        async with opened(peer) as store:
            await put(store, "a", b"hello")
            peer.meddle = flip
            with pytest.raises(IntegrityError):
                await store.get("a", max_size_bytes=5)

    run(body())


def test_an_object_of_undeclared_size_is_read_within_its_limit(run, peer):
    """A proxy that sends chunks may go on forever."""
    much = bytes(50 * MIB)

    def endless(request, serve):
        serve()
        return Answer(200, memoryview(much), declares_size=False)

    async def body():
        async with opened(peer) as store:
            await put(store, "a", b"hello")
            peer.meddle = endless
            tracemalloc.start()
            try:
                with pytest.raises(StoreError):
                    await store.get("a", max_size_bytes=5)
                assert tracemalloc.get_traced_memory()[1] < 10 * MIB
            finally:
                tracemalloc.stop()

    run(body())


@pytest.mark.parametrize("size", [0, 40, 300, 400])
def test_a_truncated_body_is_an_error(run, peer, size):
    def cut(request, serve):
        answer = serve()
        answer.sent_bytes = size
        return answer

    async def body():
        data = random.Random(1).randbytes(MIB)
        async with opened(peer) as store:
            await put(store, "a", data)
            peer.meddle = cut
            received = bytearray()
            for call in (
                store.get("a", max_size_bytes=MIB),
                store.get_range("a", 0, MIB, received.extend),
                store.get_many([SmallGet("a", MIB)], lambda *_: pytest.fail("half of it")),
            ):
                with pytest.raises(StoreError) as raised:
                    await call
                assert raised.value.reason is FailureReason.TRANSIENT
        assert data.startswith(received)
        assert len(received) < MIB

    run(body())


@pytest.mark.parametrize("call", CALLS)
def test_a_silent_store_is_not_waited_for(run, peer, call):
    async def body():
        async with opened(peer, read_timeout_s=0.3) as store:
            peer.meddle = lambda *_: Answer(200, is_silent=True)
            started = time.monotonic()
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
            assert raised.value.reason is FailureReason.TIMEOUT
            assert 0.3 <= time.monotonic() - started < 10

    run(body())


# --- conditions --------------------------------------------------------------------------------------------


def test_the_loser_of_a_lost_reply_is_refused_and_finds_its_own_bytes(run, peer):
    """`protocol.cas` decides what this means, so the store must not hide it."""

    def lose(request, serve):
        answer = serve()
        answer.sent_bytes = 0
        return answer

    async def body():
        async with opened(peer) as store:
            peer.meddle = lose
            with pytest.raises(StoreError) as raised:
                await put(store, "a", b"mine", condition=Create())
            assert raised.value.reason is FailureReason.TRANSIENT
            peer.meddle = lambda _, serve: serve()
            with pytest.raises(PreconditionFailedError):
                await put(store, "a", b"mine", condition=Create())
            data, info = await store.get("a", max_size_bytes=9)
            assert data == b"mine"
            peer.meddle = lose
            with pytest.raises(StoreError):
                await put(store, "a", b"mine 2", condition=Match(info.etag))
            peer.meddle = lambda _, serve: serve()
            with pytest.raises(PreconditionFailedError):
                await put(store, "a", b"mine 2", condition=Match(info.etag))
            assert (await store.get("a", max_size_bytes=9))[0] == b"mine 2"

    run(body())


def test_a_delete_is_conditional_whatever_the_store_heeds(run, peer):
    """Google heeds the condition, so nobody can interfere. For others the generation is compared first."""

    def ignore(request, serve):
        if request.method == "DELETE":
            request.query.pop("ifGenerationMatch", None)
        return serve()

    async def body():
        async with opened(peer) as store:
            info = await put(store, "a", b"hello")
            peer.requests.clear()
            await store.delete_if("a", info.etag)
            deletes = [each.query for each in peer.requests if each.method == "DELETE"]
            assert deletes == [{"ifGenerationMatch": info.etag}]
        peer.meddle = ignore
        async with opened(peer) as store:
            info = await put(store, "a", b"hello")
            with pytest.raises(PreconditionFailedError):
                await store.delete_if("a", "1")
            assert "run/a" in peer.objects
            await store.delete_if("a", info.etag)
            assert "run/a" not in peer.objects

    run(body())


# --- who it is ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    """Remove all credentials, including those of this machine."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_QUOTA_PROJECT", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture
def secure_peer(no_credentials, tls, ca_file, private_key, tmp_path, monkeypatch):
    """Provide a peer over TLS, and a service account whose tokens it hands out."""
    with GcsPeer(tls=tls) as peer:
        account = {
            "type": "service_account",
            "client_email": "trainer@project.iam.gserviceaccount.com",
            "private_key_id": "1",
            "private_key": private_key,
            "token_uri": f"{peer.url}/token",
        }
        path = tmp_path / "account.json"
        path.write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", ca_file)
        yield peer


def test_tokens_come_from_googles_own_chain_and_every_request_has_one(run, secure_peer, monkeypatch):
    monkeypatch.setenv("GOOGLE_CLOUD_QUOTA_PROJECT", "payer")

    async def body():
        async with opened(secure_peer) as store:
            upload_id = await store.create_multipart("b")
            part = await store.put_part("b", upload_id, 1, BytesBody(BIG), crc(BIG))
            await store.complete_multipart("b", upload_id, [part], crc(BIG), len(BIG))
            await put(store, "a", b"hello")
            await store.put_many([SmallPut("c", b"x", crc(b"x"))], lambda _: None)
            await store.get_range("b", 1, 5, lambda _: None)
            await store.get_many([SmallGet("c", 1)], lambda *_: None)
            await store.copy("a", (await store.head("a")).etag, "d")
            assert [each.key for each in (await store.list("")).objects] == ["a", "b", "c", "d"]
            await store.delete(["a", "b", "c", "d"])

    run(body())
    assert secure_peer.num_tokens == 1
    told = {
        (each.headers["authorization"], each.headers["x-goog-user-project"]) for each in secure_peer.requests
    }
    assert told == {("Bearer token-1", "payer")}


@pytest.mark.parametrize(
    "call", ["put", "put_many", "get", "get_range", "get_many", "list", "create_multipart"]
)
def test_a_token_that_is_refused_in_the_middle_is_renewed_once(run, secure_peer, call, monkeypatch):
    """One attempt fails as retryable, and the next uses a new token. A recent token is not replaced."""

    async def body():
        async with opened(secure_peer) as store:
            await put(store, "a", b"hello")
            secure_peer.tokens.clear()
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
            assert raised.value.reason is FailureReason.AUTH, (
                "a token of a moment ago: it is no matter of age"
            )
            monkeypatch.setattr("ckpt_async.stores.gcs.credentials._YOUNG_S", 0.0)
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
            assert raised.value.reason is FailureReason.TRANSIENT
            await CALLS[call](store)

    run(body())
    assert secure_peer.num_tokens == 2


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (as_json(503, {"error": "internal_failure"}), FailureReason.TRANSIENT),
        (as_json(400, {"error": "invalid_grant"}), FailureReason.AUTH),
    ],
)
def test_a_token_service_that_is_away_is_asked_again(run, secure_peer, monkeypatch, reply, reason):
    """Its trouble passes, unlike credentials that it refuses: uploads must not end."""
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda _: None)

    async def body():
        async with opened(secure_peer) as store:
            secure_peer.token_refusal = reply
            store._session.credentials._is_refused = True  # as if it had ended
            with pytest.raises(StoreError) as raised:
                await put(store, "a", b"hello")
            assert raised.value.reason is reason

    run(body())


def test_over_tls_a_part_is_read_once_and_compared_with_what_the_store_answers(run, secure_peer):
    """Once the store has answered with a checksum, that checksum detects bytes that changed in transit."""

    def flip(request, serve):
        if request.is_part:
            request.body = b"j" + request.body[1:]
        return serve()

    async def body():
        async with opened(secure_peer) as store:
            upload_id = await store.create_multipart("a")
            assert not store.capabilities.finds_checksums
            first = await store.put_part("a", upload_id, 1, BytesBody(BIG), crc(BIG))
            assert store.capabilities.finds_checksums
            second = await store.put_part("a", upload_id, 2, BytesBody(b"hello"), None)
            assert second.checksum == crc(b"hello")
            asked = [each for each in secure_peer.requests if each.is_part]
            assert ["x-goog-hash" in each.headers for each in asked] == [True, False]
            whole = BIG + b"hello"
            secure_peer.meddle = flip
            with pytest.raises(IntegrityError):
                await store.put_part("a", upload_id, 2, BytesBody(b"hello"), None)
            with pytest.raises(StoreError):  # the upload now holds a different part
                await store.complete_multipart("a", upload_id, [first, second], crc(whole), len(whole))
            secure_peer.meddle = lambda _, serve: serve()
            second = await store.put_part("a", upload_id, 2, BytesBody(b"hello"), None)
            await store.complete_multipart("a", upload_id, [first, second], crc(whole), len(whole))

    run(body())


@pytest.mark.parametrize("told", [crc(b"hello"), None])
def test_a_part_without_a_checksum_on_either_side_is_not_believed(run, peer, told):
    """Nothing has compared its bytes, so it must not count as verified."""

    def silent(_, serve):
        answer = serve()
        answer.headers = [each for each in answer.headers if each[0] != "x-goog-hash"]
        return answer

    async def body():
        async with opened(peer) as store:
            upload_id = await store.create_multipart("a")
            peer.meddle = silent
            part = store.put_part("a", upload_id, 1, BytesBody(b"hello"), told)
            if told is None:
                with pytest.raises(IntegrityError):
                    await part
            else:
                assert (await part).checksum == told, "the store has compared it"

    run(body())


@pytest.mark.parametrize("obeyed", ["none", "creation", "refusal"])
def test_a_store_is_conditional_only_if_it_heeds_every_condition(run, peer, obeyed):
    """Otherwise two ranks could both decide."""

    def lax(request, serve):
        wanted = request.query.get("ifGenerationMatch")
        if obeyed == "none" or (obeyed == "creation" and wanted != "0"):
            request.query.pop("ifGenerationMatch", None)
        elif request.is_upload and wanted not in (None, "0"):
            return json_error(412, "conditionNotMet", "because")
        return serve()

    async def body():
        async with opened(peer) as store:
            assert store.capabilities.conditional_put
        peer.meddle = lax
        async with opened(peer) as store:
            assert not store.capabilities.conditional_put

    run(body())


def test_without_credentials_the_error_says_what_to_do(run, no_credentials):
    async def body():
        with pytest.raises(StoreError) as raised:
            await open_store("gs://ckpt/run").open()
        assert raised.value.reason is FailureReason.AUTH
        assert "gcloud auth application-default login" in raised.value.hint

    run(body())


def test_a_reader_who_names_credentials_that_are_not_there_is_told(
    run, no_credentials, monkeypatch, tmp_path
):
    """Such a reader must not be treated as one that needs no credentials."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))

    async def body():
        with pytest.raises(StoreError, match=r"none\.json") as raised:
            await open_store("gs://ckpt/run").open(is_read_only=True)
        assert raised.value.reason is FailureReason.AUTH

    run(body())


def test_a_reader_may_do_without_credentials(run, secure_peer, monkeypatch):
    """Anyone may read a public bucket; one that is not public says so."""
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    secure_peer.tokens.add("")

    async def body():
        secure_peer.put("run/a", b"hello")
        store = open_store(f"gs://{secure_peer.bucket}/run", StoreOptions(endpoint_url=secure_peer.url))
        await store.open(is_read_only=True)
        try:
            assert (await store.get("a", max_size_bytes=5))[0] == b"hello"
            assert not store.capabilities.conditional_put
            secure_peer.tokens.clear()
            with pytest.raises(StoreError) as raised:
                await store.get("a", max_size_bytes=5)
            assert raised.value.reason is FailureReason.AUTH
        finally:
            await store.close()

    run(body())


def test_no_token_goes_over_plain_http(run, peer, secure_peer):
    async def body():
        async with opened(peer) as store:
            await put(store, "a", b"hello")
        assert not any("authorization" in each.headers for each in peer.requests)
        assert not secure_peer.num_tokens

    run(body())


@pytest.mark.parametrize(
    ("url", "reply", "hint"),
    [
        ("gs://other/run", None, "there is no bucket other"),
        ("gs://ckpt/run", json_error(403, "forbidden", "no"), "roles/storage.objectUser"),
        ("gs://ckpt/run", json_error(400, "userProjectMissing", "no"), "GOOGLE_CLOUD_QUOTA_PROJECT"),
    ],
    ids=["no bucket", "forbidden", "requester pays"],
)
def test_what_cannot_be_opened_says_why_and_what_to_do(run, peer, url, reply, hint):
    async def body():
        if reply is not None:
            peer.meddle = lambda *_: reply
        store = open_store(url, StoreOptions(endpoint_url=peer.url))
        with pytest.raises(StoreError) as raised:
            await store.open()
        assert hint in raised.value.hint

    run(body())


def test_without_google_auth_it_is_said_what_to_install(monkeypatch):
    for name in [each for each in sys.modules if each.startswith("ckpt_async.stores.gcs.")]:
        if not name.endswith("backend"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(SettingsError, match=r"'\.\[gcs\]'"):
        open_store("gs://ckpt/run")


# --- options -----------------------------------------------------------------------------------------------


def test_objects_are_made_as_put_args_say_in_whichever_way(run, peer):
    args = {
        "storageClass": "NEARLINE",
        "metadata": {"run": "a"},
        "cacheControl": "no-store",
        "kmsKeyName": "projects/p/k",
        "predefinedAcl": "bucketOwnerRead",
    }

    async def body():
        async with opened(peer, put_args=args) as store:
            await put(store, "a", b"hello")
            await store.put_many([SmallPut("b", b"x", crc(b"x"))], lambda _: None)
            await store.create_multipart("c")

    run(body())
    for name in ("run/a", "run/b"):
        metadata = peer.objects[name].metadata
        assert (metadata["storageClass"], metadata["metadata"]) == ("NEARLINE", {"run": "a"})
        assert metadata["cacheControl"] == "no-store"
    for each in peer.requests[:2]:
        assert (each.query["kmsKeyName"], each.query["predefinedAcl"]) == ("projects/p/k", "bucketOwnerRead")
    (upload,) = peer.uploads.values()
    assert {
        name: upload.headers[name] for name in upload.headers if name.startswith(("x-goog", "cache"))
    } == {
        "x-goog-storage-class": "NEARLINE",
        "x-goog-meta-run": "a",
        "cache-control": "no-store",
        "x-goog-encryption-kms-key-name": "projects/p/k",
        "x-goog-acl": "bucket-owner-read",
    }


@pytest.mark.parametrize(
    "put_args",
    [{"StorageClass": "NEARLINE"}, {"storageClass": ""}, {"metadata": {"a": 1}}, {"contentType": "a\nb"}],
    ids=str,
)
def test_put_args_that_google_does_not_take_are_rejected(put_args):
    with pytest.raises(SettingsError, match="put_args"):
        open_store("gs://ckpt/run", StoreOptions(put_args=put_args))


def test_another_process_finds_the_same_store():
    options = StoreOptions(put_args={"storageClass": "NEARLINE"})
    address = address_of("gs://b/run", options, env={"STORAGE_EMULATOR_HOST": "127.0.0.1:9023"})
    found = options_of(address, StoreOptions(), env={})
    assert (found.endpoint_url, found.put_args) == ("http://127.0.0.1:9023", options.put_args)
    with pytest.raises(SettingsError):
        address_of("gs://b/run", None, env={"STORAGE_EMULATOR_HOST": "ftp://x"})


@pytest.mark.fault("F142")
@pytest.mark.parametrize("named", ["by nobody", "by an option", "by the environment"])
def test_no_token_goes_to_an_endpoint_that_only_a_journal_names(
    secure_peer, tmp_path, monkeypatch, capsys, named
):
    """Whoever may write the folder could name a server there that collects tokens."""
    folder = tmp_path / "folder"
    settings = {"rank": 0, "world_size": 2, "generation": 1, "close_grace_s": 0, "on_error": "warn"}
    options = StoreOptions(endpoint_url=secure_peer.url)
    with Uploader(folder, f"gs://{secure_peer.bucket}/run", store_options=options, **settings) as uploader:
        (folder / "a.pt").write_bytes(b"state")
        uploader.enqueue(folder / "a.pt", step=1)
    secure_peer.requests.clear()
    given = ["--endpoint-url", secure_peer.url] if named == "by an option" else []
    if named == "by the environment":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", secure_peer.url)
    cli.main(["drain", str(folder), *given, "--grace", "0", "--json"])
    told = capsys.readouterr()
    assert bool(secure_peer.requests) == (named != "by nobody")
    assert ("only the journal names" in told.out + told.err) == (named == "by nobody")
    if named == "by nobody":
        for command in ("sweep", "doctor"):
            cli.main([command, str(folder)])
            assert not secure_peer.requests
            told = capsys.readouterr()
            assert f"--endpoint-url {secure_peer.url}" in told.out + told.err


@pytest.mark.fault("F142")
@pytest.mark.parametrize(
    ("url", "endpoint_url", "env", "is_obeyed"),
    [
        ("gs://b/run", "https://storage.googleapis.com", {}, True),
        ("gs://b/run", "https://storage.europe-west3.rep.googleapis.com", {}, True),
        ("gs://b/run", "http://127.0.0.1:9023", {}, True),  # no token goes there
        ("gs://b/run", "https://storage.googleapis.com.evil.example", {}, False),
        ("gs://b/run", "https://evilgoogleapis.com", {}, False),
        ("gs://b/run", "https://127.0.0.1:9023", {}, False),
        ("az://box/run", "https://account.blob.core.windows.net", {}, True),
        ("az://box/run", "https://account.blob.core.usgovcloudapi.net", {}, True),
        ("az://box/run", "https://account.z12.blob.storage.azure.net", {}, True),
        ("az://box/run", "http://account.blob.core.windows.net", {}, False),
        ("az://box/run", "https://account.blob.core.windows.net.evil.example", {}, False),
        ("az://box/run", "http://127.0.0.1:10000/devstoreaccount1", {}, False),
        (
            "az://box/run",
            "http://127.0.0.1:10000/devstoreaccount1",
            {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"},
            True,
        ),
        ("s3://b/run", "https://minio.example", {}, True),  # signatures are valid there only
        ("s3://b/run", "https://minio.example", {"CKPT_ASYNC_S3_SSE_C_KEY": "a"}, False),
        (
            "s3://b/run",
            "https://minio.example",
            {"CKPT_ASYNC_S3_SSE_C_KEY": "a", "AWS_ENDPOINT_URL": "https://minio.example"},
            True,
        ),
    ],
)
def test_which_recorded_endpoints_are_obeyed(url, endpoint_url, env, is_obeyed):
    address = RemoteAddress(url, endpoint_url)
    assert options_of(address, StoreOptions(endpoint_url=endpoint_url), env={}).endpoint_url == endpoint_url
    if is_obeyed:
        assert options_of(address, StoreOptions(), env=env).endpoint_url == endpoint_url
    else:
        with pytest.raises(SettingsError) as raised:
            options_of(address, StoreOptions(), env=env)
        assert f"--endpoint-url {endpoint_url}" in raised.value.hint


def test_a_copy_may_take_several_requests(run, peer):
    """If class or location differ, Google copies part by part and returns a token."""
    peer.rewrite_rounds = 3

    async def body():
        async with opened(peer) as store:
            source = await put(store, "a", b"hello")
            await store.copy("a", source.etag, "b")
            assert peer.objects["run/b"].data == b"hello"
            assert len([each for each in peer.requests if "/rewriteTo/" in each.raw_path]) == 3

    run(body())


def test_a_reader_of_a_store_without_parts_finds_no_unfinished_upload(run, fake_gcs):
    """A writer has found out that the store has no parts, but a reader has not asked."""

    async def body():
        store = open_store(f"gs://{fake_gcs.bucket}/run", StoreOptions(endpoint_url=fake_gcs.url))
        await store.open(is_read_only=True)
        try:
            assert await store.list_multiparts("ckpt/") == []
        finally:
            await store.close()

    run(body())
