"""What every request to S3 must carry: who pays, and a key that only the customer has."""

import contextlib
import os
from base64 import b64encode

import pytest

from ckpt_async.errors import FailureReason, SettingsError, StoreError
from ckpt_async.stores import StoreOptions, address_of, open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody, Create, SmallGet, SmallPut
from ckpt_async.stores.s3.standing import KEY, KEY_FILE
from ckpt_async.stores.s3.standing import PAYER as REQUEST_PAYER
from tests.faults.proxy import FaultProxy
from tests.stores.bodies import put
from tests.stores.s3_peer import PAYER, S3Peer

MIB = 1 << 20
OUR_KEY = bytes(range(32))
OTHER_KEY = bytes(32)


@contextlib.asynccontextmanager
async def opened(url, options, env, *, is_read_only=False):
    store = open_store(url, options, env=env)
    await store.open(is_read_only=is_read_only)
    try:
        yield store
    finally:
        await store.close()


async def use_everything(store, algorithm, *, copies_parts=True):
    """Make every request that a run may make."""

    def crc(data):
        return checksum_of(data, algorithm)

    first = await put(store, "a b/é", b"hello", condition=Create())
    await put(store, "a b/é", b"again")
    small = [SmallPut(f"small/{number}", b"data", crc(b"data")) for number in range(3)]
    await store.put_many(small, lambda _: None)
    gots: list[bytes] = []
    gets = [SmallGet(each.key, 4) for each in small]
    await store.get_many(gets, lambda _, data: gots.append(bytes(data)))
    assert gots == [b"data"] * 3
    assert (await store.get("a b/é", max_size_bytes=5))[0] == b"again"
    received = bytearray()
    info = await store.get_range("a b/é", 1, 3, received.extend)
    assert (bytes(received), info.size_bytes) == (b"gai", 5)
    head = await store.head("a b/é")
    assert head.checksum == crc(b"again")
    assert head.etag != first.etag
    await store.copy("a b/é", head.etag, "copy")
    big, last = os.urandom(5 * MIB), b"the last part"
    upload_id = await store.create_multipart("parts")
    await put(store, "source", big)
    if copies_parts:
        etag = (await store.head("source")).etag
        one = await store.copy_part("source", etag, "parts", upload_id, 1, 0, len(big))
    else:
        one = await store.put_part("parts", upload_id, 1, BytesBody(big), crc(big))
    parts = [one, await store.put_part("parts", upload_id, 2, BytesBody(last), crc(last))]
    if store.capabilities.finds_checksums:
        parts[1] = await store.put_part("parts", upload_id, 2, BytesBody(last), None)
    listed = await store.list_parts("parts", upload_id)
    assert [each.etag for each in listed] == [each.etag for each in parts]
    await store.complete_multipart("parts", upload_id, parts, crc(big + last), len(big + last))
    await store.abort_multipart("given up", await store.create_multipart("given up"))
    assert not await store.list_multiparts("")
    assert len((await store.list("")).objects) == 7
    await store.delete_if("copy", (await store.head("copy")).etag)
    await store.delete([each.key for each in (await store.list("")).objects])


@pytest.mark.parametrize("mode", ["http", "https"])
def test_who_pays_is_said_by_every_request(run, monkeypatch, tls, ca_file, mode):
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)

    async def body(peer):
        env = peer.environment() | {REQUEST_PAYER: "requester"}
        async with opened("s3://ckpt/run", None, env) as store:
            await use_everything(store, store.capabilities.checksum_algorithm)
        with pytest.raises(StoreError, match="requester pays"):
            async with opened("s3://ckpt/run", None, peer.environment()):
                pass

    with S3Peer(tls=tls if mode == "https" else None, wants_payer=True) as peer:
        for name, value in peer.environment().items():
            monkeypatch.setenv(name, value)
        run(body(peer))
        names = {each.name for each in peer.requests if PAYER in each.headers}
    assert names >= {
        "PutObject",
        "GetObject",
        "HeadObject",
        "ListObjects",
        "ListParts",
        "UploadPart",
        "CopyObject",
    }
    assert names >= {"ListMultipartUploads", "DeleteObjects", "DeleteObject", "AbortMultipartUpload"}


def test_every_object_and_part_is_read_and_written_with_the_customers_key(
    run, monkeypatch, tls, ca_file, tmp_path
):
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)
    (tmp_path / "key").write_bytes(OUR_KEY)

    async def body(peer):
        ours = peer.environment() | {KEY_FILE: str(tmp_path / "key")}
        async with opened("s3://ckpt/run", None, ours) as store:
            await use_everything(store, "crc64nvme")
            assert store.capabilities.finds_checksums
            await put(store, "kept", b"hello")
        wrong = peer.environment() | {KEY: b64encode(OTHER_KEY).decode()}
        for env, said in ((peer.environment(), KEY_FILE), (wrong, "another key")):
            async with opened("s3://ckpt/run", None, env, is_read_only=True) as store:
                for request in (
                    store.get("kept", max_size_bytes=5),
                    store.get_range("kept", 0, 5, lambda _: None),
                ):
                    with pytest.raises(StoreError) as refused:
                        await request
                    assert said in f"{refused.value} {refused.value.hint}"
                    assert refused.value.reason is (
                        FailureReason.AUTH if env is wrong else FailureReason.OTHER
                    )
                with pytest.raises(StoreError) as refused:
                    await store.head("kept")
                assert env is wrong or KEY_FILE in str(refused.value)

    with S3Peer(tls=tls) as peer:
        for name, value in peer.environment().items():
            monkeypatch.setenv(name, value)
        run(body(peer))
        told = b64encode(OUR_KEY).decode().rstrip("=")
        assert not any(told[:20] in each.raw_query for each in peer.requests)
        assert {each.key_md5 for each in peer.objects.values()} != {""}


def test_seaweedfs_keeps_what_a_customers_key_encrypts(run, s3_url, s3_server, monkeypatch, tls, ca_file):
    """A real server compares keys, and has its own behaviour for checksums."""
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)

    async def body(url):
        options, env = StoreOptions(endpoint_url=url), {KEY: b64encode(OUR_KEY).decode()}
        async with opened(f"{s3_url}/run", options, env) as store:
            algorithm = store.capabilities.checksum_algorithm
            await use_everything(store, algorithm, copies_parts=False)  # not implemented in SeaweedFS 4.48
            await put(store, "kept", b"hello")
        async with opened(f"{s3_url}/run", options, {}, is_read_only=True) as store:
            with pytest.raises(StoreError):
                await store.get("kept", max_size_bytes=5)

    with FaultProxy(s3_server.url, tls=tls) as proxy:
        run(body(proxy.url))


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({REQUEST_PAYER: "me"}, REQUEST_PAYER),
        ({KEY: "c2VjcmV0"}, "not hold a key of 32 bytes"),
        ({KEY: "secret, and no base64"}, "not hold a key of 32 bytes"),
        ({KEY_FILE: "/no/such/file"}, "cannot be read"),
        ({KEY: "c2VjcmV0", KEY_FILE: "/no/such/file"}, "both"),
    ],
)
def test_what_is_no_key_is_refused_without_showing_it(env, said):
    with pytest.raises(SettingsError, match=said) as refused:
        open_store("s3://bucket/run", env=env)
    for secret in ("secret", "c2VjcmV0"):
        assert secret not in str(refused.value) + refused.value.hint


@pytest.mark.parametrize("url", ["s3://bucket/run", "r2://bucket/run"])
def test_a_customers_key_is_not_sent_over_plain_http(url):
    env = {KEY: b64encode(OUR_KEY).decode(), "S3_ENDPOINT_URL": "http://host:9000"}
    with pytest.raises(SettingsError, match="only over https"):
        open_store(url, env=env)


@pytest.mark.parametrize("name", [KEY, REQUEST_PAYER])
def test_directory_buckets_have_neither(name):
    env = {name: {KEY: b64encode(OUR_KEY).decode(), REQUEST_PAYER: "requester"}[name]}
    with pytest.raises(SettingsError, match="directory bucket"):
        open_store("s3://b--usw2-az1--x-s3/run", env=env)


def test_a_customers_key_is_not_mixed_with_another_encryption():
    env = {KEY: b64encode(OUR_KEY).decode()}
    with pytest.raises(SettingsError, match="put_args has ServerSideEncryption"):
        open_store("s3://b/r", StoreOptions(put_args={"ServerSideEncryption": "aws:kms"}), env=env)


def test_a_customers_key_is_not_written_down():
    env = {KEY: b64encode(OUR_KEY).decode(), REQUEST_PAYER: "requester"}
    assert env[KEY] not in repr(address_of("s3://b/r", None, env=env))
    store = open_store("s3://b/r", env=env)
    assert env[KEY] not in repr(store)
