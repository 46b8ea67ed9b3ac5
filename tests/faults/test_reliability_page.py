"""Every test that docs/reliability.md names exists, and no fault is missing from the page."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.faults.processes import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text()


@cache
def functions_of(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_named_on_the_page_exists() -> None:
    """A promise whose test is missing or was renamed is worth nothing."""
    named = set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE))
    assert len(named) > 50
    missing = []
    for path, test in sorted(named):
        file = ROOT / "tests" / path.removeprefix("tests/")
        if not file.is_file():
            missing.append(path)
            continue
        functions = functions_of(file)
        if test and test not in functions:
            missing.append(f"{path}::{test}")
    assert missing == []


def test_every_fault_has_a_row_with_a_test() -> None:
    """F1 to F32 are the planned faults, and F33 and later were found since; they must
    be in order, without duplicates.
    """
    rows = re.findall(r"(?m)^\| \*\*F(\d+)\*\* [^|]+\|[^|]+\|([^|]+)\|[^|]+\|$", PAGE)
    numbers = [int(number) for number, _ in rows]
    assert numbers[:32] == list(range(1, 33))
    assert numbers == sorted(set(numbers))
    assert all("::test_" in tests for _, tests in rows)
