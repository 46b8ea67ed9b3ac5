"""Saves by the clock and by what saves cost: when they are due, with a clock that the test sets."""

import itertools
import threading
from collections.abc import Callable

import pytest

from ckpt_async.saver import Auto
from ckpt_async.saver import schedule as schedules
from ckpt_async.saver.save_requests import SaveRequests
from ckpt_async.saver.schedule import Due


class Clock:
    """Goes when the test says so."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_another_thread_tells_is_counted_on_the_trainers(clock: Clock) -> None:
    """Nothing else keeps two threads from using the meter at the same time."""
    asking = SaveRequests(schedules.parse(Auto()), 0, 1, chosen=lambda _: None, clock=clock)
    asking.began(Due.YES, 1)
    asking.meter.save_began(1, clock.now_s, 0.0)
    clock.now_s = 5.0
    other = threading.Thread(target=asking.ended, args=(1, True))
    other.start()
    other.join()
    assert asking.meter.cost is None
    clock.now_s = 7.0
    asking.answer()
    assert asking.meter.cost is not None
    assert asking.meter.cost.total_s == 5.0


def saved_at(clock: Clock, auto: Auto, upload_s: Callable[[float], float], end_s: float) -> list[float]:
    """When saves begin in a training run with a step each second, whose uploads come one after the other."""
    asking = SaveRequests(schedules.parse(auto), 0, 1, chosen=lambda _: None, clock=clock)
    found: list[float] = []
    on_their_way: list[tuple[float, int]] = []
    link_free_at = 0.0
    while clock.now_s < end_s:
        clock.now_s += 1.0
        now, step = clock.now_s, int(clock.now_s)
        asking.meter.step_ended(now)
        while on_their_way and on_their_way[0][0] <= now:
            asking.ended(on_their_way.pop(0)[1], True)
        if asking.answer() is Due.YES:
            asking.began(Due.YES, step)
            asking.meter.save_began(step, now, blocked_s=0.1)
            link_free_at = max(link_free_at, now) + upload_s(now)
            on_their_way.append((link_free_at, step))
            found.append(now)
        asking.meter.step_began(now)
    return found


def gaps(begins: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(begins)]


@pytest.mark.parametrize("slow_s", [25, 40, 90])
def test_no_save_begins_before_the_last_is_committed_though_uploads_become_slower(
    clock: Clock, slow_s: float
) -> None:
    begins = saved_at(clock, Auto(overhead=0.05), lambda now: 25 if now < 600 else slow_s, 3000)
    assert set(gaps([each for each in begins if each < 600])) == {25}
    assert set(gaps([each for each in begins if each >= 600])) == {slow_s}


def test_a_store_that_is_away_leaves_a_save_each_longest_interval(clock: Clock) -> None:
    begins = saved_at(clock, Auto(first_s=60, max_s=600), lambda _: 10**9, 3000)
    assert begins == [60, 660, 1260, 1860, 2460]


def test_a_lasting_save_stands_for_the_ephemeral_one_that_would_be_due_soon(clock: Clock) -> None:
    """What is kept for good can be resumed from, too: the next ephemeral save is due an interval later."""
    schedule = schedules.parse("25s", ephemeral_save_interval="10s")
    asking = SaveRequests(schedule, 0, 1, chosen=lambda _: None, clock=clock)
    saves: list[tuple[int, Due]] = []
    for step in range(1, 51):
        clock.now_s = float(step)
        if (kept := asking.answer()) is not Due.NO:
            asking.began(kept, step)
            saves.append((step, kept))
    some, all_ = Due.EPHEMERAL, Due.YES
    assert saves == [(10, some), (20, some), (25, all_), (35, some), (45, some), (50, all_)]
