"""The last seconds before a node goes away: `flush`, and SIGTERM with a time budget."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.records import decode_decision
from ckpt_async.engine import in_flight
from ckpt_async.engine import loop as engine_module
from ckpt_async.trainer.preemption import flush_on_sigterm
from tests.stores.misbehaving import Meddled, Slow
from tests.trainer.uploads import Open, decisions, wait_until, write


class Ordered(Slow):
    """Holds shards until `go` is set. `came` records in which order their uploads began."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[int] = []

    async def before(self, operation: str, key: str) -> None:
        if operation == "put" and (parsed := keys.parse_data_key(key)):
            self.came.append(parsed[0].step)
        await super().before(operation, key)


def save(uploader: Uploader, step: int, *names: str, is_sealed: bool = True) -> None:
    for name in names or ("a.pt",):
        uploader.enqueue(write(uploader, f"step-{step}/{name}", b"x" * 1000), step)
    if is_sealed:
        uploader.seal(step)


def outcomes(store: Meddled) -> dict[int, str]:
    return {id_.step: outcome for id_, outcome in decisions(store).items()}


# --- flush -------------------------------------------------------------------------------------------------


def test_the_newest_complete_checkpoint_goes_first(opened: Open) -> None:
    """Older checkpoints may be queued or even being uploaded; a newer one that is not sealed is useless."""
    store = Ordered()
    with opened(store, num_concurrent_uploads=1) as uploader:
        save(uploader, 1)
        assert store.has_come.wait(10)
        for step in (2, 3):
            save(uploader, step)
        save(uploader, 4, is_sealed=False)
        reports: list[Any] = []
        flushing = threading.Thread(target=lambda: reports.append(uploader.flush(10)))
        flushing.start()
        wait_until(lambda: len(store.came) > 1, uploader)
        assert store.came == [1, 3]
        store.go.set()
        uploader.wait(1, timeout_s=10)
        flushing.join(15)
        assert store.came[:4] == [1, 3, 2, 1]
        (report,) = reports
        assert (report.num_committed, report.num_shards_left, report.steps_left) == (3, 0, (4,))
        assert not report.is_done, "4 is not sealed: it cannot be in the store"
        uploader.seal(4)
        assert uploader.flush(10).is_done
    assert outcomes(store) == dict.fromkeys((1, 2, 3, 4), "commit")


def test_the_newest_checkpoint_has_the_full_bandwidth_until_sent(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes over even if all were being uploaded. A checkpoint saved during the flush must not stop it, or none
    would ever be sent.
    """
    store = Ordered()
    monkeypatch.setattr(in_flight, "SERIES_BYTES", 500)  # smaller ones share the link
    with opened(store, num_concurrent_uploads=8) as uploader:
        save(uploader, 1)
        wait_until(lambda: store.came == [1], uploader)
        save(uploader, 2)
        flushing = threading.Thread(target=uploader.flush, args=(20,))
        flushing.start()
        wait_until(lambda: store.came == [1, 2] and store.held == 1, uploader)
        save(uploader, 3)
        seen = uploader._engine.view().num_rounds
        wait_until(lambda: uploader._engine.view().num_rounds > seen + 2, uploader)
        assert ({*store.came}, store.held) == ({1, 2}, 1)
        store.go.set()
        flushing.join(15)
        assert store.came[2:] == [3, 1]
    assert outcomes(store) == dict.fromkeys((1, 2, 3), "commit")


@pytest.mark.fault("F22")
def test_no_older_upload_begins_during_a_flush(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """This must hold even while the engine's loop waits for the disk, because seconds count."""
    store, is_stuck, has_stuck = Ordered(), threading.Event(), threading.Event()

    async def housekeep(_: Any) -> None:
        while is_stuck.is_set():
            has_stuck.set()
            await asyncio.sleep(0.002)

    monkeypatch.setattr(engine_module.Engine, "_housekeep", housekeep)
    with opened(store, num_concurrent_uploads=1) as uploader:
        engine: Any = uploader._engine.view()
        save(uploader, 1)
        assert store.has_come.wait(10)
        for step in (2, 3, 4):
            save(uploader, step)
        wait_until(lambda: len(engine.local.checkpoints) == 4 and len(engine._queue) == 3, uploader)
        is_stuck.set()
        engine.wake()
        assert has_stuck.wait(10)
        flushing = threading.Thread(target=uploader.flush, args=(20,))
        flushing.start()
        wait_until(
            lambda: engine.state.uploads.turn.sending == CheckpointId(uploader.generation, 4), uploader
        )
        store.go.set()
        wait_until(lambda: not engine._queue._num_uploading or len(store.came) > 1, uploader)
        is_stuck.clear()
        flushing.join(20)
        assert store.came == [1, 4, 3, 2, 1]


def test_flush_returns_at_once_when_there_is_nothing_to_do(opened: Open) -> None:
    store = Meddled()
    with opened(store) as uploader:
        save(uploader, 1)
        assert uploader.flush(30).is_done
        started = time.monotonic()
        report = uploader.flush(30)
        assert time.monotonic() - started < 0.9, "an idle engine was waited for"
        assert (report.is_done, report.num_committed, report.steps_left) == (True, 0, ())


def test_flush_keeps_its_budget_and_the_next_start_finishes_the_rest(opened: Open) -> None:
    """The store does not answer. Nothing is lost when the flush stops waiting."""
    store = Ordered()
    with opened(store, generation=1, num_concurrent_uploads=1) as uploader:
        save(uploader, 1)
        save(uploader, 2, "a.pt", "b.pt", "c.pt")
        started = time.monotonic()
        report = uploader.flush(0.5)
        assert 0.5 <= time.monotonic() - started < 1.5
        assert (report.is_done, report.num_committed, report.steps_left) == (False, 0, (1, 2))
        assert (report.num_shards_left, report.size_bytes_left) == (4, 4000)
        uploader.close(timeout_s=0)
    store.go.set()
    with opened(store, generation=2) as uploader:
        assert uploader.wait_for_predecessor(timeout_s=10)
    assert outcomes(store) == {1: "commit", 2: "commit"}


def test_a_missing_rank_uses_up_the_budget_but_no_more(opened: Open) -> None:
    """Our part is in the store; whether it is committed depends on the other rank."""
    store = Meddled()
    with opened(store, rank=0, world_size=2, generation=1, on_error="warn") as uploader:
        save(uploader, 1)
        started = time.monotonic()
        report = uploader.flush(0.5)
        assert 0.5 <= time.monotonic() - started < 1.5
        assert (report.is_done, report.num_shards_left, report.steps_left) == (False, 0, (1,))


def test_flush_does_not_wait_for_other_ranks_of_an_earlier_start(opened: Open, tmp_path: Path) -> None:
    """Rank 1 was killed before it saved step 1 and will never deliver it: every flush would use up its whole budget."""
    store = Meddled()
    with opened(store, rank=0, world_size=2, generation=1, on_error="warn") as uploader:
        save(uploader, 1)
    more = {"world_size": 2, "generation": 2}
    with opened(store, rank=0, **more) as first, opened(store, tmp_path / "other", rank=1, **more) as second:
        for rank, uploader in enumerate((first, second)):
            save(uploader, 2, f"{rank}.pt")
        first.wait(2, timeout_s=60)
        started = time.monotonic()
        report = first.flush(120)
        assert time.monotonic() - started < 60
        assert (report.is_done, report.num_shards_left, report.steps_left) == (False, 0, (1,))


# --- SIGTERM -----------------------------------------------------------------------------------------------

# Uploads wait for a flush (or forever, if told so). The script reports when it has saved, then computes until
# told to stop.
TRAINER = """
import asyncio, json, logging, os, select, signal, sys, threading, time
from pathlib import Path
from ckpt_async import Uploader
from ckpt_async.engine.loop import Engine

logging.basicConfig(level=logging.WARNING)
folder, remote, settings, how = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
may_go, upload, flush = threading.Event(), Engine._upload, Uploader.flush

async def waits(self, action):
    while how == "stuck" or not may_go.is_set():
        await asyncio.sleep(0.01)
    await upload(self, action)

def flushes(self, timeout_s):
    may_go.set()
    return flush(self, timeout_s)

def mine(number, frame):
    print("mine", uploader._checkpoints.is_sealed(1), flush=True)

Engine._upload, Uploader.flush = waits, flushes
if how.startswith("no threads"):
    start = threading.Thread.start

    def starts(self):
        if self.name == "ckpt-async-sigterm":
            may_go.set()
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(self)

    threading.Thread.start = starts
if how == "handler":
    signal.signal(signal.SIGTERM, mine)
if how == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
uploader = Uploader(folder, remote, rank=0, world_size=1, generation=1, **settings)
path = folder / "model.bin"
path.write_bytes(b"x" * 1000)
uploader.enqueue(path, 1)
uploader.seal(1)
if how == "fork":
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.write(write_end, b".")  # Python drops signals that come before this
        while True:
            time.sleep(0.01)  # loads data
    os.read(read_end, 1)
    os.kill(child, signal.SIGTERM)
    print("child", os.waitpid(child, 0)[1], may_go.is_set(), flush=True)
if how == "closed":
    may_go.set()
    closing = threading.Thread(target=uploader.close)
    closing.start()
    closing.join()
if how in ("closing", "no threads at exit"):
    expect_end = uploader._engine.runner.expect_end
    uploader._engine.runner.expect_end = lambda: (expect_end(), print("saved", flush=True))
    if how == "no threads at exit":
        sys.exit(3)
    uploader.close()
    print("closed", flush=True)
    sys.stdin.read()
print("saved", flush=True)
while True:
    # Python runs no handler of a signal that came just before a read that blocks.
    while not select.select([0], [], [], 0.05)[0]:
        pass
    if not sys.stdin.readline():
        break
    uploader.wait(1, timeout_s=30)
    print("committed", flush=True)
uploader.close()
"""


class Started:
    """A trainer that has saved."""

    def __init__(self, tmp_path: Path, how: str, **settings: Any) -> None:
        self.folder, self.stored = tmp_path / "folder", tmp_path / "run"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                TRAINER,
                str(self.folder),
                f"file://{self.stored}",
                json.dumps(settings),
                how,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = list(iter(self._line, "saved"))

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line or self.process.poll() is None, self.process.communicate()[1]
        return line

    def terminate(self) -> float:
        """Send SIGTERM, and return how long the process lived on."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Not `communicate`, which closes stdin at once: the trainer would then close its uploader.
            self.process.wait(20)
        self.errors = self.process.communicate(timeout=30)[1]
        return time.monotonic() - started

    def is_committed(self) -> bool:
        (found,) = list((self.stored / keys.DECISIONS).glob("*")) or [None]
        if found is None:
            return False
        id_ = keys.parse_decision_key(f"{keys.DECISIONS}{found.name}")
        assert id_ is not None
        return decode_decision(found.read_bytes(), id_).outcome.value == "commit"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    made: list[Started] = []

    def start(how: str, **settings: Any) -> Started:
        (tmp_path / "folder").mkdir()
        made.append(Started(tmp_path, how, **settings))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.communicate()


@pytest.mark.fault("F22")
def test_sigterm_flushes_and_then_ends_the_process_as_usual(started: Any) -> None:
    """The launcher sees signal 15, and the checkpoint is in the store. The budget is a limit, not a delay."""
    trainer = started("default", sigterm_flush_s=20.0)
    assert not trainer.is_committed()
    assert trainer.terminate() < 10
    assert trainer.process.returncode == -signal.SIGTERM
    assert trainer.is_committed()
    assert "sigterm_flushed report=FlushReport(is_done=True, num_committed=1" in trainer.errors


@pytest.mark.fault("F22")
def test_sigterm_with_an_unresponsive_store_ends_within_the_budget(started: Any) -> None:
    """SIGKILL follows after the budget; the next launch finishes what is left."""
    trainer = started("stuck", sigterm_flush_s=0.5)
    assert 0.5 <= trainer.terminate() < 1.5 + 1.0
    assert trainer.process.returncode == -signal.SIGTERM
    assert not trainer.is_committed()
    with Uploader(
        trainer.folder, f"file://{trainer.stored}", rank=0, world_size=1, generation=2, metrics_port=-1
    ) as uploader:
        assert uploader.wait_for_predecessor(timeout_s=20)
    assert trainer.is_committed()


def test_a_users_own_handler_decides_when_the_process_ends(started: Any) -> None:
    """Frameworks save and requeue in their handlers. It must run at once, every time, and the flush beside it."""
    trainer = started("handler", sigterm_flush_s=20.0)
    for _ in range(2):
        trainer.process.send_signal(signal.SIGTERM)
        assert trainer.process.stdout.readline() == "mine True\n"
    out, errors = trainer.process.communicate("go on\n", timeout=30)
    assert (out, trainer.process.returncode) == ("committed\n", 0)
    assert errors.count("sigterm_flushed") == 1
    assert trainer.is_committed()


def test_a_process_that_ignores_sigterm_is_not_ended(started: Any) -> None:
    """`nohup`-like wrappers ignore SIGTERM; the flush is useful all the same."""
    trainer = started("ignored", sigterm_flush_s=20.0)
    trainer.process.send_signal(signal.SIGTERM)
    out, errors = trainer.process.communicate("go on\n", timeout=30)
    assert (out, trainer.process.returncode) == ("committed\n", 0)
    assert "sigterm_flushed" in errors


def test_a_forked_worker_ends_at_once_and_flushes_nothing(started: Any) -> None:
    """Dataloader workers inherit the handler, and are ended by SIGTERM every epoch."""
    trainer = started("fork", sigterm_flush_s=20.0)
    assert trainer.said == [f"child {signal.SIGTERM.value} False"]
    trainer.terminate()
    assert "Traceback" not in trainer.errors


def test_an_uploader_closed_in_another_thread_does_not_delay_sigterm(started: Any) -> None:
    """Only the main thread may set handlers, but any thread may close the uploader."""
    trainer = started("closed", sigterm_flush_s=20.0)
    assert trainer.is_committed()
    trainer.terminate()
    assert trainer.process.returncode == -signal.SIGTERM
    assert "sigterm" not in trainer.errors


@pytest.mark.fault("F22")
def test_sigterm_during_close_flushes(started: Any) -> None:
    """Training is over and the last checkpoint is being uploaded: the one that matters most."""
    trainer = started("closing", sigterm_flush_s=20.0)
    trainer.terminate()
    assert trainer.process.returncode == -signal.SIGTERM
    assert trainer.is_committed()
    assert "sigterm_flushed report=FlushReport(is_done=True, num_committed=1" in trainer.errors
    assert "Traceback" not in trainer.errors


def test_sigterm_at_exit_without_another_thread_does_not_stop_the_upload(started: Any) -> None:
    """Python 3.12.0 and 3.12.1 start none then. The handler's error ended the upload."""
    trainer = started("no threads at exit", sigterm_flush_s=20.0)
    trainer.terminate()
    assert trainer.process.returncode == 3
    assert trainer.is_committed()
    assert "Traceback" not in trainer.errors


def test_sigterm_without_another_thread_ends_the_process(started: Any) -> None:
    """There may be too many. The handler raised an error in the midst of training."""
    trainer = started("no threads", sigterm_flush_s=20.0)
    assert trainer.terminate() < 10
    assert trainer.process.returncode == -signal.SIGTERM
    assert "Traceback" not in trainer.errors


def test_a_handler_is_installed_on_request_only_and_removed_at_close(opened: Open, tmp_path: Path) -> None:
    """Signals belong to the training framework."""
    before = signal.getsignal(signal.SIGTERM)
    with opened(Meddled()):
        assert signal.getsignal(signal.SIGTERM) is before
    with opened(Meddled(), tmp_path / "second", sigterm_flush_s=5):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_removing_our_handler_keeps_one_that_was_set_later() -> None:
    """A handler that was set later may wrap ours or replace it, so it is not ours to remove."""

    def later(*_: object) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    try:
        undo = flush_on_sigterm(lambda _: None, 1.0)
        signal.signal(signal.SIGTERM, later)
        undo()
        assert signal.getsignal(signal.SIGTERM) is later
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_flush_outside_the_main_thread_is_rejected_before_opening(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def open_it() -> None:
        try:
            Uploader(tmp_path / "folder", f"file://{tmp_path}/run", rank=0, world_size=1, sigterm_flush_s=1.0)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join(30)
    assert "main thread" in str(errors[0])
    assert os.listdir(tmp_path) == []
