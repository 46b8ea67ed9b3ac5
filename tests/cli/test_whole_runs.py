"""`copy` and `delete` on the command line."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import cli, restore
from ckpt_async.errors import CkptAsyncError
from tests.small_run import save


@pytest.fixture
def remote(tmp_path: Path) -> str:
    remote = f"file://{tmp_path}/runs/a"
    save(tmp_path / "first", remote, 1, 2)
    save(tmp_path / "second", remote, 7, kind="weights")
    return remote


def long_ago(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 3600,) * 2)


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_copy_says_what_it_copies(remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = f"file://{tmp_path}/there"
    assert cli.main(["copy", remote, there, "--json"]) == 0
    told = printed(capsys)
    assert [each["step"] for each in told["copied"]] == [1, 2, 7]
    assert cli.main(["verify", there]) == 0
    assert cli.main(["copy", remote, there]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["copy", remote, f"file://{tmp_path}/other", "--step", "2"]) == 0
    assert cli.main(["copy", remote, f"file://{tmp_path}/none", "--step", "9"]) == 3


def test_delete_prints_a_plan_and_then_leaves_only_what_is_not_ours(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs/a"
    (run / "notes.txt").write_text("mine")
    save(tmp_path / "third", f"file://{tmp_path}/runs/b", 1)
    long_ago(run)
    assert cli.main(["delete", remote, "--json"]) == 0
    told = printed(capsys)
    assert not told["is_deleted"]
    assert [[each["step"] for each in place["checkpoints"]] for place in told["places"]] == [[7], [1, 2]]
    assert restore.find(remote) is not None
    assert cli.main(["delete", remote, "--yes"]) == 0
    left = [path.name for path in run.rglob("*") if path.is_file() and path.parent.name != "tmp"]
    assert left == ["notes.txt"]
    assert restore.find(f"file://{tmp_path}/runs/b") is not None
    assert cli.main(["delete", f"file://{tmp_path}/runs/none"]) == 3


def test_delete_is_refused_while_somebody_may_be_at_work(
    remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["delete", remote, "--yes"]) == 1
    assert "somebody may be at work" in capsys.readouterr().err
    long_ago(tmp_path / "runs/a")
    assert cli.main(["pin", remote, "2"]) == 0
    assert cli.main(["delete", remote, "--yes"]) == 1
    assert "step 2 is pinned" in capsys.readouterr().err
    assert cli.main(["unpin", remote, "2"]) == 0
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    with restore.open(checkpoint):
        assert cli.main(["delete", remote, "--yes"]) == 1
    assert restore.find(remote) == checkpoint


def test_an_interrupted_deletion_is_finished_by_the_next(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_async.protocol import steps

    long_ago(tmp_path / "runs/a")
    once, calls = steps.finish_prune, []

    async def interrupted(store: Any, id_: Any) -> bool:
        calls.append(id_)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return await once(store, id_)

    monkeypatch.setattr(steps, "finish_prune", interrupted)
    assert cli.main(["delete", remote, "--yes"]) == 130
    monkeypatch.undo()
    with pytest.raises(CkptAsyncError):  # neither half a run nor a fresh start
        restore.find(remote)
    assert cli.main(["delete", remote, "--yes"]) == 0
    assert list((tmp_path / "runs/a").rglob("*.json")) == []
