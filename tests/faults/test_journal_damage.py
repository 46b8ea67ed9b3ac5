"""A journal torn anywhere by power loss or a bad disk: what has a manifest is never lost (rule R10)."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_async.core import keys, records
from ckpt_async.core.local_state import Local, LocalCheckpoint
from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Decided,
    Enqueued,
    Event,
    Failed,
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
from ckpt_async.errors import FailureReason
from ckpt_async.local import journals
from ckpt_async.local.durable import write_durably
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.transfer.patient import PatientStore
from tests.stores.memory import MemoryBucket, MemoryStore

pytestmark = pytest.mark.fault("F4a")

NAME = keys.journal_name(0)
STEPS = range(1, 7)
NUM_SHARDS = 3


class Machine:
    """A folder as a trainer left it when the power went: links, manifests, and the journal."""

    def __init__(self, root: Path) -> None:
        self.folder = Folder(root / "folder")
        self.wanted: dict[CheckpointId, set[str]] = {}
        journal = Journal(self.folder, 0)
        journal.append([Opened(1, 2, RemoteAddress("file:///run"), boot_id="before")])
        for step in STEPS:
            self._save(journal, CheckpointId(1, step))
        journal.close()
        self.saved = (self.folder.private / NAME).read_bytes()

    def _save(self, journal: Journal, id_: CheckpointId) -> None:
        """Save a step. The steps differ in how far they get: verified, decided or failed."""
        shards = [self._shard(id_, f"{number}.bin") for number in range(NUM_SHARDS)]
        for shard in shards:
            journal.append([Enqueued(id_, f"step-{id_.step}", shard)])
        sealed = Sealed(id_, f"step-{id_.step}", 2, sealed_at=1.0)
        journal.append([sealed])
        path = self.folder.private / keys.spool_manifest(id_, 0)
        write_durably(path, records.encode_manifest(id_, sealed.name, shards, sealed))
        journal.sync()
        journal.append([MadeDurable(id_, tuple(shard.name for shard in shards), True)])
        stored = StoredShard("0.bin", "key", 10, Checksum("crc32c", "AAAAAA=="))
        more: list[Event] = [Verified(id_, stored)]
        if id_.step == 2:
            more = [Failed(id_, "1.bin", FailureReason.SOURCE_CHANGED, "by the test")]
        if id_.step == 3:
            more = [Decided(id_, Outcome.COMMIT, sealed.name)]
        journal.append(more)
        self.wanted[id_] = {shard.name for shard in shards}

    def _shard(self, id_: CheckpointId, name: str) -> Shard:
        source = f"step-{id_.step}/{name}"
        (self.folder.path / source).parent.mkdir(exist_ok=True)
        (self.folder.path / source).write_bytes(name.encode())
        [(identity, is_linked)] = self.folder.link([(source, name)], keys.spool_checkpoint(id_, 0))
        return Shard(name, source, identity, is_linked)

    def recovered(self, data: bytes) -> Local:
        """Return what a drain recovers from this journal."""
        for each in self.folder.private.glob("journal-*"):
            each.unlink()
        (self.folder.private / NAME).write_bytes(data)
        with contextlib.closing(Journal(self.folder, 0)) as journal:
            return asyncio.run(self._recovered(journal))

    async def _recovered(self, journal: Journal) -> Local:
        settings, store = Settings(), MemoryStore(MemoryBucket())
        state = State(
            rank=0,
            folder=self.folder,
            journal=journal,
            store=PatientStore(store, settings),
            settings=settings,
            observer=Observer(),
            clock=lambda: 1.0,
            is_trainer=False,
        )
        engine = Engine(state)
        await engine.recover(journal.local().opened)
        assert engine.local.checkpoints == journal.local().checkpoints
        return engine.local

    def check(self, found: Local) -> None:
        for id_, shards in self.wanted.items():
            checkpoint = found.checkpoints[id_]
            assert checkpoint.sealed is not None, f"{id_} was sealed and is not"
            assert set(checkpoint.shards) == shards, f"{id_} lost {shards - set(checkpoint.shards)}"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield Machine(tmp_path)
    shutil.rmtree(tmp_path)


def ends_of_lines(data: bytes) -> list[int]:
    return [end + 1 for end, byte in enumerate(data) if byte == ord("\n")]


def test_a_journal_that_ends_at_any_record_loses_no_sealed_step(machine: Machine) -> None:
    """What the journal still knows must be kept, so that nothing decided or verified is started again."""
    ends = ends_of_lines(machine.saved)
    assert len(ends) > 20
    best = machine.recovered(machine.saved)
    machine.check(best)
    for at in ends:
        found = machine.recovered(machine.saved[:at])
        machine.check(found)
        for id_, checkpoint in found.checkpoints.items():
            check_is_older(checkpoint, best.checkpoints[id_])


def check_is_older(found: LocalCheckpoint, best: LocalCheckpoint) -> None:
    assert found.decision in (None, best.decision)
    for name, each in found.shards.items():
        assert each.shard == best.shards[name].shard
        assert each.stored in (None, best.shards[name].stored)


def test_a_journal_that_ends_at_any_byte_of_its_last_records_loses_no_sealed_step(machine: Machine) -> None:
    *_, begin, _, end = ends_of_lines(machine.saved)
    for at in range(begin, end, 1 if os.environ.get("CKPT_ASYNC_SOAK_MINUTES") else 7):
        machine.check(machine.recovered(machine.saved[:at]))


@pytest.mark.parametrize("size", [512, 4096])
def test_zeroed_blocks_lose_no_sealed_step(machine: Machine, size: int) -> None:
    """Zeros stand for what the disk had not written yet."""
    data = machine.saved
    for at in range(0, len(data), size):
        torn = data[:at] + bytes(len(data[at : at + size])) + data[at + size :]
        machine.check(machine.recovered(torn))


@pytest.mark.parametrize("size", [0, 100, 4095, 0.5, 0.9])
def test_half_a_file_loses_no_sealed_step(
    machine: Machine, size: float, caplog: pytest.LogCaptureFixture
) -> None:
    half = machine.saved[: int(size if size in (0, 100, 4095) else len(machine.saved) * size)]
    machine.check(machine.recovered(half))
    assert not list(machine.folder.private.glob("*.damaged-*")), "what is whole counts"
    assert "journal_rebuilt" in caplog.text
    assert journals.read(machine.folder.path)[0].rows
