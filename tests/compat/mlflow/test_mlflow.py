"""The recipe of docs/events.md: every committed checkpoint becomes a version of a registered model, once."""

import contextlib
import os
import re
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ckpt_async import Uploader
from ckpt_async.core.observe import Notice
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal

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
    with contextlib.closing(Journal(Folder(tmp_path / "folder"), 0)) as journal:  # as if nobody had noted it
        told = [Notice(f"again-{each.id}", each.sink, each.body) for each in journal.outbox().newest(10)]
        assert len(told) == 2
        journal.outbox().put(told, time.time())
    with Uploader(
        tmp_path / "folder",
        f"file://{tmp_path}/run",
        event_exec=f"{sys.executable} {script}",
        event_grace_s=120.0,
    ):
        pass
    assert len(client.search_model_versions("name = 'model'")) == 2
