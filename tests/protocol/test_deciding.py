"""What is compared before a commit must still be true when the store takes the decision, however long it refuses it."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, PreconditionFailedError, StoreError
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
    operation: str, key: str, meanwhile: Callable[[World], None], rank: int | None = None
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
            rank=rank,
            clock=loop.time,
        )
        assert loop.time() > 60
        return settled, refusing.asked

    return run(main())


def lose(start: str) -> Callable[[World], None]:
    def losing(world: World) -> None:
        for key in world.keys(start):
            del world.bucket.objects[key]

    return losing


@pytest.mark.parametrize("rank", [None, 0])
@pytest.mark.parametrize(("operation", "key"), [("put", DECISION), ("get", keys.receipt_key(ID, 1))])
def test_what_is_deleted_while_the_store_refuses_the_decision_is_not_committed(
    operation: str, key: str, rank: int | None
) -> None:
    """It was committed, from a listing of minutes ago, and the local files were deleted."""
    gone = lose(f"{DATA}rank-0.pt")
    if rank is None:
        settled, _ = settle_while(operation, key, gone)
        assert settled is not None
        decision, is_ours = settled
        assert is_ours
        assert decision.outcome is Outcome.ABORT
        assert "rank-0.pt" in decision.reason
    else:
        with pytest.raises(deciding.UploadsLostError):
            settle_while(operation, key, gone, rank)


def test_nothing_is_decided_once_a_receipt_is_gone() -> None:
    """Somebody else may have given the checkpoint up, and removed its receipts."""
    settled, _ = settle_while("put", DECISION, lose(keys.receipts_prefix(ID)))
    assert settled is None


@pytest.mark.parametrize("what", [("get", keys.receipt_key(ID, 1)), ("list", DATA)])
def test_nothing_is_decided_if_a_receipt_vanishes_while_the_store_does_not_answer(
    what: tuple[str, str],
) -> None:
    """It had been read already, so the commit named it."""
    settled, _ = settle_while(*what, lose(keys.receipt_key(ID, 0)))
    assert settled is None


def test_of_a_receipt_that_is_gone_its_own_rank_is_told() -> None:
    with pytest.raises(deciding.UploadsLostError):
        settle_while("put", DECISION, lose(keys.receipt_key(ID, 0)), rank=0)
    settled, _ = settle_while("put", DECISION, lose(keys.receipt_key(ID, 1)), rank=0)
    assert settled is None


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


def test_a_rank_that_has_lost_its_receipt_too_is_waited_for() -> None:
    """It uploads everything again. The checkpoint was given up."""

    class Losing(Meddled):
        async def before(self, operation: str, key: str) -> None:
            if (operation, key) == ("head", f"{DATA}rank-0.pt"):
                self.bucket.objects.pop(keys.receipt_key(ID, 0), None)

    async def main() -> None:
        world = await World.begun()
        for each in range(world.world_size):
            await world.receipt(ID, each)
        del world.bucket.objects[f"{DATA}rank-0.pt"]
        store = PatientStore(Losing(world.bucket), Settings())
        how: Any = {"world_size": world.world_size, "now": world.now}
        assert await deciding.settle(store, ID, by="rank 1", rank=1, **how) is None
        assert world.keys(keys.DECISIONS) == []

    run(main())


def test_a_commit_that_others_have_damaged_is_still_one(caplog: pytest.LogCaptureFixture) -> None:
    """The store takes the decision, after a time in which it has lost what another rank had uploaded. That rank was
    waited for, `latest` did not move, and it was then taken for whole.
    """

    class Slow(Meddled):
        async def before(self, operation: str, key: str) -> None:
            if (operation, key) == ("put", DECISION):
                await asyncio.sleep(20)
                del self.bucket.objects[f"{DATA}rank-1.pt"]

    async def main() -> tuple[Decision, bool] | None:
        world = await World.begun()
        for each in range(world.world_size):
            await world.receipt(ID, each)
        return await deciding.settle(
            PatientStore(Slow(world.bucket), Settings()),
            ID,
            world_size=world.world_size,
            by="test",
            now=world.now,
            name="step-1",
            rank=0,
            may_give_up=False,
            clock=asyncio.get_running_loop().time,
        )

    settled = run(main())
    assert settled is not None
    assert settled[0].outcome is Outcome.COMMIT
    (told,) = [each for each in caplog.messages if each.startswith("commit_is_damaged")]
    assert "rank-1.pt of rank 1 had been uploaded" in told


def test_what_is_still_there_is_committed_in_the_end() -> None:
    settled, asked = settle_while("put", DECISION, lambda _: None)
    assert settled is not None
    assert settled[0].outcome is Outcome.COMMIT
    assert (
        asked["put", DECISION] > asked["list", DATA] > 3
    )  # not as often, either: there may be 10,000 receipts


def test_what_is_back_before_the_abort_is_tried_again_is_committed() -> None:
    """Its rank had uploaded it again. An abort is final, so it is compared before each try."""

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

        loop, store = asyncio.get_running_loop(), Refusing(world.bucket)
        how: Any = {"world_size": world.world_size, "now": world.now, "name": "step-1", "clock": loop.time}
        settled = await deciding.settle(PatientStore(store, Settings()), ID, by="test", **how)
        assert loop.time() < deciding.VALID_S
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
