"""The scripts of docs/how-to.md run as they stand, and go on when they are started again. Only the URL is replaced."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_async import restore

PAGE = Path(__file__).resolve().parents[1] / "docs/how-to.md"


class Scripts:
    """Runs the scripts of the page in an empty folder, each named by its section."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def run(self, section: str, num_ranks: int = 0, *, last: int = 300, then: str = "") -> str:
        text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        (script,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert "file:///tmp/how-to/" in script
        script = script.replace("file:///tmp/how-to/", f"file://{self._place}/store/")
        script = script.replace("range(first, 301)", f"range(first, {last + 1})")
        (self._place / "train.py").write_text(script + then)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        environment = {
            name: text for name, text in os.environ.items() if not re.match("RANK|WORLD|LOCAL", name)
        }
        done = subprocess.run(
            [sys.executable, *(torchrun if num_ranks else []), "train.py"],
            cwd=self._place,
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stdout + done.stderr
        return done.stdout + done.stderr

    def newest(self, name: str) -> int:
        found = restore.find(f"file://{self._place}/store/{name}")
        assert found is not None
        return found.step


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def test_training_with_ddp_goes_on_and_its_model_is_fine_tuned(scripts: Scripts) -> None:
    scripts.run("Train with DDP", 2, last=150)
    assert scripts.newest("ddp") == 150
    scripts.run("Train with DDP", 2, then="assert first == 151")
    assert scripts.newest("ddp") == 300
    assert "() () ()" in scripts.run("Fine-tune from a checkpoint")


def test_training_with_fsdp2_goes_on_with_another_number_of_ranks(scripts: Scripts) -> None:
    scripts.run("Train with FSDP2", 2, last=150)
    assert scripts.newest("fsdp2") == 150
    scripts.run("Train with FSDP2", 1, last=200, then="assert first == 151")
    assert scripts.newest("fsdp2") == 200


def test_files_of_my_own_code_are_handed_over_and_come_back(scripts: Scripts) -> None:
    scripts.run("Hand over files that my code writes", last=200)
    assert scripts.newest("files") == 200
    assert "resumed from step-200 ['state at step 200']" in scripts.run("Hand over files that my code writes")
    assert scripts.newest("files") == 300
