"""A small world for the real engine, sweeper and protocol steps: hosts whose disks lose power, one bucket, and a
scheduler that cuts every coroutine at each of its awaits. No threads, no event loop, no clock of its own.

What is real: `decide`, `fold`, `Engine` (which actions it chooses, and how it carries them out), `protocol`,
`conditional`, `records`, `RemoteSweep`, `plan`, `MemoryStore`. What is not: the disk, the journal's file, and how
bytes move. `World.check` verifies the invariants; it runs after every single step.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import random
import types
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from unittest import mock

from ckpt_async.core import decide, keys, records
from ckpt_async.core.boundary import Boundary
from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import (
    CheckpointId,
    Decided,
    Decision,
    Enqueued,
    Event,
    FileIdentity,
    Generation,
    JournalRow,
    Latest,
    Lease,
    MadeDurable,
    Opened,
    Outcome,
    RemoteAddress,
    Sealed,
    Shard,
)
from ckpt_async.core.naming import checkpoint_name
from ckpt_async.core.observe import Observer
from ckpt_async.core.retention import KeepLast, RetentionPolicy
from ckpt_async.core.settings import Settings
from ckpt_async.engine import committing, on_disk, recovery, state, uploading
from ckpt_async.engine.loop import Engine
from ckpt_async.engine.state import State
from ckpt_async.errors import (
    FailureReason,
    InvalidRecordError,
    SourceError,
    StoreError,
)
from ckpt_async.local import kept
from ckpt_async.protocol import cas, deciding, steps, sweep_plan
from ckpt_async.protocol import generation as generations
from ckpt_async.restore import discovery
from ckpt_async.restore.session import Pace, Session
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from ckpt_async.sweep import remote as remote_sweep
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.upload import SmallShard
from tests.stores.memory import MemoryBucket, MemoryStore

COMMITTED = (Outcome.COMMIT, Outcome.PRUNING, Outcome.PRUNED)
NEXT = {
    None: {Outcome.COMMIT, Outcome.ABORT},
    Outcome.COMMIT: {Outcome.COMMIT, Outcome.PRUNING},
    Outcome.PRUNING: {Outcome.PRUNING, Outcome.PRUNED},
    Outcome.PRUNED: {Outcome.PRUNED},
    Outcome.ABORT: {Outcome.ABORT},
}
LEASE_TTL_S = 60.0


class ViolationError(AssertionError):
    """An invariant does not hold."""

    was_raised = False  # in this world: if so, there is nothing left to settle

    def __init__(self, message: str) -> None:
        super().__init__(message)
        ViolationError.was_raised = True


# --- coroutines, cut at every await --------------------------------------------------------------------------


@types.coroutine
def pause() -> Iterator[None]:
    """A point at which any other process may act, and at which this process may be killed."""
    yield


async def in_turn(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    given = list(coroutines)
    try:
        return [await each for each in given]
    finally:
        for each in given:
            each.close()


class Task:
    """What `loop.create_task` returns: advanced by hand, one await at a time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine, self._is_cancelled, self._error = coroutine, False, None
        self._callbacks: list[Callable[[Any], None]] = []
        self.is_done = False

    def step(self) -> None:
        try:
            if self._is_cancelled:
                self._coroutine.throw(asyncio.CancelledError())
            else:
                self._coroutine.send(None)
            return
        except StopIteration:
            self._is_cancelled = False
        except asyncio.CancelledError:
            self._is_cancelled = True
        except Exception as error:
            self._error = error
        self.is_done = True
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def cancel(self) -> None:
        self._is_cancelled = True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def exception(self) -> BaseException | None:
        return self._error

    def kill(self) -> None:
        self._coroutine.close()


class Crash:
    """The future to which an engine passes an error that is a bug."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.error is not None

    def set_exception(self, error: BaseException) -> None:
        self.error = error


class Loop:
    def __init__(self, world: "World") -> None:
        self.world = world

    def time(self) -> float:
        return self.world.now

    def create_task(self, coroutine: Coroutine[Any, Any, Any], name: str = "") -> Task:
        self.world.fresh.append(Task(coroutine))
        return self.world.fresh[-1]

    def create_future(self) -> Crash:
        return Crash()


class LossyStore(PatientStore):
    """A store whose replies can be lost: before the effect, after it, or after it and then retried."""

    concurrency = 2  # small, so that shards go in series

    def __init__(self, world: "World") -> None:
        super().__init__(world.store, world.settings)
        self.world = world

    def answering_within(self, timeout_s: float) -> "LossyStore":
        return self

    def within(self, group: Any) -> "LossyStore":
        return self

    async def from_the_start(self, attempt: Callable[[PatientStore], Any]) -> Any:
        return await attempt(self)

    async def by_itself(self, operation: str, size_bytes: int, attempt: Callable[[Any], Any]) -> Any:
        return await self.control(operation, lambda: attempt(self.world.store))

    async def control(self, operation: str, attempt: Callable[[], Any]) -> Any:
        fault = self.world.take_fault(operation)
        if fault == "before":
            await pause()
            raise StoreError("connection reset", reason=FailureReason.TRANSIENT, operation=operation)
        try:
            result = await attempt()  # the store itself pauses once before its effect
            if fault == "retried":
                await pause()
                result = await attempt()
        except StoreError:
            await pause()
            raise
        await pause()
        if fault == "after":
            raise StoreError("no reply", reason=FailureReason.TIMEOUT, operation=operation)
        return result


# --- the disk ------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Inode:
    number: int
    content: bytes
    mtime_ns: int
    is_synced: bool = False

    @property
    def identity(self) -> FileIdentity:
        return FileIdentity(1, self.number, len(self.content), self.mtime_ns)


class DiskPath(PurePosixPath):
    """A path on the one disk that is currently in use."""

    disk: "Disk"

    def mkdir(self, **_: bool) -> None:
        pass

    def exists(self) -> bool:
        return str(self) in self.disk.entries

    def is_symlink(self) -> bool:
        return self.name.startswith("latest-") and self.disk.link_target is not None

    def unlink(self, **_: bool) -> None:
        if self.is_symlink():
            self.disk.link_target = None
        self.disk.entries.pop(str(self), None)

    def read_bytes(self) -> bytes:
        return self.disk.entries[str(self)].content


class Disk:
    """Files, links and folders. What was not fsynced may be gone after a power loss, and what was deleted may be
    back.

    It also serves the engine as its `Folder`.
    """

    _numbers = itertools.count(1)

    def __init__(self, world: "World", rank: int) -> None:
        self.world, self.rank = world, rank
        self.entries: dict[str, Inode] = {}
        self.durable: dict[str, dict[str, Inode | None]] = {}  # folder to its contents at its last fsync
        self.link_target: str | None = None
        self.path, self.private = DiskPath("/disk"), DiskPath("/disk") / keys.PRIVATE

    def children(self, folder: str) -> dict[str, Inode | None]:
        found: dict[str, Inode | None] = {}
        for path, inode in self.entries.items():
            if path.startswith(folder + "/"):
                name, slash, _ = path[len(folder) + 1 :].partition("/")
                found[name] = None if slash else inode
        return found

    def listdir(self, folder: DiskPath) -> list[str]:
        return list(self.children(str(folder)))

    def fsync(self, path: DiskPath) -> None:
        if (inode := self.entries.get(str(path))) is not None:
            inode.is_synced = True
            return
        children = self.children(str(path))
        if not children and str(path) not in self.durable:
            raise FileNotFoundError(path)
        self.durable[str(path)] = children

    def write_durably(self, path: DiskPath, data: bytes) -> None:
        self.entries[str(path)] = Inode(next(self._numbers), data, 0, is_synced=True)
        self.fsync(path.parent)

    def write(self, source: str, content: bytes) -> Inode:
        """Write a new file, as the trainer."""
        number = next(self._numbers)
        inode = self.entries[str(self.path / source)] = Inode(number, content, number)
        return inode

    def lose_power(self, is_lucky: bool) -> None:
        """Lose everything that was not fsynced (or, with luck, nothing)."""
        if is_lucky:
            return
        found: dict[str, Inode] = {}

        def visit(folder: str) -> None:
            for name, inode in self.durable.get(folder, {}).items():
                if inode is None:
                    visit(f"{folder}/{name}")
                else:
                    found[f"{folder}/{name}"] = inode

        visit(str(self.path))
        for inode in found.values():
            if not inode.is_synced:
                inode.content = b""  # the inode was written, but not its data
        self.entries = found

    # --- what the engine calls ---------------------------------------------------------------------------

    def open_source(self, source: str, spool: str | None, identity: FileIdentity) -> Inode:
        inode = self.entries.get(str(self.private / spool if spool else self.path / source))
        if inode is None:
            raise SourceError("gone", reason=FailureReason.SOURCE_MISSING)
        if inode.identity != identity:
            raise SourceError("changed", reason=FailureReason.SOURCE_CHANGED)
        return inode

    def settles_in_s(self, *_: object) -> float:
        return 0.0

    def check_same(self) -> None:
        pass

    def has(self, source: str, spool: str | None) -> bool:
        return str(self.private / spool if spool else self.path / source) in self.entries

    def is_same(self, source: str, identity: FileIdentity) -> bool:
        inode = self.entries.get(str(self.path / source))
        return inode is not None and inode.identity == identity

    def letting_go(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def unlink(self, spool: str) -> None:
        self.entries.pop(str(self.private / spool), None)

    def remove_spool(self, spool: str) -> None:
        top = str(self.private / spool)
        held = [path for path in self.entries if path == top or path.startswith(top + "/")]
        if held:
            self.world.on_release(self.rank, keys.parse_checkpoint_tag(top.rpartition("/")[2]), self)
        for path in held:
            del self.entries[path]

    def remove_source(self, source: str, identity: FileIdentity, *, keeps_folders: bool = False) -> bool:
        path = str(self.path / source)
        inode = self.entries.get(path)
        if inode is None:
            return True
        if inode.identity != identity:
            return False
        self.world.on_remove(self.rank, path, self)
        del self.entries[path]
        return True

    def point_symlink(self, link: DiskPath, target: DiskPath) -> None:
        self.link_target = str(target)


class Source:
    """An open shard."""

    def __init__(self, descriptor: Inode, identity: FileIdentity, path: str) -> None:
        self.inode, self.identity = descriptor, identity

    def close(self) -> None:
        pass


async def upload(store: Any, source: Source, key: str, **_: Any) -> tuple[int, Any]:
    """Upload a shard: read it, send it, and check that it is still the file that was opened."""
    await pause()
    data = source.inode.content
    checksum = checksum_of(data, store.capabilities.checksum_algorithm)
    await store.put(key, data)
    if source.inode.identity != source.identity:
        raise SourceError("changed", reason=FailureReason.SOURCE_CHANGED)
    return len(data), checksum


async def upload_many(store: Any, shards: Iterable[SmallShard]) -> list[Any]:
    """Upload shards one after the other, up to the first that the store rejects."""
    found: list[Any] = []
    with contextlib.suppress(StoreError):
        for each in shards:
            try:
                found.append((await upload(store, each.open(), each.key))[1])
            except SourceError:
                found.append(None)
    return found + [None] * (len(list(shards)) - len(found))


# --- the journal ---------------------------------------------------------------------------------------------


class Journal:
    """Rows, with every state since the last fsync: a power loss goes back to one of them."""

    def __init__(self, world: "World", rank: int) -> None:
        self.world, self.rank = world, rank
        self.states: list[tuple[JournalRow, ...]] = [()]

    def append(self, events: Iterable[Event], _notices: object = ()) -> None:
        events = list(events)
        for event in events:
            self.world.on_event(self.rank, event)
        first = len(self.states[-1]) + 1
        rows = (
            JournalRow(number, self.rank, self.world.now, event) for number, event in enumerate(events, first)
        )
        self.states.append((*self.states[-1], *rows))

    def follow(self, local: Local) -> Local:
        return fold(self.states[-1][local.sequence :], local)

    def sync(self) -> None:
        self.states = self.states[-1:]

    def lose_power(self, is_lucky: bool) -> None:
        self.states = self.states[-1:] if is_lucky else self.states[:1]

    def check_there(self) -> None:
        pass

    def compact(self) -> None:
        pass

    def note_progress(self, *_: Any) -> None:
        pass


# --- hosts ---------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Host:
    """One rank's machine. Its disk outlives the processes on it."""

    rank: int
    disk: Disk
    journal: Journal
    engine: Engine | None = None
    generation: int = 0  # of the trainer that runs here; 0: none
    next_step: int = 0


@dataclass(slots=True)
class Truth:
    """What a trainer handed over, recorded outside of everything under test."""

    shards: dict[str, bytes] = field(default_factory=dict)
    is_sealed: bool = False
    is_promised: bool = True  # no fault has happened to it that it need not survive
    is_acknowledged: bool = False  # made durable, with its seal: it survives power loss
    expected: tuple[str, ...] = ()  # shards that any rank may hold


class World:
    """Everything there is, and the invariants that must hold for it."""

    def __init__(
        self,
        *,
        num_checkpoints_to_keep: int = -1,
        keep_remote: int = 1,
        collect_at_least: int = 10**6,
        publishes: bool = False,
    ) -> None:
        ViolationError.was_raised = False
        self.now = 1000.0
        self.settings = Settings(num_checkpoints_to_keep=num_checkpoints_to_keep)
        self.keep_remote, self._collect_at_least = keep_remote, collect_at_least
        self.policy: RetentionPolicy = KeepLast(keep_remote)
        self.publishes = publishes
        self.bucket = MemoryBucket(clock=lambda: self.now)
        self.store = MemoryStore(self.bucket)
        self.hosts: list[Host] = []
        self.world_sizes: dict[int, int] = {}
        self.truths: dict[tuple[CheckpointId, int], Truth] = {}
        self.fault = ""
        self.fresh: list[Task] = []  # an event loop starts these in turn before anything else happens
        self.others: list[Task] = []  # sweepers and readers
        self._readers = itertools.count()
        self._seen: dict[str, Any] = {}
        self._contents: dict[str, bytes] = {}
        self._decisions: dict[CheckpointId, Decision] = {}
        self.committed: set[CheckpointId] = set()
        self.given_up: set[CheckpointId] = set()
        self.lost: set[CheckpointId] = (
            set()
        )  # the store has lost something of these, before they were decided
        self._latest: Latest | None = None
        self._boundary = Boundary()
        self._patches = contextlib.ExitStack()
        self._patch()

    def _patch(self) -> None:
        """Put the world in place of the operating system."""
        patch = self._patches.enter_context
        loop = Loop(self)

        async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
            await pause()
            result = function(*arguments)
            await pause()
            return result

        fake = types.SimpleNamespace(
            **{name: getattr(asyncio, name) for name in dir(asyncio) if not name.startswith("_")}
        )
        fake.get_running_loop = lambda: loop
        patch(mock.patch.object(state, "asyncio", fake))
        patch(mock.patch.object(on_disk, "in_thread", in_thread))
        patch(mock.patch.object(on_disk, "fsync_path", lambda path: DiskPath.disk.fsync(DiskPath(path))))
        for module in (recovery, kept):
            patch(mock.patch.object(module, "os", types.SimpleNamespace(listdir=self._listdir)))
        for module in (on_disk, kept):
            patch(
                mock.patch.object(
                    module, "write_durably", lambda path, data: path.disk.write_durably(path, data)
                )
            )
        patch(
            mock.patch.object(
                on_disk, "point_symlink", lambda link, target, private: link.disk.point_symlink(link, target)
            )
        )
        patch(mock.patch.object(kept, "of_other_kinds", return_value=set()))
        moved = types.SimpleNamespace(
            upload=upload,
            upload_many=upload_many,
            SmallShard=SmallShard,
        )
        patch(mock.patch.object(uploading, "transfer", moved))
        patch(mock.patch.object(uploading, "Source", Source))
        for module in (
            steps,
            deciding,
            discovery,
            generations,
            committing,
            remote_sweep,
        ):
            patch(mock.patch.object(module, "all_or_none", in_turn))
        for module in (deciding, discovery):
            patch(mock.patch.object(module, "both", lambda *both: in_turn(both)))
        again = contextlib.nullcontext(self._session())
        patch(mock.patch.object(discovery, "session", return_value=again))
        patch(mock.patch.object(sweep_plan, "COLLECT_AT_LEAST", self._collect_at_least))
        # In this world decisions are collected at once, not after a day.
        patch(mock.patch.object(committing, "COLLECTED_AFTER_S", 0.0))
        logger = logging.getLogger("ckpt_async")
        self._patches.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL + 1)

    def _listdir(self, folder: DiskPath) -> list[str]:
        return folder.disk.listdir(folder)

    def close(self) -> None:
        for host in self.hosts:
            self._stop(host)
        for task in self.others:
            task.kill()
        self._patches.close()

    # --- trainers ----------------------------------------------------------------------------------------

    def start(self, hosts: list[Host], *, first_step: int = 1) -> int:
        """Start a new generation on these hosts, given in rank order."""
        generation = max(self.world_sizes, default=0) + 1
        self.world_sizes[generation] = len(hosts)
        record = Generation(generation, "launch", len(hosts), "host", f"nonce-{generation}", self.now)
        self._put(keys.generation_key(generation), records.encode_generation(record))
        for host in hosts:
            self.stop(host)
            host.generation, host.next_step = generation, first_step
            host.journal.append([Opened(generation, len(hosts), RemoteAddress("file:///run"))])
            self.start_engine(host, is_trainer=True)
        return generation

    def _put(self, key: str, data: bytes) -> None:
        task = Task(self.store.put(key, BytesBody(data), checksum_of(data, "crc64nvme")))
        while not task.is_done:
            task.step()

    def new_hosts(self, num_ranks: int, *, first_rank: int = 0) -> list[Host]:
        ranks = range(first_rank, first_rank + num_ranks)
        hosts = [Host(rank, Disk(self, rank), Journal(self, rank)) for rank in ranks]
        self.hosts += hosts
        return hosts

    def start_engine(self, host: Host, *, is_trainer: bool = False) -> None:
        """Do what `Uploader` or a drain does: recover, then be ready to run."""
        DiskPath.disk = host.disk
        known = State(
            rank=host.rank,
            folder=host.disk,  # type: ignore[arg-type]
            journal=host.journal,  # type: ignore[arg-type]
            store=LossyStore(self),
            settings=self.settings,
            observer=Observer(),
            clock=lambda: self.now,
            is_trainer=is_trainer,
        )
        host.engine = Engine(known)
        recovery.rebuild(known)
        host.engine._begin()

    def save(
        self,
        host: Host,
        *,
        num_shards: int,
        is_sealed: bool,
        name: str | None = None,
        expects_all: bool = False,
    ) -> None:
        """Call `enqueue` and `seal` for the trainer's next step."""
        id_ = CheckpointId(host.generation, host.next_step)
        truth = self.truths.setdefault((id_, host.rank), Truth())
        full_name = checkpoint_name(name, id_.step)
        events: list[Event] = []
        for number in range(len(truth.shards), len(truth.shards) + num_shards):
            shard = f"r{host.rank}-{number}"
            content = f"{id_} {shard}".encode()
            source = f"{full_name}/{shard}"
            inode = host.disk.write(source, content)
            spool = f"{keys.spool_checkpoint(id_, host.rank)}/{shard}"
            host.disk.entries[str(host.disk.private / spool)] = inode
            truth.shards[shard] = content
            exact_key = self._exact_key(id_, host.rank, number) if self.publishes else ""
            events.append(Enqueued(id_, full_name, Shard(shard, source, inode.identity, True, exact_key)))
        if events:
            host.journal.append(events)
        if is_sealed:
            world_size = self.world_sizes[host.generation]
            expected = tuple(f"r{rank}-0" for rank in range(world_size)) if expects_all else ()
            host.journal.append([Sealed(id_, full_name, world_size, expected=expected)])
            truth.is_sealed, truth.expected = True, expected
            host.next_step += 1

    def _exact_key(self, id_: CheckpointId, rank: int, number: int) -> str:
        """Return a key of its own for the first shard, and one that all checkpoints share for the second."""
        return f"exact/{keys.checkpoint_tag(id_)}/r{rank}" if number == 0 else f"exact/shared-r{rank}"

    def tamper(self, host: Host, how: str) -> None:
        """Do to the oldest undecided file in the spool what a trainer must not do."""
        for path, inode in list(host.disk.entries.items()):
            tag = path.split("/")[-2] if f"/{keys.spool_rank(host.rank)}/" in path else ""
            id_ = keys.parse_checkpoint_tag(tag)
            if id_ is None or id_ in self.committed:
                continue
            self.truths[id_, host.rank].is_promised = False
            if how == "overwrite":
                inode.content, inode.mtime_ns = b"overwritten", inode.mtime_ns + 1
            else:
                del host.disk.entries[path]
            return

    def lose_upload(self) -> None:
        """Delete something that the store had confirmed of the newest undecided checkpoint, as somebody may. Not while
        anybody commits: what is lost between the comparison and the decision is not noticed.
        """
        running = (action for host in self.hosts if host.engine for action in host.engine._in_flight.running)
        if self.others or any(isinstance(each, decide.Commit) for each in running):
            return
        decided = self.committed | self.given_up
        for key in sorted(self.bucket.objects, reverse=True):
            parsed = keys.parse_receipt_key(key) or keys.parse_data_key(key)
            if parsed and parsed[0] not in decided and not self._boundary.voids(parsed[0]):
                self.lost.add(parsed[0])
                del self.bucket.objects[key], self._seen[key]
                return

    def rotate(self, host: Host) -> None:
        """Delete the trainer's own files: the links must be enough."""
        for path in list(host.disk.entries):
            if not path.startswith(str(host.disk.private)):
                del host.disk.entries[path]

    # --- processes come and go ---------------------------------------------------------------------------

    def _stop(self, host: Host) -> None:
        if host.engine is not None:
            for task in host.engine._in_flight.running.values():
                task.kill()  # type: ignore[attr-defined]
        host.engine = None

    def stop(self, host: Host) -> None:
        """Send SIGKILL."""
        self._stop(host)
        host.generation = 0

    def lose_power(self, host: Host, *, is_lucky: bool) -> None:
        self.stop(host)
        host.disk.lose_power(is_lucky)
        host.journal.lose_power(is_lucky)
        self._break_promises(host, is_lucky)

    def lose_journal(self, host: Host) -> None:
        """Delete the journal. What had been made durable is in the manifests too (R10)."""
        self.stop(host)
        host.journal = Journal(self, host.rank)
        self._break_promises(host, False)

    def _break_promises(self, host: Host, is_lucky: bool) -> None:
        if is_lucky:
            return
        for (_, rank), truth in self.truths.items():
            if rank == host.rank and not truth.is_acknowledged:
                truth.is_promised = False

    # --- the scheduler -----------------------------------------------------------------------------------

    def take_fault(self, operation: str) -> str:
        if operation != "put":
            return ""
        fault, self.fault = self.fault, ""
        return fault

    def run(self, host: Host, num_steps: int, choice: int = 0) -> int:
        """Let a host's engine work for some awaits; return how many it could use."""
        made = host.engine
        if made is None:
            return 0
        DiskPath.disk = host.disk
        chance = random.Random(choice) if choice else None  # 0: the oldest first
        for done in range(num_steps):
            made.state.refresh()
            made._start_due()
            while self.fresh:
                self.fresh.pop(0).step()
            running = list(made._in_flight.running.values())
            if not running:
                self.check(host)
                return done
            running[chance.randrange(len(running)) if chance else 0].step()  # type: ignore[attr-defined]
            if made._crash.done():
                error = made._crash.error  # type: ignore[attr-defined]
                if isinstance(error, ViolationError):
                    raise error
                raise ViolationError(f"R12: the engine died of {error!r}")
            self.check(host)
        return num_steps

    def run_other(self, task: Task, num_steps: int) -> None:
        for _ in range(num_steps):
            if task.is_done:
                break
            task.step()
            self.check()
        if task.is_done:
            self.others.remove(task)
            if (error := task.exception()) is not None and not isinstance(error, StoreError):
                raise error

    def start_sweep(self, *, age_s: float) -> Task:
        ages = sweep_plan.Ages(age_s, age_s, age_s)
        sweep = remote_sweep.RemoteSweep(
            LossyStore(self),
            self.policy,
            ages,
            lambda: self.now,
        )
        task = Task(sweep.run(is_dry_run=False))
        self.others.append(task)
        return task

    def start_reader(self) -> Task:
        task = Task(self._read())
        self.others.append(task)
        return task

    def start_finder(self) -> Task:
        task = Task(self._find())
        self.others.append(task)
        return task

    async def _find(self) -> None:
        """Search as `restore.find` does: what was the newest when it began is the oldest that it may find, and where it
        finds nothing, `latest` names nothing either.
        """
        newest = max(self._alive(), default=None)
        found, rejected, latest = await discovery._search(self._session(), {}, (), None, None)
        step = found and found[0].checkpoint
        if rejected or (newest is not None and (step is None or step < newest)):
            raise ViolationError(f"R3: found {step}, rejected {rejected}, but {newest} was there before")
        if step is None and latest is not None:
            raise ViolationError(f"R3: nothing was found, but latest names {latest.checkpoint}")

    def _session(self) -> Session:
        store = LossyStore(self)
        return Session("", None, store, store, Pace())

    def _alive(self) -> set[CheckpointId]:
        return {id_ for id_, each in self._decisions.items() if each.outcome is Outcome.COMMIT}

    async def _read(self) -> None:
        store = LossyStore(self)
        latest = await steps.read_latest(store)
        if latest is None:
            return
        began, lease = self.now, Lease(latest.checkpoint, f"reader-{next(self._readers)}", LEASE_TTL_S)
        found = await steps.read_settled(store, lease.checkpoint, only_reads=True)
        if found is None or found.outcome is not Outcome.COMMIT:
            return
        vanished = await self._vanished(store, found, ranks=[0])  # while it holds the lease, as readers do
        decision = await steps.take_lease(store, lease)
        if decision is None:
            return
        vanished = vanished or await self._vanished(store, decision, ranks=range(decision.world_size))
        if vanished is not None and self.now - began < LEASE_TTL_S * 2 / 3:
            raise ViolationError(f"R3: vanished while it was read: {vanished}")
        if vanished is None:
            await steps.drop_lease(store, lease)

    async def _vanished(
        self, store: Any, decision: Decision, ranks: Iterable[int]
    ) -> InvalidRecordError | None:
        """Return the parts of a committed checkpoint that are missing."""
        for rank in ranks:
            try:
                receipt = await steps.bound_receipt(store, decision, rank)
                for shard in receipt.shards:
                    there = await cas.read(store, shard.key)
                    if there is None or checksum_of(there[0], "crc64nvme") != shard.checksum:
                        raise InvalidRecordError(f"{shard.key} is gone")
            except InvalidRecordError as error:
                return error
        return None

    # --- what must hold ----------------------------------------------------------------------------------

    def _is_collected(self, event: Decided) -> bool:
        """Return whether a collected checkpoint may be taken for given up. Once its decision is collected, no one can
        know that it was committed, and taking it for given up keeps the user's files.
        """
        return event.outcome is self._boundary.outcome_of(event.checkpoint)

    def on_event(self, rank: int, event: Event) -> None:
        if isinstance(event, MadeDurable) and event.is_sealed:
            truth = self.truths[event.checkpoint, rank]
            truth.is_acknowledged = truth.is_acknowledged or truth.is_promised
        if isinstance(event, Decided):
            self.check()
            known = self.committed if event.outcome is not Outcome.ABORT else self.given_up
            if event.checkpoint not in known and not self._is_collected(event):
                raise ViolationError(f"R13: rank {rank} believes {event}, the store says otherwise")

    def on_release(self, rank: int, id_: CheckpointId | None, disk: Disk) -> None:
        self.check()
        truth = self.truths.get((id_, rank)) if id_ else None
        if (
            truth
            and truth.is_acknowledged
            and truth.is_promised
            and id_ not in self.committed | self.given_up
        ):
            raise ViolationError(f"I3: spool links of rank {rank}, {id_} dropped before a decision")
        decision = self._decisions.get(id_) if id_ else None
        if decision and decision.is_lost_by_store and id_ and not any(each > id_ for each in self.committed):
            raise ViolationError(f"I3: spool links of rank {rank}, {id_} dropped, which the store has lost")

    def on_remove(self, rank: int, path: str, disk: Disk) -> None:
        self.check()
        content = disk.entries[path].content
        owner = next(
            (
                id_
                for (id_, at), each in self.truths.items()
                if at == rank and content in each.shards.values()
            ),
            None,
        )
        if owner not in self.committed:
            raise ViolationError(f"I3: {path} of rank {rank} removed, but {owner} is not committed")
        newer = {
            id_ for id_ in self.committed if owner is not None and id_ > owner and (id_, rank) in self.truths
        }
        keep = self.settings.num_checkpoints_to_keep
        if keep < 0 or len(newer) < keep:
            raise ViolationError(f"I5: {path} of rank {rank} removed, only {newer} are newer; keep {keep}")

    def check(self, host: Host | None = None) -> None:
        """Compare the bucket with its previous state. This is cheap if nothing changed."""
        objects = self.bucket.objects
        if host is not None:
            self._check_link(host)
        if objects == self._seen:
            return
        before, self._seen = self._seen, dict(objects)
        if boundary := objects.get(keys.BOUNDARY):
            self._boundary = records.decode_boundary(boundary.data)
            # The boundary gives up whatever was not decided: its node was away for longer than any age limit.
            voided = {id_ for id_, _ in self.truths if self._boundary.voids(id_)}
            self.given_up |= voided - self.committed
        gone = [key for key in before if key not in objects]
        new = [key for key, each in objects.items() if before.get(key) is not each]
        for key in new:
            self._check_written(key, objects[key].data)
        for key in gone:
            self._check_deleted(key)
        self._check_latest()
        there = sum(each.outcome is Outcome.COMMIT for each in self._decisions.values())
        if there < min(self.keep_remote, len(self.committed)):
            raise ViolationError(f"I5: {there} committed checkpoints are left, keep {self.keep_remote}")

    def _check_written(self, key: str, data: bytes) -> None:
        if self._contents.setdefault(key, data) != data and key.startswith((keys.DATA, keys.RECEIPTS)):
            parsed = keys.parse_receipt_key(key) or keys.parse_data_key(key)
            owner = parsed[0] if parsed else None
            was_tampered = any(
                id_ == owner and not each.is_promised for (id_, _), each in self.truths.items()
            )
            if owner in self.committed or not was_tampered:
                raise ViolationError(f"I6: {key} changed its content")
        if key.startswith("exact/") and not self._is_of(self.committed, data):
            raise ViolationError(f"R1: {key} has {data!r}, which was not committed")
        id_ = keys.parse_decision_key(key)
        if id_ is None:
            return
        decision = records.decode_decision(data, id_) if b'"abort"' in data else self._commit(id_, data)
        if self._boundary.voids(id_):
            return
        known = self._decisions.get(id_)
        if decision.outcome not in NEXT[known.outcome if known else None]:
            raise ViolationError(f"R4: {id_} went from {known and known.outcome} to {decision.outcome}")
        if known is None and (id_ in self.committed or id_ in self.given_up):
            raise ViolationError(f"R4: {id_} was decided, collected, and is decided again")
        self._decisions[id_] = decision
        if decision.outcome is Outcome.ABORT:
            if known is None:
                self._check_abort(id_, decision)
            self.given_up.add(id_)
            return
        if known is None:
            self._check_commit(id_, decision)
        self.committed.add(id_)

    def _commit(self, id_: CheckpointId, data: bytes) -> Decision:
        try:
            return records.decode_decision(data, id_)
        except InvalidRecordError as error:
            raise ViolationError(f"I1: {id_} committed by {error}") from None

    def _check_abort(self, id_: CheckpointId, decision: Decision) -> None:
        """I4: no rank gives up what it has promised, unless the store has lost it."""
        if decision.is_lost_by_store and id_ not in self.lost:
            raise ViolationError(f"I4: {id_} was given up, but the store has it: {decision.reason}")
        if decision.is_lost_by_store or not decision.decided_by.startswith("rank "):
            return
        rank = int(decision.decided_by.split()[1])
        truth = self.truths[id_, rank]
        is_all_there = self._lacks(id_) is None
        if truth.is_sealed and truth.is_promised and self._has_shards(id_) and is_all_there:
            raise ViolationError(f"I4: rank {rank} gave up {id_}, which it had promised: {decision.reason}")

    def _has_shards(self, id_: CheckpointId) -> bool:
        return any(truth.shards for (each, _), truth in self.truths.items() if each == id_)

    def _check_commit(self, id_: CheckpointId, decision: Decision) -> None:
        """I1 and R5: every rank of that generation, every shard, every byte, and at least one shard."""
        if not self._has_shards(id_):
            raise ViolationError(f"I1: {id_} committed without any shard")
        world_size = self.world_sizes[id_.generation]
        if decision.world_size != world_size:
            raise ViolationError(
                f"R5: {id_} committed for world size {decision.world_size}, not {world_size}"
            )
        for rank in range(world_size):
            there = self.bucket.objects.get(keys.receipt_key(id_, rank))
            truth = self.truths.get((id_, rank))
            if there is None or truth is None or not truth.is_sealed:
                raise ViolationError(f"I1: {id_} committed without rank {rank}")
            try:
                receipt = records.decode_receipt(there.data, id_, rank)
            except InvalidRecordError as error:
                raise ViolationError(f"R5: {id_} committed with another receipt: {error}") from None
            stored = {each.name: self.bucket.objects.get(each.key) for each in receipt.shards}
            if {name: each and each.data for name, each in stored.items()} != truth.shards:
                raise ViolationError(f"I1: {id_} committed, rank {rank} has {stored}, not {truth.shards}")
        if (lacking := self._lacks(id_)) is not None:
            raise ViolationError(f"I1: {id_} committed without {lacking}, which is expected")

    def _lacks(self, id_: CheckpointId) -> str | None:
        """Return a shard that some rank expects and none has."""
        truths = [truth for (each, _), truth in self.truths.items() if each == id_]
        there = {name for truth in truths for name in truth.shards}
        return next((name for truth in truths for name in truth.expected if name not in there), None)

    def _check_deleted(self, key: str) -> None:
        decision = keys.parse_decision_key(key)
        if decision is not None:
            known = self._decisions.pop(decision, None)
            if known is not None and not self._boundary.voids(decision):
                raise ViolationError(f"R4: the decision of {decision} was deleted above the boundary")
            return
        receipt, data = keys.parse_receipt_key(key), keys.parse_data_key(key)
        id_ = receipt[0] if receipt else data[0] if data else None
        if id_ is None:
            return
        known = self._decisions.get(id_)
        if known is None and not self._boundary.voids(id_):
            raise ViolationError(f"R4: {key} was deleted without a decision")
        if known is not None and known.outcome is Outcome.COMMIT:
            raise ViolationError(f"I1: {key} of a committed checkpoint was deleted")

    def _check_latest(self) -> None:
        there = self.bucket.objects.get(keys.LATEST)
        if there is None:
            return
        latest = records.decode_latest(there.data)
        if self._latest is not None and latest.checkpoint < self._latest.checkpoint:
            raise ViolationError(f"I2: latest moved back from {self._latest} to {latest}")
        decision = self._decisions.get(latest.checkpoint)
        if decision is None or decision.outcome is not Outcome.COMMIT:
            raise ViolationError(
                f"I2: latest names {latest.checkpoint}, which is {decision and decision.outcome}"
            )
        self._latest = latest

    def _check_link(self, host: Host) -> None:
        """The local symlink must point to existing files."""
        target = host.disk.link_target
        if target is None or any(path.startswith(f"{target}/") for path in host.disk.entries):
            return
        raise ViolationError(f"R2: rank {host.rank}'s local latest leads to {target}, which is gone")

    # --- the end -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """End all faults, finish the work of dead processes, let time pass: then everything that can be committed
        must be.
        """
        self.fault = ""
        for task in list(self.others):
            self.run_other(task, 10_000)
        for host in self.hosts:
            if host.engine is None:
                self.start_engine(host)
        for _ in range(12):
            for host in self.hosts:
                self.run(host, 5_000)
            self.now += 61.0
        for id_ in {id_ for id_, _ in self.truths}:
            truths = [self.truths.get((id_, rank)) for rank in range(self.world_sizes[id_.generation])]
            is_whole = all(each and each.is_sealed and each.is_promised for each in truths)
            if is_whole and id_ not in self.committed | self.given_up:
                raise ViolationError(f"I8: all ranks sealed {id_}, but it is not committed")
            if not all(each and each.is_sealed for each in truths) and id_ in self.committed:
                raise ViolationError(f"I1: {id_} is committed without all ranks")
        for host in self.hosts:
            for id_, known in (host.engine.local.checkpoints if host.engine else {}).items():
                if known.decision is None and known.sealed and id_ in self.committed | self.given_up:
                    raise ViolationError(f"I8: rank {host.rank} never learned what became of {id_}")
        for _ in range(2):
            self.run_other(self.start_sweep(age_s=0.0), 10_000)
            self.now += 200.0
        self._check_clean()

    def _is_of(self, checkpoints: Collection[CheckpointId], data: bytes) -> bool:
        return any(
            data in truth.shards.values() for (id_, _), truth in self.truths.items() if id_ in checkpoints
        )

    def _check_copies(self, alive: set[CheckpointId]) -> None:
        """Committed checkpoints must be under their exact keys, and nothing else may be."""
        there = {key: each.data for key, each in self.bucket.objects.items() if key.startswith("exact/")}
        for key, data in there.items():
            if not self._is_of(alive, data):
                raise ViolationError(f"R2: {key} has {data!r}, of what was pruned")
        for key, each in self.bucket.objects.items():
            if key.startswith(keys.CLAIMS):
                claim = records.decode_claim(each.data, json.loads(each.data)["key"])
                if claim.checkpoint not in alive:
                    raise ViolationError(f"R2: the claim of {claim.checkpoint} on {claim.key} is left")
        newest: dict[str, bytes] = {}
        for (id_, rank), truth in sorted(self.truths.items(), key=lambda each: each[0]):
            if id_ not in self.committed or not truth.is_promised:
                continue
            for number, data in enumerate(truth.shards.values()):
                if number < 2:
                    newest[self._exact_key(id_, rank, number)] = data
        for key, data in newest.items():
            if self._is_of(alive, data) and there.get(key) != data:
                raise ViolationError(f"I8: {key} has {there.get(key)!r}, not {data!r}")

    def _check_clean(self) -> None:
        """I7: everything left belongs to a committed checkpoint, and latest names the newest of them."""
        alive = self._alive()
        for key in self.bucket.objects:
            parsed = keys.parse_receipt_key(key) or keys.parse_data_key(key)
            if parsed and parsed[0] not in alive:
                raise ViolationError(f"I7: {key} is left, and nothing refers to it")
        if self.publishes:
            self._check_copies(alive)
        if alive and (self._latest is None or self._latest.checkpoint != max(alive)):
            raise ViolationError(f"R6: latest is {self._latest}, the newest commit is {max(alive)}")
