"""README.md works as written for somebody who starts in an empty folder. Only the remote is replaced."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_async import cli
from ckpt_async.cli.output import UsageError

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REMOTE = "file:///tmp/run-a"


def blocks(page: Path, kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language == kind]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield every call of `ckpt-async` in a code block of the page."""
    for block in (*blocks(page, ""), *blocks(page, "bash")):
        for call in re.findall(r"^(?:\$ )?ckpt-async (.*)$", block, re.MULTILINE):
            yield shlex.split(call, comments=True)


ALONE = [("saver.md", 1), ("saver.md", 2), ("saver.md", 3), ("restore.md", 1), ("operations.md", 0)]


@pytest.mark.parametrize(("page", "number"), ALONE)
def test_a_block_runs_alone(page: str, number: int, tmp_path: Path) -> None:
    """Whoever pastes it lacks what the blocks before have defined."""
    block = blocks(ROOT / "docs" / page, "python")[number].replace("file:///tmp", f"file://{tmp_path}/store")
    environment = {name: text for name, text in os.environ.items() if not re.match("RANK|WORLD|LOCAL", name)}
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.fault("O12")
def test_the_readme_works_as_written(tmp_path: Path) -> None:
    """The steps run in the order of the page, each in a process of its own, without a launcher."""
    remote = f"file://{tmp_path}/store/run-a"
    environment = {name: text for name, text in os.environ.items() if not re.match("RANK|WORLD|LOCAL", name)}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout + done.stderr

    (quick_start,) = (
        block.replace("file:///tmp", f"file://{tmp_path}/store")
        for block in blocks(ROOT / "README.md", "python")
    )
    assert f"file://{tmp_path}/store/run-" in quick_start
    told = run(sys.executable, "-c", quick_start.replace("range(first, 301)", "range(first, 251)"))
    assert "nothing was ever saved here" in told, "the URL may be mistyped"
    told = run(sys.executable, "-c", quick_start + "\nassert first == 251, first")  # resumed
    assert not told, "nothing is said where nothing is wrong"
    ran = {}
    for arguments in commands(ROOT / "README.md"):
        made = [
            each.replace(REMOTE, remote).replace("/local/checkpoints", "checkpoints") for each in arguments
        ]
        if "--interval" in made:
            made[made.index("--interval") :] = ["--once"]
        ran[arguments[0]] = run(sys.executable, "-m", "ckpt_async", *made)
    assert ran.keys() == {"doctor", "status", "ls", "drain", "pull", "convert", "sweep"}
    assert "newest committed step 300" in ran["status"]
    pulled = torch.load(tmp_path / "resume" / "ep0-ba300-rank0.pt", weights_only=False)
    assert pulled["batch"] == 300


@pytest.mark.fault("O12")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_of_a_page_parse(page: Path) -> None:
    for arguments in commands(page):
        try:
            cli._parser().parse_args(arguments)
        except UsageError as error:
            pytest.fail(f"ckpt-async {shlex.join(arguments)}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_of_a_page_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
