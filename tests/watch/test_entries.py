"""What the watcher remembers of checkpoints, and what it deletes of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_async.formats import Identity, Tree
from ckpt_async.watch import entries as module
from ckpt_async.watch.disk import identity_of
from ckpt_async.watch.entries import Entries, Entry, State, remove_files


def entry(number: int, names: Sequence[str], folder: Path, mark: str = "") -> Entry:
    """Return an entry of these files, which are made."""
    path = f"step-{number}"
    (folder / path).mkdir(parents=True)
    files: dict[str, Identity] = {}
    for name in names:
        (folder / path / name).write_bytes(b"x")
        files[f"{path}/{name}"] = identity_of((folder / path / name).lstat())
    shards = {each: each.removeprefix(f"{path}/") for each in files}
    return Entry(number, "dcp", path, number, path, files, shards, mark and f"{path}/{mark}")


def left(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))


def test_the_mark_is_deleted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the watcher is killed on the way, nobody takes the rest for a checkpoint."""
    known = entry(1, ["a", "m", "z"], tmp_path, mark="m")
    unlink, deleted = Path.unlink, list[str]()

    def once(path: Path, missing_ok: bool = False) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(path.name)
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", once)
        with pytest.raises(KeyboardInterrupt):
            remove_files(tmp_path, known)
    assert left(tmp_path) == ["step-1", "step-1/a", "step-1/z"]
    remove_files(tmp_path, known)
    assert left(tmp_path) == []


def test_what_was_written_anew_is_not_deleted(tmp_path: Path) -> None:
    known = entry(1, ["a", "m"], tmp_path, mark="m")
    (tmp_path / "step-1/a").write_bytes(b"of the next save")
    (tmp_path / "step-1/b").write_bytes(b"of somebody else")
    remove_files(tmp_path, known)
    assert left(tmp_path) == ["step-1", "step-1/a", "step-1/b"]


def test_of_what_has_left_the_folder_only_the_newest_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_GONE", 2)
    known = Entries(tmp_path / "folder", tmp_path / "state", "s3://bucket/run")
    known.load()
    for number in range(1, 7):
        made = entry(number, ["a"], tmp_path / "folder")
        known.put(replace(made, state=State.HANDED if number == 1 else State.COMMITTED))
    here = known.all[2].files
    known.forget_gone(Tree(here, lambda *_: b""))
    assert sorted(known.all) == [1, 2, 5, 6], "undecided, still here, and the two newest"
    again = Entries(tmp_path / "folder", tmp_path / "state", "s3://bucket/run")
    again.load()
    assert sorted(again.all) == [1, 2, 5, 6]
