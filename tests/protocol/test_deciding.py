"""Each attempt to decide begins with a comparison: what is gone by then is not committed, however late that is."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, ObjectNotFoundError, PreconditionFailedError, StoreError
from ckpt_async.protocol import deciding
from ckpt_async.transfer.patient import PatientStore
from tests.stores.misbehaving import Meddled, trouble
from tests.sweep.world import World
from tests.virtual_time import run

ID = CheckpointId(1, 1)
DATA, DECISION = "ckpt/step-1.g1/", keys.decision_key(ID)


class Refusing(Meddled):
    """Does not take a request for `key` during the first minutes; meanwhile, something else happens there."""

    def __init__(self, world: World, operation: str, key: str, meanwhile: Callable[[], None]) -> None:
        super().__init__(world.bucket)
        self._what, self._meanwhile = (operation, key), meanwhile

    async def before(self, operation: str, key: str) -> None:
        if (operation, key) == self._what and (now := asyncio.get_running_loop().time()) < 180:
            if now > 60:
                self._meanwhile()
            raise trouble(FailureReason.TRANSIENT)


def settle_while(
    operation: str, key: str, meanwhile: Callable[[World], None]
) -> tuple[tuple[Decision, bool] | None, Counter[tuple[str, str]]]:
    async def main() -> tuple[tuple[Decision, bool] | None, Counter[tuple[str, str]]]:
        world = await World.begun()
        for each in range(world.world_size):
            await world.receipt(ID, each)
        refusing = Refusing(world, operation, key, lambda: meanwhile(world))
        loop = asyncio.get_running_loop()
        settled = await deciding.settle(
            PatientStore(refusing, Settings()),
            ID,
            world_size=world.world_size,
            by="test",
            now=world.now,
            name="step-1",
        )
        assert loop.time() > 60
        return settled, refusing.asked

    return run(main())


def lose(start: str) -> Callable[[World], None]:
    def losing(world: World) -> None:
        for key in world.keys(start):
            del world.bucket.objects[key]

    return losing


@pytest.mark.fault("F108")
@pytest.mark.parametrize(
    ("operation", "key"), [("put", DECISION), ("get", keys.receipt_key(ID, 1)), ("list", DATA)]
)
@pytest.mark.parametrize("lost", [f"{DATA}rank-0.pt", keys.receipt_key(ID, 0)], ids=["shard", "receipt"])
def test_losses_before_the_last_attempt_prevent_the_commit(operation: str, key: str, lost: str) -> None:
    """It was committed, from a listing of minutes ago, and the local files were deleted."""
    settled, _ = settle_while(operation, key, lose(lost))
    assert settled is not None
    decision, is_ours = settled
    assert is_ours
    assert (decision.outcome, decision.is_lost_by_store) == (Outcome.ABORT, True)
    assert lost in decision.reason


def settle_at(world: World, store: Meddled, **how: Any) -> Coroutine[Any, Any, tuple[Decision, bool] | None]:
    how = {"world_size": world.world_size, "by": "test", "now": world.now, "name": "step-1"} | how
    return deciding.settle(PatientStore(store, Settings()), ID, **how)


async def delivered() -> World:
    world = await World.begun()
    for each in range(world.world_size):
        await world.receipt(ID, each)
    return world


def test_a_checkpoint_without_any_object_is_given_up() -> None:
    """The remote was wiped. The name is that of the caller, because no receipt tells it."""

    async def main() -> tuple[Decision, bool] | None:
        world = await delivered()
        world.bucket.objects.clear()
        return await settle_at(world, Meddled(world.bucket), name="best-1")

    settled = run(main())
    assert settled is not None
    assert (settled[0].outcome, settled[0].name, settled[0].is_lost_by_store) == (
        Outcome.ABORT,
        "best-1",
        True,
    )


def test_a_loss_after_the_decision_changes_nothing() -> None:
    """Pruning deletes shards and receipts."""

    async def main() -> None:
        world = await delivered()
        await settle_at(world, Meddled(world.bucket), by="other")
        lose(DATA)(world)
        settled = await settle_at(world, Meddled(world.bucket))
        assert settled is not None
        assert (settled[0].outcome, settled[1]) == (Outcome.COMMIT, False)

    run(main())


def test_nothing_is_decided_by_who_may_not() -> None:
    """Another launch has the generation: the checkpoint under this key may be its own."""

    async def main() -> None:
        world = await delivered()
        lose(DATA)(world)

        async def may_decide() -> bool:
            return False

        assert await settle_at(world, Meddled(world.bucket), may_decide=may_decide) is None
        assert world.keys(keys.DECISIONS) == []

    run(main())


class Lagging(Meddled):
    """A store of which some requests do not show one object."""

    hidden, blind = "", ("list",)

    async def before(self, operation: str, key: str) -> None:
        if operation in self.blind and key == self.hidden:
            raise ObjectNotFoundError(key)

    def __getattr__(self, operation: str) -> Any:
        request = super().__getattr__(operation)
        if operation != "list" or "list" not in self.blind:
            return request

        async def lagging(*args: Any, **kwargs: Any) -> Any:
            listing = await request(*args, **kwargs)
            there = (each for each in listing.objects if each.key != self.hidden)
            return replace(listing, objects=tuple(there))

        return lagging


@pytest.mark.parametrize("hidden", [f"{DATA}rank-0.pt", keys.receipt_key(ID, 0)], ids=["shard", "receipt"])
@pytest.mark.parametrize("blind", ["list", "head"])
def test_listing_and_head_prove_a_loss_only_together(hidden: str, blind: str) -> None:
    async def main() -> tuple[Decision, bool] | None:
        world = await delivered()
        store = Lagging(world.bucket)
        store.hidden, store.blind = hidden, (blind,)
        return await settle_at(world, store)

    settled = run(main())
    assert settled is not None
    assert settled[0].outcome is Outcome.COMMIT


def test_an_unreadable_listed_receipt_decides_nothing() -> None:
    """A cache may remember for a while that there was nothing."""

    async def main() -> None:
        world = await delivered()
        store = Lagging(world.bucket)
        store.hidden, store.blind = keys.receipt_key(ID, 0), ("get", "head")
        assert await settle_at(world, store) is None
        assert world.keys(keys.DECISIONS) == []

    run(main())


@pytest.mark.parametrize("has_competitor", [False, True])
def test_a_decision_whose_answer_never_comes_is_read_back(has_competitor: bool) -> None:
    """It was put again for as long as the answers were lost, also if another rank had decided meanwhile."""

    async def main() -> None:
        world = await World.begun()
        how: Any = {"world_size": world.world_size, "now": world.now, "name": "step-1"}
        for each in range(world.world_size):
            await world.receipt(ID, each)

        class Silent(Meddled):
            async def before(self, operation: str, key: str) -> None:
                if (operation, key) == ("put", DECISION) and has_competitor:
                    await deciding.settle(world.store, ID, by="other", **how)

            async def after(self, operation: str, key: str) -> None:
                if (operation, key) == ("put", DECISION):
                    raise trouble(FailureReason.TIMEOUT)

            def __getattr__(self, operation: str) -> Any:
                request = super().__getattr__(operation)

                async def unheard(*args: Any, **kwargs: Any) -> Any:
                    try:
                        return await request(*args, **kwargs)
                    except PreconditionFailedError:
                        raise trouble(FailureReason.TIMEOUT) from None

                return unheard

        silent = Silent(world.bucket)
        settled = await deciding.settle(PatientStore(silent, Settings()), ID, by="test", **how)
        assert settled is not None
        decision, is_ours = settled
        assert (decision.outcome, is_ours) == (Outcome.COMMIT, not has_competitor)
        assert silent.asked["put", DECISION] == 1

    run(main())


def test_what_an_earlier_attempt_of_ones_own_has_decided_is_ones_own() -> None:
    """It had failed, perhaps after its decision had arrived: whoever decides moves `latest`."""

    async def main() -> None:
        world = await World.begun()
        how: Any = {"world_size": world.world_size, "now": world.now}
        for each in range(world.world_size):
            await world.receipt(ID, each)
        for by, is_own in (("rank 0", True), ("rank 1", False), ("rank 0", True)):
            settled = await deciding.settle(world.store, ID, by=by, **how)
            assert settled is not None
            assert settled[1] is is_own

    run(main())


def test_what_is_still_there_is_committed_in_the_end() -> None:
    settled, asked = settle_while("put", DECISION, lambda _: None)
    assert settled is not None
    assert settled[0].outcome is Outcome.COMMIT
    assert asked["put", DECISION] == asked["list", DATA] > 3
    assert asked["get", keys.receipt_key(ID, 0)] == 1  # it does not change, and there may be 10,000


def test_what_is_back_before_the_abort_is_tried_again_is_committed() -> None:
    """An abort is final, so it is compared before each try."""

    async def main() -> None:
        world = await World.begun()
        for each in range(world.world_size):
            await world.receipt(ID, each)
        lost = f"{DATA}rank-0.pt"
        uploaded_again = world.bucket.objects.pop(lost)

        class Refusing(Meddled):
            async def before(self, operation: str, key: str) -> None:
                if (operation, key) == ("put", DECISION) and lost not in self.bucket.objects:
                    self.bucket.objects[lost] = uploaded_again
                    raise trouble(FailureReason.TRANSIENT)

        store = Refusing(world.bucket)
        settled = await settle_at(world, store)
        assert store.asked["put", DECISION] == 2
        assert settled is not None
        assert settled[0].outcome is Outcome.COMMIT

    run(main())


@pytest.mark.parametrize("reason", [FailureReason.AUTH, FailureReason.OTHER])
def test_what_no_retry_can_heal_is_raised_at_once(reason: FailureReason) -> None:
    class Refused(Meddled):
        async def before(self, operation: str, key: str) -> None:
            if operation == "put" and key == DECISION:
                raise trouble(reason)

    async def main() -> None:
        world = await World.begun()
        for each in range(world.world_size):
            await world.receipt(ID, each)
        store = Refused(world.bucket)
        impatient = PatientStore(store, Settings(), is_patient=False)
        with pytest.raises(StoreError) as raised:
            await deciding.settle(impatient, ID, world_size=world.world_size, by="test", now=world.now)
        assert raised.value.reason is reason
        assert store.asked["put", DECISION] == 1

    run(main())
