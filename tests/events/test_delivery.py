"""Delivery whose journal cannot be written for a while."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_async.core.model import CheckpointId
from ckpt_async.core.observe import Notice
from ckpt_async.errors import NoSpaceError
from ckpt_async.events import delivery
from ckpt_async.events.delivery import DeliveryError, SinkDelivery
from ckpt_async.events.event import Event, of_checkpoint
from ckpt_async.local import outbox
from ckpt_async.local.outbox import OwnOutbox
from tests.events.receiver import wait_until


class Box(OwnOutbox):
    """An outbox that cannot be written while `is_full`."""

    is_full = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.num_refused = 0

    def _append(self, rows: str) -> None:
        if self.is_full and '["put"' not in rows:
            self.num_refused += 1
            raise NoSpaceError("the disk is full")
        super()._append(rows)


class Sink:
    name = "exec"
    max_attempts = 5

    def __init__(self, num_parallel: int) -> None:
        self.num_parallel, self.steps, self.is_away = num_parallel, list[int | None](), False

    def deliver(self, event: Event) -> None:
        self.steps.append(event.step)
        if self.is_away:
            raise DeliveryError("away")

    def stop(self) -> None:
        """Do nothing: no delivery takes long."""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    monkeypatch.setattr(delivery, "JOURNAL_RETRY_S", 0.01)
    box = Box(tmp_path)
    yield box
    box.close()


def put(box: Box, *steps: int) -> None:
    found = [of_checkpoint("committed", "s3://b/r", CheckpointId(1, step), "", 0.0) for step in steps]
    box.put([Notice(each.id, "exec", each.to_json()) for each in found], time.time())


@pytest.mark.parametrize("num_parallel", [1, 4])
@pytest.mark.parametrize("is_away", [False, True])
def test_what_a_full_disk_cannot_note_is_noted_later_and_not_delivered_again(
    box: Box, num_parallel: int, is_away: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sink = Sink(num_parallel)
    sink.is_away, box.is_full = is_away, True
    put(box, 1)
    delivering = SinkDelivery(box, sink)
    wait_until(lambda: box.num_refused > 10)
    assert sink.steps == [1]
    sink.is_away = box.is_full = False
    wait_until(lambda: box.num_due(["exec"], time.time()) == 0)
    put(box, 2)
    delivering.notify()
    wait_until(lambda: 2 in sink.steps)
    delivering.close(5.0)
    assert sink.steps.count(1) == 1 + is_away
    assert box.num_due(["exec"], float("inf")) == 0
    assert caplog.text.count("events_held_up") == caplog.text.count("events_go_on") == 1


def test_a_disk_that_stays_full_holds_up_no_end(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    """The next launch delivers the event again, and the log says so."""
    sink = Sink(1)
    box.is_full = True
    put(box, 1)
    delivering = SinkDelivery(box, sink)
    wait_until(lambda: box.num_refused > 0)
    delivering.close(0.05)
    assert "events_left sink=exec num=1 cut_short=1; the next launch delivers them" in caplog.text
    assert not [each for each in threading.enumerate() if each.name.startswith("ckpt-async-exec")]


def test_what_an_earlier_process_has_put_there_and_nobody_wants_now_is_dropped(box: Box) -> None:
    """For example `drain --webhook-on fenced`, whose receiver does not want the trainer's commits."""
    sink = Sink(1)
    put(box, 1)
    delivering = SinkDelivery(box, sink, {"fenced"})
    wait_until(lambda: box.num_due(["exec"], float("inf")) == 0)
    delivering.close(5.0)
    put(box, 2)
    delivering = SinkDelivery(box, sink, {"committed"})
    wait_until(lambda: sink.steps == [2])
    delivering.close(5.0)


def test_what_is_put_again_and_again_is_not_forgotten_and_delivered_again(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweeper finds the same damage at every sweep, however many other events there were since it was told."""
    monkeypatch.setattr(outbox, "MAX_REMEMBERED", 2)

    def found(now: float, *steps: int) -> None:
        for step in steps:
            notice = of_checkpoint("damaged", "s3://b/r", CheckpointId(1, step), "", 0.0)
            box.put([Notice(notice.id, "exec", notice.to_json())], now)

    def deliver() -> list[int | None]:
        waiting = box.waiting("exec")
        for each in waiting:
            box.delivered(each)
        assert box.tidy("exec") == 0
        return [Event.from_json(each.body).step for each in waiting]

    found(1, 1, 2)
    assert deliver() == [1, 2]
    for now in range(2, 6):
        found(now, 1, 1 + now)
        assert deliver() == [1 + now]
    found(6, 2)
    assert deliver() == [2], "nobody has put it again, so it is forgotten"


HOUR_S = 3600.0


def step_clock(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + by_s)


@pytest.mark.parametrize("by_s", [-HOUR_S, 100 * HOUR_S])
def test_a_step_of_the_clock_neither_holds_up_a_retry_nor_makes_an_event_old(
    box: Box, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    sink = Sink(1)
    sink.is_away = True
    put(box, 1)
    delivering = SinkDelivery(box, sink)
    wait_until(lambda: box.num_due(["exec"], 1.0) == 0)  # the retry is put off
    step_clock(monkeypatch, by_s)
    wait_until(lambda: len(sink.steps) == 2)
    sink.is_away = False
    wait_until(lambda: delivering.num_delivered == 1)
    delivering.close(5.0)
    assert (sink.steps, delivering.num_dropped) == ([1, 1, 1], 0)


def test_an_event_is_old_only_if_attempts_have_failed_for_long(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sink(1)
    sink.is_away = True
    step_clock(monkeypatch, -100 * HOUR_S)
    put(box, 1)  # its time is before the step
    monkeypatch.undo()
    delivering = SinkDelivery(box, sink)
    wait_until(lambda: len(sink.steps) == 2)
    delivering.close(0.0)
    assert delivering.num_dropped == 0
    (waiting,) = box.waiting("exec")
    assert waiting.num_attempts >= 1
    box.retry_now("exec")
    num_attempts = len(sink.steps)
    delivering = SinkDelivery(box, sink)  # of another process, for which the time counts
    wait_until(lambda: delivering.num_dropped == 1)
    delivering.close(0.0)
    assert len(sink.steps) == num_attempts + 1


def test_each_pause_is_twice_as_long_as_the_one_before(box: Box) -> None:
    sink = Sink(1)
    sink.is_away = True
    put(box, 1)
    began = time.time()
    for _ in range(3):
        (waiting,) = box.waiting("exec")
        box.failed(waiting, began)
    delivering = SinkDelivery(box, sink)
    wait_until(lambda: box.waiting("exec")[0].num_attempts == 4)
    delivering.close(0.0)
    assert 4.0 <= box.waiting("exec")[0].next_at - began <= 9.0


def test_a_new_launch_does_not_begin_to_count_the_attempts_again(box: Box) -> None:
    """A command that always fails was run for ever, where launches are short."""
    sink = Sink(1)
    sink.is_away = True
    put(box, 1)
    for _ in range(sink.max_attempts - 1):
        (waiting,) = box.waiting("exec")
        box.failed(waiting, time.time() + HOUR_S)
    box.retry_now("exec")
    delivering = SinkDelivery(box, sink)
    wait_until(lambda: delivering.num_dropped == 1)
    delivering.close(5.0)
    assert sink.steps == [1]


def test_what_an_earlier_process_with_another_clock_has_put_off_is_due(box: Box) -> None:
    sink = Sink(1)
    put(box, 1)
    (waiting,) = box.waiting("exec")
    box.failed(waiting, time.time() + 100 * HOUR_S)
    delivering = SinkDelivery(box, sink)
    wait_until(lambda: delivering.num_delivered == 1)
    delivering.close(5.0)
