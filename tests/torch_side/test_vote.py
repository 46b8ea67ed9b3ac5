"""A wish of any rank reaches all ranks at the same step, about once a second."""

import json
from pathlib import Path

import pytest

from ckpt_async.errors import SettingsError
from ckpt_async.torch import Vote, require_vote
from tests.ranks import run_ranks


def test_alone_a_wish_is_answered_at_the_next_step_and_once() -> None:
    vote = Vote()
    assert vote.step() == 0
    vote.wish(1)
    vote.wish(2)
    vote.wish(1)
    assert [vote.step(), vote.step()] == [2, 0]


def test_a_wish_that_was_fulfilled_otherwise_is_withdrawn() -> None:
    vote = Vote()
    vote.wish(1)
    vote.withdraw(2)
    assert vote.step() == 0
    vote.wish(2)
    vote.withdraw(1)
    assert vote.step() == 2


def test_all_ranks_hear_of_one_ranks_wish_at_the_same_step_within_two_seconds(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("vote_ranks.py"), 3, tmp_path)
    answers = [json.loads((tmp_path / f"answers-{rank}.json").read_text()) for rank in range(3)]
    assert answers[0] == answers[1] == answers[2]
    (first, wish), (second, other) = ((int(step), answer) for step, answer in answers[0].items())
    assert (wish, other) == (2, 1)
    assert 25 < first <= 45
    assert 60 < second <= 80


def test_who_decides_by_the_clock_needs_all_ranks_to_be_told() -> None:
    require_vote(Vote(), 1, "a save by the clock")
    with pytest.raises(SettingsError, match=r"torch\.distributed has 1 of 8 ranks"):
        require_vote(Vote(), 8, "a save by the clock")
