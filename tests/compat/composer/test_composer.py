"""`Trainer` with DDP on 2 ranks and `CheckpointSaver`; `RemoteUploaderDownloader`; autoresume, `load_path=`, kills.

`conformance.py` runs Composer's own tests with our class in place of theirs.
"""

import inspect
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import composer.callbacks
import pytest
import torch
from composer.algorithms import NoOpModel
from composer.core import Callback
from composer.loggers import FileLogger

from ckpt_async import restore
from ckpt_async.errors import SettingsError, UploadFailedError
from ckpt_async.integrations.composer import CheckpointSaver, RemoteUploaderDownloader
from ckpt_async.torch import load, unshard
from tests.compat.composer import train
from tests.compat.play import Job
from tests.seaweed import SeaweedServer

SCRIPT = Path(train.__file__)
SHARDED = SCRIPT.with_name("train_sharded.py")
ROOT = SCRIPT.parents[3]
# Trains until its first save, at batch 5, and then kills itself before the next event. argv[2]: how it uploads.
KILLED = """
import os, signal, sys
from composer.core import Callback
from ckpt_async.integrations.composer import CheckpointSaver, RemoteUploaderDownloader
from tests.compat.composer.train import Model, trainer_of

class Kill(Callback):
    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == 5:
            os.kill(os.getpid(), signal.SIGKILL)

remote, how = sys.argv[1:]
if how == "saver":
    more = {"callbacks": [CheckpointSaver("checkpoints", remote=remote, save_interval="5ba"), Kill()]}
else:
    more = {"loggers": [RemoteUploaderDownloader(remote.removesuffix("/run"))], "callbacks": []}
trainer = trainer_of(Model(), run_name="run", save_folder="checkpoints", save_interval="5ba", **more)
if how != "saver":
    trainer.state.callbacks.append(Kill())  # after the saver that Trainer has made
trainer.fit()
"""


# Runs on 2 ranks, the second of which comes late to each save, with names that are the same on both.
LATE = """
import sys, time
from composer.core import Callback
from composer.utils import dist
from ckpt_async.integrations.composer import CheckpointSaver
from tests.compat.composer.train import Model, trainer_of

class Late(Callback):
    def batch_end(self, state, logger):
        if dist.get_global_rank() == 1:
            time.sleep(2)  # the first has begun its save long before

saver = CheckpointSaver(
    "checkpoints", "ep{epoch}-ba{batch}.pt", None, "latest.pt", None, "2ba", remote=sys.argv[1], weights_only=True
)
trainer = trainer_of(Model(), "2ba", run_name="run", callbacks=[Late(), saver])
trainer.fit()
trainer.close()
"""


@pytest.fixture(autouse=True)
def on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Composer's folders are relative, and a fresh node is an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saver_of(remote: str, **more: Any) -> CheckpointSaver:
    return CheckpointSaver("checkpoints", remote=remote, **{"save_interval": "5ba", **more})


def run(duration: str, *, model: train.Model | None = None, fits: bool = True, **more: Any) -> Any:
    """Return a trainer that has been closed, after fitting to its end unless `fits` is false."""
    trainer = train.trainer_of(
        model or train.Model(), duration, **{"run_name": "run", "autoresume": True, **more}
    )
    try:
        if fits:
            trainer.fit()
    finally:
        trainer.close()
    return trainer


def lose_node(node: Path) -> None:
    for each in node.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)


# --- kills -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [SCRIPT, SHARDED], ids=["ddp", "sharded"])
def test_a_killed_run_on_2_ranks_goes_on_on_a_fresh_node(job: Job, script: Path) -> None:
    job.check_kill_and_resume([sys.executable, "-m", "composer.cli.launcher", "-n", "2", script])
    wholes = [
        whole_of(f"{job.remote}/{name}", Path(f"{name}.safetensors")) for name in ("run", "undisturbed")
    ]
    assert {value.shape for value in wholes[0].values()} >= {(train.WIDTH, train.WIDTH), (train.WIDTH,)}
    assert_same(*wholes)


def whole_of(remote: str, path: Path) -> dict[str, torch.Tensor]:
    found = restore.find(remote)
    assert found is not None
    unshard(found, path)
    weights: dict[str, torch.Tensor] = load(path)
    return weights


def test_a_run_that_is_killed_again_and_again_loses_no_loss(job: Job) -> None:
    job.check_kill_and_resume([sys.executable, SCRIPT], kills=2)


@pytest.mark.parametrize("how", ["saver", "logger"])
def test_a_save_outlives_a_sigkill_right_after_it(s3_url: str, on_a_node: Path, how: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    killed = subprocess.run([sys.executable, "-c", KILLED, f"{s3_url}/run", how], env=env, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    saver = saver_of(f"{s3_url}/run")
    trainer = run("1ep", fits=False, callbacks=[saver])
    assert trainer.state.timestamp.batch == 5
    assert restore.find(f"{s3_url}/run", step=5) is not None


def test_what_a_kill_left_half_written_does_not_stand_in_the_way(s3_url: str, on_a_node: Path) -> None:
    run("10ba", callbacks=[saver_of(s3_url)])
    torn = on_a_node / "checkpoints" / "ep0-ba15-rank0.pt"
    torn.write_bytes(b"half")
    again = run("15ba", callbacks=[saver_of(s3_url)])
    assert again.state.timestamp.batch == 15
    assert torn.stat().st_size > 4
    found = restore.find(s3_url)
    assert found is not None
    assert found.step == 15


def test_another_runs_files_are_refused_as_by_composer(s3_url: str, on_a_node: Path) -> None:
    theirs = on_a_node / "checkpoints" / "ep0-ba15-rank0.pt"
    theirs.parent.mkdir()
    theirs.write_bytes(b"somebody else's")
    with pytest.raises(FileExistsError, match="may conflict with a future checkpoint"):
        run("10ba", callbacks=[saver_of(s3_url)])
    assert theirs.read_bytes() == b"somebody else's"


def test_a_run_that_does_not_resume_does_not_bury_its_newest_checkpoint(s3_url: str) -> None:
    run("10ba", callbacks=[saver_of(s3_url)])
    with pytest.raises(FileExistsError, match="may conflict with a future checkpoint"):
        run("10ba", callbacks=[saver_of(s3_url)], autoresume=False)


def test_a_late_rank_leaves_what_the_first_has_written(tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/store"
    Path("late.py").write_text(LATE)
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, "-m", "composer.cli.launcher", "-n", "2", "late.py", remote]
    subprocess.run(launch, env=env, timeout=300, check=True)
    assert restore.find(remote, step=2) is not None


# --- getting back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["saver", "logger"])
def test_autoresume_on_a_fresh_node(s3_url: str, on_a_node: Path, how: str) -> None:
    def options() -> dict[str, Any]:
        if how == "saver":
            return {"callbacks": [saver_of(f"{s3_url}/run")]}
        logger = RemoteUploaderDownloader(s3_url)
        return {"loggers": [logger], "save_folder": "checkpoints", "save_interval": "5ba"}

    first = run("10ba", **options())
    lose_node(on_a_node)
    second = run("20ba", fits=False, **options())
    assert second.state.timestamp.batch == 10
    assert_same(weights(first), weights(second))
    assert os.readlink("checkpoints/latest-rank0.pt") == "ep0-ba10-rank0.pt"
    lose_node(on_a_node)
    third = run("20ba", **options())
    assert third.state.timestamp.batch == 20


def test_the_newest_committed_checkpoint_wins_over_a_stale_local_link(s3_url: str, on_a_node: Path) -> None:
    run("5ba", callbacks=[saver_of(s3_url)])
    shutil.copytree("checkpoints", "old")
    run("10ba", callbacks=[saver_of(s3_url)])
    shutil.rmtree("checkpoints")
    Path("old").rename("checkpoints")
    assert run("10ba", fits=False, callbacks=[saver_of(s3_url)]).state.timestamp.batch == 10


@pytest.mark.parametrize(
    "name", ["latest-rank0.pt", "latest-rank0.pt.symlink", "ep0-ba5-rank0.pt", "latest-rank{rank}.pt"]
)
@pytest.mark.parametrize("store", ["composer's", "ours", "ours, not among the loggers"])
def test_load_path_finds_composers_names(s3_url: str, on_a_node: Path, name: str, store: str) -> None:
    run("10ba", callbacks=[saver_of(f"{s3_url}/run")])
    lose_node(on_a_node)
    options: dict[str, Any] = {"load_path": f"{s3_url}/run/checkpoints/{name}", "autoresume": False}
    if store != "composer's":
        downloader = RemoteUploaderDownloader(s3_url)
        options |= {"load_path": f"run/checkpoints/{name}", "load_object_store": downloader}
        if store == "ours":
            options["loggers"] = [downloader]
    loaded = run("10ba", fits=False, **options)
    assert loaded.state.timestamp.batch == (5 if "ba5" in name else 10)


def test_autoresume_needs_no_remote_pointer(tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/store"
    for duration in ("5ba", "10ba"):
        saver = saver_of(remote, latest_remote_file_name=None)
        assert run(duration, callbacks=[saver]).state.timestamp.batch == int(duration[:-2])
    assert not list((tmp_path / "store").rglob("*.symlink"))


def test_the_recipe_of_the_docs_runs_as_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    recipe = page.partition("## Composer")[2].partition("```python")[2].partition("```")[0]
    store = tmp_path / "store"
    store.mkdir()
    for printed, here in (("s3://bucket", f"file://{store}"), ("500ba", "5ba"), ("10ep", "5ba")):
        assert printed in recipe
        recipe = recipe.replace(printed, here)
    exec(recipe, {"model": train.Model(), "loader": train.loader()})
    assert restore.find(f"file://{store}/run-a", step=5) is not None


def test_what_is_not_there_is_not_found(s3_url: str) -> None:
    with pytest.raises(FileNotFoundError):
        RemoteUploaderDownloader(s3_url).download_file("run/checkpoints/latest-rank0.pt", "here.pt")
    with pytest.raises(FileNotFoundError):
        RemoteUploaderDownloader(s3_url).download_file("run/latest-rank0.pt.symlink", "here.pt")
    assert not Path("here.pt").exists()


def test_algorithms_that_a_checkpoint_needs_are_applied_on_load(s3_url: str, on_a_node: Path) -> None:
    """As with Composer's own, this works because Composer's loader does the loading."""
    run("5ba", callbacks=[saver_of(s3_url)], algorithms=[NoOpModel()])
    lose_node(on_a_node)
    again = run("5ba", fits=False, callbacks=[saver_of(s3_url)])
    assert [type(each) for each in again.state.algorithms] == [NoOpModel]


# --- what else a run gives ---------------------------------------------------------------------------------


def test_other_loggers_files_are_plain_uploads(s3_url: str) -> None:
    uploads = RemoteUploaderDownloader(s3_url)
    log = FileLogger("{run_name}/logs/rank{rank}.txt", remote_file_name="{run_name}/logs/rank{rank}.txt")
    run("10ba", callbacks=[saver_of(f"{s3_url}/run")], loggers=[uploads, log])
    uploads.download_file("run/logs/rank0.txt", "back.txt")
    assert Path("back.txt").read_text() == Path("run/logs/rank0.txt").read_text() != ""
    uploads.download_file("run/checkpoints/latest-rank0.pt", "back.pt")  # only a pointer has this name
    assert Path("back.pt").read_bytes() == Path("checkpoints/ep0-ba10-rank0.pt").read_bytes()
    assert restore.find(f"{s3_url}/run", step=10) is not None


def test_a_file_that_cannot_be_uploaded_is_an_error_in_the_log_and_no_more(
    s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Gives(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            Path("note.txt").write_text("note")
            logger.upload_file("no name \n for a key", "note.txt", overwrite=True)

    with caplog.at_level(logging.ERROR):
        trained = run(
            "5ba", callbacks=[saver_of(f"{s3_url}/run"), Gives()], loggers=[RemoteUploaderDownloader(s3_url)]
        )
    assert trained.state.timestamp.batch == 5
    assert "plain_file_not_uploaded" in caplog.text


def test_files_may_go_at_once_when_they_are_saved(s3_url: str) -> None:
    run("10ba", callbacks=[saver_of(s3_url, num_checkpoints_to_keep=0)])
    assert not list(Path("checkpoints").glob("ep*"))
    for step in (5, 10):
        assert restore.find(s3_url, step=step) is not None


def test_a_name_that_is_saved_again_and_again_is_committed_each_time(s3_url: str) -> None:
    """Composer writes into the same file again, and what is being uploaded must not change."""
    names = {"filename": "model.pt", "remote_file_name": "model.pt", "save_interval": "1ba"}
    run("8ba", callbacks=[saver_of(s3_url, overwrite=True, **names)])
    for step in range(1, 9):
        found = restore.find(s3_url, step=step)
        assert found is not None, step
        restore.fetch(found, f"step-{step}")
        state = torch.load(f"step-{step}/model.pt", weights_only=False)
        assert state["state"]["timestamp"]["Timestamp"]["batch"] == step


def test_a_second_saver_is_a_kind(s3_url: str) -> None:
    both = [
        saver_of(s3_url),
        CheckpointSaver("weights", remote=s3_url, kind="weights", save_interval="2ba", weights_only=True),
    ]
    run("10ba", callbacks=both)
    found = restore.find(s3_url, kind="weights")
    assert found is not None
    assert found.step == 10
    assert restore.find(s3_url, step=5) is not None


def test_one_trainer_may_follow_another_that_nobody_closed(s3_url: str) -> None:
    first = train.trainer_of(train.Model(), "5ba", run_name="run", callbacks=[saver_of(s3_url)])
    first.fit()
    assert run("10ba", callbacks=[saver_of(s3_url)]).state.timestamp.batch == 10
    first.close()


# --- failures ----------------------------------------------------------------------------------------------


def test_a_run_that_committed_nothing_does_not_end_well(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SeaweedServer(tmp_path_factory.mktemp("server")) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)

        class Outage(Callback):
            def batch_start(self, state: Any, logger: Any) -> None:
                if state.timestamp.batch == 0:
                    server.kill()

        saver = saver_of(f"s3://{server.bucket}/run", close_timeout_s=1.0)
        with pytest.raises(UploadFailedError, match="the newest checkpoint, step 5, is not committed"):
            run("5ba", callbacks=[saver, Outage()])


def test_it_takes_all_that_composers_own_takes() -> None:
    ours = inspect.signature(CheckpointSaver).parameters
    for name, theirs in inspect.signature(composer.callbacks.CheckpointSaver).parameters.items():
        assert (ours[name].default, ours[name].kind) == (theirs.default, theirs.kind), name
    uploads = inspect.signature(RemoteUploaderDownloader).parameters
    for name, theirs in inspect.signature(composer.loggers.RemoteUploaderDownloader).parameters.items():
        assert (uploads[name].default, uploads[name].kind) == (theirs.default, theirs.kind), name


def test_settings_without_a_remote_are_refused() -> None:
    with pytest.raises(SettingsError, match="need remote=: remote_retention"):
        CheckpointSaver("checkpoints", remote_retention="last=3")


def test_composers_options_of_its_stores_are_refused() -> None:
    with pytest.raises(SettingsError, match="store_options"):
        RemoteUploaderDownloader("s3://bucket", backend_kwargs={"bucket": "bucket"})
