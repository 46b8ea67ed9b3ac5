"""When a checkpoint is due: what intervals mean, and what holds for all sequences of steps."""

from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.errors import SettingsError
from ckpt_async.saver import Auto, Event, Timestamp
from ckpt_async.saver.schedule import Due, Past, Schedule, amount, decide, due, parse

BATCH, EPOCH = Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT


def saved_at(schedule: Schedule, run: list[Timestamp], past: Past | None = None) -> list[tuple[int, Due]]:
    """Batches at which a run that goes through these timestamps saves, each with how it is kept."""
    found = []
    past = past or Past(Timestamp(batch=0))
    for now in run:
        decision, past = decide(schedule, past, now, BATCH)
        if decision is not Due.NO:
            found.append((now.batch, decision))
    return found


def batches(count: int, *, per_epoch: int = 10**9, start: int = 1) -> list[Timestamp]:
    return [
        Timestamp(batch=each, epoch=each // per_epoch, sample=each * 8, token=each * 8192)
        for each in range(start, count + 1)
    ]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ("4ba", [4, 8, 12]),
        ("1ep", [5, 10, 15]),
        (1, [5, 10, 15]),
        ("2ep", [10]),
        ("32sp", [4, 8, 12]),
        ("30sp", [4, 8, 12, 15]),  # samples come by eight: at the first batch that has passed a multiple
        ("4e4tok", [5, 10, 15]),
        ("40_000tok", [5, 10, 15]),
        ("4 batches", [4, 8, 12]),
        ("4 Steps", [4, 8, 12]),
        ("1 epoch", [5, 10, 15]),
        ("32 samples", [4, 8, 12]),
        ("40000 tokens", [5, 10, 15]),
        (["7ba", "1ep"], [5, 7, 10, 14, 15]),
        ({"7ba"}, [7, 14]),
        (None, []),
        (lambda now, event: now.batch == 3, [3]),
    ],
)
def test_an_interval_is_due_each_time_its_count_has_passed_a_multiple(
    interval: Any, expected: list[int]
) -> None:
    assert [batch for batch, _ in saved_at(parse(interval), batches(15, per_epoch=5))] == expected


def test_iterations_are_counted_by_the_trainer() -> None:
    run = [Timestamp(batch=each, iteration=each // 3) for each in range(1, 13)]
    assert [batch for batch, _ in saved_at(parse("2iter"), run)] == [6, 12]


def test_a_part_of_the_run_is_exact() -> None:
    # A third of 10 batches is no whole number, and 0.1 is no binary fraction.
    assert [b for b, _ in saved_at(parse("0.1dur", max_duration="1000ba"), batches(1000))] == list(
        range(100, 1001, 100)
    )
    assert [b for b, _ in saved_at(parse("0.3dur", max_duration="10ba"), batches(10))] == [3, 6, 9, 10]


def test_the_end_of_the_run_is_saved_once_whatever_the_interval() -> None:
    assert saved_at(parse("4ba", max_duration="10ba"), batches(12)) == [
        (4, Due.YES),
        (8, Due.YES),
        (10, Due.YES),
        (12, Due.YES),
    ]
    assert [b for b, _ in saved_at(parse(None, max_duration="2ep"), batches(30, per_epoch=5))] == [10]


def test_fixed_steps_are_saved_beside_the_interval() -> None:
    assert [b for b, _ in saved_at(parse("10ba", fixed_steps=[3, 10, 17]), batches(20))] == [3, 10, 17, 20]


def test_an_ephemeral_save_gives_way_to_a_lasting_one() -> None:
    schedule = parse("6ba", ephemeral_save_interval="2ba")
    assert saved_at(schedule, batches(12)) == [
        *((2, Due.EPHEMERAL), (4, Due.EPHEMERAL), (6, Due.YES)),
        *((8, Due.EPHEMERAL), (10, Due.EPHEMERAL), (12, Due.YES)),
    ]


def test_what_becomes_due_at_a_step_saved_ephemerally_is_saved_at_the_next() -> None:
    schedule = parse("1ep", ephemeral_save_interval="5ba")
    first, past = decide(schedule, Past(Timestamp(batch=4)), Timestamp(batch=5), BATCH)
    at_the_epochs_end, past = decide(schedule, past, Timestamp(batch=5, epoch=1), EPOCH)
    after, past = decide(schedule, past, Timestamp(batch=6, epoch=1), BATCH)
    assert (first, at_the_epochs_end, after) == (Due.EPHEMERAL, Due.NO, Due.YES)


def test_a_step_saved_at_its_batch_is_not_saved_again_at_the_epochs_end() -> None:
    schedule = parse(["5ba", "1ep"])
    first, past = decide(schedule, Past(Timestamp(batch=4)), Timestamp(batch=5), BATCH)
    again, past = decide(schedule, past, Timestamp(batch=5, epoch=1), EPOCH)
    after, past = decide(schedule, past, Timestamp(batch=6, epoch=1), BATCH)
    assert (first, again, after) == (Due.YES, Due.NO, Due.NO)


def test_a_run_that_counts_its_batches_anew_each_epoch_is_told_that_it_cannot_be_saved() -> None:
    again = [Timestamp(batch=batch, epoch=epoch + batch // 3) for epoch in range(3) for batch in (1, 2, 3)]
    saved = saved_at(parse("1ep"), again)
    assert saved == [(3, Due.YES), (3, Due.REPEATED), (3, Due.REPEATED)]


def test_after_going_back_what_is_due_beyond_the_last_save_is_saved() -> None:
    run = [*batches(6), *batches(9, start=3)]
    assert saved_at(parse("2ba"), run)[3:] == [(4, Due.REPEATED), (6, Due.REPEATED), (8, Due.YES)]


def test_a_function_sees_the_timestamp_and_the_event() -> None:
    seen = []

    def ask(now: Timestamp, event: Event) -> bool:
        seen.append((now.batch, event))
        return event is EPOCH

    assert due(parse(ask), None, Timestamp(batch=7), BATCH) is Due.NO
    assert due(parse(ask), None, Timestamp(batch=7, epoch=1), EPOCH) is Due.YES
    assert seen == [(7, BATCH), (7, EPOCH)]


def test_what_is_asked_for_is_due_whatever_the_schedule() -> None:
    now = Timestamp(batch=7)
    assert due(parse("100ba"), Timestamp(batch=6), now, is_asked=Due.YES) is Due.YES
    assert due(parse("100ba"), Timestamp(batch=6), now, is_asked=Due.EPHEMERAL) is Due.EPHEMERAL
    assert due(parse("7ba"), Timestamp(batch=6), now, is_asked=Due.EPHEMERAL) is Due.YES


def test_wall_clock_intervals_are_left_to_the_clock() -> None:
    for given_as in (
        *("30min", "30 mins", "30 minutes", "1800s", "1800 seconds", "0.5h", "0.5 hours"),
        timedelta(minutes=30),
    ):
        schedule = parse(given_as)
        assert schedule.needs_clock
        assert schedule.rules.clock_s == 1800
        assert saved_at(schedule, batches(100)) == []
    assert parse(timedelta(seconds=1.5)).rules.clock_s == 1.5
    assert parse(["1h", "30min", "2h"]).rules.clock_s == 1800  # the shortest
    assert parse("1 day").rules.clock_s == parse("2 days").rules.clock_s / 2 == 86400  # type: ignore[operator]
    assert parse(Auto()).needs_clock
    assert not parse("5ba").needs_clock


def test_the_clock_of_a_timestamp_may_be_given_as_composer_has_it() -> None:
    two_days = timedelta(days=2, milliseconds=500)
    assert Timestamp(batch=1, total_wct=two_days).total_wct == 2 * 86400 + 0.5  # type: ignore[arg-type]


def test_a_timestamp_of_another_version_is_read() -> None:
    now = Timestamp(batch=7, epoch=1, sample=56, total_wct=2.5)
    assert Timestamp.from_state_dict({**now.state_dict(), "of_tomorrow": 1}) == now


def test_composers_time_is_understood() -> None:
    class Time:
        def to_timestring(self) -> str:
            return "500ba"

    assert parse(Time()) == parse("500ba")  # type: ignore[arg-type]
    assert amount("0.1dur", "x").number == Fraction(1, 10)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("500", "not an amount"),
        ("ba", "not an amount"),
        ("5 parsecs", "not an amount"),
        ("500ms", "not an amount"),
        ("1Ms", "not an amount"),
        ("10ss", "not an amount"),
        ("-5ba", "not an amount"),
        ("0ba", "more than 0"),
        (0, "more than 0"),
        (True, "not an amount"),
        (2.5, "not an amount"),
        ("2.5ba", "whole number"),
        ("1.5dur", "at most 1dur"),
        ("0.1dur", "needs max_duration"),
        ([Auto(), Auto()], "more than one Auto"),
        ("9" * 400 + "ba", "not an amount"),
    ],
)
def test_what_is_no_interval_is_refused_with_an_example(wrong: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        parse(wrong)
    assert "save_interval" in str(caught.value)


def test_the_length_of_a_run_is_counted_not_timed() -> None:
    with pytest.raises(SettingsError, match="max_duration='1h' must be in ep, ba"):
        parse("1ep", max_duration="1h")


# --- for all sequences of steps ------------------------------------------------------------------------------

INTERVALS = st.sampled_from(["1ba", "3ba", "7ba", "1ep", "2ep", "24sp", "100tok", "0.13dur", "0.5dur"])
SCHEDULES = st.builds(
    lambda some, fixed, ephemeral: parse(some, fixed, ephemeral, "60ba"),
    st.lists(INTERVALS, max_size=3),
    st.lists(st.integers(1, 60), max_size=4),
    st.none() | INTERVALS,
)


@st.composite
def runs(draw: Callable[[Any], Any]) -> list[Timestamp]:
    """Steps of a run: counters that never go down, batches that go up, by one or more."""
    run, now = [], {"batch": 0, "epoch": 0, "sample": 0, "token": 0}
    for _ in range(draw(st.integers(1, 40))):
        now["batch"] += draw(st.sampled_from([1, 1, 1, 2, 5]))
        now["sample"] += draw(st.integers(0, 20))
        now["token"] += draw(st.integers(0, 200))
        now["epoch"] += draw(st.sampled_from([0, 0, 0, 1]))
        run.append(Timestamp(**now))
    return run


@given(SCHEDULES, runs())
def test_no_step_is_saved_twice_and_nothing_due_is_missed(schedule: Schedule, run: list[Timestamp]) -> None:
    saved = saved_at(schedule, run)
    assert len({batch for batch, _ in saved}) == len(saved)
    before = Timestamp(batch=0)
    expected = []
    for now in run:
        # Said another way than `due` says it: every multiple up to here, minus those up to the step before.
        lasting = any(
            int(Fraction(getattr(now, each.field)) / each.count)
            != int(Fraction(getattr(before, each.field)) / each.count)
            for each in schedule.rules.intervals
        )
        lasting |= any(before.batch < step <= now.batch for step in schedule.fixed_steps)
        lasting |= before.batch < 60 <= now.batch
        brief = any(
            getattr(now, each.field) // each.count - getattr(before, each.field) // each.count
            for each in schedule.ephemeral.intervals
        )
        if lasting or brief:
            expected.append((now.batch, Due.YES if lasting else Due.EPHEMERAL))
        before = now
    assert saved == expected


@given(SCHEDULES, runs(), st.data())
def test_a_resumed_run_saves_where_the_uninterrupted_one_would(
    schedule: Schedule, run: list[Timestamp], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(run)))
    resumed = Past(run[cut - 1]) if cut else None
    assert saved_at(schedule, run[cut:], resumed) == [
        each for each in saved_at(schedule, run) if not cut or each[0] > run[cut - 1].batch
    ]


@given(SCHEDULES, runs())
def test_who_does_not_know_where_it_resumed_saves_at_exact_multiples(
    schedule: Schedule, run: list[Timestamp]
) -> None:
    first = run[0]
    decision = due(schedule, None, first)
    exact = any(
        getattr(first, each.field) and getattr(first, each.field) % each.count < 1
        for each in schedule.rules.intervals
    )
    assert (decision is Due.YES) == bool(exact or first.batch in schedule.fixed_steps or first.batch >= 60)
