"""One schedule from one number: trainers, sweepers and readers on one virtual clock, and the faults that hit them.

What is real: `Engine`, `Journal` and `Folder` (files, hard links, a journal), `PatientStore` with its deadlines and
back-off, `protocol`, `generation.agree`, `Sweeper` with `drain` and `RemoteSweep`, `MemoryStore`. What is not:
`Uploader` itself, which owns a thread; instead, `Simulation._train` makes the same calls to folder, journal and
engine, in the same order. Power loss is not simulated here but in `tests/model/world.py`, whose invariants are
checked here after every effect of any request.
"""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import random
import shutil
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from ckpt_async.core import backlog, keys
from ckpt_async.core.model import (
    CheckpointId,
    Enqueued,
    Event,
    Lease,
    Opened,
    RemoteAddress,
    Sealed,
    Shard,
    Superseded,
)
from ckpt_async.core.naming import checkpoint_name
from ckpt_async.core.observe import Notice, Observer
from ckpt_async.core.retention import KeepLast
from ckpt_async.core.settings import INHERITED, Settings
from ckpt_async.engine import loop as engine
from ckpt_async.engine import recovery
from ckpt_async.engine.loop import Engine
from ckpt_async.engine.state import State
from ckpt_async.errors import CkptAsyncError, FolderInUseError, InvalidRecordError
from ckpt_async.local.folder import Folder, boot_id
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.protocol import generation as generations
from ckpt_async.protocol import steps, sweep_plan
from ckpt_async.protocol.cas import read
from ckpt_async.protocol.verify import verify
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.sweep import drain, sweeper
from ckpt_async.sweep.drain import DrainReport
from ckpt_async.sweep.remote import RemoteSweep
from ckpt_async.sweep.sweeper import Sweeper
from ckpt_async.transfer import patient, progress
from ckpt_async.transfer.patient import PatientStore
from tests.model.world import LEASE_TTL_S, Truth, ViolationError, World
from tests.simulation.faults import LATEST_ARRIVAL_S, PART_BYTES, URL, FaultyStore, Network, Window
from tests.simulation.processes import Process, SimulatedLoop, current

EPOCH_S = 1_000_000.0
ADOPTION_S = 60.0
NEVER_S = 1e9
# Ten times slower than in reality: where a rank never comes, most of a schedule would otherwise be beats.
BEATS = {"BEAT_S": 2.0, "BEAT_MAX_S": 20.0, "PATIENCE_S": 100.0}
# A fast file system, which can create 2,000 folders a minute; its contents need not survive anything.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(eq=False, slots=True)
class Node:
    """A machine. Its disk outlives the processes on it."""

    path: Path
    trainers: list[Process] = field(default_factory=list)


class SimulatedJournal(Journal):
    """Reports what is recorded to the world, and dies with its process."""

    world: "Simulation"

    def __init__(self, folder: Folder, rank: int) -> None:
        self._process = process = current()
        super().__init__(folder, rank, clock=lambda: self.world.clock_of(process))
        process.hold(self.close)

    def append(self, events: Iterable[Event], notices: Sequence[Notice] = ()) -> None:
        self._process.check_alive()
        events = list(events)
        for event in events:
            self.world.on_event(self.rank, event)
        super().append(events, notices)


class SimulatedFolder(Folder):
    """Reports what is removed to the world."""

    world: "Simulation"

    def remove_spool(self, spool: str) -> None:
        top = self.private / spool
        if top.is_dir():
            rank = int(top.parent.name.removeprefix("rank-"))
            self.world.on_release(rank, keys.parse_checkpoint_tag(top.name), None)  # type: ignore[arg-type]
        super().remove_spool(spool)

    def remove_source(self, source: str, identity: Any, *, keeps_folders: bool = False) -> bool:
        if self.is_same(source, identity):
            self.world.on_source_removed(source, (self.path / source).read_bytes())
        return super().remove_source(source, identity, keeps_folders=keeps_folders)


class SimulatedLock(RankLock):
    """A lock whose waiters wait in virtual time."""

    wanted: "set[Path]" = set()  # noqa: RUF012  replaced by every world

    def is_wanted(self) -> bool:
        return self.path in self.wanted

    async def wait(self) -> None:
        try:
            while True:
                with contextlib.suppress(FolderInUseError):
                    await asyncio.to_thread(self.acquire)
                    return
                self.wanted.add(self.path)
                await asyncio.sleep(1.0)
        finally:
            self.wanted.discard(self.path)


class Simulation(World):
    """The world of one seed. `play` and `settle` raise ViolationError."""

    def __init__(self, seed: int, loop: SimulatedLoop, rng: random.Random) -> None:
        self._loop, self.rng = loop, rng
        self.counts: Counter[str] = Counter()
        self.violation: ViolationError | None = None
        keep_local = rng.choice([-1, 1, 1, 2, 0])
        super().__init__(
            num_checkpoints_to_keep=keep_local,
            keep_remote=rng.choice([1, 1, 2]),
            collect_at_least=rng.choice([10**6, 1]),
        )
        self.is_patient = rng.random() < 0.5  # the sweeper gives up nothing during the schedule
        age_s = NEVER_S if self.is_patient else rng.choice([60.0, 200.0])
        self.settings = Settings(
            num_checkpoints_to_keep=keep_local,
            num_concurrent_uploads=2,
            upload_timeout_s=rng.choice([60.0, 300.0]),
            remote_retention=f"last={self.keep_remote}",
            part_size_bytes=PART_BYTES,
            decision_poll_s=2.0,  # how often a waiting engine looks
            abandon_after_s=age_s,
            abandon_newest_after_s=min(NEVER_S, 5 * age_s),
        )
        self.root = Path(tempfile.mkdtemp(prefix="ckpt-async-", dir=SCRATCH))
        self.nodes: list[Node] = []
        self.others_running: list[Process] = []
        self.superseded: set[tuple[CheckpointId, int]] = set()
        self._numbers: Counter[str] = Counter()
        self._is_closing = False
        self.network = Network(self.bucket, rng, self.check)

    @property
    def now(self) -> float:
        return EPOCH_S + self._loop.time()

    @now.setter
    def now(self, _: float) -> None:
        """Ignore the value: the loop's clock is the only one."""

    def clock_of(self, process: Process) -> float:
        return self.now + process.clock_offset_s

    def _patch(self) -> None:
        """Put the world in place of the network, of clocks, and of everything that waits in real time."""
        replaced = SimulatedJournal, SimulatedFolder, SimulatedLock
        for each in (SimulatedJournal, SimulatedFolder):
            each.world = self
        SimulatedLock.wanted = set()
        clock = types.SimpleNamespace(monotonic=self._loop.time, time=lambda: self.clock_of(current()))
        part_size = next(each for each in dataclasses.fields(Settings) if each.name == "part_size_bytes")
        changes: list[tuple[Any, str, Any]] = [
            (part_size, "metadata", {**part_size.metadata, "low": PART_BYTES}),  # below what S3 allows
            *(
                (drain, name, each)
                for name, each in zip(("Journal", "Folder", "RankLock"), replaced, strict=True)
            ),
            *((module, "time", clock) for module in (drain, sweeper, patient, progress)),
            (patient, "open_store", lambda *_: self.store_of(current())),
            (drain, "LOCK_WAIT_S", 0.0),
            (drain, "WANTED_POLL_S", 5.0),
            (engine, "POLL_S", 30.0),  # a safety net: every append wakes the engine
            (sweep_plan, "COLLECT_AT_LEAST", self._collect_at_least),
            *((generations, name, each) for name, each in BEATS.items()),
        ]
        for owner, name, value in changes:
            self._patches.enter_context(mock.patch.object(owner, name, value))
        self._silence()

    def store_of(self, process: Process) -> FaultyStore:
        return FaultyStore(self.network, process)

    def close(self) -> None:
        for node in self.nodes:
            self._kill_all(node.trainers)
        self._kill_all(self.others_running)
        for task in self.network.late:
            task.cancel()
        self._patches.close()
        shutil.rmtree(self.root)

    def _silence(self) -> None:
        logger = logging.getLogger("ckpt_async")
        self._patches.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL + 1)

    # --- what must hold ----------------------------------------------------------------------------------

    def check(self, _: Any = None) -> None:
        """Check the invariants after every effect. The first violation is kept, because it may be raised in a process
        that no one awaits.
        """
        try:
            super().check()
        except ViolationError as error:
            self.violation = self.violation or error
            raise

    def _raise_violation(self) -> None:
        if self.violation is not None:
            raise self.violation

    def _note(self, error: ViolationError) -> None:
        self.violation = self.violation or error

    def on_event(self, rank: int, event: Event) -> None:
        try:
            super().on_event(rank, event)
        except ViolationError as error:
            self._note(error)
            raise

    def on_release(self, rank: int, id_: CheckpointId | None, disk: Any) -> None:
        try:
            super().on_release(rank, id_, disk)
        except ViolationError as error:
            self._note(error)
            raise

    def on_source_removed(self, source: str, content: bytes) -> None:
        id_, rank = next(key for key, truth in self.truths.items() if content in truth.shards.values())
        if any(each == id_ for each, _ in self.superseded):  # by any rank: all have the same policy
            return
        there = types.SimpleNamespace(entries={source: types.SimpleNamespace(content=content)})
        try:
            self.on_remove(rank, source, there)  # type: ignore[arg-type]
        except ViolationError as error:
            self._note(error)
            raise
        self.counts["removed locally"] += 1

    def _on_kill(self, process: Process) -> None:
        """Count where the process is cut short, and whether its request in flight has had its effect."""
        kind = process.name.partition("-")[0]
        self.counts[f"crash of a {kind}"] += 1
        for frame in process.in_flight():
            name, local = frame.f_code.co_qualname, frame.f_locals
            match name:
                case "Engine._perform" | "RemoteSweep._attempt":
                    self.counts[f"crash in {type(local['action']).__name__}"] += 1
                case "RemoteSweep.observe" | "agree" | "Engine.recover" | "Simulation._save" | "take_lease":
                    self.counts[f"crash in {name}"] += 1
                case "FaultyStore._request":
                    self.counts[f"crash {local.get('phase', 'before')} the effect of a request"] += 1

    # --- processes ---------------------------------------------------------------------------------------

    def _start(
        self, kind: str, main: Callable[[], Coroutine[Any, Any, Any]], *, may_die: bool = True
    ) -> Process:
        self._numbers[kind] += 1
        offset_s = self.rng.choice([0.0, 0.0, -86_400.0, 86_400.0])
        process = Process(f"{kind}-{self._numbers[kind]}", clock_offset_s=offset_s)
        process.on_kill = self._on_kill
        if may_die and self.rng.random() < 0.6:
            process.awaits_left = int(10 ** self.rng.uniform(0.5, 3.1))
        return process.start(self._guard(main))

    async def _guard(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a process: an error that no caller of the package would expect is a violation."""
        try:
            await main()
        except CkptAsyncError as error:
            self.counts[f"{current().name.partition('-')[0]} ended: {type(error).__name__}"] += 1
        except Exception as error:
            if current().is_dead:
                raise
            if not isinstance(error, ViolationError):
                error = ViolationError(f"R12: {current().name} died of {error!r}")
            self._note(error)

    def _kill_all(self, processes: list[Process]) -> None:
        for process in processes:
            process.kill()
        processes.clear()

    # --- trainers ----------------------------------------------------------------------------------------

    async def _train(
        self, node: Node, rank: int, world_size: int, launch: str, first_step: int, num_steps: int
    ) -> None:
        """Do what `Uploader` and the thread it owns do."""
        process, settings = current(), self.settings
        folder = SimulatedFolder(node.path)
        lock = SimulatedLock(folder, rank)
        process.hold(lock.release)
        try:
            await lock.wait()
            journal = SimulatedJournal(folder, rank)
            local = journal.local()
            store = PatientStore(self.store_of(process), settings)
            now = self.clock_of(process)
            claim = await generations.agree(
                store, rank=rank, world_size=world_size, launch_key=launch, explicit=None, now=now
            )
            generation = claim.number
            self.world_sizes[generation] = world_size
            beating = asyncio.get_running_loop().create_task(
                self._guard(partial(generations.beat, store, generation, rank=rank, world_size=world_size))
            )
            inherited = tuple((name, getattr(settings, name)) for name in INHERITED)
            address = RemoteAddress(URL)
            opened = Opened(generation, world_size, address, inherited, boot_id(), claim.nonce)
            journal.append(recovery.on_disk(folder, local).rows_of(opened, ()))
            known = State(
                rank=rank,
                folder=folder,
                journal=journal,
                store=store,
                settings=settings,
                observer=Observer(),
                clock=lambda: self.clock_of(process),
            )
            made = Engine(known)
            await made.recover(local.opened)
            running = asyncio.get_running_loop().create_task(self._guard(made.run))
            for step in range(first_step, first_step + num_steps):
                await asyncio.sleep(self.rng.expovariate(1 / 15))
                if made.fenced_by is not None:
                    break
                await self._save(folder, journal, made, CheckpointId(generation, step), rank, world_size)
            await self._finish(made)
            self.counts["fenced"] += made.fenced_by is not None
            beating.cancel()
            made.stop()
            await running
            journal.close()
        finally:
            lock.release()

    async def _save(
        self, folder: Folder, journal: Journal, made: Engine, id_: CheckpointId, rank: int, world_size: int
    ) -> None:
        """Call `enqueue` and `seal`, and do to the files what trainers do."""
        rng, name = self.rng, checkpoint_name(None, id_.step)
        truth = self.truths.setdefault((id_, rank), Truth())
        for number in range(rng.choice([1, 1, 2, 0])):
            shard = f"r{rank}-{number}"
            content = f"{id_} {shard} ".encode().ljust(rng.choice([40, 3 * PART_BYTES - 7]), b".")
            # A file of this name may still be there from another generation: it is replaced by a new file,
            # not overwritten.
            source = folder.path / name / shard
            source.parent.mkdir(exist_ok=True)
            source.unlink(missing_ok=True)
            source.write_bytes(content)
            await asyncio.sleep(0)
            relative = f"{name}/{shard}"
            [(identity, is_linked)] = folder.link([(relative, shard)], keys.spool_checkpoint(id_, rank))
            await asyncio.sleep(0)
            truth.shards[shard] = content
            journal.append([Enqueued(id_, name, Shard(shard, relative, identity, is_linked))])
            made.wake()
            await asyncio.sleep(0)
            self._misuse(source, truth)
        if rng.random() < 0.05:
            return  # training ends here, or forgets to seal
        await asyncio.sleep(rng.choice([0.0, 3.0]))
        truth.is_sealed = True
        journal.append([Sealed(id_, name, world_size)])
        made.wake()
        if rng.random() < 0.1:
            self._supersede(journal, made, rank)

    def _misuse(self, source: Path, truth: Truth) -> None:
        chance = self.rng.random()
        if chance < 0.2:
            source.unlink()  # rotated: the link is enough
        elif chance < 0.23:
            truth.is_promised = False
            facts = source.stat()
            with source.open("r+b") as file:
                file.write(b"overwritten")
            # A coarse clock might not show the change.
            os.utime(source, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))

    def _supersede(self, journal: Journal, made: Engine, rank: int) -> None:
        # Whichever is the target: what is checked is that giving up and committing compete.
        waiting = [each.id for each in backlog.backlog(made.fresh_local()) if each.sealed is not None]
        for id_ in waiting[:-1][:1]:
            self.superseded.add((id_, rank))
            self.truths[id_, rank].is_promised = False
            journal.append([Superseded(id_, "uploads fell behind")])
            made.wake()
            self.counts["superseded"] += 1

    async def _finish(self, made: Engine) -> None:
        """Do what `close` does: finish our own work, then wait a while for the other ranks."""
        made.hurry(True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 60.0
        first_round = made.num_rounds + 1
        while loop.time() < deadline and (made.num_rounds <= first_round or made.num_due):
            made.wake()
            await asyncio.sleep(2.0)

    # --- sweepers and readers ----------------------------------------------------------------------------

    async def _sweep(self, nodes: list[Node], num_sweeps: int, *, begins_after_s: float) -> None:
        await asyncio.sleep(begins_after_s)
        made = Sweeper(
            [node.path for node in nodes], [URL], settings=self.settings, adoption_timeout_s=ADOPTION_S
        )
        for _ in range(num_sweeps):
            report = await made.sweep()
            for each in report.folders:
                if each.drained:
                    self._note_drained(each.drained)
            for remote in report.remotes:
                for done in remote.done:
                    outcome = "failed" if done.error else "done"
                    self.counts[f"sweep {type(done.action).__name__} {outcome}"] += 1
            await asyncio.sleep(self.rng.uniform(20, 90))

    async def _read(self) -> None:
        """Read any checkpoint slowly, and renew the lease once."""
        store, clock = PatientStore(self.store_of(current()), self.settings), asyncio.get_running_loop().time
        listing = await store.list(keys.DECISIONS)
        found = [keys.parse_decision_key(each.key) for each in listing.objects]
        wanted = self.rng.choice(found) if found else None
        if wanted is None:
            return
        lease = Lease(wanted, current().name, LEASE_TTL_S)
        for _ in range(2):
            began = clock()
            decision = await steps.take_lease(store, lease)
            if decision is None:
                return
            self.counts["lease held"] += 1
            for rank in range(decision.world_size):
                await asyncio.sleep(self.rng.uniform(0, 15))
                try:
                    receipt = await steps.bound_receipt(store, decision, rank)
                    for shard in receipt.shards:
                        there = await read(store, shard.key)
                        if there is None or checksum_of(there[0], shard.checksum.algorithm) != shard.checksum:
                            raise InvalidRecordError(f"{shard.key} is gone")
                except InvalidRecordError as error:
                    if clock() - began < LEASE_TTL_S * 2 / 3:
                        raise ViolationError(f"R3: vanished while it was read: {error}") from None
                    return
            if clock() - began >= LEASE_TTL_S * 2 / 3:
                return
        await steps.drop_lease(store, lease)

    # --- the schedule ------------------------------------------------------------------------------------

    async def play(self) -> None:
        """Start the run several times, one after the other or at once, each time with its own world size."""
        rng, loop = self.rng, self._loop
        self.network.rate = rng.choice([0.0, 0.1, 0.25])
        first_step = 1
        for start in range(rng.choice([1, 1, 2, 2, 3])):
            if rng.random() < 0.4:
                begins_at = loop.time() + rng.uniform(0, 60)
                kind = rng.choice(["auth", "down", "slow_down"])
                self.network.windows = (Window(kind, begins_at, begins_at + rng.uniform(10, 90)),)
            is_elsewhere = not self.nodes or rng.random() < 0.3
            world_size, num_steps = rng.choice([1, 1, 2, 2, 3]), rng.choice([1, 1, 2])
            if is_elsewhere:  # the earlier processes keep running
                used = [self._new_node() for _ in range(rng.choice([1, world_size]))]
            else:
                used = self.nodes[-rng.randint(1, len(self.nodes)) :]
                for node in used:
                    self._kill_all(node.trainers)
                    if rng.random() < 0.1:
                        self._lose_journal(node)
            for rank in range(world_size):
                node = used[rank % len(used)]
                train = partial(self._train, node, rank, world_size, f"launch-{start}", first_step, num_steps)
                node.trainers.append(self._start("trainer", train))
            for _ in range(rng.choice([0, 1, 1, 2])):  # possibly two at once
                nodes = self.nodes if rng.random() < 0.7 else []
                sweep = partial(self._sweep, nodes, rng.randint(1, 2), begins_after_s=rng.uniform(0, 60))
                self.others_running.append(self._start("sweeper", sweep))
            for _ in range(rng.choice([0, 1, 2])):
                self.others_running.append(self._start("reader", self._read_later))
            first_step = rng.randint(1, first_step + num_steps)
            await self._pass(rng.uniform(10, 120))

    async def _read_later(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 60))
        await self._read()

    def _new_node(self) -> Node:
        node = Node(self.root / f"node-{len(self.nodes)}")
        self.nodes.append(node)
        return node

    def _lose_journal(self, node: Node) -> None:
        """Delete the journal. What had been made durable is in the manifests too (R10)."""
        self.counts["journal lost"] += 1
        for each in node.path.glob(f"{keys.PRIVATE}/journal-*"):
            each.unlink()
        for truth in self.truths.values():
            truth.is_promised = truth.is_promised and truth.is_acknowledged

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._raise_violation()

    # --- the end -----------------------------------------------------------------------------------------

    async def settle_down(self) -> None:
        """End the faults, finish the work of the dead, and sweep twice: then everything that can be committed is, and
        nothing is left of the rest.
        """
        self.network.heal()
        await self._pass(LATEST_ARRIVAL_S)
        running = [each for node in self.nodes for each in node.trainers] + self.others_running
        for process in running:
            process.awaits_left = None
            if self.rng.random() < 0.3:
                process.kill()
        await self._end(running)
        await self._end([self._start("drain", self._drain_all, may_die=False)])
        await self._end(
            [self._start("drain", self._drain_all, may_die=False)]
        )  # learns what the first drain brought
        self._check_finished()
        reader = self._start("reader", self._read)
        await self._pass(self.rng.uniform(0, 3))
        for _ in range(2):
            await self._end([self._start("sweeper", self._sweep_remote, may_die=False)])
            await self._end([reader])
            await self._pass(LEASE_TTL_S + sweep_plan.LEASE_MARGIN_S)
        await self._end([self._start("drain", self._drain_all, may_die=False)])
        self.check()
        self._check_clean()
        await self._end([self._start("verifier", self._verify, may_die=False)])
        self._check_local()
        for outcome in {each.outcome for each in self._decisions.values()}:
            self.counts[f"outcome {outcome.value}"] += 1

    async def _drain_all(self) -> None:
        """Do what `ckpt-async drain --remote` does, since a lost journal does not say which remote to use."""
        for node in self.nodes:
            adopting = drain.drain(
                node.path,
                timeout_s=ADOPTION_S,
                grace_s=sweeper.ADOPTION_GRACE_S,
                settings=self.settings,
                change=lambda _: RemoteAddress(URL),
            )
            self._note_drained(await adopting)

    def _note_drained(self, report: DrainReport) -> None:
        for rank in report.ranks:
            self.counts["adopted"] += bool(rank.committed or rank.aborted)
            if rank.error:
                raise ViolationError(f"R12: an adopting engine died of {rank.error}")

    async def _end(self, processes: list[Process]) -> None:
        """Wait for the processes; none waits for anything much longer than an hour."""
        mains = [each.main for each in processes if each.is_running and each.main is not None]
        if mains:
            _, late = await asyncio.wait(mains, timeout=2 * 3600.0)
            if late:
                hanging = [(each.name, each.now_in()) for each in processes if each.is_running]
                raise ViolationError(f"R14: they hang: {hanging}")
        self._raise_violation()

    async def _sweep_remote(self) -> None:
        ages = sweep_plan.Ages(0.0, 0.0, 0.0)
        policy = KeepLast(self.keep_remote)
        store = PatientStore(self.store_of(current()), self.settings)
        report = await RemoteSweep(store, policy, ages, lambda: self.now).run(is_dry_run=False)
        if not report.is_clean:
            raise ViolationError(f"I7: a sweep without faults failed: {report}")

    async def _verify(self) -> None:
        found = await verify(PatientStore(self.store_of(current()), self.settings), read_percent=100)
        if found.findings:
            raise ViolationError(f"I7: {', '.join(map(str, found.findings))}")

    def _check_finished(self) -> None:
        """I8 and I4: whatever all ranks had sealed is committed, unless a sweeper has lost patience."""
        for id_ in {id_ for id_, _ in self.truths}:
            truths = [self.truths.get((id_, rank)) for rank in range(self.world_sizes[id_.generation])]
            is_whole = all(each and each.is_sealed and each.is_promised for each in truths)
            is_whole = is_whole and self._has_shards(id_)
            if is_whole and id_ not in self.committed | (set() if self.is_patient else self.given_up):
                raise ViolationError(f"I8: all ranks sealed {id_}, but it is not committed")
            self.counts["whole"] += is_whole
            self.counts["superseded generation committed"] += id_ in self.committed and id_.generation < max(
                self.world_sizes
            )

    def _check_local(self) -> None:
        """I7 and R7 on every node: no links, no temporary files, no undecided checkpoint, no multipart upload."""
        if left := [each for each in self.bucket.uploads.values() if not each.is_completed]:
            raise ViolationError(f"I7: multipart uploads are left: {left}")
        if left := [key for key in self.bucket.objects if key.startswith(keys.LEASES)]:
            raise ViolationError(f"I7: leases are left: {left}")
        for node in self.nodes:
            for path in node.path.rglob("*"):
                private = path.relative_to(node.path).parts[0] == keys.PRIVATE
                if path.suffix == ".tmp" or (
                    private and "spool" in path.parts and path.is_file() and path.suffix != ".json"
                ):
                    raise ViolationError(f"I7: {path} is left")


def simulate(seed: int) -> Simulation:
    """Play one schedule, and check it. Raises ViolationError, or whatever error ended the simulation itself."""
    rng = random.Random(seed)
    state = random.getstate()
    random.seed(seed)  # for the back-off
    gc.disable()  # it would take a tenth of the time, and there is little to collect before the world ends
    loop_rng = random.Random(seed + 1)

    def delay_s() -> float:
        return loop_rng.uniform(0, 0.02)

    try:
        with asyncio.Runner(loop_factory=lambda: SimulatedLoop(delay_s)) as runner:
            return runner.run(_simulate(seed, rng))
    finally:
        gc.enable()
        random.setstate(state)


async def _simulate(seed: int, rng: random.Random) -> Simulation:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    made = Simulation(seed, loop, rng)
    try:
        await made.play()
        await made.settle_down()
    finally:
        made.close()
    made.counts.update(made.network.counts)
    return made
