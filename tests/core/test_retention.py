"""Retention: what is chosen to go is gone for ever, so what stays is a property and not an example (rule R8)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async import retention
from ckpt_async.errors import SettingsError
from ckpt_async.model import CheckpointId
from ckpt_async.retention import (
    AnyOf,
    Candidate,
    KeepAll,
    KeepBest,
    KeepEveryNSteps,
    KeepEverySeconds,
    KeepLast,
    KeepNamed,
)

ids = st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 20))
candidates = st.lists(
    st.builds(
        Candidate,
        ids,
        st.sampled_from(["best", "last", "step-1"]),
        st.floats(0, 1e6),
        st.dictionaries(st.just("loss"), st.floats(-10, 10)),
        st.booleans(),
    ),
    unique_by=lambda each: each.id,
    max_size=12,
)
policies = st.one_of(
    st.builds(KeepAll),
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepEveryNSteps, st.integers(1, 7)),
    st.builds(KeepEverySeconds, st.floats(1, 1e5)),
    st.builds(KeepBest, st.integers(1, 4), st.just("loss"), st.sampled_from(["min", "max"])),
    st.builds(KeepNamed, st.just(frozenset({"best", "7"}))),
)
policies |= st.builds(AnyOf, st.lists(policies, min_size=1, max_size=3).map(tuple))


@given(policies, candidates)
def test_newest_and_pinned_always_stay(policy: retention.RetentionPolicy, found: list[Candidate]) -> None:
    """No policy can take the one that training would resume from."""
    kept = retention.apply(policy, found)
    assert kept.keys() <= {each.id for each in found}
    assert {each.id for each in found if each.is_pinned} <= kept.keys()
    assert not found or max(each.id for each in found) in kept
    assert all(kept.values()), "each with its reason"


@given(policies, candidates)
def test_order_of_the_listing_does_not_matter(
    policy: retention.RetentionPolicy, found: list[Candidate]
) -> None:
    """Stores list by key, memory by arrival."""
    assert retention.apply(policy, found) == retention.apply(policy, reversed(found))


@given(policies, candidates)
def test_applying_twice_removes_nothing_more(
    policy: retention.RetentionPolicy, found: list[Candidate]
) -> None:
    """Two sweepers one after the other: the second finds nothing to do."""
    kept = retention.apply(policy, found)
    assert kept.keys() == retention.apply(policy, [each for each in found if each.id in kept]).keys()


@given(st.sets(ids), st.integers(-1, 5))
def test_local_keeps_the_newest(committed: set[CheckpointId], count: int) -> None:
    """Composer's meaning of save_num_checkpoints_to_keep: -1 all, 0 none."""
    kept = retention.keep_local(committed, count)
    expected = (
        committed if count < 0 else set(sorted(committed)[len(committed) - min(count, len(committed)) :])
    )
    assert expected == kept.keys()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", KeepAll()),
        (" ", KeepAll()),
        ("last=3", AnyOf((KeepLast(3),))),
        (
            "last=3, every-steps=1000,best=2:loss:max",
            AnyOf((KeepLast(3), KeepEveryNSteps(1000), KeepBest(2, "loss", "max"))),
        ),
        ("every-seconds=3600", AnyOf((KeepEverySeconds(3600.0),))),
        ("best=1:loss", AnyOf((KeepBest(1, "loss"),))),
        ("named=ep1-ba100", AnyOf((KeepNamed(frozenset({"ep1-ba100"})),))),
        ("all", AnyOf((KeepAll(),))),
    ],
)
def test_text_becomes_a_policy(text: str, policy: object) -> None:
    """What is written in a unit file is what happens."""
    assert policy == retention.parse(text)


@pytest.mark.parametrize(
    "text",
    ["last=0", "last=-1", "last=x", "last", "every-steps=0", "every-seconds=0", "every-seconds=nan", "best=1",
     "best=0:loss", "best=1:loss:median", "best=1:loss:min:x", "named=", "all=1", ",", "last=1,", "newest=1"],
)  # fmt: skip
def test_text_that_could_mean_delete_all_is_refused(text: str) -> None:
    """A typing mistake must not delete a training run."""
    with pytest.raises(SettingsError, match="retention"):
        retention.parse(text)
