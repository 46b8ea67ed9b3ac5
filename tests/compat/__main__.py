"""`./dev compat NAME…`, or `all`: play each framework in an environment of its own, and write docs/compatibility.md.

A framework is a folder beside this file. It has a `requirements.txt`, whose first line pins the framework itself, and
`test_*.py` files, whose docstrings say in their first lines what is played. Other arguments (`-k …`, `-x`) are passed
to pytest, and the page is then left as it is.
"""

import ast
import datetime as dt
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.page import Row, page, summary
from tests.environments import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
LIMIT_S = 7200


def main(argv: list[str]) -> int:
    known = sorted({path.parent.name for path in HERE.glob("*/test_*.py")})
    if not argv:
        say(f"name the frameworks to play, or all: {', '.join(known)}")
        return 2
    if argv == ["all"]:
        argv = known
    names = [each for each in argv if each in known]
    options = [each for each in argv if each not in known]
    if options and not (names and options[0].startswith("-")):
        say(f"no framework {options[0]!r}; these are there: {', '.join(known)}")
        return 2
    failed = []
    for name in names:
        python = environment("compat", name, HERE / name / "requirements.txt", [HERE / "common.txt"])
        say(f"playing {name}")
        result = play(name, python, options)
        if not options:
            text = PAGE.read_text() if PAGE.exists() else ""
            PAGE.write_text(page(text, [row(name, python, result)]))
        if result.startswith("failed"):
            failed.append(name)
    say(f"FAILED: {', '.join(failed)}" if failed else f"all good: {', '.join(names)}")
    return 1 if failed else 0


def play(name: str, python: Path, options: list[str]) -> str:
    """Run the plays of a framework, and return their result in a few words."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # With the project's root as the root, a folder is tests.compat.composer; with this one it would be
        # composer, like the framework.
        pytest = [python, "-m", "pytest", "--rootdir", ROOT, "-c", HERE / "pytest.ini"]
        # `weed` comes from the project's own environment, which is already on PATH.
        env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        code = subprocess.call(
            [*pytest, f"--junitxml={report}", HERE / name, *options], cwd=ROOT, env=env, timeout=LIMIT_S
        )
        return summary(report.read_text()) if report.exists() else f"failed: pytest ended with {code}"


def row(name: str, python: Path, result: str) -> Row:
    first = next(
        line
        for line in (HERE / name / "requirements.txt").read_text().splitlines()
        if line and line[0] not in "#-"
    )
    package = re.split(r"[\[=<>~!; ]", first)[0]
    docstrings = [
        ast.get_docstring(ast.parse(path.read_text())) for path in sorted((HERE / name).glob("test_*.py"))
    ]
    played = " ".join(text.splitlines()[0] for text in docstrings if text)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return Row(package, version(python, package), version(python, "torch"), played, result, today)


def version(python: Path, package: str) -> str:
    """Return the package's installed version, without the suffix that only says how it was built (`+cpu`)."""
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    done = subprocess.run([python, "-c", code, package], capture_output=True, text=True)
    return done.stdout.strip().partition("+")[0] or "none"


def say(text: str) -> None:
    print(f"compat: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
