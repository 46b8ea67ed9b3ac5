"""Deliberate mistakes: the schedules of `test_simulation` must find each of them, or their silence means nothing."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_async.transfer.patient import PatientStore
from tests.model import mutants as core
from tests.model.world import ViolationError
from tests.simulation.simulation import simulate


def skips_the_deadline() -> contextlib.AbstractContextManager[None]:
    """R14: a request waits for its answer forever."""

    async def control(self: PatientStore, operation: str, attempt: Callable[[], Any]) -> Any:
        return await self._persist(operation, attempt)

    return core.patched((PatientStore, "control", control))


# The invariant that each mistake must violate: another one would mean a broken mutant. The number is how many
# seeds may be needed, with room for schedules that change.
MUTANTS = [
    (core.commits_without_all_receipts, "I1", 10),
    (core.commits_before_uploads, "I1|I4", 10),
    (core.mixes_generations, "I1|I6|R5", 10),
    (core.moves_latest_before_commit, "I2", 10),
    (core.moves_latest_back, "I2", 150),
    (core.compares_latest_by_step, "R6", 70),
    (core.removes_before_commit, "I3", 10),
    (core.releases_before_decision, "I3", 10),
    (core.skips_read_back, "R13", 100),
    (core.sweeps_without_abort, "R4|I7", 20),
    (core.prunes_what_is_read, "R3", 250),
    (core.prunes_shards_first, "I1", 20),
    (skips_the_deadline, "R14", 20),
]


@pytest.mark.parametrize(
    ("mutant", "invariant", "num_seeds"), MUTANTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_simulation_finds_each_seeded_mistake(
    mutant: core.Mutant, invariant: str, num_seeds: int
) -> None:
    def play() -> None:
        for seed in range(num_seeds):
            simulate(seed)

    with mutant(), pytest.raises(ViolationError, match=f"^({invariant}):"):
        play()
