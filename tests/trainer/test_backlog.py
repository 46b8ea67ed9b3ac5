"""When uploads fall behind or the disk runs low: wait, raise, or give up older checkpoints of which no rank has
delivered anything, but never silently.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from ckpt_async import CheckpointAbortedError, Uploader
from ckpt_async.core import decide, keys, records
from ckpt_async.core.local_state import LocalCheckpoint
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.errors import BacklogError, SettingsError
from ckpt_async.local.folder import Folder
from tests.stores.memory import CAPABILITIES, MemoryBucket, MemoryStore
from tests.stores.misbehaving import Meddled, Slow
from tests.trainer.uploads import Open, decisions, wait_until, write

SIZE_BYTES = 1000


class Stuck(Slow):
    """A store to which shards do not arrive until `go` is set, except those of step 0 once `lets_0` is set. Several may
    share a bucket.
    """

    def __init__(self, bucket: MemoryBucket | None = None) -> None:
        super().__init__()
        self.lets_0, self.has_begun_0 = threading.Event(), threading.Event()
        if bucket is not None:
            self.bucket = bucket
            self._store = MemoryStore(bucket, url="memory://test", capabilities=CAPABILITIES)

    async def before(self, operation: str, key: str) -> None:
        if operation == "put" and key.startswith("ckpt/step-0."):
            self.has_begun_0.set()
            while not (self.lets_0.is_set() or self.go.is_set()):
                await asyncio.sleep(0.002)
        else:
            await super().before(operation, key)


class Blocked(logging.Handler):
    """Records when a trainer was held up."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come, self.num = threading.Event(), 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("trainer_blocked"):
            self.num += 1
            self.has_come.set()


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    handler = Blocked()
    logging.getLogger("ckpt_async.trainer.waits").addHandler(handler)
    yield handler
    logging.getLogger("ckpt_async.trainer.waits").removeHandler(handler)


def save(uploader: Uploader, step: int, **metrics: float) -> None:
    uploader.enqueue(write(uploader, f"step-{step}/a.pt", b"x" * SIZE_BYTES), step)
    uploader.seal(step, metrics=metrics)


def begin(uploader: Uploader, store: Stuck) -> None:
    """Save step 0, and wait until it is being sent: then it is finished before any other."""
    save(uploader, 0)
    assert store.has_begun_0.wait(10)


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def blocked_s(uploader: Uploader) -> float:
    for line in generate_latest(uploader.metrics).decode().splitlines():
        if line.startswith("ckpt_async_trainer_blocked_seconds_total"):
            return float(line.rpartition(" ")[2])
    raise AssertionError("no such metric")


def outcomes(store: Meddled) -> dict[int, str]:
    return {id_.step: outcome for id_, outcome in decisions(store).items()}


def known(uploader: Uploader) -> Mapping[CheckpointId, LocalCheckpoint]:
    """Return what the engine has taken note of."""
    return uploader._engine.view().local.checkpoints


def is_stored(uploader: Uploader, id_: CheckpointId) -> bool:
    found = known(uploader).get(id_)
    return found is not None and all(each.stored is not None for each in found.shards.values())


BOUNDS = [{"max_backlog_checkpoints": 2}, {"max_backlog_bytes": 2 * SIZE_BYTES}]


def test_a_rank_that_is_behind_says_what_it_still_has_to_send(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "REPORT_OWED_S", 0.1)
    store, key = Stuck(), keys.owed_key(1, 0)

    def told() -> set[int]:
        there = store.bucket.objects.get(key)
        return {each.step for each in records.decode_owed(there.data)} if there else set()

    with opened(store, generation=1) as uploader:
        begin(uploader, store)
        for step in (1, 2):
            save(uploader, step)
        wait_until(lambda: told() == {0, 1, 2}, uploader)
        store.go.set()


# --- block, raise ------------------------------------------------------------------------------------------


@pytest.mark.fault("O9")
@pytest.mark.parametrize("bound", BOUNDS)
def test_block_waits_until_there_is_room(opened: Open, blocked: Blocked, bound: dict[str, int]) -> None:
    """There must be one warning, the time must be counted, and nothing lost; shards of a checkpoint in progress
    always go in.
    """
    store = Stuck()
    with opened(store, **bound) as uploader:
        save(uploader, 1)
        uploader.enqueue(write(uploader, "step-2/a.pt", b"x" * SIZE_BYTES), 2)
        uploader.enqueue(write(uploader, "step-2/b.pt", b"x"), 2)
        uploader.seal(2)
        assert blocked_s(uploader) < 0.1
        thread, errors = in_thread(lambda: save(uploader, 3))
        assert blocked.has_come.wait(10)
        assert thread.is_alive()
        assert not uploader._checkpoints.is_begun(3)
        wait_until(lambda: blocked_s(uploader) > 0.5, uploader)
        assert thread.is_alive(), "it is told while it lasts: an alert must not need its end"
        store.go.set()
        thread.join(10)
        assert not thread.is_alive()
        uploader.wait(3, timeout_s=10)
        assert (errors, blocked.num) == ([], 1)
        assert blocked_s(uploader) > 0
    assert outcomes(store) == {1: "commit", 2: "commit", 3: "commit"}


@pytest.mark.parametrize("bound", BOUNDS)
def test_raise_raises_at_once_and_enqueues_nothing(opened: Open, bound: dict[str, int]) -> None:
    store = Stuck()
    with opened(store, on_backlog="raise", **bound) as uploader:
        save(uploader, 1)
        save(uploader, 2)
        with pytest.raises(BacklogError, match="max_backlog"):
            save(uploader, 3)
        assert not uploader._checkpoints.is_begun(3)
        store.go.set()
        uploader.wait(2, timeout_s=10)
        uploader.wait(1, timeout_s=10)
        save(uploader, 3)
        uploader.wait(3, timeout_s=10)
    assert outcomes(store) == {1: "commit", 2: "commit", 3: "commit"}


def test_blocking_times_out_with_an_error_and_is_counted(opened: Open) -> None:
    """A store that is gone for good must not stop training for good."""
    store = Stuck()
    with opened(store, max_backlog_checkpoints=1, block_timeout_s=0.3) as uploader:
        save(uploader, 1)
        started = time.monotonic()
        with pytest.raises(BacklogError, match="1 checkpoints are waiting"):
            save(uploader, 2)
        assert 0.3 <= time.monotonic() - started < 5
        assert blocked_s(uploader) >= 0.3
        store.go.set()


def test_too_low_a_bandwidth_cap_causes_a_backlog(opened: Open, blocked: Blocked) -> None:
    """The cap that leaves bandwidth to training must slow down saving rather than fill the disk."""
    store = Meddled()
    with opened(store, max_backlog_checkpoints=1, max_bytes_per_s=5 * SIZE_BYTES) as uploader:
        started = time.monotonic()
        for step in range(1, 5):
            save(uploader, step)
        assert time.monotonic() - started > 0.3
        assert blocked.num >= 2
    assert outcomes(store) == dict.fromkeys(range(1, 5), "commit")


# --- what is no backlog ------------------------------------------------------------------------------------


def test_a_checkpoint_that_waits_for_another_rank_is_not_backlog(opened: Open) -> None:
    """Otherwise a dead rank would stall all the others in `enqueue`, where no one looks for the cause."""
    store = Meddled()
    settings = {"rank": 0, "world_size": 2, "generation": 1, "on_error": "warn"}  # which never comes
    with opened(store, max_backlog_checkpoints=1, block_timeout_s=0, **settings) as uploader:
        for step in (1, 2, 3):
            save(uploader, step)
            id_ = CheckpointId(1, step)
            wait_until(lambda id_=id_: (found := known(uploader).get(id_)) and found.has_receipt, uploader)  # type: ignore[misc]
    assert outcomes(store) == {}


def test_an_unsealed_checkpoint_is_not_backlog(opened: Open) -> None:
    """Its shards are in the store, and only the thread that would be held up can seal it."""
    store = Meddled()
    with opened(store, max_backlog_checkpoints=1, block_timeout_s=0) as uploader:
        uploader.enqueue(write(uploader, "step-1/a.pt"), 1)
        id_ = CheckpointId(uploader.generation, 1)
        wait_until(lambda: is_stored(uploader, id_), uploader)
        save(uploader, 2)
        uploader.seal(1)
    assert outcomes(store) == {1: "commit", 2: "commit"}


def test_a_lost_checkpoint_is_not_backlog(opened: Open, tmp_path: Path) -> None:
    """Without conditional writes, another rank has to give up the checkpoint; this one can only wait for that."""
    store = Stuck()
    store._store = MemoryStore(
        store.bucket, url="memory://test", capabilities=replace(CAPABILITIES, conditional_put=False)
    )
    settings = {"rank": 1, "world_size": 2, "generation": 1, "on_error": "warn"}
    with opened(store, max_backlog_checkpoints=1, block_timeout_s=0, **settings) as uploader:
        path = write(uploader, "step-1/a.pt", b"first")
        uploader.enqueue(path, 1)
        with path.open("r+b") as file:
            file.write(b"of another size")
        uploader.seal(1)
        store.go.set()
        lost = CheckpointId(1, 1)
        wait_until(lambda: lost in known(uploader) and known(uploader)[lost].loss is not None, uploader)
        save(uploader, 2)
    assert (
        store.asked.total() < 200
    )  # it had looked for its receipt, which it has never written, again and again


# --- supersede ---------------------------------------------------------------------------------------------


def test_supersede_gives_up_what_is_older_than_the_target(
    opened: Open, blocked: Blocked, caplog: pytest.LogCaptureFixture
) -> None:
    """The best, every tenth and the one that is being sent are kept, and training is never held up."""
    store = Stuck()
    policy = "last=1,every-steps=10,best=1:loss:min"
    settings = {"on_backlog": "supersede", "max_backlog_checkpoints": 4, "remote_retention": policy}
    with opened(store, **settings) as uploader:
        begin(uploader, store)
        for step, loss in ((5, 0.9), (10, 0.8), (15, 0.1), (17, 0.7), (20, 0.6), (23, 0.5)):
            save(uploader, step, loss=loss)
        store.lets_0.set()
        for step in (5, 17):
            with pytest.raises(CheckpointAbortedError, match="superseded by newer checkpoints"):
                uploader.wait(step, timeout_s=10)
        save(uploader, 24, loss=0.6)
        assert (blocked.num, blocked_s(uploader)) == (0, pytest.approx(0, abs=0.2))
        store.go.set()
        for step in (10, 15, 20, 23, 24):
            uploader.wait(step, timeout_s=10)
        lines = generate_latest(uploader.metrics).decode().splitlines()
        assert [each[-4:] for each in lines if 'result="superseded"' in each] == [" 2.0"]
    assert outcomes(store) == {5: "abort", 17: "abort", **dict.fromkeys((0, 10, 15, 20, 23, 24), "commit")}
    assert not store.keys("ckpt/step-5.") + store.keys("ckpt/step-17.")
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert sum("checkpoint_superseded" in each for each in said) == 2


@pytest.mark.parametrize(("keep", "is_there"), [(-1, True), (1, False), (3, False)])
def test_local_files_of_superseded_checkpoints_are_removed_unless_all_are_kept(
    opened: Open, keep: int, is_there: bool
) -> None:
    """Superseding is meant to free disk space too, but -1 promises that no local file is ever touched."""
    store = Stuck()
    settings = {"on_backlog": "supersede", "max_backlog_checkpoints": 2, "num_checkpoints_to_keep": keep}
    with opened(store, remote_retention="last=1", **settings) as uploader:
        begin(uploader, store)
        for step in (1, 2, 3):
            save(uploader, step)
        store.lets_0.set()
        with pytest.raises(CheckpointAbortedError):
            uploader.wait(1, timeout_s=10)
        gone = CheckpointId(uploader.generation, 1)
        wait_until(lambda: gone not in known(uploader), uploader)
        assert (uploader.folder / "step-1/a.pt").exists() == is_there
        assert all((uploader.folder / f"step-{step}/a.pt").exists() for step in (2, 3))
        store.go.set()


@pytest.mark.parametrize("shares_policy", [True, False])
def test_superseding_on_one_rank_aborts_on_all(opened: Open, tmp_path: Path, shares_policy: bool) -> None:
    """There is one decision per checkpoint, whichever rank fell behind. The other rank's files go, too, if it has
    the same policy.
    """
    bucket = MemoryBucket()
    behind, other = Stuck(bucket), Stuck(bucket)
    policy = {"on_backlog": "supersede", "max_backlog_checkpoints": 2, "remote_retention": "last=1"}
    ranks = {"world_size": 2, "generation": 1, "num_checkpoints_to_keep": 5}
    with ExitStack() as stack:
        first = stack.enter_context(opened(behind, tmp_path / "0", rank=0, **ranks, **policy))
        shared = {**policy, "max_backlog_checkpoints": 0} if shares_policy else {"on_disk_low": "block"}
        second = stack.enter_context(opened(other, tmp_path / "1", rank=1, **ranks, **shared))
        both = (first, second)
        for uploader, store in zip(both, (behind, other), strict=True):
            begin(uploader, store)
        for step in (1, 2, 3):
            for uploader in both:
                save(uploader, step)
        for store in (behind, other):
            store.lets_0.set()
        with pytest.raises(CheckpointAbortedError, match="rank 0: superseded"):
            first.wait(1, timeout_s=10)
        for store in (behind, other):
            store.go.set()
        for uploader in both:
            uploader.wait(3, timeout_s=10)
            with pytest.raises(CheckpointAbortedError, match="rank 0: superseded"):
                uploader.wait(1, timeout_s=10)
            wait_until(lambda uploader=uploader: CheckpointId(1, 1) not in known(uploader), uploader)
        is_there = [(uploader.folder / "step-1/a.pt").exists() for uploader in both]
        assert is_there == [False, not shares_policy]
    assert outcomes(behind)[1] == "abort"
    assert outcomes(behind)[3] == "commit"


def test_what_another_rank_has_delivered_is_not_superseded(opened: Open, tmp_path: Path) -> None:
    """It may be nearly there: rank 1 has delivered its part of step 1, which rank 0 would give up."""
    bucket = MemoryBucket()
    behind, other = Stuck(bucket), Stuck(bucket)
    policy = {"on_backlog": "supersede", "max_backlog_checkpoints": 1, "remote_retention": "last=1"}
    ranks: dict[str, int] = {"world_size": 2, "generation": 1}
    with ExitStack() as stack:
        first = stack.enter_context(opened(behind, tmp_path / "0", rank=0, **ranks, **policy))
        second = stack.enter_context(opened(other, tmp_path / "1", rank=1, **ranks))
        other.go.set()
        for step in (0, 1):
            save(second, step)
            wait_until(lambda step=step: is_stored(second, CheckpointId(1, step)), second)
        begin(first, behind)
        for step in (1, 2, 3):
            save(first, step)
        save(second, 3)
        behind.lets_0.set()
        with pytest.raises(CheckpointAbortedError):
            first.wait(2, timeout_s=10)
        behind.go.set()
        for step in (1, 3):
            first.wait(step, timeout_s=10)


def test_superseding_a_backlog_requires_a_policy_that_removes_something() -> None:
    with pytest.raises(SettingsError, match="supersede"):
        Settings(on_backlog="supersede")
    assert Settings(on_backlog="supersede", remote_retention="last=1").on_backlog == "supersede"


# --- the disk ----------------------------------------------------------------------------------------------


class Disk:
    """A disk that reports the free space it is told to report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 10_000
        monkeypatch.setattr(Folder, "space", lambda folder: (self.space_of(folder), 20_000))

    def space_of(self, folder: Folder) -> int:
        return self.free_bytes


def test_low_disk_raises_or_blocks(
    opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blocked: Blocked
) -> None:
    disk, store = Disk(monkeypatch), Meddled()
    with opened(store, min_free_bytes=5000, on_disk_low="raise") as uploader:
        save(uploader, 1)
        disk.free_bytes = 4999
        with pytest.raises(BacklogError, match="min_free_bytes"):
            save(uploader, 2)
        disk.free_bytes = 5000
        save(uploader, 2)
    disk.free_bytes = 4000
    with opened(store, tmp_path / "second", min_free_bytes=5000, on_disk_low="block") as uploader:
        thread, errors = in_thread(lambda: save(uploader, 3))
        assert blocked.has_come.wait(10)
        assert thread.is_alive()
        disk.free_bytes = 6000
        thread.join(10)
        assert (thread.is_alive(), errors) == (False, [])
    assert outcomes(store) == {1: "commit", 2: "commit", 3: "commit"}


def test_low_disk_supersedes_no_more_than_needed(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is freed only a moment later, when the files are gone. Until then, no other checkpoint may be given up."""
    disk, store = Disk(monkeypatch), Stuck()

    def space_of(folder: Folder) -> int:
        # os.walk tolerates that the engine removes files and folders in the meantime.
        held = (names for where, _, names in os.walk(folder.path) if Path(where).name.startswith("step-"))
        return 9000 - 1000 * sum(map(len, held))

    with opened(store, min_free_bytes=5000, num_checkpoints_to_keep=1) as uploader:
        begin(uploader, store)
        for step in (1, 2, 3, 4):
            save(uploader, step)
        disk.space_of = space_of  # type: ignore[method-assign]
        store.lets_0.set()  # step 0 stays here until a newer one is committed, so 4000 are free
        with pytest.raises(CheckpointAbortedError):
            uploader.wait(1, timeout_s=10)
        store.go.set()
        for step in (2, 3, 4):
            uploader.wait(step, timeout_s=10)
    assert outcomes(store) == {1: "abort", **dict.fromkeys((0, 2, 3, 4), "commit")}


def test_a_save_that_would_not_fit_is_skipped(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By default, while others wait. Training goes on, the other ranks need not wait for it, and the next that fits
    is taken. Where nothing waits, a small disk skips nothing: this save is on it already.
    """
    disk, store = Disk(monkeypatch), Stuck()
    with opened(store, num_checkpoints_to_keep=1) as uploader:
        begin(uploader, store)
        disk.free_bytes = SIZE_BYTES - 1
        save(uploader, 2)
        with pytest.raises(CheckpointAbortedError, match="skipped"):
            uploader.wait(2, timeout_s=10)
        store.go.set()
        uploader.wait(0, timeout_s=10)
        save(uploader, 3)
        uploader.wait(3, timeout_s=10)
    assert outcomes(store) == {0: "commit", 2: "abort", 3: "commit"}
    assert sum("save_skipped" in each.getMessage() for each in caplog.records) == 1


def test_ranks_that_share_a_folder_share_its_disk(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They save at the same time: where this rank's save would fit, all of them together would not."""
    disk, store = Disk(monkeypatch), Stuck()
    with opened(store, num_checkpoints_to_keep=1) as uploader:
        begin(uploader, store)
        disk.free_bytes = 2 * SIZE_BYTES
        for rank in (1, 2):
            other = uploader.folder / f".ckpt-async/spool/rank-{rank:05}/000001-000000000000"
            other.mkdir(parents=True)
        save(uploader, 2)
        assert any("save_skipped" in each.getMessage() for each in caplog.records)
        store.go.set()
