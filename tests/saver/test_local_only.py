"""`remote=None`: what is durable on one node, and what retention deletes there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.errors import SealedError
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
