"""What can go wrong on this node while a shard is being uploaded: its disk does not return it, or its folder moves."""

import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.transfer import patience
from tests.stores.misbehaving import Meddled, Slow
from tests.trainer.uploads import Open, decisions, save, wait_until

FIRST = CheckpointId(1, 1)


def test_a_shard_that_the_disk_does_not_return_is_no_outage_of_the_store(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "QUIET_OUTAGE_S", 0.0)
    num_failed, is_broken = 0, True

    def fails(read: Any) -> Any:
        def broken(*args: Any) -> Any:
            nonlocal num_failed
            if not is_broken:
                return read(*args)
            num_failed += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return broken

    broken = {"pread": fails(os.pread), "preadv": fails(os.preadv)}
    monkeypatch.setattr("ckpt_async.transfer.source.os", SimpleNamespace(**vars(os) | broken))
    store = Meddled()
    with opened(store) as uploader:
        save(uploader, 1, "a.pt")
        wait_until(lambda: num_failed > 3, uploader)
        is_broken = False
        uploader.wait(1, timeout_s=10)
    assert decisions(store) == {FIRST: "commit"}
    told = [each.getMessage() for each in caplog.records if "a.pt" in each.getMessage()]
    assert len(told) == 1
    assert f"{tmp_path}/folder" in told[0]
    assert "disk" in told[0]
    assert "store_failing" not in caplog.text


@pytest.mark.fault("F43")
def test_links_of_a_folder_moved_during_an_upload_are_removed_by_the_next_launch(
    opened: Open, tmp_path: Path
) -> None:
    """They took their space until the next commit, or for ever if the checkpoint was kept."""
    store, folder, moved = Slow(), tmp_path / "folder", tmp_path / "moved"
    links = moved / ".ckpt-async" / keys.spool_checkpoint(FIRST, 0)
    with opened(store, on_error="warn") as uploader:
        save(uploader, 1, "a.pt")
        wait_until(store.has_come.is_set, uploader)
        folder.rename(moved)
        store.go.set()
        uploader.wait(1, timeout_s=10)
    assert list(links.iterdir())
    with opened(Meddled(store.bucket), moved) as uploader:
        wait_until(lambda: not links.exists(), uploader)
    assert decisions(store) == {FIRST: "commit"}


@pytest.mark.fault("F158")
def test_a_file_system_without_symlinks_is_told_once(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The move was tried again every 30 s, for ever."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    store = Meddled()
    with opened(store, tmp_path / "folder") as uploader:
        for step in (1, 2, 3):
            save(uploader, step, "a.pt")
            uploader.wait(step, timeout_s=10)
    assert set(decisions(store).values()) == {"commit"}
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(told) == 1, told
    assert str(tmp_path / "folder/latest-rank0") in told[0]
