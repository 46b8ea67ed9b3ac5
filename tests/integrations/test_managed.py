"""What the framework adapters share, tested without a framework: which files belong to
whom, and one uploader per trainer.
"""

import functools
import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import SettingsError, Uploader, restore
from ckpt_async.core.keys import is_kind
from ckpt_async.errors import InvalidNameError, InvalidShardError, UploaderClosedError, UploadFailedError
from ckpt_async.integrations import managed as managed_module
from ckpt_async.integrations.files import files_of_rank
from ckpt_async.integrations.managed import ManagedUploader, cut_kind, fetch_newest

CLOSE_TIMEOUT_S = 60.0


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"


def written(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def test_every_file_belongs_to_one_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank_1s = [
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "global_step5/zero_pp_rank_1_mp_rank_00_model_states.pt",
        "optimizer_0/__1_0.distcp",
        "optimizer_0_rank1.bin",
        "optimizer_rank1.bin",
        "pytorch_model_fsdp_0/__1_0.distcp",
        "pytorch_model_fsdp_0/__1_1.distcp",
        "pytorch_model_fsdp_0_rank1.bin",
        "pytorch_model_fsdp_rank1.bin",
        "random_states_1.pkl",
        "model/rank_1.safetensors",
        "rank1-of-2-optimizer.pt",
        "rng_state_1.pth",
        "train/rank1.pt",
    ]
    rank_0s = [
        "optimizer_0/.metadata",
        "optimizer_0/__0_0.distcp",
        "adapter_rank_16.bin",  # a LoRA adapter of rank 16, not a file of process 16
        "meta.pt",
        "model-00001-of-00002.safetensors",
        "optimizer_1.bin",
        "random_states_0.pkl",
        "rng_state.pth",
    ]
    folder = written(tmp_path, *rank_0s, *rank_1s, "rng_state_2.pth")
    assert files_of_rank(folder, 0, 2) == sorted(rank_0s)
    assert files_of_rank(folder, 1, 2) == sorted(rank_1s)
    assert "left_over_file rng_state_2.pth" in caplog.text
    assert files_of_rank(tmp_path / "none", 1, 2) == []


def test_a_failed_enqueue_is_logged_and_the_next_one_works(
    tmp_path: Path, remote: str, caplog: pytest.LogCaptureFixture
) -> None:
    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {})
    managed.open(tmp_path / "folder", 0, 1)
    other, own = written(tmp_path / "other", "a"), written(tmp_path / "folder" / "step-2", "a", "b/a")
    managed.hand_over(other, 1, "step-1")
    managed.hand_over(own, 3, "step-3", files=[])  # the files were rotated away, or are on another disk
    managed.hand_over(own, 2, "step-2", files=["b/a"], metrics={"loss": 0.5})
    managed.close()
    assert "checkpoint_not_handed_over step=1" in caplog.text
    assert "checkpoint_not_handed_over step=3" in caplog.text
    assert managed.uploader is None
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    assert (checkpoint.step, list(checkpoint.files), checkpoint.metrics) == (2, ["b/a"], {"loss": 0.5})


def test_a_name_that_stores_refuse_raises_at_the_first_save_and_ends_no_training_later(
    tmp_path: Path, remote: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A metric in the name, for example, that is not a number after a week: the next checkpoint has another name."""
    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {})
    managed.open(tmp_path / "folder", 0, 1)
    own = written(tmp_path / "folder" / "own", "a")
    with pytest.raises(InvalidNameError, match="own cannot be uploaded"):
        managed.hand_over(own, 1, "loss=1:0")
    managed.hand_over(own, 1, "loss=1.0")
    assert managed.hand_over(own, 2, "loss=2:0")
    assert "checkpoint_not_handed_over step=2" in caplog.text
    managed.hand_over(own, 3, "loss=3.0")
    managed.close()
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    assert checkpoint.step == 3


def test_the_end_says_that_the_newest_checkpoint_was_not_handed_over(tmp_path: Path, remote: str) -> None:
    with_file = written(tmp_path / "folder" / "step-1", "a")
    ranks = [ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {"generation": 1}) for _ in range(2)]
    for rank, managed in enumerate(ranks):
        managed.open(tmp_path / "folder", rank, 2)
        managed.hand_over(with_file, 1, "step-1", files=["a"] if rank == 0 else [])
    ranks[0].hand_over(written(tmp_path / "folder" / "step-2", "a"), 2, "step-2")
    ranks[1].hand_over(written(tmp_path / "other", "a"), 2, "step-2")
    with pytest.raises(UploadFailedError, match=r"step 2, is not committed .*: .*other"):
        ranks[1].close()
    with pytest.raises(UploadFailedError, match=r"step 2, is not committed .*: .*given up: .*other"):
        ranks[0].close()  # at once, because it need not wait for the other rank
    assert committed_steps(remote) == [1]


def committed_steps(remote: str) -> list[int]:
    return [step for step in (1, 2) if restore.find(remote, step=step) is not None]


def test_what_is_committed_needs_no_waiting_once_the_uploader_is_closed(tmp_path: Path, remote: str) -> None:
    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {})
    uploader = managed.open(tmp_path / "folder", 0, 1)
    managed.hand_over(written(tmp_path / "folder" / "step-1", "a"), 1, "step-1")
    uploader.close()  # Python's exit closes it as well, before the framework's own clean-up
    managed.wait_for_newest()
    managed.close()
    assert restore.find(remote, step=1)


def test_files_of_a_folder_are_within_it(tmp_path: Path, remote: str) -> None:
    written(tmp_path, "folder/step-1/a", "folder/b")
    with Uploader(tmp_path / "folder", remote) as uploader:
        for wrong in ("../b", "/b", "a/../../b"):
            with pytest.raises(InvalidNameError):
                uploader.enqueue(tmp_path / "folder" / "step-1", 1, files=["a", wrong])
        with pytest.raises(InvalidShardError, match="does not exist"):
            uploader.enqueue(tmp_path / "folder" / "step-1", 1, files=["a", "b"])
        uploader.enqueue(tmp_path / "folder" / "step-1", 1, files=["a"])
        uploader.seal(1)
        uploader.wait(1, timeout_s=CLOSE_TIMEOUT_S)


def test_on_error_raise_raises_in_the_adapter(tmp_path: Path, remote: str) -> None:
    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {"on_error": "raise"})
    managed.open(tmp_path / "folder", 0, 1)
    with pytest.raises(InvalidShardError):
        managed.hand_over(written(tmp_path / "other", "a"), 1, "step-1")
    managed.close()


def test_each_opening_is_a_separate_start(tmp_path: Path, remote: str) -> None:
    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {})
    generations = []
    for _ in range(2):
        generations.append(managed.open(tmp_path / "folder", 0, 1).generation)
        assert managed.open(tmp_path / "folder", 0, 1) is managed.uploader
        managed.close()
    assert generations == [1, 2]


def test_a_kind_that_cannot_be_opened_now_neither_stops_nor_ends_training(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was opened in the middle of training, which waited for as long as the store refused it."""
    is_back, troubles = threading.Event(), [SettingsError("not now")]

    @functools.wraps(Uploader)
    def opened(*args: Any, **settings: Any) -> Uploader:
        if settings.get("kind"):
            if troubles:
                raise troubles.pop()
            assert is_back.wait(30)
        return Uploader(*args, **settings)

    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {})
    managed.open(tmp_path, 0, 1)
    monkeypatch.setattr(managed_module, "OPEN_KIND_S", 5.0)
    monkeypatch.setattr(managed_module, "Uploader", opened)
    assert managed.of_kind("best") is None
    assert "not now" in caplog.text
    monkeypatch.setattr(managed_module, "OPEN_KIND_S", 0.01)
    for _ in range(2):
        assert managed.of_kind("best") is None
        assert "until it is open, its files are not uploaded" in caplog.text
    is_back.set()
    opening = managed._kinds["best"]._opening
    assert opening is not None
    opening.result(30)
    best = managed.of_kind("best")
    assert best is not None
    best.hand_over(written(tmp_path, "b.pt") / "b.pt", 1, "b")
    managed.close()
    assert [each.step for each in (restore.find(remote, kind="best"),) if each] == [1]


def test_a_rank_opens_a_kind_without_the_others(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a collective: a rank that had failed before, and did not come to it, left the others waiting."""
    launches = ["this", "this"]
    monkeypatch.setattr(managed_module, "launch_id", launches.pop)
    with_file = written(tmp_path, "b/a")
    ranks = [ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {}) for _ in range(2)]
    threads = [
        threading.Thread(target=managed.open, args=(tmp_path, n, 2)) for n, managed in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, managed in enumerate(ranks):
        best = managed.of_kind("best")
        assert best is not None
        best.hand_over(with_file / "b", 1, "b", files=["a"] if rank == 0 else [])
    for managed in ranks:
        managed.close()
    assert not launches
    assert [each.world_size for each in (restore.find(remote, kind="best"),) if each] == [2]


def test_a_kind_that_opens_only_after_the_end_is_closed(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, late = threading.Event(), list[Uploader]()

    @functools.wraps(Uploader)
    def opened(*args: Any, **settings: Any) -> Uploader:
        if settings.get("kind"):
            assert is_over.wait(30)
        late.append(Uploader(*args, **settings))
        return late[-1]

    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {})
    managed.open(tmp_path, 0, 1)
    monkeypatch.setattr(managed_module, "OPEN_KIND_S", 0.01)
    monkeypatch.setattr(managed_module, "Uploader", opened)
    assert managed.of_kind("best") is None
    [thread] = [each for each in threading.enumerate() if each.name == "ckpt-async-open"]
    managed.close()
    is_over.set()
    thread.join(30)
    with pytest.raises(UploaderClosedError):
        late[0].seal(1)


def test_a_users_own_uploader_is_flushed_and_stays_open(tmp_path: Path, remote: str) -> None:
    with Uploader(tmp_path / "folder", remote) as uploader:
        managed = ManagedUploader(None, uploader, CLOSE_TIMEOUT_S, {})
        assert managed.open(None, 0, 1) is uploader
        managed.hand_over(written(tmp_path / "folder" / "step-1", "a"), 1, "step-1")
        managed.close()
        assert restore.find(remote) is not None
        managed.hand_over(written(tmp_path / "folder" / "step-2", "a"), 2, "step-2")
        with pytest.raises(SettingsError, match=r"rank 0 of 1.* rank 1 of 2"):
            managed.open(None, 1, 2)


def test_a_misspelt_setting_is_refused_before_anything_is_opened(remote: str) -> None:
    with pytest.raises(
        SettingsError, match=r"'num_checkpoints_to_kep'.*did you mean 'num_checkpoints_to_keep'"
    ):
        ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {"num_checkpoints_to_kep": 3})


def test_conflicting_arguments_are_rejected(tmp_path: Path, remote: str) -> None:
    with pytest.raises(SettingsError):
        ManagedUploader(None, None, CLOSE_TIMEOUT_S, {})
    with Uploader(tmp_path / "folder", remote) as uploader:
        with pytest.raises(SettingsError):
            ManagedUploader(remote, uploader, CLOSE_TIMEOUT_S, {})
        with pytest.raises(SettingsError, match="num_checkpoints_to_keep"):
            ManagedUploader(None, uploader, CLOSE_TIMEOUT_S, {"num_checkpoints_to_keep": 3})


@pytest.mark.parametrize("is_failing", [False, True])
def test_closing_is_bounded_and_brief_after_a_training_failure(
    is_failing: bool,
    tmp_path: Path,
    remote: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(managed_module, "CLOSE_AFTER_ERROR_S", 0.0)
    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S if is_failing else 0.0, {"max_bytes_per_s": 1})
    managed.open(tmp_path / "folder", 0, 1)
    # Takes nine seconds.
    managed.hand_over(written(tmp_path / "folder" / "step-1", "nine-bytes"[:9]), 1, "step-1")
    if is_failing:
        try:
            raise RuntimeError
        except RuntimeError:
            managed.close()
    else:
        with pytest.raises(UploadFailedError, match="the newest checkpoint, step 1, is not committed"):
            managed.close()
    assert managed.uploader is None
    managed.close()
    assert "closed_with_unfinished steps=[1]" in caplog.text


def test_closing_is_brief_once_a_save_has_raised(
    tmp_path: Path, remote: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework closes only after its `except`. Whoever waits for the error would wait for all uploads."""
    monkeypatch.setattr(managed_module, "CLOSE_AFTER_ERROR_S", 0.0)
    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {"max_bytes_per_s": 1, "on_error": "raise"})
    managed.open(tmp_path / "folder", 0, 1)
    # Takes nine seconds.
    managed.hand_over(written(tmp_path / "folder" / "step-1", "nine-bytes"[:9]), 1, "step-1")
    with pytest.raises(InvalidShardError):
        managed.hand_over(written(tmp_path / "other", "a"), 2, "step-2")
    managed.close()
    assert managed.uploader is None
    assert "closed_with_unfinished steps=[1" in caplog.text


def test_a_damaged_newest_checkpoint_falls_back_to_the_next_older(
    tmp_path: Path, remote: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Uploader(tmp_path / "folder", remote) as uploader:
        for step in (1, 2):
            uploader.enqueue(written(tmp_path / "folder" / f"step-{step}", "a"), step)
            uploader.seal(step)
    (damaged,) = (tmp_path / "remote" / "ckpt").glob("step-2.*/a")
    damaged.write_text("b")
    found = fetch_newest(tmp_path / "fresh", remote, 0, None)
    assert found is not None
    checkpoint, path = found
    assert (checkpoint.step, path) == (1, tmp_path / "fresh" / "step-1")
    assert (path / "a").read_text() == "a"
    assert "checkpoint_passed_over" in caplog.text


def test_a_local_file_that_is_not_the_checkpoints_is_replaced(tmp_path: Path, remote: str) -> None:
    """Torn by a power loss, for example."""
    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {})
    managed.open(tmp_path / "folder", 0, 1)
    own = written(tmp_path / "folder" / "step-1", "a")
    managed.hand_over(own, 1, "step-1")
    managed.close()
    (own / "a").unlink()
    (own / "a").write_text("?")
    found = fetch_newest(tmp_path / "folder", remote, 0.0, None)
    assert found is not None
    assert (found[1] / "a").read_text() == "a"


def test_a_further_kind_is_named_after_the_runs_own_and_has_its_own_retention(
    tmp_path: Path, remote: str
) -> None:
    settings = {"kind": "ema", "remote_retention": "last=1", "latest_filename": "ema"}
    managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, settings)
    managed.open(tmp_path / "folder", 0, 1)
    further = managed.of_kind("weights")
    assert further is not None
    assert further.uploader is not None
    assert further.uploader.kind == "ema-weights"
    assert further.uploader.settings.remote_retention == ""
    managed.close()


def test_long_names_of_kinds_are_valid_and_not_cut_to_the_same() -> None:
    long = [f"a_metric_with_quite_a_long_name_of_{each}" for each in ("accuracy", "recall")]
    names = [cut_kind(each) for each in ("val_loss", "k" * 32, *long)]
    assert names[:2] == ["val_loss", "k" * 32]
    assert len(set(names)) == 4
    assert all(is_kind(each) for each in names)


@pytest.mark.parametrize(
    ("module", "frameworks"),
    [("lightning", ["lightning.pytorch", "pytorch_lightning"]), ("transformers", ["transformers"])],
)
def test_a_missing_framework_is_named(
    module: str, frameworks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for framework in frameworks:
        monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"ckpt_async.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install '\.\[{module}\]'"):
        importlib.import_module(f"ckpt_async.integrations.{module}")
