"""What `status` makes of journals: a pure view, and a loader that leaves no trace."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Decided,
    Enqueued,
    Event,
    Failed,
    FileIdentity,
    Forgotten,
    JournalRow,
    MultipartOpened,
    Opened,
    Outcome,
    ReceiptStored,
    RemoteAddress,
    Sealed,
    Shard,
    StoredShard,
    Superseded,
    Verified,
)
from ckpt_async.errors import FailureReason, NoJournalError
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.local.journals import RankState
from ckpt_async.monitor import status

NOW = 10_000.0
REMOTE = RemoteAddress("s3://bucket/run")


def id_(step: int, generation: int = 1) -> CheckpointId:
    return CheckpointId(generation, step)


def enqueued(step: int, *sizes: int, generation: int = 1) -> list[Event]:
    name = f"step-{step}"
    return [
        Enqueued(
            id_(step, generation), name, Shard(f"f{n}", f"{name}/f{n}", FileIdentity(1, n, size, 1), True)
        )
        for n, size in enumerate(sizes)
    ]


def sealed(step: int, world_size: int = 1) -> Sealed:
    return Sealed(id_(step), f"step-{step}", world_size)


def verified(step: int, name: str, size_bytes: int) -> Verified:
    return Verified(id_(step), StoredShard(name, f"key/{name}", size_bytes, Checksum("crc64nvme", "x")))


def local(*events: Event | list[Event], rank: int = 0, at: float = NOW - 60) -> Local:
    flat = [one for each in events for one in (each if isinstance(each, list) else [each])]
    rows = [JournalRow(number, rank, at, event) for number, event in enumerate(flat, 1)]
    return fold(rows, Local(rank))


Progress = Mapping[tuple[int, CheckpointId, str], int]  # bytes sent, by rank too


def viewed(locals_: Sequence[Local], progress: Progress | None = None) -> status.Status:
    states = []
    for each in locals_:
        sent = {
            (id_, name): size for (rank, id_, name), size in (progress or {}).items() if rank == each.rank
        }
        states.append(RankState(each, sent))
    return status.view(states, NOW)


def summary(*locals_: Local, progress: Progress | None = None) -> str:
    return viewed(locals_, progress).summary


COMMITTED_300 = Forgotten(id_(300), NOW - 9 * 60)


def test_summary_names_the_last_commit_and_the_progress_of_the_next() -> None:
    """An operator must know this before draining a node."""
    here = local(
        Opened(1, 1, REMOTE), COMMITTED_300, enqueued(400, 50, 50), sealed(400), verified(400, "f0", 50)
    )
    sent = {(0, id_(400), "f1"): 12}
    assert summary(here, progress=sent) == "last committed step 300, 9 min ago; step 400 is 62 % uploaded"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "nothing committed yet; nothing is pending"),
        ([COMMITTED_300], "last committed step 300, 9 min ago; nothing is pending"),
        ([enqueued(1, 10)], "nothing committed yet; step 1 is 0 % uploaded and not sealed yet"),
        (
            [enqueued(1, 10), sealed(1), verified(1, "f0", 10)],
            "nothing committed yet; step 1 is uploaded and about to be committed",
        ),
        (
            [enqueued(1, 10), sealed(1, 2), verified(1, "f0", 10), ReceiptStored(id_(1))],
            "nothing committed yet; step 1 is uploaded and waits for other nodes",
        ),
        (
            [COMMITTED_300, enqueued(400, 10), sealed(400), enqueued(500, 10), sealed(500)],
            "last committed step 300, 9 min ago; step 500 is 0 % uploaded; 1 more checkpoint pending (step 400)",
        ),
        (
            [enqueued(1, 9, 9), sealed(1), Failed(id_(1), "f0", FailureReason.TRANSIENT, "503")],
            "nothing committed yet; step 1 is 0 % uploaded; 1 shard failed",
        ),
        (
            [enqueued(1, 9), sealed(1), Failed(id_(1), "f0", FailureReason.SOURCE_MISSING, "f0 is gone")],
            "nothing committed yet; step 1 cannot be committed from this folder: f0 is gone; 1 shard failed",
        ),
        (
            [enqueued(1, 9), sealed(1), Superseded(id_(1), "behind")],
            "nothing committed yet; step 1 was given up for a newer one",
        ),
        (
            [enqueued(1, 9), sealed(1), Decided(id_(1), Outcome.ABORT, "step-1", "rank 1 died")],
            "nothing committed yet; nothing is pending",
        ),
        (
            [enqueued(1, 9), sealed(1), Decided(id_(1), Outcome.COMMIT, "step-1")],
            "last committed step 1, 60 s ago; nothing is pending",
        ),
    ],
)
def test_summary_in_every_other_case(events: list[Event | list[Event]], expected: str) -> None:
    assert summary(local(Opened(1, 1, REMOTE), *events)) == expected


def test_local_ranks_that_saved_nothing_are_all_named() -> None:
    """They were killed before they saved anything, so no other node is to blame."""
    saved = local(
        Opened(1, 3, REMOTE), enqueued(1, 10), sealed(1, 3), verified(1, "f0", 10), ReceiptStored(id_(1))
    )
    one, two = local(Opened(1, 3, REMOTE), rank=1), local(Opened(1, 3, REMOTE), rank=2)
    said = "nothing committed yet; step 1 is uploaded, but {} of this node {} no part of it"
    assert summary(saved, one) == said.format("rank 1", "has")
    assert summary(saved, one, two) == said.format("ranks 1, 2", "have")


def test_a_checkpoint_is_counted_over_all_ranks_of_the_node() -> None:
    """Half of the ranks done is half done, whatever one rank alone would report."""
    done = local(enqueued(1, 100), sealed(1, 2), verified(1, "f0", 100), ReceiptStored(id_(1)), rank=0)
    begun = local(enqueued(1, 100), sealed(1, 2), rank=1)
    (found,) = viewed([done, begun], {(1, id_(1), "f0"): 50, (0, id_(1), "f0"): 99}).checkpoints
    assert (found.state, found.percent, found.ranks, found.num_verified) == ("uploading", 75, (0, 1), 1)
    assert (found.size_bytes, found.uploaded_bytes, found.world_size) == (200, 150, 2)


def test_one_rank_that_read_the_decision_suffices() -> None:
    knows = local(enqueued(1, 9), sealed(1, 2), Decided(id_(1), Outcome.COMMIT, "step-1"), rank=0)
    waits = local(enqueued(1, 9), sealed(1, 2), verified(1, "f0", 9), rank=1)
    assert [each.state for each in viewed([knows, waits]).checkpoints] == ["committed"]


def test_a_checkpoint_is_at_risk_until_all_ranks_of_the_node_have_delivered() -> None:
    """Whoever turns the node off loses it if a single receipt is missing."""
    saved = [enqueued(1, 9), sealed(1, 3), verified(1, "f0", 9)]
    done, begun = local(*saved, ReceiptStored(id_(1)), rank=0), local(*saved, rank=1)
    assert [each.id for each in viewed([done, begun]).at_risk] == [id_(1)]
    done_too = local(*saved, ReceiptStored(id_(1)), rank=1)
    assert viewed([done, done_too]).at_risk == ()


def test_progress_never_exceeds_the_size_and_100_percent_means_complete() -> None:
    """99.9 % must not read as 100 %: someone might turn the machine off."""
    here = local(enqueued(1, 1000), sealed(1))
    assert viewed([here], {(0, id_(1), "f0"): 5000}).checkpoints[0].uploaded_bytes == 1000
    assert viewed([here], {(0, id_(1), "f0"): 999}).checkpoints[0].percent == 99


def test_the_queue_counts_each_unstored_shard_of_undecided_checkpoints_once() -> None:
    here = local(
        *(Opened(1, 1, REMOTE), enqueued(1, 1), sealed(1), enqueued(2, 2), sealed(2)),
        Decided(id_(2), Outcome.ABORT, "step-2"),
        Opened(2, 1, REMOTE),
        enqueued(3, 4, 8, 16, 32, generation=2),
        MultipartOpened(id_(3, 2), "f1", "upload", 5 << 20),
        Failed(id_(3, 2), "f2", FailureReason.TIMEOUT, "slow"),
    )
    queue = viewed([here], {(0, id_(3, 2), "f3"): 1}).queue
    assert queue == {"queued": (1, 4), "uploading": (2, 40), "retrying": (1, 1), "failed": (1, 16)}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (172_800, "2 days")],
)
def test_ages_are_human_readable(seconds: float, text: str) -> None:
    assert status.age(seconds) == text


# --- the folder --------------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))


def test_status_without_a_journal_creates_nothing(tmp_path: Path) -> None:
    """A typo must not leave a folder behind that looks like a checkpoint folder."""
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NoJournalError, match="no journal"):
            status.load(folder)
    assert files(tmp_path) == []


@pytest.mark.parametrize("is_live", [True, False])
def test_status_leaves_the_folder_unchanged(tmp_path: Path, is_live: bool) -> None:
    journal = Journal(Folder(tmp_path), 0)
    journal.append([Opened(1, 1, REMOTE)])
    journal.append([*enqueued(1, 10), sealed(1)])
    journal.note_progress([(id_(1), "f0", 5)])
    if not is_live:
        journal.close()
    before = files(tmp_path)
    found = status.load(tmp_path, now=NOW)[""]
    assert (found.remote, found.checkpoints[0].percent) == ("s3://bucket/run", 50)
    assert files(tmp_path) == before
    journal.close()


def test_the_last_row_of_a_killed_trainers_journal_is_read(tmp_path: Path) -> None:
    """They were appended, and nobody has closed the file."""
    code = (
        "import os, signal, sys\n"
        "from ckpt_async.local.folder import Folder\nfrom ckpt_async.local.journal import Journal\n"
        "from ckpt_async.core.model import CheckpointId, Sealed\n"
        "Journal(Folder(sys.argv[1]), 0).append([Sealed(CheckpointId(1, 7), 'step-7', 1)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [each.id.step for each in status.load(tmp_path)[""].checkpoints] == [7]


def test_the_recorded_remote_is_read_back(tmp_path: Path) -> None:
    """`drain` relies on it, so encryption arguments must survive too; the newest launch counts."""
    address = RemoteAddress(
        "r2://bucket/run", "https://r2:9", "auto", "path", {"SSEKMSKeyId": "k", "Metadata": {"a": "b"}}
    )
    opened = Opened(2, 4, address, (("num_checkpoints_to_keep", 3), ("latest_filename", "")))
    journal = Journal(Folder(tmp_path), 0)
    journal.append([Opened(1, 4, REMOTE)])
    journal.append([opened])
    assert (journal.local().opened, journal.local().remote) == (opened, address)
    journal.close()


def test_the_remote_is_that_of_the_newest_start() -> None:
    here = local(Opened(1, 1, REMOTE), Opened(2, 1, RemoteAddress("s3://bucket/moved")))
    assert viewed([here]).remote == "s3://bucket/moved"


def test_a_live_owner_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert not status.has_owner(tmp_path, 0)
    lock = RankLock(folder, 0)
    lock.acquire()
    assert status.has_owner(tmp_path, 0)
    lock.release()
    assert not status.has_owner(tmp_path, 0)
    assert os.listdir(folder.private / "spool") == []
