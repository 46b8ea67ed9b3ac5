"""Local retention by `decide` and superseding, tested as pure functions from journal events to actions."""

from collections.abc import Iterable

import pytest

from ckpt_async.core import decide, order, retention
from ckpt_async.core.decide import Forget, Keep, MoveLocalLatest, Policy, Remove
from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import (
    CheckpointId,
    Decided,
    Enqueued,
    Event,
    Failed,
    FileIdentity,
    JournalRow,
    Opened,
    Outcome,
    Released,
    RemoteAddress,
    Sealed,
    Shard,
    Superseded,
)
from ckpt_async.errors import FailureReason

REASON = "the disk is full"


def id_of(step: int) -> CheckpointId:
    return CheckpointId(1, step)


def saved(step: int, loss: float = 1.0) -> list[Event]:
    shard = Shard("a.pt", f"step-{step}/a.pt", FileIdentity(1, step, 10, 3), True)
    return [
        Enqueued(id_of(step), f"step-{step}", shard),
        Sealed(id_of(step), f"step-{step}", 1, (("loss", loss),)),
    ]


def decided(step: int, outcome: Outcome = Outcome.COMMIT) -> list[Event]:
    return [Decided(id_of(step), outcome, f"step-{step}"), Released(id_of(step))]


def local(*events: Iterable[Event]) -> Local:
    """Build the local state from events that happen one second apart."""
    rows = [Opened(1, 1, RemoteAddress("file:///run")), *(event for each in events for event in each)]
    return fold(
        [JournalRow(number, 0, float(number), event) for number, event in enumerate(rows, 1)], Local(0)
    )


def removed(state: Local, count: int, text: str, linked: int) -> list[int]:
    """Return the steps whose local files are removed once the symlink points to `linked`."""
    policy = Policy(local_retention=retention.keep_local(count, text))
    remote = decide.Remote(published=decide.Published(local_latest=id_of(linked)))
    actions = decide.decide(state, remote, policy, now=0.0)
    assert not any(isinstance(each, MoveLocalLatest) for each in actions)
    return [each.checkpoint.step for each in actions if isinstance(each, Remove)]


def committed(losses: dict[int, float]) -> Local:
    return local(*([*saved(step, loss), *decided(step)] for step, loss in losses.items()))


LOSSES = {10: 0.5, 20: 0.1, 30: 0.4, 40: 0.3, 50: 0.2}


@pytest.mark.parametrize(
    ("count", "text", "linked", "gone"),
    [
        (-1, "", 50, []),
        (2, "", 50, [10, 20, 30]),
        (2, "best=1:loss", 50, [10, 30]),
        (1, "every-steps=20", 50, [10, 30]),
        (-1, "best=2:loss:max", 50, [20, 40]),  # 50 is the newest
        (0, "best=1:loss:min", 20, [10, 30, 40, 50]),
        (3, "all", 50, []),
        (-1, "every-seconds=9", 50, [20, 30]),  # a checkpoint was saved every four seconds
        (1, "named=step-20", 50, [10, 30, 40]),
    ],
)
def test_local_files_are_removed_by_number_and_policy(
    count: int, text: str, linked: int, gone: list[int]
) -> None:
    assert removed(committed(LOSSES), count, text, linked) == gone


def test_every_removal_has_a_reason() -> None:
    policy = Policy(local_retention=retention.keep_local(2, "best=1:loss"))
    actions = decide.decide(
        committed(LOSSES), decide.Remote(published=decide.Published(local_latest=id_of(50))), policy, now=0.0
    )
    reasons = {each.reason for each in actions if isinstance(each, Remove)}
    assert reasons == {"beyond num_checkpoints_to_keep=2 and local_retention"}


def test_only_committed_checkpoints_count_and_are_removed() -> None:
    """R7, R8: checkpoints still uploading must not push out the last safe one; an aborted one belongs to the user."""
    state = local([*saved(10), *decided(10)], [*saved(20), *decided(20, Outcome.ABORT)], saved(30), saved(40))
    policy = Policy(local_retention=retention.keep_local(1, "every-steps=20"))
    actions = decide.decide(
        state, decide.Remote(published=decide.Published(local_latest=id_of(10))), policy, now=0.0
    )
    assert not any(isinstance(each, Remove) for each in actions)
    assert [each.checkpoint.step for each in actions if isinstance(each, Forget)] == [20]


@pytest.mark.fault("F40")
def test_checkpoints_kept_for_good_leave_the_journal() -> None:
    """The journal need not remember them forever, and a later launch that keeps fewer checkpoints must not remove them.

    The newest stays in the journal, because `latest` and the symlink depend on it.
    """
    state = local(
        [*saved(10), *decided(10)], [*saved(20), *decided(20)], [*saved(30), *decided(30, Outcome.ABORT)]
    )
    actions = decide.decide(
        state, decide.Remote(published=decide.Published(local_latest=id_of(20))), Policy(), now=0.0
    )
    assert actions == [Keep(id_of(10)), Forget(id_of(30))]


def test_the_symlink_moves_before_its_target_is_removed() -> None:
    """R2, locally: with a count of 0 and a policy, the symlink moves to the newest checkpoint that the policy keeps."""
    policy = Policy(local_retention=retention.keep_local(0, "best=1:loss"))
    actions = decide.decide(
        committed(LOSSES), decide.Remote(published=decide.Published(local_latest=id_of(50))), policy, now=0.0
    )
    assert [each for each in actions if isinstance(each, MoveLocalLatest)] == [MoveLocalLatest(id_of(20))]
    assert not any(isinstance(each, Remove) for each in actions)


# --- superseding -------------------------------------------------------------------------------------------


def superseded(state: Local, policy: str, turned_to: int = 30, *, is_disk_short: bool = False) -> list[int]:
    """Return the steps that may be given up while all ranks send the step `turned_to`."""
    uploads = decide.Uploads(order.Turn(target=id_of(turned_to)))
    policies = Policy(remote_retention=retention.parse(policy))
    found = decide.supersedable(state, uploads, policies, is_disk_short=is_disk_short)
    return [each.step for each in found]


def test_what_is_older_than_the_target_may_be_superseded() -> None:
    state = local(saved(10), saved(20), saved(30))
    assert superseded(state, "last=1") == [10, 20]
    assert superseded(state, "every-steps=20") == [10]
    assert superseded(state, "last=1", turned_to=20) == [10]
    assert superseded(state, "last=1", turned_to=10) == []
    assert superseded(state, "all") == []


def test_a_full_disk_supersedes_whatever_remote_retention_keeps() -> None:
    assert superseded(local(saved(10), saved(20), saved(30)), "all", is_disk_short=True) == [10, 20]


def test_what_a_rank_has_delivered_is_not_superseded() -> None:
    uploads = decide.Uploads(
        turn=order.Turn(target=id_of(30)),
        delivered_by_others=frozenset([id_of(10)]),
    )
    state = local(saved(10), saved(20), saved(30))
    found = decide.supersedable(state, uploads, Policy(), is_disk_short=True)
    assert [each.step for each in found] == [20]


@pytest.mark.parametrize(
    "end",
    [
        decided(30, Outcome.ABORT),
        [Superseded(id_of(30), REASON)],
        [Failed(id_of(30), "a.pt", FailureReason.SOURCE_MISSING, "gone")],
    ],
    ids=["aborted", "superseded", "lost"],
)
def test_an_aborted_or_doomed_newest_checkpoint_protects_no_other(end: list[Event]) -> None:
    """If it counted as the newest, the one before it could be dropped too, and no recent checkpoint would be left."""
    state = local(saved(10), saved(20), saved(30), end)
    assert superseded(state, "last=1") == [10]


def test_a_newer_committed_checkpoint_protects_none_of_the_backlog() -> None:
    state = local(saved(10), saved(20), [*saved(30), *decided(30)])
    assert superseded(state, "last=1") == [10, 20]


def test_a_newer_pruned_checkpoint_does_not_count() -> None:
    state = local(saved(10), saved(20), [*saved(30), *decided(30, Outcome.PRUNED)])
    assert superseded(state, "last=1") == [10]


def test_an_unsealed_checkpoint_is_never_superseded() -> None:
    """The trainer is still writing this checkpoint."""
    state = local(saved(10), saved(20), saved(30)[:1])
    assert superseded(state, "last=1") == [10]


@pytest.mark.parametrize(
    ("count", "may_supersede", "is_superseded", "is_removed"),
    [
        (1, True, True, True),
        (0, True, True, True),
        (1, False, True, False),
        (1, True, False, False),
        (-1, True, True, False),
    ],
)
def test_files_superseded_by_another_rank_are_removed_if_this_rank_supersedes_too(
    count: int, may_supersede: bool, is_superseded: bool, is_removed: bool
) -> None:
    """A superseding decision applies to all ranks, so the files are useless here too. R7: never without the user's
    consent.
    """
    end = Decided(id_of(10), Outcome.ABORT, "step-10", "rank 1: superseded by newer ones", is_superseded)
    state = local([*saved(10), end, Released(id_of(10))], saved(20))
    policy = Policy(local_retention=retention.keep_local(count, ""), may_supersede=may_supersede)
    actions = [
        each
        for each in decide.decide(state, decide.Remote(), policy, now=0.0)
        if getattr(each, "checkpoint", None) == id_of(10)
    ]
    assert actions == [Remove(id_of(10), end.reason) if is_removed else Forget(id_of(10))]
