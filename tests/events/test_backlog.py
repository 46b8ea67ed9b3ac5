"""When a backlog is worth an event."""

import pytest

from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Enqueued,
    Event,
    FileIdentity,
    JournalRow,
    Sealed,
    Shard,
    StoredShard,
    Verified,
)
from ckpt_async.events.run_events import Backlog as View
from ckpt_async.events.run_events import BacklogWatch as Watch

FIRST, SECOND = CheckpointId(1, 1), CheckpointId(1, 2)


def waiting(num: int) -> View:
    return View(num, oldest=FIRST if num else None)


def test_a_backlog_is_high_at_its_threshold_and_normal_at_half_of_it() -> None:
    watch = Watch(threshold=4, stall_s=0.0)
    told = [watch.look(waiting(num), 0.0) for num in (3, 4, 5, 4, 3, 2, 1, 0, 4)]
    assert told == [[], ["high"], [], [], [], ["normal"], [], [], ["high"]]


def test_without_a_threshold_nothing_is_high() -> None:
    assert Watch(threshold=0, stall_s=0.0).look(waiting(1000), 0.0) == []


def test_what_has_nothing_to_upload_never_stalls() -> None:
    watch = Watch(threshold=0, stall_s=10.0)
    assert [watch.look(waiting(0), now) for now in (0.0, 100.0, 200.0)] == [[], [], []]
    assert watch.look(waiting(1), 209.0) == []
    assert watch.look(waiting(1), 219.0) == ["stalled"], (
        "counted from the last progress, not from the last save"
    )


@pytest.mark.parametrize(
    ("view", "moves"),
    [
        (View(2, 10, FIRST, 1, 50), False),  # another checkpoint
        (View(1, 10, FIRST, 1, 40), False),  # an attempt has failed
        (View(1, 10, FIRST, 1, 51), True),
        (View(1, 0, FIRST, 2, 0), True),
        (View(1, 10, SECOND, 0, 0), True),
    ],
)
def test_only_progress_ends_a_stall(view: View, moves: bool) -> None:
    watch = Watch(threshold=0, stall_s=10.0)
    told = [watch.look(View(1, 10, FIRST, 1, 50), now) for now in (0.0, 9.0, 10.0, 30.0)]
    assert told == [[], [], ["stalled"], []]
    assert watch.look(view, 31.0) == (["moving"] if moves else [])


def test_bytes_that_are_sent_again_are_no_progress() -> None:
    watch = Watch(threshold=0, stall_s=10.0)
    told = [
        watch.look(View(1, 10, FIRST, 0, sent), at) for at, sent in enumerate([50, 10, 20, 30, 40, 50] * 2)
    ]
    assert told.index(["stalled"]) == 10


def test_what_is_counted() -> None:
    def enqueued(id_: CheckpointId, name: str) -> Event:
        return Enqueued(id_, f"step-{id_.step}", Shard(name, name, FileIdentity(1, 1, 7, 1), True))

    events: list[Event] = [enqueued(id_, name) for id_ in (FIRST, SECOND) for name in ("a", "b")]
    events.append(Verified(FIRST, StoredShard("a", "key", 7, Checksum("crc64nvme", "x"))))
    events.append(Sealed(FIRST, "step-1", 1))
    local = fold([JournalRow(number, 0, 0.0, event) for number, event in enumerate(events, 1)], Local(0))
    assert View.of(local, 3) == View(1, 7, FIRST, 1, 3), "the second one is not sealed yet"
