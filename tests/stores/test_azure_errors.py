"""How AzureStore handles answers that a healthy server does not give, over real sockets."""

import contextlib
import email.utils
import re
import time

import pytest

from ckpt_async.errors import (
    FailureReason,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.azure.blocks import block_id
from ckpt_async.stores.azure.sending import Compared
from ckpt_async.stores.http.failures import SOMEBODY_ELSE
from ckpt_async.stores.interface import BytesBody, Create, Match, StoredPart
from tests.stores.azure_peer import AzurePeer
from tests.stores.bodies import crc
from tests.stores.peer import RESET, SILENCE, Peer, answer

UPLOAD = "6921f0a1" + "0" * 16
SECRET = "c2VjcmV0"
FROM_AZURE = {"x-ms-request-id": "1"}
CALLS = {
    "put": lambda store: store.put("a", BytesBody(b"hello"), crc(b"hello")),
    "get": lambda store: store.get("a", max_size_bytes=9),
    "get_range": lambda store: store.get_range("a", 0, 5, lambda _: None),
    "head": lambda store: store.head("a"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete(["a"]),
    "delete_if": lambda store: store.delete_if("a", '"e"'),
    "copy": lambda store: store.copy("a", '"e"', "b"),
    "copy_part": lambda store: store.copy_part("a", '"e"', "b", UPLOAD, 1, 0, 5),
    "create_multipart": lambda store: store.create_multipart("a"),
    "put_part": lambda store: store.put_part("a", UPLOAD, 1, BytesBody(b"hello"), crc(b"hello")),
    "list_parts": lambda store: store.list_parts("a", UPLOAD),
    "complete_multipart": lambda store: store.complete_multipart(
        "a",
        UPLOAD,
        [StoredPart(1, 5, block_id(UPLOAD, 1, crc(b"hello")), crc(b"hello"))],
        crc(b"hello"),
        5,
    ),
    "abort_multipart": lambda store: store.abort_multipart("a", UPLOAD),
    "list_multiparts": lambda store: store.list_multiparts(""),
}
# aiohttp itself repeats a request without a body once if no answer came.
REPEATED = {"get", "head", "list", "delete", "delete_if", "list_parts", "abort_multipart", "list_multiparts"}


def said(status: int, code: str = "", headers: dict[str, str] | None = None, body: bytes = b"") -> bytes:
    return answer(status, code, {**FROM_AZURE, **(headers or {})}, body)


@contextlib.asynccontextmanager
async def connected(peer: Peer, **options):
    """Yield a store that talks to `peer` without having probed it."""
    async with peer.serve() as url:
        env = {
            "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=account;AccountKey={SECRET};BlobEndpoint={url}/account"
        }
        store = open_store("az://container/run", StoreOptions(**options), env=env)
        await store.open(is_read_only=True)
        store._sender.compared = Compared.CRC64
        try:
            yield store
        finally:
            await store.close()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (said(500, "InternalError"), FailureReason.TRANSIENT),
        (said(503, "ServerBusy"), FailureReason.THROTTLED),
        (said(429), FailureReason.THROTTLED),
        (said(403, "AuthenticationFailed"), FailureReason.AUTH),
        (answer(404), FailureReason.TRANSIENT),  # this answer is not from Azure
        (answer(400, body=b"<html>Bad Request</html>"), FailureReason.TRANSIENT),
        (answer(407, body=b"<html>Log in</html>"), FailureReason.TRANSIENT),
        (answer(200, body=b"<html>log in</html>"), FailureReason.TRANSIENT),
        (answer(302, headers={"Location": "https://login"}), FailureReason.TRANSIENT),
        (RESET, FailureReason.TRANSIENT),
        (SILENCE, FailureReason.TIMEOUT),
    ],
    ids=[
        "500",
        "503",
        "429",
        "403",
        "another's 404",
        "another's 400",
        "407",
        "login page",
        "redirect",
        "reset",
        "silence",
    ],
)
def test_each_call_makes_one_attempt(run, call, reply, reason):
    """Retries are up to the engine; an answer that is not understood means neither success nor "nothing there"."""

    async def body():
        peer = Peer(lambda _: reply)
        async with connected(peer, read_timeout_s=0.3 if reply is SILENCE else 30) as store:
            with pytest.raises(StoreError) as raised:
                await CALLS[call](store)
        assert raised.value.reason is reason
        assert not isinstance(raised.value, ObjectNotFoundError)
        assert "sig=" not in str(raised.value)
        assert len(peer.requests) == (2 if reply == RESET and call in REPEATED else 1)

    run(body())


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (409, "BlobAlreadyExists", PreconditionFailedError),
        (412, "ConditionNotMet", PreconditionFailedError),
        (412, "", PreconditionFailedError),
        (412, "LeaseIdMissing", FailureReason.OTHER),
        (409, "BlobImmutableDueToPolicy", FailureReason.OTHER),
        (409, "SnapshotsPresent", FailureReason.OTHER),
        (409, "ContainerBeingDeleted", FailureReason.TRANSIENT),
        (404, "ContainerNotFound", FailureReason.NOT_FOUND),
        (400, "Md5Mismatch", IntegrityError),
        (400, "Crc64Mismatch", IntegrityError),
        (400, "InvalidHeaderValue", FailureReason.OTHER),
        (401, "NoAuthenticationInformation", FailureReason.AUTH),
        (403, "KeyBasedAuthenticationNotPermitted", FailureReason.AUTH),
    ],
)
@pytest.mark.parametrize("condition", [Create(), Match('"e"')], ids=["create", "match"])
def test_refusals_of_a_conditional_put(run, status, code, error, condition):
    """Only an answer about our condition means that a race was lost."""

    async def body():
        async with connected(Peer(lambda _: said(status, code))) as store:
            with pytest.raises(StoreError) as raised:
                await store.put("a", BytesBody(b"hello"), crc(b"hello"), condition=condition)
        expected = error if isinstance(error, FailureReason) else None
        assert raised.value.reason is expected if expected else isinstance(raised.value, error)
        assert isinstance(raised.value, PreconditionFailedError) == (error is PreconditionFailedError)

    run(body())


@pytest.mark.fault("F10")
@pytest.mark.parametrize(
    ("off_by_s", "hint"),
    [(7200, "clock is wrong: .* GMT here and .* GMT at the store"), (60, "key or SAS does not belong")],
)
def test_a_refused_signature_may_be_the_clocks_fault(run, off_by_s, hint):
    """Azure says the same about a wrong key and about a wrong time."""
    body = b"<Error><Code>AuthenticationFailed</Code><Message>the Authorization header, the signature"
    date = email.utils.formatdate(time.time() + off_by_s, usegmt=True)
    headers = {"Date": date, "x-ms-error-code": "AuthenticationFailed"}

    async def main():
        async with connected(Peer(lambda _: said(403, "", headers, body))) as store:
            for call in ("put", "list", "get_range", "put_part"):
                with pytest.raises(StoreError) as raised:
                    await CALLS[call](store)
                assert raised.value.reason is FailureReason.AUTH
                assert re.search(hint, raised.value.hint)

    run(main())


@pytest.mark.fault("F10")
@pytest.mark.parametrize("ahead_s", [-3e5, 3e5])
def test_uploads_have_the_age_that_the_store_s_clock_gives_them(run, ahead_s):
    """If this machine's clock is wrong, a live upload would seem old, and be swept."""

    async def main():
        with AzurePeer(ahead_s=ahead_s) as peer:
            store = open_store("az://ckpt/run", env=peer.environment())
            await store.open()
            for key in ("a", "b"):
                await store.create_multipart(key)
            now = (await store.list("")).server_time
            assert abs(now - time.time() - ahead_s) < 60
            ages_s = [now - each.initiated_at for each in await store.list_multiparts("")]
            await store.close()
        assert len(ages_s) == 2
        assert all(abs(age_s) < 60 for age_s in ages_s), ages_s

    run(main())


def test_a_login_page_is_not_azures_refusal(run):
    """The credentials were blamed for what a proxy forbids."""

    async def main():
        async with connected(Peer(lambda _: answer(403, body=b"<html>Log in</html>"))) as store:
            for call in CALLS.values():
                with pytest.raises(StoreError, match="does not look like one of Azure") as raised:
                    await call(store)
                assert (raised.value.reason, raised.value.hint) == (FailureReason.AUTH, SOMEBODY_ELSE)

    run(main())


def test_what_arrived_with_another_crc64_is_refused(run):
    """The service returns the CRC64 that it computed over the bytes it received."""
    other = {"ETag": '"e"', "x-ms-content-crc64": "AAAAAAAAAAA="}

    async def body():
        async with connected(Peer(lambda _: said(201, headers=other))) as store:
            for call in ("put", "put_part"):
                with pytest.raises(IntegrityError, match="arrived with"):
                    await CALLS[call](store)

    run(body())


def test_a_blob_whose_bytes_are_not_those_of_its_checksum_is_not_believed(run):
    headers = {"ETag": '"e"', "x-ms-meta-ckptcrc64nvme": crc(b"hello").value}

    async def body():
        async with connected(Peer(lambda _: said(200, headers=headers, body=b"jello"))) as store:
            with pytest.raises(IntegrityError):
                await CALLS["get"](store)

    run(body())


LISTING = '<EnumerationResults ContainerName="container"><Prefix>{}</Prefix><Blobs>{}</Blobs>{}</EnumerationResults>'
BLOB = "<Blob><Name>{}</Name><Properties><Content-Length>1</Content-Length><Etag>e</Etag></Properties></Blob>"


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        (LISTING.format("run/", BLOB.format("run/a"), ""), {}),  # does not say where the listing continues
        (LISTING.format("other/", "", "<NextMarker/>"), {}),
        (LISTING.format("run/", BLOB.format("other/a"), "<NextMarker/>"), {}),
        (LISTING.format("run/", "<Else/>", "<NextMarker/>"), {}),
        (LISTING.format("run/", "", "<NextMarker>m</NextMarker>"), {}),  # the same marker again and again
        (LISTING.format("run/", "", "<NextMarker/>"), {"Age": "60"}),
        (LISTING.format("run/", "", "<NextMarker/>"), {"Date": "yesterday"}),
        (LISTING.format("run/", "", "<NextMarker/>")[:-9], {}),
        ("<BlockList/>", {}),
    ],
)
def test_a_listing_that_may_not_be_whole_is_not_believed(run, text, headers):
    """Rule R8: what a listing omits might otherwise be treated as gone."""

    async def body():
        async with connected(Peer(lambda _: said(200, headers=headers, body=text.encode()))) as store:
            with pytest.raises(StoreError) as raised:
                await store.list("")
        assert raised.value.reason is FailureReason.TRANSIENT

    run(body())


def test_a_part_of_another_upload_is_not_committed(run):
    other = StoredPart(1, 5, block_id("0" * 24, 1, crc(b"hello")), crc(b"hello"))

    async def body():
        peer = Peer(lambda _: said(201, headers={"ETag": '"e"'}))
        async with connected(peer) as store:
            for parts, size_bytes in (([other], 5), ([], 5)):
                with pytest.raises(IntegrityError):
                    await store.complete_multipart("a", UPLOAD, parts, crc(b"hello"), size_bytes)
        assert not peer.requests

    run(body())
