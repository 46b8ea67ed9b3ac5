"""Deliberate bugs in what prunes, collects, verifies and reads: the test named with each must find it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from ckpt_async.core import records, retention
from ckpt_async.core.boundary import Boundary
from ckpt_async.protocol import steps, sweep_plan, verify
from ckpt_async.sweep import remote as remote_sweep
from tests.core import test_records as reading
from tests.core import test_retention as keeping
from tests.model.mutation import changed
from tests.protocol import test_sweep_plan as planning
from tests.sweep import test_bad_records as bad_records
from tests.sweep import test_sweep as sweeping
from tests.sweep import test_verify as verifying


@dataclass(frozen=True)
class Bug:
    where: Callable[..., Any]
    old: str
    new: str
    test: Callable[..., None]
    needs_run: bool = False

    def __str__(self) -> str:
        return f"{self.where.__qualname__}: {self.old.strip()} -> {self.new.strip() or 'nothing'}"


def in_loop(test: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
    return partial(test, *args, **kwargs), True


def over(index: int) -> Any:
    """Return `test_unsettled_checkpoints_are_not_collected`, bound to one of its views."""
    (mark,) = [
        each
        for each in planning.test_unsettled_checkpoints_are_not_collected.pytestmark  # type: ignore[attr-defined]
        if each.name == "parametrize"
    ]
    return partial(planning.test_unsettled_checkpoints_are_not_collected, mark.args[1][index])


OLD_STEP = planning.CheckpointId(1, 3)
DATA = {"data": {OLD_STEP: (planning.shard(OLD_STEP, 1.0),)}}
RECEIPTS = {"receipts": {OLD_STEP: planning.receipts(OLD_STEP, 1.0)}}
UNREADABLE = {"unreadable": frozenset({OLD_STEP})}
undecided = planning.test_the_boundary_keeps_an_undecided_checkpoint_below_it
exact = planning.test_of_the_newest_generation_exact_checkpoints_are_collected
grows = planning.test_a_checkpoint_that_still_makes_progress_is_not_given_up
lasts = planning.test_a_lease_holds_for_its_term_plus_a_margin_and_at_most_a_day
same_time = sweeping.test_all_deleters_give_readers_the_same_time

BUGS = [
    # plan
    Bug(sweep_plan._settle, "newest_at = max(", "newest_at = min(", partial(grows, planning.OLD, 999.0, False, False)),
    Bug(sweep_plan._settle, "(*receipts.values(), *", "(*(), *", partial(grows, planning.OLD, 999.0, False, True)),
    Bug(sweep_plan._settle, "age_s >= ages.help_s", "True", partial(
        planning.test_a_complete_checkpoint_is_left_to_its_engines_at_first, (9999.0, 59.0), False)),
    Bug(sweep_plan._settle, "ages.superseded_s if is_superseded else ages.newest_s", "ages.superseded_s",
        partial(grows, planning.NEW, 4999.0, False, False)),
    Bug(sweep_plan._collect, "and not view.data.get(id_)", "", over(0)),
    Bug(sweep_plan._collect, "and not view.receipts.get(id_)", "", over(1)),
    Bug(sweep_plan._collect, ">= ages.superseded_s", ">= 0", over(2)),
    Bug(sweep_plan._collect, "and id_ != newest", "", over(3)),
    Bug(sweep_plan._collect, "if id_ not in superseded", "", exact),
    Bug(sweep_plan._collect, "if id_.generation < view.newest_generation", "", exact),
    Bug(sweep_plan._collect, ", *view.boundary.pruned, *view.boundary.aborted", "", exact),
    Bug(sweep_plan._collect, ", Outcome.PRUNED", ", Outcome.PRUNED, Outcome.COMMIT", over(4)),
    Bug(sweep_plan._collect, ", Outcome.PRUNED", ", Outcome.PRUNED, Outcome.PRUNING", over(5)),
    Bug(sweep_plan._collect, "*view.data, ", "", partial(undecided, DATA)),
    Bug(sweep_plan._collect, "*view.receipts, ", "", partial(undecided, RECEIPTS)),
    Bug(sweep_plan._collect, ", *view.unreadable", "", partial(undecided, UNREADABLE)),
    Bug(sweep_plan._collect, "and not view.boundary.voids(id_))", ")",
        planning.test_a_decision_that_reappears_below_the_boundary_is_removed_again),
    Bug(sweep_plan.expires_at, " + LEASE_MARGIN_S", "", partial(lasts, 600.0, 660.0)),
    Bug(sweep_plan.expires_at, "min(max(lease.ttl_s, 0.0), MAX_LEASE_S)", "max(lease.ttl_s, 0.0)",
        partial(lasts, 1e12, sweep_plan.MAX_LEASE_S + sweep_plan.LEASE_MARGIN_S)),
    Bug(sweep_plan.expires_at, "max(lease.ttl_s, 0.0)", "lease.ttl_s", partial(lasts, -600.0, 60.0)),
    Bug(sweep_plan._is_unknown, "not view.is_boundary_readable", "False",
        planning.test_an_unreadable_boundary_protects_what_it_may_cover),
    Bug(sweep_plan._is_unknown, "checkpoint in view.unreadable and", "False and",
        planning.test_an_unreadable_boundary_protects_what_it_may_cover),
    # protocol
    Bug(steps.collect, " and boundary.voids(id_)", "",
        *in_loop(sweeping.test_a_slow_sweeper_deletes_no_decision_that_the_boundary_keeps)),
    Bug(Boundary.moved, "id_ for id_ in kept if not self.voids(id_)", "kept",
        *in_loop(sweeping.test_void_decisions_stay_void_as_the_boundary_moves)),
    Bug(steps.collect, "NOTHING_COLLECTED if there is None else", "NOTHING_COLLECTED if not there else",
        *in_loop(bad_records.test_an_unreadable_decision_is_not_replaced)),
    Bug(steps.readers, "sweep_plan.expires_at(lease, each.last_modified or listing.server_time)",
        "(each.last_modified or 0.0) + lease.ttl_s", *in_loop(same_time, ttl_s=600.0)),
    Bug(steps.readers, "sweep_plan.expires_at(lease, each.last_modified or listing.server_time)",
        "(each.last_modified or 0.0) + lease.ttl_s + sweep_plan.LEASE_MARGIN_S", *in_loop(same_time, ttl_s=1e12)),
    # sweeper
    Bug(remote_sweep.RemoteSweep._read_leases, "lease = steps.unreadable_lease(checkpoint, each.key)", "continue",
        *in_loop(bad_records.test_an_unreadable_lease_counts_for_the_longest_term)),
    Bug(steps.read_decisions, "del known[gone]", "pass",
        *in_loop(sweeping.test_a_collected_decision_is_forgotten_by_those_who_read_it)),
    Bug(steps.read_decisions, "if not etag or known", "if known",
        *in_loop(sweeping.test_a_store_that_lists_no_etags_is_swept_as_well)),
    # verify
    Bug(verify._check_shard, " or info.checksum is None", "",
        *in_loop(verifying.test_objects_without_a_stored_checksum_are_read)),
    Bug(verify._check_latest, "elif decision.name != latest.name:", "elif False:",
        *in_loop(verifying.test_a_latest_with_a_wrong_name_is_named)),
    Bug(verify._is_still_committed, "decision is not None and decision.outcome is Outcome.COMMIT", "True",
        *in_loop(verifying.test_pruning_during_verify_is_not_damage)),
    # retention, records
    Bug(retention.keeps_all, "any(", "all(", keeping.test_any_of_keeps_all_if_one_policy_does),
    Bug(records.decode_latest, "if latest.prefix !=", "if False and latest.prefix !=",
        reading.test_a_latest_with_another_prefix_is_rejected),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_each_seeded_bug_is_found(bug: Bug, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that has never failed on purpose proves nothing."""
    monkeypatch.setattr(sweep_plan, "COLLECT_AT_LEAST", 1)
    with changed(bug.where, bug.old, bug.new), pytest.raises((AssertionError, pytest.fail.Exception)):
        bug.test(run) if bug.needs_run else bug.test()
