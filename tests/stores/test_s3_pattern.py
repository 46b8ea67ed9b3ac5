"""PUTs past the SDK: signed as the SDK signs, with all that the configuration says, and only where that is safe."""

import datetime as dt
from collections.abc import Mapping
from typing import Any
from unittest import mock
from urllib.parse import quote

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.checksums import checksum_of
from ckpt_async.errors import FailureReason, IntegrityError, StoreError
from ckpt_async.files import Folder
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.s3_pattern import PutPattern
from ckpt_async.transfer import FileBody, Source
from tests.faults.proxy import Fault, FaultProxy
from tests.stores.bodies import put

TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
KEYS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)
CHECKSUM = checksum_of(b"x", "crc64nvme")


def sent_by_sdk(url: str, headers: Mapping[str, str], credentials: Any, at: dt.datetime) -> AWSRequest:
    request = AWSRequest("PUT", url, headers=dict(headers))
    request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
    with mock.patch.object(botocore.auth, "get_current_datetime", return_value=at):
        botocore.auth.S3SigV4Auth(credentials, "s3", "eu-central-1").add_auth(request)
    return request


@given(
    st.sampled_from(["https://bucket.s3.eu-central-1.amazonaws.com", "http://127.0.0.1:8333/bucket"]),
    KEYS,
    KEYS,
    st.dictionaries(st.sampled_from(["x-amz-tagging", "x-amz-storage-class", "content-type"]), TEXT),
    st.one_of(st.none(), TEXT),
    st.integers(1_577_836_800, 2_840_140_800),
)
def test_signed_as_the_sdk_signs(
    place: str, first: str, second: str, more: dict[str, str], token: str | None, now: int
) -> None:
    """Whatever key, headers, token and time: the SDK's own signer is the judge."""
    credentials = ReadOnlyCredentials("AKID", "secret/+key", token)
    fixed = {**more, "User-Agent": "ckpt"}
    start, at = (dt.datetime.fromtimestamp(each, dt.UTC) for each in (1_767_225_600, now))
    pattern_url = f"{place}/{quote(first, safe='/~')}"
    of_first = {
        **fixed,
        "Content-Length": "7",
        "x-amz-checksum-crc64nvme": "AAAA",
        "amz-sdk-request": "attempt=1",
    }
    known = sent_by_sdk(pattern_url, of_first, ReadOnlyCredentials("OLD", "older", "gone"), start)
    pattern = PutPattern.of(pattern_url, dict(known.headers), first)
    assert pattern is not None
    url, headers = pattern.request(second, 1, CHECKSUM, credentials, now)
    ours = {name: value for name, value in headers.items() if name != "authorization"}
    unsigned = {
        name: value for name, value in ours.items() if name not in ("x-amz-date", "x-amz-security-token")
    }
    wanted = sent_by_sdk(f"{place}/{quote(second, safe='/~')}", unsigned, credentials, at)
    assert url == wanted.url
    assert headers["authorization"] == wanted.headers["Authorization"]
    assert {name.lower(): value for name, value in wanted.headers.items()} == headers
    assert fixed.items() - {("User-Agent", "ckpt")} <= headers.items()
    assert headers["x-amz-checksum-crc64nvme"] == CHECKSUM.value


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
def test_what_is_sent_in_another_way_is_no_pattern(change: dict[str, str]) -> None:
    """Conditions of one object, signatures of another kind: the SDK's."""
    told = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/s3/aws4_request, SignedHeaders=host",
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
    }
    assert PutPattern.of("http://s3/bucket/key", told, "key") is not None
    assert PutPattern.of("http://s3/bucket/key", told | change, "key") is None
    assert PutPattern.of("http://s3/bucket/key?x-id=PutObject", told, "key") is None


class Moves:
    """A `Progress` without a cap."""

    is_paced = False

    def moved_in_thread(self, *, is_last: bool = False) -> None:
        pass


@pytest.fixture
def source(tmp_path: Any) -> Any:
    (tmp_path / "a.bin").write_bytes(b"a small shard")
    folder = Folder(tmp_path)
    identity, _ = folder.link("a.bin", "spool/a.bin")
    source = Source(folder.open_source("a.bin", None, identity), identity, str(tmp_path / "a.bin"))
    yield source
    source.close()


def body_of(source: Any) -> Any:
    moves: Any = Moves()
    return FileBody(source, 0, source.size_bytes, moves)


def test_a_small_file_goes_past_the_sdk_with_all_that_is_configured(
    run: Any, s3_url: str, s3_server: Any, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encryption or tags that were lost on the way would be found out by an auditor, not by a test of bytes."""
    right = checksum_of(b"a small shard", "crc64nvme")

    async def body(url: str) -> Any:
        store: Any = open_store(
            f"{s3_url}/run", StoreOptions(endpoint_url=url, put_args={"Metadata": {"owner": "me"}})
        )
        await store.open()
        try:
            refuse: Any = mock.AsyncMock(side_effect=AssertionError("through the SDK"))
            with monkeypatch.context() as patch:
                patch.setattr(store, "_send", refuse)
                there = await store.put("a~b/c d+é", body_of(source), right)
                with pytest.raises(IntegrityError):
                    await store.put("spoiled", body_of(source), CHECKSUM)
            headed = await store._client.head_object(Bucket=s3_server.bucket, Key=f"{store._root}a~b/c d+é")
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
def test_refusals_mean_what_they_mean_through_the_sdk(
    run: Any, s3_url: str, s3_server: Any, source: Any, kind: str, reason: FailureReason
) -> None:
    right = checksum_of(b"a small shard", "crc64nvme")

    async def body(proxy: FaultProxy) -> None:
        store: Any = open_store(f"{s3_url}/run", StoreOptions(endpoint_url=proxy.url))
        await store.open()
        try:
            assert store._pattern is not None
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
