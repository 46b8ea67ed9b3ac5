"""Starts of a run that all have one launch key, unless told otherwise, in every order: ranks that die before, while and
after they open; single ranks that are restarted; whole restarts; writes that arrive long after their writer's death.

What is real: `generation.agree` and `beat`, `conditional`, records, `MemoryStore`. A request is carried out when the
schedule says so, whether or not its sender is still alive.
"""

import random
import types
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt_async.core import keys
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FencedError
from ckpt_async.protocol import generation as generations
from ckpt_async.transfer.patient import PatientStore
from tests.model.world import ViolationError
from tests.stores.memory import CAPABILITIES, MemoryBucket, MemoryStore

AGAIN = "make the request again"
LOST = 0.05  # share of requests whose reply is lost
# How likely, at each step, a request that nobody waits for may arrive, or a rank may give up on a reply.
SLOW = 0.1


@types.coroutine
def until(what: Any) -> Iterator[Any]:
    """Yield to the schedule, and return its answer."""
    return (yield what)


@dataclass(eq=False, slots=True)
class Wire:
    """A request in flight."""

    attempt: Callable[[], Coroutine[Any, Any, Any]]
    arrives_at: float
    is_done: bool = False
    result: Any = None
    error: Exception | None = None

    def carry_out(self) -> None:
        coroutine, self.is_done = self.attempt(), True
        try:
            while True:
                coroutine.send(None)
        except StopIteration as end:
            self.result = end.value
        except Exception as error:
            self.error = error


@dataclass(eq=False, slots=True)
class Rank:
    """The process of one rank of one launch."""

    start: int
    rank: int
    work: Coroutine[Any, Any, None] | None = None
    waits_for: Wire | None = None
    goes_on_at: float = 0.0
    gives_up_at: float = 0.0  # waiting for the reply
    generation: int = 0  # the one that it has agreed on
    launch_key: str = "always the same"
    has_looked: bool = False  # at the generations that there are


class ScheduledStore(PatientStore):
    """A store whose requests arrive, and are answered, when the schedule says so."""

    def __init__(self, starts: "Starts") -> None:
        super().__init__(starts.store, Settings())
        self.starts = starts

    def pausing_at_most(self, pause_s: float) -> PatientStore:
        return self

    async def control(self, operation: str, attempt: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await self.starts.request(attempt)


@dataclass
class Starts:
    """All processes and requests. With `is_timed`, everything takes a while, but no process is starved. Otherwise the
    schedule may hold up a process for as long as it likes.
    """

    world_size: int
    rng: random.Random
    is_timed: bool = False
    has_conditional_put: bool = True
    now: float = 0.0
    ranks: list[Rank] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)

    def __post_init__(self) -> None:
        capabilities = replace(CAPABILITIES, conditional_put=self.has_conditional_put)
        self.bucket = MemoryBucket(clock=lambda: self.now)
        self.store = MemoryStore(self.bucket, capabilities=capabilities)

    # --- processes -----------------------------------------------------------------------------------------

    def launch(self, start: int, rank: int, *, at: float = 0.0, **more: Any) -> Rank:
        made = Rank(start, rank, goes_on_at=at, **more)
        made.work = self._run(made)
        self.ranks.append(made)
        return made

    def alive(self) -> list[Rank]:
        return [each for each in self.ranks if each.work is not None]

    def kill(self, rank: Rank) -> None:
        """Send SIGKILL. Requests that the rank has sent may still arrive."""
        assert rank.work is not None
        rank.work.close()
        rank.work = None

    async def _run(self, rank: Rank) -> None:
        store: Any = ScheduledStore(self)
        same: dict[str, Any] = {"rank": rank.rank, "world_size": self.world_size}
        key = rank.launch_key
        try:
            number = (await generations.agree(store, launch_key=key, explicit=None, now=0.0, **same)).number
        except FencedError:
            return
        for each in self.ranks:
            if each.generation == number and each.start != rank.start:
                raise ViolationError(
                    f"R5: generation {number} has ranks of starts {each.start}, {rank.start}"
                )
            if each.generation == number and each.rank == rank.rank:
                raise ViolationError(f"R5: generation {number} has two processes of rank {rank.rank}")
        rank.generation = number
        await generations.beat(store, number, **same)

    async def request(self, attempt: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Make a request, and make it again if the reply is late. The first one may still arrive."""
        while True:
            wire = Wire(attempt, self.now + self.rng.uniform(0.0, 0.4))
            if self.rng.random() < LOST and self.has_conditional_put:
                wire.arrives_at += self.rng.uniform(0.0, 3.0)
            self.wires.append(wire)
            if await until(wire) is AGAIN:
                continue
            if wire.error is not None:
                raise wire.error
            return wire.result

    # --- the schedule --------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Let one thing happen; return False if nothing can."""
        awaited = {each.waits_for for each in self.alive()}
        events: list[tuple[float, Callable[[], None]]] = [
            (wire.arrives_at, partial(self._carry_out, wire))
            for wire in self.wires
            if self.is_timed or wire in awaited or self.rng.random() < SLOW
        ]
        for each in self.alive():
            if each.waits_for is None or each.waits_for.is_done:
                events.append((each.goes_on_at, partial(self._resume, each)))
            elif self.is_timed or (self.has_conditional_put and self.rng.random() < SLOW):
                events.append((each.gives_up_at, partial(self._resume, each, AGAIN)))
        if not events:
            return False
        at, happens = min(events, key=lambda each: each[0]) if self.is_timed else self.rng.choice(events)
        self.now = max(self.now, at)
        happens()
        return True

    def _carry_out(self, wire: Wire) -> None:
        self.wires.remove(wire)
        wire.carry_out()
        for each in self.alive():
            if each.waits_for is wire:
                each.goes_on_at = self.now + self.rng.uniform(0.0, 0.1)

    def _resume(self, rank: Rank, answer: Any = None) -> None:
        assert rank.work is not None
        try:
            waits_for = rank.work.send(answer if rank.waits_for is not None else None)
        except StopIteration:
            rank.work = None
            return
        rank.has_looked |= rank.waits_for is not None and rank.waits_for.is_done
        rank.waits_for = waits_for if isinstance(waits_for, Wire) else None
        if rank.waits_for is None:
            rank.goes_on_at = self.now + waits_for + self.rng.uniform(0.0, 0.3)
        rank.gives_up_at = self.now + 1.0

    def close(self) -> None:
        for each in self.alive():
            self.kill(each)

    # --- what is played ------------------------------------------------------------------------------------

    def play_start(self, start: int, num_steps: int, *, spread_s: float = 0.0) -> None:
        """Play one launch, after killing all earlier ones. Some of its ranks die before they open, some later, and
        some of these are restarted alone.
        """
        self.close()
        for rank in self.rng.sample(range(self.world_size), self.rng.randint(0, self.world_size)):
            self.launch(start, rank, at=self.now + self.rng.uniform(0.0, spread_s))
        for _ in range(num_steps):
            chance, alive = self.rng.random(), self.alive()
            if chance < 0.02 and alive:
                self.kill(self.rng.choice(alive))
            elif chance < 0.04:
                missing = {*range(self.world_size)} - {each.rank for each in alive}
                for rank in list(missing)[:1]:
                    self.launch(start, rank, at=self.now)
            else:
                self.step()

    def converge(self, start: int, *, spread_s: float, within_s: float) -> None:
        """Play a last, complete start in which no rank dies, and require that it ends in one generation, in time."""
        self.close()
        self._complete(start, "always the same", spread_s=spread_s, within_s=within_s)

    def _complete(self, start: int, key: str, *, spread_s: float, within_s: float) -> int:
        whole = [
            self.launch(start, rank, at=self.now + self.rng.uniform(0.0, spread_s), launch_key=key)
            for rank in range(self.world_size)
        ]
        deadline = self.now + spread_s + within_s
        while self.now < deadline and not all(each.generation for each in whole):
            self.step()
        found = [each.generation for each in whole]
        if len(set(found)) != 1 or not found[0]:
            raise ViolationError(f"I8: start {start} is split over generations {found} at {self.now:.1f} s")
        return found[0]

    def supersede(self, old: int, new: int) -> None:
        """Play a launch whose first rank dies once it has opened, and a complete one with another key that begins while
        other ranks of the old one still open. Require that none of these fences it.
        """
        lingering = [
            self.launch(old, rank, at=self.now + self.rng.uniform(0.0, 1.0))
            for rank in range(self.world_size)
        ]
        while not all(each.has_looked for each in lingering) or not any(
            each.generation for each in lingering
        ):
            self.step()
        for each in self.alive():
            if each.generation:
                self.kill(each)
        for _ in range(self.rng.choice([0, 10, 100])):
            self.step()
        agreed = self._complete(new, "another", spread_s=self.rng.choice([0.0, 1.0, 8.0]), within_s=60.0)
        deadline = self.now + 60.0
        while self.now < deadline and self.step():
            pass
        newest = max(filter(None, map(keys.parse_generation_key, self.bucket.objects)))
        if newest != agreed:
            raise ViolationError(f"I8: generation {newest} of an older launch fences generation {agreed}")
