"""What is said while the end of a watcher waits."""

import pytest

from ckpt_async.watch import ending
from ckpt_async.watch.background import Stop
from ckpt_async.watch.ending import EVERY_S, QUIET_S, Ending


class At(Stop):
    """Set so many seconds ago."""

    ago_s = 0.0

    def left_s(self, timeout_s: float) -> float:
        return timeout_s - self.ago_s


def test_it_is_said_soon_and_then_now_and_then_but_not_of_an_ordinary_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopping = At()
    told = Ending(stopping, 600.0, clock=lambda: stopping.ago_s)
    stopping.ago_s = QUIET_S + 1
    told.tell(lambda: "too early: nobody has told it to end")
    stopping.set()
    for ago_s, what in (
        (QUIET_S - 0.1, "an ordinary end"),
        (QUIET_S, ""),
        (QUIET_S + 1, "one"),
        (EVERY_S, "too soon"),
        (QUIET_S + 1 + EVERY_S, "two"),
    ):
        stopping.ago_s = ago_s
        told.tell(lambda what=what: what)  # type: ignore[misc]
    assert [each.getMessage() for each in caplog.records] == [
        "watch_ending waiting_for='one'; at most 9 min longer",
        "watch_ending waiting_for='two'; at most 8 min longer",
    ]


def test_nodes_and_steps_are_named() -> None:
    missing = ending.others({20: [0, 1, 3], 10: [3, 1, 2]}, 0)
    assert missing == {1: [20, 10], 3: [20, 10], 2: [10]}
    assert ending.parts(missing, [10, 20], is_open=True) == (
        "nodes 1, 3 to hand in steps 10, 20, and node 2 to hand in step 10"
    )
    assert ending.parts({}, [20, 10], is_open=True) == "steps 10, 20 to be committed"
    assert ending.parts({}, [10], is_open=False) == (
        "the store to answer, or another node to start: step 10 not handed in yet"
    )
    assert ending.parts({}, [], is_open=True) == ending.parts({}, [], is_open=False) == ""
