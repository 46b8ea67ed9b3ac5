"""What a folder's repeated looks tell besides its journals."""

import contextlib
import time
from pathlib import Path

import pytest

from ckpt_async.core.model import CheckpointId, Enqueued, FileIdentity, Opened, RemoteAddress, Shard
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.monitor.report import CLOSE_S, FolderWatch, folder_json

ID = CheckpointId(1, 100)


def test_speeds_do_not_depend_on_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard("a", "step-100/a", FileIdentity(1, 1, 1 << 20, 1), True)
    with contextlib.closing(Journal(Folder(tmp_path), 0)) as journal:
        journal.append([Opened(1, 1, RemoteAddress("s3://bucket/run")), Enqueued(ID, "step-100", shard)])
        watch, wall = FolderWatch(tmp_path), time.time
        watch.look()
        time.sleep(2 * CLOSE_S)
        journal.note_progress([(ID, "a", 1 << 19)])
        monkeypatch.setattr(time, "time", lambda: wall() - 3600.0)
        found = watch.look()
        assert 0 < found[""].bytes_per_s[ID] <= 1 << 19
        told = folder_json(str(tmp_path), found, 0.0)
        assert told["eta_s"] == round((1 << 19) / found[""].bytes_per_s[ID], 1), "half of it is there"
