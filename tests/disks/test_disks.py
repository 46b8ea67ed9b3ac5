"""./dev disks: what takes seconds of it. What cannot be mounted here is skipped, with the reason."""

import subprocess
import sys

import pytest

from tests.disks import __main__ as disks
from tests.faults.processes import ROOT

PAGE = f"""before
{disks.HEAD}
| --- |
| btrfs | old |
| ext4 | kept |

after
"""


def tried(name: str, check: str) -> str:
    """Return what `./dev disks NAME --only CHECK` says about it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.disks", name, "--only", check],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = done.stderr.splitlines()
    for line in said:
        if line.startswith(f"disks: {name}: skipped: "):
            pytest.skip(line)
    (found,) = (line for line in said if line.startswith(f"disks: {name}: {check}: "))
    assert done.returncode == 0, found
    return found.rpartition(": ")[2]


@pytest.mark.fault("F159")
@pytest.mark.parametrize("name", ["ext3", "gluster"])
def test_swaps_from_two_nodes_lose_nothing(name: str) -> None:
    """GlusterFS remembers names, ext3 has whole seconds."""
    assert tried(name, "Swaps") == "400, none lost"


@pytest.mark.fault("F159")
def test_two_nodes_may_open_at_the_same_instant() -> None:
    tried("gluster", "Opened at once")


@pytest.mark.fault("F160")
@pytest.mark.parametrize("name", ["sshfs", "rclone"])
def test_rank_0_decides_where_nodes_see_different_things(name: str) -> None:
    assert tried(name, "Swaps") == "rank 0 alone"


@pytest.mark.fault("F161")
def test_names_that_differ_in_case_are_refused() -> None:
    assert tried("ntfs", "Case") == "the second name is refused"


def test_a_row_is_replaced_and_others_stay() -> None:
    lines = disks.with_row(PAGE, "btrfs", ["new"]).splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert [line[:12] for line in lines[3:5]] == ["| ext4 | kep", "| btrfs | ne"]


def test_unknown_names_are_answered_with_those_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert disks.main([]) == disks.main(["fat"]) == disks.main(["ext4", "--only", "nothing"]) == 2
    assert "ext4" in capsys.readouterr().err
