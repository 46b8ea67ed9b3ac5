"""fsspec stores whose servers die, hang, refuse or lose data, and file systems that misreport what they hold."""

import asyncio
import datetime as dt
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from ckpt_async import restore
from ckpt_async.errors import FailureReason, IntegrityError, ObjectNotFoundError, SourceError, StoreError
from ckpt_async.stores import open_store
from ckpt_async.stores.interface import BytesBody, Match
from ckpt_async.stores.tree import OWN
from tests.file_servers import FileServer
from tests.stores.bodies import ChangedBody, ReusingBody, crc, put

MIB = 1 << 20


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Provide a server that may be killed."""
    with FileServer("sftp", tmp_path / "served") as server:
        for name, options in server.configuration().items():
            monkeypatch.setitem(fsspec.config.conf, name, options)
        yield server


async def names(store: Any) -> list[str]:
    return [each.key for each in (await store.list("")).objects]


class Interrupting(ReusingBody):
    """A body that runs `act` when it is half sent."""

    def __init__(self, data: bytes, act: Any) -> None:
        super().__init__(data, MIB)
        self.act, self.has_ended = act, threading.Event()

    def send(self, writer: Any) -> None:
        try:
            writer.write(memoryview(self.data)[: len(self.data) // 2])
            self.act()
            writer.write(memoryview(self.data)[len(self.data) // 2 :])
        finally:
            self.has_ended.set()


@pytest.mark.fault("F83")
def test_a_server_that_dies_in_the_middle_leaves_nothing_and_is_found_again(
    server: FileServer, run: Any
) -> None:
    async def body() -> None:
        data = random.Random(1).randbytes(24 * MIB)
        store = open_store(f"{server.url}/run")
        await store.open()
        await put(store, "old", b"old")
        with pytest.raises(StoreError) as raised:
            await store.put("a", Interrupting(data, server.kill), crc(data))
        assert raised.value.reason.is_retryable
        with pytest.raises(StoreError) as raised:
            await store.head("old")  # no server is not the same as no object
        assert not isinstance(raised.value, ObjectNotFoundError)
        server.start()
        assert await names(store) == ["old"]
        await store.put("a", BytesBody(data), crc(data))
        assert (await store.get("a", max_size_bytes=len(data)))[0] == data
        await store.close()

    run(body())


def test_a_server_that_hangs_holds_up_nobody(server: FileServer, run: Any) -> None:
    """A deadline must end the attempt at once, and release whatever held the file being sent."""

    async def body() -> None:
        data = bytes(64 * MIB)
        store = open_store(f"{server.url}/run")
        await store.open()
        sent = Interrupting(data, lambda: server.pause(is_paused=True))
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await store.put("a", sent, crc(data))
        assert time.monotonic() - began < 15
        assert sent.has_ended.is_set(), "the body is still in use"
        server.pause(is_paused=False)
        assert await names(store) == []
        await put(store, "a", b"1")
        await store.close()

    run(body())


def test_wrong_credentials_are_refused_as_such(
    server: FileServer, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "sftp", {"username": "ckpt", "password": "not-the-secret"})

    async def body() -> None:
        with pytest.raises(StoreError) as raised:
            await open_store(f"{server.url}/run").open()
        assert raised.value.reason is FailureReason.AUTH
        assert "not-the-secret" not in str(raised.value)
        assert "FSSPEC_" in raised.value.hint

    run(body())


@pytest.mark.parametrize("has_key", [False, True])
def test_no_credentials_or_a_key_without_its_passphrase_are_not_tried_again(
    server: FileServer, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_key: bool
) -> None:
    options: dict[str, object] = {"username": "ckpt", "allow_agent": False, "look_for_keys": False}
    if has_key:
        key = tmp_path / "key"
        key.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key(passphrase="words"))
        options["key_filename"] = str(key)
    monkeypatch.setitem(fsspec.config.conf, "sftp", options)

    async def body() -> None:
        with pytest.raises(StoreError) as raised:
            await open_store(f"{server.url}/run").open()
        assert raised.value.reason is FailureReason.AUTH
        assert "FSSPEC_" in raised.value.hint

    run(body())


def test_a_key_file_that_is_not_there_is_no_fresh_start(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**fsspec.config.conf["sftp"], "key_filename": str(tmp_path / "none")}
    monkeypatch.setitem(fsspec.config.conf, "sftp", options)
    with pytest.raises(StoreError, match="No such file") as raised:
        restore.find(f"{server.url}/run")
    assert raised.value.reason is FailureReason.AUTH
    assert "FSSPEC_" in raised.value.hint


def test_a_folder_that_has_gone_is_not_an_empty_one(server: FileServer, run: Any) -> None:
    """If the server's disk was unmounted, that must not look like a fresh start, and nothing may be written instead."""

    async def body() -> None:
        store = open_store(f"{server.url}/run")
        await store.open()
        await put(store, "a", b"1")
        shutil.move(server.folder / "runs" / "run", server.folder / "elsewhere")
        for request in (store.list(""), store.get("a", max_size_bytes=9), store.head("a")):
            with pytest.raises(StoreError, match="no longer the same folder") as raised:
                await request
            assert raised.value.reason is FailureReason.TRANSIENT
        reader = open_store(f"{server.url}/run")
        with pytest.raises(StoreError) as raised:
            await reader.open(is_read_only=True)
        assert raised.value.reason is FailureReason.NOT_FOUND
        for each in (store, reader):
            await each.close()

    run(body())


def test_a_file_instead_of_a_folder_is_no_fresh_start(server: FileServer) -> None:
    (server.folder / "runs").mkdir(exist_ok=True)
    (server.folder / "runs" / "file").write_bytes(b"1")
    # WebDAV answers 404, as for a missing file.
    below = ["file/run"] if server.url.startswith("sftp") else []
    for name in ("file", *below):
        with pytest.raises(StoreError, match="a file instead of a folder") as raised:
            restore.find(f"{server.url}/{name}")
        assert raised.value.reason is FailureReason.OTHER
    assert restore.find(f"{server.url}/none") is None


def test_what_dead_writers_left_is_removed_and_what_is_new_is_not(server: FileServer, run: Any) -> None:
    own = server.folder / "runs" / "run" / OWN
    own.mkdir(parents=True)
    for name, age_s in (("old", 25 * 3600), ("new", 3600)):
        (own / name).write_bytes(b"half of a shard")
        os.utime(own / name, (time.time() - age_s,) * 2)

    async def body() -> None:
        store = open_store(f"{server.url}/run")
        await store.open()
        await store.close()

    run(body())
    assert [path.name for path in own.iterdir()] == ["new"]


class OneByOne(LocalFileSystem):
    """A file system that has no rename or copy operation of its own."""

    protocol = "onebyone"
    mv = fsspec.AbstractFileSystem.mv
    cp_file = fsspec.AbstractFileSystem.cp_file
    local_file = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("onebyone://").strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {}


class Spoiling(OneByOne):
    """A file system that flips a bit of a large file after it was written."""

    protocol = "onebyone"

    def info(self, path: str, **options: Any) -> Any:
        found = super().info(path, **options)
        if found["size"] == 1000:
            data = bytearray(Path(path).read_bytes())
            data[500] ^= 1
            Path(path).write_bytes(data)
        return found


class Forgetful(OneByOne):
    protocol = "onebyone"

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if path.endswith("/b"):
            raise PermissionError(13, "not you", path)
        return super().ls(path, detail=detail, **options)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    yield f"onebyone://{tmp_path}/run"
    _registry.pop("onebyone", None)


def opened(kind: type[LocalFileSystem], url: str) -> Any:
    fsspec.register_implementation("onebyone", kind, clobber=True)
    return open_store(url)


@pytest.mark.fault("F84")
def test_a_bit_that_was_stored_otherwise_is_found_by_reading_back(url: str, run: Any) -> None:
    async def body() -> None:
        store = opened(Spoiling, url)
        await store.open()
        data = bytes(1000)
        with pytest.raises(IntegrityError, match="read back"):
            await store.put("a", BytesBody(data), crc(data))
        assert await names(store) == []
        await put(store, "b", b"fine")
        await store.close()

    run(body())


def test_an_attempt_to_open_that_fails_leaves_no_thread(url: str, run: Any) -> None:
    async def body() -> None:
        store = opened(OneByOne, url)
        before = threading.enumerate()
        for _ in range(2):
            with pytest.raises(StoreError, match="no such folder"):
                await store.open(is_read_only=True)
        lanes = [each for each in threading.enumerate() if each.name == "ckpt-async-fsspec"]
        await store.close()
        for each in {*lanes} - {*before}:
            each.join(20)
            assert not each.is_alive()

    run(body())


def test_a_folder_that_cannot_be_listed_fails_the_listing(url: str, run: Any) -> None:
    """fsspec's own walk would skip it, and half a listing would look complete (rule R8)."""

    async def body() -> None:
        store = opened(Forgetful, url)
        await store.open()
        await put(store, "a/1", b"1")
        await put(store, "b/2", b"2")
        assert [each.key for each in (await store.list("a/")).objects] == ["a/1"]
        with pytest.raises(StoreError) as raised:
            await store.list("")
        assert raised.value.reason is FailureReason.AUTH
        await store.close()

    run(body())


def test_a_file_system_without_rename_says_so_and_keeps_what_was_there(url: str, run: Any) -> None:
    async def body() -> None:
        store = opened(OneByOne, url)
        await store.open()
        assert any("readers may see a partial object" in remark for remark in store.capabilities.remarks)
        assert not store.capabilities.copies
        await put(store, "a", b"old")
        assert await names(store) == ["a"]
        with pytest.raises(SourceError):
            await store.put("b", ChangedBody(4 * MIB, MIB), crc(bytes(4 * MIB)))
        assert "b" not in await names(store)
        await store.close()

    run(body())


class Renaming(OneByOne):
    """A file system that renames, but not onto a file; it tells times as `told` makes them of the real ones."""

    told: Callable[[float], object] = float

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if Path(path2).exists():
            raise FileExistsError(17, "there is a file", path2)
        LocalFileSystem.mv(self, path1, path2, **options)

    def info(self, path: str, **options: Any) -> Any:
        found = super().info(path, **options)
        at = type(self).told(found.pop("mtime"))
        del found["created"]
        return found if at is None else {**found, "mtime": at}


TOLD: dict[str, Callable[[float], object]] = {
    "seconds": int,
    "naive": lambda at: dt.datetime.fromtimestamp(at, dt.UTC).replace(tzinfo=None),
    "aware": lambda at: dt.datetime.fromtimestamp(at, dt.timezone(dt.timedelta(hours=-3))),
    "text": lambda at: dt.datetime.fromtimestamp(at, dt.UTC).replace(tzinfo=None).isoformat(),
    "text with zone": lambda at: dt.datetime.fromtimestamp(at, dt.UTC).isoformat(),
    "none": lambda _: None,
}


@pytest.fixture(params=TOLD)
def renaming(request: pytest.FixtureRequest) -> type[Renaming]:
    return type("Odd", (Renaming,), {"told": staticmethod(TOLD[request.param])})


def test_times_in_any_form_are_those_of_the_files(url: str, run: Any, renaming: type[Renaming]) -> None:
    """A reader has no clock of the server, so a zone that is guessed makes all ages hours off."""

    async def body() -> None:
        store = opened(renaming, url)
        await store.open()
        await put(store, "a", b"1")
        await store.close()
        reader = opened(renaming, url)
        await reader.open(is_read_only=True)
        listing = await reader.list("")
        await reader.close()
        (found,) = listing.objects
        if renaming.told(0) is None:
            assert found.last_modified is None
        else:
            assert abs(listing.server_time - found.last_modified) < 60

    run(body())


def test_what_another_writer_is_writing_stays_whatever_the_times(
    url: str, run: Any, renaming: type[Renaming]
) -> None:
    own = Path(url.removeprefix("onebyone://")) / OWN
    own.mkdir(parents=True)
    (own / "begun").write_bytes(b"half of a shard")

    async def body() -> None:
        store = opened(renaming, url)
        await store.open()
        await store.close()

    run(body())
    assert [path.name for path in own.iterdir()] == ["begun"]


def test_a_rename_that_does_not_replace_still_replaces_records(
    url: str, run: Any, renaming: type[Renaming]
) -> None:
    """Otherwise `latest` would never move again."""

    async def body() -> None:
        store = opened(renaming, url)
        await store.open()
        assert any("a rename does not replace files" in remark for remark in store.capabilities.remarks)
        for data in (b"1", b"22"):
            await put(store, "latest", data)
        etag = (await store.head("latest")).etag
        await put(store, "latest", b"333", condition=Match(etag))
        assert (await store.get("latest", max_size_bytes=9))[0] == b"333"
        assert await names(store) == ["latest"]
        await store.close()

    run(body())


def test_versions_of_one_size_differ_as_finely_as_their_times(url: str, run: Any) -> None:
    async def body() -> None:
        store = opened(OneByOne, url)
        await store.open()
        await put(store, "a", b"1")
        etags = set()
        for at_ms in (1_700_000_000_001, 1_700_000_000_002, 1_700_000_007_001):
            os.utime(Path(url.removeprefix("onebyone://")) / "a", ns=(at_ms * 10**6,) * 2)
            etags.add((await store.head("a")).etag)
        assert len(etags) == 3
        await store.close()

    run(body())


class Refusing(OneByOne):
    """A file system that refuses large files, before it has taken a byte of them."""

    protocol = "onebyone"

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and self.is_full:
            raise PermissionError(13, "over quota", path)
        return super().open(path, mode, **options)

    is_full = False


def test_an_early_refusal_of_a_large_body_ends_the_attempt(
    url: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body is still being sent, and nobody takes it any more."""

    async def body() -> None:
        store = opened(Refusing, url)
        await store.open()
        monkeypatch.setattr(Refusing, "is_full", True)
        sent = Interrupting(bytes(64 * MIB), lambda: None)
        with pytest.raises(StoreError, match="over quota"):
            await asyncio.wait_for(store.put("a", sent, crc(sent.data)), 30)
        assert sent.has_ended.is_set()
        await store.close()

    run(body())
