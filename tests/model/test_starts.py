"""Which generation a rank joins, under every order of starts that all have the same launch key (`starts`)."""

import random
import types
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_async.protocol import generation as generations
from ckpt_async.protocol.cas import read
from tests.model.starts import Starts, until
from tests.model.world import ViolationError

NUM_SEEDS = 200


@pytest.fixture(autouse=True)
def schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the schedule control sleep."""
    monkeypatch.setattr(generations, "asyncio", types.SimpleNamespace(sleep=until))
    monkeypatch.setattr(generations, "_newest_decided", _none_decided)
    monkeypatch.setattr(generations.steps, "refuse_unfinished_copy", _no_copy)
    monkeypatch.setattr(generations.logger, "disabled", True)


async def _none_decided(_: Any, *, after: int) -> int:
    """There are no decisions here, so that the request would only make each order of events longer."""
    return after


async def _no_copy(_: Any) -> None:
    """Nor is anything being copied here."""


def in_any_order(seed: int) -> None:
    """Without timing guarantees: a rank that is mistaken for dead is fenced, and never mixed with another launch."""
    rng = random.Random(seed)
    starts = Starts(rng.randint(2, 4), rng, has_conditional_put=rng.random() < 0.8)
    try:
        for start in range(1, 4):
            starts.play_start(start, rng.choice([10, 30, 100, 300]))
    finally:
        starts.close()


def in_time(seed: int) -> None:
    rng = random.Random(seed)
    starts = Starts(rng.randint(2, 4), rng, is_timed=True, has_conditional_put=rng.random() < 0.8)
    try:
        for start in range(1, rng.randint(2, 4)):
            starts.play_start(start, rng.choice([10, 30, 100, 300]), spread_s=rng.choice([0.0, 1.0, 20.0]))
        starts.converge(9, spread_s=rng.choice([0.0, 1.0, 8.0, 60.0]), within_s=60.0)
    finally:
        starts.close()


def superseded(seed: int) -> None:
    rng = random.Random(seed)
    starts = Starts(rng.randint(2, 4), rng, is_timed=True)
    try:
        starts.supersede(1, 2)
    finally:
        starts.close()


def explore(play: Callable[[int], None], seeds: range = range(NUM_SEEDS)) -> None:
    for seed in seeds:
        try:
            play(seed)
        except ViolationError as error:
            error.add_note(f"{play.__name__}({seed})")
            raise


@pytest.mark.fault("F33")
def test_no_generation_has_ranks_of_two_starts() -> None:
    """R5: a commit contains what all members of one generation have saved."""
    explore(in_any_order)


@pytest.mark.fault("F33")
def test_a_complete_start_ends_in_one_generation() -> None:
    """Launchers do this: they kill all ranks and restart all of them with the same key."""
    explore(in_time)


@pytest.mark.fault("F13")
def test_no_rank_that_lingers_fences_the_launch_that_superseded_its_own() -> None:
    """A launcher may begin the next launch while ranks of the last one wait for one that is dead."""
    explore(superseded)


# --- each rule is needed ---------------------------------------------------------------------------------------


def _of(number: int) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(generations, "NUM_SIGNS", number)


def _blind_beats(patch: pytest.MonkeyPatch) -> None:
    async def overwrite(store: Any, key: str, change: Any) -> bytes | None:
        there = await read(store, key)
        wanted = change(there[0] if there else None)
        if wanted is not None:
            await store.put(key, wanted)
        return wanted

    patch.setattr(generations, "advance", overwrite)


def _joins_without_a_place(patch: pytest.MonkeyPatch) -> None:
    async def join(_: Any, number: int) -> bool:
        return True

    patch.setattr(generations._Agreement, "_join", join)


def _no_beats(patch: pytest.MonkeyPatch) -> None:
    async def beat(*_: Any, **__: Any) -> None: ...

    patch.setattr(generations, "beat", beat)


def _no_patience(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generations, "PATIENCE_S", 0.3)


def _never_superseded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generations._Agreement, "_reject_if_superseded", lambda *_: None)


def _endless_patience(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generations, "PATIENCE_S", 1e9)


# Each with the seed to begin with, shortly before the first that reveals the mistake.
MISTAKES = {
    "a free place is enough": (in_any_order, _of(0), 0),
    "one sign is enough": (in_any_order, _of(1), 140),
    "a late beat overwrites a newer one": (in_any_order, _blind_beats, 1780),
    "a place need not be taken": (in_any_order, _joins_without_a_place, 0),
    "whoever claims does not beat": (in_time, _no_beats, 0),
    "a slow beat is no beat": (in_time, _no_patience, 0),
    "a newer launch is ignored": (superseded, _never_superseded, 0),
    "the dead are waited for": (in_time, _endless_patience, 0),
}


@pytest.mark.fault("F33")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_model_finds_each_seeded_mistake(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play, make, first = MISTAKES[mistake]
    make(monkeypatch)
    with pytest.raises(ViolationError, match=r"R5|I8"):
        explore(play, range(first, first + 20 * NUM_SEEDS))
