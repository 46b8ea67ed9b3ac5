"""Where the engine runs must make no difference to a trainer, except when a process dies: then a process goes on."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from ckpt_async import (
    BacklogError,
    CheckpointAbortedError,
    CommitTimeoutError,
    FencedError,
    NoSpaceError,
    SettingsError,
    StoreError,
    Uploader,
    UploadFailedError,
)
from ckpt_async.core import json_log, keys
from ckpt_async.core.failures import Failure
from ckpt_async.core.local_state import Local, LocalCheckpoint
from ckpt_async.core.model import CheckpointId, Decided, Outcome
from ckpt_async.core.naming import MAX_SHARD_NAME_LENGTH
from ckpt_async.errors import FailureReason, FolderInUseError, RunnerError
from ckpt_async.local import journals
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import RankLock
from ckpt_async.runners import child, reports, wire
from ckpt_async.runners import process as process_module
from ckpt_async.runners import thread as thread_module
from ckpt_async.saver import CheckpointSaver
from ckpt_async.trainer.start import start_of
from ckpt_async.transfer.budgets import MAX_SERIES
from tests.ctrl_c import interrupted
from tests.faults.oracle import Oracle
from tests.faults.processes import Nursery, Trainer
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.trainer import write_shards
from tests.seaweed import SeaweedServer

QUICK = {
    "decision_poll_s": 0.02,
    "decision_poll_max_s": 0.2,
    "retry_initial_s": 0.01,
    "retry_max_s": 0.1,
    "close_grace_s": 0.0,
    "upload_timeout_s": 30.0,
}
PROCESS = QUICK | {"runner": "process"}
SHARDS = "run/ckpt/"
PATIENCE_S = 20.0

both = pytest.mark.parametrize("runner", ["thread", "process"])


@pytest.fixture(scope="module")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("trainers")) as nursery:
        yield nursery


@pytest.fixture
def nursery(_nursery: Nursery) -> Iterator[Nursery]:
    yield _nursery
    _nursery.kill_all()


@pytest.fixture
def proxy(s3_server: SeaweedServer, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy in front of the session's server. What is held is released at the end, so that runners can end too."""
    with FaultProxy(s3_server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy
        proxy.heal()


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    deadline = time.monotonic() + PATIENCE_S
    while left := runners(tmp_path):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"still there: {left}")
        time.sleep(0.02)


def runners(below: Path) -> list[int]:
    """Return the runner processes that have a journal or a lock below this folder open, according to the kernel."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"ckpt_async.runners.child" not in (process / "cmdline").read_bytes():
                continue
            opened = set()
            for each in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                    opened.add(os.readlink(each))
            if any(re.match(rf"{below}.*/(journal-\d+\.log|rank-\d+\.lock)", each) for each in opened):
                found.append(int(process.name))
    return sorted(found)


def wait_until(is_so: Callable[[], Any], what: str = "") -> Any:
    """Wait for a change in other processes, which can only be polled."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline, what or "not in time"
        time.sleep(0.01)
    return found


def save(uploader: Uploader, step: int, num_shards: int = 2, size_bytes: int = 5000) -> list[Path]:
    place = write_shards(uploader.folder, uploader.generation, step, uploader.rank, num_shards, size_bytes)
    uploader.enqueue(place, step)
    uploader.seal(step)
    return sorted(place.iterdir())


def counter(uploader: Uploader, name: str, label: str = "") -> float:
    lines = generate_latest(uploader.metrics.registry).decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if re.match(rf"ckpt_async_{name}[ {{]", line) and label in line
    )


def is_free(folder: Path, rank: int = 0) -> bool:
    lock = RankLock(Folder(folder), rank)
    try:
        lock.acquire()
    except FolderInUseError:
        return False
    lock.release()
    return True


# --- the same for both -----------------------------------------------------------------------------------------


@both
def test_checkpoints_are_committed_and_counted(runner: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Uploader(
        tmp_path / "folder", f"file://{root}", runner=runner, num_checkpoints_to_keep=1, **QUICK
    ) as uploader:
        assert uploader.generation == 1
        for step in (1, 2, 3):
            save(uploader, step)
        uploader.wait(3, timeout_s=PATIENCE_S)
        report = uploader.flush(PATIENCE_S)
        assert (report.is_done, report.steps_left) == (True, ())
        uploader.wait(1, timeout_s=1)  # also when it has left the journal
        assert not (uploader.folder / "step-1/rank-0/rank-0-0.pt").exists()
        assert os.readlink(uploader.folder / "latest-rank0") == "step-3/rank-0"
        wait_until(lambda: counter(uploader, "uploads_total", "ok") == 6)
        wait_until(lambda: counter(uploader, "checkpoints_committed_total") == 3)
        wait_until(lambda: counter(uploader, "upload_bytes_total") == 30_000)
        wait_until(lambda: counter(uploader, "pruned_checkpoints_total", "local") == 2)
        assert counter(uploader, "store_request_duration_seconds_count") > 0
        assert counter(uploader, "uploads_in_progress") == 0
        assert counter(uploader, "engine_restarts_total") == 0
        assert counter(uploader, "queue_files") == 0
        uploader.metrics.checkpoint_committed(0, 0.0)  # flush counts from here on
        save(uploader, 4)
        assert uploader.flush(PATIENCE_S).num_committed == 1
    assert json.loads((root / keys.LATEST).read_bytes())["step"] == 4
    assert is_free(tmp_path / "folder")


@both
def test_a_closed_uploader_still_says_what_became_of_a_checkpoint(runner: str, tmp_path: Path) -> None:
    """A saver reports its last saves after it has closed its uploader."""
    committed = []
    with CheckpointSaver(
        tmp_path / "folder",
        f"file://{tmp_path}/store",
        save_interval="1ba",
        runner=runner,
        on_committed=lambda checkpoint: committed.append(checkpoint.name),
    ) as saver:
        for batch in (1, 2):
            saver.step({"value": batch}, batch)
    assert committed == ["ep0-ba1", "ep0-ba2"]
    assert saver.uploader.is_committed(2)
    assert not saver.uploader.is_committed(3)


@both
def test_what_became_of_a_checkpoint_is_known_however_many_followed(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wait` without a timeout would never end for one that nobody remembers."""
    monkeypatch.setattr("ckpt_async.core.failures.MAX_OUTCOMES", 2)
    with Uploader(tmp_path / "folder", f"file://{tmp_path}/store", runner=runner, **QUICK) as uploader:
        uploader.give_up(1, "by the test")
        for step in range(2, 8):
            save(uploader, step)
            uploader.wait(step, PATIENCE_S)
        wait_until(lambda: len(uploader._engine.view().local.checkpoints) == 1)
        assert uploader.is_committed(2)
        uploader.wait(2)
        for call in (uploader.is_committed, uploader.wait):
            with pytest.raises(CheckpointAbortedError, match="step 1 was given up"):
                call(1)
    assert uploader.is_committed(2)


@both
def test_a_failure_after_the_commit_that_has_healed_is_not_raised(runner: str, tmp_path: Path) -> None:
    """There is nothing that a trainer could do about it any more."""
    remote, options = f"file://{tmp_path}/store", QUICK | {"composer_symlink": "place/latest.symlink"}
    with Uploader(tmp_path / "folder", remote, runner=runner, **options) as uploader:
        place = tmp_path / "store/place"
        place.write_text("a file, where the pointer needs a folder")
        save(uploader, 1)
        wait_until(lambda: uploader._engine.view().failures)
        with pytest.raises(UploadFailedError, match="Not a directory"):
            uploader.raise_failures()
        save(uploader, 2)
        wait_until(lambda: uploader._engine.view().failures)
        place.unlink()
        assert uploader.flush(PATIENCE_S).is_done
        wait_until(lambda: not uploader._engine.view().failing)
        assert uploader._engine.view().failures
        uploader.raise_failures()
    assert "step-2.g1" in (place / "latest.symlink").read_text()


@both
def test_closing_lets_go_of_the_folder_whatever_fails(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = Uploader(tmp_path / "folder", f"file://{tmp_path}/store", runner=runner, **QUICK)
    end = uploader._engine.end

    def failing(deadline: float) -> None:
        end(deadline)
        raise MemoryError

    monkeypatch.setattr(uploader._engine, "end", failing)
    with pytest.raises(MemoryError):
        uploader.close()
    assert is_free(tmp_path / "folder")


@both
def test_an_uploader_that_cannot_be_opened_to_the_end_lets_go_of_the_folder(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine has started by then, and nobody else could end it."""
    arguments = tmp_path / "folder", f"file://{tmp_path}/store"
    start, before = threading.Thread.start, threading.enumerate()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("ckpt-async-callback"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Uploader(*arguments, runner=runner, on_event=print, **QUICK)
    assert is_free(tmp_path / "folder")
    assert not [each.name for each in threading.enumerate() if each not in before]
    Uploader(*arguments, runner=runner, **QUICK).close()


def test_a_runner_says_why_it_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the trainer would wait two minutes for an answer, and then not know the reason."""

    def full(*_: Any, **__: Any) -> None:
        raise NoSpaceError("the file system is full")

    monkeypatch.setattr(child, "Folder", full)
    arguments = dict.fromkeys(("kind", "generation", "launch_id", "store_options", "settings_file"))
    start = start_of(
        tmp_path / "folder", f"file://{tmp_path}/store", rank=0, world_size=1, settings={}, **arguments
    )

    async def answers() -> list[Any]:
        ours, theirs = wire.Channel.pair()
        ours.socket.settimeout(PATIENCE_S)
        child._Process().begin(theirs.socket)
        with (tmp_path / "lock").open("w") as lock:
            ours.send("start", start, logging.NOTSET, descriptors=(lock.fileno(),))
        return [await asyncio.to_thread(ours.receive) for _ in range(3)]

    here, refused, end = asyncio.run(answers())
    assert (here, end) == (["here", os.getpid(), wire.VERSION], None)
    assert refused[0] == "refused"
    error = wire.error_from(refused[1])
    assert (type(error), str(error)) == (NoSpaceError, "the file system is full")
    held = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert str(tmp_path / "lock") not in held


@both
def test_startup_errors_are_raised_unchanged(runner: str, tmp_path: Path, s3_url: str) -> None:
    """Errors must be raised at construction, in the trainer's own thread, unchanged, and leave nothing behind."""
    missing = s3_url.replace("s3://", "s3://no-such-bucket-")
    with pytest.raises(StoreError) as caught:
        Uploader(tmp_path / "folder", missing, runner=runner, **QUICK)
    assert caught.value.reason is FailureReason.NOT_FOUND
    remote = f"file://{tmp_path}/store"
    for _ in range(2):
        with Uploader(tmp_path / "folder", remote, runner=runner, **QUICK) as uploader:
            pass
    assert uploader.generation == 2
    with pytest.raises(FencedError, match="generation 2 has already started"):
        Uploader(tmp_path / "folder", remote, generation=1, runner=runner, **QUICK)
    with pytest.raises(SettingsError, match="already used by rank 0"):
        Uploader(tmp_path / "folder", remote, generation=2, runner=runner, **QUICK)
    assert is_free(tmp_path / "folder")


@both
def test_a_store_unavailable_at_the_start_is_reported_and_waited_for(
    runner: str, proxy: FaultProxy, s3_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistyped endpoint must not look like a trainer that hangs, and a restart of the store must not end the job."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    proxy.add(Fault("reset"))
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(
            Uploader, tmp_path / "folder", f"{s3_url}/run", runner=runner, runner_nice=7, **QUICK
        )
        try:
            wait_until(lambda: "store_not_opened" in caplog.text)
            assert not opening.done()
            for pid in runners(tmp_path):
                assert os.getpriority(os.PRIO_PROCESS, pid) == niceness, "the trainer waits for it"
        finally:
            proxy.heal()
        opening.result(PATIENCE_S).close()
    assert len(re.findall("store_not_opened url=.* trying_for_s=60", caplog.text)) == 1


@both
def test_ctrl_c_ends_the_opening_of_a_store_that_does_not_respond(
    runner: str, proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    """It waited for the engine, which waited for the store."""
    has_ended = threading.Event()
    proxy.add(Fault("hold"))

    def interrupt() -> bool:
        proxy.wait_for(lambda: proxy.num_under_way > 0)
        os.kill(os.getpid(), signal.SIGINT)
        has_ended_itself = has_ended.wait(PATIENCE_S)
        proxy.heal()
        return has_ended_itself

    with ThreadPoolExecutor(1) as threads:
        interrupting = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            Uploader(tmp_path / "folder", f"{s3_url}/run", runner=runner, **QUICK)
        has_ended.set()
        assert interrupting.result()
    assert is_free(tmp_path / "folder")


def test_ctrl_c_within_a_call_to_the_runner_keeps_no_lock(tmp_path: Path) -> None:
    """That of a future stayed held: every later call, on any thread, waited for ever, `close` and the exit too."""
    with Uploader(tmp_path / "folder", f"file://{tmp_path}/store", on_error="warn", **PROCESS) as uploader:

        def call() -> None:
            view = uploader._engine.view()
            view.hurry(True)
            view.turn_to_newest()
            view.fresh_local()
            view.wake()

        for number in range(1, 2_000):
            error = interrupted(call, number)
            calling = threading.Thread(target=call, daemon=True)
            calling.start()
            calling.join(PATIENCE_S)
            assert not calling.is_alive(), f"point {number}"
            if error is None:
                break
        assert number > 20


def test_ctrl_c_before_the_engine_has_begun_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_class, may_go_on = thread_module._LoopThread, threading.Event()
    begin, cancel = threads_class.begin, threads_class.cancel

    def interrupted(thread: Any, runner: Any) -> None:
        thread._loop.result().call_soon_threadsafe(may_go_on.wait)
        begin(thread, runner)
        raise KeyboardInterrupt

    def cancel_and_go_on(thread: Any, runner: Any) -> None:
        cancel(thread, runner)
        may_go_on.set()

    monkeypatch.setattr(threads_class, "begin", interrupted)
    monkeypatch.setattr(threads_class, "cancel", cancel_and_go_on)
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(Uploader, tmp_path / "folder", f"file://{tmp_path}/store", **QUICK)
        with pytest.raises(KeyboardInterrupt):
            opening.result(PATIENCE_S)
    assert is_free(tmp_path / "folder")


@pytest.mark.fault("F22")
def test_byte_threads_are_niced_unless_somebody_waits(tmp_path: Path, proxy: FaultProxy, s3_url: str) -> None:
    """On a busy node, the last seconds went into waiting for a core: a niced thread cannot undo that."""
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def priorities(pid: int) -> list[int]:
        """Return the priorities of the process's threads, that of the event loop first."""
        found = []
        for thread in [pid, *(int(each) for each in os.listdir(f"/proc/{pid}/task") if int(each) != pid)]:
            with contextlib.suppress(ProcessLookupError):
                found.append(os.getpriority(os.PRIO_PROCESS, thread))
        return found

    def is_polite(pid: int) -> bool:
        loop, *others = priorities(pid)
        return loop == own and own + 7 in others and os.sched_getscheduler(pid) == os.SCHED_BATCH

    def is_quick(pid: int) -> bool:
        return priorities(pid).count(own) > num_quick and os.sched_getscheduler(pid) == os.SCHED_OTHER

    with Uploader(tmp_path / "folder", f"{s3_url}/run", runner_nice=7, **PROCESS) as uploader:
        (runner,) = wait_until(lambda: runners(tmp_path / "folder"))
        proxy.add(Fault("hold", "PUT", SHARDS))
        save(uploader, 1, size_bytes=300_000)
        proxy.wait_for(lambda: proxy.num_under_way > 0)
        wait_until(lambda: is_polite(runner), "no thread is nice")
        # The loop's thread, and those that transfer records: there are no others while shards are held.
        num_quick = priorities(runner).count(own)
        save(uploader, 2, size_bytes=300_000)
        flushing = threading.Thread(target=uploader.flush, args=(PATIENCE_S,))
        flushing.start()
        proxy.wait_for(lambda: proxy.num_under_way > 2)  # those of step 1 were broken off, but are held
        wait_until(lambda: is_quick(runner), "a flush is nice")
        proxy.release()
        flushing.join(PATIENCE_S)
        proxy.add(Fault("hold", "PUT", SHARDS))
        save(uploader, 3, size_bytes=300_000)
        wait_until(lambda: is_polite(runner), "nice once only")
        proxy.release()
    assert {each.step for each in Oracle(f"{s3_url}/run", 1, size_bytes=300_000).look()} == {1, 2, 3}


@both
def test_a_superseded_trainer_is_fenced(runner: str, tmp_path: Path) -> None:
    """R11."""
    remote = f"file://{tmp_path}/store"
    with (
        Uploader(tmp_path / "old", remote, runner=runner, **QUICK) as old,
        Uploader(tmp_path / "new", remote, runner=runner, **QUICK),
    ):
        save(old, 1)
        old.wait(1, timeout_s=PATIENCE_S)
        with pytest.raises(FencedError, match="generation 2 of this run has started"):
            wait_until(lambda: old.seal(int(time.monotonic_ns() % 10**9)))
        assert counter(old, "fenced") == 1


@both
def test_a_final_failure_is_raised_once_and_retried(
    runner: str, tmp_path: Path, proxy: FaultProxy, s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R12. Its log records must appear in the trainer's own logging."""
    with Uploader(
        tmp_path / "folder", f"{s3_url}/run", runner=runner, **QUICK | {"upload_timeout_s": 1.0}
    ) as uploader:
        proxy.add(Fault("unavailable", "PUT", SHARDS))
        save(uploader, 1, num_shards=1)
        with pytest.raises(UploadFailedError, match="generation 1 step 1, shard"):
            uploader.wait(1)
        with pytest.raises(UploadFailedError, match=r"shard 'rank-0-0\.pt'.*ckpt-async drain"):
            wait_until(uploader.raise_failures)
        uploader.raise_failures()  # raised once
        assert "shard_failed" in caplog.text
        assert counter(uploader, "upload_attempt_failures_total", "throttled") > 1
        proxy.heal()
        uploader.close(timeout_s=0)
    with Uploader(tmp_path / "folder", f"{s3_url}/run", runner=runner, **QUICK) as uploader:
        assert uploader.wait_for_predecessor(PATIENCE_S)


@both
def test_closing_in_vain_says_what_the_store_has_answered(
    runner: str, tmp_path: Path, proxy: FaultProxy, s3_url: str
) -> None:
    """Whoever reads only the exception would look for a slow network."""
    uploader = Uploader(
        tmp_path / "folder", f"{s3_url}/run", runner=runner, **QUICK | {"upload_timeout_s": 2.0}
    )
    with contextlib.closing(uploader):
        proxy.add(Fault("unavailable", "PUT", SHARDS))
        save(uploader, 1, num_shards=1)
        with pytest.raises(UploadFailedError, match="SlowDown"):  # the shard's own time may run out first
            uploader.close()


@both
def test_wait_names_what_is_missing_or_lost(
    runner: str, tmp_path: Path, proxy: FaultProxy, s3_url: str
) -> None:
    proxy.add(Fault("hold", "PUT", SHARDS))
    with Uploader(
        *(tmp_path / "folder", f"{s3_url}/run"),
        **QUICK | {"runner": runner, "rank": 0, "world_size": 3, "generation": 1, "on_error": "warn"},
    ) as uploader:
        save(uploader, 1, size_bytes=3 << 20)
        with pytest.raises(CommitTimeoutError, match="0 of 2 shards of this rank are uploaded"):
            uploader.wait(1, timeout_s=0.2)
        paths = save(uploader, 2)
        with paths[0].open("r+b") as file:
            file.write(b"another")
        os.utime(paths[0], ns=(1, 1))
        wait_until(lambda: proxy.num_under_way >= 1)
        proxy.release()
        with pytest.raises(CheckpointAbortedError, match="changed after it was enqueued"):
            uploader.wait(2, timeout_s=PATIENCE_S)

        def waits_for_the_others() -> bool:
            with pytest.raises(CommitTimeoutError) as caught:
                uploader.wait(1, timeout_s=0.2)
            return "nothing has arrived from rank 1, 2 yet" in str(caught.value)

        wait_until(waits_for_the_others)
        assert not uploader.flush(0.1).is_done


@both
def test_a_backlog_blocks_until_there_is_room(
    runner: str, tmp_path: Path, proxy: FaultProxy, s3_url: str
) -> None:
    proxy.add(Fault("hold", "PUT", SHARDS))
    with Uploader(
        *(tmp_path / "folder", f"{s3_url}/run"),
        **QUICK | {"runner": runner, "max_backlog_checkpoints": 2, "block_timeout_s": 0.3},
    ) as uploader:
        save(uploader, 1)
        save(uploader, 2)
        with pytest.raises(BacklogError, match="2 checkpoints are waiting"):
            save(uploader, 3)
        proxy.release()
        uploader.wait(2, timeout_s=PATIENCE_S)
        uploader.flush(PATIENCE_S)
        save(uploader, 4)


@both
def test_forked_workers_and_other_threads(runner: str, tmp_path: Path) -> None:
    """Many threads save at once; a fork of the trainer does no harm, whatever it calls."""
    with Uploader(tmp_path / "folder", f"file://{tmp_path}/store", runner=runner, **QUICK) as uploader:
        places = [write_shards(uploader.folder, 1, step, 0, 2) for step in range(8)]

        def work(step: int) -> None:
            uploader.enqueue(places[step], step)
            uploader.seal(step)

        threads = [threading.Thread(target=work, args=(step,)) for step in range(8)]
        for thread in threads:
            thread.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about exactly this
            worker = os.fork()
        if worker == 0:
            uploader.close()
            os._exit(0)
        assert os.waitpid(worker, 0)[1] == 0
        for thread in threads:
            thread.join(PATIENCE_S)
        for step in range(8):
            uploader.wait(step, timeout_s=PATIENCE_S)


# --- somebody dies ---------------------------------------------------------------------------------------------


def start(nursery: Nursery, folder: Path, remote: str, **more: Any) -> Trainer:
    launch = {"CKPT_ASYNC_LAUNCH_ID": os.urandom(8).hex()}
    settings = PROCESS | more.pop("settings", {})
    arguments = {"rank": 0, "world_size": 1, "steps": []} | more
    return nursery.start("saves", launch, folder=str(folder), remote=remote, settings=settings, **arguments)


def test_the_runner_finishes_a_killed_trainers_sealed_checkpoints_and_exits(
    nursery: Nursery, tmp_path: Path, proxy: FaultProxy, s3_url: str
) -> None:
    """The newest checkpoint is often the one that was being uploaded when the trainer was killed."""
    folder, remote = tmp_path / "folder", f"{s3_url}/run"
    proxy.add(Fault("hold", "PUT", SHARDS))
    trainer = start(nursery, folder, remote, steps=[1, 2])
    trainer.expect("saved")
    proxy.wait_for(lambda: proxy.num_under_way > 0)
    (runner,) = runners(folder)
    assert os.getsid(runner) not in (os.getsid(trainer.pid), os.getsid(0)), "a Ctrl-C would reach it"
    assert os.getpgid(runner) != os.getpgid(trainer.pid)
    trainer.kill()
    assert not is_free(folder), "nobody else may touch what it works on"
    proxy.release()
    wait_until(lambda: not runners(folder))
    assert is_free(folder)
    assert {each.step for each in Oracle(remote, 1).look()} == {1, 2}
    assert (folder / "latest-rank0").is_symlink()


def test_a_restarted_trainer_gets_the_folder_at_once(
    nursery: Nursery, tmp_path: Path, proxy: FaultProxy, s3_url: str
) -> None:
    folder, remote = tmp_path / "folder", f"{s3_url}/run"
    proxy.add(Fault("hold", "PUT", SHARDS))
    trainer = start(nursery, folder, remote, steps=[1])
    trainer.expect("saved")
    proxy.wait_for(lambda: proxy.num_under_way > 0)
    (lingering,) = runners(folder)
    trainer.kill()
    again = start(nursery, folder, remote, steps=[2])
    again.expect("opened 2", timeout_s=10)
    (runner,) = wait_until(lambda: [each for each in runners(folder) if each != lingering])
    wait_until(lambda: runners(folder) == [runner])
    proxy.release()
    again.expect("saved")
    again.tell("wait 2")
    again.expect("done")
    again.tell("stop")
    assert again.finish() == 0
    assert {(each.generation, each.step) for each in Oracle(remote, 1).look()} == {(1, 1), (2, 2)}


@pytest.mark.parametrize("how", ["linger_s", "SIGTERM", "folder removed"])
def test_the_runner_does_not_linger_for_ever(
    nursery: Nursery, tmp_path: Path, proxy: FaultProxy, s3_url: str, how: str
) -> None:
    """A store that is unavailable must not keep processes on a node; what is left is in the journal."""
    folder, remote = tmp_path / "folder", f"{s3_url}/run"
    proxy.add(Fault("hold", "PUT", SHARDS))
    linger_s = 0.5 if how == "linger_s" else 3600.0
    trainer = start(nursery, folder, remote, steps=[1], settings={"linger_s": linger_s})
    trainer.expect("saved")
    proxy.wait_for(lambda: proxy.num_under_way > 0)
    (runner,) = runners(folder)
    if how == "SIGTERM":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(runner, number)  # the launcher signals all processes; while the trainer lives, it decides
        trainer.tell("wait 1 0.2")
        trainer.expect("error CommitTimeoutError")
        assert runners(folder) == [runner]
    trainer.kill()
    if how == "folder removed":
        shutil.rmtree(folder)
        wait_until(lambda: not runners(tmp_path))
        return
    wait_until(lambda: not runners(folder))
    proxy.release()
    with Uploader(folder, remote, **PROCESS) as uploader:
        assert uploader.wait_for_predecessor(PATIENCE_S)
    assert {each.step for each in Oracle(remote, 1).look()} == {1}


def test_the_runner_of_a_dead_trainer_waits_for_ranks_of_other_nodes(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Otherwise nobody on this node would learn of the commit."""
    folder, remote, launch_id = tmp_path / "folder", f"file://{tmp_path}/run", os.urandom(8).hex()
    settings = PROCESS | {"close_grace_s": PATIENCE_S}
    trainer = nursery.start(
        "saves",
        {"CKPT_ASYNC_LAUNCH_ID": launch_id},
        folder=str(folder),
        remote=remote,
        settings=settings,
        rank=0,
        world_size=2,
        steps=[1],
    )
    trainer.expect("saved")
    wait_until((tmp_path / "run" / keys.receipt_key(CheckpointId(1, 1), 0)).exists)
    with Uploader(tmp_path / "other", remote, rank=1, world_size=2, launch_id=launch_id, **QUICK) as other:
        trainer.kill()
        wait_until(lambda: "trainer_died" in "".join(each.read_text() for each in folder.rglob("*.log")))
        save(other, 1)
        other.wait(1, timeout_s=PATIENCE_S)
    wait_until(lambda: not runners(folder))
    assert (folder / "latest-rank0").is_symlink()


def test_a_dead_runner_is_restarted_and_nothing_is_lost(
    tmp_path: Path, proxy: FaultProxy, s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An out-of-memory kill hits the largest process; training does not even notice."""
    folder, remote = tmp_path / "folder", f"{s3_url}/run"
    with Uploader(folder, remote, **PROCESS) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=PATIENCE_S)
        proxy.add(Fault("hold", "PUT", SHARDS))
        save(uploader, 2)
        proxy.wait_for(lambda: proxy.num_under_way > 0)
        (first,) = runners(folder)
        flushed: list[Any] = []
        flushing = threading.Thread(target=lambda: flushed.append(uploader.flush(PATIENCE_S)))
        flushing.start()
        os.kill(first, signal.SIGKILL)
        save(uploader, 3)  # while there is no runner
        assert not is_free(folder), "a sweeper must not take it for a dead trainer's"
        (second,) = wait_until(lambda: [each for each in runners(folder) if each != first])
        wait_until(lambda: counter(uploader, "engine_restarts_total") == 1)
        proxy.release()
        flushing.join(PATIENCE_S)
        assert [each.is_done for each in flushed] == [True]
        os.kill(second, signal.SIGKILL)  # idle
        wait_until(lambda: counter(uploader, "engine_restarts_total") == 2)
        save(uploader, 4)
        for step in (1, 2, 3, 4):
            uploader.wait(step, timeout_s=PATIENCE_S)
        assert uploader.generation == 1
        wait_until(lambda: counter(uploader, "uploads_in_progress") == 0)
    assert {each.step for each in Oracle(remote, 1).look()} == {1, 2, 3, 4}
    assert caplog.text.count("runner_died") == 2


@pytest.mark.parametrize(
    ("lasts_s", "pauses"), [(3600.0, ["0.2", "0.4", "0.8"]), (0.0, ["0.2", "0.2", "0.2"])]
)
def test_a_runner_that_dies_again_and_again_is_restarted_less_and_less_often(
    lasts_s: float,
    pauses: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This must hold however far it got before it died; and the log must say where to look for the reason."""
    monkeypatch.setattr(process_module, "LASTS_S", lasts_s)
    folder, killed = tmp_path / "folder", set[int]()
    with Uploader(folder, f"file://{tmp_path}/store", **PROCESS) as uploader:
        for number in (1, 2, 3):
            (runner,) = wait_until(lambda: [each for each in runners(folder) if each not in killed])
            wait_until(lambda: counter(uploader, "engine_restarts_total") == number - 1)  # noqa: B023
            save(uploader, number)
            uploader.wait(number, timeout_s=PATIENCE_S)  # it works
            killed.add(runner)
            os.kill(runner, signal.SIGSEGV)
        wait_until(lambda: counter(uploader, "engine_restarts_total") == 3)
        said = re.findall(r"runner_died rank=0; restarting in (\S+) s; see (\S+)", caplog.text)
        assert [pause for pause, _ in said] == pauses
        wait_until(lambda: [each for each in runners(folder) if each not in killed])
    assert {str(folder) in path for _, path in said} == {True}


def test_closing_while_the_runner_is_dead_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "RESTART_S", 3600.0)
    monkeypatch.setattr(process_module, "RESTART_MAX_S", 3600.0)
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/store"
    with Uploader(folder, remote, **PROCESS) as uploader:
        (runner,) = wait_until(lambda: runners(folder))
        os.kill(runner, signal.SIGKILL)
        wait_until(lambda: counter(uploader, "engine_restarts_total") == 1)
        save(uploader, 1)
        uploader.close(timeout_s=0.1)
    with Uploader(folder, remote, **PROCESS) as uploader:
        assert uploader.wait_for_predecessor(PATIENCE_S)
    assert {each.step for each in Oracle(remote, 1).look()} == {1}


@pytest.mark.fault("F53")
def test_a_hung_runner_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` must keep to its timeout, whatever is wrong with the process, and leave no process behind."""
    monkeypatch.setattr(process_module, "STOP_TIMEOUT_S", 0.2)
    folder = tmp_path / "folder"
    with Uploader(folder, f"file://{tmp_path}/store", **PROCESS) as uploader:
        (runner,) = wait_until(lambda: runners(folder))
        os.kill(runner, signal.SIGSTOP)
        save(uploader, 1)
        uploader.close(timeout_s=0.1)
    wait_until(lambda: not runners(folder))
    assert is_free(folder)


@pytest.mark.fault("F53")
@pytest.mark.parametrize("is_shared", [False, True])
def test_close_does_not_wait_again_for_a_stopped_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """After 6 s in vain, `close(6)` took another 5 to 7 s to find out that the process was stopped."""
    for name in ("STOP_TIMEOUT_S", "PING_TIMEOUT_S"):
        monkeypatch.setattr(process_module, name, 1.5)
    folder, settings = tmp_path / "folder", PROCESS | {"node_shared": is_shared, "on_error": "warn"}
    with Uploader(folder, f"file://{tmp_path}/store", **settings) as uploader:
        (runner,) = wait_until(lambda: runners(folder))
        os.kill(runner, signal.SIGSTOP)
        save(uploader, 1)
        began = time.monotonic()
        uploader.close(timeout_s=3.0)
        assert time.monotonic() - began < 4.2
    wait_until(lambda: not runners(folder))


@pytest.mark.fault("F53")
@pytest.mark.parametrize("timeout_s", [None, 0.0])
def test_a_runner_that_could_not_read_for_a_while_learns_what_the_trainer_wants(
    timeout_s: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy node it may be starved; then `close` took `upload_timeout_s`, or killed it."""
    folder = tmp_path / "folder"
    with Uploader(folder, f"file://{tmp_path}/store", **PROCESS | {"upload_timeout_s": 3600.0}) as uploader:
        (runner,) = wait_until(lambda: runners(folder))
        os.kill(runner, signal.SIGSTOP)
        try:
            place = write_shards(folder, uploader.generation, 1, 0, 2)
            for _ in range(3000):  # more than fits into the socket
                uploader.enqueue(place, 1)
            uploader.seal(1)
            closing = threading.Thread(target=uploader.close, args=(timeout_s,))
            closing.start()
            engine = uploader._engine
            wait_until(lambda: engine.runner._is_ended.is_set() if timeout_s == 0.0 else engine._waiting)
        finally:
            os.kill(runner, signal.SIGCONT)
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
    assert "runner_stuck" not in caplog.text
    assert uploader.is_committed(1) or timeout_s == 0.0


@pytest.mark.fault("F53")
def test_a_hung_shared_runner_is_killed_and_the_other_ranks_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise its locks would keep out the next launch until somebody killed it."""
    monkeypatch.setattr(process_module, "STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(process_module, "PING_TIMEOUT_S", 0.2)
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/store"
    shared = PROCESS | {"node_shared": True, "world_size": 2, "generation": 1}
    # It may learn of the newer launch before the commit, even while it closes.
    with Uploader(folder, remote, rank=1, on_error="warn", **shared) as other:
        with Uploader(folder, remote, rank=0, **shared) as uploader:
            (runner,) = wait_until(lambda: runners(folder))
            os.kill(runner, signal.SIGSTOP)
            save(uploader, 1)
            uploader.close(timeout_s=0.1)
        assert "runner_hangs" in caplog.text
        wait_until(lambda: runner not in runners(folder))
        save(other, 1)  # by then, a newer launch might have superseded it
        with Uploader(folder, remote, rank=0, **shared | {"generation": 2}) as again:
            assert wait_until(lambda: runners(folder)) != [runner]
            with contextlib.suppress(FencedError):
                other.wait(1, timeout_s=PATIENCE_S)
            assert again.wait_for_predecessor(PATIENCE_S)
    assert {each.step for each in Oracle(remote, 2).look()} == {1}


@pytest.mark.fault("F53")
def test_a_hung_rank_in_a_shared_runner_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "STOP_TIMEOUT_S", 0.0)  # as if it had not received the request
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/store"
    shared = PROCESS | {"node_shared": True, "world_size": 2, "generation": 1}
    with Uploader(folder, remote, rank=1, **shared):
        before = wait_until(lambda: runners(folder))
        Uploader(folder, remote, rank=0, **shared).close()
        assert runners(folder) == before
    assert "runner_hangs" not in caplog.text


def test_a_runner_that_ends_while_it_is_asked_whether_it_hangs_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "STOP_TIMEOUT_S", 0.0)
    asked = []

    def answers(runner: process_module.ProcessRunner) -> bool:
        asked.append(runner)
        runner._thread.join(PATIENCE_S)
        return False

    monkeypatch.setattr(process_module.ProcessRunner, "_answers", answers)
    Uploader(tmp_path / "folder", f"file://{tmp_path}/store", **PROCESS | {"node_shared": True}).close()
    assert asked
    assert "runner_hangs" not in caplog.text


@pytest.mark.fault("F53")
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_runner_killed_while_it_starts_is_restarted(
    tmp_path: Path, proxy: FaultProxy, s3_url: str, is_shared: bool
) -> None:
    """Memory may run out when training starts; and this trainer must keep its place in the generation."""
    folder, remote = tmp_path / "folder", f"{s3_url}/run"
    proxy.add(Fault("hold", "GET", "generations"))
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(Uploader, folder, remote, node_shared=is_shared, **PROCESS)
        try:
            proxy.wait_for(lambda: proxy.num_under_way > 0)
            (runner,) = wait_until(lambda: runners(folder))
            os.kill(runner, signal.SIGKILL)
        finally:
            proxy.heal()
        with opening.result(PATIENCE_S) as uploader:
            assert uploader.generation == 1
            save(uploader, 1)
            uploader.wait(1, timeout_s=PATIENCE_S)


@pytest.mark.fault("F53")
def test_a_runner_always_killed_while_it_starts_is_reported(
    tmp_path: Path, proxy: FaultProxy, s3_url: str
) -> None:
    folder = tmp_path / "folder"
    proxy.add(Fault("hold", "PUT"))
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(Uploader, folder, f"{s3_url}/run", **PROCESS)
        while not opening.done():
            for each in runners(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            time.sleep(0.01)
        with pytest.raises(RunnerError, match="ended before it"):
            opening.result()
    assert is_free(folder)


def test_a_runner_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package was upgraded while a node's process lingered, or between two launches of a process."""
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/store"
    with monkeypatch.context() as upgraded:
        upgraded.setattr(wire, "VERSION", wire.VERSION + 1)
        with pytest.raises(RunnerError, match="another version"):
            Uploader(folder, remote, **PROCESS)
    Uploader(folder, remote, **PROCESS).close()  # waits until that process has released the folder


def test_sigterm_to_the_trainer_flushes(nursery: Nursery, tmp_path: Path) -> None:
    """With the handler of `sigterm_flush_s`; the launcher signals every process of the allocation."""
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/store"
    trainer = start(nursery, folder, remote, settings={"sigterm_flush_s": 30.0})
    trainer.expect("saved")
    (runner,) = runners(folder)
    trainer.tell("save 1")
    trainer.expect("done save 1")
    for pid in (trainer.pid, runner):
        os.kill(pid, signal.SIGTERM)
    assert trainer.finish() == -signal.SIGTERM
    assert {each.step for each in Oracle(remote, 1).look()} == {1}


def test_a_forked_worker_that_outlives_the_trainer_keeps_nothing_open(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Otherwise the runner would never learn that its trainer is dead."""
    folder, fifo = tmp_path / "folder", tmp_path / "fifo"
    os.mkfifo(fifo)
    trainer = nursery.start(
        "forks",
        {"CKPT_ASYNC_RUNNER": "process"},
        folder=str(folder),
        remote=f"file://{tmp_path}/store",
        how="os.fork",
        fifo=str(fifo),
    )
    with fifo.open("w"):
        worker = int(trainer.expect("child pid").split()[-1])
        trainer.kill()
        wait_until(lambda: not runners(folder))
        os.kill(worker, 0)  # it is still there
        assert is_free(folder)
    wait_until(lambda: not Path(f"/proc/{worker}").exists())


# --- how it is started -----------------------------------------------------------------------------------------


def test_the_trainers_script_is_not_run_again_and_torch_is_not_loaded(tmp_path: Path) -> None:
    """`if __name__ == "__main__"` is not needed, and modules beside the script must not interfere."""
    (tmp_path / "json.py").write_text("raise ImportError('not the one of the standard library')")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys; beside = sys.path.pop(0)\n"
        "import torch\n"
        "from ckpt_async import Uploader\n"
        "print('run', flush=True)\n"
        f"folder, remote = {str(tmp_path / 'folder')!r}, 'file://{tmp_path}/store'\n"
        "uploader = Uploader(folder, remote, runner='process')\n"
        "print('opened', flush=True)\n"
        "sys.stdin.read()\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert trainer.stdout is not None
    assert trainer.stdin is not None
    assert [trainer.stdout.readline() for _ in range(2)] == ["run\n", "opened\n"]
    (runner,) = wait_until(lambda: runners(tmp_path / "folder"))
    loaded = Path(f"/proc/{runner}/maps").read_text()
    assert "torch" in Path(f"/proc/{trainer.pid}/maps").read_text()
    assert "torch" not in loaded
    ours = {os.readlink(f"/proc/{trainer.pid}/fd/{number}") for number in range(3)}
    assert not ours & {os.readlink(f"/proc/{runner}/fd/{number}") for number in range(3)} - {"/dev/null"}
    children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
    assert children == [], "there would be somebody to reap"
    trainer.stdin.close()  # the script does not close the uploader: exit does
    assert trainer.wait(PATIENCE_S) == 0
    assert trainer.stdout.read() == ""
    trainer.stdout.close()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("what", ["no interpreter", "no package"])
def test_a_runner_that_cannot_be_started_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, is_shared: bool
) -> None:
    remote = f"file://{tmp_path}/store"
    with monkeypatch.context() as patch:
        if what == "no interpreter":
            patch.setattr(sys, "executable", "/nonexistent/python")
            expected = "cannot be started: .*/nonexistent/python"
        else:
            patch.setattr(sys, "path", [])
            expected = "ended before it was ready: .*No module named 'ckpt_async'|No module named"
        with pytest.raises(RunnerError, match=f"(?s){expected}"):
            Uploader(tmp_path / "folder", remote, node_shared=is_shared, **PROCESS)
    with Uploader(tmp_path / "folder", remote, node_shared=is_shared, **PROCESS) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=PATIENCE_S)


def test_an_interpreter_that_hangs_is_killed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network disk that does not respond, for example."""
    folder, hangs = tmp_path / "folder", f"import time  # {tmp_path}\ntime.sleep(60)"
    monkeypatch.setattr(process_module, "_BOOTSTRAP", hangs)
    monkeypatch.setattr(process_module, "SPAWN_TIMEOUT_S", 0.5)
    with pytest.raises(RunnerError, match="has not started within"):
        Uploader(folder, f"file://{tmp_path}/store", **PROCESS)
    assert is_free(folder)

    def is_there(process: Path) -> bool:
        with contextlib.suppress(OSError):
            return str(tmp_path).encode() in (process / "cmdline").read_bytes()
        return False

    wait_until(lambda: not any(map(is_there, Path("/proc").glob("[0-9]*"))))


def test_a_runner_without_descriptors_for_its_lock_says_so_and_closes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that is closed twice may be another thread's by then."""
    open_, shared, opened = os.open, PROCESS | {"node_shared": True}, []

    def scarce(path: Any, *arguments: Any, **more: Any) -> int:
        if str(path).endswith("node.lock"):
            opened.append(path)
            if len(opened) == 2:
                raise OSError(errno.EMFILE, "Too many open files")
        return open_(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", scarce)
        with pytest.raises(RunnerError, match="Too many open files"):
            Uploader(tmp_path / "folder", f"file://{tmp_path}/store", **shared)
    Uploader(tmp_path / "folder", f"file://{tmp_path}/store", **shared).close()


def test_contradicting_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="node_shared=True needs runner='process'"):
        Uploader(tmp_path / "folder", f"file://{tmp_path}/store", node_shared=True)


# --- one for the node ------------------------------------------------------------------------------------------


def test_ranks_share_one_runner_and_its_limits_and_take_turns(
    tmp_path: Path, proxy: FaultProxy, s3_url: str
) -> None:
    """A rank with many shards must not keep the others waiting; together they make no more requests than allowed."""
    folder, remote = tmp_path / "folder", f"{s3_url}/run"
    shared = PROCESS | {"node_shared": True, "num_concurrent_uploads": 2, "max_concurrent_uploads": 2}
    with contextlib.ExitStack() as stack:
        opened: list[Uploader] = []

        def open_rank(rank: int) -> None:
            uploader = Uploader(folder, remote, rank=rank, world_size=3, generation=1, **shared)
            opened.append(stack.enter_context(uploader))

        threads = [threading.Thread(target=open_rank, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        ranks = sorted(opened, key=lambda each: each.rank)
        assert len(runners(folder)) == 1
        proxy.add(Fault("hold", "PUT", SHARDS))
        # Each is too large to share a turn with others (`transfer.SMALL_BYTES`).
        save(ranks[0], 1, num_shards=20, size_bytes=300_000)
        proxy.wait_for(lambda: proxy.num_under_way == 2)
        save(ranks[1], 1, num_shards=1, size_bytes=300_000)
        save(ranks[2], 1, num_shards=1, size_bytes=300_000)
        wait_until(lambda: all(each._engine.view().fresh_local().checkpoints for each in ranks))
        proxy.most_under_way = 0
        proxy.release()
        for each in ranks:
            each.wait(1, timeout_s=PATIENCE_S)
        sent = [each.key for each in proxy.exchanges if each.method == "PUT" and SHARDS in each.key]
        assert len(sent) == 22
        places = [index for index, key in enumerate(sent) if "/rank-0-" not in key]
        assert max(places) < 15, f"the small ranks had to wait: {sent}"
        for each in ranks:
            wait_until(
                lambda each=each: counter(each, "uploads_total", "ok") == (20 if each.rank == 0 else 1)
            )
        opened[0].close()
        save(opened[1], 2)  # the process stays for the others, whichever rank started it
        assert opened[1].flush(1.0).num_shards_left == 0
        assert len(runners(folder)) == 1
    assert not (folder / ".ckpt-async/rank-00000.log").exists()


def test_a_shared_runner_outlives_its_starter_and_is_restarted_when_it_dies(
    nursery: Nursery, tmp_path: Path
) -> None:
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/store"
    settings = {"node_shared": True, "close_grace_s": 2.0}

    def start_rank(rank: int, steps: list[int], launch: str) -> Trainer:
        return nursery.start(
            "saves",
            {"CKPT_ASYNC_LAUNCH_ID": launch},
            folder=str(folder),
            remote=remote,
            rank=rank,
            world_size=2,
            steps=steps,
            settings=PROCESS | settings,
        )

    first = start_rank(0, [1], "first")
    first.expect("saved")
    second = start_rank(1, [1], "first")
    second.expect("saved")
    (runner,) = runners(folder)
    first.kill()
    second.tell("wait 1")
    second.expect("done wait 1")
    assert runners(folder) == [runner], "it serves the other rank"
    os.kill(runner, signal.SIGKILL)
    second.tell("save 2")
    second.expect("done save 2")
    (_another,) = wait_until(lambda: [each for each in runners(folder) if each != runner])
    second.kill()
    again = [start_rank(rank, [3], "second") for rank in range(2)]
    for trainer in again:
        trainer.expect("saved")
        trainer.tell("wait 3")
    for trainer in again:
        trainer.expect("done wait 3")
        trainer.tell("stop")
        assert trainer.finish() == 0
    assert {(each.generation, each.step) for each in Oracle(remote, 2).look()} >= {(1, 1), (2, 3)}


def test_only_this_user_reaches_the_process_of_a_node(tmp_path: Path) -> None:
    """Whoever connects has it open folders and stores."""
    node_socket = wire.NodeSocket(tmp_path)
    with node_socket.listen():
        assert (tmp_path / "node.sock").stat().st_mode & 0o777 == 0o600
    node_socket.close()


def test_each_wish_of_a_trainer_reaches_the_engine_when_it_changes() -> None:
    told: list[Any] = []
    engine: Any = SimpleNamespace(
        hurry=lambda is_hurried: told.append(("hurry", is_hurried)),
        turn_to_newest=lambda: told.append("newest"),
        look_for_members=lambda: told.append("look"),
        wake=lambda: 1,
    )

    async def main() -> None:
        ours, theirs = wire.Channel.pair()
        rank = child._Rank(ours, child._Process())
        for wants, heard in (
            (wire.Wants(1), []),
            (wire.Wants(2, num_turns_to_newest=1), ["newest"]),
            (wire.Wants(3, num_turns_to_newest=1, num_looks=1), ["look"]),
            (
                wire.Wants(4, num_hurries=1, num_turns_to_newest=1, num_looks=1),
                [("hurry", True), ("hurry", False)],
            ),
            (
                wire.Wants(5, num_hurries=1, is_hurried=True, num_turns_to_newest=1, num_looks=1),
                [("hurry", True)],
            ),
        ):
            told.clear()
            rank._serve_wants(engine, wants)
            assert told == heard, wants
        ours.close()
        theirs.close()

    asyncio.run(main())


def test_fields_that_are_too_long_do_not_keep_a_line_of_the_log_from_the_trainer() -> None:
    """A packet is limited, and 10,000 ranks may be named."""

    async def main() -> None:
        ours, theirs = wire.Channel.pair()
        rank = child._Rank(ours, child._Process())
        for length, is_kept in ((10, True), (wire.MAX_PACKET_BYTES, False)):
            record = logging.LogRecord("ckpt_async.x", logging.INFO, "", 0, "text", None, None)
            fields = "event", {"ranks": "x" * length}
            setattr(record, json_log.FIELDS, fields)
            assert rank.log(record, "text")
            message = theirs.receive()
            assert message is not None
            assert message[:4] == ["log", logging.INFO, "ckpt_async.x", "text"]
            assert (message[4] is not None) is is_kept
        ours.close()
        theirs.close()

    asyncio.run(main())


def test_of_many_launches_the_newest_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By them a wiped remote is told from the one that a folder belongs to."""
    monkeypatch.setattr("ckpt_async.core.recovery.NUM_EARLIER", 2)
    for _ in range(4):
        with Uploader(tmp_path / "folder", f"file://{tmp_path}/run", **QUICK):
            pass
    opened = journals.read(tmp_path / "folder")[0].local().opened
    assert opened is not None
    assert list(opened.nonces) == [2, 3, 4]


def test_what_was_kept_of_another_remote_is_the_users(tmp_path: Path) -> None:
    """Its steps would be mistaken for those of the new one, and its files, or the new ones, deleted as the oldest."""
    folder = tmp_path / "folder"

    def train(name: str, num_to_keep: int, *steps: int) -> None:
        settings: Any = QUICK | {"num_checkpoints_to_keep": num_to_keep}
        with Uploader(folder, f"file://{tmp_path}/{name}", **settings) as uploader:
            for step in steps:
                path = folder / f"{name}-{step}.bin"
                path.write_bytes(b"x")
                uploader.enqueue(path, step)
                uploader.seal(step)
                uploader.wait(step, timeout_s=PATIENCE_S)

    train("old", -1, 5, 6)
    train("new", 1)
    assert journals.read(folder)[0].local().newest_committed is None
    train("new", 1, 1, 2)
    assert sorted(each.name for each in folder.glob("*.bin")) == ["new-2.bin", "old-5.bin", "old-6.bin"]


def test_a_report_that_does_not_fit_into_a_packet_is_sent_as_several() -> None:
    """The packet was cut short if every list in it was full, and the trainer failed for good: it was no JSON."""
    id_ = CheckpointId(999_999, 999_999_999_999)
    ranks = list(range(1000, 1000 + reports.MAX_MISSING))
    engine: Any = SimpleNamespace(
        fenced_by=7,
        store_error="e" * 2000,
        absent_ranks=ranks,
        num_due=10_000,
        last_seen_wake=10_000,
        failing=frozenset((CheckpointId(1, step), "LookForSuccessor") for step in range(reports.MAX_FAILING)),
        local=Local(0, checkpoints={each: LocalCheckpoint(each, "n") for each in [id_]}),
        missing_ranks=lambda _: ranks,
    )
    ours, theirs = wire.Channel.pair()
    received: list[dict[str, Any]] = []

    def tell(report: dict[str, Any]) -> bool:
        assert ours.send("report", report)
        message = theirs.receive()
        assert message is not None
        received.append(message[1])
        return True

    loop: Any = None  # needed only for a report that is sent later
    with contextlib.closing(ours), contextlib.closing(theirs):
        told = reports.Reports(tell, lambda: engine, loop)
        told.is_hurried = True
        series = [10 + number / 7 for number in range(MAX_SERIES)]
        told.facts.observed.extend(("requests_finished", "put", series) for _ in range(reports.MAX_FACTS))
        decided = reports.told(Decided(id_, Outcome.ABORT, "n" * 100, "r" * 2000))
        told._decided.extend([decided] * reports.MAX_DECIDED)
        failure = Failure(UploadFailedError("e" * 2000), id_, "s" * MAX_SHARD_NAME_LENGTH, "LookForSuccessor")
        told._failures.extend([wire.failure_fields(failure)] * reports.MAX_SENT_FAILURES)
        told.note_wake(10_000, 10_000)
        told.send()
    assert [sum(len(each[name]) for each in received) for name in ("observed", "decided", "failures")] == [
        reports.MAX_FACTS,
        reports.MAX_DECIDED,
        reports.MAX_SENT_FAILURES,
    ]
    assert [each["num_read"] for each in received] == [1] + [0] * (len(received) - 1)


@pytest.mark.parametrize("letter", ["e", "é", "\N{GRINNING FACE}", "\udce9"])
def test_the_largest_report_fits_into_a_packet(letter: str) -> None:
    """A larger report would be retried forever, or be cut short."""
    facts = reports._Facts(lambda: None)
    while len(facts.observed) < reports.MAX_FACTS:  # of series that are truncated
        facts.requests_finished("put", [10 + number / 7 for number in range(MAX_SERIES)])
        facts.uploads_ended(MAX_SERIES)
        facts.uploads_started(MAX_SERIES)
    id_ = CheckpointId(999_999, 999_999_999_999)
    report = {
        "observed": list(facts.observed)[: reports.MAX_FACTS],
        "decided": [reports.told(Decided(id_, Outcome.ABORT, "n" * 100, letter * 2000))]
        * reports.MAX_DECIDED,
        "failures": [
            wire.failure_fields(
                Failure(
                    UploadFailedError(letter * 2000), id_, "s" * MAX_SHARD_NAME_LENGTH, "LookForSuccessor"
                )
            )
        ]
        * reports.MAX_SENT_FAILURES,
        "store_error": wire.shortened(letter * 2000, reports.MAX_ERROR_BYTES),
        "failing": [(id_, "LookForSuccessor")] * reports.MAX_FAILING,
        "missing": [(id_, list(range(1000, 1000 + reports.MAX_MISSING)))] * reports.MAX_MISSING,
    }
    packet = wire.encode("report", report)
    assert len(packet) < wire.MAX_PACKET_BYTES
    text = json.loads(packet)[1]["failures"][0]["error"]["text"]
    assert text[:1] == letter or not letter.isprintable()
