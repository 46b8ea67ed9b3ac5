"""Which ranks look for all receipts, and which of them commit: few at a time, but never none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.core import decide, waiting
from ckpt_async.core.local_state import Local, LocalCheckpoint
from ckpt_async.core.model import CheckpointId, Sealed

ID = CheckpointId(1, 10)


def delivered(num_ranks: int) -> LocalCheckpoint:
    """Return the checkpoint of a rank without shards that has done its part."""
    sealed = Sealed(ID, "step-10", num_ranks)
    return LocalCheckpoint(ID, "step-10", sealed=sealed, is_seal_durable=True, has_receipt=True)


def commits(rank: int, receipts: waiting.Receipts, num_ranks: int, **policy: bool) -> bool:
    local = Local(rank, generation=1, checkpoints={ID: delivered(num_ranks)})
    remote = decide.Remote(commits=decide.Commits({ID: waiting.Watch(receipts)}))
    due = decide.decide(local, remote, decide.Policy(**policy), now=50.0)
    return decide.Commit(ID) in due


@pytest.mark.parametrize("num_ranks", [1, 8, 9, 100])
def test_newest_receipts_commit_first_and_others_follow_in_groups(num_ranks: int) -> None:
    """Whole nodes die, and the newest eight receipts may all come from one node.

    If every rank then took its turn at once, they would read N x N receipts. If every group were as small as the first,
    the oldest ranks, if only they survived, would wait for hours.
    """
    oldest_first = tuple(reversed(range(num_ranks)))
    group_s = waiting.COMMIT_S + num_ranks * waiting.COMMIT_S_PER_RANK
    num_groups, num_all = 0, waiting.NUM_COMMITTERS
    while True:
        receipts = waiting.Receipts(oldest_first, newest_age_s=num_groups * group_s)
        now = [rank for rank in range(num_ranks) if commits(rank, receipts, num_ranks)]
        assert now == list(range(min(num_all, num_ranks)))
        if num_all >= num_ranks:
            break
        num_groups, num_all = num_groups + 1, 2 * num_all


def test_fewer_ranks_commit_at_once_in_a_large_world() -> None:
    """Each committing rank reads all receipts."""
    receipts = waiting.Receipts(tuple(range(waiting.MANY_RANKS + 1)))
    at_once = [rank for rank in receipts.ranks if waiting.turn_s(receipts, rank) == 0.0]
    assert at_once == list(receipts.ranks[-waiting.NUM_COMMITTERS // 2 :])


def test_nobody_commits_an_incomplete_checkpoint() -> None:
    assert not any(commits(rank, waiting.Receipts((0, 2, 3), 1e6), 4) for rank in range(4))


def test_a_sole_decider_does_not_wait_for_a_turn() -> None:
    """On stores without conditional PUT only one rank decides, no matter whose receipt is the newest."""
    receipts = waiting.Receipts(tuple(range(100)))
    assert commits(0, receipts, 100, decides_alone=True)
    assert not commits(99, receipts, 100, may_decide=False)


@given(st.sets(st.integers(0, 30)), st.integers(1, 31))
def test_a_gap_in_the_listing_shows_that_a_receipt_is_missing(ranks: set[int], page: int) -> None:
    """A gap must never be reported for a listing that starts with all receipts."""
    listed = sorted(ranks)[:page]
    missing = sorted({*range(max(listed, default=0))} - ranks)
    assert waiting.has_gap(listed) == bool(missing)
    first = waiting.Receipts(tuple(reversed(listed)), is_whole=False)
    assert waiting.missing_ranks(first, 31) == missing
    assert waiting.missing_ranks(waiting.Receipts(tuple(ranks)), 31) == sorted({*range(31)} - ranks)
