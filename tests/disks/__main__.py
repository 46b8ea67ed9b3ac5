"""`./dev disks NAME…`, or `all`: file systems as a remote and as a trainer's disk, and their rows in docs/stores.md.

Each is mounted twice if two nodes can share it. `checks.py` has what is tried; `--only CHECK` tries one thing, and the
page is then left as it is. What cannot be mounted here is skipped, with the reason.
"""

import datetime as dt
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.disks.checks import CHECKS, NotForItError
from tests.disks.mounts import MOUNTS, CannotMountError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "stores.md"
HEAD = f"| Disk | {' | '.join(CHECKS)} | Date |"
_OWN_NAMESPACE = "CKPT_TESTS_OWN_MOUNTS"


def main(argv: list[str]) -> int:
    *names, only = argv if "--only" in argv[-2:-1] else [*argv, ""]
    names = [*MOUNTS] if names[:1] == ["all"] else [each for each in names if each != "--only"]
    if not names or not {*names} <= {*MOUNTS} or (only and only not in CHECKS):
        say(f"name the file systems to try, or all: {', '.join(MOUNTS)}; --only: one of {', '.join(CHECKS)}")
        return 2
    if os.geteuid() == 0 and _OWN_NAMESPACE not in os.environ and shutil.which("unshare"):
        os.environ[_OWN_NAMESPACE] = "1"  # whatever is mounted goes with this process
        own = ("unshare", "-m", "--propagation", "private", sys.executable, "-m", "tests.disks", *argv)
        os.execvp(own[0], own)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unmounts, and ends the servers
    failed = []
    for name in names:
        try:
            cells = play(name, only)
        except CannotMountError as error:
            say(f"{name}: skipped: {error}")
            continue
        if any(each.startswith("FAILED") for each in cells.values()):
            failed.append(name)
        elif not only:
            PAGE.write_text(with_row(PAGE.read_text(), name, [*cells.values()]))
    say(f"FAILED: {', '.join(failed)}" if failed else "all good")
    return 1 if failed else 0


def play(name: str, only: str = "") -> dict[str, str]:
    """Return what each check found, in a few words. Raises CannotMountError."""
    if os.geteuid() != 0:
        raise CannotMountError("only root may mount it")
    cells = {}
    for check, tried in CHECKS.items():
        if only not in ("", check):
            continue
        # Each on a new file system: what one leaves, a full disk for example, is no other's concern.
        with (
            tempfile.TemporaryDirectory(prefix="disks-", ignore_cleanup_errors=True) as folder,
            MOUNTS[name](Path(folder)) as mounted,
        ):
            try:
                cells[check] = tried(mounted, Path(folder))
            except NotForItError as error:
                cells[check] = str(error)
            except Exception as error:
                cells[check] = f"FAILED: {str(error) or repr(error)}"
        say(f"{name}: {check}: {cells[check]}")
    return cells


def with_row(text: str, name: str, cells: list[str]) -> str:
    """Return the page with this row in place of the disk's own; the others stay."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    row = f"| {name} | {' | '.join(cells)} | {today} |"
    lines = text.splitlines()
    head = lines.index(HEAD)
    end = next(number for number in range(head, len(lines)) if not lines[number].startswith("|"))
    rows = {line.split("|")[1].strip(): line for line in lines[head + 2 : end]} | {name: row}
    return (
        "\n".join([*lines[: head + 2], *(rows[each] for each in MOUNTS if each in rows), *lines[end:]]) + "\n"
    )


def say(text: str) -> None:
    print(f"disks: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
