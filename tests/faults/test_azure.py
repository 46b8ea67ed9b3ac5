"""Azure Blob Storage that is slow, silent, wrong or away: Azurite behind a proxy that injects faults."""

import asyncio
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import StoreOptions, Uploader, restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.protocol.cas import create_once
from ckpt_async.stores import open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from ckpt_async.transfer.patient import connect
from tests.azurite import AzuriteServer
from tests.faults.oracle import Oracle
from tests.faults.processes import SOAK, Nursery
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.saves import QUICK, SHARDS, save
from tests.stores.azure_peer import ACCOUNT, AzurePeer

MIB = 1 << 20
PART = 5 * MIB
CONTROL = r"/\.ckpt-async/"
BLOCKS = "comp=block&"


@pytest.fixture
def azure_proxy(
    azurite: AzuriteServer, azure_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> Iterator[FaultProxy]:
    """A proxy in front of the session's server; this test's environment points to the proxy instead of the server."""
    with FaultProxy(azurite.url, seed) as proxy:
        given = azurite.environment()["AZURE_STORAGE_CONNECTION_STRING"]
        there = given.replace(azurite.url, f"{proxy.url}/{azurite.account}")
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", there)
        yield proxy


@pytest.mark.fault("F82")
@pytest.mark.parametrize(
    ("lane", "query"),
    [(SHARDS, "^(?!comp)"), (SHARDS, BLOCKS), (rf"{CONTROL}(receipts|decisions|latest)", "")],
    ids=["bulk", "blocks", "control"],
)
@pytest.mark.parametrize(
    "kind", ["silent", "unavailable", "too_many", "reset", "stall", "drop_reply", "cut_reply"]
)
def test_every_kind_of_request_failure_is_survived(
    azure_proxy: FaultProxy,
    azure_url: str,
    tmp_path: Path,
    kind: str,
    lane: str,
    query: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    size_bytes = 2 * PART + 1 if query == BLOCKS else 5000
    with Uploader(tmp_path / "folder", f"{azure_url}/run", **QUICK | {"part_size_bytes": PART}) as uploader:
        fault = azure_proxy.add(Fault(kind, "PUT", lane, query, times=2, after_bytes=100))
        save(uploader, 1, size_bytes=size_bytes)
        uploader.wait(1, timeout_s=60)
        assert fault.num_hits == 2
    assert Oracle(f"{azure_url}/run", 1, size_bytes=size_bytes).look() == {CheckpointId(1, 1)}
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.fault("F82")
def test_a_lost_reply_to_any_conditional_write_is_survived(
    azure_proxy: FaultProxy, azure_url: str, tmp_path: Path
) -> None:
    """R13: when a successful write is repeated, the store answers as if another writer had won:
    409 to a creation, 412 to a swap.
    """
    kinds = ("generations", "members", "receipts", "decisions", "latest")
    faults = [azure_proxy.add(Fault("drop_reply", "PUT", f"{CONTROL}{kind}", times=1)) for kind in kinds]
    with Uploader(tmp_path / "folder", f"{azure_url}/run", **QUICK) as uploader:
        for step in (1, 2):
            save(uploader, step)
            uploader.wait(step, timeout_s=30)
    assert [fault.num_hits for fault in faults] == [1] * len(kinds)
    refused = {
        each.key.split("/.ckpt-async/")[1].split("/")[0]
        for each in azure_proxy.exchanges
        if each.status in (409, 412)
    }
    assert {"generations", "members", "receipts", "latest.json"} <= refused
    # A decision is read before it is put again.
    puts = [each.key for each in azure_proxy.exchanges if each.method == "PUT" and "/decisions/" in each.key]
    assert len(puts) == len({*puts}) == 2
    oracle = Oracle(f"{azure_url}/run", 1)
    assert oracle.look() == {CheckpointId(1, 1), CheckpointId(1, 2)}
    assert oracle.latest == CheckpointId(1, 2)
    assert not oracle.aborted


@pytest.mark.fault("F82")
def test_a_lost_reply_to_the_commit_of_a_block_list_is_survived(
    azure_proxy: FaultProxy, azure_url: str, tmp_path: Path
) -> None:
    """The blocks are gone by then; the uploader must see that the blob is as it should be, and not upload it again."""
    with Uploader(tmp_path / "folder", f"{azure_url}/run", **QUICK | {"part_size_bytes": PART}) as uploader:
        fault = azure_proxy.add(Fault("drop_reply", "PUT", SHARDS, "comp=blocklist", times=1))
        save(uploader, 1, num_shards=1, size_bytes=2 * PART + 1)
        uploader.wait(1, timeout_s=60)
    assert fault.num_hits == 1
    commits = [
        each.upstream_status for each in azure_proxy.exchanges if each.query.startswith("comp=blocklist&sv")
    ]
    assert Counter(commits) == {201: 1, 400: 1}
    blocks = Counter(part for (_, part), _ in azure_proxy.sent(SHARDS).items() if part is not None)
    assert set(blocks) == {0, 1, 2, 3}
    assert Oracle(f"{azure_url}/run", 1, num_shards=1, size_bytes=2 * PART + 1).look() == {CheckpointId(1, 1)}


def test_refusing_half_of_all_requests_loses_nothing(
    azure_proxy: FaultProxy, azure_url: str, tmp_path: Path
) -> None:
    with Uploader(tmp_path / "folder", f"{azure_url}/run", **QUICK) as uploader:
        before = len(azure_proxy.exchanges)
        azure_proxy.add(Fault("unavailable", probability=0.5))
        for step in range(5):
            save(uploader, step, num_shards=4)
        for step in range(5):
            uploader.wait(step, timeout_s=60)
        # Each attempt to decide compares what the store has, and half of these requests are refused, too.
        assert len(azure_proxy.exchanges) - before < 900
        azure_proxy.heal()
    assert len(Oracle(f"{azure_url}/run", 1, num_shards=4).look()) == 5


@pytest.mark.fault("F82")
def test_a_killed_upload_is_resumed_and_no_finished_block_is_sent_again(
    nursery: Nursery, azure_proxy: FaultProxy, azure_url: str, tmp_path: Path
) -> None:
    """After a SIGKILL in the middle of a shard, the next launch asks the store for the shard's uncommitted blocks."""
    remote, size_bytes = f"{azure_url}/run", 6 * PART + 12345
    arguments: dict[str, Any] = {
        "folder": str(tmp_path / "folder"),
        "remote": remote,
        "rank": 0,
        "world_size": 1,
        "num_shards": 1,
        "size_bytes": size_bytes,
        "settings": QUICK | {"part_size_bytes": PART, "num_concurrent_uploads": 2, "stall_timeout_s": 30.0},
    }
    held = azure_proxy.add(Fault("hold", "PUT", SHARDS, BLOCKS))
    held.kind = "delay"  # let the first blocks pass
    trainer = nursery.start("saves", steps=[1], **arguments)
    trainer.expect("saved")
    azure_proxy.wait_for(lambda: len(azure_proxy.sent(SHARDS)) >= 4)
    held.kind = "hold"
    azure_proxy.wait_for(lambda: azure_proxy.num_under_way >= 1)
    trainer.kill()
    azure_proxy.heal()
    azure_proxy.wait_for(lambda: azure_proxy.num_under_way == 0)
    done = {part for _, part in azure_proxy.sent(SHARDS)}
    assert 4 <= len(done) < 8, "killed too late to prove anything"
    again = nursery.start("saves", steps=[], **arguments)
    again.expect("saved")
    again.tell("stop")
    assert again.finish() == 0, again.log.read_text()
    assert Oracle(remote, 1, num_shards=1, size_bytes=size_bytes).look() == {CheckpointId(1, 1)}
    sent = Counter({part: count for (_, part), count in azure_proxy.sent(SHARDS).items() if part is not None})
    unanswered = {
        each.part for each in azure_proxy.exchanges if each.body_bytes == PART and not each.upstream_status
    }
    assert set(sent) | unanswered == set(range(8))  # block 0 marks that there is an upload
    assert set(sent.values()) == {1}


def test_uploads_wait_for_credentials_to_be_renewed(
    azure_proxy: FaultProxy,
    azurite: AzuriteServer,
    azure_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The key is rotated in the middle and the environment gets the new one, which must be tried."""
    name = "AZURE_STORAGE_CONNECTION_STRING"
    good = os.environ[name]
    with Uploader(tmp_path / "folder", f"{azure_url}/run", **QUICK) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=30)
        monkeypatch.setenv(
            name, good.replace(azurite.key, azurite.key[::-1].lstrip("=") + "=" * azurite.key.count("="))
        )
        azure_proxy.add(Fault("denied", key=SHARDS, times=1))  # the store's answer to the old key
        before = len(azure_proxy.exchanges)
        save(uploader, 2)
        azure_proxy.wait_for(lambda: 403 in [each.upstream_status for each in azure_proxy.exchanges[before:]])
        monkeypatch.setenv(name, good)
        uploader.wait(2, timeout_s=30)
    assert Oracle(f"{azure_url}/run", 1).look() == {CheckpointId(1, 1), CheckpointId(1, 2)}


@pytest.mark.fault("F82")
def test_a_download_that_is_cut_short_or_changed_on_the_way_is_done_again(
    azure_proxy: FaultProxy, azure_url: str, tmp_path: Path
) -> None:
    with Uploader(tmp_path / "folder", f"{azure_url}/run", **QUICK) as uploader:
        save(uploader, 1, num_shards=2, size_bytes=MIB)
        uploader.wait(1, timeout_s=30)
    faults = [
        azure_proxy.add(Fault("cut_reply", "GET", SHARDS, times=1, after_bytes=2000)),
        azure_proxy.add(Fault("flip_reply", "GET", SHARDS, times=1, after_bytes=500_000)),
    ]
    checkpoint = restore.find(f"{azure_url}/run")
    assert checkpoint is not None
    report = restore.fetch(checkpoint, tmp_path / "restored")
    assert len(report.paths) == 2
    assert [fault.num_hits for fault in faults] == [1, 1]


@pytest.mark.fault("F82")
@pytest.mark.parametrize(("query", "num_parts"), [("^(?!comp)", 0), (BLOCKS, 3)], ids=["blob", "blocks"])
def test_a_bit_that_is_changed_on_its_way_to_the_service_is_refused_and_sent_again(
    azure_proxy: FaultProxy, azure_url: str, tmp_path: Path, query: str, num_parts: int
) -> None:
    """The service compares what arrived with the checksum that was sent with it."""
    size_bytes = num_parts * PART + 5000
    with Uploader(tmp_path / "folder", f"{azure_url}/run", **QUICK | {"part_size_bytes": PART}) as uploader:
        times = 2 if num_parts else 1  # block 0 has one byte, so there is no bit to flip at that position
        fault = azure_proxy.add(Fault("flip_request", "PUT", SHARDS, query, times=times, after_bytes=3000))
        save(uploader, 1, num_shards=1, size_bytes=size_bytes)
        uploader.wait(1, timeout_s=60)
    assert fault.num_hits == times
    answered = [each.upstream_status for each in azure_proxy.exchanges if each.fault == "flip_request"]
    assert answered == [201] * (times - 1) + [400]
    assert Oracle(f"{azure_url}/run", 1, num_shards=1, size_bytes=size_bytes).look() == {CheckpointId(1, 1)}


@pytest.mark.fault("F82")
def test_an_upload_whose_blocks_the_service_has_forgotten_begins_anew(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure drops uncommitted blocks after a week, so a trainer that was away for longer
    must send the whole shard again.
    """
    with AzurePeer() as peer, FaultProxy(peer.url) as proxy:
        given = peer.environment()["AZURE_STORAGE_CONNECTION_STRING"]
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING", given.replace(peer.url, f"{proxy.url}/{ACCOUNT}")
        )
        remote, size_bytes = "az://ckpt/run", 4 * PART + 12345
        arguments: dict[str, Any] = {
            "folder": str(tmp_path / "folder"),
            "remote": remote,
            "rank": 0,
            "world_size": 1,
            "num_shards": 1,
            "size_bytes": size_bytes,
            "settings": QUICK | {"part_size_bytes": PART, "num_concurrent_uploads": 1},
        }
        held = proxy.add(Fault("hold", "PUT", SHARDS, "comp=blocklist"))
        trainer = nursery.start("saves", steps=[1], **arguments)
        trainer.expect("saved")
        proxy.wait_for(lambda: held.num_hits == 1)
        trainer.kill()
        proxy.heal()
        assert peer.account.blocks
        peer.forget_blocks()
        again = nursery.start("saves", steps=[], **arguments)
        again.expect("saved")
        again.tell("stop")
        assert again.finish() == 0, again.log.read_text()
        assert Oracle(remote, 1, num_shards=1, size_bytes=size_bytes).look() == {CheckpointId(1, 1)}
        blocks = {part: n for (_, part), n in proxy.sent(SHARDS).items() if part}
        assert blocks == dict.fromkeys(range(1, 6), 2)


@pytest.mark.parametrize("what", ["credentials", "container", "nobody there", "nothing given"])
def test_configuration_errors_are_raised_at_open(
    azurite: AzuriteServer, azure_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    remote, name = f"{azure_url}/run", "AZURE_STORAGE_CONNECTION_STRING"
    given = os.environ[name]
    monkeypatch.setattr("ckpt_async.runners.host.START_TIMEOUT_S", 1.0)
    match what:
        case "credentials":
            monkeypatch.setenv(name, given.replace("AccountKey=", "AccountKey=AAAA"))
            wanted, said = FailureReason.AUTH, "does not belong to the account ckptdemo"
        case "container":
            remote, wanted = "az://no-such-container/run", FailureReason.NOT_FOUND
            said = "there is no container no-such-container in the account ckptdemo"
        case "nobody there":
            monkeypatch.setenv(name, given.replace(azurite.url, "http://127.0.0.1:1/ckptdemo"))
            wanted, said = FailureReason.TRANSIENT, "reachable from here"
        case _:
            monkeypatch.delenv(name)
            monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "nobody")
            monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")
            wanted, said = FailureReason.AUTH, "AZURE_STORAGE_SAS_TOKEN"
    with pytest.raises(StoreError, match=re.escape(said)) as caught:
        Uploader(tmp_path / "folder", remote, store_options=StoreOptions(connect_timeout_s=0.5))
    assert caught.value.reason is wanted
    assert "sig=" not in str(caught.value)


@pytest.mark.fault("F82")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_rounds", [15, pytest.param(1000, marks=SOAK)])
def test_of_eight_writers_one_wins_and_each_knows_who(
    azure_proxy: FaultProxy, azure_url: str, num_rounds: int
) -> None:
    """Two answers in five are lost on their way back, among them some winner's."""
    azure_proxy.add(Fault("drop_reply", "PUT", "/race/", probability=0.4))
    settings = Settings(retry_initial_s=0.01, retry_max_s=0.05)

    async def race() -> None:
        stores = [connect(f"{azure_url}/run", None, settings) for _ in range(8)]
        await asyncio.gather(*(store.open() for store in stores))
        try:
            for number in range(num_rounds):
                mine = [b"%d of %d" % (writer, number) for writer in range(8)]
                seen = await asyncio.gather(
                    *(
                        create_once(store, f"race/{number}", data)
                        for store, data in zip(stores, mine, strict=True)
                    )
                )
                assert len(set(seen)) == 1, (number, seen)
                there, _ = await stores[0].get(f"race/{number}", max_size_bytes=99)
                assert there == seen[0]
                assert there in mine
        finally:
            await asyncio.gather(*(store.close() for store in stores))

    asyncio.run(race())
    lost = sum(each.fault == "drop_reply" and each.upstream_status == 201 for each in azure_proxy.exchanges)
    print(f"rounds={num_rounds} wins whose answer was lost={lost}")
    assert lost


def test_two_uploads_of_one_key_do_not_mix(azure_url: str) -> None:
    """Committing one upload drops the other's blocks, so the other must be told, unless its content is identical."""
    one, other = os.urandom(PART), os.urandom(PART)

    async def play() -> None:
        stores = [open_store(f"{azure_url}/run") for _ in range(2)]
        for store in stores:
            await store.open()
        crcs = [checksum_of(data, "crc64nvme") for data in (one, other)]
        try:
            ids = [await store.create_multipart("a") for store in stores]
            parts = [
                await store.put_part("a", id_, 1, BytesBody(data), crc)
                for store, id_, data, crc in zip(stores, ids, (one, other), crcs, strict=True)
            ]
            for store, id_, part in zip(stores, ids, parts, strict=True):
                assert list(await store.list_parts("a", id_)) == [part]
            await stores[0].abort_multipart("a", ids[0])  # a real abort would drop the other's blocks too
            assert list(await stores[1].list_parts("a", ids[1])) == [parts[1]]
            await stores[0].complete_multipart("a", ids[0], [parts[0]], crcs[0], PART)
            with pytest.raises(StoreError) as caught:
                await stores[1].complete_multipart("a", ids[1], [parts[1]], crcs[1], PART)
            assert caught.value.reason is FailureReason.NOT_FOUND
            assert (await stores[1].head("a")).checksum == crcs[0]
        finally:
            for store in stores:
                await store.close()

    asyncio.run(play())
