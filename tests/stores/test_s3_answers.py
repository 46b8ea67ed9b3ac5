"""Answers that no test server gives, such as from a proxy, a cache or another bucket; none means "nothing there"."""

import asyncio
import contextlib
import string
from urllib.parse import quote, quote_plus, unquote_plus

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_async.core.model import Checksum
from ckpt_async.errors import CkptAsyncError, FailureReason, ObjectNotFoundError, StoreError
from ckpt_async.stores.http.messages import MalformedResponseError, server_time
from ckpt_async.stores.s3 import answers as s3_answers
from tests.stores.documents import contents, deleted, document, item, objects, parts, uploads
from tests.stores.peer import Peer, answer
from tests.stores.s3_calls import CALLS, connected
from tests.stores.s3_calls import credentials as given_credentials  # noqa: F401  a fixture

HTML = b"<!DOCTYPE html>\n<html><body>log in</body></html>"
FOREIGN = {
    "empty": b"",
    "HTML": b"<html></html>",
    "a whole page of HTML": HTML,
    "JSON": b'{"objects": []}',
    "another document": document("ListAllMyBucketsResult", IsTruncated=False),
    "an error of another kind": document("Error", Code="SlowDown"),
    "with a comment": b"<!-- <ListBucketResult> --><html/>",
}
LISTINGS = {"list": objects, "list_parts": parts, "list_multiparts": uploads}


@contextlib.asynccontextmanager
async def answering():
    """Yield a store and the list of its server's answers, the last of which repeats forever."""
    left: list[bytes] = []

    def respond(_request):
        return left.pop(0) if len(left) > 1 else left[0]

    async with connected(Peer(respond)) as store:
        yield store, left


def refusals(calls: list[tuple[str, list[bytes]]]) -> list[StoreError | None]:
    """Return the error of each call to a server with these answers, or None for a call that was not refused."""

    async def play():
        found: list[StoreError | None] = []
        async with answering() as (store, left):
            for call, answers in calls:
                left[:] = answers
                try:
                    await CALLS[call](store)
                    found.append(None)
                except StoreError as error:
                    found.append(error)
        return found

    return asyncio.run(asyncio.wait_for(play(), 60))


def check_refused(calls: dict[str, tuple[str, bytes]]) -> None:
    """Check that each call fails with a transient error that names the place in the bucket."""
    found = refusals([(call, [answer(200, body=body)]) for call, body in calls.values()])
    for kind, error in zip(calls, found, strict=True):
        assert error is not None, kind
        assert error.reason is FailureReason.TRANSIENT, kind
        assert "s3://bucket/run/" in str(error), kind


@pytest.mark.fault("F70")
@pytest.mark.parametrize("call", [*LISTINGS, "delete", "create_multipart", "complete_multipart"])
def test_a_foreign_response_is_not_read_as_empty(call):
    check_refused({kind: (call, body) for kind, body in FOREIGN.items()})


@pytest.mark.fault("F70")
@pytest.mark.parametrize("call", LISTINGS)
def test_a_listing_truncated_at_any_byte_is_rejected(call):
    whole = LISTINGS[call]()
    check_refused({f"{end}": (call, whole[:end]) for end in range(0, len(whole), 7)})


OTHERS = {
    "another bucket": ("list", objects(Name="other")),
    "another prefix": ("list", objects(prefix="run/ckpt/")),
    "the whole bucket": ("list", objects(prefix="")),
    "a longer prefix": ("list", objects(prefix="run/.ckpt-async/leases/")),
    "another run": ("list", objects(prefix="run-2/")),
    "another launch": ("list", objects(StartAfter="run/x")),
    "a later page": ("list", objects(ContinuationToken="t")),
    "keys of others": ("list", objects("run2/a", Prefix=None)),
    "a key above": ("list", objects("run")),
    "no echo": ("list", objects(Name=None, Prefix=None)),
    "no end": ("list", objects(IsTruncated=None)),
    "cut short": ("list", objects("run/a", IsTruncated=True)),
    "a key twice": ("list", objects("run/a", "run/a")),
    "parts of another upload": ("list_parts", parts(1, UploadId="other")),
    "parts of another key": ("list_parts", parts(1, Key="run/b")),
    "parts of another bucket": ("list_parts", parts(1, Bucket="other")),
    "later parts": ("list_parts", parts(1001, PartNumberMarker=1000)),
    "parts without an echo": ("list_parts", parts(Key=None, UploadId=None)),
    "parts without an end": ("list_parts", parts(IsTruncated=None)),
    "parts cut short": ("list_parts", parts(1, IsTruncated=True)),
    "uploads in another bucket": ("list_multiparts", uploads(Bucket="other")),
    "uploads below another prefix": ("list_multiparts", uploads(prefix="run/ckpt/")),
    "uploads of others": ("list_multiparts", uploads("run2/a", Prefix=None)),
    "later uploads": ("list_multiparts", uploads(KeyMarker="run/x")),
    "uploads without an end": ("list_multiparts", uploads(IsTruncated=None)),
    "uploads cut short": ("list_multiparts", uploads("run/a", IsTruncated=True)),
    "nothing said of a key": ("delete", deleted()),
    "another key deleted": ("delete", deleted("run/b")),
    "another key not deleted": ("delete", deleted(extra=item("Error", Key="b", Code="InternalError"))),
}


@pytest.mark.fault("F70")
def test_a_response_to_another_request_is_rejected():
    check_refused(OTHERS)


PAGES = {
    "objects": ("list", objects("run/a", IsTruncated=True, NextContinuationToken="t")),
    "parts": ("list_parts", parts(1, IsTruncated=True, NextPartNumberMarker=1)),
    "uploads": ("list_multiparts", uploads("run/a", IsTruncated=True, NextKeyMarker="run/a")),
}


def test_a_listing_that_repeats_its_page_for_ever_is_an_error():
    """A cache that looks only at the path answers like this."""
    check_refused(PAGES)


def test_a_repeated_first_page_is_rejected():
    """Half a listing, received twice, is not a whole one."""
    first = objects("run/a", "run/b", IsTruncated=True, NextContinuationToken="t")
    again = objects("run/a", "run/b")
    (error,) = refusals([("list", [answer(200, body=first), answer(200, body=again)])])
    assert "'a' twice" in str(error)


def test_a_cached_response_is_rejected():
    """A cached response tells what was there when it was first requested."""
    (error,) = refusals([("list", [answer(200, headers={"Age": "37"}, body=objects())])])
    assert "cache" in str(error)


GOOD = {
    "AWS": objects(
        "run/a", KeyCount=1, MaxKeys=1000, EncodingType="url", extra="<RequestCharged></RequestCharged>"
    ),
    "SeaweedFS": b'<?xml version="1.0" encoding="UTF-8"?>\n' + objects("run/a", MaxKeys=1000, KeyCount=1),
    "GCS": objects("run/a").replace(b"s3.amazonaws.com/doc/2006-03-01/", b"doc.s3.amazonaws.com/2006-03-01"),
    "with a byte order mark": b"\xef\xbb\xbf<?xml version='1.0'?>\n<!-- by hand -->\n" + objects("run/a"),
    "with a name space": objects("run/a")
    .replace(b"<", b"<s3:")
    .replace(b"<s3:/", b"</s3:")
    .replace(b"xmlns", b"xmlns:s3"),
    "without a prefix": objects("run/a", Prefix=None),
    "without a name": objects("run/a", Name=None),
    "of a tenant": objects("run/a", Name="tenant:bucket"),
    "in other letters": objects("run/a", Name="Bucket"),
    "with what was not asked": objects(
        "run/a", StartAfter="", ContinuationToken="", Delimiter="", Marker="", NextContinuationToken=""
    ),
    "encoded without saying so": objects("run/a", Prefix="run%2F"),
}


@pytest.mark.fault("F70", "F78")
def test_listings_of_s3_compatible_stores_are_understood(run):
    async def body():
        async with answering() as (store, left):
            for kind, page in GOOD.items():
                left[:] = [answer(200, body=page)]
                listing = await store.list("")
                assert [each.key for each in listing.objects] == ["a"], kind
                assert listing.is_whole, kind

    run(body())


@pytest.mark.fault("F78")
@pytest.mark.parametrize("root", ["ListPartsResult", "ListPartsResponse", "ListMultipartUploadResult"])
def test_part_listings_with_a_stores_own_element_name_are_understood(run, root):
    """Both moto and stores modelled on an old Ceph use their own name."""

    async def body():
        async with answering() as (store, left):
            left[:] = [answer(200, body=parts(1).replace(b"ListPartsResult", root.encode()))]
            assert [part.number for part in await CALLS["list_parts"](store)] == [1]

    run(body())


@pytest.mark.fault("F78")
def test_upload_listings_with_a_stores_own_element_name_are_understood(run):
    async def body():
        async with answering() as (store, left):
            left[:] = [answer(200, body=uploads("run/a").replace(b"UploadsResult", b"UploadResult"))]
            assert [each.key for each in await CALLS["list_multiparts"](store)] == ["a"]

    run(body())


@pytest.mark.fault("F78")
@pytest.mark.parametrize("prefix", ["p%2Bq/", "a+b c%2B d/lr=1e-4+x", "100%/", "p%20q/"])
def test_a_prefix_that_looks_url_encoded_is_recognised(prefix):
    """Stores return it verbatim, silently encoded, or decoded by the SDK though never encoded (SeaweedFS 4.48)."""
    asked = {"Bucket": "bucket", "Prefix": prefix}
    page = {"Name": "bucket", "IsTruncated": False, "ResponseMetadata": {"HTTPHeaders": {}}}
    for echo in (prefix, quote(prefix), quote_plus(prefix), unquote_plus(prefix)):
        assert s3_answers.next_page(s3_answers.OBJECTS, asked, page | {"Prefix": echo}) is None, echo
    with pytest.raises(MalformedResponseError):
        s3_answers.next_page(s3_answers.OBJECTS, asked, page | {"Prefix": f"{prefix}x"})


@pytest.mark.fault("F78")
def test_a_checksum_of_the_wrong_length_is_ignored():
    whole = {"ChecksumCRC64NVME": "DlfLM4aqZUQ=", "ChecksumType": "FULL_OBJECT"}
    assert s3_answers.checksum(whole) == Checksum("crc64nvme", "DlfLM4aqZUQ=")
    assert s3_answers.checksum(whole | {"ChecksumCRC64NVME": "4xdqIQ=="}) is None
    both = whole | {"ChecksumCRC64NVME": "4xdqIQ==", "ChecksumCRC32C": "4xdqIQ=="}
    assert s3_answers.checksum(both) == Checksum("crc32c", "4xdqIQ==")


@pytest.mark.parametrize(
    "point",
    [
        "point-abcdefghijklmnopqrstuvwxyz1a2b3c-s3alias",
        "arn:aws:s3:us-west-2:123456789012:accesspoint/point",
    ],
)
def test_an_access_point_may_echo_the_bucket_name(point: str) -> None:
    page = {"Name": "bucket", "Prefix": "run/", "IsTruncated": False}
    page["ResponseMetadata"] = {"HTTPHeaders": {}}
    asked = {"Bucket": point, "Prefix": "run/"}
    assert s3_answers.next_page(s3_answers.OBJECTS, asked, page) is None
    with pytest.raises(MalformedResponseError):
        s3_answers.next_page(s3_answers.OBJECTS, asked | {"Bucket": "point"}, page)


def test_a_delete_error_without_a_key_is_reported():
    body = deleted(extra=item("Error", Code="InternalError"))
    (error,) = refusals([("delete", [answer(200, body=body)])])
    assert "InternalError" in str(error)


@pytest.mark.fault("F70")
@pytest.mark.parametrize("body", [HTML, b"", b"404 page not found\n"], ids=["HTML", "empty", "text"])
def test_a_404_not_from_the_store_is_not_a_missing_object(body):
    """An ingress whose backend is down answers like this."""
    calls = ("get", "get_range", "list", "list_parts", "put", "delete", "put_part", "abort_multipart")
    for call, error in zip(
        calls, refusals([(call, [answer(404, body=body)]) for call in calls]), strict=True
    ):
        assert error is not None, call
        assert error.reason is FailureReason.TRANSIENT, call
        assert not isinstance(error, ObjectNotFoundError), call


# --- the store's time --------------------------------------------------------------------------------------


def page_at(second: int, body: bytes) -> bytes:
    return answer(200, headers={"Date": f"Sat, 21 Nov 2026 04:00:{second:02d} GMT"}, body=body)


def test_a_listing_carries_the_stores_time_at_its_beginning(run):
    """Compared with a later time, an object on a page in between would look too old."""
    pages = [
        page_at(0, objects("run/a", IsTruncated=True, NextContinuationToken="t")),
        page_at(59, objects("run/b")),
    ]

    async def body():
        async with answering() as (store, left):
            left[:] = pages
            listing = await store.list("")
        assert [each.key for each in listing.objects] == ["a", "b"]
        assert listing.server_time == 1795233600.0

    run(body())


def test_a_listing_without_the_stores_time_is_rejected():
    """Otherwise our own clock would decide what is old and gets pruned."""
    dates = "", "yesterday", "2026-11-21T04:00:00Z", "Sat, 21 Nov 99999 04:00:00 GMT", "9" * 5000
    answers = [("list", [answer(200, headers={"Date": date}, body=objects())]) for date in dates]
    for date, error in zip(dates, refusals(answers), strict=True):
        assert error is not None, date
        assert error.reason is FailureReason.TRANSIENT, date
        assert "Date" in str(error), date


def test_a_date_without_a_zone_is_utc(monkeypatch):
    assert server_time({"date": "Sat, 21 Nov 2026 04:00:00"}) == 1795233600.0


# --- fields ------------------------------------------------------------------------------------------------

TIMES, NUMBERS = ("LastModified", "Initiated"), ("Size", "PartNumber")
WHOLE = {
    "list": (objects(extra=contents("run/a")), ("Key", "LastModified", "ETag", "Size")),
    "list_parts": (parts(1), ("PartNumber", "LastModified", "ETag", "Size")),
    "list_multiparts": (uploads("run/a"), ("Key", "UploadId", "Initiated")),
}


def with_field(body: bytes, name: str, value: str | None) -> bytes:
    """Replace the last field of this name, or remove it."""
    start, end = f"<{name}>".encode(), f"</{name}>".encode()
    before, _, rest = body.rpartition(start)
    return before + (b"" if value is None else start + value.encode() + end) + rest.partition(end)[2]


@pytest.mark.fault("F71")
def test_a_missing_or_invalid_field_is_reported():
    calls = {}
    for call, (body, names) in WHOLE.items():
        for name in names:
            nonsense = [None, ""]
            nonsense += (
                ["soon", "9" * 5000] if name in TIMES else ["-5", "x", "9" * 5000] if name in NUMBERS else []
            )
            calls |= {f"{call} {name} {value}": (call, with_field(body, name, value)) for value in nonsense}
    assert len(calls) > 30
    check_refused(calls)


RANGES = (
    "bytes */5",
    "bytes 4-0/5",
    "bytes 0-6/9",
    "bytes 0-4/*",
    "zero",
    "bytes 0-4/",
    "bytes 0-4/" + "9" * 5000,
    None,
)
OTHER_RANGES = ("bytes 0-4/4", "bytes 1-5/6")


def test_an_invalid_content_range_is_reported(run):
    async def body():
        async with answering() as (store, left):
            for content_range in (*RANGES, *OTHER_RANGES):
                given = {} if content_range is None else {"Content-Range": content_range}
                left[:] = [answer(206, headers={"ETag": '"e"', **given}, body=b"hello")]
                received = bytearray()
                with pytest.raises(StoreError) as raised:
                    await store.get_range("a", 0, 5, received.extend)
                assert received == b""
                is_other = content_range in OTHER_RANGES
                wanted = FailureReason.OTHER if is_other else FailureReason.TRANSIENT
                assert raised.value.reason is wanted, content_range

    run(body())


def test_an_invalid_time_is_reported():
    headers = {"ETag": '"e"', "Content-Length": "5", "Content-Range": "bytes 0-4/5", "Last-Modified": "soon"}
    answers = {"head": answer(200, headers=headers), "get_range": answer(206, headers=headers, body=b"hello")}
    for error in refusals([(call, [each]) for call, each in answers.items()]):
        assert error is not None
        assert error.reason is FailureReason.TRANSIENT


# --- any answer --------------------------------------------------------------------------------------------

NAMES = st.sampled_from(
    "Key Size ETag LastModified PartNumber UploadId Initiated IsTruncated Prefix Name Bucket NextContinuationToken "
    "NextPartNumberMarker NextKeyMarker Code EncodingType KeyMarker PartNumberMarker ContinuationToken StartAfter "
    "ChecksumType ChecksumCRC64NVME".split()
)
WORDS = st.sampled_from(
    "run/ run/a run bucket u true false 5 -5 1 999999999999999999999999 e t url % 2026-11-21T04:00:00Z 1e400 NaN "
    "0001-01-01T00:00:00Z 9999-12-31T23:59:59-23:59 \N{SNOWMAN}".split()
)
TEXTS = WORDS | st.text(string.printable.replace("\x0b", "").replace("\x0c", ""), max_size=8)
FIELDS = st.lists(st.tuples(NAMES, TEXTS), max_size=7)
ITEMS = st.lists(
    st.tuples(st.sampled_from(["Contents", "Part", "Upload", "Deleted", "Error", "CommonPrefixes"]), FIELDS),
    max_size=3,
)
DOCUMENTS = st.sampled_from(
    ["ListBucketResult", "ListPartsResult", "ListMultipartUploadsResult", "DeleteResult", "Error", "html"]
)
DATES = st.sampled_from(["Sat, 21 Nov 2026 04:00:00 GMT", "", "soon", "Sat, 31 Feb 2026 04:00:00 GMT"])


@st.composite
def bodies(draw) -> bytes:
    head = dict(draw(FIELDS))
    extra = "".join(item(name, **dict(fields)) for name, fields in draw(ITEMS))
    whole = document(draw(DOCUMENTS), extra=extra, **head)
    if draw(st.booleans()):
        return whole
    at = draw(st.integers(0, len(whole)))
    return whole[:at] + draw(st.binary(max_size=4)) + whole[at + draw(st.integers(0, 8)) :]


@pytest.mark.fault("F71")
def test_any_response_is_understood_or_rejected():
    """Any answer must give a value of the right kind or a StoreError."""

    async def play():
        reply = [b""]
        async with connected(Peer(lambda _: reply[0])) as store:
            loop = asyncio.get_running_loop()

            @settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(
                st.sampled_from([*LISTINGS, "delete"]), bodies(), DATES, st.sampled_from([200, 200, 404, 503])
            )
            def check(call, body, date, status):
                reply[0] = answer(status, headers={"Date": date}, body=body)
                try:
                    found = asyncio.run_coroutine_threadsafe(CALLS[call](store), loop).result(20)
                except CkptAsyncError:
                    return
                assert status == 200
                check_value(call, found)

            await asyncio.to_thread(check)

    asyncio.run(asyncio.wait_for(play(), 60))


def check_value(call, found) -> None:
    match call:
        case "list":
            assert all(each.size_bytes >= 0 and each.key for each in found.objects)
            assert found.is_whole
        case "list_parts":
            assert all(each.size_bytes >= 0 for each in found)
        case "list_multiparts":
            assert all(each.key and each.upload_id for each in found)
