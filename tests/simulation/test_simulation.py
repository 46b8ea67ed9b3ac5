"""Hundreds of schedules, each made from one number: no invariant breaks, nothing hangs, nothing is left behind.

A failure names its seed: `CKPT_ASYNC_SEED=<seed> ./dev test tests/simulation -k schedules` replays it alone.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest

from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.transfer import patient
from ckpt_async.transfer.patient import PatientStore
from tests import virtual_time
from tests.faults.processes import SOAK
from tests.model.world import ViolationError
from tests.simulation.faults import KINDS, REASONS
from tests.simulation.simulation import simulate
from tests.stores.memory import MemoryStore

# Enough to find every mistake of `test_simulated_mutants`. The soak plays others, for as long as it is told
# to.
NUM_SEEDS = 250
# This test's share of the soak: the other soak tests share the minutes.
SOAK_SHARE = 0.5
SHORT_S = 1.0

# What must have happened, with a minimum count (about a third of what was seen). Otherwise the simulation
# could silently stop testing it.
WANTED = {
    **{f"fault {kind}": 9 for kind in (*KINDS, *REASONS)},
    "multipart resumed": 1,
    "crash of a trainer": 111,
    "crash of a sweeper": 57,
    "crash of a reader": 41,
    "crash before the effect of a request": 152,
    "crash after the effect of a request": 58,
    "crash in agree": 54,
    "crash in Engine.recover": 7,
    "crash in Simulation._save": 8,
    "crash in MakeDurable": 5,
    "crash in Upload": 16,
    "crash in StoreReceipt": 2,
    "crash in ListReceipts": 7,
    "crash in Poll": 1,
    "crash in ReadDecision": 3,
    "crash in Commit": 5,
    "crash in MoveLatest": 3,
    "crash in MoveLocalLatest": 2,
    "crash in Release": 1,
    "crash in RemoteSweep.observe": 14,
    "crash in take_lease": 18,
    "journal lost": 5,
    "fenced": 9,
    "superseded": 1,
    "lease held": 119,
    "adopted": 125,
    "whole": 73,
    "outcome commit": 51,
    "outcome abort": 50,
    "outcome pruned": 10,
    "superseded generation committed": 29,
    "removed locally": 29,
    "sweep GiveUp done": 3,
    "sweep MoveLatest done": 2,
    "sweep BeginPrune done": 8,
    "sweep FinishPrune done": 6,
    "sweep AbortMultipart done": 1,
    "sweep Delete done": 59,
    "sweep CollectDecisions done": 2,
    "sweep Wait done": 72,
}


def play(seeds: Iterable[int]) -> Counter[str]:
    """Return how often each thing happened in all of them."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts.update(simulate(seed).counts)
        except ViolationError as error:
            replay = f"CKPT_ASYNC_SEED={seed} ./dev test tests/simulation -k schedules"
            pytest.fail(f"{error}\n{replay}", pytrace=False)
        except BaseException:
            print(f"CKPT_ASYNC_SEED={seed}")
            raise
    return counts


@pytest.mark.fault("F14", "F16")
def test_no_simulated_schedule_breaks_an_invariant() -> None:
    """I1-I8 and I10 hold after every effect; once it is quiet again, everything is finished and nothing is left
    behind.
    """
    if replayed := os.environ.get("CKPT_ASYNC_SEED"):
        play([int(replayed)])
        return
    counts = play(range(NUM_SEEDS))
    assert {what: counts[what] for what, least in WANTED.items() if counts[what] < least} == {}


def test_schedule_is_a_function_of_its_seed() -> None:
    """Otherwise a failure could not be replayed."""
    for seed in range(5):
        first, second = simulate(seed), simulate(seed)
        assert first.network.trace == second.network.trace
        assert first.counts == second.counts
        assert len(first.network.trace) > 20
    assert simulate(1).network.trace != simulate(2).network.trace


def test_opening_a_silent_store_is_bounded() -> None:
    """R14, found by these schedules: a probe that got no answer blocked the sweeper forever."""

    class Silent(MemoryStore):
        async def open(self, **_: Any) -> None:
            await asyncio.get_running_loop().create_future()

    async def attempt() -> float:
        loop = asyncio.get_running_loop()
        clock = mock.Mock(monotonic=loop.time)
        with mock.patch.object(patient, "time", clock), pytest.raises(StoreError) as raised:
            await PatientStore(Silent(), Settings()).open(100.0)
        assert raised.value.reason is FailureReason.TIMEOUT
        return loop.time()

    assert virtual_time.run(attempt()) < 600.0


@pytest.mark.parametrize("is_soak", [False, pytest.param(True, marks=SOAK)])
def test_no_fresh_random_schedule_breaks_an_invariant(is_soak: bool) -> None:
    """New schedules each time can meet what a fixed set of seeds never would."""
    for_s = 60 * SOAK_SHARE * float(os.environ["CKPT_ASYNC_SOAK_MINUTES"]) if is_soak else SHORT_S
    until = time.monotonic() + for_s
    seed = first = random.SystemRandom().randrange(NUM_SEEDS, 10**12)
    while time.monotonic() < until:
        play([seed])
        seed += 1
    print(f"schedules: {seed - first}, from seed {first}")
    assert seed > first
