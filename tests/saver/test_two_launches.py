"""Without a remote, two launches must not save to one folder at the same time."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import torch as ckpt
from ckpt_async.errors import CheckpointConflictError, FolderInUseError
from ckpt_async.local import sealed
from ckpt_async.saver import CheckpointSaver, local_only

OPTIONS: dict[str, Any] = {"remote": None, "save_interval": "1ba", "num_checkpoints_to_keep": 2}
OTHER = """
import sys
from ckpt_async.saver import CheckpointSaver
saver = CheckpointSaver(sys.argv[1], None, save_interval="1ba", num_checkpoints_to_keep=2, blocking=True)
state = saver.load_latest()
saver.step({"who": "other"}, 1 if state is None else 100)
print("saved", flush=True)
while (told := input()).isdecimal():
    saver.step({"who": "other"}, int(told))
    print("saved", flush=True)
if told == "close":
    saver.close()
    print("closed", flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_only, "LOCK_WAIT_S", 0.0)


@contextlib.contextmanager
def other_launch(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OTHER, str(folder)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "saved\n"
            yield other
        finally:
            other.kill()


def tell(other: subprocess.Popen[str], what: str, answer: str) -> None:
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write(f"{what}\n")
    other.stdin.flush()
    assert other.stdout.readline() == f"{answer}\n"


def files(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.glob("ep*.pt")}


@pytest.mark.fault("F100")
def test_the_second_launch_is_refused_and_changes_nothing_until_the_first_is_killed(tmp_path: Path) -> None:
    with other_launch(tmp_path) as other:
        before = files(tmp_path)
        assert before
        with CheckpointSaver(tmp_path, **OPTIONS) as saver:
            assert saver.load_latest() == {"who": "other"}  # loading is no conflict
            for _ in range(2):
                with pytest.raises(FolderInUseError, match=f"rank 0 .* in use by process {other.pid}"):
                    saver.step({"who": "me"}, 2)
            assert files(tmp_path) == before
            other.kill()
            other.wait()
            saver.step({"who": "me"}, 2)
    assert sorted(files(tmp_path)) == ["ep0-ba1-rank0.pt", "ep0-ba2-rank0.pt"]


@pytest.mark.fault("F106")
def test_beside_a_launch_without_the_remote_none_with_it_begins(tmp_path: Path) -> None:
    """Both replaced each other's files."""
    folder, remote = tmp_path / "local", f"file://{tmp_path}/remote"
    with other_launch(folder) as other:
        before = files(folder)
        with pytest.raises(FolderInUseError, match=f"rank 0 .* in use by process {other.pid}"):
            CheckpointSaver(folder, remote, save_interval="1ba", overwrite=True)
        tell(other, "2", "saved")
        assert before.items() <= files(folder).items()
        tell(other, "close", "closed")
        with CheckpointSaver(folder, remote, save_interval="1ba") as saver:
            saver.step({"who": "me"}, 3)
    assert sorted(files(folder)) == ["ep0-ba1-rank0.pt", "ep0-ba2-rank0.pt", "ep0-ba3-rank0.pt"]


def test_a_save_of_an_earlier_saver_of_this_process_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a notebook, the next saver started from scratch or went on from an older checkpoint."""
    may_write, dump = threading.Event(), ckpt.dump

    def dump_later(*args: Any, **options: Any) -> None:
        may_write.wait()
        dump(*args, **options)

    class OnceWaiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("waits_for_predecessor"):
                may_write.set()

    monkeypatch.setattr(ckpt, "dump", dump_later)
    first = CheckpointSaver(tmp_path, **OPTIONS)
    first.step({"who": "first"}, 1)
    with CheckpointSaver(tmp_path, **OPTIONS) as second:
        assert second.load_latest(wait_s=0.01) is None
        assert "previous_launch_unfinished" in caplog.text
        monkeypatch.setattr(local_only.logger, "handlers", [OnceWaiting()])
        caplog.set_level(logging.INFO, local_only.logger.name)
        assert second.load_latest(wait_s=60) == {"who": "first"}
        second.step({"who": "second"}, 2)
    first.close()


def test_a_closed_saver_lets_other_processes_save(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path, **OPTIONS) as saver:
        saver.step({"who": "me"}, 1)
    with other_launch(tmp_path) as other:
        tell(other, "close", "closed")
        with CheckpointSaver(tmp_path, **OPTIONS) as saver:
            saver.load_latest()
            saver.step({"who": "me"}, 101)
    assert sorted(files(tmp_path)) == ["ep0-ba100-rank0.pt", "ep0-ba101-rank0.pt"]


@pytest.mark.fault("F100")
def test_a_launch_that_looked_before_the_first_one_ended_replaces_nothing_of_what_that_saved(
    tmp_path: Path,
) -> None:
    """A requeued job got the lock once the first one closed, and replaced its newest checkpoints without an error."""
    with contextlib.ExitStack() as opened:
        other = opened.enter_context(other_launch(tmp_path))
        fresh, resuming, loading, restoring = (
            opened.enter_context(CheckpointSaver(tmp_path, **OPTIONS, **more))
            for more in ({"overwrite": True}, {"resume_from": 1}, {}, {})
        )
        assert loading.load_latest() == {"who": "other"}
        restoring.load_state_dict({"timestamp": None, "saved_checkpoints": []})
        for batch in ("2", "3"):
            tell(other, batch, "saved")
        tell(other, "close", "closed")
        before, latest = files(tmp_path), os.readlink(tmp_path / "latest-rank0.pt")
        assert sorted(before) == ["ep0-ba2-rank0.pt", "ep0-ba3-rank0.pt"]
        for saver in (fresh, resuming, loading, restoring, loading):
            with pytest.raises(CheckpointConflictError, match=r"ep0-ba2, ep0-ba3 since .* restart this"):
                saver.step({"who": "me"}, 2)
    assert (files(tmp_path), os.readlink(tmp_path / "latest-rank0.pt")) == (before, latest)
    with CheckpointSaver(tmp_path, **OPTIONS) as saver:
        assert saver.load_latest() == {"who": "other"}
        saver.step({"who": "me"}, 4)
    assert sorted(files(tmp_path)) == ["ep0-ba3-rank0.pt", "ep0-ba4-rank0.pt"]


def test_a_launch_that_loads_again_goes_on(tmp_path: Path) -> None:
    with other_launch(tmp_path) as other, CheckpointSaver(tmp_path, **OPTIONS) as saver:
        tell(other, "2", "saved")
        saver.load_latest()
        tell(other, "3", "saved")
        tell(other, "close", "closed")
        with pytest.raises(CheckpointConflictError, match="saved ep0-ba3 since"):
            saver.step({"who": "me"}, 3)
        assert saver.load_latest() == {"who": "other"}
        saver.step({"who": "me"}, 4)
    assert sorted(files(tmp_path)) == ["ep0-ba3-rank0.pt", "ep0-ba4-rank0.pt"]


def test_savers_of_one_process_go_on_from_each_other(tmp_path: Path) -> None:
    """Also if the second one was created before the first one saved."""
    options = OPTIONS | {"blocking": True}
    first, second = (CheckpointSaver(tmp_path, **options) for _ in range(2))
    for batch in (1, 2):
        first.step({"who": "first"}, batch)
    first.close()
    assert second.load_latest() == {"who": "first"}
    second.step({"who": "second"}, 3)
    third = CheckpointSaver(tmp_path, **options, resume_from=2)
    second.step({"who": "second"}, 4)
    third.step({"who": "third"}, 3)
    second.close()
    third.close()
    with CheckpointSaver(tmp_path, **OPTIONS) as saver:
        assert saver.load_latest() == {"who": "third"}


def test_other_runs_ranks_and_kinds_in_the_folder_are_not_locked(tmp_path: Path) -> None:
    with other_launch(tmp_path):
        others: list[dict[str, Any]] = [
            {"filename": "mine-ba{batch}.pt", "latest_filename": "mine"},
            {"rank": 1, "world_size": 2},
            {"kind": "weights", "latest_filename": "weights"},
        ]
        for more in others:
            with CheckpointSaver(tmp_path, **OPTIONS | more) as saver:
                saver.step({"who": "me"}, 1)


def test_beside_a_saver_of_this_process_without_a_remote_one_with_a_remote_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, nobody has closed the one before: the cell waited for 15 s."""
    monkeypatch.setattr(local_only, "LOCK_WAIT_S", 15.0)
    folder, remote = tmp_path / "local", f"file://{tmp_path}/remote"
    with CheckpointSaver(folder, None, save_interval="1ba", saves_last=False) as before:
        before.step({"batch": 1}, 1)
        began_s = time.monotonic()
        with pytest.raises(FolderInUseError, match=r"a saver of this process .* `close` first"):
            CheckpointSaver(folder, remote)
        assert time.monotonic() - began_s < 10
    CheckpointSaver(folder, remote).close()


def test_what_a_saver_of_this_process_notes_meanwhile_is_no_other_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a remote read the notes, then the file was noted, and then it was not unfinished any more either."""
    folder, put = tmp_path / "local", sealed.put
    written, looked, noted = (threading.Event() for _ in range(3))

    def put_late(*args: Any) -> None:
        written.set()
        assert looked.wait(30)
        put(*args)

    def then_noted(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(*args: Any) -> Any:
            found = read(*args)
            looked.set()
            assert noted.wait(30)
            return found

        return reads

    with CheckpointSaver(folder, None, save_interval="1ba", saves_last=False) as before:
        monkeypatch.setattr(sealed, "put", put_late)
        monkeypatch.setattr(sealed, "has_sealed", lambda *_: noted.set())
        before.step({"batch": 1}, 1)
        assert written.wait(30)
        assert list(files(folder)) == ["ep0-ba1-rank0.pt"]
        monkeypatch.setattr(sealed, "read", then_noted(sealed.read))
        monkeypatch.setattr(sealed, "unfinished_file", then_noted(sealed.unfinished_file))
        with pytest.raises(FolderInUseError):
            CheckpointSaver(folder, f"file://{tmp_path}/remote")


def test_savers_of_one_process_share_the_lock_until_all_are_closed(tmp_path: Path) -> None:
    """In a notebook, nobody has closed the one before."""
    first, second = (CheckpointSaver(tmp_path, **OPTIONS, overwrite=True) for _ in range(2))
    first.step({"who": "first"}, 1)
    second.step({"who": "second"}, 2)
    first.close()
    impatient = f"import ckpt_async.saver.local_only as it; it.LOCK_WAIT_S = 0\n{OTHER}"
    command = [sys.executable, "-c", impatient, str(tmp_path)]
    refused = subprocess.run(command, text=True, input="\n", capture_output=True, check=False)
    assert f"FolderInUseError: rank 0 of folder {str(tmp_path)!r} is in use by process {os.getpid()}" in (
        refused.stderr
    )
    second.close()
    with other_launch(tmp_path):
        pass


def test_where_no_lock_file_can_be_created_checkpoints_are_saved_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk, for example."""
    with CheckpointSaver(tmp_path, **OPTIONS) as saver:
        (run,) = (tmp_path / ".ckpt-async" / "sealed").iterdir()
        (run / "lock-00000").mkdir()
        saver.step({"who": "me"}, 1)
    assert "not_locked" in caplog.text
    assert list(files(tmp_path)) == ["ep0-ba1-rank0.pt"]
