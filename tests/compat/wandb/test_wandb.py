"""The recipe of docs/events.md, offline: every committed checkpoint becomes an artifact that refers to its files."""

import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from ckpt_async import Uploader

ROOT = Path(__file__).resolve().parents[3]
BLOCK_BYTES = 32 << 10


def test_each_checkpoint_becomes_an_artifact_that_refers_to_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint gets an offline run, which `wandb sync` would upload."""
    [text] = re.findall(
        r'```python title="log_artifact.py"\n(.*?)```', (ROOT / "docs/events.md").read_text(), re.DOTALL
    )
    script = tmp_path / "log_artifact.py"
    script.write_text(text)
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_PROJECT": "p",
        "MODEL_NAME": "model",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    told: dict[int | None, str] = {}  # in the order of the commits, which need not be that of the steps
    with Uploader(
        tmp_path / "folder",
        f"file://{tmp_path}/run",
        event_exec=f"{sys.executable} {script}",
        event_grace_s=120.0,
        on_event=lambda event: told.update({event.step: event.id}),
    ) as uploader:
        for step in (1, 2):
            shard = uploader.folder / f"{step}.pt"
            shard.write_bytes(b"x" * step)
            uploader.enqueue(shard, step)
            uploader.seal(step, metrics={"loss": step / 2})
    logged = {}
    for path in tmp_path.glob("wandb/offline-run-*/*.wandb"):
        found = {each.WhichOneof("record_type"): each for each in records(path.read_bytes())}
        logged[found["run"].run.run_id] = found["artifact"].artifact
    assert logged.keys() == {*told.values()}
    assert told.keys() == {1, 2}
    for step, id_ in told.items():
        artifact: Any = logged[id_]
        assert (artifact.name, artifact.type, {*artifact.aliases}) == (
            "model",
            "model",
            {"latest", f"step-{step}"},
        )
        assert json.loads(artifact.metadata) == {"step": step, "loss": step / 2}
        [content] = artifact.manifest.contents
        assert (content.ref, content.size) == (f"file://{tmp_path}/run/ckpt/step-{step}.g1/{step}.pt", step)


def records(data: bytes) -> Iterator[Record]:
    """Yield what an offline run has written: a log in LevelDB's format, after seven bytes of wandb's own."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK_BYTES - at % BLOCK_BYTES) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a complete record, or its last part
            yield Record.FromString(parts)
            parts = b""
