"""What fails in the thread that saves is seen, and an upload that fails ends nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, restore
from ckpt_async.integrations.olmo_core import newest_checkpoint
from tests.integrations.stage import Stage
from tests.seaweed import SeaweedServer


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage("tests.compat.olmo_core.plays", tmp_path_factory.mktemp("stage")) as stage:
        yield stage


def train(stage: Stage, node: Path, remote: str, **how: Any) -> list[Any]:
    return stage.start_ranks(
        "train", 2, environment={"LOCAL_WORLD_SIZE": "2"}, node=str(node), remote=remote, **how
    )


@pytest.mark.parametrize("save_async", [True, False])
def test_a_part_that_is_missing_gives_its_checkpoint_up_and_no_other(
    stage: Stage, tmp_path: Path, s3_url: str, save_async: bool
) -> None:
    trainers = train(stage, tmp_path, s3_url, disturbance="deletes", save_async=save_async)
    said = [each.hear() for each in trainers]
    assert [(each["step"], each["is_closed"]) for each in said] == [(30, True)] * 2
    assert all("train/rank1.pt is missing" in each["fate"] for each in said)
    assert restore.find(s3_url, step=20) is None
    for step in (0, 10, 30):
        checkpoint = restore.find(s3_url, step=step)
        assert checkpoint is not None
        owners = {name: file.ranks for name, file in checkpoint.files.items()}
        assert owners["train/rank1.pt"] == (1,)
        assert owners["config.json"] == owners[".metadata.json"] == owners["train/rank0.pt"] == (0,)
        assert owners["model_and_optim/__1_0.distcp"] == (1,)
    assert "checkpoint_not_handed_over" in trainers[1].log()
    assert "train/rank1.pt is missing" in trainers[1].log()


@pytest.mark.parametrize("save_async", [True, False])
def test_with_on_error_raise_it_ends_training(
    stage: Stage, tmp_path: Path, s3_url: str, save_async: bool
) -> None:
    trainers = train(stage, tmp_path, s3_url, disturbance="deletes", save_async=save_async, on_error="raise")
    with pytest.raises(AssertionError, match=r"SaveFailedError: .*train/rank1.pt is missing"):
        trainers[1].hear()
    for each in trainers:
        each.kill()
    newest = restore.find(s3_url)
    assert newest is not None
    assert newest.step in (10, 30)


def test_a_checkpoint_that_another_callback_kept_from_us_is_uploaded_in_the_end(
    stage: Stage, tmp_path: Path, s3_url: str
) -> None:
    trainers = train(stage, tmp_path, s3_url, disturbance="raises")
    assert [each.hear()["fate"] for each in trainers] == ["committed", "committed"]
    assert "somebody else's callback has failed" in trainers[1].log()
    checkpoint = restore.find(s3_url, step=20)
    assert checkpoint is not None
    assert checkpoint.world_size == 2


def what_it_ends_with(trainer: Any) -> Any:
    while isinstance(said := trainer.hear(), int):
        pass
    return said


def test_without_a_store_training_goes_on_its_end_says_so_and_what_is_left_arrives_later(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SeaweedServer(tmp_path / "store") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        remote = f"s3://{server.bucket}/run"
        trainers = train(stage, tmp_path, remote, tells_steps=True, close_timeout_s=2)
        for each in trainers:
            assert each.hear() == 1
        server.kill()
        for each in trainers:
            with pytest.raises(AssertionError, match=r"UploadFailedError: .*step 30, is not committed"):
                what_it_ends_with(each)
        server.start()
        restore.drain_predecessor(tmp_path / "checkpoints", 60)
        newest = restore.find(remote)
        assert newest is not None
        assert newest.step == 30


def test_local_folders_that_were_never_committed_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, remote = tmp_path / "checkpoints", f"file://{tmp_path}/store"
    for step in (10, 20):
        (folder / f"step{step}").mkdir(parents=True)
        (folder / f"step{step}" / ".metadata.json").write_text("{}")
    with Uploader(folder, remote) as uploader:
        uploader.enqueue(folder / "step10", 10, "step10")
        uploader.seal(10)
    assert newest_checkpoint(folder, remote) == str(folder / "step10")
    assert f"never_committed path={folder}/step20" in caplog.text
    assert f"never_committed path={folder}/step10" not in caplog.text
