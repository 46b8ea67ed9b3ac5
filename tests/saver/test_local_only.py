"""`remote=None`: what is durable on one node, and what retention deletes there."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.errors import InvalidNameError, JournalError, NoUsableCheckpointError, SealedError
from ckpt_async.local import sealed
from ckpt_async.saver import CheckpointSaver
from ckpt_async.saver.local_only import LocalOnly


class Clock:
    """Goes when the test says so."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def save(saver: LocalOnly, step: int, name: str = "ba{step}.pt", **options: Any) -> Path:
    path = saver.folder / name.format(step=step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(f"state {step}")
    saver.enqueue(path, step)
    saver.seal(step, **options)
    return path


def test_every_folder_on_the_way_is_fsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = LocalOnly(tmp_path / "local", latest_filename="")
    synced: set[str] = set()
    fsync = os.fsync

    def see(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", see)
    path = save(saver, 1, "weights/run/ba{step}.pt")
    ways = {path, path.parent, path.parent.parent, saver.folder}
    assert {str(each) for each in ways} <= synced


def names(saver: LocalOnly) -> list[str]:
    return sorted(each.name for each in saver.folder.glob("*.pt") if not each.is_symlink())


def num_pruned(saver: LocalOnly) -> float:
    for family in saver.metrics.registry.collect():
        for each in family.samples:
            if each.name == "ckpt_async_pruned_checkpoints_total":
                return each.value
    return 0.0


def test_retention_by_time_sees_when_each_was_saved(tmp_path: Path) -> None:
    clock = Clock()
    saver = LocalOnly(tmp_path / "local", local_retention="every-seconds=60", clock=clock)
    for step in range(1, 7):
        save(saver, step)
        clock.now_s += 30
    assert names(saver) == ["ba1.pt", "ba3.pt", "ba5.pt", "ba6.pt"]  # the newest stays whatever its age


def test_what_is_pruned_is_counted_once(tmp_path: Path) -> None:
    saver = LocalOnly(tmp_path / "local", num_checkpoints_to_keep=2)
    for step in range(1, 7):
        save(saver, step)
    assert names(saver) == ["ba5.pt", "ba6.pt"]
    assert num_pruned(saver) == 4
    assert saver.is_committed(1)  # it was
    with pytest.raises(SealedError):
        saver.check_takes(1)


def launch(folder: Path, *, continues: bool = True, **settings: Any) -> LocalOnly:
    """Another process of the run, as far as its folder can tell: nothing is closed, so the one before was killed."""
    saver = LocalOnly(folder, **{"num_checkpoints_to_keep": 2, "latest_filename": "latest", **settings})
    if continues:
        saver.continue_run()
    return saver


def test_what_earlier_launches_saved_is_pruned(tmp_path: Path) -> None:
    for first in (1, 10, 20):
        saver = launch(tmp_path)
        for step in range(first, first + 3):
            save(saver, step)
    assert names(saver) == ["ba21.pt", "ba22.pt"]
    save(launch(tmp_path), 30)
    assert names(saver) == ["ba22.pt", "ba30.pt"]
    assert len(list(tmp_path.glob(".ckpt-async/sealed/*/rank-00000/*"))) == 2  # nothing is noted that is gone


def test_a_launch_that_goes_back_keeps_its_own_newest(tmp_path: Path) -> None:
    saver = launch(tmp_path)
    for step in (10, 20, 30):
        save(saver, step)
    save(launch(tmp_path), 15)
    assert names(saver) == ["ba15.pt", "ba30.pt"]


def test_the_folder_of_a_step_that_this_launch_comes_to_again_stays(tmp_path: Path) -> None:
    """It may just have made the folder, to write the file of that step."""
    before = LocalOnly(tmp_path / "local", num_checkpoints_to_keep=3)
    for step in (1, 2, 3):
        save(before, step, "step-{step}/a.pt")
    saver = LocalOnly(tmp_path / "local", num_checkpoints_to_keep=1)
    saver.continue_run()
    save(saver, 1, "step-{step}/a.pt")
    assert sorted(each.name for each in saver.folder.glob("step-*")) == ["step-1", "step-2", "step-3"]
    assert [each.parent.name for each in saver.folder.glob("step-*/a.pt")] == ["step-1"]
    save(saver, 2, "step-{step}/a.pt")
    assert sorted(each.name for each in saver.folder.glob("step-*")) == ["step-2", "step-3"]


def test_a_step_that_is_saved_again_is_one_checkpoint(tmp_path: Path) -> None:
    saver = launch(tmp_path, num_checkpoints_to_keep=-1)
    for step in (1, 2, 3):
        save(saver, step)
    saver = launch(tmp_path)
    save(saver, 3)
    assert names(saver) == ["ba2.pt", "ba3.pt"]


def test_files_that_were_not_saved_here_or_have_changed_since_stay(tmp_path: Path) -> None:
    saver = launch(tmp_path)
    (tmp_path / "ba0.pt").write_text("mine")
    replaced, changed = save(saver, 1), save(saver, 2)
    replaced.rename(tmp_path / "renamed.pt")
    replaced.write_text("state 1")
    changed.write_text("state X")
    saver = launch(tmp_path)
    for step in (3, 4, 5):
        save(saver, step)
    assert names(saver) == ["ba0.pt", "ba1.pt", "ba2.pt", "ba4.pt", "ba5.pt", "renamed.pt"]


@pytest.mark.fault("F97")
def test_a_copy_of_the_folder_is_pruned_like_the_folder(tmp_path: Path) -> None:
    """The first save in it forgot all that was saved before: they were neither loaded nor pruned any more."""
    saver = launch(tmp_path / "a")
    for step in (1, 2):
        save(saver, step)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    saver = launch(tmp_path / "b")
    save(saver, 3)
    assert names(saver) == ["ba2.pt", "ba3.pt"]
    assert [each.name for each in saver.noted()] == ["step-3", "step-2"]
    assert [each.name for each in launch(tmp_path / "b").noted()] == ["step-3", "step-2"]


def test_a_path_belongs_to_the_newest_that_was_saved_there(tmp_path: Path) -> None:
    """On a disk whose clock is coarse, the file looks as old as the one that it has replaced."""
    for steps in ((1, 2), (2,), (2, 3)):
        saver = launch(tmp_path)
        for step in steps:
            path = tmp_path / f"ba{step}.pt"
            path.write_text(f"state {step}")
            os.utime(path, ns=(1, 1))
            saver.enqueue(path, step)
            saver.seal(step)
    assert names(saver) == ["ba2.pt", "ba3.pt"]
    assert [each.name for each in saver.noted()] == ["step-3", "step-2"]


def test_another_run_in_the_folder_never_loses_anything(tmp_path: Path) -> None:
    saver = launch(tmp_path)
    for step in (1, 2):
        save(saver, step)
    for is_restart in (False, True):
        saver = launch(tmp_path, continues=is_restart)
        for step in range(10, 14):
            save(saver, step + 10 * is_restart)
    assert names(saver) == ["ba1.pt", "ba2.pt", "ba22.pt", "ba23.pt"]


def test_other_ranks_and_kinds_are_left_alone(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [{"rank": 1, "world_size": 2}, {"kind": "weights"}]
    for options in others:
        save(launch(tmp_path, **options), 1, f"{next(iter(options))}-{{step}}.pt")
    saver = launch(tmp_path)
    for step in (1, 2, 3):
        save(saver, step)
    assert names(saver) == ["ba2.pt", "ba3.pt", "kind-1.pt", "rank-1.pt"]


def test_a_note_that_cannot_be_written_or_read_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    saver = launch(tmp_path)
    save(saver, 1)
    (note,) = tmp_path.glob(".ckpt-async/sealed/*/rank-00000/*")
    note.write_bytes(b"{")
    saver = launch(tmp_path)
    assert "manifest_unreadable" in caplog.text
    monkeypatch.setattr(sealed, "put", full)
    for step in (2, 3, 4):
        save(saver, step)
    assert "not_noted name=step-2" in caplog.text
    assert names(saver) == ["ba1.pt", "ba3.pt", "ba4.pt"]


def test_a_symlink_that_cannot_be_moved_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is durable. What the symlink still points to must not be pruned."""
    saver = launch(tmp_path, latest_filename="links/latest", num_checkpoints_to_keep=1)
    save(saver, 1)
    assert (tmp_path / "links/latest").read_text() == "state 1"

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    with monkeypatch.context() as patched:
        patched.setattr("ckpt_async.saver.local_only.point_symlink", refuse)
        save(saver, 2)
    assert "local_latest_skipped" in caplog.text
    assert saver.is_committed(2)
    assert (tmp_path / "links/latest").read_text() == "state 1"
    save(saver, 3)
    assert names(saver) == ["ba3.pt"]


def test_a_file_in_place_of_the_symlink_fails_no_save_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").write_text("mine")
    saver = launch(tmp_path)
    for step in (1, 2, 3):
        save(saver, step)
    assert "local_latest_skipped" in caplog.text
    assert names(saver) == ["ba2.pt", "ba3.pt"]
    assert (tmp_path / "latest").read_text() == "mine"


def test_a_symlink_that_would_lead_out_of_the_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidNameError):
        LocalOnly(tmp_path / "local", latest_filename="../latest")
    assert list(tmp_path.iterdir()) == []


class KillError(BaseException):
    """Nothing of the process runs after this."""


def test_killed_at_any_moment_the_newest_stays_and_nothing_piles_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 0

    def kill_at(place: Any, name: str) -> None:
        call = getattr(place, name)

        def countdown(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KillError
            return call(*arguments, **options)

        monkeypatch.setattr(place, name, countdown)

    for name in ("unlink", "rename", "replace", "mkdir", "fsync", "rmdir"):
        kill_at(os, name)
    num_kills, done = 0, 0
    for moment in range(1, 200):
        left = 10**9
        saver = launch(tmp_path)
        link = tmp_path / "latest"
        newest = int(link.readlink().name) if link.is_symlink() else 0
        assert newest >= done, "what was sealed is lost"
        left = moment
        try:
            for step in range(newest + 1, newest + 4):
                for part in "ab":  # two files, so that a removal can be cut short
                    path = tmp_path / f"{step}" / f"{part}.pt"
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(f"state {step}")
                    saver.enqueue(path, step)
                saver.seal(step)
                done = step
        except KillError:
            num_kills += 1
        assert not link.is_symlink() or link.resolve(strict=True)
    assert num_kills > 30
    left_over = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("[0-9]*/*.pt")}
    assert left_over == {f"{step}/{part}.pt" for step in (done - 1, done) for part in "ab"}


def test_another_run_in_the_folder_keeps_its_checkpoints(tmp_path: Path) -> None:
    """A run that goes on from another one's weights must not prune them."""
    more = {"num_checkpoints_to_keep": -1, "remote": None, "save_interval": "1ba"}
    with CheckpointSaver(tmp_path, run_name="pretrain", filename="pre-ba{batch}.pt", **more) as saver:
        for batch in (1, 2):
            saver.step({"a": batch}, batch)
    more |= {"num_checkpoints_to_keep": 1, "latest_filename": "latest-ft.pt", "resume_from": 2}
    with CheckpointSaver(tmp_path, run_name="finetune", filename="ft-ba{batch}.pt", **more) as saver:
        for batch in (3, 4):
            saver.step({"a": batch}, batch)
    assert sorted(path.name for path in tmp_path.glob("*-ba*.pt")) == [
        "ft-ba4.pt",
        "pre-ba1.pt",
        "pre-ba2.pt",
    ]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """The error named a file below it that no user knows."""
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="file' is not a folder"):
        CheckpointSaver(tmp_path / "file", None)


def test_a_latest_that_points_to_nothing_is_no_fresh_start(tmp_path: Path) -> None:
    more = {"remote": None, "save_interval": "1ba", "num_checkpoints_to_keep": -1, "overwrite": True}
    with CheckpointSaver(tmp_path, **more) as saver:
        assert saver.load_latest() is None
        for batch in (1, 2):
            saver.step({"a": batch}, batch)
    (tmp_path / "ep0-ba2-rank0.pt").unlink()
    with CheckpointSaver(tmp_path, **more) as saver, pytest.raises(NoUsableCheckpointError, match="is gone"):
        saver.load_latest()
