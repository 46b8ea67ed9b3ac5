"""The journal, on a real disk and with real processes: what was acknowledged is there after SIGKILL (I4)."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_async.errors import FailureReason, FolderInUseError, JournalError, NoSpaceError
from ckpt_async.files import Folder
from ckpt_async.journal import _INSERT, _KINDS, FORMAT_VERSION, ROW_SHARDS, Journal, RankLock
from ckpt_async.model import (
    CheckpointId,
    Checksum,
    Decided,
    Enqueued,
    Event,
    Failed,
    FileIdentity,
    Forgotten,
    Growing,
    Local,
    MadeDurable,
    MultipartOpened,
    Opened,
    Outcome,
    ReceiptStored,
    Released,
    RemoteAddress,
    Retried,
    Sealed,
    Shard,
    StoredShard,
    Superseded,
    Verified,
    fold,
)

ID = CheckpointId(2, 300)
EVENTS: list[Event] = [
    Opened(2, 4),
    Opened(
        3,
        4,
        RemoteAddress("s3://b/p", "http://x", put_args={"ACL": "private"}),
        (("num_checkpoints_to_keep", 3),),
    ),
    Enqueued(ID, "ep1-ba300", Shard("a/b", "x/a/b", FileIdentity(1, 1 << 60, 3, 1 << 62), is_linked=True)),
    Sealed(ID, "ep1-ba300", 4, (("loss", 0.1), ("é", -1.0))),
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
    Released(ID),
    Forgotten(ID, None),
    Forgotten(ID, 1.5),
]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints")


@pytest.fixture
def journal(folder: Folder) -> Iterator[Journal]:
    with contextlib.closing(Journal(folder)) as journal:
        yield journal


def python(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    """A process of its own, that runs this code; its output is what it acknowledged."""
    prelude = """
        import os, sys
        from ckpt_async.files import Folder
        from ckpt_async.journal import Journal, RankLock
        from ckpt_async.model import CheckpointId, Forgotten, ReceiptStored, Sealed
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


def test_every_kind_of_event_round_trips(folder: Folder, journal: Journal) -> None:
    """An event that comes back otherwise is another history after every restart."""
    assert set(_KINDS.values()) == {type(event) for event in EVENTS}, "a new kind needs an example here"
    journal.append(3, EVENTS)
    assert [row.event for row in journal.rows()] == EVENTS
    with contextlib.closing(Journal(folder)) as again:
        assert journal.rows() == again.rows()
        assert fold(again.rows(), Local(3)) == again.local(3)
    assert journal.ranks() == [3]


def many(num_shards: int) -> list[Event]:
    """A folder of small shards, and what the store answered."""
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


def num_rows_of(folder: Folder) -> int:
    with contextlib.closing(sqlite3.connect(folder.private / "journal.sqlite")) as connection:
        return int(connection.execute("SELECT count(*) FROM events").fetchone()[0])


def test_many_shards_share_few_rows(folder: Folder, journal: Journal) -> None:
    """10,000 small shards must not cost 20,000 inserts and selects; each is what it was."""
    events = many(2 * ROW_SHARDS + 1)
    journal.append(0, events)
    assert [row.event for row in journal.rows()] == events
    assert num_rows_of(folder) == 3 + 3 + 3
    last = journal.rows()[-1].sequence
    assert [row.event for row in journal.rows(after=last - 1)] == events[-1:]


def test_rows_of_one_rank(journal: Journal) -> None:
    """Eight engines of a node need not read each other's rows."""
    for rank in (0, 1, 0):
        journal.append(rank, [Sealed(ID, f"{rank}", 2)])
    first, second, third = journal.rows()
    assert journal.rows(rank=0) == [first, third]
    assert journal.rows(rank=1) == [second]
    assert journal.rows(rank=0, after=first.sequence) == [third]
    assert journal.rows(rank=2) == []


@pytest.mark.parametrize("body", ["[]", '["x","a","b",1,2,3,4]', '["x",["a"]]', "[1", "1"])
@pytest.mark.parametrize("kind", ["Enqueued", "Verified", "Sealed"])
def test_row_that_is_cut_short_is_refused(folder: Folder, journal: Journal, kind: str, body: str) -> None:
    """A shard that is left out would never be uploaded."""
    if (kind, body) == ("Verified", "[]"):
        return  # nothing, and whole
    with contextlib.closing(sqlite3.connect(folder.private / "journal.sqlite")) as connection:
        connection.execute("INSERT INTO events VALUES (1, 0, 1, 1, 0.0, ?, ?)", (kind, body))
        connection.commit()
    with pytest.raises(JournalError, match=kind):
        journal.rows()


# As version 0.1.0 wrote it, to the letter.
VERSION_1 = """
PRAGMA journal_mode = WAL;
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    rank INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    step INTEGER NOT NULL,
    written_at REAL NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE progress (rank INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE INDEX events_by_checkpoint ON events (rank, generation, step);
PRAGMA user_version = 1;
"""
ROWS_1 = {
    "Opened": '{"generation":2,"world_size":4,"remote":null,"settings":[],"boot_id":""}',
    "Enqueued": '{"checkpoint":{"generation":2,"step":300},"name":"ep1-ba300","shard":{"name":"a/b","source":"x/a/b",'
    '"identity":{"device":1,"inode":1152921504606846976,"size_bytes":3,"mtime_ns":4611686018427387904},'
    '"is_linked":true}}',
    "Sealed": '{"checkpoint":{"generation":2,"step":300},"name":"ep1-ba300","world_size":4,'
    '"metrics":[["loss",0.1],["\\u00e9",-1.0]]}',
    "MadeDurable": '{"checkpoint":{"generation":2,"step":300},"shards":["a/b","c"],"is_sealed":true}',
    "Verified": '{"checkpoint":{"generation":2,"step":300},"stored":{"name":"a/b","key":"ckpt/x/a/b","size_bytes":3,'
    '"checksum":{"algorithm":"crc64nvme","value":"AAAAAAAAAAA="}}}',
}


def test_journal_of_version_1_goes_on(folder: Folder) -> None:
    """An upgrade must not lose what was queued; a program that only looks must not change the file."""
    path = folder.private / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_1)
        for kind, body in ROWS_1.items():
            place = (0, 0) if kind == "Opened" else (2, 300)
            connection.execute(_INSERT, (3, *place, 5.0, kind, body))
        connection.commit()
    expected = [next(event for event in EVENTS if type(event).__name__ == kind) for kind in ROWS_1]
    with contextlib.closing(Journal.open_readonly(folder.path)) as journal:
        assert [row.event for row in journal.rows()] == expected
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    with contextlib.closing(Journal(folder)) as journal, contextlib.closing(Journal(folder)) as other:
        more = many(2)
        journal.append(3, more)
        other.append(3, [ReceiptStored(ID)])
        assert [row.event for row in other.rows()] == [*expected, *more, ReceiptStored(ID)]
        journal.forget(3, Forgotten(ID, 1.0))
        assert list(journal.local(3).checkpoints) == [CheckpointId(2, 301)]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT_VERSION,)


def test_append_is_all_or_nothing(journal: Journal) -> None:
    """Half a folder of shards must not be enqueued."""

    def events() -> Iterator[Event]:
        yield EVENTS[3]
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        journal.append(0, events())
    assert journal.rows() == []


def test_no_acknowledged_row_is_lost_by_sigkill(folder: Folder) -> None:
    """The trainer was told that its checkpoint is safe."""
    code = """
        journal = Journal(Folder(sys.argv[1]))
        for step in range(10**6):
            journal.append(0, [Sealed(CheckpointId(1, step), "x", 1)])
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
        with contextlib.closing(Journal(folder)) as journal:
            steps = {row.event.checkpoint.step for row in journal.rows() if isinstance(row.event, Sealed)}
        assert set(range(last + 1)) <= steps


def test_eight_processes_open_and_append_at_once(folder: Folder) -> None:
    """All ranks of a node start in the same moment, on a folder that has no journal yet."""
    code = """
        rank = int(sys.argv[2])
        journal = Journal(Folder(sys.argv[1]))
        for step in range(100):
            journal.append(rank, [Sealed(CheckpointId(1, step), "x", 8)])
    """
    processes = [python(code, folder.path, rank) for rank in range(8)]
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * 8
    with contextlib.closing(Journal(folder)) as journal:
        for rank in range(8):
            steps = [row.event.checkpoint.step for row in journal.rows() if row.rank == rank]  # type: ignore[union-attr]
            assert list(range(100)) == steps


def test_forget_keeps_one_mark(journal: Journal) -> None:
    """The journal of a year of training stays as small as that of a day."""
    for step in (1, 3, 2):
        id_ = CheckpointId(1, step)
        journal.append(0, [Sealed(id_, "x", 1), ReceiptStored(id_)])
        journal.append(1, [ReceiptStored(id_)])
        journal.forget(0, Forgotten(id_, float(step)))
    journal.append(0, [Sealed(CheckpointId(1, 4), "x", 1)])
    journal.forget(0, Forgotten(CheckpointId(1, 4), None))
    mine = [row.event for row in journal.rows() if row.rank == 0]
    assert [Forgotten(CheckpointId(1, 3), 3.0)] == mine
    assert len(journal.rows()) == 4, "other ranks' rows stay"
    journal.forget(0, Forgotten(CheckpointId(1, 3), 3.0))
    assert CheckpointId(1, 3) == journal.local(0).newest_committed


def test_sequence_is_never_used_twice(journal: Journal) -> None:
    """The engine asks for what is new by number: a reused one would be overlooked."""
    journal.append(0, [ReceiptStored(ID)])
    newest = journal.rows()[-1].sequence
    journal.forget(0, Forgotten(ID, None))
    journal.append(0, [ReceiptStored(ID)])
    assert journal.rows()[-1].sequence > newest


def test_open_rank_leaves_one_row(journal: Journal) -> None:
    """A run that restarts every minute must not fill its journal."""
    for generation in range(1, 5):
        journal.open_rank(0, Opened(generation, 2))
        journal.open_rank(1, Opened(generation, 2))
    assert [Opened(4, 2)] * 2 == [row.event for row in journal.rows()]


def test_wal_is_moved_into_the_main_file(folder: Folder, journal: Journal) -> None:
    """Automatic checkpoints are off: without `compact` the WAL grows for ever."""
    for _ in range(60):
        journal.append(0, [Sealed(ID, "x" * 200, 1)] * 1000)
    journal.compact()
    wal = folder.private / "journal.sqlite-wal"
    journal.append(0, [ReceiptStored(ID)])
    size = wal.stat().st_size
    for _ in range(20):
        journal.append(0, [Sealed(ID, "x" * 200, 1)] * 1000)
    assert wal.stat().st_size == size
    journal.sync()


# --- trouble -------------------------------------------------------------------------------------------------


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def test_full_disk_is_said_and_heals(tmp_path: Path) -> None:
    """Table row F5: nothing half written, and the next append works once there is space."""
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", mount], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        folder = Folder(mount / "checkpoints")
        with contextlib.closing(Journal(folder)) as journal:
            ballast = mount / "ballast"
            journal.append(0, [ReceiptStored(ID)])
            fill(ballast)
            before = journal.rows()

            def append_until_full() -> None:
                nonlocal before
                for step in range(1000):
                    journal.append(0, [Sealed(CheckpointId(1, step), "x" * 200, 1)] * 20)
                    before = journal.rows()

            with pytest.raises(NoSpaceError) as caught:
                append_until_full()
            assert "full" in str(caught.value)
            assert before == journal.rows()
            with pytest.raises(NoSpaceError):
                Folder(mount / "checkpoints")
        ballast.unlink()
        with contextlib.closing(Journal(folder)) as journal:
            journal.append(0, [Sealed(ID, "after", 1)])
            assert [row.event for row in before] + [Sealed(ID, "after", 1)] == [
                row.event for row in journal.rows()
            ]
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.parametrize("damage", ["not a database", "torn page"])
def test_corrupt_file_is_an_error_with_a_way_out(folder: Folder, damage: str) -> None:
    """The journal is a cache: the message says that it may be moved away."""
    path = folder.private / "journal.sqlite"
    with contextlib.closing(Journal(folder)) as journal:
        journal.append(0, [Sealed(ID, "x" * 200, 1)] * 200)
    assert not path.with_name("journal.sqlite-wal").exists()
    content = path.read_bytes()
    path.write_bytes(b"garbage" * 1000 if damage == "not a database" else content[:4096] + b"\xff" * 20_000)
    with (
        pytest.raises(JournalError, match="move the file away"),
        contextlib.closing(Journal(folder)) as journal,
    ):
        journal.rows()


def test_other_format_is_refused(folder: Folder) -> None:
    """A newer program's journal must not be half understood."""
    with contextlib.closing(sqlite3.connect(folder.private / "journal.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match="format 99"):
        Journal(folder)


def test_row_of_an_unknown_kind_is_refused(folder: Folder, journal: Journal) -> None:
    """Skipping it could skip a seal."""
    with contextlib.closing(sqlite3.connect(folder.private / "journal.sqlite")) as connection:
        connection.execute("INSERT INTO events VALUES (1, 0, 1, 1, 0.0, 'Novel', '{}')")
        connection.commit()
    with pytest.raises(JournalError, match="Novel"):
        journal.rows()


# --- ownership and forks -------------------------------------------------------------------------------------


def test_second_owner_is_refused_by_name(folder: Folder) -> None:
    """Two engines for one rank would both upload, and both delete."""
    lock, other = RankLock(folder, 0), RankLock(folder, 0)
    lock.acquire()
    with pytest.raises(FolderInUseError, match=f"process {os.getpid()}"):
        other.acquire()
    RankLock(folder, 1).acquire()
    lock.release()
    lock.release()
    other.acquire()
    other.release()


def test_forked_child_does_not_keep_a_dead_parent_s_lock(folder: Folder) -> None:
    """A dataloader worker outlives a killed trainer: its restart must not be locked out."""
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
        os.kill(child, 0)  # it is alive
        lock = RankLock(folder, 0)
        lock.acquire()
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_use_in_a_forked_child_raises_and_harms_nothing(folder: Folder) -> None:
    """SQLite across a fork corrupts the database: a clear error instead, and the parent goes on."""
    code = """
        journal = Journal(Folder(sys.argv[1]))
        journal.append(0, [ReceiptStored(CheckpointId(1, 1))])
        child = os.fork()
        if child == 0:
            for use in (journal.rows, lambda: journal.append(0, [ReceiptStored(CheckpointId(1, 2))])):
                try:
                    use()
                except Exception as error:
                    os.write(1, type(error).__name__.encode() + b"\\n")
            journal.close()
            os._exit(0)
        os.waitpid(child, 0)
        journal.append(0, [ReceiptStored(CheckpointId(1, 3))])
        os.write(1, b"%d\\n" % len(journal.rows()))
    """
    output, _ = python(code, folder.path).communicate()
    assert output.split() == [b"JournalError", b"JournalError", b"2"]
