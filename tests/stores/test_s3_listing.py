"""Listings: what a directory bucket lists in no particular order, and what a page costs."""

import time

import botocore.utils
import pytest

from ckpt_async.stores import open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from ckpt_async.stores.s3 import session as s3_session
from ckpt_async.stores.s3.listing import listed_prefix, server_start
from tests.stores import s3_peer
from tests.stores.bodies import put

DIRECTORY = "run--usw2-az1--x-s3"


@pytest.mark.parametrize(
    ("prefix", "asked"), [("a/b", "a/"), ("a/b/", "a/b/"), ("a", ""), ("", ""), ("a/b-1", "a/")]
)
def test_what_is_asked_of_a_directory_bucket_is_a_folder(prefix, asked):
    assert listed_prefix(DIRECTORY, prefix) == asked
    assert listed_prefix("my-ap--usw2-az1--xa-s3", prefix) == asked
    assert listed_prefix("bucket", prefix) == prefix


def test_nothing_is_skipped_in_a_directory_bucket():
    assert server_start("bucket", "a/", "a/bcd") == "a/bc"
    assert server_start(DIRECTORY, "a/", "a/bcd") == ""


def test_a_page_of_a_directory_bucket_is_never_enough():
    """If one page happens to be in order, that says nothing about the next."""
    assert open_store("s3://bucket/run").has_order
    assert not open_store(f"s3://{DIRECTORY}/run").has_order


def test_a_reader_leaves_its_lease_in_a_directory_bucket(run, monkeypatch):
    """Nothing was probed in that case, and CRC64NVME would be refused."""

    async def body(peer):
        for name, value in peer.environment().items():
            monkeypatch.setenv(name, value)
        store = open_store(f"s3://{peer.bucket}/run")
        await store.open(is_read_only=True)
        try:
            data = b"lease"
            checksum = checksum_of(data, store.capabilities.checksum_algorithm)
            await store.put("lease", BytesBody(data), checksum)
            assert (await store.head("lease")).checksum == checksum
        finally:
            await store.close()

    with s3_peer.S3Peer(DIRECTORY) as peer:
        run(body(peer))


def test_all_pages_of_a_directory_bucket_are_read_and_sorted(run, monkeypatch):
    monkeypatch.setattr(s3_peer, "PAGE", 2)
    names = [f"a-{number}" for number in range(5)]

    async def body(peer):
        for name, value in peer.environment().items():
            monkeypatch.setenv(name, value)
        store = open_store(f"s3://{peer.bucket}/run")
        await store.open()
        try:
            for name in (*names, "b", "a/x"):
                await put(store, name, b"1")
            listing = await store.list("a-", start_after="a-1", enough=lambda _: True)
            assert [each.key for each in listing.objects] == names[2:]
            assert listing.is_whole
        finally:
            await store.close()

    with s3_peer.S3Peer(DIRECTORY) as peer:
        run(body(peer))


def test_the_times_of_a_listing_are_not_guessed(run, s3_url, monkeypatch):
    """The SDK tries one format after the other: a page of 1,000 objects took 180 ms of the GIL, and now takes 45."""

    def guess(value):
        raise AssertionError(f"{value} was guessed")

    async def body():
        store = open_store(s3_url)
        await store.open()
        try:
            written = await put(store, "a", b"1")
            monkeypatch.setattr(botocore.utils, "parse_timestamp", guess)
            (listed,) = (await store.list("a")).objects
            assert (listed.key, listed.etag) == ("a", written.etag)
            assert abs(listed.last_modified - time.time()) < 3600
        finally:
            await store.close()

    run(body())


@pytest.mark.parametrize(
    "text",
    [
        "2024-02-29T23:59:59Z",
        "2024-02-29T23:59:59.123Z",
        "2024-02-29T23:59:59.123456Z",
        "2024-02-29T23:59:59.123456789Z",
        "2024-02-29T23:59:59+02:00",
        "Thu, 29 Feb 2024 23:59:59 GMT",
        "1700000000",
        1700000000.5,
    ],
)
def test_a_time_means_what_it_means_to_the_sdk(text):
    assert s3_session._timestamp(text) == botocore.utils.parse_timestamp(text)


@pytest.mark.parametrize("text", ["", "2024-13-01T00:00:00Z", "2024-02-30T00:00:00.000Z", "yesterday"])
def test_a_time_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="Invalid timestamp"):
        s3_session._timestamp(text)
