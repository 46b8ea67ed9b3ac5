"""Checkpoints on a web server, which lists nothing and may not support ranges."""

import asyncio
import gc
import json
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from ckpt_async import restore
from ckpt_async.errors import (
    CapabilityError,
    DamagedCheckpointError,
    FailureReason,
    ObjectNotFoundError,
    StoreError,
)
from ckpt_async.restore.destination import RANGE_BYTES, Destination, locked_now
from ckpt_async.stores import open_store
from ckpt_async.stores.interface import Store
from tests.restore.runs import Run, files_of
from tests.stores.peer import Peer, Request, answer
from tests.web_servers import serving_ranges, serving_whole_files


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    with serving_ranges(tmp_path / "remote") as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "remote"
    path.mkdir()
    return path


def names(files: dict[int, dict[str, bytes]]) -> dict[str, bytes]:
    return {name: data for of_rank in files.values() for name, data in of_rank.items()}


def fetched(url: str, where: Path, **options: int) -> tuple[int, dict[str, bytes]]:
    found = restore.find(url, **options)
    assert found is not None
    restore.fetch(found, where)
    return found.step, {name: (where / name).read_bytes() for name in found.files}


def read_range(url: str, key: str, offset: int, size_bytes: int) -> bytes:
    async def body(store: Store) -> bytes:
        await store.open(is_read_only=True)
        received = bytearray()
        try:
            info = await store.get_range(key, offset, size_bytes, received.extend)
            assert info.size_bytes >= offset + size_bytes
        except (StoreError, CapabilityError):
            assert not received, "bytes of another range were handed over"
            raise
        finally:
            await store.close()
        return bytes(received)

    return asyncio.run(body(open_store(url)))


def test_a_folder_is_no_object(folder: Path) -> None:
    """Servers that list a folder's content redirect there from its name without the slash."""
    (folder / "run").mkdir()

    async def body(store: Store) -> None:
        await store.open(is_read_only=True)
        try:
            with pytest.raises(ObjectNotFoundError, match="folder"):
                await store.head("run")
            with pytest.raises(ObjectNotFoundError, match="folder"):
                await store.get("run", max_size_bytes=1000)
        finally:
            await store.close()

    with serving_whole_files(folder) as url:
        asyncio.run(body(open_store(url)))


@pytest.mark.parametrize("path", ["", "/moved"])
def test_a_run_is_found_by_its_pointer_and_fetched(run_: Run, served: str, tmp_path: Path, path: str) -> None:
    """This must also work if every request is redirected."""
    for step in (1, 2):
        run_.commit(step, files_of(step))
    assert fetched(served + path, tmp_path / "out") == (2, names(files_of(2)))


@pytest.mark.parametrize("written", ["my runs/größe/50%", "my%20runs/gr%C3%B6%C3%9Fe/50%25"])
def test_a_url_may_have_its_escapes_or_not(folder: Path, served: str, tmp_path: Path, written: str) -> None:
    """Browsers accept both. A URL with unescaped characters used to be sent as it was,
    and servers refused the request.
    """
    there = folder / "my runs/größe/50%/step5-unsharded"
    there.mkdir(parents=True)
    files = {"config.yaml": b"a: 1", "model.pt": b"model", "optim.pt": b"optim", "train.pt": b"train"}
    for name, data in files.items():
        (there / name).write_bytes(data)
    assert fetched(f"{served}/{written}", tmp_path / "out", step=5) == (5, files)
    assert read_range(f"{served}/{written}", "step5-unsharded/model.pt", 1, 3) == b"ode"


def test_an_older_step_is_found_if_it_is_asked_for(run_: Run, served: str, tmp_path: Path) -> None:
    for generation, step in ((1, 1), (2, 2), (3, 3)):
        run_.commit(step, files_of(step), generation=generation)
    assert fetched(served, tmp_path / "1", step=1) == (1, names(files_of(1)))
    assert fetched(served, tmp_path / "2", step=2, generation=2) == (2, names(files_of(2)))


def test_the_checksums_of_the_receipts_are_compared(
    run_: Run, served: str, folder: Path, tmp_path: Path
) -> None:
    run_.commit(1, files_of(1))
    found = restore.find(served)
    assert found is not None
    damaged = folder / next(iter(found.files.values())).key
    data = bytearray(damaged.read_bytes())
    data[7] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(DamagedCheckpointError):
        restore.fetch(found, tmp_path / "out")


@pytest.mark.parametrize("forbids", [False, True])
def test_an_unsharded_checkpoint_of_olmo_is_known_by_its_files(
    folder: Path, tmp_path: Path, forbids: bool
) -> None:
    """OLMo publishes checkpoints this way: one folder each, without a listing."""
    files = {name: name.encode() for name in ("config.yaml", "model.pt", "optim.pt", "train.pt")}
    (folder / "step7-unsharded").mkdir()
    for name, data in files.items():
        (folder / "step7-unsharded" / name).write_bytes(data)
    with serving_ranges(folder, forbids=forbids) as url:
        found = restore.find(f"{url}/step7-unsharded")
        assert found is not None
        assert (found.format, found.step) == ("olmo", 7)
        assert fetched(f"{url}/step7-unsharded/", tmp_path / "out") == (7, files)
        assert fetched(url, tmp_path / "by-step", step=7) == (7, files)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_sharded_checkpoint_is_known_by_what_its_metadata_names(
    folder: Path, served: str, tmp_path: Path
) -> None:
    """OLMo-core's consist of DCP, one file per rank, and a marker that is written last."""
    import torch
    import torch.distributed.checkpoint as dcp

    step = folder / "step9"
    dcp.save({"w": torch.arange(5)}, checkpoint_id=step / "model_and_optim", no_dist=True)
    (step / "train").mkdir()
    for rank in range(18):
        (step / "train" / f"rank{rank}.pt").write_bytes(b"%d" % rank)
    (step / ".metadata.json").write_text(json.dumps({}))
    wanted = {
        path.relative_to(step).as_posix(): path.read_bytes() for path in step.rglob("*") if path.is_file()
    }
    assert fetched(f"{served}/step9", tmp_path / "out") == (9, wanted)


def test_composers_pointer_is_followed(folder: Path, served: str, tmp_path: Path) -> None:
    (folder / "ep1-ba42-rank0.pt").write_bytes(b"all of it")
    (folder / "latest-rank0.pt.symlink").write_text("ep1-ba42-rank0.pt")
    assert fetched(served, tmp_path / "out") == (42, {"ep1-ba42-rank0.pt": b"all of it"})


def test_nothing_that_can_be_found_is_no_fresh_start(folder: Path, served: str) -> None:
    """Without a listing, nobody can tell that there is nothing."""
    (folder / "ep1-ba42-rank0.pt").write_bytes(b"nobody guesses that name")
    with pytest.raises(StoreError, match="cannot be listed") as raised:
        restore.find(served)
    assert "step=" in raised.value.hint


def test_an_attempt_to_open_that_fails_leaves_nothing_open(caplog: pytest.LogCaptureFixture) -> None:
    async def body(url: str) -> None:
        store = open_store(url)
        for _ in range(3):
            with pytest.raises(StoreError):
                await store.open(is_read_only=True)
        await store.close()
        gc.collect()

    with socket.socket() as refusing:  # it is bound, but does not listen
        refusing.bind(("127.0.0.1", 0))
        asyncio.run(body(f"http://127.0.0.1:{refusing.getsockname()[1]}/run"))
    assert "Unclosed" not in caplog.text


def test_a_server_with_a_page_for_everything_is_told(folder: Path) -> None:
    with (
        serving_ranges(folder, page="<html>Welcome!</html>") as url,
        pytest.raises(StoreError, match="web page"),
    ):
        restore.find(url)


def test_a_server_without_ranges_is_told_from_one_with_them(
    folder: Path, served: str, tmp_path: Path
) -> None:
    """Such a server answers with the whole file, which must never be taken for the range."""
    (folder / "a").write_bytes(b"0123456789")
    with serving_whole_files(folder) as whole:
        for url in (served, whole):
            assert read_range(url, "a", 0, 10) == b"0123456789"
            with pytest.raises(ObjectNotFoundError):
                read_range(url, "missing", 0, 1)
        assert read_range(served, "a", 3, 4) == b"3456"
        for offset, size_bytes in ((3, 4), (0, 4), (3, 7)):
            with pytest.raises(CapabilityError, match="does not serve ranges"):
                read_range(whole, "a", offset, size_bytes)


def test_a_range_beyond_the_end_is_refused(folder: Path, served: str) -> None:
    (folder / "a").write_bytes(b"hello")
    for offset, size_bytes in ((5, 1), (0, 6)):
        with pytest.raises(StoreError) as raised:
            read_range(served, "a", offset, size_bytes)
        assert raised.value.reason is FailureReason.OTHER


def test_files_are_fetched_in_one_go_from_a_server_without_ranges(folder: Path, tmp_path: Path) -> None:
    step = folder / "step1"
    step.mkdir()
    (step / "config.yaml").write_bytes(b"{}")
    (step / "model.pt").write_bytes(b"small")
    with serving_whole_files(folder) as url:
        assert fetched(f"{url}/step1", tmp_path / "small")[1]["model.pt"] == b"small"
        data = os.urandom(33 << 20)
        (step / "model.pt").write_bytes(data)
        assert fetched(f"{url}/step1", tmp_path / "large")[1]["model.pt"] == data


def test_what_a_killed_fetch_has_left_is_fetched_again_from_a_server_without_ranges(
    folder: Path, tmp_path: Path
) -> None:
    """The rest alone cannot be asked for. What is thrown away for that does not count as fetched."""
    step, there, data = folder / "step1", tmp_path / "there", os.urandom(9 << 20)
    step.mkdir()
    (step / "config.yaml").write_bytes(b"{}")
    (step / "model.pt").write_bytes(data)
    with serving_whole_files(folder) as url:
        found = restore.find(f"{url}/step1")
        assert found is not None
        file, killed = (
            found.files["model.pt"],
            Destination(there, found, is_verified=True, may_overwrite=False),
        )
        killed.make()
        with locked_now(killed.partial_path(file), file.size_bytes, "crc64nvme") as partial:
            assert partial is not None
            assert killed.begin(partial, file)
            partial.prepare()
            partial.sink([(0, RANGE_BYTES)])(memoryview(data)[:RANGE_BYTES])
        killed.close()
        report = restore.fetch(found, there)
    assert (there / "model.pt").read_bytes() == data
    assert report.bytes_from == {"remote": len(data) + len(b"{}")}


@pytest.mark.fault("F141")
def test_every_hop_is_encrypted_if_the_first_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https → http → https would let anybody on the way choose the last address, and the bytes."""
    authority, tls = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))

    async def body() -> None:
        last = Peer(lambda _: answer(200, body=b"other"), tls=tls)
        async with last.serve() as there:
            plain = Peer(lambda _: answer(302, headers={"Location": f"{there}/a"}))
            async with plain.serve() as between:
                first = Peer(
                    lambda request: (
                        answer(302, headers={"Location": f"{between}/a"})
                        if request.path == "/run/a"
                        else answer(404)
                    ),
                    tls=tls,
                )
                async with first.serve() as here:
                    store = open_store(f"{here}/run")
                    await store.open(is_read_only=True)
                    try:
                        for read in (
                            store.get("a", max_size_bytes=100),
                            store.get_range("a", 0, 5, lambda _: None),
                            store.head("a"),
                        ):
                            with pytest.raises(StoreError, match="not encrypted"):
                                await read
                    finally:
                        await store.close()
        assert not plain.requests
        assert not last.requests

    asyncio.run(body())


@pytest.mark.fault("F141")
def test_a_redirect_to_another_host_takes_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Presigned addresses and those of a CDN need no others, and must not get them."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password SECRET\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    def serve(request: Request) -> bytes:
        if "range" in request.headers:
            return answer(206, headers={"Content-Range": "bytes 1-3/5"}, body=b"ell")
        return answer(200, body=b"hello")

    async def body() -> None:
        there = Peer(serve)
        async with there.serve() as far:
            headers = {"Location": f"{far}/a?signature=1", "Set-Cookie": "session=SECRET"}
            near = Peer(lambda _: answer(307, headers=headers))
            async with near.serve() as url:
                store = open_store(f"{url}/run")
                await store.open(is_read_only=True)
                try:
                    for _ in range(2):
                        assert (await store.get("a", max_size_bytes=100))[0] == b"hello"
                    received = bytearray()
                    await store.get_range("a", 1, 3, received.extend)
                    assert received == b"ell"
                finally:
                    await store.close()
        assert len(there.requests) >= 3
        for each in (*near.requests, *there.requests):
            assert not {"authorization", "cookie"} & set(each.headers)

    asyncio.run(body())
