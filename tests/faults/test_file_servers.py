"""SFTP, WebDAV and web servers that break off, answer wrongly or not at all, and ranks
that are killed while using one.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest

from ckpt_async import StoreOptions, Uploader, restore
from ckpt_async.core.model import CheckpointId
from tests.faults.cutter import Cutter
from tests.faults.oracle import Oracle, heard
from tests.faults.processes import Nursery, Trainer
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.saves import QUICK, SHARDS, save
from tests.file_servers import FileServer
from tests.web_servers import serving_ranges

WORLD_SIZE = 2
SETTINGS = {
    "decision_poll_s": 0.05,
    "close_grace_s": 0.0,
    "retry_initial_s": 0.01,
    "retry_max_s": 0.1,
    "num_checkpoints_to_keep": 1,
}


@pytest.fixture
def webdav_proxy(
    webdav_server: FileServer, webdav_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> Iterator[FaultProxy]:
    """A proxy in front of the session's server; fsspec's configuration points to the proxy instead of the server."""
    with FaultProxy(f"http://127.0.0.1:{webdav_server.port}", seed) as proxy:
        monkeypatch.setitem(fsspec.config.conf, "webdav", {"base_url": f"{proxy.url}/"})
        yield proxy


@pytest.mark.fault("F83")
def test_ranks_that_are_killed_lose_nothing_on_an_sftp_server(
    nursery: Nursery, tmp_path: Path, sftp_url: str, sftp_server, seed: int
) -> None:
    """SFTP has no conditional writes, so rank 0 alone decides. Everything that all ranks had sealed must still be
    committed, and no partial checkpoint may ever be visible.
    """
    remote, oracle, random_ = f"{sftp_url}/run", Oracle(f"{sftp_url}/run", WORLD_SIZE), random.Random(seed)
    sealed: list[set[CheckpointId]] = [set() for _ in range(WORLD_SIZE)]

    def start(number: int, steps: list[int]) -> list[Trainer]:
        environment = sftp_server.environment() | {"CKPT_ASYNC_LAUNCH_ID": f"start-{number}"}
        return [
            nursery.start(
                "saves",
                environment,
                folder=str(tmp_path / "folder"),
                remote=remote,
                rank=rank,
                world_size=WORLD_SIZE,
                steps=steps,
                train_s=0.1,
                settings=SETTINGS,
            )
            for rank in range(WORLD_SIZE)
        ]

    for number in range(6):
        trainers = start(number, [1, 2, 3])
        for trainer in trainers if number < 4 else ():  # rank 1 opens only after rank 0
            trainer.expect("opened")
        for rank in random_.sample(range(WORLD_SIZE), WORLD_SIZE):
            trainers[rank].listen(random_.uniform(0.0, 1.5))
            trainers[rank].kill()
        for rank, trainer in enumerate(trainers):
            sealed[rank] |= heard(trainer.said, "sealed")
        oracle.look()
    trainers = start(9, [])
    for trainer in trainers:
        trainer.expect("saved")
    wanted = sealed[0] & sealed[1]
    assert wanted, "the kills came too early"
    for _ in range(300):
        # `latest` moves a moment after the commit.
        if wanted <= oracle.look() | oracle.aborted and oracle.latest == max(oracle.committed):
            break
        trainers[0].listen(0.1)
    assert wanted <= oracle.committed, "sealed by all ranks, yet lost"
    for trainer in trainers:
        trainer.tell("stop")
        assert trainer.finish() == 0, trainer.log.read_text()
    assert oracle.latest == max(oracle.committed)


@pytest.mark.fault("F83")
def test_an_sftp_connection_that_breaks_anywhere_loses_and_doubles_nothing(
    sftp_server: FileServer, sftp_url: str, tmp_path: Path, seed: int
) -> None:
    """A request's body may be cut off on its way to the server, or an answer lost on its way back, so
    that nobody knows what was done.
    """
    random_ = random.Random(seed)
    with Cutter(sftp_server.port) as cutter:
        remote = sftp_url.replace(f":{sftp_server.port}/", f":{cutter.port}/") + "/run"
        with Uploader(tmp_path / "folder", remote, **QUICK) as uploader:
            for step in range(1, 9):
                way, most = ("up", 40_000) if step % 2 else ("down", 20_000)
                cutter.cut(way, random_.randrange(most))
                save(uploader, step)
                uploader.wait(step, timeout_s=60)
        assert cutter.num_cut >= 6
        oracle = Oracle(f"{sftp_url}/run", 1)
        assert oracle.look() == {CheckpointId(1, step) for step in range(1, 9)}
        for number in range(4):  # while the store is opened, listed or read
            cutter.cut("down", random_.randrange(1000 if number == 0 else 30_000))
            assert restore.fetch_latest(remote, tmp_path / f"restored-{number}") is not None


@pytest.mark.fault("F84")
@pytest.mark.parametrize("method", ["PUT", "MOVE", "MKCOL", "PROPFIND", "GET", ""])
def test_a_lost_reply_of_a_webdav_server_is_survived(
    webdav_proxy: FaultProxy, webdav_url: str, tmp_path: Path, method: str
) -> None:
    """The server has already done what was asked: a file has its temporary name, or has already been moved. Without a
    method, one request in six of any kind is hit.
    """
    with Uploader(tmp_path / "folder", f"{webdav_url}/run", **QUICK) as uploader:
        how = {"times": 4} if method else {"probability": 1 / 6}
        fault = webdav_proxy.add(Fault("drop_reply", method, **how))
        for step in (1, 2):
            save(uploader, step)
            uploader.wait(step, timeout_s=60)
        assert fault.num_hits >= (1 if method in ("MKCOL", "GET") else 2)
        webdav_proxy.heal()
    oracle = Oracle(f"{webdav_url}/run", 1)
    assert oracle.look() == {CheckpointId(1, 1), CheckpointId(1, 2)}
    assert oracle.latest == CheckpointId(1, 2)


@pytest.mark.fault("F84")
@pytest.mark.parametrize("kind", ["cut_reply", "flip_reply", "flip_request", "reset", "stall"])
def test_bytes_that_a_webdav_server_gets_or_gives_wrong_do_not_count(
    webdav_proxy: FaultProxy, webdav_url: str, tmp_path: Path, kind: str
) -> None:
    """WebDAV servers compare no checksums, so the uploader must find out by reading back."""
    is_request = kind in ("flip_request", "reset", "stall")
    size_bytes = 1 << 20
    with Uploader(tmp_path / "folder", f"{webdav_url}/run", **QUICK) as uploader:
        method, key = ("PUT", r"/tmp/") if is_request else ("GET", r"/tmp/|step-")
        fault = webdav_proxy.add(Fault(kind, method, key, times=1, after_bytes=300_000))
        save(uploader, 1, num_shards=1, size_bytes=size_bytes)
        uploader.wait(1, timeout_s=60)
    assert fault.num_hits == 1
    assert Oracle(f"{webdav_url}/run", 1, num_shards=1, size_bytes=size_bytes).look() == {CheckpointId(1, 1)}


@pytest.mark.fault("F85")
@pytest.mark.parametrize(
    "kind", ["drop_reply", "cut_reply", "flip_reply", "unavailable", "too_many", "stall"]
)
def test_a_web_server_that_answers_badly_is_asked_again(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "served"
    with Uploader(tmp_path / "folder", f"file://{folder}/run", **QUICK) as uploader:
        save(uploader, 1, num_shards=2, size_bytes=1 << 20)
        uploader.wait(1, timeout_s=30)
    with serving_ranges(folder) as url, FaultProxy(url) as proxy:
        kind_there = "silent" if kind == "stall" else kind
        faults = [
            proxy.add(Fault(kind_there, "GET", SHARDS, times=1, after_bytes=300_000)),
            proxy.add(
                Fault("drop_reply" if kind == "flip_reply" else kind_there, "GET", "latest|receipts", times=1)
            ),
        ]
        options = StoreOptions(read_timeout_s=1.0)
        found = restore.fetch_latest(f"{proxy.url}/run", tmp_path / "restored", store_options=options)
    assert found is not None
    assert [fault.num_hits for fault in faults] == [1, 1]
    for name in found[1].paths:
        there = [each for each in folder.rglob(Path(name).name) if "ckpt/step-" in str(each)]
        assert there[0].read_bytes() == (tmp_path / "restored" / name).read_bytes()
