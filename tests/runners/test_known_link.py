"""A new launch begins with the number of connections that the last one noted, instead of searching from scratch."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.runners import host
from ckpt_async.transfer import link
from ckpt_async.transfer.budgets import Budgets


def test_a_start_begins_with_the_connections_that_the_last_one_has_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    class Seen(Budgets):
        def __init__(self, *values: Any, **options: Any) -> None:
            super().__init__(*values, **options)
            limits.append(self.bulk.concurrency.limit)

    monkeypatch.setattr(host, "Budgets", Seen)
    folder, remote = tmp_path / "folder", f"file://{tmp_path / 'remote'}"
    for _ in range(2):
        with Uploader(folder, remote, rank=0, world_size=1, num_concurrent_uploads=8) as uploader:
            path = folder / f"{len(limits)}.bin"
            path.write_bytes(b"x")
            uploader.enqueue(path, step=len(limits))
            uploader.seal(len(limits))
            uploader.wait(len(limits), timeout_s=60)
        noted = link.KnownLink(24, 5e6)
        link.note_known(folder / ".ckpt-async" / "link-up.json", remote, noted, time.time())
    assert limits == [8, 24]


def test_what_is_no_file_is_nothing_of_use_and_nobody_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "link-up.json"
    os.mkfifo(path)
    assert link.recall_known(path, "file:///remote", 1.0) is None
    path.unlink()
    path.mkdir()
    assert link.recall_known(path, "file:///remote", 1.0) is None
