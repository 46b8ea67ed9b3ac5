"""Adopting what dead trainers left: real trainers, really killed, and `ckpt-async drain` after them."""

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, cli
from ckpt_async.cli import drain as drain_command
from ckpt_async.core import decide, keys
from ckpt_async.core.model import CheckpointId, RemoteAddress
from ckpt_async.engine import recovery
from ckpt_async.engine.loop import Engine
from ckpt_async.errors import (
    FailureReason,
    JournalError,
    NoJournalError,
    NoSpaceError,
    SettingsError,
    StoreError,
)
from ckpt_async.local import journals
from ckpt_async.local.outbox import Outbox
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.sweep.drain import drain
from tests.seaweed import SeaweedServer
from tests.sweep.trainers import Json, Trainers
from tests.trainer.uploads import wait_until

Drain = Callable[..., tuple[int, Json]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Drain:
    """Run a command with --json and return its exit code and its object."""

    def call(*arguments: object) -> tuple[int, Json]:
        code = cli.main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def steps(found: list[Json]) -> list[int]:
    return [each["step"] for each in found]


def test_a_killed_trainers_sealed_checkpoint_is_committed(
    trainers: Trainers, call: Drain, folder: Path, remote: str
) -> None:
    """This is the journal's promise, without being told where to upload to. A second drain finds nothing to do."""
    trainers.die(folder, remote, 100, 200)
    assert call("ls", remote)[1]["checkpoints"] == []
    code, told = call("drain", folder)
    assert (code, told["is_drained"], told["remotes"], told["uploaded_bytes"]) == (0, True, [remote], 10_000)
    assert steps(told["ranks"][0]["committed"]) == [100, 200]
    code, listed = call("ls", remote)
    assert (code, listed["latest"]) == (0, {"generation": 1, "step": 200})
    assert steps(listed["checkpoints"]) == [100, 200]
    assert call("status", folder)[1]["last_committed"]["step"] == 200
    stored = Path(remote.removeprefix("file://"), "ckpt/step-100.g1/rank0.bin")
    assert stored.read_bytes() == (folder / "step-100/rank0.bin").read_bytes()
    code, told = call("drain", folder)
    assert (code, told["uploaded_bytes"], told["ranks"][0]["committed"]) == (0, 0, [])
    assert call("ls", remote)[1]["checkpoints"] == [
        {**each, "age_s": pytest.approx(each["age_s"], abs=600)} for each in listed["checkpoints"]
    ]


def copied(folder: Path, place: Path, how: str = "-a") -> Path:
    """Copy a folder as a user would. `cp -r` does not keep the times."""
    copy = place / "copy"
    subprocess.run(["cp", how, folder, copy], check=True)
    return copy


@pytest.mark.fault("F95")
@pytest.mark.parametrize("how", ["-a", "-r"])
@pytest.mark.parametrize("has_journal", [True, False])
def test_a_copy_of_unfinished_uploads_is_refused(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path, how: str, has_journal: bool
) -> None:
    """What it lacks was given up, or uploaded beside the original."""
    trainers.die(folder, remote, 100, 200, sealed=(100,))
    copy = copied(folder, tmp_path, how)
    if not has_journal:
        lose_journal(copy)
    before = _objects(tmp_path / "store")
    code, told = call("drain", copy)
    assert (code, told["error"]["kind"]) == (1, "JournalError")
    assert "is a copy of another one" in told["error"]["message"]
    assert "drain FOLDER --adopt" in told["error"]["hint"]
    with pytest.raises(JournalError, match="is a copy of another one"):
        Uploader(copy, remote)
    assert _objects(tmp_path / "store") == before
    code, told = call("sweep", copy, folder)
    refused, swept = told["folders"]
    assert (code, swept["committed"]) == (1, 1)
    assert "is a copy of another one" in refused["error"]


def test_a_copy_without_unfinished_uploads_is_like_any_folder(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    trainers.die(folder, remote, 100)
    assert call("drain", folder)[0] == 0
    copy = copied(folder, tmp_path)
    assert call("drain", copy)[0] == 0
    with Uploader(copy, remote, rank=0, world_size=1) as uploader:
        assert uploader.generation == 2


@pytest.mark.fault("F95")
def test_an_adopted_copy_gives_up_what_it_lacks(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    trainers.die(folder, remote, 100, 200, 300, 400, sealed=(100, 200, 400))
    copy = copied(folder, tmp_path)
    for step in (100, 200):
        (link,) = (copy / ".ckpt-async/spool").rglob(f"*{step}/rank0.bin")
        if step == 100:
            link.unlink()
        else:
            os.utime(link)
    code, told = call("drain", copy, "--adopt")
    (rank,) = told["ranks"]
    assert (code, steps(rank["committed"]), steps(rank["aborted"])) == (0, [400], [100, 200, 300])
    assert all(each["reason"] for each in rank["aborted"])
    stored = Path(remote.removeprefix("file://"), "ckpt/step-400.g1/rank0.bin")
    assert stored.read_bytes() == (folder / "step-400/rank0.bin").read_bytes()
    assert call("drain", copy)[0] == 0


@pytest.mark.fault("F95")
def test_of_a_copy_without_times_nothing_is_committed(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """Its bytes cannot be told from changed ones."""
    trainers.die(folder, remote, 100, 200)
    copy = copied(folder, tmp_path, "-r")
    code, told = call("drain", copy, "--adopt")
    (rank,) = told["ranks"]
    assert (code, rank["committed"], steps(rank["aborted"])) == (0, [], [100, 200])
    assert not list(Path(remote.removeprefix("file://")).rglob("rank0.bin"))
    assert sorted(each.parent.name for each in copy.glob("*/rank0.bin")) == ["step-100", "step-200"]


@pytest.mark.fault("F95")
@pytest.mark.parametrize("has_journal", [True, False])
def test_a_copy_is_adopted_once_and_for_all(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path, has_journal: bool
) -> None:
    """It waits for another rank, and is not refused when that has come."""
    trainers.die(folder, remote, 100, rank=0, world_size=2)
    copy = copied(folder, tmp_path)
    code, told = call("drain", copy, "--adopt", "--grace", "0")
    assert (code, steps(told["ranks"][0]["waiting"])) == (4, [100])
    if not has_journal:
        lose_journal(copy)
    code, told = call("drain", copy, "--grace", "0")
    assert (code, steps(told["ranks"][0]["waiting"])) == (4, [100])
    trainers.die(tmp_path / "other", remote, 100, rank=1, world_size=2)
    assert call("drain", tmp_path / "other")[0] == 0
    code, told = call("drain", copy)
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [100])


def test_local_retention_removes_files_of_an_adopted_copy(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    trainers.die(folder, remote, 100, 200, num_checkpoints_to_keep=1)
    copy = copied(folder, tmp_path)
    assert call("drain", copy, "--adopt")[0] == 0
    assert [each.parent.name for each in copy.glob("step-*/rank0.bin")] == ["step-200"]


@pytest.mark.fault("F95")
@pytest.mark.parametrize("has_journal", [True, False])
def test_a_moved_folder_is_no_copy(
    trainers: Trainers,
    call: Drain,
    folder: Path,
    remote: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_journal: bool,
) -> None:
    """A volume that is mounted elsewhere, after a boot, has another device number and the same inodes."""
    trainers.die(folder, remote, 100)
    moved = folder.rename(tmp_path / "moved")
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    (manifest,) = (moved / ".ckpt-async/spool/rank-00000").glob("*.json")
    fields = json.loads(manifest.read_text())
    fields["shards"][0]["identity"][0] += 1
    manifest.write_text(json.dumps(fields))
    if not has_journal:
        lose_journal(moved)
    code, told = call("drain", moved)
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [100])


@pytest.mark.fault("F95")
def test_where_a_mount_changes_inodes_nothing_is_taken_for_a_copy(
    trainers: Trainers,
    call: Drain,
    folder: Path,
    remote: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on most FUSE file systems: size and mtime decide."""
    trainers.die(folder, remote, 100)
    mounted = copied(folder, tmp_path)
    mark = mounted / ".ckpt-async/host.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "trusted": "fuse.any"}))
    monkeypatch.setattr("ckpt_async.local.folder.filesystem_of", lambda *_: "fuse.any")
    code, told = call("drain", mounted)
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [100])


def test_what_another_run_kept_here_is_not_pruned(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """The journal and the spool, which told the runs apart, are lost."""
    trainers.die(folder, remote, 100, num_checkpoints_to_keep=-1)
    assert call("drain", folder)[0] == 0
    trainers.die(folder, remote, 200, generation=2, num_checkpoints_to_keep=-1)
    assert call("drain", folder)[0] == 0
    assert list((folder / ".ckpt-async/kept/rank-00000").glob("*100.json"))
    lose_journal(folder)
    shutil.rmtree(folder / ".ckpt-async/spool")
    for step in (1, 2):
        trainers.die(folder, f"file://{tmp_path}/other", step, generation=2 + step, num_checkpoints_to_keep=1)
        assert call("drain", folder)[0] == 0
    assert {each.parent.name for each in folder.glob("step-*/rank0.bin")} == {
        "step-100",
        "step-200",
        "step-2",
    }


def test_a_link_that_was_changed_beside_good_ones_gives_up_only_its_own_checkpoint(
    trainers: Trainers, call: Drain, folder: Path, remote: str
) -> None:
    """The folder is no copy, so nobody else has the link as it was enqueued."""
    trainers.die(folder, remote, 100, 200)
    (changed,) = (folder / ".ckpt-async/spool").rglob("*100*/rank0.bin")
    os.utime(changed)
    _, told = call("drain", folder)
    assert (steps(told["ranks"][0]["committed"]), steps(told["ranks"][0]["aborted"])) == ([200], [100])


def test_draining_to_s3_needs_only_credentials(
    trainers: Trainers,
    call: Drain,
    folder: Path,
    s3_url: str,
    s3_server: SeaweedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a node whose shell knows only the credentials, endpoint, region and arguments come from the journal. The
    credentials themselves are never on disk.
    """
    trainers.die(folder, s3_url, 7, put_args={"Metadata": {"owner": "me"}})
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    address = journals.read(folder)[0].local().remote
    assert address is not None
    assert (address.endpoint_url, address.region) == (s3_server.url, "us-east-1")
    assert address.put_args == {"Metadata": {"owner": "me"}}
    for each in (folder / ".ckpt-async").rglob("*"):
        assert not each.is_file() or os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in each.read_bytes()
    code, told = call("drain", folder)
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [7])
    code, listed = call("ls", s3_url, "--endpoint-url", s3_server.url, "--region", "us-east-1")
    assert (code, listed["checkpoints"][0]["size_bytes"], listed["checkpoints"][0]["shards"]) == (0, 3000, 1)


def test_a_live_owner_is_left_alone(trainers: Trainers, call: Drain, folder: Path, remote: str) -> None:
    """Two engines on one journal would conflict. A dead neighbour in the same folder must still be finished."""
    owner = trainers.start(folder, remote, 1, rank=0, world_size=2)
    trainers.die(folder, remote, 1, rank=1, world_size=2)
    assert call("status", folder)[1]["ranks"] == [
        {"rank": 0, "is_running": True},
        {"rank": 1, "is_running": False},
    ]
    code, told = call("drain", folder, "--grace", 0)
    live, dead = told["ranks"]
    assert (code, told["is_drained"]) == (5, False)
    assert live == {
        **live,
        "in_use_by": f"process {owner.pid}",
        "uploaded_bytes": 0,
        "left": [],
        "committed": [],
    }
    assert (dead["waiting"][0]["missing_ranks"], dead["uploaded_bytes"], dead["in_use_by"]) == (
        [0],
        3000,
        None,
    )
    assert owner.poll() is None
    trainers.kill(owner)
    code, told = call("drain", folder)
    assert (code, [steps(each["committed"]) for each in told["ranks"]]) == (0, [[1], [1]])


def test_ranks_elsewhere_are_waited_for_and_named(
    trainers: Trainers, call: Drain, tmp_path: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """That everything on this node is safe does not make the checkpoint complete; a script must be able to tell."""
    for rank in (0, 1):
        trainers.die(tmp_path / f"node{rank}", remote, 5, rank=rank, world_size=2)
    code, told = call("drain", tmp_path / "node0", "--grace", 0)
    assert (code, told["ranks"][0]["waiting"][0]["missing_ranks"]) == (4, [1])
    assert cli.main(["drain", str(tmp_path / "node0"), "--grace", "0"]) == 4
    assert capsys.readouterr().out == "rank 0: step 5@g1 is uploaded and waits for rank 1\n"
    assert call("drain", tmp_path / "node1")[0] == 0
    code, told = call("drain", tmp_path / "node0")
    assert (code, steps(told["ranks"][0]["committed"]), told["uploaded_bytes"]) == (0, [5], 0)


def test_an_unsealed_checkpoint_is_given_up(
    trainers: Trainers, call: Drain, folder: Path, remote: str
) -> None:
    """Its trainer is dead and can never seal it; the other ranks must not wait for it."""
    trainers.die(folder, remote, 1, 2, sealed=(1,))
    code, told = call("drain", folder)
    (rank,) = told["ranks"]
    assert (code, steps(rank["committed"]), steps(rank["aborted"])) == (0, [1], [2])
    assert "before it sealed" in rank["aborted"][0]["reason"]
    assert steps(call("ls", remote)[1]["checkpoints"]) == [1]
    outcomes = [each["state"] for each in call("ls", remote, "--all")[1]["checkpoints"]]
    assert outcomes == ["committed", "aborted"]
    assert (folder / "step-2/rank0.bin").exists()


@pytest.mark.parametrize(("keep", "there"), [(1, {"step-2"}), (-1, {"step-1", "step-2"})])
def test_local_retention_is_the_trainers(
    trainers: Trainers, call: Drain, folder: Path, remote: str, keep: int, there: set[str]
) -> None:
    """Retention is the user's choice: with a default of its own, the drain would delete files or let them pile up."""
    trainers.die(folder, remote, 1, 2, num_checkpoints_to_keep=keep, latest_filename="newest")
    assert call("drain", folder)[0] == 0
    assert {each.name for each in folder.glob("step-*")} == there
    assert (folder / "newest").resolve() == folder.resolve() / "step-2"


def test_a_timeout_leaves_everything_in_the_journal(
    trainers: Trainers, call: Drain, folder: Path, remote: str
) -> None:
    trainers.die(folder, remote, 1)
    code, told = call("drain", folder, "--timeout", 0)
    assert (code, steps(told["ranks"][0]["left"]), told["ranks"][0]["left"][0]["reason"]) == (
        6,
        [1],
        "time ran out",
    )
    assert call("drain", folder)[0] == 0


def test_a_timeout_names_what_the_store_answers(
    trainers: Trainers, call: Drain, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the disk of the store is full, while everything in it can still be read."""
    trainers.die(folder, remote, 1)
    put = DirectoryStore.put

    async def full(store: DirectoryStore, key: str, *arguments: Any, **more: Any) -> Any:
        if key.startswith("ckpt/"):
            raise StoreError("the disk is full", reason=FailureReason.DISK, operation="put", key=key)
        return await put(store, key, *arguments, **more)

    with monkeypatch.context() as broken:
        broken.setattr(DirectoryStore, "put", full)
        code, told = call("drain", folder, "--timeout", 2)
    assert code == 6
    reason = "time ran out; the last error was: put 'ckpt/step-1.g1/rank0.bin': the disk is full"
    assert told["ranks"][0]["left"][0]["reason"] == reason
    assert call("drain", folder)[0] == 0


def test_an_unreachable_store_is_a_temporary_failure(
    trainers: Trainers, call: Drain, folder: Path, s3_url: str
) -> None:
    trainers.die(folder, s3_url, 1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        code, told = call("drain", folder, "--endpoint-url", endpoint, "--timeout", 0)
    assert (code, told["error"]["kind"], told["error"]["exit_code"]) == (5, "StoreError", 5)
    assert call("drain", folder)[0] == 0


def lose_journal(folder: Path) -> None:
    for each in (folder / ".ckpt-async").rglob("journal-*"):
        each.unlink()


def test_a_rank_without_a_remote_keeps_no_other_from_being_finished(
    trainers: Trainers, call: Drain, folder: Path, remote: str
) -> None:
    for rank in (0, 1):
        trainers.die(folder, remote, 3, rank=rank, world_size=2)
    for each in (folder / ".ckpt-async").rglob("journal-00001*"):
        each.unlink()
    (manifest,) = (folder / ".ckpt-async/spool/rank-00001").glob("*.json")
    promised = manifest.read_bytes()
    manifest.write_bytes(b"{}")
    code, told = call("drain", folder, "--grace", "0")
    zero, one = told["ranks"]
    assert (code, zero["error"], zero["uploaded_bytes"] > 0, steps(zero["waiting"])) == (1, None, True, [3])
    assert "does not name the remote of rank 1 (pass the run's remote with --remote)" in one["error"]
    manifest.write_bytes(promised)
    code, told = call("drain", folder, "--remote", remote)
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [3])


def test_a_rank_that_may_not_go_to_a_remote_keeps_no_other_from_being_finished(
    trainers: Trainers, folder: Path, remote: str
) -> None:
    for rank in (0, 1):
        trainers.die(folder, remote, 3, rank=rank, world_size=2)

    def changed(recorded: RemoteAddress | None) -> RemoteAddress:
        assert recorded is not None
        changes.append(recorded)
        return recorded if len(changes) == 1 else replace(recorded, url="nowhere://bucket/run")

    changes: list[RemoteAddress] = []
    report = asyncio.run(drain(folder, timeout_s=20, grace_s=0, change=changed))
    assert [each.uploaded_shards for each in report.ranks] == [1, 0]
    assert "nowhere" in report.ranks[1].error


def test_a_folder_is_not_drained_to_another_remote(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """What is verified in one place is missing in the other, so the commit would name shards that do not exist."""
    trainers.die(folder, remote, 1)
    code, told = call("drain", folder, "--remote", f"file://{tmp_path}/other")
    assert (code, told["error"]["kind"]) == (2, "SettingsError")
    with pytest.raises(SettingsError, match="still holds"):
        Uploader(folder, f"file://{tmp_path}/other", rank=0, world_size=1)
    assert not (tmp_path / "other/ckpt").exists()
    assert call("drain", folder, "--remote", f"{remote}/")[0] == 0


def test_what_a_lost_journal_left_of_another_remote_is_not_committed_to_this_one(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """The spool's manifests name the remote too, so neither a launch nor a drain can mistake it."""
    other = f"file://{tmp_path}/other"
    trainers.die(folder, remote, 500)
    lose_journal(folder)
    with pytest.raises(SettingsError, match=f"still holds .* step 500.*{remote}.*drain --remote {remote}"):
        Uploader(folder, other, rank=0, world_size=1)
    code, told = call("drain", folder, "--remote", other)
    assert (code, told["error"]["kind"]) == (2, "SettingsError")
    code, told = call("drain", folder, "--remote", f"{remote}/")
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [500])
    with Uploader(folder, other, rank=0, world_size=1) as uploader:
        path = folder / "new.pt"
        path.write_text("new")
        uploader.enqueue(path, 7)
        uploader.seal(7)
        uploader.wait(7, 60)
    assert steps(call("ls", other)[1]["checkpoints"]) == [7]
    assert json.loads((tmp_path / "other/.ckpt-async/latest.json").read_text())["step"] == 7


@pytest.mark.parametrize("suffixes", [("", "/"), ("/", "")])
def test_a_slash_at_the_end_of_the_remote_makes_it_no_other_remote(
    trainers: Trainers, call: Drain, folder: Path, remote: str, suffixes: tuple[str, str]
) -> None:
    """What a killed trainer had sealed was taken for finished work of another remote, and its links were removed."""
    before, after = suffixes
    trainers.die(folder, remote + before, 1)
    (folder / "step-1/rank0.bin").unlink()  # only the link in the spool is left
    with Uploader(folder, remote + after, rank=0, world_size=1) as uploader:
        assert uploader.wait_for_predecessor(60)
    assert steps(call("ls", remote)[1]["checkpoints"]) == [1]


def test_a_slash_at_the_end_of_the_remote_keeps_the_recorded_endpoint() -> None:
    recorded = RemoteAddress("s3://bucket/run", "http://127.0.0.1:9000", "eu-west-1")
    change = drain_command._change_of(
        argparse.Namespace(remote="s3://bucket/run/", endpoint_url=None, region=None)
    )
    assert change is not None
    assert change(recorded) == recorded


def test_what_is_given_takes_precedence_over_what_is_recorded_and_the_rest_is_kept() -> None:
    recorded = RemoteAddress("s3://bucket/run", "http://here:9000", "eu-west-1", put_args={"Tagging": "a=b"})
    for given in (
        {"endpoint_url": "http://there:9000"},
        {"region": "us-east-1"},
        {"remote": "s3://other/run", "endpoint_url": "http://there:9000", "region": "us-east-1"},
    ):
        options = argparse.Namespace(**{"remote": None, "endpoint_url": None, "region": None, **given})
        change = drain_command._change_of(options)
        assert change is not None
        wanted = {"url" if name == "remote" else name: value for name, value in given.items()}
        assert change(recorded) == replace(recorded, **wanted)


@pytest.mark.fault("F94")
@pytest.mark.parametrize("who", ["drain", "trainer"])
def test_what_one_server_has_verified_is_looked_up_at_another(
    folder: Path, s3_url: str, s3_server: SeaweedServer, call: Drain, who: str
) -> None:
    """A replica that the same URL led to was believed to have it: a checkpoint was committed without its data there,
    and the only local copy was removed.
    """
    path, key = folder / "step-1/rank0.bin", "ckpt/step-1.g1/rank0.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"state" * 1000)
    settings: Json = {"rank": 0, "world_size": 2, "close_grace_s": 0, "on_error": "warn"}
    with Uploader(folder, s3_url, generation=1, **settings) as uploader:
        uploader.enqueue(path, step=1)
        uploader.seal(1)
    (before,) = journals.read(folder)[0].local().checkpoints.values()
    assert (before.has_receipt, before.is_verified, before.decision) == (True, True, None)

    async def at_the_replica(*, loses: bool) -> list[str]:
        store = open_store(s3_url)
        await store.open()
        try:
            if loses:
                await store.delete([key])
            return [each.key for each in (await store.list(key)).objects]
        finally:
            await store.close()

    assert asyncio.run(at_the_replica(loses=True)) == []
    endpoint = s3_server.url.replace("127.0.0.1", "localhost")
    if who == "drain":
        assert call("drain", folder, "--endpoint-url", endpoint, "--grace", 0)[0] == 4
    else:
        options = StoreOptions(endpoint_url=endpoint)
        with Uploader(folder, s3_url, generation=2, store_options=options, **settings) as uploader:
            assert uploader.wait_for_predecessor(0) is False
    assert asyncio.run(at_the_replica(loses=False)) == [key]
    address = journals.read(folder)[0].local().remote
    assert address is not None
    assert address.endpoint_url == endpoint


@pytest.mark.fault("F101")
@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_drain_says_as_a_start_does_that_the_remote_was_put_back(
    call: Drain, folder: Path, remote: str, tmp_path: Path, runner: Any
) -> None:
    """It found nothing to do, and the next launch replaced the only copies of what the store had lost."""
    store, backup = Path(remote.removeprefix("file://")), tmp_path / "backup"
    settings: Json = {"kind": "weights", "runner": runner}
    with Uploader(folder, remote, **settings) as uploader:
        for step in (1, 2, 3):
            path = folder / f"step-{step}.pt"
            path.write_bytes(b"%d" % step)
            uploader.enqueue(path, step)
            uploader.seal(step)
            uploader.wait(step, timeout_s=30)
            if step == 2:
                shutil.copytree(store, backup)
    assert call("drain", folder)[0] == 0
    shutil.rmtree(store)
    shutil.copytree(backup, store)
    before = sorted(store.rglob("*"))
    code, told = call("drain", folder)
    assert (code, told["is_drained"]) == (1, False)
    assert "steps 3. The remote was put back to an older state" in told["ranks"][0]["error"]
    with pytest.raises(JournalError, match=r"steps 3\. The remote was put back to an older state"):
        Uploader(folder, remote, **settings)
    assert sorted(store.rglob("*")) == before


def _objects(store: Path) -> dict[Path, tuple[int, bytes]]:
    """Return what is in a store: a file that was replaced has another inode."""
    return {each: (each.stat().st_ino, each.read_bytes()) for each in store.rglob("*") if each.is_file()}


def _refused(call: Drain, folder: Path) -> int:
    """Return how many ranks a drain refuses, all of them, because of another launch."""
    code, told = call("drain", folder)
    assert (code, told["is_drained"]) == (1, False)
    reason = "may have given that number or an earlier one to another launch"
    assert all(reason in each["error"] for each in told["ranks"])
    return len(told["ranks"])


def _save(folder: Path, remote: str, step: int, **settings: Any) -> int:
    """Save a step of other content than that of `Trainers`, under the same names. Return the generation."""
    with Uploader(folder, remote, **settings) as uploader:
        path = folder / f"step-{step}" / "rank0.bin"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"other" * 1000)
        uploader.enqueue(path, step)
        uploader.seal(step)
        uploader.wait(step, timeout_s=30)
        return uploader.generation


@pytest.mark.fault("F105")
@pytest.mark.parametrize("who", ["drain", "sweep", "trainer"])
@pytest.mark.parametrize("kind", [None, "weights"])
def test_what_another_start_saved_in_a_wiped_remote_is_not_overwritten(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path, who: str, kind: str | None
) -> None:
    """Both starts were the first one there. The drain said that its step was committed, after it had replaced the files
    of the other one's; a trainer took the other one's commit for its own.
    """
    store = Path(remote.removeprefix("file://"))
    trainers.die(folder, remote, 3, kind=kind)
    shutil.rmtree(store)
    assert _save(tmp_path / "other", remote, 3, kind=kind) == 1
    before = _objects(store)
    for _ in range(2):
        match who:
            case "drain":
                assert _refused(call, folder) == 1
            case "sweep":
                cli.main(["sweep", str(folder), "--once"])
            case _:
                with pytest.raises(JournalError, match="the remote was wiped"):
                    Uploader(folder, remote, kind=kind)
        assert _objects(store) == before
    (waiting,) = journals.read(folder, kind=kind or "")[0].local().checkpoints.values()
    assert waiting.decision is None


@pytest.mark.fault("F105")
def test_an_earlier_number_of_another_start_is_not_overwritten(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """What the second start had left of the first one was uploaded into the files of the new first one."""
    store = Path(remote.removeprefix("file://"))
    trainers.die(folder, remote, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_upload", _never)
        with Uploader(folder, remote, on_error="warn", upload_timeout_s=1.0, close_grace_s=0) as uploader:
            assert uploader.generation == 2
    shutil.rmtree(store)
    assert _save(tmp_path / "other", remote, 3) == 1
    before = _objects(store)
    assert _refused(call, folder) == 1
    assert _objects(store) == before


@pytest.mark.fault("F105")
def test_what_a_rank_has_left_of_an_earlier_number_is_refused_by_every_drain(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """The first drain claimed the second start's number again, for its rank that had nothing older. The next one then
    replaced the files of the new first launch.
    """
    store = Path(remote.removeprefix("file://"))
    trainers.die(folder, remote, 3)
    launch: Json = {"world_size": 2, "generation": 2}
    trainers.kill(*(trainers.start(folder, remote, 5, rank=rank, **launch) for rank in range(2)))
    shutil.rmtree(store)
    assert _save(tmp_path / "other", remote, 3) == 1
    before = _objects(store)
    for _ in range(2):
        assert _refused(call, folder) == 2
    assert _objects(store) == before


def test_what_was_drained_again_after_another_start_is_refused_too(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """The second start's number is back, for whatever reason, and the first one's is another launch's."""
    store = Path(remote.removeprefix("file://"))
    trainers.die(folder, remote, 3)
    trainers.die(folder, remote, 5, generation=2)
    record = store / ".ckpt-async/generations/000002.json"
    ours = record.read_bytes()
    shutil.rmtree(store)
    assert _save(tmp_path / "other", remote, 3) == 1
    record.write_bytes(ours)
    before = _objects(store)
    assert _refused(call, folder) == 1
    with pytest.raises(JournalError, match="the remote was wiped"):
        Uploader(folder, remote)
    assert _objects(store) == before


@pytest.mark.fault("F105")
def test_a_start_in_a_wiped_remote_is_not_fenced_by_the_drain_of_an_old_folder(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """The drain claimed its number, 2, above the other launch's, which ended with FencedError. The old folder's step
    became `latest`.
    """
    store = Path(remote.removeprefix("file://"))
    assert _save(folder, remote, 1) == 1
    trainers.die(folder, remote, 500, generation=2)
    shutil.rmtree(store)
    with Uploader(tmp_path / "other", remote) as uploader:
        assert uploader.generation == 1
        before = _objects(store)
        assert _refused(call, folder) == 1
        assert _objects(store) == before


@pytest.mark.fault("F105")
def test_a_drain_into_a_remote_that_was_put_back_takes_its_number_again(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """The newest launch that the backup knows is this rank's own."""
    store = Path(remote.removeprefix("file://"))
    for step in (1, 2):
        assert _save(folder, remote, step) == step
    shutil.copytree(store, tmp_path / "backup")
    trainers.die(folder, remote, 3, generation=3)
    shutil.rmtree(store)
    (tmp_path / "backup").rename(store)
    code, told = call("drain", folder)
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [3])
    assert call("ls", remote)[1]["latest"] == {"generation": 3, "step": 3}


@pytest.mark.fault("F105")
@pytest.mark.parametrize("who", ["drain", "trainer"])
def test_a_folder_that_has_lost_its_journal_too_overwrites_nothing_in_a_wiped_remote(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path, who: str
) -> None:
    store = Path(remote.removeprefix("file://"))
    trainers.die(folder, remote, 3)
    lose_journal(folder)
    shutil.rmtree(store)
    assert _save(tmp_path / "other", remote, 3) == 1
    before = _objects(store)
    if who == "drain":
        assert _refused(call, folder) == 1
    else:
        with pytest.raises(JournalError, match="the remote was wiped"):
            Uploader(folder, remote)
    assert _objects(store) == before


@pytest.mark.fault("F108")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_drain_does_not_take_the_commit_of_a_launch_that_has_taken_its_generation_meanwhile_for_its_own(
    trainers: Trainers,
    call: Drain,
    folder: Path,
    remote: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_late: bool,
) -> None:
    """The remote was wiped while it uploaded. It told that its step was committed, and removed the only copy."""
    monkeypatch.setattr(decide, "SUCCESSOR_POLL_S", 3600.0 if is_late else 0.0)
    store, upload = Path(remote.removeprefix("file://")), Engine._upload

    async def upload_late(engine: Engine, action: decide.Upload) -> None:
        if not engine.state.is_trainer:
            _wipe(store)
            assert await asyncio.to_thread(_save, tmp_path / "other", remote, 3) == 1
            if not is_late:
                await _never()
        await upload(engine, action)

    trainers.die(folder, remote, 3)
    monkeypatch.setattr(Engine, "_upload", upload_late)
    code, told = call("drain", folder)
    (rank,) = told["ranks"]
    assert (code, rank["committed"], rank["aborted"]) == (1, [], [])
    assert "another launch has taken the generation" in rank["error"]
    assert is_late or (store / "ckpt/step-3.g1/rank0.bin").read_bytes() == b"other" * 1000
    assert (folder / "step-3/rank0.bin").exists()
    assert call("ls", remote)[1]["latest"] == {"generation": 1, "step": 3}
    assert _refused(call, folder) == 1


def _wipe(store: Path) -> None:
    """Delete all objects, but not the store's own files: without those it would pass for one that is not mounted."""
    for path in [*store.rglob("*")]:
        if path.is_file() and path.parent != store / ".ckpt-async/tmp":
            path.unlink()


async def _never(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.fault("F105")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_drain_into_a_wiped_remote_takes_its_number_again(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path, num_ranks: int
) -> None:
    """The next launch in another folder took the same number, and overwrote what was drained."""
    store = Path(remote.removeprefix("file://"))
    launch: Json = {"world_size": num_ranks}
    trainers.kill(*(trainers.start(folder, remote, 3, rank=rank, **launch) for rank in range(num_ranks)))
    shutil.rmtree(store)
    code, told = call("drain", folder)
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [3])
    drained = _objects(store / "ckpt")
    assert len(drained) == num_ranks
    assert _save(tmp_path / "other", remote, 3) == 2
    assert drained.items() <= _objects(store / "ckpt").items()


@pytest.mark.fault("F108")
def test_what_a_wiped_remote_had_confirmed_is_uploaded_again(call: Drain, folder: Path, remote: str) -> None:
    """A drain committed it without the shards of rank 0, and deleted the only copies. The next launch of the folder was
    refused, because the generation that the drain had taken again had no members.
    """
    store, launch = Path(remote.removeprefix("file://")), {"world_size": 2, "launch_id": "1"}
    settings: Json = {"num_checkpoints_to_keep": 0, "close_grace_s": 0.0}

    def save(uploader: Uploader) -> None:
        path = folder / "step-3" / f"rank{uploader.rank}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % uploader.rank * 100_000)
        uploader.enqueue(path, 3)
        uploader.seal(3)

    with Uploader(folder, remote, rank=0, **launch, **settings) as zero:
        save(zero)
        wait_until(lambda: bool(list((store / keys.receipts_prefix(CheckpointId(1, 3))).glob("*"))), zero)
        assert list((store / "ckpt").rglob("rank0.bin"))
        one = Uploader(folder, remote, rank=1, **launch, **settings, max_bytes_per_s=1000)
        save(one)
        one.close(timeout_s=0)
    shutil.rmtree(store)
    code, told = call("drain", folder)
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [3])
    there = {path.name: path.read_bytes() for path in (store / "ckpt").rglob("*.bin")}
    assert there == {f"rank{rank}.bin": b"%d" % rank * 100_000 for rank in range(2)}
    with Uploader(folder, remote, rank=0, **launch | {"launch_id": "3"}) as uploader:
        assert uploader.generation == 2


@pytest.mark.fault("F105")
def test_what_a_copy_of_the_folder_has_drained_is_not_sent_again(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """Every object of the committed checkpoint was replaced."""
    trainers.die(folder, remote, 3)
    subprocess.run(["cp", "-a", folder, tmp_path / "copy"], check=True)
    code, told = call("drain", tmp_path / "copy", "--adopt")
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [3])
    before = _objects(Path(remote.removeprefix("file://")))
    code, told = call("drain", folder)
    assert (code, steps(told["ranks"][0]["committed"]), told["uploaded_bytes"]) == (0, [3], 0)
    assert _objects(Path(remote.removeprefix("file://"))) == before


@pytest.mark.parametrize("kind", [None, "weights"])
def test_a_lost_journal_is_rebuilt_with_the_remote_that_the_manifests_name(
    trainers: Trainers, call: Drain, folder: Path, remote: str, kind: str | None
) -> None:
    """The drain asked for it, and from then on `status` said that nothing was pending."""
    trainers.die(folder, remote, 100, kind=kind)
    lose_journal(folder)
    code, told = call("drain", folder)
    assert (code, steps(told["ranks"][0]["committed"])) == (0, [100])
    (found,) = call("ls", remote, *(("--kind", kind) if kind else ()))[1]["checkpoints"]
    assert found["step"] == 100


@pytest.mark.fault("O18")
@pytest.mark.parametrize("command", ["drain", "status"])
def test_a_remote_given_instead_of_its_folder_is_named_and_unchanged(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path, command: str
) -> None:
    """`drain` said "nothing to do", with exit code 0, and made a spool in the remote."""
    trainers.die(folder, remote, 1)
    there = tmp_path / "store/run"
    before = sorted(there.rglob("*"))
    code, told = call(command, there)
    assert (code, told["error"]["kind"]) == (3, "NoJournalError")
    assert told["error"]["hint"].startswith(f"it is a remote, {remote}: use the local folder")
    assert sorted(there.rglob("*")) == before
    assert call("drain", folder)[0] == 0


@pytest.mark.fault("O18")
@pytest.mark.parametrize("command", ["drain", "status"])
@pytest.mark.parametrize("place", [".", ".ckpt-async"])
def test_a_folder_of_another_user_is_named_with_what_to_do(folder: Path, command: str, place: str) -> None:
    (folder / ".ckpt-async").mkdir(parents=True)
    if subprocess.run(["unshare", "-U", "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    (folder / place).chmod(0)
    try:  # in a user namespace of its own, root may not read it either
        done = subprocess.run(
            ["unshare", "-U", sys.executable, "-m", "ckpt_async", command, folder],
            capture_output=True,
            text=True,
        )
    finally:
        (folder / place).chmod(0o755)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ckpt-async: '{folder}/.ckpt-async")
    assert line.endswith("cannot be used: Permission denied (run this as the user whose trainer created it)")


@pytest.mark.fault("O18")
def test_a_tilde_is_the_home_folder(
    call: Drain, tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In quotes, or from Python, it reaches us as it is; a folder called `~` was made in the working directory."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    with Uploader("~/run", remote, rank=0, world_size=1) as uploader:
        assert uploader.folder == tmp_path.resolve() / "home/run"
    for command in ("drain", "status"):
        assert call(command, "~/run")[0] == 0
    assert not list((tmp_path / "work").iterdir())


def test_a_folder_without_a_journal_is_unchanged(tmp_path: Path, call: Drain) -> None:
    code, told = call("drain", tmp_path)
    assert (code, told["error"]["kind"], list(tmp_path.iterdir())) == (3, "NoJournalError", [])
    with pytest.raises(NoJournalError):
        asyncio.run(drain(tmp_path / "missing", timeout_s=1, grace_s=0))


def test_a_shard_that_fails_is_reported_with_its_reason(
    trainers: Trainers, call: Drain, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that no retry can fix must end the drain at once, instead of after its timeout."""

    async def refuse(*_: object, **__: object) -> None:
        raise StoreError("no such storage class", reason=FailureReason.OTHER)

    trainers.die(folder, remote, 1)
    with monkeypatch.context() as patched:
        patched.setattr("ckpt_async.transfer.upload.upload", refuse)
        code, told = call("drain", folder)
    assert (code, told["ranks"][0]["left"][0]["reason"]) == (6, "no such storage class")
    assert call("drain", folder)[0] == 0


def test_a_crashed_engine_does_not_stop_the_other_ranks(
    trainers: Trainers, call: Drain, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_async.engine.loop import Engine

    upload = Engine._upload

    async def buggy(self: Engine, action: Any) -> None:
        if self.state.rank == 0:
            raise ZeroDivisionError
        await upload(self, action)

    trainers.die(folder, remote, 1, rank=0, world_size=2)
    trainers.die(folder, remote, 1, rank=1, world_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_upload", buggy)
        code, told = call("drain", folder, "--grace", 0)
    assert (code, told["ranks"][0]["error"]) == (1, "ZeroDivisionError()")
    assert (told["ranks"][1]["uploaded_bytes"], told["ranks"][1]["waiting"][0]["missing_ranks"]) == (
        3000,
        [0],
    )
    assert call("drain", folder)[0] == 0


def test_a_rank_without_space_does_not_keep_the_others_from_being_drained(
    trainers: Trainers, call: Drain, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover = Engine.recover

    async def full(self: Engine, *args: Any, **more: Any) -> None:
        if self.state.rank == 0:
            raise NoSpaceError("no space left")
        await recover(self, *args, **more)

    for rank in (0, 1):
        trainers.die(folder, remote, 1, rank=rank, world_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "recover", full)
        code, told = call("drain", folder, "--grace", 0)
    assert (code, [each["error"] for each in told["ranks"]]) == (1, ["no space left", None])
    assert steps(told["ranks"][1]["waiting"]) == [1]
    assert call("drain", folder)[0] == 0


def test_a_rank_whose_events_cannot_be_read_does_not_keep_the_others_from_being_drained(
    trainers: Trainers, call: Drain, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nothing else to finish, so its events are delivered before the others begin."""

    def full(*_: object) -> None:
        raise NoSpaceError("no space left")

    with Uploader(folder, remote, rank=0, world_size=2, generation=1):
        pass
    trainers.die(folder, remote, 1, rank=1, world_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(Outbox, "retry_now", full)
        code, told = call("drain", folder, "--grace", 0, "--webhook", "http://127.0.0.1:9/hook")
    assert (code, [each["error"] for each in told["ranks"]]) == (1, ["no space left", None])
    assert steps(told["ranks"][1]["waiting"]) == [1]


def test_a_remote_that_cannot_be_opened_does_not_keep_another_from_being_drained(
    trainers: Trainers, call: Drain, folder: Path, remote: str, tmp_path: Path
) -> None:
    """The ranks of a folder normally share a remote, but nothing forces them to."""
    gone = tmp_path / "gone"
    trainers.die(folder, remote, 1)
    trainers.die(folder, f"file://{gone}/run", 1, rank=1, world_size=2)
    shutil.rmtree(gone)
    gone.write_text("not a folder")
    code, told = call("drain", folder, "--grace", 0)
    assert code == 1
    assert steps(told["ranks"][0]["committed"]) == [1]
    assert f"{gone}/run" in told["ranks"][1]["error"]


def test_an_older_generation_is_looked_up_before_it_counts_as_idle(
    trainers: Trainers, call: Drain, folder: Path, remote: str
) -> None:
    """Its shards wait for one look at its decision; a drain that ended before that would leave them behind."""
    trainers.die(folder, remote, 1)
    code = (
        "import sys; from dataclasses import replace; from ckpt_async.local.folder import Folder\n"
        "from ckpt_async.local.journal import Journal\n"
        "journal = Journal(Folder(sys.argv[1]), 0); opened = journal.local().opened\n"
        "journal.append([replace(opened, generation=2, nonce='')]); journal.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)
    report = asyncio.run(drain(folder, timeout_s=60, grace_s=0))
    assert [each.checkpoint for each in report.ranks[0].committed] == [CheckpointId(1, 1)]


def test_the_trainers_options_take_precedence_over_the_environment(
    folder: Path, s3_url: str, s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's options are recorded, and the drain's environment may differ."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    options = StoreOptions(endpoint_url=s3_server.url, region="us-east-1", addressing_style="path")
    with Uploader(folder, s3_url, rank=0, world_size=1, store_options=options):
        pass
    address = journals.read(folder)[0].local().remote
    assert address is not None
    assert (address.endpoint_url, address.addressing_style) == (s3_server.url, "path")
