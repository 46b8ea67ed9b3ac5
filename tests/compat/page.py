"""The table of docs/compatibility.md, as values."""

import xml.etree.ElementTree as ET
from dataclasses import astuple, dataclass, fields

HEAD = """# Compatibility

What `./dev compat NAME` found: each framework in an environment of its own, pinned in
`tests/compat/NAME/requirements.txt`, on one machine without a GPU, with a real S3 server (SeaweedFS). In a play a real
trainer is SIGKILLed at a random moment, its node is lost with all its files, and a fresh node goes on from the store;
the losses must be those of a run that nobody disturbed. A row is replaced when its framework's plays are run again.

`./dev test` has none of this, for an import of these frameworks alone takes seconds: run `./dev compat all` each night.
(It has tests of its own for Lightning, transformers and accelerate.)

"""


@dataclass(frozen=True)
class Row:
    framework: str
    version: str
    torch: str
    played: str
    result: str
    date: str


def page(text: str, rows: list[Row]) -> str:
    """Return the page with these rows in place of those of the same frameworks; the rows of other frameworks stay."""
    kept = {row.framework: row for row in _rows(text)} | {row.framework: row for row in rows}
    titles = [field.name for field in fields(Row)]
    lines = [_line(titles), _line(["---"] * len(titles))]
    return HEAD + "\n".join([*lines, *(_line(astuple(kept[name])) for name in sorted(kept))]) + "\n"


def summary(report: str) -> str:
    """Return pytest's JUnit report in a few words: "3 passed, 1 skipped", or "failed: " and the names."""
    cases = list(ET.fromstring(report).iter("testcase"))
    failed = [
        case.get("name", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if failed or not cases:
        return f"failed: {', '.join(sorted(set(failed))) or 'there is no play'}"
    skipped = sum(case.find("skipped") is not None for case in cases)
    return f"{len(cases) - skipped} passed" + (f", {skipped} skipped" if skipped else "")


def _rows(text: str) -> list[Row]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    return [Row(*each) for each in cells[2:]]


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
