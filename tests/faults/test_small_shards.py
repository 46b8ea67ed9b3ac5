"""A checkpoint of many small shards against a real S3 server: each is sent once, whatever happens to the others."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import CheckpointAbortedError, Uploader, restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.stores.http.small_uploads import SmallRequest, SmallUploads
from tests.faults.oracle import Oracle
from tests.faults.processes import Nursery
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.saves import QUICK, SHARDS, save
from tests.faults.trainer import content, shard_name

NUM = 100
SIZE_BYTES = 3000
# Only requests that are broken on purpose time out.
CALM: dict[str, Any] = QUICK | {"request_timeout_s": 30.0, "stall_timeout_s": 30.0}
# A single place, so that the last of four series is read only after the first has been sent.
ONE: dict[str, Any] = CALM | {"num_concurrent_uploads": 1, "max_concurrent_uploads": 1}


def shard(number: int) -> str:
    return rf"{SHARDS}1\.g1/{re.escape(shard_name(0, number))}$"


def oracle(s3_url: str) -> Oracle:
    return Oracle(f"{s3_url}/run", 1, num_shards=NUM, size_bytes=SIZE_BYTES)


def save_many(uploader: Uploader, step: int = 1) -> None:
    save(uploader, step, num_shards=NUM, size_bytes=SIZE_BYTES)


def sent(proxy: FaultProxy) -> Counter[str]:
    return Counter({key.rpartition("/")[2]: count for (key, _), count in proxy.sent(SHARDS).items()})


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many objects bypassed the SDK together with others, by series."""
    found: list[int] = []
    original = SmallUploads.put_many

    async def noting(self: SmallUploads, url: str, puts: Iterator[SmallRequest], answered: Any) -> Any:
        place = len(found)
        found.append(0)

        def counted() -> Iterator[SmallRequest]:
            for put in puts:
                found[place] += 1
                yield put

        return await original(self, url, counted(), answered)

    monkeypatch.setattr(SmallUploads, "put_many", noting)
    return found


def test_each_small_shard_is_sent_once_and_is_readable(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, series: list[int]
) -> None:
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **CALM) as uploader:
        save_many(uploader)
        uploader.wait(1, timeout_s=30)
    assert sent(proxy) == {shard_name(0, number): 1 for number in range(NUM)}
    assert sum(series) > NUM * 0.8  # the last ones are sent alone, so that none waits behind another
    assert oracle(s3_url).look() == {CheckpointId(1, 1)}
    found = restore.fetch_latest(f"{s3_url}/run", tmp_path / "back")
    assert found is not None
    for number in range(NUM):
        back = (tmp_path / "back" / shard_name(0, number)).read_bytes()
        assert back == content(1, 1, 0, number, SIZE_BYTES)


def test_only_failed_small_shards_are_sent_again(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **CALM | {"stall_timeout_s": 3.0}) as uploader:
        faults = [
            proxy.add(Fault("unavailable", "PUT", shard(3), times=2)),
            proxy.add(Fault("unavailable", "PUT", shard(50), times=1)),
            proxy.add(Fault("expired", "PUT", shard(20), times=1)),
            proxy.add(Fault("reset", "PUT", shard(30), times=1, after_bytes=100)),
            proxy.add(Fault("silent", "PUT", shard(70), times=1)),
            proxy.add(Fault("drop_reply", "PUT", shard(8), times=1)),
            proxy.add(Fault("cut_reply", "PUT", shard(40), times=1, after_bytes=12)),
            proxy.add(Fault("spoil_reply", "PUT", shard(60), times=1)),
        ]
        save_many(uploader)
        uploader.wait(1, timeout_s=60)
        assert [fault.num_hits for fault in faults] == [2, 1, 1, 1, 1, 1, 1, 1]
    assert sent(proxy) == {shard_name(0, number): 2 if number in (8, 40, 60) else 1 for number in range(NUM)}
    assert oracle(s3_url).look() == {CheckpointId(1, 1)}
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]


def test_a_changed_small_shard_fails_only_its_checkpoint(
    proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **ONE, on_error="warn") as uploader:
        held = proxy.add(Fault("hold", "PUT", SHARDS, times=1))
        save_many(uploader)
        proxy.wait_for(lambda: held.num_hits == 1)
        last = max(shard_name(0, number) for number in range(NUM))
        with (uploader.folder / "step-1" / "rank-0" / last).open("r+b") as file:
            file.write(b"AN")
        proxy.release()
        with pytest.raises(CheckpointAbortedError, match=rf"{last}.* changed after it was enqueued"):
            uploader.wait(1, timeout_s=30)
        save_many(uploader, 2)
        uploader.wait(2, timeout_s=30)
    assert not [key for key, _ in proxy.sent(rf"{SHARDS}1\.g1/") if key.endswith(last)]
    found = oracle(s3_url)
    assert found.look() == {CheckpointId(1, 2)}
    assert found.aborted == {CheckpointId(1, 1)}


def test_a_kill_in_the_middle_of_a_series_loses_and_resends_nothing(
    nursery: Nursery, proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    """What the journal does not know yet must be looked up in the store."""
    arguments: dict[str, Any] = {
        "folder": str(tmp_path / "folder"),
        "remote": f"{s3_url}/run",
        "rank": 0,
        "world_size": 1,
        "num_shards": NUM,
        "size_bytes": SIZE_BYTES,
        "settings": ONE,
    }
    order = sorted(range(NUM), key=lambda number: shard_name(0, number))
    held = proxy.add(Fault("hold", "PUT", shard(order[45])))  # in the middle of the second series
    trainer = nursery.start("saves", steps=[1], **arguments)
    trainer.expect("saved")
    proxy.wait_for(lambda: held.num_hits == 1)
    trainer.kill()
    proxy.heal()
    proxy.wait_for(lambda: proxy.num_under_way == 0)
    before = sent(proxy)
    assert before == {shard_name(0, number): 1 for number in order[:45]}
    again = nursery.start("saves", steps=[], **arguments)
    again.expect("saved")
    again.tell("stop")
    assert again.finish() == 0, again.log.read_text()
    assert oracle(s3_url).look() == {CheckpointId(1, 1)}
    assert sent(proxy) == {shard_name(0, number): 1 for number in range(NUM)}
