"""The lock by which one watcher works on a folder."""

import errno
import os
from pathlib import Path

import pytest

from ckpt_async.watch.lock import FolderLock


@pytest.fixture
def lock(tmp_path: Path) -> FolderLock:
    return FolderLock(tmp_path / "watch.lock", tmp_path / "otherwise.lock")


def test_a_full_disk_does_not_keep_a_watcher_from_its_lock(
    lock: FolderLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "watch.lock").write_text("of a dead watcher\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        patch.setattr(os, "truncate", full)
        patch.setattr(os, "ftruncate", full)
        assert lock.try_take()
    lock.release()
    assert lock.try_take()


def test_an_interrupted_take_leaves_the_lock_free(lock: FolderLock, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lock.try_take()
    lock.release()
    assert lock.try_take()
