"""Saves by the clock and by what saves cost: when they are due, with a clock that the test sets."""

import threading

import pytest

from ckpt_async.saver import Auto
from ckpt_async.saver import schedule as schedules
from ckpt_async.saver.asking import Asking
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
    asking = Asking(schedules.parse(Auto()), 0, 1, chosen=lambda _: None, clock=clock)
    asking.began(Due.YES)
    clock.now_s = 5.0
    other = threading.Thread(target=asking.ended)
    other.start()
    other.join()
    assert asking.meter.cost is None
    clock.now_s = 7.0
    asking.answer()
    assert asking.meter.cost is not None
    assert asking.meter.cost.total_s == 5.0
