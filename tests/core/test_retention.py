"""Retention: deletion is final, so what must stay is tested as a property and not only by examples (rule R8)."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.core import retention, settings
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.retention import (
    AnyOf,
    Candidate,
    KeepAll,
    KeepBest,
    KeepEveryNSteps,
    KeepEverySeconds,
    KeepLast,
    KeepLocal,
    KeepNamed,
)
from ckpt_async.errors import SettingsError

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
    """No policy may remove the checkpoint that training would resume from."""
    kept = retention.apply(policy, found)
    assert kept.keys() <= {each.id for each in found}
    assert {each.id for each in found if each.is_pinned} <= kept.keys()
    assert not found or max(each.id for each in found) in kept
    assert all(kept.values()), "each with its reason"


@given(policies, candidates)
def test_order_of_the_listing_does_not_matter(
    policy: retention.RetentionPolicy, found: list[Candidate]
) -> None:
    """Stores list by key, memory lists by arrival."""
    assert retention.apply(policy, found) == retention.apply(policy, reversed(found))


@given(policies, candidates)
def test_applying_twice_removes_nothing_more(
    policy: retention.RetentionPolicy, found: list[Candidate]
) -> None:
    """When two sweepers run one after the other, the second must find nothing to do."""
    kept = retention.apply(policy, found)
    assert kept.keys() == retention.apply(policy, [each for each in found if each.id in kept]).keys()


def made(step: int, generation: int = 1, **more: Any) -> Candidate:
    return Candidate(CheckpointId(generation, step), name=more.pop("name", f"step-{step}"), **more)


def steps(kept: retention.Kept) -> list[int]:
    return [id_.step for id_ in sorted(kept)]


# --- what each policy picks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [40]), (3, [20, 30, 40]), (4, [10, 20, 30, 40]), (9, [10, 20, 30, 40])]
)
def test_last_picks_the_newest(count: int, expected: list[int]) -> None:
    assert steps(KeepLast(count).keep([made(step) for step in (10, 20, 30, 40)])) == expected


def test_newest_is_by_generation_before_step() -> None:
    """After a restart from step 10, the new launch's step 20 is newer than step 90 of the previous launch."""
    found = [made(80), made(90), made(10, 2), made(20, 2)]
    assert set(KeepLast(2).keep(found)) == {CheckpointId(2, 10), CheckpointId(2, 20)}
    assert set(retention.apply(KeepNamed(frozenset({"step-80"})), found)) == {
        CheckpointId(1, 80),
        CheckpointId(2, 20),
    }


def test_every_n_steps_picks_multiples() -> None:
    """Step 0 is a multiple as well; a checkpoint saved one step late is not."""
    found = [made(step) for step in (0, 500, 999, 1000, 1001, 1500, 2000)]
    assert steps(KeepEveryNSteps(1000).keep(found)) == [0, 1000, 2000]


def test_every_seconds_counts_from_the_one_kept_before() -> None:
    """Intervals are not on a clock grid: a late checkpoint shifts those after it, and intervals are never too short."""
    times = {1: 50.0, 2: 60.0, 3: 149.9, 4: 150.0, 5: 249.0, 6: 251.0, 7: 1000.0}
    found = [made(step, committed_at=at) for step, at in times.items()]
    assert steps(KeepEverySeconds(100.0).keep(found)) == [1, 4, 6, 7]


def test_every_seconds_goes_by_time_and_not_by_step() -> None:
    """When a run was set back to an earlier step, the checkpoint committed first still counts first."""
    found = [made(5, 1, committed_at=500.0), made(1, 2, committed_at=100.0), made(2, 2, committed_at=550.0)]
    assert set(KeepEverySeconds(100.0).keep(found)) == {CheckpointId(2, 1), CheckpointId(1, 5)}


@pytest.mark.parametrize(
    ("mode", "count", "expected"),
    [
        ("min", 1, [30]),
        ("min", 2, [30, 50]),
        ("max", 1, [10]),
        ("max", 2, [10, 20]),
        ("min", 9, [10, 20, 30, 50]),
    ],
)
def test_best_picks_by_the_metric(mode: str, count: int, expected: list[int]) -> None:
    """A checkpoint without the metric (step 40) is neither good nor bad."""
    losses = {10: 9.0, 20: 5.0, 30: 1.0, 40: None, 50: 2.0}
    found = [made(step, metrics={} if loss is None else {"loss": loss}) for step, loss in losses.items()]
    assert steps(KeepBest(count, "loss", mode).keep(found)) == expected
    assert KeepBest(count, "accuracy", mode).keep(found) == {}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_prefers_the_newer_of_equal_checkpoints(mode: str) -> None:
    found = [
        made(10, metrics={"loss": 1.0}),
        made(20, metrics={"loss": 1.0}),
        made(5, 2, metrics={"loss": 1.0}),
    ]
    assert set(KeepBest(2, "loss", mode).keep(found)) == {CheckpointId(1, 20), CheckpointId(2, 5)}


def test_named_picks_by_name_or_step() -> None:
    """The whole name must match: `step-1` must not select `step-10`."""
    found = [made(1), made(10), made(11, name="best-11"), made(12)]
    assert steps(KeepNamed(frozenset({"step-1"})).keep(found)) == [1]
    assert steps(KeepNamed(frozenset({"best-11", "12"})).keep(found)) == [11, 12]


def test_any_of_keeps_the_union_with_the_first_reason() -> None:
    found = [made(step, metrics={"loss": float(step)}) for step in (10, 20, 30, 40)]
    kept = AnyOf((KeepLast(1), KeepEveryNSteps(20), KeepBest(1, "loss"))).keep(found)
    assert {id_.step: reason for id_, reason in kept.items()} == {
        10: "best 1 by min loss",
        20: "step is a multiple of 20",
        40: "one of the newest 1",
    }


def test_reasons_distinguish_pinned_and_newest_from_the_policys_choice() -> None:
    """Each kept checkpoint has a reason, because operators ask why the bucket does not shrink."""
    found = [made(10, is_pinned=True), made(20), made(30)]
    kept = retention.apply(KeepEveryNSteps(20), found)
    assert {id_.step: reason for id_, reason in kept.items()} == {
        10: "pinned",
        20: "step is a multiple of 20",
        30: "the newest is never removed",
    }


@pytest.mark.parametrize(
    "policy", [KeepBest(3, "los"), KeepNamed(frozenset({"step-7"})), KeepEveryNSteps(1000)]
)
def test_a_policy_that_matches_nothing_is_detected(policy: retention.RetentionPolicy) -> None:
    """With a mistyped metric or name, only the newest checkpoint would be left."""
    found = [made(step, metrics={"loss": 1.0}) for step in (10, 20)]
    assert retention.would_keep_nothing(policy, found)
    assert not retention.would_keep_nothing(AnyOf((policy, KeepLast(1))), found)
    assert not retention.would_keep_nothing(policy, [])


def test_checkpoints_without_a_metric_of_the_policy_are_counted() -> None:
    found = [made(10), made(20, metrics={"loss": 1.0}), made(30, metrics={retention.EPHEMERAL: 1.0})]
    policy = retention.parse("last=1,best=1:loss,best=1:accuracy:max")
    loss, accuracy = retention.unmeasured(policy, found)
    assert str(loss) == "1 of 2 checkpoints have no metric 'loss'"
    assert (loss.is_all, accuracy.is_all) == (False, True)
    assert retention.unmeasured(policy, []) == []


def test_policies_that_could_keep_nothing_cannot_be_constructed() -> None:
    """Zero must never mean "delete all", so it is an error."""
    for make in (
        lambda: KeepLast(0),
        lambda: KeepBest(0, "loss"),
        lambda: KeepEveryNSteps(0),
        lambda: KeepEverySeconds(0),
        lambda: KeepNamed(frozenset()),
        lambda: AnyOf(()),
    ):
        with pytest.raises(SettingsError, match="retention"):
            make()


class _KeepNone:
    """A faulty custom policy, as a user might write it."""

    def keep(self, candidates: Sequence[Candidate]) -> retention.Kept:
        return {}


def test_a_custom_policy_cannot_remove_the_newest_or_pinned() -> None:
    found = [made(10, is_pinned=True), made(20), made(30)]
    assert steps(retention.apply(_KeepNone(), found)) == [10, 30]
    assert retention.would_keep_nothing(_KeepNone(), found)


@pytest.mark.parametrize("text", ["0", "last=0", "-1", "best=0:loss", "none"])
@pytest.mark.parametrize("name", ["remote_retention", "local_retention"])
def test_no_setting_means_delete_all(name: str, text: str) -> None:
    """This covers arguments, the environment, files and the sweeper; the number 0 is not a policy either."""
    with pytest.raises(SettingsError, match=name):
        settings.Settings(**{name: text})
    with pytest.raises(SettingsError, match=name):
        settings.load({}, {f"CKPT_ASYNC_{name.upper()}": text})
    with pytest.raises(SettingsError, match=name):
        settings.load({}, {}, f"{name} = '{text}'")
    with pytest.raises(SettingsError, match=name):
        settings.load({}, {}, f"{name} = 0")


# --- local -------------------------------------------------------------------------------------------------


@given(candidates, st.integers(-1, 5))
def test_local_keeps_the_newest(found: list[Candidate], count: int) -> None:
    """This follows Composer's `save_num_checkpoints_to_keep`: -1 keeps all, 0 keeps none."""
    ordered = sorted(found, key=lambda each: each.id)
    kept = retention.keep_local(count, "").keep(ordered)
    assert [each.id for each in ordered][-count if count > 0 else 0 if count else len(ordered) :] == sorted(
        kept
    )
    assert retention.keep_local(count, "").is_all == (count < 0)


@given(candidates, st.integers(0, 5), policies)
def test_local_number_and_policy_keep_what_either_keeps(
    found: list[Candidate], count: int, policy: retention.RetentionPolicy
) -> None:
    ordered = sorted(found, key=lambda each: each.id)
    kept = KeepLocal(count, policy).keep(ordered)
    assert kept.keys() == policy.keep(ordered).keys() | KeepLocal(count).keep(ordered).keys()


@given(candidates, policies)
def test_local_policy_alone_also_keeps_the_newest(
    found: list[Candidate], policy: retention.RetentionPolicy
) -> None:
    """With -1 the policy alone chooses, but the checkpoint to resume from still stays."""
    kept = KeepLocal(-1, policy)
    assert kept.keep(sorted(found, key=lambda each: each.id)) == retention.apply(policy, found)
    assert kept.is_all == retention.keeps_all(policy)


def test_local_policy_has_the_syntax_of_the_remote_policy() -> None:
    assert retention.keep_local(2, "best=1:loss") == KeepLocal(2, AnyOf((KeepBest(1, "loss"),)))
    assert retention.keep_local(2, " ") == KeepLocal(2)
    assert retention.keep_local(0, "all").is_all
    with pytest.raises(SettingsError, match="retention"):
        retention.keep_local(2, "last=0")


def test_any_of_keeps_all_if_one_policy_does() -> None:
    """If one policy keeps everything, the others have no effect: `prune` refuses it, and local retention skips its
    work.
    """
    assert retention.keeps_all(retention.parse("last=1,all"))
    assert retention.keep_local(2, "all,last=1").is_all
    assert not retention.keeps_all(retention.parse("last=1,every-steps=2"))


# --- text --------------------------------------------------------------------------------------------------


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
def test_policy_text_is_parsed(text: str, policy: object) -> None:
    """What a unit file says must be what happens."""
    assert policy == retention.parse(text)


@pytest.mark.parametrize(
    "text",
    ["last=0", "last=-1", "last=x", "last", "every-steps=0", "every-seconds=0", "every-seconds=nan", "best=1",
     "best=0:loss", "best=1:loss:median", "best=1:loss:min:x", "named=", "all=1", ",", "last=1,", "newest=1",
     "0", "-1", "none"],
)  # fmt: skip
def test_policy_text_that_could_mean_delete_all_is_rejected(text: str) -> None:
    """A typo must not delete a training run."""
    with pytest.raises(SettingsError, match="retention"):
        retention.parse(text)
