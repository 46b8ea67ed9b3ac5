"""./dev compat: its page matches the code, and the processes of a play end with it."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.compat.__main__ import main
from tests.compat.page import Row, page, summary
from tests.compat.play import Training

OLD = Row("composer", "0.32.1", "2.7.0", "saves", "1 passed", "2026-01-01")
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"], start_new_session=True)
print("\\nLOSS 1 0x1p+0", flush=True)
"""


def test_without_names_the_frameworks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "or all: " in (said := capsys.readouterr().err)
    assert "lightning" in said


def test_rows_of_what_ran_are_replaced_and_others_stay() -> None:
    other = Row("ray", "2.60.0", "2.13.0", "one | other", "failed: test_a", "2026-01-01")
    new = Row("composer", "0.33.0", "2.7.0", "saves", "2 passed", "2026-02-02")
    text = page(page("", [other, OLD]), [new])
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| composer | 0.33.0 | 2.7.0 | saves | 2 passed | 2026-02-02 |",
        "| ray | 2.60.0 | 2.13.0 | one / other | failed: test_a | 2026-01-01 |",
    ]
    assert page(text, []) == text


def test_a_page_says_which_plays_failed() -> None:
    case = '<testcase name="{}">{}</testcase>'
    good, skipped = case.format("a", ""), case.format("b", "<skipped/>")
    bad = case.format("c", "<failure/>") + case.format("d", "<error/>")
    assert summary(f"<suites>{good}{skipped}</suites>") == "1 passed, 1 skipped"
    assert summary(f"<suites>{good}{bad}</suites>") == "failed: c, d"
    assert summary("<suites/>") == "failed: there is no play"


def test_a_kill_reaches_orphans_in_sessions_of_their_own(tmp_path: Path) -> None:
    training = Training([sys.executable, "-c", PARENT], tmp_path, tmp_path / "log")
    assert next(iter(training)) == 1
    training.process.wait(30)
    (orphan,) = training.processes()
    watch = subprocess.Popen(["tail", f"--pid={orphan}", "-f", "/dev/null"])
    threading.Thread(target=training.kill).start()
    assert watch.wait(30) == 0
