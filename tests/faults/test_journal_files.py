"""Many processes on the journals of one folder; what is on the disk when."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import (
    CheckpointId,
    FileIdentity,
    MadeDurable,
    MultipartOpened,
    Opened,
    Released,
    RemoteAddress,
    Sealed,
)
from ckpt_async.errors import SourceError
from ckpt_async.local import journals, log
from ckpt_async.local.durable import point_symlink, write_durably
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.monitor.status import load
from ckpt_async.sweep import drain as drains
from ckpt_async.sweep.sweeper import Sweeper
from tests.faults.processes import SOAK

pytestmark = pytest.mark.fault("F4b")

# --- many processes on one folder --------------------------------------------------------------------------


class Actor:
    """A process that carries out commands one after the other, and reports when each is done."""

    def __init__(self, folder: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            try:
                _act(theirs, folder)
            except BaseException as error:
                theirs.send(json.dumps(["died", repr(error)]).encode())
            finally:
                os._exit(0)
        theirs.close()
        self._socket.settimeout(60)

    def tell(self, *command: Any) -> None:
        self._socket.send(json.dumps(command).encode())

    def answer(self) -> None:
        data = self._socket.recv(1 << 16)
        assert json.loads(data or '["gone"]')[0] == "done", data

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._socket.close()


def _act(told: socket.socket, path: Path) -> None:
    journal: Any = None
    drains.LOCK_WAIT_S, drains.WANTED_POLL_S = 0.0, 0.01  # waiting for a second would test nothing here
    log.COMPACT_BYTES = 0
    while data := told.recv(1 << 16):
        name, *arguments = json.loads(data)
        match name:
            case "open":
                journal = Journal(Folder(path), arguments[0], may_replace=False)
            case "append":
                id_ = CheckpointId(1, 1)
                journal.append([MultipartOpened(id_, "shard", each, 5) for each in arguments])
            case "status":
                load(path)
            case "drain":
                asyncio.run(drains.drain(path, timeout_s=5, grace_s=0.0))
            case "sweep":
                asyncio.run(Sweeper([str(path)], []).sweep())
            case _:
                getattr(journal, name)()
        told.send(json.dumps(["done", name]).encode())


class Crowd:
    """The ranks of a node, each with a trainer and at times a runner that shares its lock, while other processes look,
    drain and sweep. Everything acknowledged must stay.
    """

    def __init__(self, root: Path, chance: random.Random, num_ranks: int) -> None:
        self.folder, self.chance = Folder(root / "folder"), chance
        self.acknowledged: dict[int, set[str]] = {rank: set() for rank in range(num_ranks)}
        self.actors: dict[int, list[Actor]] = {rank: [] for rank in range(num_ranks)}
        # Held on behalf of the actors.
        self.locks = {rank: RankLock(self.folder, rank) for rank in range(num_ranks)}
        self.others = [Actor(self.folder.path) for _ in range(2)]
        self.num_done = 0
        remote = RemoteAddress(f"file://{root}/remote")
        for rank in range(num_ranks):
            with contextlib.closing(Journal(self.folder, rank)) as journal:
                # One rank never comes, so everything stays undecided.
                journal.append([Opened(1, num_ranks + 1, remote)])
                journal.append([Sealed(CheckpointId(1, 1), "step-1", num_ranks + 1)])

    def play(self, num_commands: int) -> None:
        while self.num_done < num_commands:
            self._join()
            told = [self._tell(rank, actor) for rank, actors in self.actors.items() for actor in actors]
            for other in self.others:
                other.tell(self.chance.choices(["status", "drain", "sweep"], [20, 2, 1])[0])
            for rank, actor, name, numbers in told:
                if self.chance.random() < 0.05:
                    actor.kill()
                    self._leave(rank, actor)
                    continue
                actor.answer()
                self.acknowledged[rank].update(numbers)
                if name == "close":
                    actor.kill()
                    self._leave(rank, actor)
            for other in self.others:
                other.answer()
            self.num_done += len(told) + len(self.others)
        self.check()

    def _join(self) -> None:
        for rank, actors in self.actors.items():
            if len(actors) < 2 and self.chance.random() < (0.2 if actors else 0.7):
                if not actors:
                    self.locks[rank].acquire(wait_s=30, is_trainer=True)
                actor = Actor(self.folder.path)
                actors.append(actor)
                actor.tell("open", rank)
                actor.answer()

    def _leave(self, rank: int, actor: Actor) -> None:
        self.actors[rank].remove(actor)
        if not self.actors[rank]:
            self.locks[rank].release()  # now others may adopt the rank

    def _tell(self, rank: int, actor: Actor) -> tuple[int, Actor, str, list[str]]:
        name = self.chance.choices(["append", "sync", "compact", "close"], [8, 2, 1, 1])[0]
        numbers: list[str] = []
        if name == "append":
            numbers = [f"{rank}:{self.chance.getrandbits(60)}" for _ in range(self.chance.choice([1, 3]))]
        actor.tell(name, *numbers)
        return rank, actor, name, numbers

    def check(self) -> None:
        """Check while some processes still have the journals open, or after all were killed."""
        for _ in range(2):
            found = journals.read(self.folder.path)
            for rank, wanted in self.acknowledged.items():
                events = [row.event for row in found[rank].rows]
                there = [each.upload_id for each in events if isinstance(each, MultipartOpened)]
                assert wanted <= set(there), f"rank {rank} lost {wanted - set(there)}"
                assert len(there) == len(set(there))
                assert {each.partition(":")[0] for each in there} <= {str(rank)}
                assert any(isinstance(each, Sealed) for each in events)
            self.end()

    def end(self) -> None:
        for rank, actors in self.actors.items():
            for actor in list(actors):
                actor.kill()
                self._leave(rank, actor)
        for other in self.others:
            other.kill()
        self.others.clear()


@pytest.mark.parametrize(
    ("num_ranks", "num_commands"), [(2, 250), (4, 250), (8, 250), pytest.param(6, 60_000, marks=SOAK)]
)
def test_processes_on_one_folder_lose_nothing(
    tmp_path: Path, seed: int, num_ranks: int, num_commands: int
) -> None:
    """Appends, syncs, closes and kills come in any order, beside `status`, `drain` and sweeps. No acknowledged row may
    be lost or go to another rank.
    """
    crowd = Crowd(tmp_path, random.Random(seed), num_ranks)
    try:
        crowd.play(num_commands)
        assert not list(crowd.folder.private.glob("*.damaged-*"))
    finally:
        crowd.end()


# --- what is on the disk when -----------------------------------------------------------------------------------


class Disk:
    """Records what was fsynced, in order, as (path, what a folder contained at that time)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[tuple[str, frozenset[str]]] = []
        original = os.fsync

        def noting(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            original(descriptor)
            self.synced.append((path, frozenset(os.listdir(path) if os.path.isdir(path) else ())))

        monkeypatch.setattr(os, "fsync", noting)

    def first(self, path: Path | str, *, holding: str = "") -> int:
        """Return when this path, or a folder with this entry in it, first became durable."""
        return next(
            number
            for number, (each, entries) in enumerate(self.synced)
            if re.fullmatch(str(path), each) and (not holding or holding in entries)
        )


@pytest.mark.fault("F3")
def test_durable_data_is_fsynced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record must become durable after what it refers to: the shard and its folders, then the manifest that names
    it and the manifest's entry, then the journal, and only then the row that says so.
    """
    disk, append = Disk(monkeypatch), Journal.append
    durable_at: list[int] = []

    def noting(self: Journal, events: Any) -> None:
        events = list(events)
        if any(isinstance(each, MadeDurable) and each.is_sealed for each in events):
            durable_at.append(len(disk.synced))
        append(self, events)

    monkeypatch.setattr(Journal, "append", noting)
    folder = tmp_path / "folder"
    with Uploader(folder, f"file://{tmp_path}/remote", rank=0, world_size=1) as uploader:
        (folder / "step-1").mkdir()
        (folder / "step-1/a.pt").write_bytes(b"shard")
        uploader.enqueue(folder / "step-1/a.pt", 1)
        uploader.seal(1)
        uploader.wait(1, 30)
    private, tag = folder / keys.PRIVATE, keys.checkpoint_tag(CheckpointId(1, 1))
    spool = private / keys.spool_rank(0)
    before = [
        disk.first(f"{spool}/{tag}/a.pt"),
        disk.first(spool / tag, holding="a.pt"),
        disk.first(folder / "step-1", holding="a.pt"),
        disk.first(folder, holding="step-1"),
        disk.first(spool, holding=tag),
    ]
    manifest = disk.first(rf"{spool}/\.{tag}\.json\..*\.tmp")
    entry = disk.first(spool, holding=f"{tag}.json")
    journal = max(
        number
        for number, (each, _) in enumerate(disk.synced[: durable_at[0]])
        if each.endswith(keys.journal_name(0))
    )
    assert max(before) < manifest < entry < journal < durable_at[0]


def test_a_journal_sync_fsyncs_it_and_once_its_directory_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each file: after another process has compacted it, the entry is a new one."""
    folder, disk, name = Folder(tmp_path), Disk(monkeypatch), keys.journal_name(0)
    with (
        contextlib.closing(Journal(folder, 0)) as journal,
        contextlib.closing(Journal(folder, 0, may_replace=False)) as other,
    ):
        for _ in range(2):
            journal.sync()
        assert [Path(path).name for path, _ in disk.synced] == [name, keys.PRIVATE, name]
        assert name in disk.synced[1][1]
        monkeypatch.setattr(log, "COMPACT_BYTES", 0)
        other.append([Released(CheckpointId(1, 1))] * 9)
        other.compact()
        written = disk.synced[3:]
        assert [Path(path).suffix for path, _ in written] == [".new", ""]
        assert Path(written[1][0]).name == keys.PRIVATE
        journal.sync()
    assert [Path(path).name for path, _ in disk.synced[5:]] == [name, keys.PRIVATE]


def test_replacing_a_file_or_symlink_fsyncs_its_directory_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    disk = Disk(monkeypatch)
    write_durably(private / "record", b"data")
    assert disk.first(rf"{private}/\.record\..*\.tmp") < disk.first(private, holding="record")
    point_symlink(tmp_path / "latest", tmp_path / "step-1", private)
    disk.first(tmp_path, holding="latest")


def test_a_fifo_in_place_of_a_shard_does_not_hang(tmp_path: Path) -> None:
    """Without hard links the trainer's own path is opened again, and opening a FIFO for reading waits for a writer."""
    folder = Folder(tmp_path)
    os.mkfifo(tmp_path / "a.pt")
    facts = os.stat(tmp_path / "a.pt")
    identity = FileIdentity(facts.st_dev, facts.st_ino + 1, 5, 1)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(folder.open_source, "a.pt", None, identity)
        try:
            with pytest.raises(SourceError, match="changed"):
                opening.result(timeout=10)
        finally:
            if not opening.done():
                # Unblocks the opening thread.
                os.close(os.open(tmp_path / "a.pt", os.O_WRONLY | os.O_NONBLOCK))
