"""What a trainer is told of failures."""

from ckpt_async.core.failures import why_nothing_committed
from ckpt_async.core.local_state import Local
from ckpt_async.errors import FencedError


def test_launch_without_commits_names_the_launch_that_fenced_it() -> None:
    error = why_nothing_committed(Local(0, generation=3), [100], 4, None)
    assert isinstance(error, FencedError)
    assert error.without_hint.startswith("nothing of generation 3 was committed")
    assert "generation 4 of this run has started" in error.without_hint
    assert "restart all ranks" in error.hint


def test_launch_without_commits_names_a_taken_generation() -> None:
    error = why_nothing_committed(Local(0, generation=3), [100], 3, None)
    assert isinstance(error, FencedError)
    assert "another launch has taken generation 3" in error.without_hint
    assert "has started" not in error.without_hint
    assert "restart all ranks" not in error.hint
