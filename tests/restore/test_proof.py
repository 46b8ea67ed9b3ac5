"""A damage mark needs proof: corruption on the wire is not damage, but what the store has lost is."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import cli, restore
from ckpt_async.cli.output import Exit
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import UnreliableReadError
from ckpt_async.restore import session
from ckpt_async.stores.directory import DirectoryStore
from tests.faults.proxy import Fault, FaultProxy
from tests.restore.runs import Run, content, files_of, is_whole, left_in, shard_key

FILES = {0: {"large.pt": content(10, "large.pt", 700_000), "small.pt": content(10, "small.pt")}}
RECORDS_AND_DATA, DATA = r"\.(json|pt)$", r"\.pt$"


@pytest.fixture
def spoilt_run(s3_url: str) -> Run:
    """A run with two checkpoints in S3, behind the proxy."""
    run = Run(s3_url)
    run.commit(5, {0: {"a.pt": content(5, "a.pt")}})
    run.commit(10, FILES)
    return run


@pytest.mark.fault("F60")
@pytest.mark.parametrize(
    ("keys_", "at"),
    [(DATA, 0), (RECORDS_AND_DATA, 0), (RECORDS_AND_DATA, 50), (r"/(decisions|receipts)/", 0)],
    ids=["data", "everything", "everything, the same bit", "records"],
)
def test_nothing_is_marked_when_every_response_is_corrupted(
    proxy: FaultProxy,
    spoilt_run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    keys_: str,
    at: int,
) -> None:
    """Neither this checkpoint nor the next older one may be marked. The error says what is wrong and has an exit code
    of its own; when the wire is sound again, everything can be fetched.
    """
    fault = proxy.add(Fault("flip_reply", "GET", keys_, after_bytes=at))
    assert cli.main(["pull", spoilt_run.url, str(tmp_path / "there"), "--json"]) == Exit.UNRELIABLE
    told = json.loads(capsys.readouterr().out)["error"]
    assert (told["kind"], told["exit_code"]) == ("UnreliableReadError", 7)
    assert fault.num_hits > 0
    proxy.heal()
    assert spoilt_run.damages() == {}
    assert spoilt_run.leases() == []
    found = restore.fetch_latest(spoilt_run.url, tmp_path / "there")
    assert found is not None
    assert found[0].step == 10
    assert is_whole(found[1], FILES)
    assert left_in(tmp_path / "there") == sorted(FILES[0])


@pytest.mark.fault("F60")
@pytest.mark.parametrize("keys_", [DATA, RECORDS_AND_DATA], ids=["data", "everything"])
def test_data_corrupted_a_few_times_is_read_again(
    proxy: FaultProxy, spoilt_run: Run, tmp_path: Path, keys_: str
) -> None:
    """Each file and each record is corrupted on its first read."""
    for name in {"large.pt", "small.pt"} | ({"00000.json"} if keys_ != DATA else set()):
        proxy.add(Fault("flip_reply", "GET", f"(000010|step-10.*)/{name}", times=1))
    found = restore.fetch_latest(spoilt_run.url, tmp_path / "there")
    assert found is not None
    assert found[0].step == 10
    assert is_whole(found[1], FILES)
    assert spoilt_run.damages() == {}


@pytest.mark.fault("F60")
def test_records_corrupted_in_transit_are_not_damage(run_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store sends no checksums with these records, so only their content can reveal the corruption."""
    for step in (5, 10):
        run_.commit(step)
    get, chance = DirectoryStore.get, random.Random(1)

    async def spoilt(self: DirectoryStore, key: str, **options: Any) -> Any:
        data, info = await get(self, key, **options)
        at = chance.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(7)]) + data[at + 1 :], info

    monkeypatch.setattr(DirectoryStore, "get", spoilt)
    for _ in range(20):
        with pytest.raises(UnreliableReadError, match="differently at each read"):
            restore.find(run_.url)
    monkeypatch.undo()
    assert run_.damages() == {}
    assert run_.keys(keys.LEASES) == []


@pytest.mark.fault("F60")
def test_the_same_wrong_bytes_twice_are_proof_of_damage(
    proxy: FaultProxy, spoilt_run: Run, tmp_path: Path
) -> None:
    """A store's disk may have lost a bit while the store claims that the object is unchanged."""
    proxy.add(Fault("flip_reply", "GET", r"large\.pt$", after_bytes=1000))
    found = restore.fetch_latest(spoilt_run.url, tmp_path / "there")
    assert found is not None
    assert found[0].step == 5
    proxy.heal()
    assert "identically over two" in spoilt_run.damages()[CheckpointId(1, 10)]
    connections = [each for each in proxy.exchanges if each.fault]
    assert len(connections) == 2


@pytest.mark.fault("F60")
def test_verify_blames_the_store_only_for_what_it_says_twice(
    proxy: FaultProxy, spoilt_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify` called an intact checkpoint damaged because of one flipped bit in one answer."""

    def verify() -> tuple[int, dict[str, Any]]:
        code = cli.main(["verify", spoilt_run.url, "--read-data", "100", "--json"])
        return code, json.loads(capsys.readouterr().out)

    once = proxy.add(Fault("flip_reply", "GET", DATA, times=1))
    code, told = verify()
    assert (code, told["violations"], told["unread"], once.num_hits) == (0, [], [], 1)

    proxy.add(Fault("flip_reply", "GET", r"large\.pt$"))  # each time another bit
    code, told = verify()
    assert (code, told["violations"]) == (Exit.UNRELIABLE, [])
    [unread] = told["unread"]
    assert unread["key"] == shard_key(10, "large.pt")
    assert "differently" in unread["message"]
    assert cli.main(["verify", spoilt_run.url, "--read-data", "100"]) == Exit.UNRELIABLE
    assert "wrong checksum" not in capsys.readouterr().out

    proxy.heal()
    proxy.add(Fault("flip_reply", "GET", r"large\.pt$", after_bytes=1000))
    code, told = verify()
    assert (code, told["unread"]) == (Exit.INCOMPLETE, [])
    assert [each["key"] for each in told["violations"]] == [shard_key(10, "large.pt")]


def test_the_stores_own_checksum_is_proof_of_damage(spoilt_run: Run, tmp_path: Path) -> None:
    """The store is asked for its checksum before any more bytes are read."""
    spoilt_run.flip(shard_key(10, "large.pt"))
    with pytest.raises(restore.DamagedCheckpointError):
        restore.fetch_latest(spoilt_run.url, tmp_path / "there", step=10)
    assert "according to the store itself" in spoilt_run.damages()[CheckpointId(1, 10)]


def test_who_reads_back_something_else_than_it_has_just_written_marks_nothing(
    run_: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_, get = run_.commit(10), DirectoryStore.get

    async def corrupted(store: Any, key: str, **how: Any) -> Any:
        data, info = await get(store, key, **how)
        return (data.replace(b"reader", b"leader") if key.startswith(keys.LEASES) else data), info

    async def main() -> None:
        async with session.session(run_.url, None) as opened:
            await session.mark_damaged(opened, id_, "wrong bytes")

    monkeypatch.setattr(DirectoryStore, "get", corrupted)
    with pytest.raises(UnreliableReadError, match="a record written just now also came back"):
        asyncio.run(main())
    assert (run_.damages(), run_.leases()) == ({}, [])


@pytest.mark.fault("F60")
def test_a_damage_mark_can_be_removed(run_: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A `verify` that reads all data suggests removing the mark from a checkpoint that is
    whole, and `unmark` removes it.
    """
    files = files_of(20)
    for step in (10, 20):
        run_.commit(step)
        run_.flip(shard_key(step, "rank-0.pt"))
        with pytest.raises(restore.NoUsableCheckpointError):
            restore.fetch_latest(run_.url, tmp_path / "there")
    run_.flip(shard_key(20, "rank-0.pt"))  # the file is whole again

    def call(*arguments: str) -> dict[str, object]:
        cli.main([*arguments, "--json"])
        return json.loads(capsys.readouterr().out)

    for percent, is_sound in ((0, False), (50, False), (100, True)):
        marked = call("verify", run_.url, "--step", "20", "--read-data", str(percent))["marked"]
        assert marked == [
            {"generation": 1, "step": 20, "reason": run_.damages()[CheckpointId(1, 20)], "is_sound": is_sound}
        ], percent
    assert [each["is_sound"] for each in call("verify", run_.url, "--read-data", "100")["marked"]] == [
        False,
        True,
    ]
    assert cli.main(["verify", run_.url, "--read-data", "100"]) == Exit.INCOMPLETE
    assert f"`ckpt-async unmark {run_.url} 20@g1` removes the mark" in capsys.readouterr().out
    with pytest.raises(restore.NoUsableCheckpointError):
        restore.find(run_.url)
    assert call("unmark", run_.url, "20@g1")["step"] == 20
    assert list(run_.damages()) == [CheckpointId(1, 10)]
    found = restore.fetch_latest(run_.url, tmp_path / "there")
    assert found is not None
    assert is_whole(found[1], files)
    assert cli.main(["unmark", run_.url, "20"]) == Exit.NOT_FOUND
    assert "no checkpoint that is marked as damaged has the step or name '20'" in capsys.readouterr().err
    assert run_.keys(keys.LEASES) == []
