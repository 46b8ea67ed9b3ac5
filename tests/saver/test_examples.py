"""The first example of docs/saver.md works as written, and so does that of the class, given a model and a loader. Only
the remote is replaced.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async import restore
from ckpt_async.saver import CheckpointSaver

PAGE = Path(__file__).resolve().parents[2] / "docs/saver.md"


@pytest.fixture
def run_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(text: str, **given: Any) -> list[str]:
        """The names of the checkpoints that are in the store in the end, the newest of them first."""
        here = re.sub(r"(file:///tmp|s3://bucket)/", f"file://{tmp_path}/store/", text)
        assert here != text
        exec(here, dict(given))
        found: list[str] = []
        for step in range(3000, 0, -500):
            checkpoint = restore.find(f"file://{tmp_path}/store/llm-7b", step=step)
            found += [checkpoint.name] if checkpoint is not None else []
        return found

    return run


def test_the_first_example_of_the_page_saves_what_it_says(run_example: Any, tmp_path: Path) -> None:
    example = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    assert run_example(example) == ["ep2-ba2000", "ep1-ba1500", "ep1-ba1000", "ep0-ba500"]
    kept = sorted(each.name for each in (tmp_path / "llm-7b/checkpoints").glob("ep*"))
    assert kept == ["ep1-ba1000-rank0.pt", "ep1-ba1500-rank0.pt", "ep2-ba2000-rank0.pt"]


def test_the_example_of_the_class_saves_what_it_says(run_example: Any) -> None:
    text = inspect.getdoc(CheckpointSaver) or ""
    example = inspect.cleandoc("\n" + re.split(r"\n\n", text)[1])
    trained: list[int] = []
    saved = run_example(
        example,
        CheckpointSaver=CheckpointSaver,
        loader=range(1200),
        train=trained.append,
        model=torch.nn.Linear(2, 2),
    )
    assert len(trained) == 1200
    assert saved == ["ep0-ba1000", "ep0-ba500"]
