"""Directory buckets list whole folders in no particular order, and still nothing may be missing."""

import pytest

from ckpt_async.stores import open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from ckpt_async.stores.s3.listing import are_first, listed_prefix, server_start
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
    assert are_first("bucket", ["a", "b"])
    assert not are_first("bucket", ["b", "a"])
    assert not are_first(DIRECTORY, ["a", "b"])


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
