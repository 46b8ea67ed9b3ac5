"""A long test that nobody runs for weeks rots. So each must be a long case of a test that `./dev test` runs short."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MARKS = TESTS / "faults" / "processes.py"  # where SOAK is defined
# Long tests whose short case is another test, run by another program.
SHORT_ELSEWHERE = {
    "alerts/test_play.py": ("test_deploy.py", "promtool"),
    "dashboard/test_play.py": ("dashboard/test_play.py", "test_queries_ask_for_metrics_and_labels"),
}


def of_soak(node: ast.expr) -> bool:
    """Return whether the node is `pytest.param(…, marks=SOAK)`."""
    return isinstance(node, ast.Call) and any(
        keyword.arg == "marks" and isinstance(keyword.value, ast.Name) and keyword.value.id == "SOAK"
        for keyword in node.keywords
    )


def values(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        return node.args
    return node.elts if isinstance(node, ast.Tuple) else [node]


def words(node: ast.expr) -> set[object]:
    """Return the values that select a code path, not an amount: everything except numbers and computed values."""
    found = {each.value for each in values(node) if isinstance(each, ast.Constant)}
    return {each for each in found if each is None or isinstance(each, str)}


def complaints(tree: ast.Module) -> Iterator[str]:
    cases = [node for node in ast.walk(tree) if isinstance(node, ast.List) and any(map(of_soak, node.elts))]
    known = {id(name) for each in cases for param in each.elts for name in ast.walk(param)}
    for node in ast.walk(tree):
        is_mark = isinstance(node, ast.Name) and node.id == "SOAK" and isinstance(node.ctx, ast.Load)
        is_bare = isinstance(node, ast.Attribute) and node.attr == "soak"
        if (is_mark or is_bare) and id(node) not in known:
            yield f"line {node.lineno}: not a case beside short ones"  # type: ignore[attr-defined]
    for each in cases:
        short = [param for param in each.elts if not of_soak(param)]
        if not short:
            yield f"line {each.lineno}: no short case"
        only_long = set(itertools.chain(*map(words, each.elts))) - set(itertools.chain(*map(words, short)))
        if only_long:
            yield f"line {each.lineno}: only long cases of {sorted(map(str, only_long))}"


def test_each_long_test_has_a_short_case() -> None:
    found = {
        str(path.relative_to(TESTS)): told
        for path in TESTS.rglob("*.py")
        if path != MARKS and (told := list(complaints(ast.parse(path.read_text()))))
    }
    assert found.keys() == SHORT_ELSEWHERE.keys()
    assert all(len(told) == 1 for told in found.values())
    assert all(word in (TESTS / other).read_text() for other, word in SHORT_ELSEWHERE.values())


@pytest.mark.parametrize(
    ("source", "num_complaints"),
    [
        ('@pytest.mark.parametrize("n", [1, pytest.param(9, marks=SOAK)])\ndef test(n): ...', 0),
        ('@pytest.mark.parametrize("n", [pytest.param(9, marks=SOAK)])\ndef test(n): ...', 1),
        ('@pytest.mark.parametrize("a", [("x", 1), pytest.param("x", 9, marks=SOAK)])\ndef test(a): ...', 0),
        ('@pytest.mark.parametrize("a", [("x", 1), pytest.param("y", 9, marks=SOAK)])\ndef test(a): ...', 1),
        ('@pytest.mark.parametrize("n", [1, pytest.param(None, marks=SOAK)])\ndef test(n): ...', 1),
        ("@pytest.mark.soak\ndef test(): ...", 1),
        ("pytestmark = SOAK", 1),
    ],
)
def test_a_long_test_without_a_short_case_is_found(source: str, num_complaints: int) -> None:
    assert len(list(complaints(ast.parse(source)))) == num_complaints
