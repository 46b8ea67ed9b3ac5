"""`find` returns the newest readable checkpoint, whatever pointers say, and reports why it rejected others."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, restore
from ckpt_async.core import keys, records
from ckpt_async.core.boundary import Boundary
from ckpt_async.core.model import CheckpointId, Latest
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.directory import DirectoryStore
from tests.faults.processes import Nursery
from tests.faults.proxy import Fault, FaultProxy
from tests.restore.runs import Run, content, files_of, is_whole, shard_key


def _found(run: Run, **options: Any) -> restore.Checkpoint:
    checkpoint = restore.find(run.url, **options)
    assert checkpoint is not None
    return checkpoint


def test_an_empty_remote_is_a_fresh_start(any_run: Run) -> None:
    """This covers an empty prefix, a folder that does not exist yet, and a run that has committed nothing."""
    assert restore.find(any_run.url) is None
    any_run.put(keys.generation_key(1), b"{}")
    assert restore.find(any_run.url) is None


@pytest.mark.parametrize("place", ["file", "file/run", "circle", "circle/run", "unmounted", "unmounted/run"])
def test_a_place_where_no_run_can_be_is_not_a_fresh_start(tmp_path: Path, place: str) -> None:
    """Only a missing place means "nothing there". A file instead of a folder, or a link
    that leads nowhere, is a mistake.
    """
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "unmounted").symlink_to(tmp_path / "disk" / "runs")
    with pytest.raises(StoreError) as raised:
        restore.find(f"file://{tmp_path / place}")
    assert raised.value.reason is FailureReason.OTHER
    assert place.partition("/")[0] in str(raised.value)
    assert raised.value.hint
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    assert restore.find(f"file://{tmp_path}/unmounted/run") is None


@pytest.mark.fault("F74")
def test_a_run_that_left_traces_is_not_a_fresh_start(any_run: Run) -> None:
    """The listing may have lost the decision or not show it yet, but a request for the
    object by name still finds it.
    """
    id_ = any_run.commit(100)
    any_run.delete(keys.decision_key(id_))
    with pytest.raises(StoreError, match="fresh start") as raised:
        restore.find(any_run.url)
    assert str(id_) in str(raised.value)
    assert raised.value.operation == "find"
    assert restore.find(any_run.url, step=7) is None
    any_run.delete(keys.LATEST)
    assert restore.find(any_run.url) is None


@pytest.mark.fault("F74")
@pytest.mark.parametrize("commits", [False, True])
def test_a_run_known_to_the_journal_is_not_a_fresh_start(tmp_path: Path, commits: bool) -> None:
    """The folder may be unmounted, the bucket may have been swapped, or the listing may be wrongly empty."""
    folder, remote = tmp_path / "folder", tmp_path / "remote"
    folder.mkdir()
    url = f"file://{remote}"
    with Uploader(folder, url, launch_id="1") as uploader:
        assert restore.find(url, folder=folder) is None
        if commits:
            (folder / "a").write_bytes(b"1")
            uploader.enqueue(folder / "a", 1)
            uploader.seal(1)
            uploader.wait(1, 60)
    found = restore.find(url, folder=folder)
    assert (found is not None) == commits
    remote.rename(tmp_path / "away")
    for is_there in (False, True):  # like a mount point without its file system
        if is_there:
            remote.mkdir()
        with pytest.raises(StoreError, match="was committed" if commits else "generation 1"):
            restore.find(url, folder=folder)
        assert restore.find(url) is None
        assert restore.find(f"file://{tmp_path / 'other'}", folder=folder) is None


def test_the_newest_is_by_generation_then_step(any_run: Run) -> None:
    """When a run restarts from an older step, its checkpoints are newer despite their smaller steps. `find` returns
    a plain value with every file.
    """
    any_run.commit(300)
    id_ = any_run.commit(200, generation=2)
    any_run.commit(100, generation=1, moves_latest=False)
    checkpoint = _found(any_run)
    assert (checkpoint.id, checkpoint.rejected, checkpoint.world_size) == (id_, (), 2)
    assert sorted(checkpoint.files) == sorted(
        ["rank-0.pt", "rank-1.pt", "optim/rank-0.pt", "optim/rank-1.pt"]
    )
    assert _found(any_run, step=300).id == CheckpointId(1, 300)
    assert restore.find(any_run.url, step=7) is None


def _latest(step: int, generation: int = 1) -> bytes:
    name = f"step-{step}"
    prefix = keys.data_prefix(name, generation)
    return records.encode_latest(Latest(CheckpointId(generation, step), name, prefix, 99, "nonce"))


@pytest.mark.fault("F19")
@pytest.mark.parametrize("latest", [None, b"nonsense", b"", _latest(10), _latest(5), _latest(77)])
def test_a_stale_latest_hides_no_checkpoint(run_: Run, latest: bytes | None) -> None:
    """`latest` may be missing, nonsense, stale, pruned or never have existed: it is only a hint."""
    pruned = run_.commit(5)
    for step in (10, 20):
        run_.commit(step)
    run_.prune(pruned)
    run_.delete(keys.LATEST)
    if latest is not None:
        run_.put(keys.LATEST, latest)
    checkpoint = _found(run_)
    assert (checkpoint.step, checkpoint.rejected) == (20, ())
    assert run_.damages() == {}


def _forged_decision(run: Run, id_: CheckpointId) -> None:
    """A commit that names receipts that nobody wrote."""
    document = json.loads(run.get(keys.decision_key(id_)))
    document["receipts"] = document["receipts"][::-1]
    run.put(keys.decision_key(id_), json.dumps(document).encode())


def _replaced_receipt(run: Run, id_: CheckpointId) -> None:
    document = json.loads(run.get(keys.receipt_key(id_, 1)))
    document["shards"][0]["size_bytes"] += 1
    run.put(keys.receipt_key(id_, 1), json.dumps(document).encode())


DAMAGES = {
    "a shard is gone": (lambda run, id_: run.delete(shard_key(20, "rank-1.pt")), "rank-1.pt is missing"),
    "a shard is cut short": (
        lambda run, id_: run.put(shard_key(20, "rank-0.pt"), content(20, "rank-0.pt")[:-1]),
        "has 2999 bytes, but its receipt says 3000",
    ),
    "a receipt is gone": (
        lambda run, id_: run.delete(keys.receipt_key(id_, 0)),
        "rank 0's receipt is missing",
    ),
    "a receipt is another": (
        _replaced_receipt,
        "rank 1's receipt is not the one that the decision was based on",
    ),
    "the decision is forged": (_forged_decision, "receipt is not the one that the decision was based on"),
    "the decision is another's": (
        lambda run, id_: run.put(keys.decision_key(id_), run.get(keys.decision_key(CheckpointId(1, 10)))),
        "found under the key of",
    ),
    "the decision is nonsense": (
        lambda run, id_: run.put(keys.decision_key(id_), b"{]"),
        "not JSON that this package writes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_next_older(run_: Run, damage: str, monkeypatch: Any) -> None:
    """One clear sentence says why, and a mark keeps later readers from trying it again unless they ask for the step."""
    run_.commit(10)
    id_ = run_.commit(20)
    do, reason = DAMAGES[damage]
    do(run_, id_)
    checkpoint = _found(run_)
    assert checkpoint.step == 10
    (rejected,) = checkpoint.rejected
    assert rejected.id == id_
    assert reason in rejected.reason
    assert str(rejected).count("\n") == 0
    assert reason in run_.damages()[id_]

    looked_at: list[str] = []
    get = DirectoryStore.get

    async def noted(self: DirectoryStore, key: str, **options: Any) -> Any:
        looked_at.append(key)
        return await get(self, key, **options)

    monkeypatch.setattr(DirectoryStore, "get", noted)
    assert [each.reason for each in _found(run_).rejected] == [run_.damages()[id_]]
    assert keys.decision_key(id_) not in looked_at
    with pytest.raises(restore.NoUsableCheckpointError, match="20"):
        restore.find(run_.url, step=20)
    assert keys.decision_key(id_) in looked_at


def test_all_damaged_is_not_a_fresh_start(any_run: Run) -> None:
    """Each one is named with its reason."""
    for step in (10, 20):
        any_run.commit(step)
        any_run.delete(shard_key(step, "rank-0.pt"))
    with pytest.raises(restore.NoUsableCheckpointError) as raised:
        restore.find(any_run.url)
    for step in (10, 20):
        assert f"step {step} (generation 1)" in str(raised.value)
    assert str(raised.value).count("is missing") == 2


def test_find_by_step_considers_only_the_newest_generation(run_: Run) -> None:
    """A checkpoint that an older launch saved at that step is a different one and must not silently be used instead."""
    run_.commit(20)
    run_.commit(20, generation=2)
    run_.delete(shard_key(20, "rank-0.pt", 2))
    with pytest.raises(restore.NoUsableCheckpointError):
        restore.find(run_.url, step=20)
    assert _found(run_).id == CheckpointId(1, 20)


def test_a_mark_is_believed_unless_the_step_is_given(run_: Run) -> None:
    """The step may have been repaired since it was marked, so asking for it by step checks it again."""
    run_.commit(10)
    run_.commit(20)
    data = run_.get(shard_key(20, "rank-0.pt"))
    run_.delete(shard_key(20, "rank-0.pt"))
    assert _found(run_).step == 10
    run_.put(shard_key(20, "rank-0.pt"), data)
    assert _found(run_).step == 10
    assert _found(run_, step=20).rejected == ()


@pytest.mark.fault("F17")
def test_pruning_during_find_is_not_damage(run_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention may prune a checkpoint after its decision is read and before its shards are listed."""
    run_.commit(10)
    id_ = run_.commit(20)
    listing = DirectoryStore.list

    async def prune_first(self: DirectoryStore, prefix: str, **options: Any) -> Any:
        if prefix == keys.data_prefix("step-20", 1):
            monkeypatch.setattr(DirectoryStore, "list", listing)
            await run_.prune_in_loop(id_)
        return await listing(self, prefix, **options)

    monkeypatch.setattr(DirectoryStore, "list", prune_first)
    checkpoint = _found(run_)
    assert (checkpoint.step, checkpoint.rejected) == (10, ())
    assert run_.damages() == {}


@pytest.mark.fault("F120")
@pytest.mark.parametrize("latest_lags", [False, True])
def test_find_is_never_older_than_what_was_there(
    run_: Run, monkeypatch: pytest.MonkeyPatch, latest_lags: bool
) -> None:
    """What was listed as the newest is pruned before it is read, because a newer one was committed."""
    run_.commit(10)
    pruned = run_.commit(20, moves_latest=not latest_lags)
    get = DirectoryStore.get

    async def commit_first(self: DirectoryStore, key: str, **options: Any) -> Any:
        if key == keys.decision_key(pruned):
            monkeypatch.setattr(DirectoryStore, "get", get)
            await run_.commit_in_loop(30)
            await run_.prune_in_loop(pruned)
        return await get(self, key, **options)

    monkeypatch.setattr(DirectoryStore, "get", commit_first)
    checkpoint = _found(run_)
    assert (checkpoint.step, checkpoint.rejected) == (30, ())


@pytest.mark.fault("F120")
def test_a_first_commit_during_find_is_found(run_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came after the listing and before `latest` was read, which is no contradiction."""
    run_.put(keys.generation_key(1), b"{}")
    get = DirectoryStore.get

    async def commit_first(self: DirectoryStore, key: str, **options: Any) -> Any:
        if key == keys.LATEST:
            monkeypatch.setattr(DirectoryStore, "get", get)
            await run_.commit_in_loop(10)
        return await get(self, key, **options)

    monkeypatch.setattr(DirectoryStore, "get", commit_first)
    assert _found(run_).step == 10


@pytest.mark.fault("F121")
def test_a_place_where_nothing_was_ever_saved_is_told(
    run_: Run, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The URL may be mistyped, also where an uploader has just created the place."""
    run_.put("other", b"x")
    assert restore.find(run_.url) is None
    assert "nothing was ever saved here" in caplog.text
    caplog.clear()
    folder = tmp_path / "folder"
    with Uploader(folder, run_.url, launch_id="1"):
        assert restore.find(run_.url, folder=folder) is None
        assert "nothing was ever saved here" in caplog.text
    caplog.clear()
    with Uploader(folder, run_.url, launch_id="2"):
        assert restore.find(run_.url, folder=folder) is None
    assert "1 other generation began here" in caplog.text
    assert {each.levelname for each in caplog.records if "no_checkpoint" in each.message} == {"WARNING"}


def test_checkpoints_the_caller_rejected_are_skipped(run_: Run) -> None:
    run_.commit(10)
    id_ = run_.commit(20)
    checkpoint = _found(run_, passing_over=[id_])
    assert (checkpoint.step, [each.id for each in checkpoint.rejected]) == (10, [id_])
    assert run_.damages() == {}


def test_a_newer_format_version_is_not_damage(run_: Run) -> None:
    """A newer version wrote it. It is skipped and reported, but not marked, because other
    readers may be able to read it.
    """
    run_.commit(10)
    id_ = run_.commit(20)
    document = json.loads(run_.get(keys.decision_key(id_)))
    run_.put(keys.decision_key(id_), json.dumps(document | {"version": 2}).encode())
    checkpoint = _found(run_)
    assert checkpoint.step == 10
    assert "version" in checkpoint.rejected[0].reason
    assert run_.damages() == {}


@pytest.mark.fault("F41")
@pytest.mark.parametrize("boundary", [b"nonsense", bytes(records.MAX_RECORD_SIZE_BYTES + 1)])
def test_an_unreadable_boundary_hides_and_marks_nothing(run_: Run, boundary: bytes) -> None:
    """What the boundary might void is checked like everything else: nothing incomplete is shown, and the unreadable
    boundary causes no damage marks.
    """
    run_.commit(10)
    run_.put(keys.BOUNDARY, boundary)
    checkpoint = _found(run_)
    assert checkpoint.step == 10
    assert checkpoint.rejected == ()
    assert run_.damages() == {}


def test_checkpoints_below_the_boundary_are_not_found(run_: Run) -> None:
    """A straggler committed it after the checkpoint had already been given up."""
    run_.commit(10)
    run_.put(keys.BOUNDARY, records.encode_boundary(Boundary(CheckpointId(1, 15), number=1)))
    assert restore.find(run_.url) is None
    run_.commit(20)
    assert _found(run_).step == 20


def test_a_partial_checkpoint_is_never_found(any_run: Run) -> None:
    """This must hold even if there are completion markers of other tools among its shards."""
    any_run.put(keys.generation_key(1), b"{}")
    for name in (".metadata", "__0_0.distcp", "commit_success.txt", ".metadata.json"):
        any_run.put(shard_key(5, name), b"x")
        any_run.put(shard_key(5, f"model/{name}"), b"x")
    any_run.put("latest-rank0.pt.symlink", keys.data_prefix("step-5", 1).encode())
    assert restore.find(any_run.url) is None


def test_find_works_without_list_permission(proxy: FaultProxy, s3_url: str) -> None:
    """Without LIST, `latest` is the only guide. If that is missing as well, the refusal is
    reported, not "there is none".
    """
    run = Run(s3_url)
    run.commit(10)
    run.commit(20)
    proxy.add(Fault("denied", method="GET", query="list-type=2"))
    assert _found(run).step == 20
    proxy.heal()
    run.delete(keys.LATEST)
    proxy.add(Fault("denied", method="GET", query="list-type=2"))
    with pytest.raises(StoreError) as raised:
        restore.find(s3_url)
    assert raised.value.reason is FailureReason.AUTH


@pytest.mark.parametrize("marks_may_be_written", [True, False])
def test_find_works_on_a_read_only_remote(run_: Run, marks_may_be_written: bool, monkeypatch: Any) -> None:
    """A checkpoint that cannot be marked as damaged is skipped all the same."""
    run_.commit(10)
    run_.commit(20)
    run_.delete(shard_key(20, "rank-0.pt"))

    async def refused(*_: Any, **__: Any) -> Any:
        raise StoreError("read-only", reason=FailureReason.DISK, operation="put")

    if not marks_may_be_written:
        monkeypatch.setattr(DirectoryStore, "put", refused)
    assert _found(run_).step == 10
    monkeypatch.undo()
    assert len(run_.damages()) == marks_may_be_written


def test_an_unavailable_store_is_an_error(monkeypatch: pytest.MonkeyPatch, s3_url: str) -> None:
    """Reporting "there is none" would make training start over."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("CKPT_ASYNC_UPLOAD_TIMEOUT_S", "1")
    with pytest.raises(StoreError):
        restore.find(s3_url)


def test_a_killed_trainers_uploads_are_finished_first(
    proxy: FaultProxy, s3_url: str, nursery: Nursery, tmp_path: Path
) -> None:
    """The newest checkpoint is the one that was still being uploaded."""
    trainer = nursery.start(
        "saves", folder=str(tmp_path / "run"), remote=s3_url, rank=0, world_size=1, steps=[1], num_shards=2
    )
    trainer.expect("saved")
    trainer.tell("wait 1")
    trainer.expect("done wait 1")
    proxy.add(Fault("hold", method="PUT", key="/ckpt/step-"))
    trainer.tell("save 2")
    trainer.expect("done save 2")
    trainer.kill()
    proxy.heal()
    assert _found(Run(s3_url)).step == 1
    checkpoint = _found(Run(s3_url), folder=tmp_path / "run", drain_timeout_s=60)
    assert checkpoint.step == 2
    report = restore.fetch(checkpoint, tmp_path / "there", folder=tmp_path / "run")
    assert set(report.bytes_from) == {"local"}
    assert restore.find(s3_url, folder=tmp_path / "never", drain_timeout_s=1) is not None


def test_a_found_checkpoint_is_a_plain_value(run_: Run, tmp_path: Path) -> None:
    """It can be pickled, sent to other ranks, and fetched there."""
    import pickle

    run_.commit(10)
    checkpoint = pickle.loads(pickle.dumps(_found(run_)))
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there"), files_of(10))
    assert os.listdir(tmp_path / "there") != []
