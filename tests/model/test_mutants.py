"""Seeded mistakes: the machine of `test_protocol_model` must find every one, or its silence means nothing."""

import pytest
from hypothesis import Phase

from tests.model.machines import Protocol, explore
from tests.model.mutants import MUTANTS, Mutant, prunes_what_is_read
from tests.model.world import ViolationError

# Where the search begins. Every mistake is found from anywhere, but from most places some only after half a minute.
SEED, SEEDS = 2, {prunes_what_is_read: 13}


@pytest.mark.fault("F19", "F120")
@pytest.mark.parametrize(
    ("mutant", "machine", "invariant"), MUTANTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_model_finds_each_seeded_mistake(mutant: Mutant, machine: type[Protocol], invariant: str) -> None:
    """A test that has never failed on purpose proves nothing."""
    with mutant(), pytest.raises(ViolationError, match=f"^({invariant}):"):
        explore(6000, machine, seed=SEEDS.get(mutant, SEED), phases=[Phase.generate])
