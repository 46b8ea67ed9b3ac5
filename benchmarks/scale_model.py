"""What would 10,000 ranks that save 20 GiB each every 10 minutes request from S3, and what would that cost per month?

The answer is calculated, and checked by simulation. Shards are cut into parts by the code of `transfer`. The
requests of a commit are counted: the real `Engine`, `PatientStore`, `protocol` and `decide` of every rank run
on one virtual clock against a store that answers with latency, has S3's page size and its request limits per
prefix (503 SlowDown beyond), and counts. Only the bytes are left out: an upload is a sleep, the journal a
list. The uploads of a checkpoint end spread over `--spread-s`, as real ones do.

The calculation says N PUTs of receipts, N fencing LISTs, and so on; a run fails if the simulation disagrees.
The default simulates 1,250 engines: 10,000 ranks at eight per node, if one engine wrote one receipt for its
node; `--simulate 10000` takes an hour and 8 GiB. Prices are list prices of S3 Standard in us-east-1 as of
2025.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import collections
import hashlib
import math
import random
import selectors
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _compare import parser_of, report

from ckpt_async.core import decide, keys, waiting
from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import (
    CheckpointId,
    Enqueued,
    Event,
    FileIdentity,
    JournalRow,
    MadeDurable,
    Opened,
    Outcome,
    RemoteAddress,
    Sealed,
    Shard,
    StoredShard,
    Verified,
)
from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.engine.loop import Engine
from ckpt_async.engine.state import State
from ckpt_async.errors import FailureReason, ObjectNotFoundError, PreconditionFailedError, StoreError
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import (
    Body,
    BytesBody,
    Capabilities,
    Condition,
    Create,
    Enough,
    Listing,
    Match,
    ObjectInfo,
)
from ckpt_async.transfer import upload
from ckpt_async.transfer.budgets import CONTROL_REQUESTS
from ckpt_async.transfer.patient import PatientStore

CAPABILITIES = Capabilities(conditional_put=True, multipart=True, checksum_algorithm="crc64nvme")
GIB = 1 << 30
PAGE = 1000  # S3 API reference, ListObjectsV2: keys per answer
# S3 user guide, "best practices design patterns": per partitioned prefix.
WRITES_PER_S, READS_PER_S = 3500, 5500
CHECKPOINT = CheckpointId(1, 100)
NAME = "step-100"


# --- paper -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workload. A writer is whatever has an engine and writes a receipt: a rank, or a node on behalf of
    all its ranks.
    """

    num_writers: int
    bytes_per_writer: int
    part_size_bytes: int  # the setting: the minimum part size

    @property
    def part_bytes(self) -> int:
        return upload.part_size(self.bytes_per_writer, self.part_size_bytes, CAPABILITIES)

    @property
    def data_writes(self) -> int:
        """Requests that write one checkpoint, with one shard per writer: create, parts, complete."""
        return self.num_writers * (len(upload.plan_parts(self.bytes_per_writer, self.part_bytes)) + 2)


@dataclass(frozen=True, slots=True)
class Commit:
    """The requests for the receipts and the decision of one checkpoint, without its data."""

    writes: float
    lists: float  # pages: each is a request
    gets: float
    to_commit_s: float  # from the end of the last upload


def polls_until(waited_s: float, num_writers: int) -> tuple[int, int]:
    """Return how often an engine polls in vain for the decision within `waited_s` after it has listed the receipts for
    the first time, and how many of these polls are followed by another listing.
    """
    settings, now, num_listings = Settings(), 0.0, 0
    first_s, longest_s = settings.decision_poll_s, settings.decision_poll_max_s
    polls = waiting.Polls().began(now, first_s=first_s)
    listing_at = now
    while (now := max(polls.next_at, polls.last_at + num_writers / waiting.POLLS_PER_S)) <= waited_s:
        polls = polls.polled(now, first_s=first_s, longest_s=longest_s)
        if now >= listing_at:
            num_listings, listing_at = num_listings + 1, now + num_writers / waiting.LISTINGS_PER_S
    return polls.num - 1, num_listings


def on_paper(num_writers: int, latency_s: float, spread_s: float, num_committers: float) -> Commit:
    """Calculate the requests of one commit, and its duration. The last of N uploads ends after `spread_s`,
    the others evenly spread before it. An engine whose upload is done looks at once (fencing, receipts), then
    periodically at the decision and, while there is none, at the receipts.
    """
    if num_writers == 1:
        # It looks for nobody; it reads its receipt, and lists that, its shard, and newer generations.
        return Commit(writes=3, lists=3, gets=3, to_commit_s=4 * latency_s)
    waits = [spread_s * (number + 0.5) / num_writers for number in range(num_writers)]
    waves = math.ceil(num_writers / CONTROL_REQUESTS)
    pages = math.ceil((num_writers + 1) / PAGE)  # of receipts, and of shards
    # PUT receipt, LIST, GETs 16 at a time, LISTs, PUT decision.
    to_commit_s = latency_s * (1 + pages + waves + pages + 1)
    period_s = max(decide.SUCCESSOR_POLL_S, num_writers / decide.SUCCESSOR_LOOKS_PER_S)
    # Each engine looks for a successor periodically during its own upload, and then until the commit.
    looks_for_successor = sum(
        (spread_s - wait) // period_s + (wait + to_commit_s) // period_s for wait in waits
    )
    polls, listings = zip(*(polls_until(wait + to_commit_s, num_writers) for wait in waits), strict=True)
    return Commit(
        writes=num_writers + num_committers + 1,  # 1 for latest
        # With its first listing each engine looks for a successor. A listing ends at the first page that lacks a rank.
        # Only a committer reads all pages, lists the receipts again, and the shards, and looks for a successor once
        # more.
        lists=2 * num_writers
        + looks_for_successor
        + sum(listings)
        + num_committers * (pages - 1 + 2 * pages + 1),
        # Each poll in vain asks for the decision. When it is there, the engines other than the committers read it and
        # the boundary.
        gets=num_committers * (num_writers + 1) + sum(polls) + 2 * (num_writers - num_committers) + 1,
        to_commit_s=to_commit_s,
    )


# --- a store on a virtual clock ----------------------------------------------------------------------------


class _Selector(selectors.DefaultSelector):
    """A selector that does not wait, but tells the loop that the time has passed."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if timeout is None else 0)
        if not found and timeout:
            self.passed_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` moves only when nothing else is left to do; work for a thread is done at once."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.passed_s

    # Typed for the only call there is, that of `asyncio.to_thread`.
    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        done = self.create_future()
        done.set_result(func(*args))
        return done


@dataclass(slots=True)
class Counts:
    """Requests counted by kind, and by second."""

    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: collections.Counter[tuple[str, int]] = field(default_factory=collections.Counter)
    num_throttled: int = 0

    def peak(self, kind: str) -> int:
        return max((count for (what, _), count in self.seconds.items() if what == kind), default=0)


class DistantStore:
    """Objects in memory, answered after a delay, with S3's limits applied as if all keys were in one prefix."""

    url = "s3://model/run"
    capabilities: Capabilities = CAPABILITIES

    def __init__(self, latency_s: float, random_: random.Random) -> None:
        self.counts = Counts()
        self._latency_s, self._random = latency_s, random_
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._keys: list[str] = []
        self._shards: dict[str, int] = {}  # sizes

    def add_shard(self, key: str, size_bytes: int) -> None:
        self._shards[key] = size_bytes
        self._objects[key] = b"", asyncio.get_running_loop().time()
        bisect.insort(self._keys, key)

    async def _request(self, kind: str, key: str, *, is_write: bool) -> None:
        loop, rate = asyncio.get_running_loop(), "writes" if is_write else "reads"
        self.counts.kinds[f"{kind} {key.removeprefix(keys.PRIVATE + '/').partition('/')[0]}"] += 1
        await asyncio.sleep(self._latency_s * self._random.uniform(0.4, 0.6))
        now = rate, int(loop.time())
        self.counts.seconds[now] += 1
        if self.counts.seconds[now] > (WRITES_PER_S if is_write else READS_PER_S):
            self.counts.num_throttled += 1
            raise StoreError("SlowDown", reason=FailureReason.THROTTLED, operation=kind, key=key)

    async def _answer(self) -> None:
        await asyncio.sleep(self._latency_s * self._random.uniform(0.4, 0.6))

    def _size_bytes(self, key: str) -> int:
        return self._shards.get(key, len(self._objects[key][0]))

    def _info(self, key: str) -> ObjectInfo:
        data, at = self._objects[key]
        return ObjectInfo(key, len(data), hashlib.md5(data).hexdigest(), checksum_of(data, "crc64nvme"), at)

    async def put(self, key: str, body: Body, checksum: Any, *, condition: Condition = None) -> ObjectInfo:
        assert isinstance(body, BytesBody)
        await self._request("PUT", key, is_write=True)
        is_there = key in self._objects
        is_unmet = (isinstance(condition, Create) and is_there) or (
            isinstance(condition, Match) and not (is_there and self._info(key).etag == condition.etag)
        )
        if not is_unmet:
            if not is_there:
                bisect.insort(self._keys, key)
            self._objects[key] = (body.data, asyncio.get_running_loop().time())
        await self._answer()
        if is_unmet:
            raise PreconditionFailedError(operation="put", key=key)
        return ObjectInfo(key, body.size_bytes, hashlib.md5(body.data).hexdigest(), checksum)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        await self._request("GET", key, is_write=False)
        found = (self._objects[key][0], self._info(key)) if key in self._objects else None
        await self._answer()
        if found is None:
            raise ObjectNotFoundError(operation="get", key=key)
        assert len(found[0]) <= max_size_bytes
        return found

    async def head(self, key: str) -> ObjectInfo:
        await self._request("HEAD", key, is_write=False)
        await self._answer()
        if key not in self._objects:
            raise ObjectNotFoundError(operation="head", key=key)
        return self._info(key)

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        found: list[ObjectInfo] = []
        while True:  # page by page
            await self._request("LIST", prefix, is_write=False)
            begin = bisect.bisect_right(self._keys, max(prefix, start_after))
            page = self._keys[begin : begin + PAGE]
            mine = [key for key in page if key.startswith(prefix)]
            # Times are in whole seconds, as S3 reports them.
            found += [
                ObjectInfo(key, self._size_bytes(key), "", None, int(self._objects[key][1])) for key in mine
            ]
            await self._answer()
            is_whole = len(mine) < PAGE
            if is_whole or (enough is not None and enough(found)):
                return Listing(tuple(found), asyncio.get_running_loop().time(), is_whole)
            start_after = mine[-1]

    def has_latest(self) -> bool:
        return keys.LATEST in self._objects

    def decided_at(self) -> float | None:
        there = self._objects.get(keys.decision_key(CHECKPOINT))
        return there[1] if there else None


# --- the engines -------------------------------------------------------------------------------------------


class ListJournal:
    """A journal that is a list."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: list[JournalRow] = []

    def append(self, events: Iterable[Event], _notices: object = ()) -> None:
        for event in events:
            self._rows.append(JournalRow(len(self._rows) + 1, self._rank, 0.0, event))

    def follow(self, local: Local) -> Local:
        return fold(self._rows[local.sequence :], local)

    def check_there(self) -> None: ...
    def compact(self) -> None: ...


class ModelEngine(Engine):
    """The real engine, except that an upload is a sleep and nothing is on disk."""

    upload_s = 0.0
    add_shard: Callable[[str, int], None]
    committed = 0  # by all engines

    async def _carry_out(self, action: decide.Action) -> None:
        if isinstance(action, decide.MakeDurable):
            shards = self.state.checkpoint(action.checkpoint).shards
            self.state.record(MadeDurable(action.checkpoint, tuple(shards), True))
            return
        ModelEngine.committed += isinstance(action, decide.Commit)
        await super()._carry_out(action)

    async def _upload(self, action: decide.Upload) -> None:
        await asyncio.sleep(self.upload_s)
        key = keys.data_key(NAME, 1, action.shard)
        stored = StoredShard(action.shard, key, GIB, checksum_of(action.shard.encode(), "crc64nvme"))
        self.add_shard(key, GIB)
        self.state.record(Verified(action.checkpoint, stored))


@dataclass(frozen=True, slots=True)
class Simulated:
    """One checkpoint of all writers."""

    kinds: collections.Counter[str]
    peaks: dict[str, int]  # requests in the busiest second
    num_throttled: int
    to_commit_s: float  # from the end of the last upload
    to_known_s: float  # until the last engine knew
    num_committers: int

    def total(self, *verbs: str) -> int:
        return sum(count for kind, count in self.kinds.items() if kind.split()[0] in verbs)


def _has_committed(engine: Engine) -> bool:
    decided = engine.outcomes.of(CHECKPOINT)
    return decided is not None and decided.outcome is Outcome.COMMIT


async def simulate(num_writers: int, latency_s: float, spread_s: float, seed: int) -> Simulated:
    random_, loop = random.Random(seed), asyncio.get_running_loop()
    store = DistantStore(latency_s, random_)
    settings = Settings(latest_filename="")
    folder = types.SimpleNamespace(
        path=Path("/"),
        private=Path("/"),
        remove_spool=lambda _: None,
        unlink=lambda _: None,
        tend=lambda: None,
        is_disk_full=lambda: False,
        num_ranks=lambda: 1,
        space=lambda: (1 << 50, 1 << 50),
    )
    ModelEngine.committed = 0
    engines = []
    for rank in range(num_writers):
        journal = ListJournal(rank)
        shard = Shard(f"rank-{rank}.bin", "", FileIdentity(1, rank, GIB, 1), is_linked=True)
        events: list[Event] = [
            Opened(1, num_writers, RemoteAddress("file:///run")),
            Enqueued(CHECKPOINT, NAME, shard),
            Sealed(CHECKPOINT, NAME, num_writers),
        ]
        journal.append(events)
        state = State(
            rank=rank,
            folder=folder,  # type: ignore[arg-type]
            journal=journal,  # type: ignore[arg-type]
            store=PatientStore(store, settings),  # type: ignore[arg-type]
            settings=settings,
            observer=Observer(),
            clock=loop.time,
        )
        engine = ModelEngine(state)
        engine.upload_s, engine.add_shard = 1 + random_.uniform(0, spread_s), store.add_shard
        engines.append(engine)
    last_s = max(each.upload_s for each in engines)
    running = [asyncio.ensure_future(each.run()) for each in engines]
    while not store.has_latest() or any(each.outcomes.of(CHECKPOINT) is None for each in engines):
        if loop.time() > last_s + 600:
            raise RuntimeError("not committed within 10 minutes")
        await asyncio.sleep(0.05)
    known_s, decided_at = loop.time(), store.decided_at()
    if decided_at is None or not all(_has_committed(each) for each in engines):
        raise RuntimeError("decided otherwise than by a commit")
    for each in engines:
        each.stop()
    await asyncio.gather(*running)
    return Simulated(
        store.counts.kinds,
        {rate: store.counts.peak(rate) for rate in ("writes", "reads")},
        store.counts.num_throttled,
        decided_at - last_s,
        known_s - last_s,
        ModelEngine.committed,
    )


def check(simulated: Simulated, paper: Commit, num_writers: int) -> None:
    """Raise unless calculation and simulation agree: exactly where numbers are fixed, within 30% where chance
    has a part.
    """
    once = {"PUT receipts": num_writers}
    once["GET receipts"] = simulated.num_committers * num_writers
    once["PUT decisions"] = simulated.num_committers
    for kind, count in once.items():
        if not simulated.num_throttled and simulated.kinds[kind] != count:
            raise RuntimeError(f"{simulated.kinds[kind]} {kind}, on paper {count}")
    pairs = {
        "writes": (simulated.total("PUT"), paper.writes),
        "lists": (simulated.total("LIST"), paper.lists),
        "gets": (simulated.total("GET", "HEAD"), paper.gets),
        "seconds to the commit": (simulated.to_commit_s, paper.to_commit_s),
    }
    for name, (there, expected) in pairs.items():
        if not simulated.num_throttled and not 0.7 < (there + 0.1) / (expected + 0.1) < 1.3:
            raise RuntimeError(f"{num_writers} writers: {there:.2f} {name}, on paper {expected:.2f}")


# --- money -------------------------------------------------------------------------------------------------


def dollars_a_month(arguments: argparse.Namespace, writes: float, gets: float) -> float:
    """The cost of requests. DELETE is free, and so is incoming traffic."""
    checkpoints = 30 * 86_400 / arguments.interval_s
    dollars = writes * arguments.dollars_per_1000_puts + gets * arguments.dollars_per_1000_gets
    return float(checkpoints * dollars / 1000)


def storage_dollars_a_month(arguments: argparse.Namespace) -> float:
    """The cost of storage. What AWS bills as a GB is 2**30 bytes."""
    return float(arguments.ranks * arguments.gib * arguments.kept * arguments.dollars_per_gb_month)


# --- the whole ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--gib", type=float, default=20.0, help="size of one rank's part of a checkpoint")
    parser.add_argument("--interval-s", type=float, default=600.0)
    parser.add_argument("--kept", type=float, default=4.0, help="checkpoints in the store at any time")
    parser.add_argument("--latency-ms", type=float, default=30.0, help="latency of a small request")
    parser.add_argument(
        "--spread-s", type=float, default=20.0, help="between the first and the last upload's end"
    )
    parser.add_argument("--simulate", type=int, nargs="*", default=[10, 125, 1250], help="numbers of writers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dollars-per-1000-puts", type=float, default=0.005, help="PUT, POST, LIST")
    parser.add_argument("--dollars-per-1000-gets", type=float, default=0.0004)
    parser.add_argument("--dollars-per-gb-month", type=float, default=0.021)
    arguments = parser.parse_args()
    latency_s, spread_s = arguments.latency_ms / 1000, arguments.spread_s
    simulated_rows: dict[str, dict[str, Any]] = {}
    for num_writers in arguments.simulate:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            found = runner.run(simulate(num_writers, latency_s, spread_s, arguments.seed))
        paper = on_paper(num_writers, latency_s, spread_s, found.num_committers)
        check(found, paper, num_writers)
        simulated_rows[f"{num_writers:,} writers"] = {
            "s to commit": found.to_commit_s,
            "on paper": paper.to_commit_s,
            "s till all know": found.to_known_s,
            "committers": found.num_committers,
            "requests/writer": sum(found.kinds.values()) / num_writers,
            "paper": (paper.writes + paper.lists + paper.gets) / num_writers,
            "peak PUT/s": found.peaks["writes"],
            "peak GET+LIST/s": found.peaks["reads"],
            "503": found.num_throttled,
            "kinds": dict(found.kinds),
        }
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows: dict[str, dict[str, Any]] = {}
    nodes, per_node = math.ceil(arguments.ranks / arguments.ranks_per_node), arguments.ranks_per_node
    rank_bytes = int(arguments.gib * GIB)
    for title, num_writers, size_bytes, part_mib in (
        ("a receipt per rank", arguments.ranks, rank_bytes, 16),
        ("and parts of 256 MiB", arguments.ranks, rank_bytes, 256),
        ("and a receipt per node", nodes, rank_bytes * per_node, 256),
    ):
        fleet = Fleet(num_writers, size_bytes, part_mib << 20)
        paper = on_paper(num_writers, latency_s, spread_s, num_committers=1)
        writes_per_s = fleet.data_writes / arguments.interval_s
        rows[title] = {
            "part MiB": fleet.part_bytes >> 20,
            "data PUTs": fleet.data_writes,
            "PUT/s": writes_per_s,
            "prefixes": math.ceil(writes_per_s / WRITES_PER_S),
            "commit PUTs": paper.writes,
            "LISTs": paper.lists,
            "GETs": paper.gets,
            "s to commit": paper.to_commit_s,
            "requests $/month": dollars_a_month(
                arguments, fleet.data_writes + paper.writes + paper.lists, paper.gets
            ),
            "storage $/month": storage_dollars_a_month(arguments),
        }
    title = (
        f"{arguments.ranks:,} ranks x {arguments.gib:g} GiB every {arguments.interval_s:g} s,"
        f" {arguments.latency_ms:g} ms a request"
    )
    report(arguments, title, rows, simulated=simulated_rows)
    if not arguments.json and simulated_rows:
        for row in simulated_rows.values():
            del row["kinds"]
        report(arguments, "\nsimulated, one checkpoint", simulated_rows)


if __name__ == "__main__":
    main()
