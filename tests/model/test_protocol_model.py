"""The protocol under every schedule Hypothesis can think of: the real engine, sweeper and decisions (rules R1-R13).

`World` cuts them at every await and holds the invariants I1-I8 after every step. A failure prints the rules to
replay. `test_mutants` shows that each seeded mistake is found by this very machine.
"""

import pytest
from hypothesis import Phase

from tests.faults.processes import SOAK
from tests.model.machines import Collecting, Protocol, Publishing, PublishingSteady, Steady, explore


@pytest.mark.parametrize(
    ("machine", "max_examples"),
    [
        (Protocol, 120),
        (Steady, 80),
        pytest.param(Protocol, 3000, marks=SOAK),
        pytest.param(Steady, 2000, marks=SOAK),
    ],
)
def test_no_schedule_breaks_an_invariant(machine: type[Protocol], max_examples: int) -> None:
    """The one test that sees what happens *between* modules, where checkpoints are lost."""
    explore(max_examples, machine)


@pytest.mark.parametrize("machine", [Publishing, PublishingSteady])
def test_copies_are_of_what_is_committed_and_go_with_it(machine: type[Protocol]) -> None:
    """Never before the commit, all of it in the end, the newest where all share a key, and nothing after pruning."""
    explore(60, machine)


def test_collected_decision_stays_void() -> None:
    """R4: a decision below the boundary is void, whoever reads it; believing it loses local files."""
    explore(300, Collecting, phases=[Phase.generate])


def test_local_latest_never_dangles_when_everything_was_pruned_remotely() -> None:
    """Found by the model: the owner lost power, the run went on elsewhere, and its checkpoints were pruned."""
    state = Protocol()
    state.begin(num_ranks=2, keep=1, keep_remote=1)
    for _ in range(2):
        state.read()
    state.save_everywhere(num_shards=1)
    state.save_everywhere(num_shards=2)
    state.sweep(age_s=50.0)
    state.all_work(num_steps=30, order=1)
    state.all_work(num_steps=30, order=0)
    state.suffer(what="power", who=0)
    state.restart(first_step=1, is_elsewhere=True, num_ranks=1)
    state.save_everywhere(num_shards=1)
    state.all_work(num_steps=30, order=0)
    for _ in range(7):
        state.finish_for_the_dead(who=0)
    state.teardown()


def test_local_latest_never_dangles_after_a_lost_journal() -> None:
    """Found by the model: the manifests bring back a checkpoint whose files retention had removed."""
    state = Protocol()
    state.begin(num_ranks=1, keep=1, keep_remote=1)
    state.save_everywhere(num_shards=1)
    state.all_work(num_steps=100, order=3245)
    state.save_everywhere(num_shards=1)
    state.suffer(what="kill", who=0)
    state.finish_for_the_dead(who=0)
    state.work(num_steps=33, order=143, who=0)
    state.suffer(what="lost_journal", who=0)
    state.teardown()
