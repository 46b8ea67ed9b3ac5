"""What events say, and who wants them."""

from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.events import event as events
from ckpt_async.protocol.steps import new_decision


def test_a_commit_that_is_found_later_has_the_time_of_the_commit() -> None:
    decision = new_decision(
        CheckpointId(1, 5), Outcome.COMMIT, name="s", world_size=1, by="rank 3", now=100.0
    )
    event = events.of_decision("s3://b/run", decision, 250.0)
    assert (event.time, event.details["committed_at"]) == (250.0, 100.0)


def test_kinds_that_only_a_later_version_knows_are_left_out() -> None:
    assert events.parse_wants("exec=committed,melted webhook=pruned") == {
        "exec": frozenset({"committed"}),
        "webhook": frozenset({"pruned"}),
    }


def test_what_is_recorded_is_read_again() -> None:
    wants = {
        "webhook": frozenset({"pruned"}),
        "exec": events.parse_kinds("committed, damaged", "event_exec_on"),
    }
    assert events.parse_wants(events.format_wants(wants)) == wants
