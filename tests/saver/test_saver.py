"""`CheckpointSaver` on one rank: what is saved when, what can be loaded again, and what fails how."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_async import StoreOptions, Sweeper, Uploader, restore
from ckpt_async import torch as ckpt
from ckpt_async.core import keys
from ckpt_async.errors import (
    CheckpointAbortedError,
    CheckpointConflictError,
    CommitTimeoutError,
    FailureReason,
    FencedError,
    FormatError,
    InvalidNameError,
    NoUsableCheckpointError,
    SaveFailedError,
    SettingsError,
    StoreError,
    UploaderClosedError,
)
from ckpt_async.saver import Auto, CheckpointSaver, SavedCheckpoint, Timestamp
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.trainer.uploader import CLOSE_AFTER_ERROR_S

Open = Callable[..., CheckpointSaver]


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"


@pytest.fixture
def open_saver(tmp_path: Path, remote: str) -> Iterator[Open]:
    """A saver that is closed in the end, if the test has not done so."""
    opened: list[CheckpointSaver] = []

    def open_(**options: Any) -> CheckpointSaver:
        options = {"save_interval": "2ba", "decision_poll_s": 0.02, **options}
        saver = CheckpointSaver(
            options.pop("folder", tmp_path / "local"), options.pop("remote", remote), **options
        )
        opened.append(saver)
        return saver

    yield open_
    for each in opened:
        each.uploader.close()


class Training:
    """A state that each step changes in place, as training does."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1000)
        self.num_built = 0

    def state(self) -> dict[str, Any]:
        self.num_built += 1
        return {"model": {"weight": self.weight}, "rng": [1], "batch": int(self.weight[0])}

    def run(self, saver: CheckpointSaver, first: int, last: int) -> None:
        for batch in range(first, last + 1):
            self.weight.fill_(batch)
            saver.step(self.state, batch)


class CountingPlanner(DefaultSavePlanner):
    num_plans = 0

    def create_local_plan(self) -> SavePlan:
        self.num_plans += 1
        return super().create_local_plan()


def steps_of(remote: str) -> list[int]:
    """What is committed, as the decisions in the store say."""
    decisions = Path(remote.removeprefix("file://")).glob(".ckpt-async/decisions/*.json")
    return sorted(int(each.stem.split("-")[1]) for each in decisions if '"commit"' in each.read_text())


def test_what_is_due_is_saved_and_can_be_loaded(open_saver: Open, remote: str, tmp_path: Path) -> None:
    training = Training()
    with open_saver(save_interval="3ba") as saver:
        training.run(saver, 1, 7)
    assert training.num_built == 3  # at 3, 6 and, as the last of the run, 7
    for step in (3, 6, 7):
        checkpoint = restore.find(remote, step=step)
        assert checkpoint is not None
        assert checkpoint.name == f"ep0-ba{step}"
        state = ckpt.load_remote(checkpoint, f"ep0-ba{step}-rank0.pt")
        assert state["batch"] == step
        assert torch.equal(state["model"]["weight"], torch.full((1000,), float(step)))
    plain = torch.load(tmp_path / "local/latest-rank0.pt", weights_only=True)  # the symlink names the file
    assert plain["batch"] == 7


def test_a_run_is_resumed_from_the_newest(open_saver: Open) -> None:
    with open_saver() as saver:
        assert saver.load_latest() is None
        Training().run(saver, 1, 4)
    saver = open_saver()
    state = saver.load_latest()
    assert state["batch"] == 4
    training = Training()
    training.run(saver, 5, 6)
    saver.close()
    again = open_saver()
    state = again.load_latest(ignore_keys=["rng"])
    assert set(state) == {"model", "batch"}
    assert torch.equal(state["model"]["weight"], training.weight)


def test_what_training_changes_after_the_step_is_not_in_the_checkpoint(open_saver: Open, remote: str) -> None:
    saver = open_saver(save_interval="1ba", filename="ba{batch}.pt.xz", saves_last=False)
    big = torch.rand(1 << 19)
    before = big.clone()
    saver.step(lambda: {"big": big}, 1)
    big.zero_()  # compressing 2 MiB of noise takes far longer than this line
    saver.close()
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    assert torch.equal(ckpt.load_remote(checkpoint, "ba1.pt.xz")["big"], before)


def test_a_blocking_save_is_written_when_step_returns(open_saver: Open, tmp_path: Path) -> None:
    saver = open_saver(blocking=True)
    Training().run(saver, 1, 2)
    assert (tmp_path / "local/ep0-ba2-rank0.pt").exists()


def test_parts_are_left_out(open_saver: Open, remote: str) -> None:
    with open_saver(ignore_keys=["rng", "bat*"]) as saver:
        training = Training()
        training.run(saver, 1, 2)
    assert set(saver.load_latest()) == {"model"}
    with open_saver(weights_only=True, folder=tmp(remote, "w"), remote=f"{remote}-w") as saver:
        Training().run(saver, 1, 2)
    assert set(saver.load_latest()) == {"model"}


def tmp(remote: str, name: str) -> Path:
    return Path(remote.removeprefix("file://")).with_name(name)


def test_the_names_are_the_users(open_saver: Open, remote: str, tmp_path: Path) -> None:
    saver = open_saver(
        folder=f"{tmp_path}/{{run_name}}/ckpts",
        remote=f"{remote}/{{run_name}}",
        run_name="llm-7b",
        filename="e{epoch:02d}/b{batch:06d}-{rank}of{world_size}.safetensors",
        checkpoint_name="b{batch}",
        latest_filename="newest",
        ignore_keys=["rng", "batch"],
    )
    Training().run(saver, 1, 2)
    saver.close()
    assert (tmp_path / "llm-7b/ckpts/e00/b000002-0of1.safetensors").is_file()
    assert (
        tmp_path / "llm-7b/ckpts/newest/b000002-0of1.safetensors"
    ).is_file()  # a folder: the link names that
    checkpoint = restore.find(f"{remote}/llm-7b")
    assert checkpoint is not None
    assert (checkpoint.name, list(checkpoint.files)) == ("b2", ["b000002-0of1.safetensors"])


def test_local_files_are_kept_as_the_setting_says(open_saver: Open, tmp_path: Path, remote: str) -> None:
    with open_saver(num_checkpoints_to_keep=2, save_interval="1ba") as saver:
        Training().run(saver, 1, 6)
    names = sorted(each.name for each in (tmp_path / "local").glob("ep*"))
    assert names == ["ep0-ba5-rank0.pt", "ep0-ba6-rank0.pt"]
    assert [each.step for each in saver.saved_checkpoints] == [5, 6]
    assert steps_of(remote) == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("options", [{}, {"sharded": True}])
def test_metrics_are_stored_with_the_checkpoint(
    open_saver: Open, remote: str, options: dict[str, Any]
) -> None:
    with open_saver(**options) as saver:
        saver.step({"weight": torch.zeros(1)}, 2, metrics={"loss": 0.5})
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    assert checkpoint.metrics == {"loss": 0.5}


def test_without_a_remote_the_best_are_kept(open_saver: Open, tmp_path: Path) -> None:
    options = {"save_interval": "1ba", "num_checkpoints_to_keep": 1, "local_retention": "best=1:loss:min"}
    with open_saver(remote=None, **options) as saver:
        for batch, loss in enumerate((3.0, 1.0, 2.0, 4.0), start=1):
            saver.step({"weight": torch.zeros(1)}, batch, metrics={"loss": loss})
    names = sorted(each.name for each in (tmp_path / "local").glob("ep*"))
    assert names == ["ep0-ba2-rank0.pt", "ep0-ba4-rank0.pt"]


def test_ephemeral_checkpoints_go_when_a_newer_one_is_committed(
    open_saver: Open, tmp_path: Path, remote: str
) -> None:
    with open_saver(save_interval="4ba", ephemeral_save_interval="1ba", num_checkpoints_to_keep=2) as saver:
        training = Training()
        for batch in range(1, 11):
            training.run(saver, batch, batch)
            saver.wait(30)
    names = sorted(int(each.name[6:-9]) for each in (tmp_path / "local").glob("ep*"))
    assert names == [4, 8, 10]  # two lasting ones, and the newest
    assert [(each.step, each.is_ephemeral) for each in saver.saved_checkpoints][-1] == (10, True)


def test_hooks_are_called_on_the_trainers_thread_at_its_next_step(open_saver: Open) -> None:
    import threading

    told: list[tuple[str, int, bool]] = []

    def tell(what: str) -> Callable[[SavedCheckpoint], None]:
        return lambda saved: told.append(
            (what, saved.step, threading.current_thread() is threading.main_thread())
        )

    saver = open_saver(on_saved=tell("saved"), on_committed=tell("committed"))
    training = Training()
    training.run(saver, 1, 2)
    saver.wait(30)
    assert told in ([], [("saved", 2, True)])
    training.run(saver, 3, 3)
    assert told == [("saved", 2, True), ("committed", 2, True)]
    saver.close()
    assert told[2:] == [("saved", 3, True), ("committed", 3, True)]


def test_hooks_may_be_called_at_once(open_saver: Open) -> None:
    import threading

    committed = threading.Event()
    saver = open_saver(on_committed=lambda saved: committed.set(), hooks_at_once=True)
    Training().run(saver, 1, 2)
    assert committed.wait(30)


def test_a_hook_that_raises_ends_nothing(
    open_saver: Open, remote: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(saved: SavedCheckpoint) -> None:
        raise RuntimeError("mine")

    with open_saver(on_saved=fail, on_committed=fail) as saver:
        Training().run(saver, 1, 4)
    assert steps_of(remote) == [2, 4]
    assert "hook_failed" in caplog.text


def scraped(saver: CheckpointSaver) -> dict[tuple[str, str | None], float]:
    """What Prometheus would see: by name without the prefix, and `result`."""
    return {
        (each.name.removeprefix("ckpt_async_"), each.labels.get("result")): each.value
        for family in saver.uploader.metrics.registry.collect()
        for each in family.samples
    }


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A file where the saver needs a folder."""
    (tmp_path / "local").mkdir()
    (tmp_path / "local/sub").write_bytes(b"")
    return tmp_path / "local/sub"


def test_a_save_that_fails_is_raised_at_the_next_step_and_the_one_after_works(
    open_saver: Open, remote: str, blocked: Path
) -> None:
    failed: list[tuple[int, Exception]] = []
    saver = open_saver(
        filename="sub/ba{batch}.pt", on_failed=lambda saved, error: failed.append((saved.step, error))
    )
    training = Training()

    def train() -> None:
        training.run(saver, 1, 2)
        saver.flush(30)
        training.run(saver, 3, 3)

    with pytest.raises(SaveFailedError, match="checkpoint ep0-ba2 was not saved") as caught:
        train()
    assert isinstance(caught.value.__cause__, OSError)
    blocked.unlink()
    training.run(saver, 4, 5)
    assert [step for step, _ in failed] == [2]
    saver.close()
    samples = scraped(saver)
    assert samples["saves_total", "ok"] == 2
    assert samples["saves_total", "failed"] == 1
    assert samples["save_blocked_seconds_total", None] > 0
    assert ("save_interval_seconds", None) not in samples  # nothing chooses one
    assert steps_of(remote) == [4, 5]


class Late:
    """Cannot be written, which turns out when the test says so."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def __deepcopy__(self, _: object) -> Late:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.may_end.wait(60)
        raise RuntimeError("too late")


def test_wait_raises_what_a_save_has_failed_with(open_saver: Open) -> None:
    saver, late = open_saver(saves_last=False), Late()
    saver.step({"late": late}, 2)
    late.may_end.set()
    with pytest.raises(SaveFailedError, match="ep0-ba2 was not saved: RuntimeError: too late"):
        saver.wait(60)


def test_wait_and_flush_take_no_longer_than_they_may(
    open_saver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"rank": 0, "world_size": 2, "launch_id": "1", "close_grace_s": 0.1}
    saver, late = open_saver(**options, on_error="warn", saves_last=False), Late()
    Training().run(saver, 1, 2)
    with pytest.raises(CommitTimeoutError):
        saver.wait(0.1)  # rank 1 is not there
    saver.step({"late": late}, 4)
    left_s: list[float] = []
    monkeypatch.setattr(saver.uploader, "flush", left_s.append)
    saver.flush(0.1)
    late.may_end.set()
    assert left_s == [0.0]  # all the time was spent on writing


def test_a_save_for_which_no_thread_can_be_started_fails_and_the_one_after_works(
    open_saver: Open, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later save, `wait` and `close` waited for it."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "ckpt-async-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    saver, training = open_saver(), Training()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(SaveFailedError, match="ba2 was not saved: RuntimeError: can't start new thread"):
            training.run(saver, 1, 2)
    assert saver._saving.wait(0.0)
    training.run(saver, 3, 4)
    saver.close()
    assert steps_of(remote) == [4]


def test_where_errors_are_only_logged_training_goes_on(
    open_saver: Open, remote: str, blocked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_saver(filename="sub/ba{batch}.pt", on_error="warn", saves_last=False) as saver:
        Training().run(saver, 1, 7)
        saver.flush(30)
        blocked.unlink()
        Training().run(saver, 8, 8)
    assert [each.message.split()[1] for each in caplog.records if "save_failed" in each.message] == [
        f"checkpoint=ep0-ba{step}" for step in (2, 4, 6)
    ]
    assert steps_of(remote) == [8]


def test_what_the_state_raises_is_the_trainers(open_saver: Open, remote: str) -> None:
    saver = open_saver()

    def state() -> dict[str, Any]:
        raise KeyError("optimizer")

    with pytest.raises(KeyError, match="optimizer"):
        saver.step(state, 2)
    Training().run(saver, 3, 4)
    saver.close()
    assert steps_of(remote) == [4]


def test_what_cannot_be_copied_is_named(open_saver: Open) -> None:
    saver = open_saver()
    with pytest.raises(SaveFailedError, match="state/loader") as caught:
        saver.step({"loader": (each for each in ())}, 2)
    assert isinstance(caught.value.__cause__, FormatError)


def test_savers_of_several_kinds_share_a_run(open_saver: Open, tmp_path: Path, remote: str) -> None:
    full = open_saver(save_interval="4ba", num_checkpoints_to_keep=1)
    weights = open_saver(kind="weights", save_interval="2ba", weights_only=True)
    training = Training()
    for batch in range(1, 9):
        training.run(weights, batch, batch)
        full.step(training.state, batch)
    weights.close()
    full.close()
    assert steps_of(remote) == [4, 8]
    assert steps_of(f"{remote}/kinds/weights") == [2, 4, 6, 8]
    assert [each.name for each in (tmp_path / "local").glob("ep*")] == ["ep0-ba8-rank0.pt"]
    assert len(list((tmp_path / "local/weights").glob("ep*"))) == 4
    assert torch.load(tmp_path / "local/latest-rank0.pt", weights_only=True)["batch"] == 8
    checkpoint = restore.find(remote, kind="weights")
    assert checkpoint is not None
    assert set(ckpt.load_remote(checkpoint, "ep0-ba8-rank0.pt")) == {"model"}
    again = open_saver(kind="weights", weights_only=True)
    assert set(again.load_latest()) == {"model"}


def test_without_a_remote_files_are_kept_linked_and_pruned_here(open_saver: Open, tmp_path: Path) -> None:
    told: list[int] = []
    saver = open_saver(
        remote=None, num_checkpoints_to_keep=2, on_committed=lambda saved: told.append(saved.step)
    )
    assert saver.load_latest() is None
    with saver:
        Training().run(saver, 1, 7)
    folder = tmp_path / "local"
    assert sorted(each.name for each in folder.glob("ep*")) == ["ep0-ba6-rank0.pt", "ep0-ba7-rank0.pt"]
    assert os.readlink(folder / "latest-rank0.pt") == "ep0-ba7-rank0.pt"
    assert told == [2, 4, 6, 7]
    assert open_saver(remote=None, overwrite=True).load_latest()["batch"] == 7


def test_a_rank_that_writes_no_files_has_none(open_saver: Open) -> None:
    with open_saver(remote=None, rank=1, world_size=2) as saver:
        Training().run(saver, 1, 4)
    assert saver.saved_checkpoints == []


def test_with_deepspeed_every_rank_writes(open_saver: Open, tmp_path: Path) -> None:
    options = {"filename": "ba{batch}-rank{rank}", "deepspeed": True, "rank": 1, "world_size": 2}
    with open_saver(remote=None, **options) as saver:
        Training().run(saver, 1, 2)
    assert ckpt.load(tmp_path / "local/ba2-rank1.tar")["batch"] == 2


def test_deepspeed_names_lead_to_archives(open_saver: Open, tmp_path: Path, remote: str) -> None:
    names = {"publish": "exact/ba{batch}-rank{rank}.pt", "latest_remote_filename": "latest-rank{rank}.pt"}
    with open_saver(deepspeed=True, **names) as saver:
        Training().run(saver, 1, 2)
    for place in (
        str(tmp_path / "local/latest-rank0.pt.tar"),
        f"{remote}/exact/ba2-rank0.pt.tar",
        f"{remote}/latest-rank0.pt.tar.symlink",
    ):
        assert ckpt.load(place)["batch"] == 2


@pytest.mark.parametrize("filename", ["ba{batch}.pt.gz", "ba{batch}.tar", "ba{batch}.safetensors"])
def test_the_latest_link_loads_in_any_format(open_saver: Open, tmp_path: Path, filename: str) -> None:
    weight = torch.ones(2)
    with open_saver(filename=filename) as saver:
        saver.step({"weight": weight}, 2)
    assert torch.equal(ckpt.load(tmp_path / "local/latest-rank0.pt")["weight"], weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by torch's own reader
def test_a_sharded_checkpoint_is_published_as_a_folder(open_saver: Open, tmp_path: Path) -> None:
    weight = torch.arange(3.0)
    planner = CountingPlanner()
    names = {"publish": "exact/ba{batch}", "latest_remote_filename": "latest"}
    with open_saver(sharded=True, blocking=True, planner=planner, **names) as saver:
        saver.step({"weight": weight}, 2)
    state = {"weight": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path / "remote/exact/ba2")  # torch's own reader
    assert torch.equal(state["weight"], weight)
    assert (tmp_path / "remote/latest.symlink").read_text().endswith("remote/exact/ba2")
    assert planner.num_plans == 1


def test_a_sharded_publish_may_not_name_the_rank(open_saver: Open) -> None:
    with pytest.raises(InvalidNameError, match="publish"):
        open_saver(sharded=True, publish="exact/rank{rank}")


@pytest.mark.parametrize(
    ("way", "left"),
    [
        ("resume_from", [5, 6]),
        ("load_latest", [5, 6]),
        ("load_state_dict", [5, 6]),
        ("none", [3, 4, 5, 6]),  # as far as anybody knows, it is another run
    ],
)
def test_without_a_remote_a_run_prunes_what_it_saved_before_a_restart(
    open_saver: Open, tmp_path: Path, way: str, left: list[int]
) -> None:
    options: dict[str, Any] = {"remote": None, "num_checkpoints_to_keep": 2, "save_interval": "1ba"}
    with open_saver(**options) as first:
        Training().run(first, 1, 4)
    options |= {"resume_from": 4} if way == "resume_from" else {"overwrite": True}
    with open_saver(**options) as second:
        if way == "load_latest":
            assert second.load_latest()["batch"] == 4
        elif way == "load_state_dict":
            second.load_state_dict(first.state_dict())
        Training().run(second, 5, 6)
    assert sorted(int(each.name[6:-9]) for each in (tmp_path / "local").glob("ep*")) == left


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_without_a_remote_sharded_checkpoints_are_kept_and_pruned_here(
    open_saver: Open, tmp_path: Path
) -> None:
    with open_saver(remote=None, sharded=True, kind="shards", num_checkpoints_to_keep=1) as saver:
        Training().run(saver, 1, 4)
    assert [each.name for each in (tmp_path / "local/shards").iterdir()] == ["ep0-ba4"]
    assert (tmp_path / "local/latest-shards-rank0.pt/.metadata").is_file()


def test_a_damaged_checkpoint_is_passed_over(open_saver: Open, tmp_path: Path, remote: str) -> None:
    with open_saver() as saver:
        Training().run(saver, 1, 4)
    (shard,) = tmp_path.glob("remote/ckpt/ep0-ba4.g1/*")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert open_saver(folder=tmp_path / "fresh").load_latest()["batch"] == 2


@pytest.fixture
def sealed(tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The folders of two ranks that were killed when they had sealed a checkpoint, and nothing was in the store."""
    put = DirectoryStore.put

    async def refused(self: DirectoryStore, key: str, *more: Any, **options: Any) -> Any:
        if key.startswith(keys.DATA):
            raise StoreError("no", reason=FailureReason.TRANSIENT, operation="put", key=key)
        return await put(self, key, *more, **options)

    monkeypatch.setattr(DirectoryStore, "put", refused)
    folders = [tmp_path / "node-0", tmp_path / "node-1"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        (folder / f"{rank}.pt").write_bytes(b"x")
        options: dict[str, Any] = {"launch_id": "1", "on_error": "warn", "generation": 1}
        with Uploader(folder, remote, rank=rank, world_size=2, **options) as uploader:
            uploader.enqueue(folder / f"{rank}.pt", 7)
            uploader.seal(7)
            uploader.close(0)
    yield folders
    monkeypatch.setattr(DirectoryStore, "put", put)


@pytest.mark.fault("F121")
def test_what_is_sealed_and_can_be_committed_is_no_fresh_start(
    open_saver: Open, sealed: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Training would begin at step 0, although nothing is lost. One rank has both folders here, as with fewer ranks."""
    shutil.copytree(sealed[1] / ".ckpt-async", sealed[0] / ".ckpt-async", dirs_exist_ok=True)
    saver = open_saver(folder=sealed[0])
    with pytest.raises(NoUsableCheckpointError, match="7@g1") as raised:
        saver.load_latest()
    assert "ckpt-async drain" in str(raised.value)
    with pytest.raises(NoUsableCheckpointError, match="7@g1"):
        saver.load_latest(wait_s=0.05)
    assert saver.load_latest(may_start_over=True) is None
    assert "7@g1 can still be committed" in caplog.text


@pytest.mark.fault("F121")
def test_what_was_lost_with_its_node_is_a_fresh_start(
    open_saver: Open, sealed: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A job would otherwise fail at each start. It is told what is lost."""
    assert open_saver(folder=sealed[0]).load_latest() is None
    assert "7@g1 was sealed; the part of rank 1 is in no folder" in caplog.text


def test_a_closed_saver_says_so(open_saver: Open) -> None:
    saver = open_saver()
    saver.close()
    with pytest.raises(UploaderClosedError, match="the saver is closed"):
        Training().run(saver, 1, 1)


def test_another_runs_files_are_not_replaced(open_saver: Open, tmp_path: Path, remote: str) -> None:
    with open_saver() as saver:
        Training().run(saver, 1, 4)
    with pytest.raises(CheckpointConflictError, match=r"ep0-ba2-rank0\.pt"):
        open_saver(remote=f"{remote}-other")
    Training().run(open_saver(remote=f"{remote}-other", overwrite=True), 1, 4)


def test_a_run_may_save_again_what_an_earlier_start_of_it_saved(open_saver: Open, remote: str) -> None:
    with open_saver() as saver:
        Training().run(saver, 1, 6)
    with open_saver(resume_from=2) as saver:
        training = Training()
        training.run(saver, 3, 4)
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    assert (checkpoint.id.generation, checkpoint.id.step) == (2, 4)
    assert restore.find(remote, step=6) is not None


def test_a_save_that_is_due_at_a_batch_that_comes_again_fails_and_says_why(open_saver: Open) -> None:
    failed: list[str] = []
    saver = open_saver(on_failed=lambda checkpoint, _: failed.append(checkpoint.name))
    training = Training()
    training.run(saver, 1, 4)
    with pytest.raises(SaveFailedError, match=r"ep0-ba2 was not saved: .* batch 2 was already passed"):
        training.run(saver, 1, 2)
    training.run(saver, 5, 6)
    assert failed == ["ep0-ba2"]
    assert [each.step for each in saver.saved_checkpoints][:2] == [2, 4]


def test_a_batch_that_comes_again_leaves_the_first_alone_while_that_is_written(
    open_saver: Open, remote: str
) -> None:
    is_refused = threading.Event()

    class Slow:
        def __deepcopy__(self, _: object) -> Slow:
            return self

        def __reduce__(self) -> tuple[type[int], tuple[int]]:
            assert is_refused.wait(60)
            return int, (5,)

    saver = open_saver(save_interval="5ba")
    saver.step(lambda: {"value": Slow()}, 5)
    saver.step(dict, 4)
    with pytest.raises(SaveFailedError, match="batch 5 was already passed"):
        saver.step(dict, 5)
    is_refused.set()
    saver.close()
    assert steps_of(remote) == [5]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_interval": ["500ba", "100sp"]},
        {"save_interval": "500ba", "ephemeral_save_interval": "100tok"},
        {"max_duration": "3iter"},
    ],
)
def test_an_interval_in_what_no_timestamp_tells_is_refused_at_the_first_step(
    open_saver: Open, options: dict[str, Any]
) -> None:
    options = {"save_interval": "1ep", **options}
    with pytest.raises(SettingsError, match=r"counts \w+s, but step\(\) was given only the batch"):
        open_saver(**options).step(dict, 1)


def test_samples_that_are_not_counted_are_refused_and_epochs_may_be_none_yet(open_saver: Open) -> None:
    with pytest.raises(SettingsError, match="was given sample=0"):
        open_saver(save_interval="100sp").step(dict, Timestamp(batch=1))
    assert not open_saver(save_interval="1ep", kind="other").step(dict, Timestamp(batch=1))


def test_what_cannot_be_made_after_the_uploader_leaves_the_folder_free(open_saver: Open) -> None:
    with pytest.raises(SettingsError, match="save_signals"):
        open_saver(save_signals=[99])
    open_saver().close()


def test_a_state_that_is_no_savers_is_refused(open_saver: Open) -> None:
    saver = open_saver()
    for wrong in ({"x": 1}, None):
        with pytest.raises(SettingsError, match="expects what state_dict returned"):
            saver.load_state_dict(wrong)


def test_a_name_that_does_not_change_is_refused_at_its_second_save(open_saver: Open) -> None:
    saver = open_saver(filename="model.pt", saves_last=False)
    Training().run(saver, 1, 3)
    with pytest.raises(SaveFailedError, match=r"put \{batch\} into filename"):
        Training().run(saver, 4, 5)


def test_a_name_that_does_not_change_may_be_replaced(open_saver: Open, remote: str, tmp_path: Path) -> None:
    with open_saver(filename="model.pt", overwrite=True) as saver:
        Training().run(saver, 1, 4)
    assert steps_of(remote) == [2, 4]
    assert ckpt.load(tmp_path / "local/model.pt")["batch"] == 4


def test_an_exception_ends_the_run_without_a_save_unless_one_is_wanted(open_saver: Open, remote: str) -> None:
    def fail(saver: CheckpointSaver, first: int, last: int) -> None:
        with saver:
            Training().run(saver, first, last)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(open_saver(), 1, 3)
    assert steps_of(remote) == [2]
    with pytest.raises(ZeroDivisionError):
        fail(open_saver(save_on_exception=True, resume_from=2), 3, 3)
    assert steps_of(remote) == [2, 3]


def test_after_an_exception_nobody_waits_long_for_the_store(
    open_saver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user waits for the traceback."""
    saver = open_saver()
    given: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(saver.uploader, "close", given.append)
        with pytest.raises(ZeroDivisionError), saver:
            raise ZeroDivisionError
    assert given == [CLOSE_AFTER_ERROR_S]


def test_before_sigterm_time_is_left_for_the_upload(
    open_saver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training may never come to its next step."""
    saver = open_saver()
    waited_s: list[float] = []
    monkeypatch.setattr(saver._saving, "wait_for_next", waited_s.append)
    saver.uploader.before_sigterm_flush(60.0)
    assert waited_s == [30.0]


def test_a_save_can_be_asked_for(open_saver: Open, remote: str) -> None:
    saver = open_saver(save_interval=None, saves_last=False, save_signals=[signal.SIGUSR1])
    training = Training()
    training.run(saver, 1, 2)
    saver.save_now()
    training.run(saver, 3, 4)
    os.kill(os.getpid(), signal.SIGUSR1)
    training.run(saver, 5, 6)
    saver.close()
    assert steps_of(remote) == [3, 5]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_flush_before_sigterm_does_not_wait_for_saves_that_a_newer_start_has_ended(
    open_saver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fenced(*_: object) -> None:
        raise FencedError("a newer launch")

    saver = open_saver(save_interval="1ba", saves_last=False)
    monkeypatch.setattr(saver.uploader, "check_takes", fenced)
    for batch in (1, 2):
        with pytest.raises(FencedError):
            saver.step(dict, batch)
    flush = threading.Thread(target=saver.uploader.before_sigterm_flush, args=(60.0,), daemon=True)
    flush.start()
    flush.join(0.5)
    assert flush.is_alive()  # it waits for the next save
    with pytest.raises(FencedError):
        saver.step(dict, 3)
    flush.join(10)
    assert not flush.is_alive()


def test_a_saver_goes_on_where_its_state_was(open_saver: Open, tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    saver = open_saver(save_interval="30sp")

    def run(saver: CheckpointSaver, first: int, last: int) -> list[int]:
        def is_saved(batch: int) -> bool:
            return saver.step(lambda: {"saver": saver.state_dict()}, Timestamp(batch=batch, sample=batch * 8))

        return [batch for batch in range(first, last + 1) if is_saved(batch)]

    assert run(saver, 1, 9) == [4, 8]
    saver.flush(30)
    kept = saver.load_latest()["saver"]
    saver.close()
    again = open_saver(save_interval="30sp")
    again.load_state_dict(kept)
    assert [each.step for each in again.saved_checkpoints] == [4, 8]  # the one that it is from, too
    assert again.saved_checkpoints[0].paths == (tmp_path / "local/ep0-ba4-rank0.pt",)
    assert run(again, 9, 12) == [12]


def test_an_interval_by_cost_is_chosen_and_explained(
    open_saver: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_async")
    saver = open_saver(save_interval=Auto(first_s=0.01, min_s=0.01))
    training = Training()
    batch = 0
    while saver.save_interval is None or saver.save_interval.reason.startswith("first"):
        batch += 1
        training.run(saver, batch, batch)
        saver.wait(30)
    assert "save_interval interval_s=" in caplog.text
    assert saver.save_interval.interval_s >= 0.01
    assert scraped(saver)["save_interval_seconds", None] == saver.save_interval.interval_s


def test_saves_that_failed_say_nothing_of_what_one_costs(
    open_saver: Open, blocked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is not put off, and not made more often either."""

    def aborted(_: int) -> bool:
        raise CheckpointAbortedError("another rank has given it up")

    saver = open_saver(
        save_interval=Auto(first_s=10, min_s=1),
        filename="sub/ba{batch}.pt",
        on_error="warn",
        blocking=True,
        saves_last=False,
    )
    started_s = time.monotonic()

    def is_due(batch: int, after_s: float) -> bool:
        saver._requests._clock = lambda: started_s + after_s
        return saver.step(dict, batch)

    assert is_due(1, 11)
    blocked.unlink()
    assert is_due(2, 22)
    with monkeypatch.context() as patch:
        patch.setattr(saver.uploader, "is_committed", aborted)
        assert not is_due(3, 22)
    assert not is_due(4, 31)
    assert is_due(5, 33)


def test_checkpoints_are_looked_for_with_the_options_of_the_saver(
    open_saver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, seen = StoreOptions(), list[Any]()
    saver = open_saver(store_options=options)
    with monkeypatch.context() as patch:
        patch.setattr(restore, "find", lambda *_, store_options, **__: seen.append(store_options))
        assert saver.find() is None
    (found,) = seen
    assert found is options


def test_wrong_arguments_are_refused_before_the_folder_is_made(open_saver: Open, tmp_path: Path) -> None:
    for wrong in (
        {"save_interval": "7"},
        {"filename": "{bath}.pt"},
        {"filename": "{batch}.foo"},
        {"unknown_setting": 3},
        {"resume_from": -1},
        {"ignore_keys": "model"},
        {"on_saved": 3},
        {"fixed_steps": 3},
        {"remote": None, "num_checkpoints_to_keep": 0},
    ):
        with pytest.raises((SettingsError, ValueError, FormatError, TypeError)):
            open_saver(**wrong)
    assert not (tmp_path / "local").exists()


@pytest.mark.fault("O18")
def test_a_tilde_is_the_home_folder(
    open_saver: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    saver = open_saver(folder="~/{run_name}", run_name="run-a")
    assert saver.uploader.folder == tmp_path.resolve() / "home/run-a"
    saver.close()
    assert not list((tmp_path / "work").iterdir())


def test_a_model_as_the_state_is_refused_before_a_save_is_due(open_saver: Open) -> None:
    """It is callable, as is a function that returns the state."""
    saver = open_saver(save_interval="100ba")
    with pytest.raises(SettingsError, match=r"^state=Linear is a part of the state.*capture\(model=model"):
        saver.step(torch.nn.Linear(1, 1), 1)
    saver.step({"weights": torch.zeros(1)}, 1)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("remote_file_name", "publish"), ("save_overwrite", "overwrite"), ("bucket_uri", "remote")],
)
def test_composers_words_are_translated(open_saver: Open, theirs: str, ours: str) -> None:
    with pytest.raises(SettingsError, match=f"{theirs}.*here it is {ours}"):
        open_saver(**{theirs: "x"})


@pytest.mark.parametrize("remote", ["", " "])
def test_an_empty_remote_is_refused(open_saver: Open, remote: str) -> None:
    """An unset variable in a script is no wish to upload nothing."""
    with pytest.raises(SettingsError, match="is empty"):
        open_saver(remote=remote)


def test_a_plain_interval_says_that_it_counts_epochs(
    open_saver: Open, caplog: pytest.LogCaptureFixture
) -> None:
    open_saver(save_interval=500).close()
    assert "save_interval=500 counts epochs" in caplog.text
    caplog.clear()
    open_saver(save_interval="500ba").close()
    assert "counts" not in caplog.text


def test_the_log_says_what_was_resumed_and_committed(
    open_saver: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_async")
    for remote in ({}, {"remote": None, "folder": tmp_path / "only-here"}):
        caplog.clear()
        with open_saver(**remote) as saver:
            Training().run(saver, 1, 2)
        assert "committed step 2 " in caplog.text
        with open_saver(**remote) as saver:
            saver.load_latest()
        assert ("resumed from step 2 " if not remote else "checkpoint_loaded") in caplog.text


def test_public_objects_say_what_they_are(open_saver: Open, tmp_path: Path, remote: str) -> None:
    with open_saver(kind="weights") as saver:
        saver.step({"model": {"w": torch.ones(1)}}, 2)
        saver.wait(10)
        found = saver.find()
        texts = [repr(each) for each in (saver, saver.uploader, found, Sweeper([tmp_path], [remote]))]
    assert not any(" at 0x" in each for each in texts)
    assert all("CheckpointSaver" in texts[0] and str(tmp_path / "local") in each for each in texts[:2])
    assert f"kind weights, generation {found.generation}, open" in texts[1]  # type: ignore[union-attr]
    assert found.name in texts[2]  # type: ignore[union-attr]
    assert remote in texts[3]
    assert "closed" in repr(saver)
