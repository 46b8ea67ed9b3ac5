"""Ranks agree, act for each other and keep their random numbers: tested with three real ranks over gloo."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.torch import (
    agree,
    launch_id,
    run_on_one,
)
from ckpt_async.torch.agreement import spell
from tests.ranks import run_ranks

WORLD_SIZE = 3
SCRIPT = Path(__file__).with_name("agree_ranks.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the three ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(SCRIPT, WORLD_SIZE, folder)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def test_all_ranks_learn_which_ranks_differ(found: list[dict[str, Any]]) -> None:
    message = "ranks disagree about the resumed step: 300 on ranks 0, 2; 200 on rank 1"
    assert [each["disagree"] for each in found] == [message] * 3


def test_messages_of_a_group_name_global_ranks(found: list[dict[str, Any]]) -> None:
    message = "ranks disagree about the checkpoint: 'ckpt-1' on rank 1; 'ckpt-2' on rank 2"
    assert [each.get("pair") for each in found] == [None, message, message]
    assert [each.get("pair result") for each in found] == [None, "of rank 2", "of rank 2"]


def test_one_rank_runs_and_all_get_its_result(found: list[dict[str, Any]]) -> None:
    assert [each["result"] for each in found] == [{"from": 1}] * 3
    assert [each["afterwards"] for each in found] == ["still in step"] * 3
    assert [each["calls"] for each in found] == [
        ["failed", "failed", "afterwards"],
        ["result", "failed"],
        ["lambda"],
    ]


def test_one_ranks_failure_reaches_all_with_its_cause(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["plain"]["text"] == "rank 1 failed: ValueError: broken here"
        assert each["plain"]["cause"] == "ValueError('broken here')"
        # The cause's own cause is lost in transit, but the note contains it.
        assert "KeyError: 'inner'" in each["plain"]["notes"]
        assert "agree_ranks.py" in each["plain"]["notes"]


def test_an_unpicklable_result_leaves_no_rank_waiting(found: list[dict[str, Any]]) -> None:
    assert [each["unsendable error"]["text"] for each in found] == ["rank 0 failed: UnsendableError: no"] * 3
    assert [each["unsendable error"]["cause"] for each in found] == ["UnsendableError('no')", "None", "None"]
    for each in found:
        assert each["unsendable result"]["text"].startswith(
            "rank 2 failed: TypeError: its result, of type function, cannot be pickled"
        )


def test_a_rank_that_exits_informs_the_others(found: list[dict[str, Any]]) -> None:
    assert found[0]["exit"] == {"raised": "SystemExit"}
    assert [each["exit"].get("text") for each in found[1:]] == ["rank 0 failed: SystemExit: 3"] * 2


def test_each_rank_gets_its_own_random_numbers_back(found: list[dict[str, Any]]) -> None:
    for name in ("set from file", "set from gathered", "another rank's differs", "set from a whole state"):
        assert [each[name] for each in found] == [True] * 3, name
    assert [each["fewer ranks then"] for each in found] == [True, True, False]
    assert [each["rest"] for each in found] == [{"step": 3}] * 3


def test_all_ranks_of_a_start_share_a_unique_launch_id(found: list[dict[str, Any]]) -> None:
    assert [each["launches"] for each in found] == [found[0]["launches"]] * 3
    ids = {*found[0]["launches"], found[1]["pair launch"]}
    assert found[1]["pair launch"] == found[2]["pair launch"]
    assert len(ids) == 3
    assert all(ids)


def test_without_torch_distributed_there_is_one_rank() -> None:
    assert launch_id() is None, "the launcher's word counts"
    agree(1, what="anything")
    assert run_on_one(lambda: 7) == 7
    with pytest.raises(KeyError):
        run_on_one(lambda: {}["x"])


def test_rank_lists_are_abbreviated() -> None:
    assert spell([3]) == "rank 3"
    assert spell([5, 0, 1, 2]) == "ranks 0-2, 5"
    assert spell(range(10_000)) == "ranks 0-9999"
