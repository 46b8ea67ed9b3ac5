"""`./dev stores NAME…`, or `all`: the tests of S3 against other servers, and their rows in docs/stores.md.

Each server plays the conformance tests, trainers that are killed at random moments, and the demo. What a server does
not promise is known by its capabilities, what it does wrong by the names of the tests that show it (`FAULTS`). Other
arguments (`-k …`, `-x`) are passed to pytest, and the page is then left as it is.
"""

import datetime as dt
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.page import summary
from tests.s3_servers.servers import FAULTS, SERVERS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "stores.md"
TESTS = ("tests/stores/test_conformance.py::TestS3Store", "tests/faults/test_kill.py")
LIMIT_S = 3600


def main(argv: list[str]) -> int:
    known = sorted(SERVERS)
    names = known if argv == ["all"] else [each for each in argv if each in known]
    options = [each for each in argv if each not in known] if argv != ["all"] else []
    if not names or (options and not options[0].startswith("-")):
        say(f"name the servers to run, or all: {', '.join(known)}")
        return 2
    failed = []
    for name in names:
        if why := why_not(name):
            say(f"{name}: skipped: {why}")
            continue
        tests, demo = play(name, options)
        say(f"{name}: {tests}; demo: {demo}")
        if not options:
            PAGE.write_text(with_row(PAGE.read_text(), name, tests, demo))
        if "failed" in tests + demo:
            failed.append(name)
    say(f"FAILED: {', '.join(failed)}" if failed else "all good")
    return 1 if failed else 0


def why_not(name: str) -> str:
    """Return why this server cannot be run here, or ""."""
    try:
        SERVERS[name](Path(tempfile.gettempdir()))
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    return ""


def play(name: str, options: list[str]) -> tuple[str, str]:
    """Return the results of the tests and of the demo, in a few words."""
    env = {**os.environ, "CKPT_TESTS_S3_SERVER": name}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        pytest = [sys.executable, "-m", "pytest", f"--junitxml={report}", *TESTS, *options]
        code = subprocess.call(pytest, cwd=ROOT, env=env, timeout=LIMIT_S)
        tests = summary(report.read_text()) if report.exists() else f"failed: pytest ended with {code}"
    if options:
        return tests, "not run"
    code = subprocess.call([sys.executable, "-m", "tests.demo", "--store", name], cwd=ROOT, timeout=LIMIT_S)
    return tests, "failed" if code else "passed"


def with_row(text: str, name: str, tests: str, demo: str) -> str:
    """Return the page with this row in place of the server's own; the others stay."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    faults = "; ".join(dict.fromkeys(FAULTS[name].values())) or "none seen"
    row = f"| {name} | {tests} | {demo} | {faults} | {today} |"
    lines = text.splitlines()
    head = lines.index("| Server | Conformance and kills | Demo | Its own faults | Date |")
    end = next(number for number in range(head, len(lines)) if not lines[number].startswith("|"))
    rows = {line.split("|")[1].strip(): line for line in lines[head + 2 : end]} | {name: row}
    return "\n".join([*lines[: head + 2], *(rows[each] for each in sorted(rows)), *lines[end:]]) + "\n"


def say(text: str) -> None:
    print(f"stores: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
