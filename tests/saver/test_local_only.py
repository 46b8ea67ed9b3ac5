"""`remote=None`: what is durable on one node, and what retention deletes there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

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
