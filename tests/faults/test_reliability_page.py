"""Every fault on docs/reliability.md has a test, and every fault that a test names is on the page."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from tests.faults.processes import ROOT

PAGE = ROOT / "docs" / "reliability.md"
TESTS = ROOT / "tests"
BESIDE = ("compat", "gpu")  # not run by `./dev test`


def groups_of(page: str) -> list[list[str]]:
    """Return the ids of each group of faults, which begins `- **What goes wrong** (F1, F1a):`."""
    heads: list[str] = re.findall(r"(?m)^- \*\*[^*]+\*\*\s\(([FO]\d[^)]*)\):", page)
    return [re.split(r",\s+", head) for head in heads]


def faults_of(source: str) -> Iterator[str]:
    """Yield the ids that the tests of a file, or the file as a whole, are marked with."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        marks: list[ast.expr] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            marks = node.decorator_list
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = [node.value]
        for call in (each for mark in marks for each in ast.walk(mark) if isinstance(each, ast.Call)):
            if ast.unparse(call.func) == "pytest.mark.fault":
                yield from map(ast.literal_eval, call.args)


def marked() -> Counter[str]:
    files = (path for path in TESTS.rglob("test_*.py") if path.relative_to(TESTS).parts[0] not in BESIDE)
    sources = (path.read_text(encoding="utf-8") for path in files)
    return Counter(fault for source in sources if "mark.fault(" in source for fault in faults_of(source))


def test_every_fault_of_the_page_has_a_test() -> None:
    """A promise without a test is worth nothing."""
    named = chain.from_iterable(groups_of(PAGE.read_text(encoding="utf-8")))
    assert sorted({*named} - marked().keys()) == []


def test_every_fault_of_a_test_is_on_the_page() -> None:
    named = chain.from_iterable(groups_of(PAGE.read_text(encoding="utf-8")))
    assert sorted(marked().keys() - {*named}) == []


def test_each_fault_is_in_one_group() -> None:
    """F1 to F32 are the faults that were planned for. An item whose ids cannot be read would not be checked."""
    page = PAGE.read_text(encoding="utf-8")
    groups = groups_of(page)
    assert len(groups) == len(re.findall(r"(?m)^- \*\*", page))
    times = Counter(chain.from_iterable(groups))
    assert [fault for fault, count in times.items() if count > 1] == []
    assert [number for number in range(1, 33) if f"F{number}" not in times] == []


def test_fault_option_selects_the_tests_of_a_fault() -> None:
    """It is what the page tells its readers to run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/faults/test_power_cut.py", "tests/faults/test_journal_files.py", "--fault", "F3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = {line.partition("[")[0].rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line}
    assert found == {
        "test_durable_checkpoints_survive_a_power_cut_on_ext4",
        "test_durable_data_is_fsynced_in_order",
    }, done.stdout + done.stderr
