"""The page of a sweeper: its folders as they are now, its remotes as the last sweep found them."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_async import Settings, Sweeper, Uploader
from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Damage
from ckpt_async.page.board import Board
from ckpt_async.page.server import serve
from ckpt_async.transfer.patient import connect
from tests.missing_ranks import lacking_ranks


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run-a"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Uploader]]:
    """Two ranks on two nodes: three checkpoints are committed, and one lacks rank 1."""
    with lacking_ranks(tmp_path, tmp_path / "store/run-a", (0, 1), (1, 2, 3)) as opened:
        yield opened


def test_it_tells_what_is_committed_pruned_damaged_and_waited_for(
    tmp_path: Path, remote: str, ranks: list[Uploader]
) -> None:
    async def damage() -> None:
        store = connect(remote, None, Settings())
        await store.open()
        damage = Damage(CheckpointId(1, 3), "bits fell over", "me", 1.0)
        await store.put(keys.damage_key(damage.checkpoint), records.encode_damage(damage))
        await store.close()

    asyncio.run(damage())
    sweeper = Sweeper([tmp_path / "node-*"], settings=Settings(remote_retention="last=1"))
    server = serve(sweeper.metrics.registry, 0, "127.0.0.1", {}, Board(sweeper.showing.look))
    assert server is not None
    try:
        asyncio.run(sweeper.sweep())
        with urllib.request.urlopen(f"{server.page_url}status.json") as reply:
            told = json.load(reply)
    finally:
        server.close()
    assert (told["role"], told["problem"], told["sweep"]["is_clean"]) == ("sweeper", None, True)
    assert [each["folder"] for each in told["folders"]] == [f"{tmp_path}/node-0", f"{tmp_path}/node-1"]
    (found,) = told["remotes"]
    assert (found["remote"], found["world_size"], found["last_committed"]["step"]) == (remote, 2, 2)
    checkpoints = {each["step"]: each for each in found["checkpoints"]}
    states = {step: (each["state"], each["is_damaged"]) for step, each in checkpoints.items()}
    assert states == {
        1: ("pruned", False),
        2: ("committed", False),
        3: ("committed", True),
        4: ("in_flight", False),
    }
    assert (checkpoints[4]["ranks"], checkpoints[4]["missing_ranks"]) == ([0], [1])
    assert ("pruned", 1) in {(each["what"], each["step"]) for each in told["events"]}


def test_a_remote_that_is_away_keeps_what_was_known_of_it(
    tmp_path: Path, remote: str, ranks: list[Uploader]
) -> None:
    sweeper = Sweeper([], [remote])
    asyncio.run(sweeper.sweep())
    (before,) = sweeper.showing.look()["remotes"]
    assert before["error"] is None
    (tmp_path / "store").rename(tmp_path / "away")
    asyncio.run(sweeper.sweep())
    (after,) = sweeper.showing.look()["remotes"]
    (tmp_path / "away").rename(tmp_path / "store")
    assert after["error"]
    assert after["checkpoints"] == before["checkpoints"]
    assert sweeper.showing.look()["events"][0]["level"] == "warn"
