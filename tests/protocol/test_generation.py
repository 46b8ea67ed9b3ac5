"""Agreement on a generation, one behaviour at a time; `tests/model/test_starts.py` covers all orders of events."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from ckpt_async.core import keys, records
from ckpt_async.core.model import Beat, CheckpointId, Generation
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, FencedError, SettingsError
from ckpt_async.protocol import generation as generations
from ckpt_async.protocol.cas import read
from ckpt_async.protocol.generation import agree, beat, beat_pause_s, newest_generation
from ckpt_async.transfer.patient import PatientStore
from tests import virtual_time
from tests.stores.memory import CAPABILITIES, MemoryStore
from tests.stores.misbehaving import Meddled, trouble

WORLD_SIZE = 3


def patient(store: Any) -> PatientStore:
    return PatientStore(store, Settings())


async def open_(store: Any, rank: int, **more: Any) -> int:
    """Join as a live rank does; the rank that claims the generation also sends a heartbeat."""
    arguments = {"world_size": WORLD_SIZE, "launch_key": "k", "explicit": None, "now": 0.0, **more}
    return (await agree(patient(store), rank=rank, **arguments)).number


async def count_beats(store: MemoryStore, number: int) -> int:
    found = await read(patient(store), keys.beat_key(number))
    return records.decode_beat(found[0], number).count if found else 0


@pytest.mark.fault("F105")
def test_a_number_that_has_decisions_is_not_claimed_again() -> None:
    """The store had lost the records of generations: a new launch wrote under the keys of what was committed."""

    async def main() -> None:
        store = MemoryStore()
        for id_ in (CheckpointId(1, 3), CheckpointId(4, 7)):
            await patient(store).put(keys.decision_key(id_), b"whatever it says")
        assert await open_(store, 0, world_size=1) == 5
        assert await open_(store, 0, world_size=1) == 6

    asyncio.run(main())


@pytest.mark.parametrize("has_conditional_put", [False, True])
def test_a_nonce_that_another_rank_may_replace_is_not_remembered(has_conditional_put: bool) -> None:
    """Without conditional PUT, each rank may write the record of a number that all were given."""

    async def main() -> None:
        capabilities = replace(CAPABILITIES, conditional_put=has_conditional_put)
        store = patient(MemoryStore(capabilities=capabilities))
        given: dict[str, Any] = {"world_size": 2, "launch_key": "k", "explicit": 1, "now": 0.0}
        found = [(await agree(store, rank=rank, **given)).nonce for rank in range(2)]
        assert len({*found}) == 1
        assert bool(found[0]) == has_conditional_put

    asyncio.run(main())


def test_a_record_that_cannot_be_read_does_not_show_that_another_launch_has_taken_the_number() -> None:
    """A later version may have written it, or it is damaged: nothing that a rank has left is refused for that."""

    async def main() -> None:
        store = patient(MemoryStore())
        await store.put(keys.generation_key(1), b"whatever it says")
        assert not await generations.is_taken(store, {1: "ours"})
        assert not await generations.is_forgotten(store, 1, 0, {1: "ours"})
        theirs = Generation(2, "k", 1, "host", "theirs", 0.0)
        await store.put(keys.generation_key(2), records.encode_generation(theirs))
        assert await generations.is_taken(store, {1: "ours", 2: "ours"})

    asyncio.run(main())


def test_joining_an_older_generation_is_rejected() -> None:
    """The generation belongs to a launch that another has overtaken, so its checkpoints would never be the newest."""

    async def main() -> None:
        store = MemoryStore()
        assert await open_(store, 0, explicit=5) == 5
        with pytest.raises(FencedError, match="generation 4 was given, but generation 5 has already started"):
            await open_(store, 1, explicit=4)
        assert await open_(store, 1, explicit=5) == 5
        with pytest.raises(SettingsError, match="generation=5 was already used by rank 1"):
            await open_(store, 1, explicit=5)
        with pytest.raises(SettingsError, match="generation 5 has world size 3, but this rank has 4"):
            await open_(store, 2, explicit=5, world_size=4)

    asyncio.run(main())


def test_a_creator_sends_heartbeats_until_all_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that nobody needs the heartbeat any more, so a launch stops costing requests."""
    monkeypatch.setattr(generations, "BEAT_S", 0.01)

    async def main() -> None:
        store = MemoryStore()
        assert await open_(store, 1) == 1
        beating = asyncio.ensure_future(beat(patient(store), 1, rank=1, world_size=WORLD_SIZE))
        await beat(patient(store), 1, rank=0, world_size=WORLD_SIZE)  # not this rank's job: returns at once
        assert await asyncio.gather(open_(store, 0), open_(store, 2)) == [1, 1]
        await asyncio.wait_for(beating, 30)
        assert await count_beats(store, 1) >= 1 + generations.NUM_SIGNS

    asyncio.run(main())


def test_a_superseded_creator_stops_its_heartbeats() -> None:
    async def main() -> None:
        store = MemoryStore()
        await open_(store, 0)
        await beat(patient(store), 1, rank=0, world_size=WORLD_SIZE, is_over=lambda: True)
        assert await count_beats(store, 1) == 1

    asyncio.run(main())


def test_waiting_for_a_missing_rank_costs_few_requests() -> None:
    pauses = [beat_pause_s(seconds) for seconds in (0, 5, 10, 50, 100, 10**6)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (generations.BEAT_S, generations.BEAT_MAX_S)
    assert generations.NUM_SIGNS * generations.BEAT_MAX_S <= generations.PATIENCE_S / 2


def test_waiting_for_a_silent_creator_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The creator is dead, and its rank will not come back before ours."""
    monkeypatch.setattr(generations, "PATIENCE_S", 0.3)

    async def main() -> None:
        store = MemoryStore()
        assert await open_(store, 0) == 1
        assert await asyncio.gather(open_(store, 1), open_(store, 2)) == [2, 2]

    asyncio.run(main())


def test_a_creator_whose_heartbeats_are_far_apart_is_not_taken_for_dead() -> None:
    """Each of its requests takes long. What counts is the silence since the last heartbeat, not the whole wait."""

    async def main() -> None:
        store = MemoryStore()
        assert await open_(store, 0) == 1
        joining = asyncio.ensure_future(open_(store, 1))
        for count in range(2, 2 + generations.NUM_SIGNS):
            await asyncio.sleep(generations.PATIENCE_S * 0.7)
            await patient(store).put(keys.beat_key(1), records.encode_beat(Beat(1, 0, count)))
        assert await joining == 1

    virtual_time.run(main())


@pytest.mark.fault("F13")
def test_a_straggler_of_an_older_launch_does_not_fence_a_newer_one() -> None:
    """The launcher took its time to end a rank that waited for a dead creator; its claim split the next launch."""

    async def main() -> None:
        store = MemoryStore()
        assert await open_(store, 0) == 1  # sends no more heartbeats: it dies
        straggler = asyncio.ensure_future(open_(store, 1))
        await asyncio.sleep(1.0)
        newer = {"launch_key": "another"}
        assert await open_(store, 2, **newer) == 2
        beating = asyncio.ensure_future(beat(patient(store), 2, rank=2, world_size=WORLD_SIZE))
        with pytest.raises(FencedError, match="generation 2 of another launch"):
            await straggler
        assert await asyncio.gather(*(open_(store, rank, **newer) for rank in range(2))) == [2, 2]
        await beating
        assert await newest_generation(patient(store)) == 2

    virtual_time.run(main())


def test_a_launch_key_may_recur_after_another_launch() -> None:
    """Places in older generations are removed by sweeps, so that a free one is no sign of a straggler."""

    async def main() -> None:
        store = MemoryStore()
        assert await open_(store, 0) == 1
        assert await open_(store, 0, launch_key="another") == 2
        assert await open_(store, 1) == 3

    asyncio.run(main())


def test_without_conditional_put_rank_0_claims_and_the_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F32: this also holds for the next launch when an earlier one left a free place; rank 0 never joins an existing
    one.
    """
    monkeypatch.setattr(generations, "CLAIM_POLL_S", 0.01)

    async def main() -> None:
        store = MemoryStore(capabilities=replace(CAPABILITIES, conditional_put=False))
        assert await open_(store, 0) == 1  # then rank 0 dies
        waiting = [asyncio.ensure_future(open_(store, rank)) for rank in (1, 2)]
        done, _ = await asyncio.wait(waiting, timeout=0.3)
        assert not done
        assert await open_(store, 0) == 2
        assert await asyncio.gather(*waiting) == [2, 2]
        assert await newest_generation(patient(store)) == 2

    asyncio.run(main())


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_rank_that_can_only_wait_for_rank_0_says_so_once(
    has_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without conditional PUT it waits for ever, like a trainer that hangs; also if rank 0 has died after it began."""

    async def main() -> None:
        store = MemoryStore(capabilities=replace(CAPABILITIES, conditional_put=False))
        if has_begun:
            await open_(store, 0)
        waiting = asyncio.ensure_future(open_(store, 2))
        await asyncio.sleep(5)
        assert not caplog.messages
        await asyncio.sleep(3600)
        (told,) = caplog.messages
        assert told.startswith("waits_for_rank_0 rank=2 ")
        assert await open_(store, 0) == await waiting == 1 + has_begun

    virtual_time.run(main())


def test_a_single_rank_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if its place in the newest generation is free because it died in between."""
    monkeypatch.setattr(generations, "PATIENCE_S", 1e9)

    async def main() -> None:
        store = MemoryStore()
        assert await open_(store, 0, world_size=1) == 1
        await store.delete([keys.member_key(1, 0)])
        assert await asyncio.wait_for(open_(store, 0, world_size=1), 30) == 2
        assert await count_beats(store, 2) == 0

    asyncio.run(main())


def test_a_process_that_takes_over_for_a_trainer_finds_its_place() -> None:
    """A runner that was killed while starting is started again; if it had claimed the generation, it resumes the
    heartbeat.
    """

    async def main() -> None:
        store = MemoryStore()
        assert await open_(store, 0, member="a") == 1
        assert await asyncio.wait_for(open_(store, 0, member="a"), 30) == 1
        await store.delete([keys.beat_key(1)])  # it was killed before its first heartbeat
        assert await asyncio.wait_for(open_(store, 0, member="a"), 30) == 1
        assert await count_beats(store, 1) == 1
        assert await asyncio.wait_for(open_(store, 0, member="b"), 30) == 2

    asyncio.run(main())


class Down(Meddled):
    """A store that does not answer from 1 s until `until_s`."""

    def __init__(self, until_s: float) -> None:
        super().__init__()
        self.until_s = until_s

    async def before(self, operation: str, key: str) -> None:
        if 1 < asyncio.get_running_loop().time() < self.until_s:
            raise trouble(FailureReason.TRANSIENT)


@pytest.mark.fault("F33")
@pytest.mark.parametrize("down_s", [14, 60])
def test_an_outage_does_not_split_a_start(down_s: int) -> None:
    """The creator's heartbeat used to be in a long back-off when the others could ask again. They took it for dead, and
    nothing of that launch was ever committed.
    """

    async def main() -> int:
        store: Any = Down(1 + down_s)
        ranks = [asyncio.ensure_future(open_(store, 0))]
        assert await ranks[0] == 1
        beating = asyncio.ensure_future(beat(patient(store), 1, rank=0, world_size=WORLD_SIZE))
        await asyncio.sleep(2)
        late = [asyncio.ensure_future(open_(store, rank)) for rank in (1, 2)]
        found = await asyncio.gather(*late)
        beating.cancel()
        return len({1, *found})

    for seed in range(20):
        random.seed(seed)
        assert virtual_time.run(main()) == 1, seed
