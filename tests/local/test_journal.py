"""The journal on a real disk with real processes: acknowledged rows must survive SIGKILL (I4)."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_async.core import keys
from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Copied,
    Decided,
    Enqueued,
    Event,
    Failed,
    FileIdentity,
    Forgotten,
    Growing,
    MadeDurable,
    MultipartOpened,
    Opened,
    Outcome,
    ReceiptStored,
    Released,
    RemoteAddress,
    Removed,
    Retried,
    Sealed,
    Shard,
    StartedOver,
    StoredShard,
    Superseded,
    Unproven,
    Verified,
)
from ckpt_async.errors import FailureReason, FolderInUseError, JournalDamagedError, JournalError, NoSpaceError
from ckpt_async.local import journals, log
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import _KINDS as KINDS
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.local.log import Log
from tests.ctrl_c import interrupted
from tests.node import Node

ID = CheckpointId(2, 300)
EVENTS: list[Event] = [
    Opened(2, 4, RemoteAddress("file:///run")),
    Opened(
        3,
        4,
        RemoteAddress("s3://b/p", "http://x", put_args={"ACL": "private"}),
        (("num_checkpoints_to_keep", 3),),
    ),
    Enqueued(ID, "ep1-ba300", Shard("a/b", "x/a/b", FileIdentity(1, 1 << 60, 3, 1 << 62), is_linked=True)),
    Sealed(ID, "ep1-ba300", 4, (("loss", 0.1), ("é", -1.0))),
    Sealed(ID, "ep1-ba300", 4, expected=("a", "b/c")),
    MadeDurable(ID, ("a/b", "c"), is_sealed=True),
    Superseded(ID, "uploads fell behind"),
    MultipartOpened(ID, "a/b", "upload\n'\"", 5),
    Verified(ID, StoredShard("a/b", "ckpt/x/a/b", 3, Checksum("crc64nvme", "AAAAAAAAAAA="))),
    *(Failed(ID, "a/b", reason, "why") for reason in FailureReason),
    Retried(ID),
    ReceiptStored(ID),
    *(Decided(ID, outcome, "ep1-ba300", "\ud800 reason") for outcome in Outcome),
    Growing(ID, "ep1-ba300", "m.pt", "step/m.pt"),
    Growing(ID, "ep1-ba300", "m.pt", None),
    Enqueued(
        ID, "ep1-ba300", Shard("p", "x/p", FileIdentity(1, 2, 3, 4), is_linked=True, publish_as="exact/p")
    ),
    Copied(ID, ("p",)),
    Removed(ID),
    Released(ID),
    Unproven(ID),
    Forgotten(ID, None),
    Forgotten(ID, 1.5),
    StartedOver(),
    StartedOver(3, ID, 1.5, CheckpointId(3, 4), 2.5),
]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints")


@pytest.fixture
def journal(folder: Folder) -> Iterator[Journal]:
    with contextlib.closing(Journal(folder, 0)) as journal:
        yield journal


def python(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Run this code in a separate process, which prints what the journal has acknowledged."""
    prelude = """
        import os, sys
        from ckpt_async.local.folder import Folder
        from ckpt_async.local.journal import Journal, RankLock
        from ckpt_async.core.model import CheckpointId, Forgotten, ReceiptStored, Sealed
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


def test_every_kind_of_event_round_trips(folder: Folder, journal: Journal) -> None:
    """An event that is read back differently would change history after every restart."""
    assert set(KINDS.values()) == {type(event) for event in EVENTS}, "a new kind needs an example here"
    journal.append(EVENTS)
    assert [row.event for row in journal.rows()] == EVENTS
    with contextlib.closing(Journal(folder, 0)) as again:
        assert journal.rows() == again.rows() == journals.read(folder.path)[0].rows
        assert fold(again.rows(), Local(0)) == again.local() == journals.read(folder.path)[0].local()


def many(num_shards: int) -> list[Event]:
    """Return the events of a folder of small shards and of the store's answers."""
    names = [f"a/{number}" for number in range(num_shards)]
    shards = [
        Shard(name, f"x/{name}", FileIdentity(1, number, 3, 4), is_linked=number % 2 == 0)
        for number, name in enumerate(names)
    ]
    stored = [StoredShard(name, f"ckpt/x/{name}", 3, Checksum("crc32c", "AAAAAA==")) for name in names]
    return [
        *(Enqueued(ID, "x", shard) for shard in shards),
        *(Verified(ID, each) for each in stored),
        Verified(CheckpointId(2, 301), stored[0]),
        Enqueued(CheckpointId(2, 301), "y", shards[0]),
        Enqueued(CheckpointId(2, 301), "z", shards[1]),
    ]


def test_many_shards_are_one_record(folder: Folder, journal: Journal) -> None:
    """10,000 small shards must not cost 20,000 writes and lines, and each must be read back unchanged."""
    events = many(2001)
    journal.append(events)
    assert [row.event for row in journal.rows()] == events
    assert len((folder.private / keys.journal_name(0)).read_bytes().splitlines()) == 1 + 1


def test_each_rank_has_its_own_journal(folder: Folder) -> None:
    """No rank waits for another rank's lock or can damage its rows, and a reader sees the rows of all ranks."""
    with contextlib.closing(Node(folder)) as node:
        for rank in (0, 12, 0):
            node.append(rank, [Sealed(ID, f"{rank}", 2)])
        node.note_progress(12, [(ID, "a", 5)])
        found = journals.read(folder.path)
        assert {rank: each.rows for rank, each in found.items()} == {
            rank: node[rank].rows() for rank in (0, 12)
        }
        assert [each.progress for each in found.values()] == [{}, {(ID, "a"): 5}]
        assert [len(each.rows) for each in found.values()] == [2, 1]
        places = {rank: each.place for rank, each in found.items()}
        node.append(0, [ReceiptStored(ID)])
        new = journals.read(folder.path, after=places)
        assert [row.event for row in new[0].rows] == [ReceiptStored(ID)]
        assert (new[0].is_whole, new[12].is_whole, new[12].rows) == (False, False, [])
    moved = folder.private / keys.journal_name(0)
    moved.rename(moved.with_name("elsewhere"))
    with contextlib.closing(Journal(folder, 0)) as journal:
        journal.append([Sealed(ID, "anew", 2)])
        new = journals.read(folder.path, after=places)
        assert (new[0].is_whole, [row.event for row in new[0].rows]) == (True, [Sealed(ID, "anew", 2)])


def written(folder: Folder, row: str) -> None:
    """Write a record as a program with a fault might have."""
    with contextlib.closing(Log(folder.private / keys.journal_name(0), "e", lambda _: ())) as raw:
        raw.write(0.0, {"e": f"[{row}]"})


@pytest.mark.parametrize("is_linked", [True, False])
@pytest.mark.parametrize("publish_as", ["", "a"])
@pytest.mark.parametrize(
    "shard", [("../../../secret", "a"), ("a", "../secret"), ("a", "/secret"), ("a", "b/../../secret")]
)
def test_a_planted_row_leads_to_no_file_outside_the_folder(
    folder: Folder, journal: Journal, shard: tuple[str, str], publish_as: str, is_linked: bool
) -> None:
    """Whoever could write to the journal could have any file of its reader uploaded, or deleted after the upload."""
    planted = Enqueued(ID, "step-300", Shard(*shard, FileIdentity(1, 2, 3, 4), is_linked, publish_as))
    journal.append([planted])
    with pytest.raises(JournalDamagedError, match="secret"):
        journal.local()


@pytest.mark.parametrize("names", [("../secret", "a"), ("a", "../secret")])
def test_a_planted_row_names_no_growing_file_outside_the_folder(
    journal: Journal, names: tuple[str, str]
) -> None:
    journal.append([Growing(ID, "step-300", *names)])
    with pytest.raises(JournalDamagedError, match="secret"):
        journal.local()


@pytest.mark.parametrize("body", ["[]", '[1,1,"x","a","b",1,2,3,4]', '[1,1,"x",["a"]]', "1"])
@pytest.mark.parametrize("kind", ["Enqueued", "Verified", "Sealed"])
def test_truncated_row_is_rejected(folder: Folder, journal: Journal, kind: str, body: str) -> None:
    """A shard missing from the journal would never be uploaded."""
    written(folder, f'["{kind}",{body}]')
    with pytest.raises(JournalDamagedError, match=kind):
        journal.rows()
    with pytest.raises(JournalDamagedError, match=kind):
        journals.read(folder.path)


def test_append_is_all_or_nothing(journal: Journal) -> None:
    """A folder must not be left with only half of its shards enqueued."""

    def events() -> Iterator[Event]:
        yield EVENTS[3]
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        journal.append(events())
    assert journal.rows() == []


def test_no_acknowledged_row_is_lost_by_sigkill(folder: Folder) -> None:
    """The trainer was told that its checkpoint is safe."""
    code = """
        journal = Journal(Folder(sys.argv[1]), 0)
        for step in range(10**6):
            journal.append([Sealed(CheckpointId(1, step), "x", 1)])
            os.write(1, b"%d\\n" % step)
    """
    for num_acknowledged in (1, 50, 300):
        process = python(code, folder.path)
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(num_acknowledged)]
        process.kill()
        last = int((seen + process.stdout.read().splitlines())[-1])
        process.stdout.close()
        process.wait()
        with contextlib.closing(Journal(folder, 0)) as journal:
            steps = {row.event.checkpoint.step for row in journal.rows() if isinstance(row.event, Sealed)}
        assert set(range(last + 1)) <= steps


def test_eight_processes_open_and_append_at_once(folder: Folder) -> None:
    """All ranks of a node start at the same moment in a folder that has no journal yet."""
    code = """
        journal = Journal(Folder(sys.argv[1]), int(sys.argv[2]))
        for step in range(100):
            journal.append([Sealed(CheckpointId(1, step), "x", 8)])
    """
    processes = [python(code, folder.path, rank) for rank in range(8)]
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * 8
    found = journals.read(folder.path)
    for rank in range(8):
        steps = [row.event.checkpoint.step for row in found[rank].rows]  # type: ignore[union-attr]
        assert list(range(100)) == steps


@pytest.fixture
def always_compacts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "COMPACT_BYTES", 0)


@pytest.mark.usefixtures("always_compacts")
def test_compaction_leaves_one_row_of_what_is_over(folder: Folder, journal: Journal) -> None:
    """The journal must stay as small after a year of training as after a day, and after a thousand restarts."""
    for step in (1, 3, 2):
        id_ = CheckpointId(1, step)
        journal.append(
            [Opened(step, 2, RemoteAddress("file:///run")), Sealed(id_, "x", 1), ReceiptStored(id_)]
        )
        journal.append([Forgotten(id_, float(step))])
    journal.append([Sealed(CheckpointId(1, 4), "x", 1)])
    journal.append([Forgotten(CheckpointId(1, 4), None)])
    journal.note_progress([(ID, "a", 4)])
    journal.note_progress([(ID, "a", 5)])
    before, place = journal.local(), journals.read(folder.path)[0].place
    journal.compact()
    assert journal.local() == before
    assert len(journal.rows()) == 2
    found = journals.read(folder.path)[0]
    assert (found.rows, found.progress) == (journal.rows(), {(ID, "a"): 5})
    journal.append([Released(ID)])
    found = journals.read(folder.path, after={0: place})[0]
    assert ([row.event for row in found.rows], found.progress) == ([Released(ID)], {(ID, "a"): 5})


@pytest.mark.usefixtures("always_compacts")
def test_a_state_from_before_a_compaction_is_brought_up_to_date(journal: Journal) -> None:
    """An engine or a trainer may not have seen yet what compaction has dropped."""
    journal.append([Sealed(ID, "x", 1)])
    before = journal.local()
    journal.append([Forgotten(ID, 1.5)])
    journal.compact()
    journal.append([Sealed(CheckpointId(2, 301), "x", 1)])
    assert journal.follow(before) == journal.local()
    assert list(journal.local().checkpoints) == [CheckpointId(2, 301)]
    assert journal.follow(journal.local()) == journal.local()


def test_what_a_store_has_of_unproven_checkpoints_is_forgotten(journal: Journal) -> None:
    """It must stay forgotten, whatever happens next."""
    other = CheckpointId(ID.generation, ID.step + 1)
    shard = Shard("a", "x/a", FileIdentity(1, 2, 3, 4), is_linked=True)
    stored = StoredShard("a", "ckpt/x/a", 3, Checksum("crc64nvme", "AAAAAAAAAAA="))
    for id_ in (ID, other):
        opened = MultipartOpened(id_, "a", "upload", 5)
        journal.append([Enqueued(id_, "x", shard), Sealed(id_, "x", 1), opened, Verified(id_, stored)])
        journal.append([ReceiptStored(id_)])
    journal.append([Opened(3, 1, RemoteAddress("file:///run")), Unproven(ID)])
    found = journal.local().checkpoints
    assert not found[ID].has_receipt
    assert found[ID].sealed is not None
    assert (found[ID].shards["a"].stored, found[ID].shards["a"].multipart) == (None, None)
    assert found[other].has_receipt
    assert found[other].is_verified


# --- trouble -------------------------------------------------------------------------------------------------


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


@pytest.mark.fault("F5")
def test_full_disk_is_reported_and_recovers(tmp_path: Path) -> None:
    """Fault F5: nothing is half written, and the next append works once there is space."""
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", mount], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        folder = Folder(mount / "checkpoints")
        with contextlib.closing(Journal(folder, 0)) as journal:
            ballast = mount / "ballast"
            journal.append([ReceiptStored(ID)])
            fill(ballast)
            before = journal.rows()

            def append_until_full() -> None:
                nonlocal before
                for step in range(1000):
                    journal.append([Sealed(CheckpointId(1, step), "x" * 200, 1)] * 20)
                    before = journal.rows()

            with pytest.raises(NoSpaceError) as caught:
                append_until_full()
            assert "full" in str(caught.value)
            assert before == journal.rows()
            with pytest.raises(NoSpaceError):
                Folder(mount / "checkpoints")
        ballast.unlink()
        with contextlib.closing(Journal(folder, 0)) as journal:
            journal.append([Sealed(ID, "after", 1)])
            assert [row.event for row in before] + [Sealed(ID, "after", 1)] == [
                row.event for row in journal.rows()
            ]
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.fault("F4a")
@pytest.mark.parametrize(
    "damage", ["not a journal", "overwritten", "a row that is cut short", "an unknown kind"]
)
def test_a_damaged_journal_is_moved_aside_and_recreated(
    folder: Folder, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal is only a cache: training starts, and the engine refills it from the manifests.

    Nothing is deleted, and a reader changes nothing.
    """
    path = folder.private / keys.journal_name(0)
    with contextlib.closing(Journal(folder, 0)) as journal:
        for _ in range(200):
            journal.append([Sealed(ID, "x" * 200, 1)])
    content = path.read_bytes()
    match damage:
        case "not a journal":
            path.write_bytes(b"garbage" * 1000)
        case "overwritten":
            path.write_bytes(content[:4096] + b"\xff" * 20_000 + content[24_096:])
        case _:
            written(folder, '["Novel",{}]' if damage == "an unknown kind" else '["Enqueued",["x","a"]]')
    content = path.read_bytes()
    with pytest.raises(JournalDamagedError):
        journals.read(folder.path)
    with pytest.raises(JournalDamagedError):
        Journal(folder, 0, may_replace=False)
    assert path.read_bytes() == content
    with contextlib.closing(Journal(folder, 0)) as journal:
        assert journal.rows() == []
        journal.append([ReceiptStored(ID)])
    [aside] = folder.private.glob("*.damaged-*")
    assert aside.read_bytes() == content
    assert "journal_damaged" in caplog.text
    assert str(aside) in caplog.text
    assert [row.event for row in journals.read(folder.path)[0].rows] == [ReceiptStored(ID)]


def test_other_format_version_is_rejected(folder: Folder, journal: Journal) -> None:
    """A journal written by a newer version must not be half understood."""
    path = folder.private / keys.journal_name(0)
    rest = path.read_bytes()[9:-1].replace(b"log 1", b"log 2")
    path.write_bytes(b"%08x %b\n" % (zlib.crc32(rest), rest))
    content = path.read_bytes()
    with pytest.raises(JournalError, match="has format 2"):
        Journal(folder, 0)
    assert path.read_bytes() == content


# --- ownership and forks -------------------------------------------------------------------------------------


def test_ctrl_c_within_acquire_leaves_the_rank_free(folder: Folder) -> None:
    """The lock stayed with a descriptor that nobody knew, so that this process locked itself out."""
    for number in range(1, 200):
        lock = RankLock(folder, 0)
        error = interrupted(lock.acquire, number)
        if error is not None:
            assert not lock.is_held
            lock.acquire()
        lock.release()
        if error is None:
            break
    assert number > 5


def test_second_owner_is_rejected_and_the_first_is_named(folder: Folder) -> None:
    """Two engines for one rank would both upload and both delete."""
    lock, other = RankLock(folder, 0), RankLock(folder, 0)
    lock.acquire()
    with pytest.raises(FolderInUseError, match=f"process {os.getpid()}"):
        other.acquire()
    RankLock(folder, 1).acquire()
    lock.release()
    lock.release()
    other.acquire()
    other.release()


def test_a_forked_child_does_not_keep_a_dead_parents_lock(folder: Folder) -> None:
    """A dataloader worker may outlive a killed trainer, and must not lock out its restart."""
    code = """
        import signal
        lock = RankLock(Folder(sys.argv[1]), 0)
        lock.acquire()
        child = os.fork()
        if child == 0:
            os.write(1, b"%d\\n" % os.getpid())
            signal.pause()
        signal.pause()
    """
    process = python(code, folder.path)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(FolderInUseError):
            RankLock(folder, 0).acquire()
        process.kill()
        process.wait()
        os.kill(child, 0)  # the child is alive
        lock = RankLock(folder, 0)
        lock.acquire()
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize(
    ("given", "url"),
    [("s3://bucket/run//", "s3://bucket/run"), ("s3://bucket", "s3://bucket"), ("memory://", "memory://")],
)
def test_a_slash_at_the_end_of_a_remote_is_not_part_of_it(given: str, url: str) -> None:
    assert RemoteAddress(given).url == url
