"""OpenSSH itself, which may behave differently from asyncssh, the SFTP server of the other tests."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.config
import pytest

from ckpt_async import Uploader, restore
from ckpt_async.errors import FailureReason, ObjectNotFoundError, PreconditionFailedError, StoreError
from ckpt_async.stores import open_store
from ckpt_async.stores.interface import BytesBody, Create, Match
from tests.openssh import OpensshServer, find_sshd
from tests.stores.bodies import ReusingBody, crc, put

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpensshServer]:
    if (sshd := find_sshd()) is None:
        pytest.skip("no sshd here: apt-get install openssh-server")
    with OpensshServer(sshd, tmp_path_factory.mktemp("openssh")) as server:
        yield server


@pytest.fixture
def server(shared: OpensshServer, monkeypatch: pytest.MonkeyPatch) -> OpensshServer:
    for name, options in shared.configuration().items():
        monkeypatch.setitem(fsspec.config.conf, name, options)
    return shared


def test_objects_are_kept_as_promised(server: OpensshServer, run: Any) -> None:
    async def body() -> None:
        data = random.Random(1).randbytes(9 * MIB + 5)
        store: Any = open_store(f"{server.url}/kept/run")
        await store.open()
        try:
            await store.put("a b/é~%41?#(1)", ReusingBody(data, MIB), crc(data))
            received = bytearray()
            info = await store.get_range("a b/é~%41?#(1)", MIB, 7 * MIB, received.extend)
            assert (bytes(received), info.size_bytes) == (data[MIB : 8 * MIB], len(data))
            assert (await store.head("a b/é~%41?#(1)")).checksum == crc(data)
            first = await put(store, "b", b"1", condition=Create())
            await put(store, "b", b"22", condition=Match(first.etag))  # renames over the existing file
            with pytest.raises(PreconditionFailedError):
                await put(store, "b", b"3", condition=Create())
            await store.put("c", BytesBody(b""), crc(b""))
            assert [each.key for each in (await store.list("")).objects] == ["a b/é~%41?#(1)", "b", "c"]
            await store.delete(["b", "c", "never there"])
            with pytest.raises(ObjectNotFoundError):
                await store.head("b")
            assert [each.key for each in (await store.list("")).objects] == ["a b/é~%41?#(1)"]
            assert not store.capabilities.conditional_put
        finally:
            await store.close()

    run(body())


@pytest.mark.fault("F83")
def test_a_server_that_is_killed_and_started_again_costs_no_checkpoint(
    server: OpensshServer, tmp_path: Path
) -> None:
    remote, settings = f"{server.url}/killed/run", {"retry_initial_s": 0.05, "retry_max_s": 0.5}
    shards = {f"{number}.pt": random.Random(number).randbytes(4 * MIB) for number in range(4)}
    with Uploader(tmp_path / "folder", remote, rank=0, world_size=1, **settings) as uploader:
        for step in (1, 2):
            folder = tmp_path / "folder" / f"step-{step}"
            folder.mkdir()
            for name, data in shards.items():
                (folder / name).write_bytes(data)
                uploader.enqueue(folder / name, step)
            uploader.seal(step)
            if step == 1:
                server.kill()
                server.start()
            uploader.wait(step, timeout_s=60)
    found = restore.fetch_latest(remote, tmp_path / "restored")
    assert found is not None
    checkpoint, report = found
    assert checkpoint.step == 2
    assert {name: (tmp_path / "restored" / name).read_bytes() for name in report.paths} == shards


def test_a_key_that_is_not_the_users_is_refused_as_such(
    server: OpensshServer, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {**server.configuration()["sftp"], "key_filename": str(server.folder / "host_key")}
    wrong |= {"look_for_keys": False, "allow_agent": False}
    monkeypatch.setitem(fsspec.config.conf, "sftp", wrong)

    async def body() -> None:
        with pytest.raises(StoreError) as raised:
            await open_store(f"{server.url}/run").open()
        assert raised.value.reason is FailureReason.AUTH

    run(body())
