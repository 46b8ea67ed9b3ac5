"""The shared page in which the processes of a node tell each other what they move over the link."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_async.core.settings import Settings
from ckpt_async.transfer.budgets import Budgets
from ckpt_async.transfer.link import ABANDONED_S, BUSY_S, Node

NOW_S = 1000.0


@pytest.fixture
def there(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def test_each_is_told_what_all_have_moved_and_what_the_others_have_under_way(there: dict[str, str]) -> None:
    a, b, down = Node("up", there), Node("up", there), Node("down", there)
    assert a.tell(10, 8, NOW_S) == (10, [])
    assert b.tell(5, 3, NOW_S) == (15, [8])
    assert a.tell(20, 7, NOW_S) == (25, [3])
    assert down.tell(1, 1, NOW_S) == (1, [])


def test_another_process_is_seen(there: dict[str, str]) -> None:
    program = (
        "import os; from ckpt_async.transfer.link import Node; "
        f"node = Node('up'); node.tell(7, 2, {NOW_S}); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **there})
    assert Node("up", there).tell(1, 1, NOW_S) == (8, [2])


def test_who_has_nothing_under_way_or_has_not_told_for_a_while_is_not_among_the_others(
    there: dict[str, str],
) -> None:
    a, b, c = (Node("up", there) for _ in range(3))
    a.tell(10, 0, NOW_S)
    b.tell(10, 8, NOW_S - 2 * BUSY_S)
    assert c.tell(1, 1, NOW_S) == (21, [])


def test_who_closes_its_budgets_is_at_once_no_longer_among_the_others(
    there: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may live on for long after its last upload."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", there["XDG_RUNTIME_DIR"])
    budgets, other = Budgets(Settings()), Node("up", there)
    assert budgets.bulk._node is not None
    budgets.bulk._node.tell(10, 8, NOW_S)
    assert other.tell(1, 1, NOW_S) == (11, [8])
    budgets.close()
    assert other.tell(1, 1, NOW_S) == (11, [])


def test_what_has_moved_never_becomes_less_when_processes_come_and_go(there: dict[str, str]) -> None:
    killed = Node("up", there)
    killed.tell(100, 8, NOW_S)
    assert killed._file is not None
    os.close(killed._file)
    killed._file = None  # as after SIGKILL: it does not sign off
    later_s = NOW_S + 2 * ABANDONED_S
    nodes = [Node("up", there) for _ in range(400)]
    totals = [node.tell(1, 1, later_s)[0] for node in nodes[:150]]
    assert totals == [100 + number for number in range(1, 151)]
    assert nodes[300].tell(0, 1, later_s)[0] == 250
    del nodes
    assert Node("up", there).tell(0, 1, later_s)[0] == 250


def test_without_a_place_of_its_own_each_looks_at_itself(there: dict[str, str], tmp_path: Path) -> None:
    """The page may be full, its folder may not exist, or someone may have put another kind of file there."""
    held = [Node("up", there) for _ in range(171)]
    assert [node.tell(1, 1, NOW_S)[0] for node in held][-2:] == [170, 1]
    assert Node("up", {"XDG_RUNTIME_DIR": str(tmp_path / "none")}).tell(3, 1, NOW_S) == (3, [])
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / f"ckpt-async-{os.getuid()}-down").symlink_to(tmp_path / "mine")
    assert Node("down", there).tell(3, 1, NOW_S) == (3, [])
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_nobody_waits_for_a_process_that_stopped_while_it_joined(
    there: dict[str, str], tmp_path: Path
) -> None:
    with (tmp_path / f"ckpt-async-{os.getuid()}-up").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        node = Node("up", there)
        assert node.tell(3, 1, NOW_S) == (3, [])
    assert node.tell(3, 1, NOW_S) == (3, [])
    assert Node("up", there).tell(1, 1, NOW_S) == (4, [1])


@pytest.mark.fault("F87")
@pytest.mark.parametrize("how", ["full", "truncated", "closed beneath it"])
def test_a_file_that_cannot_be_used_does_no_harm(there: dict[str, str], tmp_path: Path, how: str) -> None:
    """For example, if a container's /dev/shm is full, touching the mapped page kills the trainer with SIGBUS."""
    path = tmp_path / f"ckpt-async-{os.getuid()}-up"
    a, b = Node("up", there), Node("up", there)
    assert a.tell(10, 8, NOW_S) == (10, [])
    match how:
        case "full":
            path.unlink()
            path.symlink_to("/dev/full")  # nobody follows the link; writing to it raises ENOSPC
            assert b.tell(5, 3, NOW_S) == (5, [])
            os.dup2(os.open("/dev/full", os.O_RDWR), a._file or -1)
        case "truncated":
            os.truncate(path, 100)
        case _:
            os.close(a._file or -1)
    assert a.tell(20, 8, NOW_S) == (20, [])
    assert a.tell(30, 8, NOW_S) == (30, [])
    a.close()
    b.close()


def test_whose_slot_was_taken_while_it_was_idle_takes_another(there: dict[str, str]) -> None:
    """Between two checkpoints a trainer moves nothing for minutes, and another process may begin."""
    idle, new = Node("up", there), Node("up", there)
    idle.tell(100, 8, NOW_S)
    later_s = NOW_S + ABANDONED_S + 1
    assert new.tell(5, 3, later_s) == (105, [])
    assert idle.tell(100, 8, later_s + 0.1) == (105, [3])
    assert new.tell(25, 4, later_s + 0.2) == (125, [8])
    assert idle.tell(130, 7, later_s + 0.3) == (155, [4])


def test_whose_slot_was_not_taken_keeps_it(there: dict[str, str]) -> None:
    node, other = Node("up", there), Node("up", there)
    node.tell(100, 8, NOW_S)
    other.tell(5, 3, NOW_S + ABANDONED_S - 1)
    assert node.tell(110, 8, NOW_S + 2 * ABANDONED_S) == (115, [])
    assert node._slot == 0


def test_who_ends_after_its_slot_was_taken_leaves_it_to_the_other(there: dict[str, str]) -> None:
    idle, new, third = (Node("up", there) for _ in range(3))
    idle.tell(100, 8, NOW_S)
    later_s = NOW_S + ABANDONED_S + 1
    new.tell(5, 3, later_s)
    idle.close()
    assert third.tell(1, 1, later_s + 0.1) == (106, [3])
    assert new.tell(6, 3, later_s + 0.2) == (107, [1])
