"""What a sweep of a remote does, step by step, and that interrupting or duplicating it changes nothing."""

import asyncio
from typing import Any

import pytest

from ckpt_async.core import keys, records
from ckpt_async.core.boundary import Boundary, Checkpoints
from ckpt_async.core.model import CheckpointId, Damage, Lease, Outcome
from ckpt_async.core.retention import AnyOf, KeepBest, KeepEveryNSteps, KeepLast
from ckpt_async.protocol import deciding, steps, sweep_plan
from ckpt_async.protocol.sweep_plan import Ages
from ckpt_async.sweep.remote import MAX_ABORTS
from tests.sweep.world import HOUR_S, Counted, StoppedError, World, ids, replaced


@pytest.fixture
def collects_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_plan, "COLLECT_AT_LEAST", 1)


def test_remote_retention_keeps_what_the_policy_keeps(run: Any) -> None:
    """This is the purpose of it all: old checkpoints are removed completely, and those that are kept stay complete."""

    async def main() -> None:
        world = await World.begun()
        for step, loss in zip((10, 20, 30, 40, 50), (0.5, 0.1, 0.4, 0.3, 0.2), strict=True):
            await world.commit(CheckpointId(1, step), loss=loss)
        await world.sweep(AnyOf((KeepLast(1), KeepBest(1, "loss"), KeepEveryNSteps(40))))
        outcomes = {step: await world.outcome(CheckpointId(1, step)) for step in (10, 20, 30, 40, 50)}
        assert [step for step, outcome in outcomes.items() if outcome is Outcome.COMMIT] == [20, 40, 50]
        assert [step for step, outcome in outcomes.items() if outcome is Outcome.PRUNED] == [10, 30]
        assert {keys.parse_data_key(key)[0].step for key in world.keys(keys.DATA)} == {20, 40, 50}  # type: ignore[index]
        result = await world.verify()
        assert result.findings == []
        assert result.num_committed == 3

    run(main())


class WithoutETags(Counted):
    """A store whose listings name no ETags."""

    async def list(self, prefix: str) -> Any:
        listing = await self._store.list(prefix)
        return replaced(listing, objects=tuple(replaced(each, etag="") for each in listing.objects))


def test_a_store_that_lists_no_etags_is_swept_as_well(run: Any) -> None:
    """Its decisions counted as read before anybody had read them, and nothing was ever pruned."""

    async def main() -> None:
        world = await World.begun(1, 2, 3)
        sweeper = world.sweeper(KeepLast(1), store=WithoutETags(world.store))  # type: ignore[arg-type]
        assert (await sweeper.run(is_dry_run=False)).is_clean
        assert [await world.outcome(id_) for id_ in ids(1, 2, 3)] == [
            Outcome.PRUNED,
            Outcome.PRUNED,
            Outcome.COMMIT,
        ]

    run(main())


def test_dry_run_changes_nothing_and_gives_reasons(run: Any) -> None:
    """A plan can be read before it is carried out."""

    async def main() -> None:
        world = await World.begun(1, 2)
        before = dict(world.bucket.objects)
        report = await world.sweeper(KeepLast(1)).run(is_dry_run=True)
        assert [type(each.action) for each in report.done] == [sweep_plan.BeginPrune]
        assert "retention" in report.done[0].action.reason
        assert world.bucket.objects == before

    run(main())


async def _mark_damaged(world: World, id_: CheckpointId) -> None:
    mark = records.encode_damage(Damage(id_, "a shard is short", "a reader", world.now))
    await world.store.put(keys.damage_key(id_), mark)


def test_a_damaged_checkpoint_does_not_count_for_retention(run: Any) -> None:
    """An unreadable checkpoint must not push out readable ones; it is pruned in its turn, together with its mark."""

    async def main() -> None:
        world = await World.begun(1, 2, 3)
        for step in (2, 3):
            await _mark_damaged(world, CheckpointId(1, step))
        await world.sweep(KeepLast(1))
        outcomes = [await world.outcome(id_) for id_ in ids(1, 2, 3)]
        assert outcomes == [Outcome.COMMIT, Outcome.PRUNED, Outcome.COMMIT]
        assert world.keys(keys.DAMAGED) == [keys.damage_key(CheckpointId(1, 3))]
        await world.commit(CheckpointId(1, 4))
        await world.sweep(KeepLast(1))
        assert [await world.outcome(id_) for id_ in ids(1, 3, 4)] == [
            Outcome.PRUNED,
            Outcome.PRUNED,
            Outcome.COMMIT,
        ]
        assert world.keys(keys.DAMAGED) == []

    run(main())


def test_a_policy_that_matches_nothing_prunes_nothing(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither does one of whose parts asks for the best by a metric that no checkpoint has. The log says so."""

    async def main() -> None:
        world = await World.begun(1, 2, 3)
        report = await world.sweep(KeepBest(1, "los"))
        assert [type(each.action) for each in report.done] == [sweep_plan.Wait, sweep_plan.Wait]
        assert {await world.outcome(id_) for id_ in ids(1, 2, 3)} == {Outcome.COMMIT}
        caplog.clear()
        report = await world.sweep(AnyOf((KeepBest(1, "los"), KeepLast(2))))
        assert [type(each.action) for each in report.done] == [sweep_plan.Wait]
        assert await world.outcome(CheckpointId(1, 1)) is Outcome.COMMIT
        (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert "3 of 3 checkpoints have no metric 'los', so nothing is pruned" in warning

    run(main())


class _Stubborn(Counted):
    """A store whose multipart uploads survive that many aborts, because parts were still arriving."""

    def __init__(self, store: Any, num_aborts: int) -> None:
        super().__init__(store)
        self.num_left = num_aborts

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            await self._store.abort_multipart(key, upload_id)


@pytest.mark.parametrize(("num_aborts", "is_clean"), [(MAX_ABORTS - 1, True), (MAX_ABORTS, False)])
def test_stale_multipart_uploads_are_aborted_until_none_is_left(
    run: Any, num_aborts: int, is_clean: bool
) -> None:
    """An upload that still exists after that is not a success; the next sweep ends it."""

    async def main() -> None:
        world = await World.begun(5)
        await world.store.create_multipart(keys.data_key("step-5", 1, "rank-9.pt"))
        stubborn = _Stubborn(world.store, num_aborts)
        report = await world.sweeper(store=stubborn).run(is_dry_run=False)  # type: ignore[arg-type]
        assert report.is_clean == is_clean
        assert (await world.store.list_multiparts("") == []) == is_clean
        await world.sweep()
        assert await world.store.list_multiparts("") == []

    run(main())


def test_a_checkpoint_is_not_pruned_until_latest_is_ahead_of_it(run: Any) -> None:
    """R2: readers follow latest; what it names, or will be asked for next, must be there."""

    async def main() -> None:
        world = await World.begun(1, 2, moves_latest=False)
        view = await world.sweeper(KeepLast(1)).observe()
        planned = sweep_plan.plan(view, KeepLast(1), Ages())
        assert any(isinstance(each, sweep_plan.MoveLatest) for each in planned)
        assert not any(isinstance(each, sweep_plan.BeginPrune) for each in planned)

    run(main())


def test_pinned_survives_any_policy_and_pinning_what_is_pruned_fails(run: Any) -> None:
    """A pin is in the object that pruning swaps, so only one of the two can happen, never both."""

    async def main() -> None:
        world = await World.begun(1, 2, 3)
        pinned = await steps.set_pin(world.store, CheckpointId(1, 1), True)
        assert pinned is not None
        assert pinned.is_pinned
        await world.sweep(KeepLast(1))
        assert await world.outcome(CheckpointId(1, 1)) is Outcome.COMMIT
        assert await world.outcome(CheckpointId(1, 2)) is Outcome.PRUNED
        late = await steps.set_pin(world.store, CheckpointId(1, 2), True)
        assert late is not None
        assert not late.is_pinned
        await steps.set_pin(world.store, CheckpointId(1, 1), False)
        await world.sweep(KeepLast(1))
        assert await world.outcome(CheckpointId(1, 1)) is Outcome.PRUNED

    run(main())


def test_a_pin_set_between_plan_and_prune_wins(run: Any) -> None:
    """By then, the view on which the sweeper planned is outdated."""

    async def main() -> None:
        world = await World.begun(1, 2)
        sweeper = world.sweeper(KeepLast(1))
        planned = sweep_plan.plan(await sweeper.observe(), KeepLast(1), Ages())
        await steps.set_pin(world.store, CheckpointId(1, 1), True)
        for action in planned:
            await sweeper.perform(action)
        assert await world.outcome(CheckpointId(1, 1)) is Outcome.COMMIT

    run(main())


@pytest.mark.fault("F17")
def test_pruning_waits_for_readers_until_their_lease_expires(run: Any) -> None:
    """A slow restore never sees a shard vanish; a dead reader does not hold space forever."""

    async def main() -> None:
        world = await World.begun(1, 2)
        lease = Lease(CheckpointId(1, 1), "reader-a", ttl_s=600.0)
        assert await steps.take_lease(world.store, lease) is not None
        shards = world.keys("ckpt/step-1.")
        report = await world.sweep(KeepLast(1))
        assert await world.outcome(CheckpointId(1, 1)) is Outcome.PRUNING
        assert world.keys("ckpt/step-1.") == shards
        assert any("reader-a" in each.action.reason for each in report.done)
        world.now += 600.0 + sweep_plan.LEASE_MARGIN_S
        await world.sweep(KeepLast(1))
        assert await world.outcome(CheckpointId(1, 1)) is Outcome.PRUNED
        assert world.keys("ckpt/step-1.") == []
        assert world.keys(keys.LEASES) == []

    run(main())


@pytest.mark.fault("F17")
def test_a_lease_taken_after_pruning_began_is_refused(run: Any) -> None:
    """R3: take the lease, then read the decision again. The reader moves on to another checkpoint and leaves nothing
    behind.
    """

    async def main() -> None:
        world = await World.begun(1, 2)
        assert await steps.begin_prune(world.store, CheckpointId(1, 1))
        lease = Lease(CheckpointId(1, 1), "reader-a", ttl_s=600.0)
        assert await steps.take_lease(world.store, lease) is None
        assert world.keys(keys.LEASES) == []

    run(main())


def test_a_lease_that_appears_after_the_plan_still_holds_pruning_up(run: Any) -> None:
    """The view of the leases is older than the decision `pruning`, so they are listed again before anything is
    deleted.
    """

    async def main() -> None:
        world = await World.begun(1, 2)
        lease = Lease(CheckpointId(1, 1), "reader-a", ttl_s=600.0)
        assert await steps.take_lease(world.store, lease) is not None
        assert await steps.begin_prune(world.store, CheckpointId(1, 1))
        assert not await steps.finish_prune(world.store, CheckpointId(1, 1))
        assert len(world.keys("ckpt/step-1.")) == 2

    run(main())


def test_only_what_is_being_pruned_is_deleted(run: Any) -> None:
    """The plan is older than the decision."""

    async def main() -> None:
        world = await World.begun(1, 2)
        assert not await steps.finish_prune(world.store, CheckpointId(1, 1))
        assert len(world.keys("ckpt/step-1.")) == 2

    run(main())


def test_commit_is_finished_for_engines_that_died(run: Any) -> None:
    """All receipts are there but nobody decided: the checkpoint is complete and must become visible."""

    async def main() -> None:
        world = await World.begun()
        for rank in range(2):
            await world.receipt(CheckpointId(1, 7), rank)
        await world.sweep()
        assert await world.outcome(CheckpointId(1, 7)) is None, "its engines may be about to"
        world.now += Ages().help_s
        await world.sweep()
        assert await world.outcome(CheckpointId(1, 7)) is Outcome.COMMIT
        latest = await steps.read_latest(world.store)
        assert latest is not None
        assert latest.checkpoint == CheckpointId(1, 7)

    run(main())


@pytest.mark.fault("F15")
@pytest.mark.parametrize(
    ("is_superseded", "limit_s"), [(True, Ages().superseded_s), (False, Ages().newest_s)]
)
def test_unfinishable_checkpoints_are_given_up_after_a_while_and_removed(
    run: Any, is_superseded: bool, limit_s: float
) -> None:
    """Half a checkpoint would cost money forever; but a paused trainer of the newest generation gets more time."""

    async def main() -> None:
        world = await World.begun()
        if is_superseded:
            await world.start(2)
        id_ = CheckpointId(1, 7)
        await world.receipt(id_, 0)
        await world.shard(id_, 1)
        world.now += limit_s - 1
        await world.sweep()
        assert await world.outcome(id_) is None
        assert len(world.keys(keys.DATA)) == 2
        world.now += 1
        await world.sweep()
        assert await world.outcome(id_) is Outcome.ABORT
        assert world.keys(keys.DATA) == []
        assert world.keys(keys.RECEIPTS) == []

    run(main())


def test_what_a_live_rank_still_has_to_send_is_not_given_up(run: Any) -> None:
    """Where uploads fall behind, older checkpoints wait as long as newer ones come. A dead rank says nothing new."""

    async def main() -> None:
        world, id_ = await World.begun(), CheckpointId(1, 7)
        await world.start(2)
        await world.shard(id_, 0)
        world.now += Ages().superseded_s
        await world.store.put(keys.owed_key(2, 1), records.encode_owed(Checkpoints.of([id_])))
        await world.sweep()
        assert await world.outcome(id_) is None
        world.now += sweep_plan.OWED_VALID_S + 1
        await world.sweep()
        assert await world.outcome(id_) is Outcome.ABORT

    run(main())


def test_a_straggler_cannot_commit_an_aborted_checkpoint(run: Any) -> None:
    """R4: commit and abort compete for one create-once object, even if the abort has been collected since."""

    async def main() -> None:
        world = await World.begun()
        await world.start(2)
        id_ = CheckpointId(1, 7)
        await world.receipt(id_, 0)
        world.now += Ages().superseded_s
        await world.sweep()
        await world.receipt(id_, 1)
        await world.receipt(id_, 0)
        settled = await deciding.settle(world.store, id_, world_size=2, by="straggler", now=world.now)
        assert settled is not None
        assert settled[0].outcome is Outcome.ABORT
        await world.sweep()
        assert world.keys(keys.DATA) == []

    run(main())


def test_old_decisions_are_collected_and_stay_settled(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of listing depends on what is kept, and a collected create-once object does not come back to life."""
    monkeypatch.setattr(sweep_plan, "COLLECT_AT_LEAST", 3)

    async def main() -> None:
        world = await World.begun(1, 2, 3, 4, 5, world_size=1)
        await steps.set_pin(world.store, CheckpointId(1, 2), True)
        await world.start(2)
        await world.commit(CheckpointId(2, 1))
        await world.sweep(KeepLast(1))
        world.now += Ages().superseded_s
        await world.sweep(KeepLast(1))
        decisions = [keys.parse_decision_key(key) for key in world.keys(keys.DECISIONS)]
        assert decisions == [CheckpointId(1, 2), CheckpointId(2, 1)]
        # A straggler creates the decision that was collected: it is void for itself and for readers, and is
        # swept away.
        await world.receipt(CheckpointId(1, 3), 0)
        settled = await deciding.settle(
            world.store, CheckpointId(1, 3), world_size=1, by="straggler", now=world.now
        )
        assert settled is not None
        assert settled[0].outcome is Outcome.ABORT
        assert not settled[1]
        result = await world.verify()
        assert result.violations == []
        assert result.num_committed == 2
        await world.sweep(KeepLast(1))
        await world.sweep(KeepLast(1))
        assert keys.decision_key(CheckpointId(1, 3)) not in world.bucket.objects
        assert world.keys("ckpt/step-3.") == []
        # The kept checkpoint is pruned later, and collected like the others.
        await steps.set_pin(world.store, CheckpointId(1, 2), False)
        await world.sweep(KeepLast(1))
        assert await world.outcome(CheckpointId(1, 2)) is Outcome.PRUNED

    run(main())


@pytest.mark.fault("F18")
def test_stale_multiparts_leases_members_and_probes_are_removed(run: Any) -> None:
    """They are billed although invisible, or would make every listing longer."""

    async def main() -> None:
        world = await World.begun()
        await world.commit(CheckpointId(1, 5))
        await world.start(2)
        old = keys.data_key("step-6", 1, "rank-0.pt")
        await world.store.create_multipart(old)
        decided = keys.data_key("step-5", 1, "rank-9.pt")
        await world.store.create_multipart(decided)
        live = keys.data_key("step-7", 2, "rank-0.pt")
        await world.store.create_multipart(live)
        await world.store.put(f"{keys.PROBES}abc-a", b"probe")
        lease = records.encode_lease(Lease(CheckpointId(1, 5), "dead", ttl_s=60.0))
        await world.store.put(keys.lease_key(CheckpointId(1, 5), "dead"), lease)
        await world.sweep()
        assert {each.key for each in await world.store.list_multiparts("")} == {old, live}
        members = [keys.member_key(2, rank) for rank in range(world.world_size)]
        assert world.keys(keys.MEMBERS) == [*members, keys.beat_key(2)]
        world.now += Ages().superseded_s
        await world.sweep()
        assert {each.key for each in await world.store.list_multiparts("")} == {live}
        assert world.keys(keys.PROBES) == []
        assert world.keys(keys.LEASES) == []

    run(main())


@pytest.mark.fault("F10")
def test_ages_are_measured_by_the_stores_clock(run: Any) -> None:
    """A sweeper whose own clock is a year ahead must make the same decisions."""

    async def main() -> None:
        world = await World.begun()
        await world.start(2)
        await world.receipt(CheckpointId(1, 7), 0)
        sweeper = world.sweeper()
        sweeper.clock = lambda: world.now + 365 * 24 * HOUR_S
        await sweeper.run(is_dry_run=False)
        assert await world.outcome(CheckpointId(1, 7)) is None

    run(main())


async def _messy() -> World:
    world = await World.begun(1, 2, 3)
    await world.receipt(CheckpointId(1, 4), 0)
    await world.store.create_multipart(keys.data_key("step-4", 1, "rank-1.pt"))
    await world.start(2)
    await world.commit(CheckpointId(2, 3), moves_latest=False)
    world.now += Ages().superseded_s
    return world


async def _assert_settled(world: World) -> None:
    await world.sweep(KeepLast(2))
    await world.sweep(KeepLast(2))
    result = await world.verify()
    assert result.findings == []
    assert result.num_committed == 2
    assert {keys.parse_data_key(key)[0] for key in world.keys(keys.DATA)} == {  # type: ignore[index]
        CheckpointId(1, 3),
        CheckpointId(2, 3),
    }
    assert await world.store.list_multiparts("") == []
    latest = await steps.read_latest(world.store)
    assert latest is not None
    assert latest.checkpoint == CheckpointId(2, 3)


@pytest.mark.fault("F2")
@pytest.mark.parametrize("after_effect", [False, True])
def test_killed_at_any_request_the_next_sweep_finishes(run: Any, after_effect: bool) -> None:
    """Each request of a sweep in turn is its last one; at no such moment may anything committed be damaged."""

    async def main() -> None:
        counter = Counted((await _messy()).store)
        world = await _messy()
        counter = Counted(world.store)
        await world.sweeper(KeepLast(2), store=counter).run(is_dry_run=False)  # type: ignore[arg-type]
        total = counter.num_requests
        assert total > 40
        for die_at in range(1, total + 1):
            world = await _messy()
            dying = Counted(world.store, die_at, after_effect=after_effect)
            with pytest.raises(StoppedError):
                await world.sweeper(KeepLast(2), store=dying).run(is_dry_run=False)  # type: ignore[arg-type]
            assert (await world.verify()).violations == [], die_at
            await _assert_settled(world)

    run(main())


def test_two_sweepers_at_once_are_safe(run: Any) -> None:
    """Their requests interleave at every await."""

    async def main() -> None:
        world = await _messy()
        await asyncio.gather(*(world.sweeper(KeepLast(2)).run(is_dry_run=False) for _ in range(3)))
        await _assert_settled(world)

    run(main())


# --- what two sweepers know about each other -------------------------------------------------------------------


async def _boundary(world: World, upto: int, *kept: int) -> None:
    boundary = Boundary(CheckpointId(1, upto), Checkpoints.of(ids(*kept)), 1)
    await world.store.put(keys.BOUNDARY, records.encode_boundary(boundary))


def test_a_slow_sweeper_deletes_no_decision_that_the_boundary_keeps(run: Any) -> None:
    """It had found an abort old enough to delete; the other sweeper, which is further, keeps the checkpoint."""

    async def main() -> None:
        world = await World.begun(2, 5)
        await _boundary(world, 9, 2)
        kept, void = (keys.decision_key(id_) for id_ in ids(2, 5))
        action = sweep_plan.CollectDecisions(CheckpointId(1, 6), frozenset(), (kept, void), "")
        await steps.collect(world.store, action)
        assert world.keys(keys.DECISIONS) == [kept]

    run(main())


def test_void_decisions_stay_void_as_the_boundary_moves(run: Any) -> None:
    """A straggler commits below the boundary: a sweeper that did not know the boundary must not keep that commit."""

    async def main() -> None:
        world = await World.begun(2, 3)
        await _boundary(world, 5, 2)
        action = sweep_plan.CollectDecisions(CheckpointId(1, 9), frozenset(ids(2, 3, 7)), (), "")
        await steps.collect(world.store, action)
        boundary = await steps.read_boundary(world.store)
        assert (boundary.upto, boundary.kept) == (CheckpointId(1, 9), Checkpoints.of(ids(2, 7)))

    run(main())


@pytest.mark.fault("F122")
@pytest.mark.usefixtures("collects_one")
def test_old_decisions_of_the_newest_generation_are_collected_exactly(run: Any) -> None:
    """Requests grow with what is there, and everybody still knows what became of each checkpoint."""

    async def main() -> None:
        world = await World.begun(1, 2, 3, 5, 6)
        one, four = ids(1, 4)
        await world.receipt(four, 0)
        before = world.bucket.objects[keys.decision_key(one)]
        policy = KeepLast(2)
        await world.sweep(policy)
        assert len(world.keys(keys.DECISIONS)) == 5, "they may still be asked for"
        world.now += Ages().superseded_s
        await world.sweep(policy)
        assert world.keys(keys.DECISIONS) == [keys.decision_key(id_) for id_ in ids(5, 6)]
        settled = [await steps.read_settled(world.store, id_) for id_ in ids(1, 2, 3, 4)]
        assert [each and each.outcome for each in settled] == [*[Outcome.PRUNED] * 3, None]
        assert await steps.vanished(world.store, ids(1, 2, 3)) == []
        assert await steps.vanished(world.store, ids(1, 4)) == ids(4)
        assert await steps.lost(world.store, ids(1, 4, 6)) == ids(4)

        wanted = steps.new_decision(one, Outcome.ABORT, name="step-1", world_size=2, by="late", now=0.0)
        decision, is_ours = await deciding.decide_once(world.store, wanted)
        assert (decision.outcome, is_ours) == (Outcome.PRUNED, False)
        world.bucket.objects[keys.decision_key(one)] = before  # a straggler's commit
        settled = [await steps.read_settled(world.store, one)]
        assert settled[0] is not None
        assert settled[0].outcome is Outcome.PRUNED
        await world.sweep(policy)
        assert world.keys(keys.DECISIONS) == [keys.decision_key(id_) for id_ in ids(5, 6)]
        await world.receipt(four, 1)
        world.now += 60.0
        await world.sweep(policy)
        assert await world.outcome(four) is Outcome.PRUNED, "it was committed, and is beyond retention"

        await world.start(2)
        newer = CheckpointId(2, 1)
        await world.commit(newer)
        world.now += Ages().superseded_s
        await world.sweep(KeepLast(1))
        boundary = await steps.read_boundary(world.store)
        assert (boundary.upto, boundary.num_checkpoints) == (four, 0)

    run(main())


@pytest.mark.fault("F122")
@pytest.mark.usefixtures("collects_one")
def test_a_full_boundary_collects_nothing_more(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every rank reads it at a commit."""

    async def main() -> None:
        world = await World.begun(1, 2, 3, 4, 5)
        await world.sweep(KeepLast(1))
        world.now += Ages().superseded_s
        monkeypatch.setattr(steps, "MAX_BOUNDARY_SIZE_BYTES", 100)
        await world.sweep(KeepLast(1))
        assert len(world.keys(keys.DECISIONS)) == 5
        assert await world.outcome(CheckpointId(1, 1)) is Outcome.PRUNED
        assert keys.BOUNDARY not in world.bucket.objects
        assert "boundary_is_full" in caplog.text

    run(main())


def test_a_collected_decision_is_forgotten_by_those_who_read_it(run: Any) -> None:
    """The same sweeper looks again and again, while another has collected the decision."""

    async def main() -> None:
        world = await World.begun(1, 2)
        sweeper = world.sweeper()
        assert set((await sweeper.observe()).decisions) == set(ids(1, 2))
        await world.store.delete([keys.decision_key(CheckpointId(1, 1))])
        assert set((await sweeper.observe()).decisions) == set(ids(2))

    run(main())


@pytest.mark.parametrize("ttl_s", [600.0, 1e12])
def test_all_deleters_give_readers_the_same_time(run: Any, ttl_s: float) -> None:
    """The margin, and the maximum of a day, also apply where leases are listed again before the shards are deleted."""

    async def main() -> None:
        world = await World.begun(1, 2)
        lease = Lease(CheckpointId(1, 1), "reader", ttl_s)
        await steps.take_lease(world.store, lease)
        ends_at = world.now + min(ttl_s, sweep_plan.MAX_LEASE_S) + sweep_plan.LEASE_MARGIN_S
        for world.now, readers in ((ends_at - 1, ["reader"]), (ends_at, [])):
            assert await steps.readers(world.store, lease.checkpoint) == readers

    run(main())
