"""The sweeper as a process beside trainers, other sweepers and SIGKILL: real folders, real locks, real stores."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.records import decode_latest
from ckpt_async.core.settings import Settings
from ckpt_async.engine.loop import Engine
from ckpt_async.errors import InvalidNameError
from ckpt_async.local import journals
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import RankLock
from ckpt_async.protocol.verify import Verification, verify
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.sweep.drain import RankReport, drain
from ckpt_async.sweep.sweeper import Sweeper, SweepReport
from ckpt_async.trainer.handle import LOCK_WAIT_S
from ckpt_async.transfer.patient import PatientStore, connect
from tests.seaweed import SeaweedServer
from tests.stores.memory import MemoryStore
from tests.sweep.trainers import Trainers

# A sweep that reports when it has adopted something and begins to upload it.
SWEEP = """
import asyncio, json, sys
from ckpt_async.engine.loop import Engine
from ckpt_async.core.settings import Settings
from ckpt_async.sweep.sweeper import Sweeper

folder, settings = json.loads(sys.argv[1])
upload = Engine._upload

async def loudly(self, action):
    print("uploading", flush=True)
    await upload(self, action)

Engine._upload = loudly
asyncio.run(Sweeper([folder], settings=Settings(**settings)).sweep())
"""

# Forks one sweep per line, which says how long the sweep may live; a fork needs no imports.
ZYGOTE = """
import asyncio, os, signal, sys
from ckpt_async.core.settings import Settings
from ckpt_async.sweep.sweeper import Sweeper
import ckpt_async.stores.directory, ckpt_async.engine.loop

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
for line in sys.stdin:
    child = os.fork()
    if not child:
        settings = Settings(remote_retention="last=2", max_bytes_per_s=20_000, num_concurrent_uploads=2)
        asyncio.run(Sweeper([sys.argv[1]], settings=settings).sweep())
        os._exit(0)
    signal.sigtimedwait({signal.SIGCHLD}, float(line))
    os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


def sweep(folder: Path, *, is_dry_run: bool = False, **settings: Any) -> SweepReport:
    sweeper = Sweeper([folder], settings=Settings(**settings))
    return asyncio.run(asyncio.wait_for(sweeper.sweep(is_dry_run=is_dry_run), 60))


def ranks_of(report: SweepReport) -> tuple[RankReport, ...]:
    (folder,) = report.folders
    assert folder.drained is not None, folder.error
    return folder.drained.ranks


def verified(remote: str) -> Verification:
    async def main() -> Verification:
        store = connect(remote, None, Settings())
        await store.open(is_read_only=True)
        try:
            return await verify(store, read_percent=100)
        finally:
            await store.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def tree(root: Path) -> dict[str, bytes]:
    """Return every file with its bytes."""
    files = (each for each in root.rglob("*") if each.is_file())
    return {str(each.relative_to(root)): each.read_bytes() for each in files}


def is_finished(folder: Path, rank: int = 0) -> bool:
    """Return whether nothing is undecided, and the spool holds no link (except the manifest of the newest, which
    stays known).
    """
    local = journals.read(folder)[rank].local()
    undecided = [each for each in local.checkpoints.values() if each.decision is None]
    links = (folder / ".ckpt-async" / "spool").glob("rank-*/*/**/*")
    return not undecided and not [each for each in links if each.is_file()]


def test_a_killed_trainers_work_is_finished_and_retention_applied(
    trainers: Trainers, folder: Path, remote: str
) -> None:
    """This is the promise to whoever deploys a sweeper: nothing sealed is lost, nothing piles up. A second sweep
    changes nothing.
    """
    trainers.die(folder, remote, 1, 2, 3, 4, sealed=(1, 2, 3))
    report = sweep(folder, remote_retention="last=1")
    (rank,) = ranks_of(report)
    assert report.is_clean
    assert [each.checkpoint.step for each in rank.committed] == [1, 2, 3]
    assert [each.checkpoint.step for each in rank.aborted] == [4]
    result = verified(remote)
    assert (result.findings, result.num_committed, result.num_shards_read) == ([], 1, 1)
    stored = Path(remote.removeprefix("file://"))
    assert [each.name for each in (stored / "ckpt").iterdir()] == ["step-3.g1"]
    latest = decode_latest((stored / keys.LATEST).read_bytes())
    assert latest.checkpoint.step == 3
    assert is_finished(folder)
    assert (folder / "step-1/rank0.bin").exists(), "the user's own files stay: num_checkpoints_to_keep is -1"
    before = tree(stored)
    again = sweep(folder, remote_retention="last=1")
    assert (again.is_clean, again.remotes[0].done) == (True, [])
    assert tree(stored) == before


def test_the_sweeper_works_on_s3(
    trainers: Trainers, folder: Path, s3_url: str, s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's journal knows the endpoint; the sweeper's environment only has credentials."""
    trainers.die(folder, s3_url, 1, 2, 3)
    with monkeypatch.context() as patched:
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
            patched.delenv(name)
        report = sweep(folder, remote_retention="last=2")
    assert report.is_clean
    result = verified(s3_url)
    assert (result.findings, result.num_committed) == ([], 2)


@pytest.mark.fault("F14")
def test_a_live_owner_is_left_alone(trainers: Trainers, folder: Path, remote: str) -> None:
    """A trainer that is merely slow keeps its journal and its uploads in progress."""
    owner = trainers.start(folder, remote, 1)
    report = sweep(folder, remote_retention="last=1")
    (rank,) = ranks_of(report)
    assert (rank.in_use_by, rank.uploaded_bytes, report.is_clean) == (f"process {owner.pid}", 0, True)
    assert owner.poll() is None
    assert not is_finished(folder)
    trainers.kill(owner)
    assert [each.checkpoint.step for each in ranks_of(sweep(folder))[0].committed] == [1]


def test_a_dry_run_changes_nothing_and_reports_the_plan(
    trainers: Trainers, folder: Path, remote: str, tmp_path: Path
) -> None:
    trainers.die(folder, remote, 1, 2)
    sweep(folder)
    trainers.die(tmp_path / "other", f"{remote}-other", 3)
    before = tree(tmp_path)
    report = sweep(folder, is_dry_run=True, remote_retention="last=1")
    assert [type(each.action).__name__ for each in report.remotes[0].done] == ["BeginPrune"]
    other = sweep(tmp_path / "other", is_dry_run=True)
    assert (other.folders[0].waiting_ranks, other.folders[0].drained) == ((0,), None)
    assert tree(tmp_path) == before
    assert not is_finished(tmp_path / "other")


def test_an_upload_that_times_out_is_not_a_success(trainers: Trainers, folder: Path, remote: str) -> None:
    """A cron job must be able to send mail on failure; the next sweep continues."""
    trainers.die(folder, remote, 1)
    slow = Sweeper([folder], settings=Settings(max_bytes_per_s=1.0), adoption_timeout_s=0.0)
    report = asyncio.run(asyncio.wait_for(slow.sweep(), 60))
    assert [each.checkpoint.step for each in ranks_of(report)[0].left] == [1]
    assert not report.is_clean
    assert sweep(folder).is_clean


def test_a_dry_run_opens_no_store_for_writing(
    trainers: Trainers, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run must work with read-only permissions: opening S3 for writing stores a probe."""
    trainers.die(folder, remote, 1, 2)
    sweep(folder)
    opened: list[bool] = []
    really = DirectoryStore.open

    async def noted(self: DirectoryStore, *, is_read_only: bool = False, **options: Any) -> None:
        opened.append(is_read_only)
        await really(self, is_read_only=is_read_only, **options)

    monkeypatch.setattr(DirectoryStore, "open", noted)
    sweep(folder, is_dry_run=True, remote_retention="last=1")
    assert opened == [True]


@pytest.mark.parametrize("wrong", [{"folders": "/data"}, {"remotes": "file:///data/run"}])
def test_a_string_is_not_accepted_as_a_list_of_targets(wrong: dict[str, Any]) -> None:
    """Each character would be taken for a folder, among them the working directory."""
    with pytest.raises(InvalidNameError, match=r"must be a collection of names.*\(give"):
        Sweeper(**wrong)


@pytest.mark.fault("F14")
def test_two_concurrent_sweepers_are_safe(trainers: Trainers, folder: Path, remote: str) -> None:
    """A DaemonSet and an impatient operator may overlap: one adopts, the other finds a live owner or nothing to do."""
    trainers.die(folder, remote, *range(1, 9))
    arguments = ["sweep", str(folder), "--remote", remote, "--keep", "last=3", "--json"]
    running = [
        subprocess.Popen([sys.executable, "-m", "ckpt_async", *arguments], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [json.loads(each.communicate(timeout=60)[0]) for each in running]
    assert [each.returncode for each in running] == [0, 0], told
    assert sum(each["folders"][0]["committed"] for each in told) == 8
    sweep(folder, remote_retention="last=3")
    result = verified(remote)
    assert (result.findings, result.num_committed) == ([], 3)
    assert is_finished(folder)


def test_a_starting_trainer_gets_its_lock_from_a_slow_sweeper(
    trainers: Trainers, folder: Path, remote: str
) -> None:
    """A restart must not wait until the sweeper has uploaded gigabytes; the trainer finishes what the sweeper leaves
    half done.
    """
    trainers.die(folder, remote, 1, 2)
    told = json.dumps([str(folder), {"max_bytes_per_s": 20.0}])  # 300 s for all of it
    sweeper = subprocess.Popen([sys.executable, "-c", SWEEP, told], stdout=subprocess.PIPE, text=True)
    try:
        assert sweeper.stdout is not None
        assert sweeper.stdout.readline() == "uploading\n"
        started = time.monotonic()
        with Uploader(folder, remote, rank=0, world_size=1, generation=2) as uploader:
            assert time.monotonic() - started < LOCK_WAIT_S / 2
            assert uploader.wait_for_predecessor(timeout_s=30)
            sweeper.communicate(timeout=30)
        assert sweeper.returncode == 0
    finally:
        sweeper.kill()
        sweeper.communicate()
    result = verified(remote)
    assert (result.findings, result.num_committed, result.num_shards_read) == ([], 2, 2)


def test_the_lock_of_an_idle_rank_is_released_while_another_is_finished(
    trainers: Trainers, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer may start at any time, and nobody would check whether it wants its lock."""
    trainers.die(folder, remote, 1, rank=0, world_size=2)
    trainers.die(folder, remote, rank=1, world_size=2)
    upload, free = Engine._upload, []

    async def look(self: Engine, action: Any) -> None:
        lock = RankLock(Folder(folder), 1)
        lock.acquire()
        lock.release()
        free.append(1)
        await upload(self, action)

    monkeypatch.setattr(Engine, "_upload", look)
    report = asyncio.run(drain(folder, timeout_s=30, grace_s=0))
    assert free == [1]
    assert [each.in_use_by for each in report.ranks] == ["", ""]


def test_a_lock_is_released_while_the_store_does_not_respond(
    trainers: Trainers, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeper waits a minute for an unavailable store; a starting trainer gives up on its lock sooner."""
    trainers.die(folder, remote, 1)
    is_opening = threading.Event()

    class Away(MemoryStore):
        async def open(self, **_: Any) -> None:
            is_opening.set()
            await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(
            "ckpt_async.sweep.drain.connect", lambda _, __, settings, **___: PatientStore(Away(), settings)
        )
        reports: list[SweepReport] = []
        adopting = threading.Thread(target=lambda: reports.append(sweep(folder)))
        adopting.start()
        assert is_opening.wait(30)
        lock = RankLock(Folder(folder), 0)
        lock.acquire(wait_s=LOCK_WAIT_S / 3, is_trainer=True)
        adopting.join(30)
        lock.release()
    assert ranks_of(reports[0])[0].in_use_by == "a trainer that has started"
    assert [each.checkpoint.step for each in ranks_of(sweep(folder))[0].committed] == [1]


@pytest.mark.fault("F2")
def test_the_next_sweep_finishes_after_a_kill_at_any_moment(
    trainers: Trainers, folder: Path, remote: str
) -> None:
    """SIGKILL strikes while it adopts, uploads, commits or prunes, and again."""
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed={seed}")
    rng = random.Random(seed)
    trainers.die(folder, remote, *range(1, 8), sealed=(1, 2, 3, 4, 5, 7))
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    lives = "".join(f"{rng.uniform(0.03, 0.35)}\n" for _ in range(10))
    ends = zygote.communicate(lives, timeout=60)[0].split()
    assert len(ends) == 10
    assert set(ends) <= {"0", "9"}
    assert "9" in ends, "none was killed"
    report = sweep(folder, remote_retention="last=2")
    assert report.is_clean
    result = verified(remote)
    assert (result.findings, result.num_committed, result.num_shards_read) == ([], 2, 2)
    assert is_finished(folder)
    left = sorted(each.name for each in (Path(remote.removeprefix("file://")) / "ckpt").iterdir())
    assert left == ["step-5.g1", "step-7.g1"]


def test_a_policy_without_a_kind_is_told_unless_a_remote_could_not_be_seen(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote, missing = f"file://{tmp_path}/remote", f"file://{tmp_path}/missing"
    with Uploader(tmp_path / "folder", remote, kind="weights", rank=0, world_size=1):
        pass

    def told(*remotes: str, kind: str = "wieghts") -> bool:
        caplog.clear()
        report = run(Sweeper([], remotes, kind_retention={kind: "last=1"}).sweep(is_dry_run=True))
        assert any(each.error for each in report.remotes) == (missing in remotes)
        return "keep_unused no remote has checkpoints of kind" in caplog.text

    assert told(remote)
    assert not told(remote, kind="weights")
    assert not told(remote, missing)
