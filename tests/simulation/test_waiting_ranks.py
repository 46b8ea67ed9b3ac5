"""What a launch asks of the store while checkpoints wait for a rank that never comes: real engines, virtual time."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ckpt_async.core import keys, records
from ckpt_async.core.boundary import Boundary
from ckpt_async.core.decide import SUCCESSOR_LOOKS_PER_S
from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import (
    CheckpointId,
    Event,
    JournalRow,
    MadeDurable,
    Opened,
    Outcome,
    ReceiptStored,
    RemoteAddress,
    Sealed,
)
from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.core.waiting import LISTINGS_PER_S, POLLS_PER_S
from ckpt_async.engine.loop import Engine
from ckpt_async.engine.state import State
from ckpt_async.protocol import steps
from ckpt_async.stores.interface import Enough, Listing, ObjectInfo
from ckpt_async.transfer.patient import PatientStore
from tests.stores.memory import MemoryStore
from tests.virtual_time import VirtualTimeLoop

LATENCY_S = 0.03
SETTINGS = Settings(latest_filename="")


class CountingStore(MemoryStore):
    """Answers after a delay, counts requests, and shows of all receipts only the first page: rank 0 never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    async def _count(self, verb: str, key: str) -> None:
        self.counts[f"{verb} {key}"] += 1
        await asyncio.sleep(LATENCY_S)

    def num(self, what: str) -> int:
        return sum(count for each, count in self.counts.items() if what in each)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        await self._count("GET", key)
        return await super().get(key, max_size_bytes=max_size_bytes)

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        await self._count("LIST", prefix)
        if prefix.startswith(keys.RECEIPTS):
            return Listing((ObjectInfo(f"{prefix}00001.json", 1, "", None, 0.0),), 0.0, is_whole=False)
        return await super().list(prefix, start_after=start_after, enough=enough)


class ListJournal:
    """A rank's journal that is a list."""

    def __init__(self, rank: int, events: Iterable[Event]) -> None:
        self._rank = rank
        self._rows: list[JournalRow] = []
        self.append(events)

    def append(self, events: Iterable[Event], _notices: object = ()) -> None:
        for event in events:
            self._rows.append(JournalRow(len(self._rows) + 1, self._rank, 0.0, event))

    def follow(self, local: Local) -> Local:
        return fold(self._rows[local.sequence :], local)

    def check_there(self) -> None: ...
    def compact(self) -> None: ...


class Loop(VirtualTimeLoop):
    # Typed for the only call there is, that of `asyncio.to_thread`.
    def run_in_executor(self, _: Any, function: Callable[..., Any], *arguments: Any) -> Any:  # type: ignore[override]
        done = self.create_future()
        done.set_result(function(*arguments))
        return done


def rank_of_launch(
    rank: int, num_ranks: int, ids: Sequence[CheckpointId], store: CountingStore, *, is_trainer: bool
) -> Engine:
    """Return the engine of a rank that has delivered its parts of these checkpoints."""
    events: list[Event] = [Opened(1, num_ranks, RemoteAddress("file:///run"))]
    for id_ in ids:
        done = Sealed(id_, f"step-{id_.step}", num_ranks), MadeDurable(id_, (), True), ReceiptStored(id_)
        events += done
    state = State(
        rank=rank,
        folder=mock.Mock(
            path=Path("/"),
            private=Path("/"),
            reserve=mock.Mock(was_needed=False),
            space=lambda: (1 << 50, 1 << 50),
            num_ranks=lambda: 1,
        ),
        journal=ListJournal(rank, events),  # type: ignore[arg-type]
        store=PatientStore(store, SETTINGS),
        settings=SETTINGS,
        observer=Observer(),
        clock=asyncio.get_running_loop().time,
        is_trainer=is_trainer,
    )
    return Engine(state)


def play(
    num_ranks: int,
    num_open: int,
    for_s: float,
    then: Callable[[MemoryStore, list[CheckpointId]], Any] | None = None,
    *,
    is_hurried: bool = False,
    is_trainer: bool = True,
) -> tuple[CountingStore, list[Engine]]:
    """Let the ranks 1 to N-1 wait for `num_open` checkpoints. Once each has looked at all of them, do `then`, and count
    what they ask of the store in the following `for_s` seconds.
    """
    ids = [CheckpointId(1, step) for step in range(1, num_open + 1)]

    async def launch() -> tuple[CountingStore, list[Engine]]:
        store = CountingStore()
        ranks = range(1, num_ranks)
        engines = [rank_of_launch(rank, num_ranks, ids, store, is_trainer=is_trainer) for rank in ranks]
        running = [asyncio.ensure_future(each.run()) for each in engines]
        for each in engines:
            each.hurry(is_hurried)
        await asyncio.sleep(4.0)
        if then is not None:
            await then(store, ids)
        store.counts.clear()
        await asyncio.sleep(for_s)
        for each in engines:
            each.stop()
        await asyncio.gather(*running)
        return store, engines

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(launch())


def test_requests_of_1000_waiting_ranks_are_bounded_per_launch() -> None:
    """Each rank polled for each checkpoint of its own: 12,000 reads a second for three."""
    for_s = 4.0
    store, _ = play(1000, 3, for_s, is_hurried=True)
    assert store.num("decisions") + store.num("boundary") <= (POLLS_PER_S * for_s) + 1000
    assert store.num("receipts") <= (LISTINGS_PER_S * for_s) + 1000
    assert store.num("generations") <= (SUCCESSOR_LOOKS_PER_S * for_s) + 1000


def test_requests_of_a_waiting_rank_do_not_grow_with_open_checkpoints() -> None:
    few, many = (play(3, num_open, 300.0)[0] for num_open in (2, 200))
    assert 0 < many.counts.total() <= few.counts.total() + 10


def test_receipts_of_open_checkpoints_are_listed_in_turn() -> None:
    """Those who were to commit any of them may have died."""
    store, _ = play(3, 5, 100.0, is_hurried=True)
    listings = [store.num(keys.receipts_prefix(CheckpointId(1, step))) for step in range(1, 6)]
    assert min(listings) > 10
    assert max(listings) - min(listings) <= 2


@pytest.mark.parametrize("num_open", [1, 60])
def test_waiting_ranks_read_only_decisions_that_are_there(num_open: int) -> None:
    async def decide(store: MemoryStore, ids: list[CheckpointId]) -> None:
        patient = PatientStore(store, SETTINGS)
        for id_ in ids[:50]:
            new = steps.new_decision(
                id_, Outcome.ABORT, name=f"step-{id_.step}", world_size=3, by="", now=0.0
            )
            await patient.put(keys.decision_key(id_), records.encode_decision(new))

    store, engines = play(3, num_open, 100.0, decide)
    for engine in engines:
        waiting = [each for each in engine.local.checkpoints.values() if each.decision is None]
        assert len(waiting) == max(0, num_open - 50)
        assert all(engine.outcomes.of(CheckpointId(1, step)) for step in range(1, min(50, num_open) + 1))
    if num_open > 50:
        assert store.num(f"GET {keys.DECISIONS}") == 50 * len(engines)
        assert store.num(f"LIST {keys.DECISIONS}") < 5 * len(engines)


@pytest.mark.parametrize("num_open", [1, 3])
def test_a_collected_decision_ends_the_wait(num_open: int) -> None:
    """A sweeper may have given a dead launch's checkpoints up and collected their decisions while a node drains it."""

    async def collect(store: MemoryStore, ids: list[CheckpointId]) -> None:
        boundary = Boundary(CheckpointId(1, ids[-1].step + 1), number=1, nonce="nonce")
        await PatientStore(store, SETTINGS).put(keys.BOUNDARY, records.encode_boundary(boundary))

    _, engines = play(3, num_open, 200.0, collect, is_trainer=False)
    for engine in engines:
        assert not [each for each in engine.local.checkpoints.values() if each.decision is None]
