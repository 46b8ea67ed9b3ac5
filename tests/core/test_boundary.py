"""What has been collected is exact: nothing undecided is void, and a schedule takes little space."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.core import keys, records
from ckpt_async.core.boundary import MAX_BOUNDARY_SIZE_BYTES, NOTHING_COLLECTED, Boundary, Checkpoints
from ckpt_async.core.model import CheckpointId, Outcome

far = st.builds(CheckpointId, st.integers(1, keys.MAX_GENERATION), st.integers(0, keys.MAX_STEP))
near = st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 30))


@given(st.frozensets(near | far))
def test_a_set_of_checkpoints_is_exact(wanted: frozenset[CheckpointId]) -> None:
    """One too many would be void without having been decided."""
    found = Checkpoints.of(wanted)
    assert list(found) == sorted(wanted)
    assert len(found) == len(wanted)
    around = {CheckpointId(id_.generation, id_.step + more) for id_ in wanted for more in (-1, 0, 1)}
    assert {id_ for id_ in around if id_ in found} == wanted
    if wanted:
        boundary = Boundary(kept=found, number=1, pruned=found)
        assert records.decode_boundary(records.encode_boundary(boundary)) == boundary


@pytest.mark.fault("F122")
@given(st.lists(st.tuples(near, st.sampled_from(["pruned", "aborted", "open"])), max_size=30), st.data())
def test_no_undecided_checkpoint_is_void(told: list[tuple[CheckpointId, str]], data: st.DataObject) -> None:
    """However the decisions are collected, and whenever generations are superseded; and each outcome is exact until
    then.
    """
    fates = dict(told)
    boundary = NOTHING_COLLECTED
    for newest in (1, 2, 3):
        there = {id_ for id_ in fates if id_.generation <= newest and not boundary.voids(id_)}
        decided = {id_ for id_ in there if fates[id_] != "open"}
        chosen = data.draw(st.sets(st.sampled_from(sorted(decided)))) if decided else set()
        superseded = {id_ for id_ in chosen if id_.generation < newest}
        upto = max({boundary.upto, *superseded})
        in_newest = {id_ for id_ in chosen if id_.generation == newest}
        pruned, aborted = ({id_ for id_ in in_newest if fates[id_] == each} for each in ("pruned", "aborted"))
        kept = {id_ for id_ in there - chosen if id_ <= upto}
        boundary = boundary.moved(upto, kept, pruned, aborted, "nonce")
        assert not any(boundary.voids(id_) for id_ in there - chosen)
        assert all(boundary.voids(id_) for id_ in chosen)
        assert {id_: boundary.outcome_of(id_) for id_ in in_newest} == {
            id_: Outcome.PRUNED if id_ in pruned else Outcome.ABORT for id_ in in_newest
        }


@pytest.mark.fault("F122")
def test_a_hundred_thousand_pruned_checkpoints_take_little_space() -> None:
    """Every rank reads them at a commit."""
    steps = range(10, 1_010_010, 10)
    pruned = Checkpoints.of(CheckpointId(7, step) for step in steps if step % 1010)
    assert len(pruned) == 100_000
    size_bytes = len(records.encode_boundary(Boundary(number=1, pruned=pruned)))
    assert size_bytes < MAX_BOUNDARY_SIZE_BYTES // 2
