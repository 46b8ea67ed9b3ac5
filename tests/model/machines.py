"""The state machines that Hypothesis drives through the protocol."""

import gc
from typing import Any

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckpt_async.core import keys, retention
from tests.model.world import Host, ViolationError, World

MAX_STEP = 3


MAX_GENERATIONS = 3


class Protocol(RuleBasedStateMachine):
    """Trainers that save, crash and restart, with engines, sweepers and readers in between."""

    collect_at_least = 10**6
    lowest_keep = -1
    publishes = False
    num_steps = 40

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.cluster: list[Host] = []

    @initialize(
        num_ranks=st.integers(1, 3), keep=st.sampled_from([1, -1, 0, 2]), keep_remote=st.integers(1, 2)
    )
    def begin(self, num_ranks: int, keep: int, keep_remote: int) -> None:
        self.world = World(
            num_checkpoints_to_keep=max(keep, self.lowest_keep),
            keep_remote=keep_remote,
            collect_at_least=self.collect_at_least,
            publishes=self.publishes,
        )
        self.cluster = self.world.new_hosts(num_ranks)
        self.world.start(self.cluster)
        self.arrange()

    def arrange(self) -> None:
        """Set up the state in which the rules begin."""

    def _pick(self, hosts: list[Host], number: int) -> Host | None:
        return hosts[number % len(hosts)] if hosts else None

    # --- trainers ----------------------------------------------------------------------------------------

    @rule(
        who=st.integers(0, 5),
        num_shards=st.sampled_from([1, 2, 0]),
        what=st.sampled_from(["sealed", "open", "skipped"]),
        expects_all=st.booleans(),
    )
    def save(self, who: int, num_shards: int, what: str, expects_all: bool) -> None:
        """Save on one rank alone, perhaps without sealing, perhaps no shard at all."""
        host = self._pick([host for host in self.world.hosts if self._may_save(host)], who)
        if host is None:
            return
        if what == "skipped":
            host.next_step += 1
        else:
            self.world.save(host, num_shards=num_shards, is_sealed=what == "sealed", expects_all=expects_all)

    @rule(num_shards=st.sampled_from([1, 2]))
    def save_everywhere(self, num_shards: int) -> None:
        """Save on all ranks: the common case, so that deep states are reached."""
        for host in filter(self._may_save, self.cluster):
            self.world.save(host, num_shards=num_shards, is_sealed=True)

    def _may_save(self, host: Host) -> bool:
        return host.generation > 0 and host.next_step <= MAX_STEP

    # --- engines -----------------------------------------------------------------------------------------

    @rule(who=st.integers(0, 5), num_steps=st.integers(1, 50), order=st.integers(0, 10**6))
    def work(self, who: int, num_steps: int, order: int) -> None:
        self.world.run(self._pick(self.world.hosts, who), num_steps, order)

    @rule(num_steps=st.sampled_from([10, 30, 100, 400]), order=st.integers(0, 10**6))
    def all_work(self, num_steps: int, order: int) -> None:
        for host in self.world.hosts:
            self.world.run(host, num_steps, order)

    @rule(seconds=st.sampled_from([1.0, 31.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds

    # --- misfortune --------------------------------------------------------------------------------------

    @rule(
        who=st.integers(0, 5),
        what=st.sampled_from(
            "retried after before kill power kill lucky_power lost_journal overwrite unlink lose lose".split()
        ),
    )
    def suffer(self, who: int, what: str) -> None:
        host = self._pick(self.world.hosts, who)
        match what:
            case "retried" | "after" | "before":
                self.world.fault = what
            case "kill":
                self.world.stop(host)
            case "power" | "lucky_power":
                self.world.lose_power(host, is_lucky=what != "power")
            case "lost_journal":
                self.world.lose_journal(host)
            case "lose":
                self.world.lose_upload()
            case _:
                self.world.tamper(host, what)

    @rule(who=st.integers(0, 5))
    def finish_for_the_dead(self, who: int) -> None:
        """Adopt the folder of a dead trainer, as `drain` or the sweeper does."""
        host = self._pick([host for host in self.world.hosts if host.engine is None], who)
        if host is not None:
            self.world.start_engine(host)

    @precondition(lambda self: self.world and len(self.world.world_sizes) < MAX_GENERATIONS)
    @rule(num_ranks=st.integers(1, 3), first_step=st.integers(1, MAX_STEP), is_elsewhere=st.booleans())
    def restart(self, num_ranks: int, first_step: int, is_elsewhere: bool) -> None:
        """Restart with more or fewer ranks; the same steps are saved again. With `is_elsewhere`, the old trainer
        still runs.
        """
        if not any(self.world.truths):
            return
        if is_elsewhere:
            self.cluster = self.world.new_hosts(num_ranks)
        else:
            for host in self.cluster:
                self.world.stop(host)
            more = num_ranks - len(self.cluster)
            self.cluster += self.world.new_hosts(more, first_rank=len(self.cluster)) if more > 0 else []
        self.world.start(self.cluster[:num_ranks], first_step=first_step)

    # --- sweepers and readers ----------------------------------------------------------------------------

    @precondition(lambda self: self.world and len(self.world.others) < 3)
    @rule(age_s=st.sampled_from([50.0, 0.0, 1e9]))
    def sweep(self, age_s: float) -> None:
        self.world.start_sweep(age_s=age_s)

    @precondition(lambda self: self.world and len(self.world.others) < 3)
    @rule()
    def read(self) -> None:
        self.world.start_reader()

    @precondition(lambda self: self.world and self.world.others)
    @rule(who=st.integers(0, 2), num_steps=st.integers(1, 100), is_killed=st.booleans())
    def go_on(self, who: int, num_steps: int, is_killed: bool) -> None:
        task = self.world.others[who % len(self.world.others)]
        self.world.run_other(task, num_steps)
        if is_killed and not task.is_done:
            task.kill()
            self.world.others.remove(task)

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if not ViolationError.was_raised:
                self.world.settle()
        finally:
            self.world.close()


class Steady(Protocol):
    """Whole saves and no faults: reaches what happens only after many commits (retention, pruning, readers)."""

    suffer = None
    restart = None
    save = None
    finish_for_the_dead = None
    lowest_keep = 1


class Reading(Steady):
    """Begins with a committed checkpoint on which a reader holds a lease."""

    num_steps = 25  # a sixth of the time to the seeded mistake: in more steps, the reader has ended

    def arrange(self) -> None:
        self.save_everywhere(num_shards=1)
        for _ in range(3):
            self.all_work(num_steps=400, order=0)
            self.world.now += 61.0
        reader = self.world.start_reader()
        while not any(key.startswith(keys.LEASES) for key in self.world.bucket.objects):
            self.world.run_other(reader, 1)
        self.world.run_other(reader, 4)  # it has read the decision again, and not all else
        self.save_everywhere(num_shards=1)
        for _ in range(3):
            self.all_work(num_steps=400, order=0)


class Finding(Steady):
    """Begins with two searches that have not read what they have listed: nothing, and two checkpoints, of which
    retention keeps the older one. There are three by now.
    """

    num_steps = 15
    read = None

    def arrange(self) -> None:
        self.world.policy = retention.parse("last=1,every-steps=2")
        for host in self.cluster:
            host.next_step = 0
        for num_steps in (2, 0, 4):  # the listing takes two, and `latest` after it two more
            if num_steps:
                self.world.run_other(self.world.start_finder(), num_steps)
            self.save_everywhere(num_shards=1)
            for _ in range(3):
                self.all_work(num_steps=400, order=0)
                self.world.now += 61.0

    @precondition(lambda self: self.world and len(self.world.others) < 3)
    @rule()
    def find(self) -> None:
        self.world.start_finder()


class Collecting(Protocol):
    """The sweeper collects old decisions at once, not in batches of a hundred."""

    collect_at_least = 1


class Publishing(Protocol):
    """Shards are also published under exact keys."""

    publishes = True


class PublishingSteady(Steady):
    publishes = True


def explore(
    max_examples: int, machine: type[Protocol] = Protocol, *, seed: int | None = None, **more: Any
) -> None:
    """Run the machine; `seed` chooses the schedules. `phases` without shrinking find a mistake in seconds; with it,
    explaining it takes a minute.
    """
    # What earlier tests left is logged with tracebacks, for which CPython 3.11 parses; if that happens while Hypothesis
    # parses, too, it fails with "AST constructor recursion depth mismatch".
    gc.collect()
    if seed is not None:
        machine = hypothesis.seed(seed)(type(machine.__name__, (machine,), {}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=max_examples,
            stateful_step_count=machine.num_steps,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            **more,
        ),
    )
