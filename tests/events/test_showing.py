"""What the page shows about events, in words."""

import pytest

from ckpt_async.core.model import CheckpointId
from ckpt_async.events import event as events
from ckpt_async.events.event import Event
from ckpt_async.events.showing import happenings
from ckpt_async.local.outbox import Posted


def backlog(state: str, **details: object) -> Event:
    return events.of_run("backlog", "s3://b/run", 1, 7.0, about=state, state=state, **details)


PRUNED = events.of_checkpoint(
    "pruned", "s3://b/run", CheckpointId(1, 5), "step-5", 7.0, location="local", reason="last=1"
)


def told_to(sink: str, body: str) -> Posted:
    return Posted("id", sink, body, 0.0)


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (PRUNED, ("note", "pruned", "files of this node removed: last=1", 5)),
        (
            backlog("high", num_checkpoints=2, size_bytes=2048, oldest_step=3, missing_ranks=[]),
            ("warn", "backlog", "uploads are behind: checkpoints waiting: 2, 2.0 KiB not uploaded", 3),
        ),
        (
            backlog("stalled", num_checkpoints=1, size_bytes=0, oldest_step=3, missing_ranks=[1, 4]),
            (
                *("warn", "backlog"),
                "nothing has moved for a while: checkpoints waiting: 1, 0 B not uploaded, waits for ranks 1, 4",
                3,
            ),
        ),
        (backlog("moving", oldest_step=None), ("good", "backlog", "uploads move again", None)),
        (backlog("of a later version"), ("note", "backlog", "backlog: of a later version", None)),
    ],
)
def test_each_is_shown_once_in_words(event: Event, shown: tuple[str, str, str, int | None]) -> None:
    told = [told_to("webhook", event.to_json()), told_to("exec", "{}"), told_to("callback", event.to_json())]
    [found] = happenings(told)
    assert (found.level, found.what, found.text, found.step) == shown
    assert found.at == 7.0


def test_what_metrics_tell_is_not_shown_twice() -> None:
    committed = events.of_checkpoint("committed", "s3://b/run", CheckpointId(1, 5), "step-5", 7.0)
    assert [*happenings([told_to("exec", committed.to_json())])] == []
