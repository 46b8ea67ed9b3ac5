"""What a sweep decides, as a pure function from a view of the store to actions: each rule at its boundary values."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ckpt_async.core import keys
from ckpt_async.core.boundary import NOWHERE, Boundary, Checkpoints
from ckpt_async.core.model import CheckpointId, Checksum, Decision, Latest, Lease, Outcome
from ckpt_async.core.retention import KeepAll, parse
from ckpt_async.protocol import sweep_plan
from ckpt_async.protocol.sweep_plan import Ages, CollectDecisions, GiveUp, Settle, View, Wait
from ckpt_async.stores.interface import MultipartInfo, ObjectInfo

NOW = 1_000_000.0
AGES = Ages(superseded_s=1000.0, newest_s=5000.0, help_s=60.0)
OLD, NEW, LAST = CheckpointId(1, 5), CheckpointId(2, 5), CheckpointId(2, 9)


def view(**facts: Any) -> View:
    """Return a view in which generation 2 is the newest and has two ranks."""
    empty: dict[str, Any] = {name: {} for name in ("decisions", "decided_at", "receipts", "data", "names")}
    return View(**{"server_time": NOW, "newest_generation": 2, "world_sizes": {1: 2, 2: 2}, **empty, **facts})


def shard(id_: CheckpointId, age_s: float, name: str = "a.pt") -> ObjectInfo:
    key = keys.data_key(f"step-{id_.step}", id_.generation, name)
    return ObjectInfo(key, 1, "", None, NOW - age_s)


def receipts(id_: CheckpointId, *ages_s: float) -> dict[int, ObjectInfo]:
    return {
        rank: ObjectInfo(keys.receipt_key(id_, rank), 1, "", None, NOW - age_s)
        for rank, age_s in enumerate(ages_s)
    }


def decision(id_: CheckpointId, outcome: Outcome = Outcome.ABORT) -> Decision:
    return Decision(id_, outcome, f"step-{id_.step}", 2, "nonce", 0.0, "test")


def planned(seen: View, kind: type[sweep_plan.Planned]) -> list[Any]:
    return [each for each in sweep_plan.plan(seen, KeepAll(), AGES) if isinstance(each, kind)]


@pytest.mark.parametrize(
    ("id_", "youngest_s", "is_given_up"),
    [(OLD, 999.0, False), (OLD, 1000.0, True), (NEW, 4999.0, False), (NEW, 5000.0, True)],
)
@pytest.mark.parametrize("is_receipt", [False, True])
def test_a_checkpoint_that_still_makes_progress_is_not_given_up(
    id_: CheckpointId, youngest_s: float, is_given_up: bool, is_receipt: bool
) -> None:
    """However old its first object is, a checkpoint's age is that of its newest object, shard or receipt."""
    data = (shard(id_, 9999.0), *([] if is_receipt else [shard(id_, youngest_s, "b.pt")]))
    there = receipts(id_, youngest_s) if is_receipt else receipts(id_, 9999.0)
    seen = view(data={id_: data}, receipts={id_: there})
    assert [each.checkpoint for each in planned(seen, GiveUp)] == ([id_] if is_given_up else [])
    assert [each.checkpoint for each in planned(seen, Wait)] == ([] if is_given_up else [id_])


@pytest.mark.parametrize(("ages_s", "is_helped"), [((9999.0, 59.0), False), ((60.0, 9999.0), True)])
def test_a_complete_checkpoint_is_left_to_its_engines_at_first(
    ages_s: tuple[float, float], is_helped: bool
) -> None:
    seen = view(data={NEW: (shard(NEW, 9999.0),)}, receipts={NEW: receipts(NEW, *ages_s)})
    assert [each.checkpoint for each in planned(seen, Settle)] == ([NEW] if is_helped else [])


# --- retention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["", "a shard", "a part of a shard", "a receipt"])
def test_a_checkpoint_of_which_something_is_missing_does_not_count(lacks: str) -> None:
    """Otherwise the only whole one would be pruned for its sake."""
    ids = [CheckpointId(2, step) for step in (1, 2, 3)]
    checksums = (Checksum("crc32c", "AAAAAA=="),) * 2
    commits = {
        id_: replace(decision(id_, Outcome.COMMIT), num_shards=2, size_bytes=2, receipts=checksums)
        for id_ in ids
    }
    data = {id_: (shard(id_, 9.0), shard(id_, 9.0, "b.pt")) for id_ in ids}
    there = {id_: receipts(id_, 9.0, 9.0) for id_ in ids}
    if lacks == "a shard":
        data[ids[2]] = data[ids[2]][:1]
    elif lacks == "a part of a shard":
        data[ids[2]] = (data[ids[2]][0], replace(data[ids[2]][1], size_bytes=0))
    elif lacks == "a receipt":
        there[ids[2]] = receipts(ids[2], 9.0)
    newest = Latest(ids[2], "step-3", "ckpt/step-3.g2/", 1, "nonce")
    seen = view(decisions=commits, data=data, receipts=there, latest=newest)
    pruned = [
        each.checkpoint
        for each in sweep_plan.plan(seen, parse("last=1"), AGES)
        if isinstance(each, sweep_plan.BeginPrune)
    ]
    assert pruned == (ids[:1] if lacks else ids[:2])


# --- leases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttl_s", "lasts_s"),
    [
        (600.0, 600.0 + sweep_plan.LEASE_MARGIN_S),
        (-600.0, sweep_plan.LEASE_MARGIN_S),
        (1e12, sweep_plan.MAX_LEASE_S + sweep_plan.LEASE_MARGIN_S),
    ],
)
def test_a_lease_holds_for_its_term_plus_a_margin_and_at_most_a_day(ttl_s: float, lasts_s: float) -> None:
    """Clocks drift and answers are delayed, so there is a margin; but nobody's lease may keep a checkpoint forever."""
    lease, pruning = Lease(OLD, "reader", ttl_s), {OLD: decision(OLD, Outcome.PRUNING)}
    for age_s, is_held in ((lasts_s - 1, True), (lasts_s, False)):
        key = keys.lease_key(OLD, "reader")
        seen = view(decisions=pruning, leases={key: (lease, NOW - age_s)})
        assert bool(planned(seen, sweep_plan.FinishPrune)) != is_held
        assert [each.object_keys for each in planned(seen, sweep_plan.Delete)] == (
            [] if is_held else [(key,)]
        )


# --- collecting ----------------------------------------------------------------------------------------------


def collected(seen: View) -> list[CollectDecisions]:
    return planned(seen, CollectDecisions)


@pytest.fixture
def collects_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_plan, "COLLECT_AT_LEAST", 1)


def settled_view(*ids: CheckpointId, age_s: float = AGES.superseded_s, **facts: Any) -> View:
    """Return a view in which these were given up, and a newer checkpoint was committed."""
    decisions = {id_: decision(id_) for id_ in ids} | {LAST: decision(LAST, Outcome.COMMIT)}
    return view(decisions=decisions, decided_at=dict.fromkeys(ids, NOW - age_s), **facts)


@pytest.mark.usefixtures("collects_one")
def test_settled_and_removed_checkpoints_are_collected() -> None:
    (action,) = collected(settled_view(OLD))
    assert (action.upto, action.kept, action.object_keys) == (OLD, frozenset(), (keys.decision_key(OLD),))


@pytest.mark.usefixtures("collects_one")
def test_of_the_newest_generation_exact_checkpoints_are_collected() -> None:
    """By position, one that is not decided yet could become void. When the generation is superseded, its collected
    checkpoints are below the boundary, as those of any other.
    """
    pruned, open_ = CheckpointId(2, 3), CheckpointId(2, 4)
    decisions = {
        NEW: decision(NEW),
        pruned: decision(pruned, Outcome.PRUNED),
        LAST: decision(LAST, Outcome.COMMIT),
    }
    seen = view(decisions=decisions, decided_at={NEW: 0.0, pruned: 0.0}, data={open_: (shard(open_, 1.0),)})
    (action,) = collected(seen)
    assert (action.upto, action.pruned, action.aborted) == (NOWHERE, {pruned}, {NEW})
    assert action.object_keys == (keys.decision_key(pruned), keys.decision_key(NEW))
    before = Boundary(pruned=Checkpoints.of(action.pruned), aborted=Checkpoints.of(action.aborted))
    newer = CheckpointId(3, 1)
    commits = {id_: decision(id_, Outcome.COMMIT) for id_ in (LAST, newer)}
    decisions = commits | {OLD: decision(OLD)}
    later = replace(seen, decisions=decisions, decided_at={OLD: 0.0}, newest_generation=3, boundary=before)
    (action,) = collected(later)
    assert (action.upto, action.kept, action.pruned, action.aborted) == (NEW, {open_}, set(), set())


@pytest.mark.usefixtures("collects_one")
@pytest.mark.parametrize(
    "seen",
    [
        settled_view(OLD, data={OLD: (shard(OLD, 9999.0),)}),
        settled_view(OLD, receipts={OLD: receipts(OLD, 9999.0)}),
        settled_view(OLD, age_s=AGES.superseded_s - 1),
        view(decisions={NEW: decision(NEW)}, decided_at={NEW: 0.0}),
        view(decisions={OLD: decision(OLD, Outcome.COMMIT), NEW: decision(NEW)}, decided_at={OLD: 0.0}),
        view(decisions={OLD: decision(OLD, Outcome.PRUNING), NEW: decision(NEW)}, decided_at={OLD: 0.0}),
    ],
    ids=["data-left", "receipts-left", "young", "newest", "commit", "pruning"],
)
def test_unsettled_checkpoints_are_not_collected(seen: View) -> None:
    """Without its decision, the remains of a checkpoint would look undecided, and a straggler could commit it."""
    assert collected(seen) == []


@pytest.mark.usefixtures("collects_one")
@pytest.mark.parametrize(
    "facts",
    [
        {"data": {CheckpointId(1, 3): (shard(CheckpointId(1, 3), 1.0),)}},
        {"receipts": {CheckpointId(1, 3): receipts(CheckpointId(1, 3), 1.0)}},
        {"unreadable": frozenset({CheckpointId(1, 3)})},
    ],
    ids=["data", "receipts", "unreadable"],
)
def test_the_boundary_keeps_an_undecided_checkpoint_below_it(facts: dict[str, Any]) -> None:
    """Its ranks may still be working on it: if it were voided, what they commit would be swept away."""
    (action,) = collected(settled_view(OLD, **facts))
    assert action.kept == {CheckpointId(1, 3)}
    assert action.object_keys == (keys.decision_key(OLD),)


def test_a_few_old_decisions_are_not_collected() -> None:
    """The boundary is only moved once enough decisions have accumulated."""
    ids = [CheckpointId(1, step) for step in range(sweep_plan.COLLECT_AT_LEAST)]
    assert collected(settled_view(*ids[1:])) == []
    assert len(collected(settled_view(*ids))[0].object_keys) == sweep_plan.COLLECT_AT_LEAST


def test_a_decision_that_reappears_below_the_boundary_is_removed_again() -> None:
    """A straggler's decision is void: it neither moves the boundary nor becomes valid again through its data."""
    boundary = Boundary(CheckpointId(1, 9), Checkpoints.of({CheckpointId(1, 3)}))
    void = CheckpointId(1, 4)
    data = {void: (shard(void, 1.0),)}
    seen = settled_view(OLD, CheckpointId(1, 3), age_s=0.0, boundary=boundary, data=data)
    (action,) = collected(seen)
    assert (action.upto, action.kept) == (boundary.upto, {CheckpointId(1, 3)})
    assert action.object_keys == (keys.decision_key(OLD),)


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_upload_that_a_straggler_begins_for_a_collected_checkpoint_is_dropped_at_once(
    is_kept: bool,
) -> None:
    """Nobody will complete it. What the boundary has kept is undecided, and may still be uploaded."""
    boundary = Boundary(CheckpointId(1, 9), Checkpoints.of({OLD} if is_kept else ()))
    begun = MultipartInfo(keys.data_key("step-5", 1, "a.pt"), "upload", NOW)
    aborted = planned(view(multiparts=(begun,), boundary=boundary), sweep_plan.AbortMultipart)
    assert [each.upload_id for each in aborted] == ([] if is_kept else ["upload"])


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_mark_of_a_damaged_checkpoint_goes_when_its_decision_is_collected(is_kept: bool) -> None:
    boundary = Boundary(CheckpointId(1, 9), Checkpoints.of({OLD} if is_kept else ()))
    kept = {OLD: decision(OLD, Outcome.COMMIT)} if is_kept else {}
    seen = view(decisions=kept, damaged=frozenset({OLD}), boundary=boundary)
    removed = [each.object_keys for each in planned(seen, sweep_plan.Delete)]
    assert removed == ([] if is_kept else [(keys.damage_key(OLD),)])


def test_an_unreadable_boundary_protects_what_it_may_cover() -> None:
    """Nobody knows what it covers, so nothing is decided; an unreadable decision is about its checkpoint only."""

    def acted_on(seen: View) -> set[CheckpointId]:
        actions: Iterable[Any] = sweep_plan.plan(seen, KeepAll(), AGES)
        return {each.checkpoint for each in actions if not isinstance(each, Wait | sweep_plan.Delete)}

    data = {id_: (shard(id_, 9999.0),) for id_ in (OLD, NEW)}
    seen = view(data=data, newest_generation=2)
    assert acted_on(seen) == {OLD, NEW}
    assert acted_on(replace(seen, is_boundary_readable=False)) == set()
    assert acted_on(replace(seen, unreadable=frozenset({OLD}))) == {NEW}


def test_a_plan_says_how_many_checkpoints_lack_the_metric_of_the_policy() -> None:
    ids = [CheckpointId(2, step) for step in (1, 2, 3)]
    commits = {each: decision(each, Outcome.COMMIT) for each in ids}
    commits[ids[1]] = replace(commits[ids[1]], metrics={"loss": 1.0})
    seen = view(decisions=commits, latest=Latest(ids[2], "step-3", "ckpt/", 1, "nonce"))
    (prune,) = [
        each
        for each in sweep_plan.plan(seen, parse("best=1:loss"), AGES)
        if isinstance(each, sweep_plan.BeginPrune)
    ]
    assert prune.checkpoint == ids[0]
    assert prune.reason == "beyond retention; 2 of 3 checkpoints have no metric 'loss'"
