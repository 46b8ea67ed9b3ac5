"""The protocol under every schedule that Hypothesis can generate: the real engine, sweeper and decisions (rules
R1-R13).

`World` cuts them at every await and checks the invariants I1-I8 after every step. A failure prints the rules to
replay. `test_mutants` shows that this very machine finds each seeded mistake.
"""

import pytest
from hypothesis import Phase

from tests.faults.processes import SOAK
from tests.model.machines import Collecting, Finding, Protocol, Publishing, PublishingSteady, Steady, explore


@pytest.mark.fault("F3", "F16", "F108")
@pytest.mark.parametrize(
    ("machine", "max_examples"),
    [
        (Protocol, 120),
        (Steady, 80),
        (Finding, 60),
        pytest.param(Protocol, 3000, marks=SOAK),
        pytest.param(Steady, 2000, marks=SOAK),
    ],
)
def test_no_schedule_breaks_an_invariant(machine: type[Protocol], max_examples: int) -> None:
    """This is the one test that sees what happens *between* modules, where checkpoints are lost."""
    explore(max_examples, machine)


@pytest.mark.parametrize("machine", [Publishing, PublishingSteady])
def test_copies_are_of_what_is_committed_and_go_with_it(machine: type[Protocol]) -> None:
    """Copies appear never before the commit and completely in the end; a shared key holds the newest; pruning removes
    them.
    """
    explore(60, machine)


def test_collected_decision_stays_void() -> None:
    """R4: a decision below the boundary is void for every reader; trusting it would lose local files."""
    explore(300, Collecting, phases=[Phase.generate])


def test_local_latest_never_dangles_when_everything_was_pruned_remotely() -> None:
    """Found by the model: the owner lost power, the run continued elsewhere, and its checkpoints were pruned."""
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
    """Found by the model: the manifests restore a checkpoint whose files retention had removed."""
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
