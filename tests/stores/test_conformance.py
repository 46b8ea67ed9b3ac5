"""Every promise of `store.py`, tested against every store, with SeaweedFS always standing in for S3."""

import asyncio
import functools
import os
import random
import ssl
import threading
import uuid

import pytest
import trustme
import uvloop

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
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody, Create, Match, SmallGet, SmallPut
from tests.azurite import AzuriteServer
from tests.faults.proxy import FaultProxy
from tests.s3_servers.servers import FAULTS, chosen
from tests.stores.azure_peer import AzurePeer
from tests.stores.bodies import ChangedBody, ReusingBody, ShortBody, put
from tests.stores.memory import MemoryBucket, MemoryStore
from tests.stores.s3_peer import S3Peer

MIB = 1 << 20
UNSAFE_KEYS = ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".", "a\\b", "a\nb", "a\0b"]
ODD_KEY = "run=1/step=10+rank@0,a b/é~%41%2F&?#(1).distcp"


def with_stores(count: int):
    """Give an async test `count` open stores that see the same objects."""

    def decorate(test):
        def opened(self, make_store, run):
            async def body():
                stores = [make_store() for _ in range(count)]
                try:
                    for store in stores:
                        await store.open()
                    await test(self, *stores)
                finally:
                    for store in stores:
                        await store.close()

            run(body())

        opened.__name__, opened.__doc__ = test.__name__, test.__doc__
        return opened

    return decorate


with_store = with_stores(1)


async def read(store, key: str, offset: int, size_bytes: int) -> bytes:
    received = bytearray()
    await store.get_range(key, offset, size_bytes, received.extend)
    return bytes(received)


async def keys(store, prefix: str = "", **options) -> list[str]:
    return [each.key for each in (await store.list(prefix, **options)).objects]


def given_remote(scheme: str) -> str:
    """Return a place in the bucket that `./dev cloud` was given, or "": then a server is started on this machine."""
    remote = os.environ.get("CKPT_TESTS_REMOTE", "")
    return f"{remote}/{uuid.uuid4().hex}" if remote.startswith(f"{scheme}://") else ""


class StoreTests:
    """Promises that every store keeps."""

    odd_key = ODD_KEY
    algorithm = "crc64nvme"

    def crc(self, data: bytes) -> Checksum:
        return checksum_of(data, self.algorithm)

    def kept(self, store, data: bytes) -> tuple[Checksum | None, ...]:
        """Return the checksums that the store may report of an object with these bytes."""
        return (self.crc(data), None) if store.capabilities.reads_back else (self.crc(data),)

    def needs_comparing(self, store) -> None:
        """Skip the rest where the store reports no checksums: what arrived is compared by whoever sent it
        (tests/transfer/test_read_back.py). Other stores without checksums read back themselves.
        """
        if store.capabilities.reads_back and store.capabilities.multipart:
            pytest.skip("the store compares no checksums: what arrived is read back")

    # --- objects -------------------------------------------------------------------------------------------

    @with_store
    async def test_objects_read_back_as_written(self, store):
        """put, get, head and list must agree."""
        stored = await put(store, "a/b", b"hello")
        data, got = await store.get("a/b", max_size_bytes=5)
        headed = await store.head("a/b")
        listing = await store.list("a/")
        assert data == b"hello"
        assert headed.checksum in self.kept(store, b"hello")
        assert stored.checksum in (None, self.crc(b"hello"))
        assert {stored.etag, got.etag, headed.etag, listing.objects[0].etag} == {headed.etag}
        assert {stored.size_bytes, got.size_bytes, headed.size_bytes, listing.objects[0].size_bytes} == {5}
        assert {each.key for each in (stored, got, headed, listing.objects[0])} == {"a/b"}
        assert abs(listing.server_time - headed.last_modified) < 10
        assert int(headed.last_modified) == int(
            listing.objects[0].last_modified
        )  # HTTP's times have no fractions

    @with_store
    async def test_crc32c_is_stored_and_compared(self, store):
        stored = await store.put("a", BytesBody(b"hello"), checksum_of(b"hello", "crc32c"))
        assert stored.checksum in (None, checksum_of(b"hello", "crc32c"))
        self.needs_comparing(store)
        with pytest.raises(IntegrityError):
            await store.put("b", BytesBody(b"hello"), checksum_of(b"other", "crc32c"))

    @with_store
    async def test_an_empty_object(self, store):
        await put(store, "empty", b"")
        assert await store.get("empty", max_size_bytes=0) == (b"", await store.head("empty"))
        assert await read(store, "empty", 0, 0) == b""

    @with_store
    async def test_a_body_may_reuse_one_buffer_for_its_slices(self, store):
        """A store that still referred to a slice when it asked for the next would send corrupted bytes."""
        data = random.Random(1).randbytes(24 * MIB + 7)
        stored = await store.put("big", ReusingBody(data, MIB), self.crc(data))
        assert stored.size_bytes == len(data)
        assert await read(store, "big", 0, len(data)) == data

    @with_store
    async def test_ranged_reads(self, store):
        data = os.urandom(3 * MIB + 5)
        await put(store, "a", data)
        info = await store.get_range("a", MIB - 3, 7, lambda _: None)
        assert info.size_bytes == len(data)
        assert await read(store, "a", MIB - 3, 2 * MIB) == data[MIB - 3 :][: 2 * MIB]
        assert await read(store, "a", len(data) - 1, 1) == data[-1:]
        assert await read(store, "a", 5, 0) == b""

    @pytest.mark.parametrize(("offset", "size_bytes"), [(5, 1), (0, 6), (3, 3)])
    def test_range_beyond_the_end_is_refused(self, make_store, run, offset, size_bytes):
        """A partial answer must not be taken for a complete one."""

        async def body(_, store):
            await put(store, "a", b"hello")
            with pytest.raises(StoreError) as raised:
                await read(store, "a", offset, size_bytes)
            assert raised.value.reason is FailureReason.OTHER

        with_store(body)(self, make_store, run)

    @with_store
    async def test_an_error_of_the_sink_is_raised(self, store):
        await put(store, "a", b"hello")

        def sink(_):
            raise OSError("the destination is full")

        with pytest.raises(OSError, match="the destination is full"):
            await store.get_range("a", 0, 5, sink)
        assert await read(store, "a", 0, 5) == b"hello"

    @with_store
    async def test_get_rejects_an_object_that_is_too_large(self, store):
        await put(store, "a", b"hello")
        with pytest.raises(StoreError) as raised:
            await store.get("a", max_size_bytes=4)
        assert raised.value.reason is FailureReason.OTHER
        assert (await store.get("a", max_size_bytes=5))[0] == b"hello"

    @with_store
    async def test_put_overwrites(self, store):
        first = await put(store, "a", b"one")
        second = await put(store, "a", b"three")
        assert first.etag != second.etag
        assert (await store.get("a", max_size_bytes=9))[0] == b"three"

    @with_store
    async def test_a_copy_has_the_bytes_and_the_checksum_of_its_source(self, store):
        source = await put(store, self.odd_key, b"hello")
        await store.copy(self.odd_key, source.etag, "to/a+b=c")
        assert await store.get("to/a+b=c", max_size_bytes=5) == (b"hello", await store.head("to/a+b=c"))
        assert (await store.head("to/a+b=c")).checksum in self.kept(store, b"hello")
        assert await keys(store) == sorted(["to/a+b=c", self.odd_key])

    @with_store
    async def test_a_copy_replaces_what_is_there_and_nothing_else(self, store):
        one, two = await put(store, "one", b"1"), await put(store, "two", b"22")
        for source in (one, two, two):  # the second time it is already there
            await store.copy(source.key, source.etag, "to")
        assert (await store.get("to", max_size_bytes=2))[0] == b"22"
        assert (await store.get("one", max_size_bytes=2))[0] == b"1"

    @with_store
    async def test_a_copy_outlives_its_source(self, store):
        source = await put(store, "from", b"hello")
        await store.copy("from", source.etag, "to")
        await put(store, "from", b"other")
        assert (await store.get("to", max_size_bytes=5))[0] == b"hello"
        await store.delete(["from"])
        assert (await store.get("to", max_size_bytes=5))[0] == b"hello"

    @with_store
    async def test_an_object_that_has_changed_or_is_gone_is_not_copied(self, store):
        old = await put(store, "from", b"one")
        await put(store, "from", b"another")
        with pytest.raises(PreconditionFailedError):
            await store.copy("from", old.etag, "to")
        await store.delete(["from"])
        with pytest.raises(ObjectNotFoundError):
            await store.copy("from", old.etag, "to")
        assert await keys(store) == []

    @with_store
    async def test_an_object_is_deleted_only_if_it_is_the_same(self, store):
        old = await put(store, "a", b"one")
        new = await put(store, "a", b"another")
        with pytest.raises(PreconditionFailedError):
            await store.delete_if("a", old.etag)
        assert (await store.get("a", max_size_bytes=9))[0] == b"another"
        await store.delete_if("a", new.etag)
        assert await keys(store) == []
        with pytest.raises(PreconditionFailedError):
            await store.delete_if("a", new.etag)

    @with_store
    async def test_a_missing_object_is_not_found(self, store):
        for request in (
            store.get("a/b", max_size_bytes=1),
            store.head("a/b"),
            store.get_range("a/b", 0, 1, lambda _: None),
        ):
            with pytest.raises(ObjectNotFoundError) as raised:
                await request
            assert raised.value.key == "a/b"

    @with_store
    async def test_a_key_below_an_object_is_not_found(self, store):
        await put(store, "a", b"1")
        with pytest.raises(ObjectNotFoundError):
            await store.head("a/b")
        await store.delete(["a/b"])
        assert await keys(store) == ["a"]

    @with_store
    async def test_keys_may_contain_odd_characters(self, store):
        await put(store, self.odd_key, b"1")
        assert await keys(store) == [self.odd_key]
        assert await keys(store, self.odd_key[:-3]) == [self.odd_key]
        assert (await store.get(self.odd_key, max_size_bytes=1))[0] == b"1"
        await store.delete([self.odd_key])
        assert await keys(store) == []

    @pytest.mark.parametrize("key", UNSAFE_KEYS)
    def test_unsafe_key_is_refused(self, make_store, run, key):
        """No key may name anything outside the prefix (I10)."""

        async def body(_, store):
            await put(store, "kept", b"1")
            for request in (
                lambda: put(store, key, b"1"),
                lambda: store.get(key, max_size_bytes=1),
                lambda: store.head(key),
                lambda: store.get_range(key, 0, 1, lambda _: None),
                lambda: store.get_many([SmallGet("kept", 1), SmallGet(key, 1)], lambda *_: None),
                lambda: store.delete(["kept", key]),
                lambda: store.delete_if(key, '"e"'),
                lambda: store.copy("kept", '"e"', key),
                lambda: store.copy(key, '"e"', "to"),
                lambda: store.create_multipart(key),
            ):
                with pytest.raises(StoreError) as raised:
                    await request()
                assert raised.value.reason is FailureReason.OTHER
            assert await keys(store) == ["kept"]

        with_store(body)(self, make_store, run)

    # --- many small ones -----------------------------------------------------------------------------------

    @with_store
    async def test_put_many_writes_small_objects(self, store):
        """Each is stored as by `put` and reported in order; an empty series is fine too."""
        many = {"a/1": b"one", self.odd_key: b"odd", "empty": b"", "a/0": os.urandom(70_000)}
        stored = []
        await store.put_many([], stored.append)
        await store.put_many(
            [SmallPut(key, data, self.crc(data)) for key, data in many.items()], stored.append
        )
        assert [(each.key, each.size_bytes) for each in stored] == [
            (key, len(data)) for key, data in many.items()
        ]
        for each in stored:
            headed = await store.head(each.key)
            assert headed.etag == each.etag
            assert headed.checksum in self.kept(store, many[each.key])
            assert each.checksum in (None, headed.checksum)
            assert (await store.get(each.key, max_size_bytes=MIB))[0] == many[each.key]

    @with_store
    async def test_put_many_stops_at_the_first_failure(self, store):
        """What was stored before the failure is reported, and what follows it is never started."""
        good = [SmallPut(f"good/{number}", b"%d" % number, self.crc(b"%d" % number)) for number in range(4)]
        self.needs_comparing(store)
        for error, bad in (
            (IntegrityError, SmallPut("bad", b"hello", self.crc(b"other"))),
            (StoreError, SmallPut("../bad", b"hello", self.crc(b"hello"))),
        ):
            stored = []
            with pytest.raises(error) as raised:
                await store.put_many([*good[:3], bad, good[3]], stored.append)
            assert raised.value.key == bad.key
            assert [each.key for each in stored] == [each.key for each in good[:3]]
            assert await keys(store) == [each.key for each in good[:3]]

    @with_store
    async def test_get_many_reads_in_order(self, store):
        """All arrive whole, even more than a store takes at once; an empty series is fine too."""
        many = {"a/1": b"one", self.odd_key: b"odd", "large": os.urandom(256 << 10), "a/0": b"x"}
        many |= {f"b/{number}": b"%d" % number for number in range(17)}
        await store.put_many(
            [SmallPut(key, data, self.crc(data)) for key, data in many.items()], lambda _: None
        )
        gets, found = [SmallGet(key, len(data)) for key, data in many.items()], []

        def got(get, data):
            assert isinstance(data, memoryview)
            found.append((get, bytes(data)))

        await store.get_many([], got)
        assert found == []
        await store.get_many(gets, got)
        assert found == list(zip(gets, many.values(), strict=True))

    @pytest.mark.parametrize("bad", ["missing", "larger", "smaller"])
    def test_get_many_stops_at_the_first_failure(self, make_store, run, bad):
        async def body(_, store):
            for key in ("a", "b", "bad", "c"):
                if key != "bad" or bad != "missing":
                    await put(store, key, b"hello")
            wrong = SmallGet("bad", {"missing": 5, "larger": 4, "smaller": 6}[bad])
            gets, found = [SmallGet("a", 5), SmallGet("b", 5), wrong, SmallGet("c", 5)], []
            with pytest.raises(StoreError) as raised:
                await store.get_many(gets, lambda get, _: found.append(get))
            assert isinstance(raised.value, ObjectNotFoundError) == (bad == "missing")
            assert bad == "missing" or raised.value.reason is FailureReason.OTHER
            assert raised.value.key == "bad"
            assert found == gets[:2]
            await store.get_many(gets[:2], lambda get, _: found.append(get))
            assert found[-2:] == gets[:2]

        with_store(body)(self, make_store, run)

    @pytest.mark.parametrize(
        "error",
        [OSError(28, "full"), ValueError("no"), IntegrityError("bad", operation="x", key="y")],
        ids=repr,
    )
    def test_get_many_raises_the_receivers_error(self, make_store, run, error):
        """The error is raised unchanged, and the receiver is not called again."""

        async def body(_, store):
            gets, found = [SmallGet(key, 5) for key in ("a", "b", "c")], []
            for get in gets:
                await put(store, get.key, b"hello")

            def got(get, _):
                found.append(get)
                if get == gets[1]:
                    raise error

            with pytest.raises(type(error)) as raised:
                await store.get_many(gets, got)
            assert raised.value is error
            assert found == gets[:2]

        with_store(body)(self, make_store, run)

    @with_store
    async def test_get_many_reports_nothing_after_cancellation(self, store):
        """The call must not return before its receiver has, because what it writes to is closed next."""
        gets = [SmallGet(f"{number:02}", 5) for number in range(20)]
        await store.put_many(
            [SmallPut(get.key, b"hello", self.crc(b"hello")) for get in gets], lambda _: None
        )
        inside, leave, found = threading.Event(), threading.Event(), []

        def got(get, data):
            inside.set()
            # A receiver that runs in the event loop cannot be cancelled while it runs.
            assert threading.current_thread() is threading.main_thread() or leave.wait(30)
            found.append((get, bytes(data)))

        task = asyncio.ensure_future(store.get_many(gets, got))
        while not inside.is_set():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen = list(found)
        assert [get for get, _ in seen] == gets[: len(seen)]
        assert 0 < len(seen) < len(gets)
        found.clear()
        await store.get_many(gets, got)
        assert found == [(get, b"hello") for get in gets]

    # --- bodies that fail ----------------------------------------------------------------------------------

    @with_store
    async def test_wrong_checksum_is_refused(self, store):
        """Nothing becomes visible, and an existing object stays untouched."""
        self.needs_comparing(store)
        await put(store, "old", b"old")
        for key in ("new", "old"):
            with pytest.raises(IntegrityError):
                await store.put(key, BytesBody(b"hello"), self.crc(b"other"))
        assert await keys(store) == ["old"]
        assert (await store.get("old", max_size_bytes=3))[0] == b"old"

    @with_store
    async def test_an_error_of_the_source_is_raised_unchanged(self, store):
        """The engine must see that the file changed, not that a connection broke."""
        for good_bytes in (0, 10, 2 * MIB):
            body = ChangedBody(4 * MIB, good_bytes)
            with pytest.raises(SourceError) as raised:
                await store.put("a", body, self.crc(bytes(4 * MIB)))
            assert raised.value is body.error
        assert await keys(store) == []
        await put(store, "a", b"still works")

    @with_store
    async def test_body_that_ends_early_is_a_source_error(self, store):
        with pytest.raises(SourceError):
            await store.put("a", ShortBody(b"hello"), self.crc(b"hello"))
        assert await keys(store) == []

    @with_store
    async def test_cancelled_put_leaves_nothing(self, store):
        """Nothing is visible after a cancellation in the middle of the body, and the store keeps working."""
        data = bytes(4 * MIB)

        class Stopping(ReusingBody):
            def send(self, writer):
                writer.write(memoryview(data)[:MIB])
                loop.call_soon_threadsafe(reached.set)
                writer.wait(3600)
                writer.write(memoryview(data)[MIB:])

        reached, loop = asyncio.Event(), asyncio.get_running_loop()
        task = asyncio.ensure_future(store.put("a", Stopping(data, MIB), self.crc(data)))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await keys(store) == []
        await put(store, "a", b"1")

    # --- conditions ----------------------------------------------------------------------------------------

    @with_stores(4)
    async def test_create_once_has_exactly_one_winner(self, *stores):
        """16 writers compete in each of 2 rounds (rule R4)."""
        for attempt in range(2):
            key = f"decisions/{attempt}"
            outcomes = await asyncio.gather(
                *(put(stores[i % 4], key, b"writer %d" % i, condition=Create()) for i in range(16)),
                return_exceptions=True,
            )
            winners = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Exception)]
            losers = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            assert len(winners) == 1
            assert {type(loser) for loser in losers} == {PreconditionFailedError}
            assert (await stores[0].get(key, max_size_bytes=99))[0] == b"writer %d" % winners[0]

    @with_stores(4)
    async def test_compare_and_swap_loses_no_update(self, *stores):
        """8 writers add 5 each, and none of these updates may be lost."""
        await put(stores[0], "counter", b"0")

        async def add(store):
            done = 0
            while done < 5:
                data, info = await store.get("counter", max_size_bytes=9)
                try:
                    await put(store, "counter", b"%d" % (int(data) + 1), condition=Match(info.etag))
                    done += 1
                except PreconditionFailedError:
                    continue
                except StoreError as error:  # Ceph answers 500 to whoever was overtaken
                    if error.reason is not FailureReason.TRANSIENT:
                        raise

        await asyncio.gather(*(add(stores[i % 4]) for i in range(8)))
        assert (await stores[0].get("counter", max_size_bytes=9))[0] == b"40"

    @with_store
    async def test_failed_conditions_are_reported(self, store):
        first = await put(store, "a", b"1")
        second = await put(store, "a", b"2", condition=Match(first.etag))
        for condition in (Create(), Match(first.etag), Match('"no such etag"')):
            with pytest.raises(PreconditionFailedError):
                await put(store, "a", b"3", condition=condition)
        with pytest.raises(PreconditionFailedError):
            await put(store, "missing", b"3", condition=Match(second.etag))
        assert await keys(store) == ["a"]
        assert (await store.get("a", max_size_bytes=1))[0] == b"2"

    # --- listing and deleting ------------------------------------------------------------------------------

    @with_store
    async def test_listing_is_in_key_order(self, store):
        """The order is that of the whole key: walking folder by folder would put a/z before a-b."""
        names = ["a-b", "a.b/c", "a/z-1/x", "a/z/1", "a0", "b", "é"]
        for name in reversed(names):
            await put(store, name, b"1")
        assert await keys(store) == sorted(names)
        assert await keys(store, start_after="a/z-1/x") == ["a/z/1", "a0", "b", "é"]
        assert await keys(store, "a/", start_after="a/z-1/x") == ["a/z/1"]
        for start in (
            "a",
            "a-b",
            "a.b",
            "a.b/c",
            "a/z",
            "a/z-1",
            "a/z-1/x",
            "a/z/",
            "a/z/0",
            "a/z/1",
            "a0",
            "b",
            "zz",
        ):
            assert await keys(store, start_after=start) == [name for name in sorted(names) if name > start]

    @with_store
    async def test_prefix_is_a_string_not_a_folder(self, store):
        for name in ("step-1/a", "step-10/a", "step-2/a"):
            await put(store, name, b"1")
        assert await keys(store, "step-1") == ["step-1/a", "step-10/a"]
        assert await keys(store, "step-1/") == ["step-1/a"]
        assert await keys(store, "step-3") == []
        assert await keys(store, "no/such/folder") == []

    @with_store
    async def test_listing_spans_pages(self, store):
        """S3 lists and deletes 1,000 keys at a time."""
        names = [f"r/{i:05d}" for i in range(1203)]
        for start in range(0, len(names), 32):
            await asyncio.gather(*(put(store, name, b"") for name in names[start : start + 32]))
        await put(store, "s", b"")
        assert await keys(store, "r/") == names
        assert await keys(store, "r/", start_after=names[100]) == names[101:]
        await store.delete(names[1:])
        assert await keys(store) == [names[0], "s"]

    @with_store
    async def test_start_after_need_not_exist(self, store):
        for name in ("a/1", "a/3"):
            await put(store, name, b"")
        assert await keys(store, "a/", start_after="a/2") == ["a/3"]
        assert await keys(store, "a/", start_after="a/3") == []

    @with_store
    async def test_delete_takes_exactly_the_keys(self, store):
        for name in ("step-1/a", "step-1/b", "step-10/a"):
            await put(store, name, b"")
        await store.delete(["step-1/a", "missing", "step-1"])
        assert await keys(store) == ["step-1/b", "step-10/a"]
        await store.delete(["step-1/a"])
        await store.delete([])
        assert await keys(store) == ["step-1/b", "step-10/a"]

    # --- life ----------------------------------------------------------------------------------------------

    @with_store
    async def test_open_probes_all_capabilities_and_leaves_nothing(self, store):
        assert await keys(store) == []
        assert not await store.list_multiparts("")
        assert store.capabilities.conditional_put
        assert store.capabilities.checksum_algorithm == self.algorithm

    @with_store
    async def test_closing_twice_is_harmless(self, store):
        await store.close()
        await store.close()


class MultipartTests(StoreTests):
    """Promises that every store with multipart uploads keeps."""

    BIG = bytes(range(256)) * (5 * 4096)  # 5 MiB, the minimum for any part but the last
    SMALL = b"the last part may be small"

    async def put_parts(self, store, key: str):
        upload_id = await store.create_multipart(key)
        last = await store.put_part(key, upload_id, 2, BytesBody(self.SMALL), self.crc(self.SMALL))
        first = await store.put_part(key, upload_id, 1, ReusingBody(self.BIG, MIB), self.crc(self.BIG))
        return upload_id, [first, last]

    @property
    def whole(self) -> bytes:
        return self.BIG + self.SMALL

    @with_stores(2)
    async def test_life_of_a_multipart_upload(self, store, after_restart):
        """Parts may arrive in any order, and stay invisible until someone who knows the id completes the upload."""
        upload_id, parts = await self.put_parts(store, "a/b")
        assert [part.size_bytes for part in parts] == [len(self.BIG), len(self.SMALL)]
        assert await keys(store) == []
        listed = await after_restart.list_parts("a/b", upload_id)
        assert [(part.number, part.size_bytes, part.etag) for part in listed] == [
            (part.number, part.size_bytes, part.etag) for part in parts
        ]
        stored = await after_restart.complete_multipart(
            "a/b", upload_id, listed, self.crc(self.whole), len(self.whole)
        )
        headed = await store.head("a/b")
        assert stored.checksum in (None, self.crc(self.whole))
        assert headed.checksum in self.kept(store, self.whole)
        assert stored.size_bytes == headed.size_bytes == len(self.whole)
        assert stored.etag in ("", headed.etag)  # Ceph tells it only afterwards
        assert await read(store, "a/b", 0, len(self.whole)) == self.whole
        assert not await store.list_multiparts("")

    @with_store
    async def test_a_part_number_sent_again_replaces_the_part(self, store):
        upload_id, (first, _) = await self.put_parts(store, "a")
        last = await store.put_part("a", upload_id, 2, BytesBody(b"other"), self.crc(b"other"))
        assert [part.number for part in await store.list_parts("a", upload_id)] == [1, 2]
        whole = self.BIG + b"other"
        await store.complete_multipart("a", upload_id, [first, last], self.crc(whole), len(whole))
        assert await read(store, "a", len(self.BIG), 5) == b"other"

    @with_store
    async def test_a_part_with_a_wrong_checksum_is_rejected(self, store):
        self.needs_comparing(store)
        upload_id = await store.create_multipart("a")
        with pytest.raises(IntegrityError):
            await store.put_part("a", upload_id, 1, BytesBody(b"hello"), self.crc(b"other"))
        body = ChangedBody(4 * MIB, MIB)
        with pytest.raises(SourceError) as raised:
            await store.put_part("a", upload_id, 1, body, self.crc(bytes(4 * MIB)))
        assert raised.value is body.error
        assert list(await store.list_parts("a", upload_id)) == []

    @with_store
    async def test_a_wrong_full_object_checksum_is_rejected(self, store):
        """The checksum of the whole detects correct parts in a wrong order, and parts of another file."""
        self.needs_comparing(store)
        upload_id, parts = await self.put_parts(store, "a")
        with pytest.raises(IntegrityError):
            await store.complete_multipart("a", upload_id, parts, self.crc(b"other"), len(self.whole))
        assert await keys(store) == []

    @with_store
    async def test_completing_an_upload_twice(self, store):
        """A lost reply makes the client ask again."""
        upload_id, parts = await self.put_parts(store, "a")
        first = await store.complete_multipart("a", upload_id, parts, self.crc(self.whole), len(self.whole))
        second = await store.complete_multipart("a", upload_id, parts, self.crc(self.whole), len(self.whole))
        assert first.size_bytes == second.size_bytes
        assert first.etag in ("", second.etag)
        with pytest.raises(ObjectNotFoundError):
            await store.list_parts("a", upload_id)
        await store.abort_multipart("a", upload_id)
        assert await keys(store) == ["a"]

    @with_store
    async def test_aborting_an_upload(self, store):
        upload_id, parts = await self.put_parts(store, "a")
        await store.abort_multipart("a", upload_id)
        await store.abort_multipart("a", upload_id)
        for request in (
            lambda: store.list_parts("a", upload_id),
            lambda: store.put_part("a", upload_id, 1, BytesBody(b"1"), self.crc(b"1")),
            lambda: store.complete_multipart("a", upload_id, parts, self.crc(self.whole), len(self.whole)),
        ):
            with pytest.raises(ObjectNotFoundError):
                await request()
        assert await keys(store) == []
        assert not await store.list_multiparts("")

    @with_store
    async def test_a_part_that_is_too_small_is_rejected(self, store):
        upload_id = await store.create_multipart("a")
        parts = [
            await store.put_part("a", upload_id, number, BytesBody(b"tiny"), self.crc(b"tiny"))
            for number in (1, 2)
        ]
        with pytest.raises(StoreError) as raised:
            await store.complete_multipart("a", upload_id, parts, self.crc(b"tinytiny"), 8)
        assert raised.value.reason is FailureReason.OTHER
        assert await keys(store) == []

    @with_store
    async def test_unfinished_uploads_are_listed_below_a_prefix(self, store):
        ids = {key: await store.create_multipart(key) for key in ("step-1/a", "step-1/b", "step-10/a")}
        found = await store.list_multiparts("step-1/")
        assert {(each.key, each.upload_id) for each in found} == {
            (key, ids[key]) for key in ("step-1/a", "step-1/b")
        }
        now = (await store.list("")).server_time
        assert all(abs(now - each.initiated_at) < 10 for each in found)
        assert {each.key for each in await store.list_multiparts("")} == set(ids)

    @with_store
    async def test_parts_of_another_object(self, store):
        """They are copied within the store, and the checksum of the whole is still verified."""
        whole = random.Random(4).randbytes(11 * MIB + 5)
        source = await store.put("from", BytesBody(whole), self.crc(whole))
        upload_id = await store.create_multipart("to")
        ranges = [(0, 6 * MIB), (6 * MIB, 5 * MIB + 5)]
        parts = [
            await store.copy_part("from", source.etag, "to", upload_id, number, *range_)
            for number, range_ in enumerate(ranges, 1)
        ]
        assert [part.size_bytes for part in parts] == [6 * MIB, 5 * MIB + 5]
        if not store.capabilities.reads_back:
            with pytest.raises(IntegrityError):
                await store.complete_multipart("to", upload_id, parts, self.crc(b"other"), len(whole))
        await store.complete_multipart("to", upload_id, parts, self.crc(whole), len(whole))
        assert await read(store, "to", 0, len(whole)) == whole
        assert (await store.head("to")).checksum in self.kept(store, whole)

    @with_store
    async def test_a_part_of_another_object_that_has_changed_is_refused(self, store):
        old = await put(store, "from", b"one")
        await put(store, "from", b"another")
        upload_id = await store.create_multipart("to")
        with pytest.raises(PreconditionFailedError):
            await store.copy_part("from", old.etag, "to", upload_id, 1, 0, 3)
        assert list(await store.list_parts("to", upload_id)) == []


class TestMemoryStore(MultipartTests):
    @pytest.fixture
    def make_store(self):
        return functools.partial(MemoryStore, MemoryBucket(), prefix="run")


class TestDirectoryStore(StoreTests):
    @pytest.fixture
    def make_store(self, tmp_path):
        return functools.partial(open_store, f"file://{tmp_path}/made/run")

    @with_store
    async def test_a_store_without_multipart_declares_it(self, store):
        assert not store.capabilities.multipart
        with pytest.raises(StoreError) as raised:
            await store.create_multipart("a")
        assert raised.value.reason is FailureReason.OTHER


class FsspecTests(StoreTests):
    """Tests for stores without conditional writes, where rank 0 alone decides."""

    test_create_once_has_exactly_one_winner = test_compare_and_swap_loses_no_update = None
    test_listing_spans_pages = None  # there are no pages

    @pytest.fixture
    def make_store(self, request):
        return functools.partial(open_store, f"{request.getfixturevalue(f'{self.kind}_url')}/run")

    @with_store
    async def test_open_probes_all_capabilities_and_leaves_nothing(self, store):
        assert await keys(store) == []
        found = store.capabilities
        assert (found.conditional_put, found.multipart, found.copies) == (False, False, self.kind == "webdav")
        assert any("read back" in remark for remark in found.remarks)


class TestSftpStore(FsspecTests):
    kind = "sftp"
    # SFTP has no copies.
    test_a_copy_has_the_bytes_and_the_checksum_of_its_source = test_a_copy_outlives_its_source = None
    test_a_copy_replaces_what_is_there_and_nothing_else = None
    test_an_object_that_has_changed_or_is_gone_is_not_copied = None

    @with_store
    async def test_failed_conditions_are_reported(self, store):
        """Conditions are checked just before writing; SFTP distinguishes versions by size and modification second."""
        first = await put(store, "a", b"1")
        second = await put(store, "a", b"22", condition=Match(first.etag))
        for condition in (Create(), Match(first.etag)):
            with pytest.raises(PreconditionFailedError):
                await put(store, "a", b"3", condition=condition)
        await store.delete(["a"])
        with pytest.raises(PreconditionFailedError):
            await put(store, "a", b"3", condition=Match(second.etag))

    @with_store
    async def test_a_copy_is_refused(self, store):
        source = await put(store, "a", b"hello")
        with pytest.raises(StoreError) as raised:
            await store.copy("a", source.etag, "b")
        assert raised.value.reason is FailureReason.OTHER


class TestWebdavStore(FsspecTests):
    kind = "webdav"
    odd_key = "run=1/step=10+rank@0,a b/é~(1).distcp"  # webdav4 puts '%', '?' and '#' into URLs unescaped


class TestS3Store(MultipartTests):
    """Runs against SeaweedFS, or against what `./dev stores` has chosen, or `./dev cloud` was given."""

    @pytest.fixture
    def make_store(self, request):
        if remote := given_remote("s3"):
            return functools.partial(open_store, remote)
        s3_url = request.getfixturevalue("s3_url")
        if (why := FAULTS[chosen()].get(request.node.originalname)) is not None:
            request.applymarker(pytest.mark.xfail(reason=why, strict=True))
        return functools.partial(open_store, f"{s3_url}/run")


class TestS3Express(MultipartTests):
    """Runs against the tests' own peer: sessions, CRC32C only, listings of folders in no order."""

    algorithm = "crc32c"

    @pytest.fixture
    def make_store(self, monkeypatch):
        with S3Peer("ckpt--usw2-az1--x-s3") as peer:
            for name, value in peer.environment().items():
                monkeypatch.setenv(name, value)
            yield functools.partial(open_store, f"s3://{peer.bucket}/run")


class AzureTests(MultipartTests):
    """Azure has no uploads of its own, so two promises differ."""

    @with_store
    async def test_aborting_an_upload(self, store):
        """A part that arrives later is accepted, but completing is refused."""
        upload_id, parts = await self.put_parts(store, "a")
        await store.abort_multipart("a", upload_id)
        await store.abort_multipart("a", upload_id)
        with pytest.raises(ObjectNotFoundError):
            await store.list_parts("a", upload_id)
        await store.put_part("a", upload_id, 1, BytesBody(self.BIG), self.crc(self.BIG))
        for request in (
            store.list_parts("a", upload_id),
            store.complete_multipart("a", upload_id, parts, self.crc(self.whole), len(self.whole)),
        ):
            with pytest.raises(ObjectNotFoundError):
                await request
        assert await keys(store) == []
        assert not await store.list_multiparts("")

    @with_store
    async def test_a_part_that_is_too_small_is_rejected(self, store):
        """On Azure no part is too small."""
        upload_id = await store.create_multipart("a")
        parts = [
            await store.put_part("a", upload_id, number, BytesBody(b"tiny"), self.crc(b"tiny"))
            for number in (1, 2)
        ]
        await store.complete_multipart("a", upload_id, parts, self.crc(b"tinytiny"), 8)
        assert await read(store, "a", 0, 8) == b"tinytiny"

    def test_a_store_opened_to_be_read_may_write_its_lease(self, make_store, run):
        """Nothing was probed in that case, and a server without CRC64 must accept it nevertheless."""

        async def body():
            store = make_store()
            await store.open(is_read_only=True)
            try:
                await put(store, "lease", b"hello")
                assert (await store.head("lease")).checksum == self.crc(b"hello")
                with pytest.raises(IntegrityError):
                    await store.put("other", BytesBody(b"hello"), self.crc(b"other"))
            finally:
                await store.close()

        run(body())


class TestAzureStore(AzureTests):
    """Runs against Azurite, which stands in for Azure."""

    # Azurite has no Put Block From URL.
    test_parts_of_another_object = test_a_part_of_another_object_that_has_changed_is_refused = None

    @pytest.fixture
    def make_store(self, azure_url):
        return functools.partial(open_store, f"{azure_url}/run")


class TestAzureAsDocumented(AzureTests):
    """Runs against the tests' own peer, with CRC64, pages, and copies of parts."""

    @pytest.fixture
    def make_store(self):
        if remote := given_remote("az"):
            yield functools.partial(open_store, remote)
            return
        with AzurePeer() as peer:
            yield functools.partial(open_store, "az://ckpt/run", env=peer.environment())


@pytest.fixture(scope="module")
def azurite_over_tls(authority, tmp_path_factory):
    folder = tmp_path_factory.mktemp("azurite-tls")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for each in issued.cert_chain_pems:
        each.write_to_path(folder / "cert.pem", append=True)
    with AzuriteServer(folder, tls=(folder / "cert.pem", folder / "key.pem")) as server:
        yield server


class TestAzureOverTls:
    """Runs against Azurite with the tests' own certificate: the same bytes pass through the other kind of socket."""

    algorithm, crc, odd_key = "crc64nvme", StoreTests.crc, ODD_KEY
    kept, needs_comparing = StoreTests.kept, StoreTests.needs_comparing
    BIG, SMALL = MultipartTests.BIG, MultipartTests.SMALL
    put_parts, whole = MultipartTests.put_parts, MultipartTests.whole
    test_objects_read_back_as_written = StoreTests.test_objects_read_back_as_written
    test_a_body_may_reuse_one_buffer_for_its_slices = (
        StoreTests.test_a_body_may_reuse_one_buffer_for_its_slices
    )
    test_ranged_reads = StoreTests.test_ranged_reads
    test_a_copy_has_the_bytes_and_the_checksum_of_its_source = (
        StoreTests.test_a_copy_has_the_bytes_and_the_checksum_of_its_source
    )
    test_failed_conditions_are_reported = StoreTests.test_failed_conditions_are_reported
    test_wrong_checksum_is_refused = StoreTests.test_wrong_checksum_is_refused
    test_life_of_a_multipart_upload = MultipartTests.test_life_of_a_multipart_upload
    test_a_part_with_a_wrong_checksum_is_rejected = (
        MultipartTests.test_a_part_with_a_wrong_checksum_is_rejected
    )

    @pytest.fixture
    def make_store(self, azurite_over_tls, ca_file, monkeypatch):
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", ca_file)
        url = f"az://{azurite_over_tls.container}/{uuid.uuid4().hex}"
        return functools.partial(open_store, url, env=azurite_over_tls.environment())

    def test_an_untrusted_certificate_is_rejected(self, azurite_over_tls, run):
        async def body():
            store = open_store(f"az://{azurite_over_tls.container}/run", env=azurite_over_tls.environment())
            try:
                with pytest.raises(StoreError, match="certificate"):
                    await store.open()
            finally:
                await store.close()

        run(body())


class TestGcsStore(MultipartTests):
    """Runs against the tests' own peer, which does what Google's documentation says."""

    algorithm = "crc32c"
    # Google's XML API cannot copy parts, but `copy` takes objects of any size.
    test_parts_of_another_object = test_a_part_of_another_object_that_has_changed_is_refused = None

    @pytest.fixture
    def make_store(self, request):
        if remote := given_remote("gs"):
            return functools.partial(open_store, remote)
        gcs_peer = request.getfixturevalue("gcs_peer")
        url = f"gs://{gcs_peer.bucket}/{uuid.uuid4().hex}"
        return functools.partial(open_store, url, StoreOptions(endpoint_url=gcs_peer.url))

    @with_store
    async def test_parts_are_not_copied_and_it_says_so(self, store):
        assert not store.capabilities.copies_parts
        with pytest.raises(StoreError) as raised:
            await store.copy_part("from", "1", "to", "id", 1, 0, 1)
        assert raised.value.reason is FailureReason.OTHER


class TestGcsEmulator(StoreTests):
    """Runs against fake-gcs-server, which people use in their own tests."""

    algorithm = "crc32c"
    # It checks neither the checksum before it replaces an object nor the generation before it copies one.
    test_wrong_checksum_is_refused = test_an_object_that_has_changed_or_is_gone_is_not_copied = None

    @pytest.fixture
    def make_store(self, fake_gcs):
        url = f"gs://{fake_gcs.bucket}/{uuid.uuid4().hex}"
        return functools.partial(open_store, url, StoreOptions(endpoint_url=fake_gcs.url))

    @with_store
    async def test_it_has_no_multipart_uploads_and_says_so(self, store):
        assert not store.capabilities.multipart
        assert any("no multipart uploads" in remark for remark in store.capabilities.remarks)


@pytest.fixture(scope="module")
def tls_proxy(s3_server, tmp_path_factory):
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    ca_file = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    with FaultProxy(s3_server.url, tls=context) as proxy:
        yield proxy, ca_file


class TestS3OverTls(MultipartTests):
    """Real endpoints speak HTTPS, where bodies pass through a different transport than over plain HTTP."""

    # These are slow and do not depend on the transport.
    test_create_once_has_exactly_one_winner = test_compare_and_swap_loses_no_update = (
        test_listing_spans_pages
    ) = None

    @pytest.fixture(params=["asyncio", "uvloop"])
    def run(self, request):
        new_loop = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

        def run(coroutine):
            with asyncio.Runner(loop_factory=new_loop) as runner:
                return runner.run(asyncio.wait_for(coroutine, 60))

        return run

    @pytest.fixture
    def make_store(self, s3_url, tls_proxy, monkeypatch):
        proxy, ca_file = tls_proxy
        monkeypatch.setenv("AWS_CA_BUNDLE", str(ca_file))
        return functools.partial(open_store, f"{s3_url}/run", StoreOptions(endpoint_url=proxy.url))

    def test_an_untrusted_certificate_is_rejected(self, s3_url, tls_proxy, run):
        async def body():
            store = open_store(f"{s3_url}/run", StoreOptions(endpoint_url=tls_proxy[0].url))
            try:
                with pytest.raises(StoreError, match="certificate"):
                    await store.open()
            finally:
                await store.close()

        run(body())
