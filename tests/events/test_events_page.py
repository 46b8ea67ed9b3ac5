"""docs/events.md must match the code: its JSON, its snippets and its recipes."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_async import Event, Uploader
from ckpt_async.core.refusal import Refusal
from ckpt_async.events import KINDS
from ckpt_async.events.command import _FIELDS
from tests.events.receiver import receiving

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "events.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", PAGE, re.DOTALL)


def recipe(name: str, folder: Path) -> Path:
    script = folder / name
    [text] = re.findall(rf'```python title="{name}"\n(.*?)```', PAGE, re.DOTALL)
    script.write_text(text)
    return script


def test_the_example_is_an_event_with_exactly_these_fields() -> None:
    [example] = snippets("json")
    event = Event.from_json(example)
    assert json.loads(event.to_json()) == json.loads(example)
    assert set(json.loads(example)) == {"version", *(each.name for each in dataclasses.fields(Event))}


def test_every_kind_and_every_value_of_a_command_is_on_the_page() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [
        *("committed", "given_up", "refused", "fenced", "pruned", "damaged", "backlog")
    ]
    assert set(KINDS) == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert all(f"`{{{each}}}`" in PAGE for each in _FIELDS)
    assert re.findall(r"^- `(\w+)`: ", PAGE, re.MULTILINE) == [each.value for each in Refusal]


def test_the_first_examples_run_one_after_the_other(tmp_path: Path) -> None:
    told = []
    for text in snippets("python")[:2]:
        here = text.replace("file:///tmp/run-e", f"file://{tmp_path}/run")
        ran = subprocess.run(
            [sys.executable, "-c", here], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=_env()
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        told.append(ran.stdout)
    assert told == [f"committed 100 file://{tmp_path}/run/ckpt/step-100.g1/\n", ""]
    assert (tmp_path / "told-200").exists()


def test_the_evaluation_runs_for_every_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = f"{sys.executable} {recipe('evaluate.py', tmp_path)} {{generation}} {{step}} {{run}}"
    with Uploader(tmp_path / "f", f"file://{tmp_path}/run", event_exec=command, event_grace_s=60) as uploader:
        for step in (1, 2):
            shard = uploader.folder / f"{step}.pt"
            shard.write_bytes(b"x" * step)
            uploader.enqueue(shard, step)
            uploader.seal(step)
    found = {path.name: path.read_text() for path in (tmp_path / "evaluations").glob("*.txt")}
    assert found == {"step-1.txt": "1 bytes\n", "step-2.txt": "2 bytes\n"}


def test_slack_is_told_in_its_form(tmp_path: Path) -> None:
    event = Event("fenced", "1", "s3://b/run", "s3://b/run", 1, None, "", 0.0, {"by_generation": 2})
    with receiving() as slack:
        env = _env() | {"CKPT_ASYNC_EVENT_JSON": event.to_json(), "SLACK_WEBHOOK_URL": slack.url}
        subprocess.run([sys.executable, recipe("tell_slack.py", tmp_path)], env=env, check=True, timeout=60)
    assert slack.bodies == [{"text": 'fenced of s3://b/run: {"by_generation": 2}'}]


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
