"""The recipe of docs/events.md: every committed checkpoint becomes a version of a registered model, once."""

import contextlib
import os
import re
import sqlite3
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ckpt_async import Uploader

ROOT = Path(__file__).resolve().parents[3]


def test_each_checkpoint_becomes_one_version_with_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of two launches are registered in MLflow's own file store; an event reported
    twice must not register twice.
    """
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MODEL_NAME", "model")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    [text] = re.findall(
        r'```python title="register.py"\n(.*?)```', (ROOT / "docs/events.md").read_text(), re.DOTALL
    )
    script = tmp_path / "register.py"
    script.write_text(text)
    for step in (1, 2):
        with Uploader(
            tmp_path / "folder",
            f"file://{tmp_path}/run",
            event_exec=f"{sys.executable} {script}",
            event_grace_s=120.0,
        ) as uploader:
            shard = uploader.folder / f"{step}.pt"
            shard.write_bytes(b"x")
            uploader.enqueue(shard, step)
            uploader.seal(step, metrics={"loss": step / 2})
    client = MlflowClient()
    found = sorted(client.search_model_versions("name = 'model'"), key=lambda each: int(each.version))
    assert [(each.tags["step"], each.tags["loss"]) for each in found] == [("1", "0.5"), ("2", "1.0")]
    assert found[0].source == f"file://{tmp_path}/run/ckpt/step-1.g1/"
    with contextlib.closing(sqlite3.connect(tmp_path / "folder/.ckpt-async/journal-00000.sqlite")) as journal:
        assert journal.execute("UPDATE outbox SET is_done = 0").rowcount == 2
        journal.commit()
    with Uploader(
        tmp_path / "folder",
        f"file://{tmp_path}/run",
        event_exec=f"{sys.executable} {script}",
        event_grace_s=120.0,
    ):
        pass
    assert len(client.search_model_versions("name = 'model'")) == 2
