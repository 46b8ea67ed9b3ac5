"""Several ranks without a remote: after a restart all of them have the same state, or all of them say why not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import run_ranks

SCRIPT = Path(__file__).with_name("local_ranks.py")

Told = Callable[[str], list[list[str]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each of two ranks has resumed from, in each launch of a scenario."""
    folder = tmp_path_factory.mktemp("local-ranks")
    run_ranks(SCRIPT, 2, folder)
    found: dict[str, list[list[str]]] = json.loads((folder / "told.json").read_text())
    return found.__getitem__


@pytest.mark.fault("F96")
def test_ranks_resume_from_the_newest_that_all_of_them_have(told: Told) -> None:
    """Each followed its own link: a rank that was killed while it saved went on from an older state than the other.

    After the second launch both have a file of batch 30, but from different launches: these are no checkpoint.
    """
    assert told("killed_in_a_save") == [["fresh", "fresh"], ["20", "20"], ["20", "20"]]


@pytest.mark.fault("F109")
def test_a_run_whose_first_save_was_killed_on_one_rank_starts_from_scratch(told: Told) -> None:
    """Every relaunch raised NoUsableCheckpointError, because some ranks had a file and others had none."""
    *launches, files, warnings = told("killed_in_the_first_save")
    assert launches == [["fresh", "fresh"]] * 4 + [["50", "50"]]
    assert files == [f"ep0-ba{batch}-rank{rank}.pt" for batch in (30, 40, 50) for rank in (0, 1)]
    assert len(warnings) == 6  # 2 ranks of 3 launches
    assert warnings[0].startswith(
        "starts_from_scratch incomplete=ep0-ba20, ep0-ba10 of rank 0 files=['/local/ep0-ba20-rank0.pt',"
        " '/local/ep0-ba10-rank0.pt']; no checkpoint was ever complete, because rank 1 had not saved anything"
    )


@pytest.mark.fault("F109")
def test_a_run_whose_first_save_was_killed_on_one_rank_starts_from_scratch_with_a_remote(told: Told) -> None:
    """It was refused, with the advice to load the newest without the remote, which has none either."""
    *launches, warnings = told("killed_in_the_first_save_before_a_remote")
    assert launches == [["fresh", "fresh"]] * 3 + [["30", "30"]]
    assert len(warnings) == 4  # 2 ranks of 2 launches
    with_remote = [
        each for each in warnings if each.endswith("the files are replaced when their step is saved again")
    ]
    assert ["incomplete=ep0-ba10, ep0-ba20 of rank 0" in each for each in with_remote] == [True, True]


def test_with_a_remote_what_was_complete_here_once_is_no_fresh_start(told: Told) -> None:
    *_, after = told("pruned_before_a_remote")
    for each in after:
        assert "saved without a remote: ep0-ba10, ep0-ba20" in each


@pytest.mark.fault("F109")
def test_a_run_that_has_lost_a_complete_checkpoint_does_not_start_from_scratch(told: Told) -> None:
    """What is left looks like a first save in which one rank was killed."""
    first, lost, no_load, last = told("the_other_rank_has_lost_what_it_had")
    assert (first, no_load) == (["fresh"] * 2, ["fresh"] * 2)
    before, torn, after = told("pruned_on_one_rank")
    assert (before, torn) == (["fresh"] * 2, ["10", "10"])
    for each in (*lost, *last, *after):
        assert each.startswith("NoUsableCheckpointError: no checkpoint can be loaded on all ranks: ep0-ba")


@pytest.mark.fault("F96")
def test_ranks_do_not_mix_launches_of_different_sizes(told: Told) -> None:
    """Each rank counted the launches that it had seen, so that two launches had the same number: all loaded batch 30,
    rank 0 from the third launch and rank 1 from the second.
    """
    assert told("fewer_ranks_in_between") == [["fresh"] * 2, ["20", "20"], ["20"], ["20", "20"]]


@pytest.mark.fault("F96")
def test_ranks_agree_on_the_launch_although_the_saver_came_first(told: Told) -> None:
    """The ranks only agreed when the saver was created. Then all loaded batch 30, each from another launch; and, after
    one rank had missed a save, none of what all of them saved.
    """
    assert told("initialized_late") == [["fresh"] * 2, ["20", "20"], ["20", "20"], ["20", "20"], ["50", "50"]]


def test_what_an_earlier_version_has_noted_can_be_resumed_from(told: Told) -> None:
    assert told("noted_by_an_earlier_version") == [["20", "20"], ["40", "40"]]


def test_what_is_damaged_on_one_rank_is_passed_over_by_all(told: Told) -> None:
    """The other rank resumed from it, and this one loaded wrong values."""
    passed_over, nothing_left = told("damaged_on_one_rank")
    assert passed_over == ["10", "10"]
    for each in nothing_left:
        assert each.startswith(
            "NoUsableCheckpointError: no checkpoint can be loaded on all ranks: ep0-ba20: "
        )
        assert "ep0-ba10: " in each


def test_a_file_that_may_be_another_one_is_not_combined_with_the_other_ranks(told: Told) -> None:
    assert told("touched") == [["10", "10"]]


def test_a_rank_that_has_nothing_any_more_is_no_fresh_start(told: Told) -> None:
    """It started from scratch, and the other rank did not."""
    first, second = told("one_node_is_lost")
    assert first == ["fresh", "fresh"]
    for each in second:
        assert each.startswith(
            "NoUsableCheckpointError: no checkpoint can be loaded on all ranks: ep0-ba10: rank 1"
        )


def test_one_rank_writes_and_the_others_get_what_it_has_loaded(told: Told) -> None:
    """A rank whose node has no file was told that this is a fresh start."""
    assert told("one_writer") == [["fresh", "fresh"], ["20", "20"]]


def test_ranks_that_were_started_on_each_others_nodes_say_so(told: Told) -> None:
    """This looked like a fresh start."""
    for each in told("swapped_nodes")[0]:
        assert "but there are those of rank 0 on the node of rank 1" in each


def test_ranks_that_cannot_talk_to_each_other_do_not_resume(told: Told) -> None:
    """Each followed its own link."""
    for each in told("not_initialized")[0]:
        assert each.startswith("SettingsError: with remote=None, 2 ranks must agree")


@pytest.mark.fault("F98")
def test_what_is_only_here_is_refused_on_all_ranks_alike(told: Told) -> None:
    """Only the rank that writes said so; the others waited for it in vain."""
    conflict, not_there, step = told("only_here")
    for each in conflict:
        assert "ep0-ba50-rank0.pt exists and is not among what this run noted" in each
    for each in not_there:
        assert each.startswith("NoUsableCheckpointError: file://")
        assert "saved without a remote: ep0-ba10, ep0-ba20" in each
    for each in step:
        assert "this launch begins with batch 1, but" in each


def test_what_one_rank_alone_has_saved_later_is_no_checkpoint(told: Told) -> None:
    assert told("saved_later_by_one_rank") == [["20", "20"]]
