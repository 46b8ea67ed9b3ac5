"""Lightning's own trainers with tiny models, real stores and real kills."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import restore
from tests.integrations.stage import DRAIN_TIMEOUT_S, NUM_STEPS, Stage, committed


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage("tests.integrations.lightning_plays", tmp_path_factory.mktemp("stage")) as stage:
        yield stage


def test_a_killed_trainer_loses_no_saved_checkpoint(stage: Stage, tmp_path: Path, remote: str) -> None:
    run: dict[str, Any] = {"remote": remote, "num_steps": NUM_STEPS}
    whole = stage.start("train", folder=f"{tmp_path}/whole", **run | {"remote": f"{remote}-whole"})
    killed = stage.start("train", folder=f"{tmp_path}/a", waits_at=4, max_bytes_per_s=1, **run)
    # Lightning has rotated the other checkpoints away, and nothing has been uploaded yet.
    assert [each for each in killed.hear() if each.endswith(".ckpt")] == ["epoch=0-step=4.ckpt"]
    assert restore.find(remote) is None
    killed.kill()
    restore.drain_predecessor(tmp_path / "a", DRAIN_TIMEOUT_S)
    for step in (1, 2, 3, 4):
        restore.fetch(committed(remote, step), tmp_path / "read")

    resumed = stage.start("train", folder=f"{tmp_path}/b", **run).hear()
    assert (resumed["started_at"], resumed["step"]) == (4, NUM_STEPS)
    assert resumed["weights"] == whole.hear()["weights"]
    assert resumed["is_closed"]
    assert committed(remote, NUM_STEPS).generation == 2


def test_a_sharded_save_commits_with_all_ranks(stage: Stage, tmp_path: Path, s3_url: str) -> None:
    run: dict[str, Any] = {"remote": s3_url, "num_steps": NUM_STEPS, "is_sharded": True}
    whole = stage.start_ranks("train", 2, folder=f"{tmp_path}/whole", **run | {"remote": f"{s3_url}-whole"})
    killed = stage.start_ranks("train", 2, folder=f"{tmp_path}/a", waits_at=4, **run)
    for trainer in killed:
        assert "epoch=0-step=4.ckpt" in trainer.hear()
    for trainer in killed:
        trainer.kill()
    restore.drain_predecessor(tmp_path / "a", DRAIN_TIMEOUT_S)
    checkpoint = committed(s3_url, 4)
    assert {name: file.ranks for name, file in checkpoint.files.items()} == {
        ".metadata": (0,),
        "__0_0.distcp": (0,),
        "__1_0.distcp": (1,),
        "meta.pt": (0,),
    }

    again = stage.start_ranks("train", 2, folder=f"{tmp_path}/b", **run)
    resumed = [each.hear() for each in again]
    assert not any("ERROR" in each.log() for each in again)
    assert [(each["started_at"], each["step"], each["is_closed"]) for each in resumed] == [
        (4, NUM_STEPS, True),
        (4, NUM_STEPS, True),
    ]
    assert [each["weights"] for each in resumed] == [each.hear()["weights"] for each in whole]
    assert committed(s3_url, NUM_STEPS).world_size == 2


def test_only_rank_0_uploads_single_file_checkpoints(stage: Stage, tmp_path: Path, remote: str) -> None:
    run: dict[str, Any] = {"remote": remote, "package": "pytorch_lightning"}
    ranks = stage.start_ranks("train", 2, folder=f"{tmp_path}/a", num_steps=4, **run)
    whole = [each.hear()["weights"] for each in ranks]
    for step in (1, 2, 3, 4):
        checkpoint = committed(remote, step)
        assert (list(checkpoint.files), checkpoint.world_size) == ([f"epoch=0-step={step}.ckpt"], 1)

    # A missing file is fetched under the name it would have.
    missing = f"{tmp_path}/b/epoch=0-step=3.ckpt"
    ranks = stage.start_ranks("train", 2, folder=f"{tmp_path}/b", num_steps=4, ckpt_path=missing, **run)
    resumed = [each.hear() for each in ranks]
    assert [each["started_at"] for each in resumed] == [3, 3]
    assert [each["weights"] for each in resumed] == whole


@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_with_only_weights_is_never_the_checkpoint_of_its_step(
    stage: Stage, tmp_path: Path, remote: str, is_first: bool
) -> None:
    """If it came first, the full file of the step was not uploaded, and nothing could be resumed."""
    weights = {"save_weights_only": True, "filename": "weights-{step}", "monitor": "loss"}
    modes = [weights, {}] if is_first else [{}, weights]
    trainer = stage.start("train", folder=f"{tmp_path}/a", remote=remote, num_steps=1, checkpoints=modes)
    assert trainer.hear()["is_closed"]
    assert "not_uploaded" not in trainer.log()
    assert list(committed(remote, 1).files) == ["epoch=0-step=1.ckpt"]
    found = restore.find(remote, kind="weights")
    assert found is not None
    assert list(found.files) == ["weights-step=1.ckpt"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_sharded_save_of_only_weights_is_never_the_checkpoint_of_its_step(
    stage: Stage, tmp_path: Path, remote: str, is_first: bool
) -> None:
    """If it came first, the full one of the step was not uploaded, and nothing could be resumed."""
    weights = {"save_weights_only": True, "filename": "weights-{step}", "monitor": "loss"}
    modes = [weights, {}] if is_first else [{}, weights]
    run: dict[str, Any] = {"remote": remote, "is_sharded": True}
    ranks = stage.start_ranks("train", 2, folder=f"{tmp_path}/a", num_steps=1, checkpoints=modes, **run)
    assert all(each.hear()["is_closed"] for each in ranks)
    assert not any("not_uploaded" in each.log() for each in ranks)
    assert committed(remote, 1).name == "epoch=0-step=1.ckpt"
    found = restore.find(remote, kind="weights")
    assert found is not None
    assert (found.name, found.world_size) == ("weights-step=1.ckpt", 2)


def test_what_is_new_in_a_folder_is_told_by_the_files_of_this_rank(
    stage: Stage, tmp_path: Path, remote: str
) -> None:
    """It was told by the folder: one that rank 0 was deleting, and that another rank still listed because the metric
    differs between ranks, was taken for the checkpoint of the present step; and `last.ckpt`, written again, was not
    seen on other nodes than rank 0's.
    """
    play = stage.start("see_what_is_new", folder=f"{tmp_path}/a", remote=remote)
    assert play.hear() == ["last.ckpt-1", "last.ckpt-2", "b-3", "b-4", "b-5"]


def test_a_state_written_twice_is_uploaded_once(stage: Stage, tmp_path: Path, remote: str) -> None:
    trainer = stage.start(
        "train",
        folder=f"{tmp_path}/a",
        remote=remote,
        num_steps=3,
        checkpoints=[{"monitor": "loss", "mode": "max", "save_last": True}],
    )
    assert trainer.hear()["step"] == 3
    first, *others = [committed(remote, step) for step in (1, 2, 3)]
    # The loss falls, so `ModelCheckpoint` writes only the first as the best. `last.ckpt` of that step is the
    # same and is not uploaded again.
    assert (list(first.files), list(first.metrics)) == (["epoch=0-step=1.ckpt"], ["loss"])
    assert first.metrics["loss"] > 0
    assert [(list(each.files), dict(each.metrics)) for each in others] == [(["last.ckpt"], {})] * 2
    assert trainer.log().count("step_is_uploaded_already") == 1


def test_training_continues_without_the_store_and_its_end_says_so(
    stage: Stage, tmp_path: Path, remote: str
) -> None:
    trainer = stage.start(
        "train",
        folder=f"{tmp_path}/a",
        remote=remote,
        num_steps=NUM_STEPS,
        loses_store_at=2,
        upload_timeout_s=1,
        close_timeout_s=3,
    )
    ended = trainer.hear()
    assert (ended["step"], ended["is_closed"]) == (NUM_STEPS, True)
    assert "the newest checkpoint, step 6, is not committed" in ended["failure"]
    assert "shard_failed generation 1 step 6" in trainer.log()
    # An older step may still have been in flight when the store went away.
    unfinished = re.search(r"closed_with_unfinished steps=\[([\d, ]*)\]", trainer.log())
    assert unfinished is not None, trainer.log()
    assert {3, 4, 5, 6} <= {int(step) for step in unfinished[1].split(",")}
    (tmp_path / "remote").unlink()
    (tmp_path / "a.away").rename(tmp_path / "remote")
    restore.drain_predecessor(tmp_path / "a", DRAIN_TIMEOUT_S)
    assert [committed(remote, step).step for step in (3, 4, 5, 6)] == [3, 4, 5, 6]


def test_a_failing_training_loop_is_not_delayed(stage: Stage, tmp_path: Path, remote: str) -> None:
    trainer = stage.start("train", folder=f"{tmp_path}/a", remote=remote, num_steps=NUM_STEPS, raises_at=2)
    ended = trainer.hear()
    assert (ended["step"], ended["failure"], ended["is_closed"]) == (2, "the training loop fails", True)
    committed(remote, 2)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_save_right_before_a_failure_is_uploaded(
    stage: Stage, tmp_path: Path, remote: str, is_sharded: bool
) -> None:
    run: dict[str, Any] = {"remote": remote, "num_steps": NUM_STEPS, "is_sharded": is_sharded}
    ranks = stage.start_ranks("train", 1 + is_sharded, folder=f"{tmp_path}/a", raises_after=2, **run)
    ended = [each.hear() for each in ranks]
    assert [(each["failure"], each["is_closed"]) for each in ended] == [
        ("the training loop fails", True) for _ in ranks
    ]
    restore.drain_predecessor(tmp_path / "a", DRAIN_TIMEOUT_S)
    committed(remote, 2)


def test_what_the_tuner_saves_stays_local(stage: Stage, tmp_path: Path, remote: str) -> None:
    tuned = stage.start("tune", folder=f"{tmp_path}/a", remote=remote)
    assert tuned.hear()["batch_size"] == 8
    assert "checkpoint_committed" not in tuned.log()
    assert not list(tmp_path.glob("remote/**/*.ckpt"))


def test_the_best_of_a_step_that_is_uploaded_already_is_a_kind_of_its_own(
    stage: Stage, tmp_path: Path, remote: str
) -> None:
    modes = [{}, {"filename": "best-{loss:.2f}", "monitor": "loss", "mode": "max"}]
    trainer = stage.start("train", folder=f"{tmp_path}/a", remote=remote, num_steps=3, checkpoints=modes)
    assert trainer.hear()["is_closed"]
    assert list(committed(remote, 1).files) == ["epoch=0-step=1.ckpt"]
    best = restore.find(remote, kind="loss")
    assert best is not None
    assert (best.step, list(best.metrics)) == (1, ["loss"])
    assert [name.startswith("best-loss=") for name in best.files] == [True]


def test_the_best_file_is_fetched_by_the_name_that_the_user_gave(
    stage: Stage, tmp_path: Path, remote: str
) -> None:
    trainer = stage.start("find_best", folder=f"{tmp_path}/a", remote=remote, fresh=f"{tmp_path}/b")
    in_place, in_fresh = trainer.hear()
    assert in_place == in_fresh
    assert in_place.startswith("mine-loss=")


def test_a_name_that_stores_refuse_is_told_at_the_first_save(
    stage: Stage, tmp_path: Path, remote: str
) -> None:
    modes = [{"filename": "my best {step}"}]
    ended = stage.start("train", folder=f"{tmp_path}/a", remote=remote, num_steps=3, checkpoints=modes).hear()
    assert ended["step"] == 1
    assert f"{tmp_path}/a/my best step=1.ckpt cannot be uploaded" in ended["failure"]
    assert "save it under another name: use 1 to 200 of A-Z" in ended["failure"]
    assert ended["is_closed"]


def test_the_folders_of_a_file_name_are_part_of_the_name_in_the_store(
    stage: Stage, tmp_path: Path, remote: str
) -> None:
    modes = [{"filename": "{epoch}/{loss:.1f}"}]
    stage.start("train", folder=f"{tmp_path}/a", remote=remote, num_steps=1, checkpoints=modes).hear()
    assert committed(remote, 1).name.startswith("epoch=0-loss=")


def test_a_save_after_the_end_leaves_nothing_open(tmp_path: Path, remote: str) -> None:
    """Nobody tells when the last `trainer.save_checkpoint` was; in a notebook, a second trainer follows."""
    from ckpt_async.integrations.lightning import CkptAsyncCheckpointIO

    before = set(threading.enumerate())
    for trainer in (1, 2):
        checkpoint_io = CkptAsyncCheckpointIO(tmp_path / "local", remote)
        for step in (1, 2):
            state = {"global_step": 10 * trainer + step, "optimizer_states": []}
            checkpoint_io.save_checkpoint(state, tmp_path / f"local/step={10 * trainer + step}.ckpt")
            if step == 1:
                checkpoint_io.teardown()
        assert checkpoint_io.uploader is None
        assert committed(remote, 10 * trainer + 2)
        assert set(threading.enumerate()) <= before
