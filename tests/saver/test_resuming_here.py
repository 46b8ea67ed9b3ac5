"""One rank without a remote: what a restart resumes from, what it may replace, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async import torch as ckpt
from ckpt_async.errors import CheckpointConflictError, FolderInUseError, NoUsableCheckpointError
from ckpt_async.saver import CheckpointSaver, Timestamp, local_only

Damage = Callable[[Path], object]


def state(batch: int) -> dict[str, Any]:
    return {"batch": batch, "weight": torch.full((1000,), float(batch))}


def train(folder: Path, batches: range, remote: str | None = None, **options: Any) -> Any:
    """One launch that loads the newest checkpoint and goes on. Returns what it has loaded."""
    with CheckpointSaver(folder, remote, **{"save_interval": "1ba", **options}) as saver:
        found = saver.load_latest()
        for batch in batches:
            saver.step(state(batch), batch)
    return None if found is None else found["batch"]


def load(folder: Path, **options: Any) -> Any:
    return train(folder, range(0), **{"overwrite": True, **options})


def file_of(folder: Path, batch: int) -> Path:
    return folder / f"ep0-ba{batch}-rank0.pt"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(bytes(torch.full((4,), 3.0).numpy().data))
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [lambda path: os.truncate(path, 500), lambda path: os.truncate(path, 0), flip_a_bit],
    ids=["truncated", "empty", "a bit"],
)
def test_a_damaged_checkpoint_is_passed_over_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Damage
) -> None:
    """It raised FormatError, or loaded wrong values."""
    train(tmp_path, range(1, 4))
    damage(file_of(tmp_path, 3))
    assert load(tmp_path) == 2
    assert "checkpoint_passed_over" in caplog.text
    assert "ep0-ba3-rank0.pt" in caplog.text
    file_of(tmp_path, 1).unlink()
    os.truncate(file_of(tmp_path, 2), 500)
    with pytest.raises(NoUsableCheckpointError, match="no checkpoint can be loaded: "):
        load(tmp_path)


def test_a_restart_of_the_same_code_continues_the_run(tmp_path: Path) -> None:
    """It raised CheckpointConflictError, whose hint asked for a batch that only load_latest tells."""
    assert train(tmp_path, range(1, 4)) is None
    assert train(tmp_path, range(4, 6)) == 3
    assert train(tmp_path, range(0)) == 5


def test_a_restart_after_a_kill_within_the_first_save_is_no_conflict(tmp_path: Path) -> None:
    """The file is there, but nothing was noted yet."""
    CheckpointSaver(tmp_path, None)
    torch.save(state(1), file_of(tmp_path, 1))
    assert train(tmp_path, range(1, 3)) is None
    assert train(tmp_path, range(0)) == 2


def test_a_launch_that_does_not_ask_for_the_newest_replaces_nothing(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    with (
        CheckpointSaver(tmp_path, None, save_interval="1ba") as saver,
        pytest.raises(CheckpointConflictError, match="call load_latest before the first step"),
    ):
        saver.step(state(0), 1)
    assert load(tmp_path) == 3
    with CheckpointSaver(tmp_path, None, save_interval="1ba") as saver:
        saver.step(state(4), 4)  # loaded by other means: nothing is replaced
    assert load(tmp_path) == 4


def test_another_runs_checkpoints_are_a_conflict_still(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4), run_name="a")
    with pytest.raises(CheckpointConflictError, match="was not saved by this run"):
        CheckpointSaver(tmp_path, None, run_name="b")


def test_without_the_link_the_notes_say_what_is_newest(tmp_path: Path) -> None:
    """load_latest returned None."""
    train(tmp_path, range(1, 4), latest_filename=None)
    assert load(tmp_path, latest_filename=None) == 3
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    assert load(tmp_path, latest_filename=None) is None


@pytest.mark.fault("F97")
def test_a_copy_of_the_folder_can_be_resumed_from(tmp_path: Path) -> None:
    train(tmp_path / "a", range(1, 4))
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a").rglob("*"):
        copy = tmp_path / "b" / path.relative_to(tmp_path / "a")
        if path.is_symlink():
            copy.symlink_to(path.readlink())
        elif path.is_dir():
            copy.mkdir()
        else:
            copy.write_bytes(path.read_bytes())
    assert load(tmp_path / "b") == 3


def test_a_file_of_the_same_stem_is_not_loaded_instead(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3))
    ckpt.dump({"weight": torch.zeros(1)}, tmp_path / "ep0-ba2-rank0.safetensors")
    assert load(tmp_path) == 2


@pytest.mark.fault("F98")
def test_from_here_to_a_remote_and_back(tmp_path: Path) -> None:
    """The first launch with a remote was told that this is a fresh start; or that what this run has saved is another
    run's, and that overwrite=True replaces it.
    """
    folder, remote = tmp_path / "local", f"file://{tmp_path}/remote"
    train(folder, range(1, 4))
    for options in ({}, {"resume_from": 3}):
        with pytest.raises(
            NoUsableCheckpointError, match=r"saved without a remote: ep0-ba1, ep0-ba2, ep0-ba3 .*Moving"
        ):
            load(folder, remote=remote, overwrite=False, **options)
    for _ in range(2):  # as docs/saver.md says, however often it is killed before anything is committed
        with (
            CheckpointSaver(folder, remote, save_interval="1ba") as saver,
            CheckpointSaver(folder, None, save_interval=None) as before,
        ):
            assert saver.find() is None
            assert before.load_latest()["batch"] == 3
    with CheckpointSaver(folder, remote, save_interval="1ba") as saver:
        with pytest.raises(
            CheckpointConflictError, match=r"begins with batch 3, .*may not replace: ep0-ba3 "
        ):
            saver.step(state(3), 3)
        saver.step(state(4), 4)
    assert load(folder, remote=remote) == 4
    assert load(folder) == 4  # the link is newer than all notes


def save_to_a_dead_store(folder: Path, remote: Path, batches: range) -> None:
    """One launch that begins at the first batch, and whose store dies before it takes any of its checkpoints."""
    options: dict[str, Any] = {"blocking": True, "saves_last": False, "on_error": "warn"}
    saver = CheckpointSaver(folder, f"file://{remote}", save_interval="1ba", **options)
    try:
        remote.rename(remote.with_suffix(".away"))
        remote.touch()
        for batch in batches:
            saver.step(state(batch), batch)
    finally:
        saver.close(timeout_s=0)


@pytest.mark.fault("F106")
def test_what_a_remote_never_took_is_loaded_without_it(tmp_path: Path) -> None:
    """A launch without the remote went on from the checkpoint before, without a word, and replaced these; or was told
    that they are another run's.
    """
    folder, remote = tmp_path / "local", tmp_path / "remote"
    save_to_a_dead_store(folder, remote, range(1, 4))
    newest = file_of(folder, 3).read_bytes()
    assert train(folder, range(4, 6)) == 3
    assert file_of(folder, 3).read_bytes() == newest
    assert train(folder, range(0)) == 5, "what was saved since is newer"


@pytest.mark.fault("F106")
def test_what_a_remote_never_took_after_a_time_without_it_is_loaded(tmp_path: Path) -> None:
    folder, remote = tmp_path / "local", tmp_path / "remote"
    train(folder, range(1, 3))
    save_to_a_dead_store(folder, remote, range(3, 5))
    assert load(folder) == 4
    os.truncate(file_of(folder, 4), 100)
    assert load(folder) == 3, "what was changed since is no checkpoint"


def test_what_was_committed_is_loaded_without_the_remote(tmp_path: Path) -> None:
    """The files were said to be another run's."""
    folder = tmp_path / "local"
    train(folder, range(1, 3), remote=f"file://{tmp_path}/remote")
    assert train(folder, range(3, 4)) == 2


KILLED = """
import os, sys
from ckpt_async.local import sealed
from ckpt_async.saver import CheckpointSaver
saver = CheckpointSaver(sys.argv[1], None, save_interval="1ba", blocking=True)
saver.step({"batch": 1}, 1)
sealed.put = lambda *_: os._exit(0)  # the file is there, its note is not
saver.step({"batch": 2}, 2)
"""


@pytest.mark.fault("F110")
def test_a_file_whose_launch_was_killed_before_it_noted_it_does_not_keep_a_launch_with_the_remote_out(
    tmp_path: Path,
) -> None:
    """The constructor took it for another run's, until the user had deleted it."""
    folder, remote = tmp_path / "local", f"file://{tmp_path}/remote"
    subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=True)
    assert file_of(folder, 2).exists()
    with CheckpointSaver(folder, remote, save_interval="1ba") as saver:
        with CheckpointSaver(folder, None, save_interval=None) as before:
            assert before.load_latest() == {"batch": 1}
        saver.step(state(2), 2)
    assert ckpt.load(file_of(folder, 2))["weight"][0] == 2
    with pytest.raises(
        CheckpointConflictError, match=r"ba2-rank0\.pt exists and is not among what this run noted"
    ):
        CheckpointSaver(folder, f"{remote}-2")


@pytest.mark.fault("F106")
def test_beside_a_launch_with_the_remote_nothing_is_saved_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would replace each other's files."""
    monkeypatch.setattr(local_only, "LOCK_WAIT_S", 0.1)
    folder = tmp_path / "local"
    with CheckpointSaver(folder, f"file://{tmp_path}/remote", save_interval="1ba", blocking=True) as live:
        live.step(state(1), 1)
        with CheckpointSaver(folder, None, save_interval="1ba", saves_last=False) as saver:
            assert saver.load_latest()["batch"] == 1
            with pytest.raises(FolderInUseError):
                saver.step(state(2), 2)
        assert not file_of(folder, 2).exists()
    assert train(folder, range(2, 3)) == 1


@pytest.mark.fault("F106")
def test_what_another_run_saved_with_a_remote_is_a_conflict(tmp_path: Path) -> None:
    folder = tmp_path / "local"
    train(folder, range(1, 3), remote=f"file://{tmp_path}/remote")
    before = file_of(folder, 2).read_bytes()
    with pytest.raises(CheckpointConflictError, match="was not saved by this run"):
        train(folder, range(1, 3), run_name="other")
    with pytest.raises(CheckpointConflictError, match="was not saved by this run"):
        train(folder, range(1, 3), remote=f"file://{tmp_path}/other")
    assert file_of(folder, 2).read_bytes() == before


def move(folder: Path, remote: str) -> None:
    """Save batch 1 here, and then batch 2 with a remote."""
    train(folder, range(1, 2))
    with CheckpointSaver(folder, remote, save_interval="1ba") as saver:
        saver.step(state(2), 2)


@pytest.mark.fault("F98")
def test_what_was_saved_here_since_the_newest_in_the_store_is_neither_forgotten_nor_replaced(
    tmp_path: Path,
) -> None:
    """The launch with a remote went on from batch 2 without a word, and saved 3 and 4 again."""
    folder, remote = tmp_path / "local", f"file://{tmp_path}/remote"
    move(folder, remote)
    assert train(folder, range(3, 5)) == 2
    newer = {path: path.read_bytes() for path in (file_of(folder, 3), file_of(folder, 4))}
    with pytest.raises(
        NoUsableCheckpointError, match=r"no newer checkpoint than ep0-ba2, .*: ep0-ba3, ep0-ba4 .*Moving"
    ):
        train(folder, range(3, 5), remote)
    with CheckpointSaver(folder, remote, save_interval="1ba") as saver:  # loads by other means
        saver.load_state_dict({"timestamp": Timestamp(batch=2).state_dict(), "saved_checkpoints": []})
        with pytest.raises(CheckpointConflictError, match="ep0-ba3, ep0-ba4 "):
            saver.step(state(3), 3)
    assert newer == {path: path.read_bytes() for path in newer}
    with (
        CheckpointSaver(folder, remote, save_interval="1ba") as saver,
        CheckpointSaver(folder, None, save_interval=None) as before,
    ):
        assert before.load_latest()["batch"] == 4
        saver.step(state(5), 5)
    assert train(folder, range(0), remote) == 5


def test_what_was_saved_here_and_deleted_is_not_asked_for(tmp_path: Path) -> None:
    folder, remote = tmp_path / "local", f"file://{tmp_path}/remote"
    move(folder, remote)
    train(folder, range(3, 5))
    for batch in (3, 4):
        file_of(folder, batch).unlink()
    assert train(folder, range(3, 4), remote) == 2
    assert train(folder, range(0), remote) == 3
