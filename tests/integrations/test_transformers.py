"""Hugging Face's own Trainer with tiny models, real stores and real kills."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, restore
from tests.integrations.stage import DRAIN_TIMEOUT_S, NUM_STEPS, Stage, Trainer, committed


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage("tests.integrations.transformers_plays", tmp_path_factory.mktemp("stage")) as stage:
        yield stage


def test_a_checkpoint_rotated_away_before_upload_is_not_lost(
    stage: Stage, tmp_path: Path, remote: str
) -> None:
    run: dict[str, Any] = {"remote": remote, "num_steps": NUM_STEPS}
    whole = stage.start("train", folder=f"{tmp_path}/whole", **run | {"remote": f"{remote}-whole"})
    killed = stage.start("train", folder=f"{tmp_path}/a", waits_at=4, max_bytes_per_s=1, **run)
    # The Trainer has rotated the other checkpoints away, and nothing has been uploaded yet.
    assert [each for each in killed.hear() if each.startswith("checkpoint-")] == ["checkpoint-4"]
    assert restore.find(remote) is None
    killed.kill()
    restore.drain_predecessor(tmp_path / "a", DRAIN_TIMEOUT_S)
    for step in (1, 2, 3, 4):
        checkpoint = committed(remote, step)
        report = restore.fetch(checkpoint, tmp_path / checkpoint.name)
        assert {
            "model.safetensors",
            "optimizer.pt",
            "rng_state.pth",
            "trainer_state.json",
        } <= report.paths.keys()
        assert checkpoint.metrics["loss"] > 0

    resumed = stage.start("train", folder=f"{tmp_path}/b", **run).hear()
    assert (resumed["resumed_from"], resumed["started_at"]) == (f"{tmp_path}/b/checkpoint-4", 4)
    assert (resumed["step"], resumed["is_closed"]) == (NUM_STEPS, True)
    assert resumed["weights"] == whole.hear()["weights"]
    assert committed(remote, NUM_STEPS).generation == 2


def test_each_rank_enqueues_its_own_files(stage: Stage, tmp_path: Path, s3_url: str) -> None:
    run: dict[str, Any] = {"remote": s3_url, "num_steps": NUM_STEPS}
    whole = stage.start_ranks("train", 2, folder=f"{tmp_path}/whole", **run | {"remote": f"{s3_url}-whole"})
    killed = stage.start_ranks("train", 2, folder=f"{tmp_path}/a", waits_at=4, **run)
    for trainer in killed:
        trainer.hear()
    for trainer in killed:
        trainer.kill()
    torn = tmp_path / "a" / "checkpoint-4" / "optimizer.pt"
    torn.unlink()
    torn.write_bytes(b"as after a power failure")
    # The trainer that starts here first finishes the uploads that its predecessor left on this node.
    resumed = [each.hear() for each in stage.start_ranks("train", 2, folder=f"{tmp_path}/a", **run)]
    checkpoint = committed(s3_url, 4)
    ranks = {name: file.ranks for name, file in checkpoint.files.items()}
    assert ranks.pop("rng_state_1.pth") == (1,)
    assert {"rng_state_0.pth", "model.safetensors", "optimizer.pt", "trainer_state.json"} <= ranks.keys()
    assert set(ranks.values()) == {(0,)}
    assert [(each["started_at"], each["step"], each["is_closed"]) for each in resumed] == [
        (4, NUM_STEPS, True),
        (4, NUM_STEPS, True),
    ]
    assert [each["weights"] for each in resumed] == [each.hear()["weights"] for each in whole]
    assert committed(s3_url, NUM_STEPS).world_size == 2


# The loss falls, so the best checkpoint is the first one.
BEST: dict[str, Any] = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "label_names": ["x"],
    "prediction_loss_only": True,
    "save_total_limit": 2,
}


def prune(remote: str, policy: str) -> None:
    command = [sys.executable, "-m", "ckpt_async", "prune", remote, "--keep", policy, "--yes"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fresh_node_also_gets_the_best_checkpoint(
    stage: Stage, tmp_path: Path, remote: str, world_size: int
) -> None:
    def start(folder: str, remote: str, **more: Any) -> list[Trainer]:
        run = {"folder": f"{tmp_path}/{folder}", "remote": remote, "num_steps": NUM_STEPS, "arguments": BEST}
        if world_size == 1:
            return [stage.start("train", **run, **more)]
        return stage.start_ranks("train", world_size, **run, **more)

    whole = start("whole", f"{remote}-whole")
    killed = start("a", remote, waits_at=4)
    for each in killed:
        assert {"checkpoint-1", "checkpoint-4"} <= set(each.hear())
    for each in killed:
        each.kill()
    restore.drain_predecessor(tmp_path / "a", DRAIN_TIMEOUT_S)
    prune(remote, "last=1,best=1:eval_loss:max")
    (tmp_path / "a").rename(tmp_path / "away")  # a fresh node, on which the paths are the same

    resumed = [each.hear() for each in start("a", remote)]
    assert [each["started_at"] for each in resumed] == [4] * world_size
    assert {each["best"] for each in resumed} == {f"{tmp_path}/a/checkpoint-1"}
    assert [each["weights"] for each in resumed] == [each.hear()["weights"] for each in whole]


def test_a_best_checkpoint_that_was_pruned_is_named_and_training_goes_on(
    stage: Stage, tmp_path: Path, remote: str
) -> None:
    run: dict[str, Any] = {
        "folder": f"{tmp_path}/a",
        "remote": remote,
        "num_steps": NUM_STEPS,
        "arguments": BEST,
    }
    killed = stage.start("train", waits_at=4, **run)
    killed.hear()
    killed.kill()
    restore.drain_predecessor(tmp_path / "a", DRAIN_TIMEOUT_S)
    prune(remote, "last=1")
    (tmp_path / "a").rename(tmp_path / "away")

    trainer = stage.start("train", **run)
    resumed = trainer.hear()
    assert (resumed["started_at"], resumed["step"], resumed["best"]) == (4, NUM_STEPS, None)
    told = f"best_checkpoint_not_fetched step=1 path={tmp_path}/a/checkpoint-1: it was pruned, or never committed"
    assert trainer.log().count(told) == 1


def test_a_best_checkpoint_that_is_damaged_leaves_nothing_behind(
    tmp_path: Path, remote: str, caplog: pytest.LogCaptureFixture
) -> None:
    from ckpt_async.integrations.transformers import newest_checkpoint  # only here: it takes seconds

    state = {"best_model_checkpoint": "out/checkpoint-1"}
    with Uploader(tmp_path / "a", remote) as uploader:
        for step in (1, 2):
            saved = tmp_path / "a" / f"checkpoint-{step}"
            saved.mkdir()
            (saved / "trainer_state.json").write_text(json.dumps(state))
            (saved / "model.safetensors").write_text("weights")
            uploader.enqueue(saved, step, saved.name)
            uploader.seal(step)
    (damaged,) = (tmp_path / "remote" / "ckpt").glob("checkpoint-1.*/model.safetensors")
    damaged.write_text("WEIGHTS")

    assert newest_checkpoint(tmp_path / "out", remote) == str(tmp_path / "out" / "checkpoint-2")
    assert "best_checkpoint_not_fetched step=1" in caplog.text
    assert not (tmp_path / "out" / "checkpoint-1").exists()


def test_a_checkpoint_made_on_sigterm_is_uploaded(stage: Stage, tmp_path: Path, remote: str) -> None:
    old = tmp_path / "a" / "checkpoint-1"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_text("of an earlier launch, and half of it")
    trainer = stage.start(
        "train",
        folder=f"{tmp_path}/a",
        remote=remote,
        num_steps=NUM_STEPS,
        sigterm_at=2,
        arguments={"save_strategy": "no", "enable_jit_checkpoint": True, "save_total_limit": None},
    )
    ended = trainer.hear()
    # It stops after one more step.
    assert (ended["started_at"], ended["step"], ended["is_closed"]) == (0, 3, True)
    assert {"model.safetensors", "trainer_state.json"} <= committed(remote, 2).files.keys()
    assert restore.find(remote, step=91) is not None  # nobody announced it
    assert restore.find(remote, step=90) is None  # its writer is not done
    assert restore.find(remote, step=1) is None  # it was there before this launch


def test_a_training_that_committed_nothing_ends_with_an_error(
    stage: Stage, tmp_path: Path, remote: str
) -> None:
    ended = stage.start(
        "train", folder=f"{tmp_path}/a", remote=remote, num_steps=2, has_store=False, close_timeout_s=1
    )
    with pytest.raises(AssertionError, match=r"UploadFailedError: the newest checkpoint, step 2, is not"):
        ended.hear()
    assert "train_loss" in ended.log()  # training itself ran to its end


def test_the_accelerate_recipe_of_the_docs_works(stage: Stage, tmp_path: Path, remote: str) -> None:
    def start(folder: str, num_steps: int, remote: str = remote) -> list[Trainer]:
        return stage.start_ranks(
            "accelerated",
            2,
            folder=f"{tmp_path}/{folder}",
            remote=remote,
            num_steps=num_steps,
        )

    whole = start("whole", 3, f"{remote}-whole")
    for each in start("a", 2):
        each.hear()
    ranks = {name: file.ranks for name, file in committed(remote, 2).files.items()}
    assert ranks.pop("random_states_1.pkl") == (1,)
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl"} <= ranks.keys()
    assert set(ranks.values()) == {(0,)}
    resumed = [each.hear() for each in start("b", 3)]
    assert [each["first_step"] for each in resumed] == [3, 3]
    assert [each["weights"] for each in resumed] == [each.hear()["weights"] for each in whole]


@pytest.mark.fault("F34")
def test_accelerate_without_a_process_group_is_rejected(stage: Stage, tmp_path: Path, remote: str) -> None:
    """On CPU, accelerate takes each process for the only one unless told otherwise, so two runs
    would silently share a remote.
    """
    ranks = stage.start_ranks(
        "accelerated", 2, folder=f"{tmp_path}/a", remote=remote, num_steps=1, is_distributed=False
    )
    with pytest.raises(AssertionError, match=r"launcher says that this is rank 1 of 2"):
        ranks[1].hear()
    ranks[0].hear()
