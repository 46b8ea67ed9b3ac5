"""The interval that `Auto` chooses, from what saves were measured to cost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.errors import SettingsError
from ckpt_async.saver import Auto
from ckpt_async.saver.auto import Cost, Meter, choose

SECONDS = st.floats(0, 1e6)


def test_the_first_save_comes_soon_to_tell_what_one_costs() -> None:
    assert choose(Auto(first_s=30), None).interval_s == 30


def test_the_budget_is_kept() -> None:
    choice = choose(Auto(overhead=0.01), Cost(blocked_s=1.5, slowed_s=0.5, total_s=20))
    assert choice.interval_s == 200
    assert choice.reason == "budget: a save costs training 2 s, which is 1.00% of 200 s"


def test_with_a_failure_rate_the_interval_is_youngs_where_the_budget_allows_more() -> None:
    choice = choose(Auto(overhead=0.01, mtbf_s=86400), Cost(0.5, 0.5, 20))
    assert choice.interval_s == pytest.approx(math.sqrt(2 * 1 * 86400))
    assert choice.reason.startswith("mtbf:")


def test_saves_do_not_pile_up() -> None:
    choice = choose(Auto(overhead=0.5), Cost(0.1, 0, 300))
    assert (choice.interval_s, choice.reason.split(":")[0]) == (300, "upload")


def test_an_interval_beyond_the_longest_says_that_the_budget_is_not_kept() -> None:
    choice = choose(Auto(overhead=0.001, max_s=600), Cost(10, 0, 20))
    assert choice.interval_s == 600
    assert "more often than the budget allows" in choice.reason


@given(SECONDS, SECONDS, SECONDS, st.floats(0.001, 0.5), st.none() | st.floats(1, 1e7))
def test_training_never_loses_more_than_its_budget_below_the_longest_interval(
    blocked_s: float, slowed_s: float, total_s: float, overhead: float, mtbf_s: float | None
) -> None:
    auto = Auto(overhead=overhead, mtbf_s=mtbf_s)
    choice = choose(auto, Cost(blocked_s, slowed_s, total_s))
    assert auto.min_s <= choice.interval_s <= auto.max_s
    if choice.interval_s < auto.max_s:
        assert (blocked_s + slowed_s) <= overhead * choice.interval_s * (1 + 1e-9)
        assert total_s <= choice.interval_s


@pytest.mark.parametrize(
    "wrong", [{"overhead": 0}, {"overhead": 1}, {"mtbf_s": 0}, {"min_s": -1}, {"min_s": 100, "max_s": 10}]
)
def test_a_wrong_budget_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        Auto(**wrong)


def test_what_a_save_costs_is_what_blocks_and_what_slows_steps_beside_it() -> None:
    meter, now = Meter(), 0.0

    def train(step_s: float) -> None:
        nonlocal now
        now += step_s
        meter.step_ended(now)

    meter.step_began(now)
    for _ in range(10):
        train(1.0)
        meter.step_began(now)
    assert meter.cost is None
    meter.save_began(10, now, blocked_s=0.5)
    now += 0.5
    meter.step_began(now)
    for _ in range(4):
        train(1.25)
        meter.step_began(now)
    meter.save_ended(10, now)
    assert meter.cost == Cost(blocked_s=0.5, slowed_s=1.0, total_s=5.5)


def test_one_slow_save_of_several_does_not_change_the_cost() -> None:
    meter = Meter()
    for place, blocked_s in enumerate((1.0, 1.0, 60.0, 1.0, 1.0)):
        meter.save_began(place, place * 100.0, blocked_s)
        meter.save_ended(place, place * 100.0 + 10)
    assert meter.cost == Cost(1.0, 0.0, 10.0)


def test_a_save_that_failed_does_not_show_what_a_save_costs() -> None:
    """It would make saves look cheap: nothing was written or uploaded."""
    meter = Meter()
    for step, is_committed in enumerate((False, True, False, False, False)):
        meter.save_began(step, step * 100.0, 0.5 if is_committed else 0.0)
        meter.save_ended(step, step * 100.0 + (40 if is_committed else 0), is_committed=is_committed)
        assert not meter.is_open(step)
        assert meter.cost == (Cost(0.5, 0.0, 40.0) if step else None)


def test_saves_that_overlap_are_each_measured_from_their_own_begin() -> None:
    meter = Meter()
    meter.save_began(1, 0.0, 0.5)
    meter.save_began(2, 25.0, 0.5)
    meter.save_ended(7, 30.0)  # nobody has begun it
    assert meter.cost is None
    meter.save_ended(1, 40.0)
    assert meter.cost == Cost(0.5, 0.0, 40.0)
    assert not meter.is_open(1)
    assert meter.is_open(2)
    meter.save_ended(2, 85.0)
    assert meter.cost == Cost(0.5, 0.0, 50.0)  # of 40 s and 60 s
