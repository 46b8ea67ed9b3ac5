"""Copying a run from one store to another."""

from pathlib import Path

import pytest

from ckpt_async import restore
from ckpt_async.errors import CapabilityError, DestinationError, ObjectNotFoundError
from ckpt_async.restore import run_copy
from ckpt_async.restore.checkpoint import RemoteFile
from ckpt_async.restore.run_copy import batches, copy
from tests.small_run import save


def contents(remote: str, place: Path, step: int | None = None, kind: str | None = None) -> dict[str, bytes]:
    found = restore.find(remote, step=step, kind=kind)
    assert found is not None
    report = restore.fetch(found, place)
    return {name: path.read_bytes() for name, path in report.paths.items()}


@pytest.fixture
def run_there(tmp_path: Path) -> str:
    remote = f"file://{tmp_path}/source"
    save(tmp_path / "first", remote, 1, 2)
    save(tmp_path / "second", remote, 3)  # another launch
    save(tmp_path / "third", remote, 7, kind="weights")
    return remote


def test_all_of_a_run_is_copied_to_another_kind_of_store(run_there: str, s3_url: str, tmp_path: Path) -> None:
    seen: list[int] = []
    report = copy(run_there, f"{s3_url}/there", on_copied=lambda each: seen.append(each.step))
    assert seen == [each.step for each in report.copied] == [1, 2, 3, 7]
    for step, kind in ((1, None), (2, None), (3, None), (7, "weights")):
        places = (tmp_path / "here" / str(step), tmp_path / "there" / str(step))
        assert contents(run_there, places[0], step, kind) == contents(
            f"{s3_url}/there", places[1], step, kind
        )
    newest = restore.find(f"{s3_url}/there")
    assert newest is not None
    assert (newest.id, newest.name) == (restore.find(run_there).id, "step-3")  # type: ignore[union-attr]
    save(tmp_path / "goes on", f"{s3_url}/there", 4)
    goes_on = restore.find(f"{s3_url}/there")
    assert goes_on is not None
    assert (goes_on.step, goes_on.generation) == (4, newest.generation + 1)


def test_only_some_steps_are_copied(run_there: str, tmp_path: Path) -> None:
    there = f"file://{tmp_path}/there"
    assert [each.step for each in copy(run_there, there, steps=[2]).copied] == [2]
    assert restore.find(there, step=1) is None
    with pytest.raises(ObjectNotFoundError, match="no committed checkpoint of step 9"):
        copy(run_there, f"file://{tmp_path}/other", steps=[9])
    assert not (tmp_path / "other").exists()


def test_nothing_is_shown_before_all_is_there_and_an_interrupted_copy_goes_on(
    run_there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = f"file://{tmp_path}/there"

    def interrupted(checkpoint: restore.Checkpoint) -> None:
        if checkpoint.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(run_there, there, on_copied=interrupted)
    with pytest.raises(CapabilityError, match="unfinished copy"):
        restore.find(there)  # no fresh start
    with pytest.raises(CapabilityError, match="unfinished copy"):
        save(tmp_path / "new", there, 1)
    fetched: list[str] = []
    once = run_copy.fetch
    monkeypatch.setattr(
        run_copy,
        "fetch",
        lambda found, *where, **more: fetched.append(found.name) or once(found, *where, **more),
    )
    copy(run_there, there)
    assert fetched == ["step-3", "step-7"]
    assert contents(there, tmp_path / "out") == contents(run_there, tmp_path / "in")


@pytest.mark.parametrize("other", ["file", "run", "unfinished copy"])
def test_what_else_is_there_is_not_mixed_with_a_copy(
    run_there: str, tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    if other == "file":
        there.mkdir()
        (there / "notes.txt").write_text("mine")
    elif other == "run":
        save(tmp_path / "fourth", f"file://{there}", 1)
    else:
        save(tmp_path / "fourth", f"file://{tmp_path}/elsewhere", 1)

        def killed(_: restore.Checkpoint) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            copy(f"file://{tmp_path}/elsewhere", f"file://{there}", on_copied=killed)
    with pytest.raises(
        DestinationError, match="is not empty" if other != "unfinished copy" else "elsewhere, not of"
    ):
        copy(run_there, f"file://{there}")


def test_a_damaged_checkpoint_is_skipped_and_named(run_there: str, tmp_path: Path) -> None:
    (damaged,) = (tmp_path / "source").rglob("ckpt/step-2.g*/2-a")
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    report = copy(run_there, f"file://{tmp_path}/there")
    assert [each.step for each in report.copied] == [1, 3, 7]
    assert [each.step for each in report.skipped] == [2]


def test_batches_bound_what_is_on_the_disk() -> None:
    sizes = [10, 3 << 30, 1, *[1] * 70]
    cut = list(batches(RemoteFile(str(n), str(n), size, None) for n, size in enumerate(sizes)))
    assert [each.size_bytes for batch in cut for each in batch] == sizes
    assert [len(batch) for batch in cut] == [1, 1, 64, 7]
