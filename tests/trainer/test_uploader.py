"""The uploader in this process, over stores that misbehave on purpose."""

import asyncio
import json
import logging
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from ckpt_async import (
    CheckpointAbortedError,
    CommitTimeoutError,
    FencedError,
    Uploader,
    UploadFailedError,
    restore,
)
from ckpt_async.core import decide, failures, keys, records
from ckpt_async.core.boundary import Boundary
from ckpt_async.core.model import CheckpointId, Enqueued, Event
from ckpt_async.engine import loop as engine_module
from ckpt_async.engine import on_disk
from ckpt_async.errors import (
    FailureReason,
    InvalidNameError,
    InvalidShardError,
    JournalError,
    SealedError,
    SettingsError,
    StoreError,
    UploaderClosedError,
)
from ckpt_async.local import journals
from ckpt_async.local.journal import Journal
from ckpt_async.restore.destination import PARTIAL_FOLDER
from ckpt_async.stores import StoreOptions
from ckpt_async.trainer import waits
from ckpt_async.transfer import source
from tests.stores.memory import CAPABILITIES, MemoryBucket
from tests.stores.misbehaving import Faulty, Meddled, Slow, trouble
from tests.trainer.uploads import QUICK, Open, decisions, save, wait_until, write


class ClockBehind(Meddled):
    """A store whose listing time and object times come from different clocks, as with a file server."""

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        request = super().__getattr__(operation)
        if operation != "list":
            return request

        async def behind(*args: Any, **kwargs: Any) -> Any:
            listing = await request(*args, **kwargs)
            return replace(listing, server_time=listing.server_time - 300.0)

        return behind


def _commit_by_two(opened: Open, store: Meddled) -> None:
    launch = {"world_size": 2, "launch_id": "1"}
    with opened(store, rank=0, **launch) as zero, opened(store, rank=1, **launch) as one:
        for each in (zero, one):
            save(each, 1, f"{each.rank}.pt")
        for each in (zero, one):
            each.wait(1, timeout_s=10)


def test_a_slow_clock_delays_no_commit(opened: Open) -> None:
    """Receipts from the future must count as new ones."""
    store = ClockBehind()
    _commit_by_two(opened, store)
    assert decisions(store) == {CheckpointId(1, 1): "commit"}


def test_only_the_rank_that_commits_moves_latest(opened: Open) -> None:
    """Also if both try, because the first decision takes long to arrive."""

    class BothAtOnce(Meddled):
        async def before(self, operation: str, key: str) -> None:
            while (operation, key) == ("put", decision) and self.asked[operation, key] < 2:
                await asyncio.sleep(0.001)

    decision = keys.decision_key(CheckpointId(1, 1))
    store = BothAtOnce()
    _commit_by_two(opened, store)
    assert (store.asked["get", keys.LATEST], store.asked["put", keys.LATEST]) == (1, 1)


# --- faults that heal ------------------------------------------------------------------------------------------


def test_errors_healed_by_retries_are_silent_and_counted(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """R12: a trainer hears only of errors that it can act on; operators see the rest in the counters."""
    store = Faulty()
    store.start, store.times, store.error = "ckpt/", 5, trouble(FailureReason.THROTTLED)
    with caplog.at_level(logging.WARNING), opened(store) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=10)
        assert not caplog.records
        assert _counter(uploader, "ckpt_async_upload_attempt_failures_total", "throttled") == 5
    assert decisions(store) == {CheckpointId(1, 1): "commit"}


def _scrape(uploader: Uploader) -> str:
    return generate_latest(uploader.metrics.registry).decode()


def _counter(uploader: Uploader, name: str, label: str = "") -> float:
    lines = [line for line in _scrape(uploader).splitlines() if line.startswith(name) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.fault("F24")
@pytest.mark.parametrize("is_closing", [False, True])
@pytest.mark.parametrize("where", ["ckpt/", keys.RECEIPTS, keys.DECISIONS, keys.LATEST])
def test_a_crashed_engine_restarts_is_counted_and_loses_nothing(
    opened: Open, where: str, is_closing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of ours in one request must not end uploading for the rest of a training run."""
    store = Faulty()
    with opened(store) as uploader:
        for step in range(30):  # many rounds: the next engine counts them from zero
            save(uploader, step)
        uploader.wait(29, timeout_s=10)
        store.start, store.times, store.error = where, 1, ZeroDivisionError("an injected bug")
        started = time.monotonic()
        save(uploader, 100)
        if not is_closing:
            uploader.wait(100, timeout_s=10)
        wait_until(lambda: not store.times, uploader)
        wait_until(lambda: _counter(uploader, "ckpt_async_engine_restarts_total") == 1, uploader, timeout_s=5)
        assert uploader.flush(60).is_done
    assert time.monotonic() - started < 30, "who waits for rounds to pass must not notice the new engine"
    assert set(decisions(store).values()) == {"commit"}
    assert len(decisions(store)) == 31
    assert "an injected bug" in caplog.text
    assert json.loads(store.bucket.objects[keys.LATEST].data)["step"] == 100


@pytest.mark.fault("F24")
def test_a_crash_while_closing_raises_and_the_next_start_finishes(opened: Open) -> None:
    """The last seconds of a run must neither hide a bug nor lose the last checkpoint to it."""
    store = Slow()
    with opened(store) as uploader:
        save(uploader, 1)
        assert store.has_come.wait(10)

        async def bug(operation: str, key: str) -> None:
            if key.startswith("ckpt/"):
                raise ZeroDivisionError("an injected bug")

        def close() -> None:
            with pytest.raises(UploadFailedError, match="has died"):
                uploader.close()
            told.append(True)

        told: list[bool] = []
        closing = threading.Thread(target=close)
        closing.start()
        wait_until(lambda: uploader._is_closed, uploader)
        store.before, store.after = bug, bug  # type: ignore[method-assign]
        store.go.set()
        closing.join(10)
        assert told
    again = Meddled(store.bucket)
    with opened(again):
        pass
    assert decisions(again) == {CheckpointId(1, 1): "commit"}


# --- faults that do not heal -------------------------------------------------------------------------------------


def test_a_final_failure_is_raised_at_the_next_call_and_retried_later(opened: Open) -> None:
    """Strict mode: a trainer that wants to know is told once, with what to do; the shard is not given up."""

    class SlowAndFaulty(Slow):
        async def before(self, operation: str, key: str) -> None:
            await super().before(operation, key)
            if key == "ckpt/step-1.g1/a.pt" and self.asked[operation, key] == 1:
                raise trouble(FailureReason.OTHER)

    store = SlowAndFaulty()
    with opened(store) as uploader:
        save(uploader, 1)
        store.go.set()
        wait_until(lambda: bool(uploader._engine.view().failures), uploader)
        with pytest.raises(UploadFailedError, match=r"step 1, shard 'a\.pt'.*by the test.*ckpt-async drain"):
            uploader.enqueue(write(uploader, "step-2/a.pt"), 2)
        save(uploader, 2)  # told once
        uploader.wait(2, timeout_s=10)
        wait_until(lambda: CheckpointId(1, 1) in decisions(store), uploader)
    assert set(decisions(store).values()) == {"commit"}


def test_an_action_that_fails_before_any_request_is_told_and_retried(opened: Open) -> None:
    """Whatever the error is: an engine that restarts for it every second does nothing else, and tells nobody."""
    store = Faulty()
    store.start, store.times, store.error = keys.LATEST, 10**9, InvalidNameError("refused by the test")
    with opened(store) as uploader:
        save(uploader, 1)
        wait_until(lambda: bool(uploader._engine.view().failures), uploader)
        with pytest.raises(UploadFailedError, match="refused by the test"):
            uploader.raise_failures()
        assert _counter(uploader, "ckpt_async_engine_restarts_total") == 0
        store.times = 0
        wait_until(lambda: keys.LATEST in store.bucket.objects, uploader)


def test_a_final_failure_is_only_logged_and_counted_in_warn_mode(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Warn mode: no upload problem may ever stop training."""
    store = Faulty()
    store.start, store.times, store.error = "ckpt/", 1, trouble(FailureReason.OTHER)
    with opened(store, on_error="warn") as uploader:
        save(uploader, 1)
        wait_until(lambda: bool(uploader._engine.view().failures), uploader)
        save(uploader, 2)
        wait_until(lambda: len(decisions(store)) == 2, uploader)
        assert _counter(uploader, "ckpt_async_uploads_total", "failed") == 1
    assert "shard_failed" in caplog.text


def test_wait_distinguishes_a_failed_upload_from_a_slow_one(opened: Open) -> None:
    """Waiting for something that cannot arrive by itself helps nobody."""
    store = Faulty()
    store.start, store.times, store.error = "ckpt/", 10**9, trouble(FailureReason.OTHER)
    with opened(store, on_error="warn", upload_timeout_s=1) as uploader:
        save(uploader, 1)
        with pytest.raises(UploadFailedError, match="by the test"):
            uploader.wait(1, timeout_s=10)


class Denying(Meddled):
    """Refuses shards while `denies` is set, as a store with wrong permissions does."""

    denies = True

    async def before(self, operation: str, key: str) -> None:
        if self.denies and operation == "put" and key.startswith("ckpt/"):
            raise trouble(FailureReason.AUTH)


@pytest.mark.fault("F50")
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("how", ["close", "wait", "flush"])
def test_waiting_retries_failed_uploads_that_can_succeed_now(
    opened: Open, monkeypatch: pytest.MonkeyPatch, how: str, is_told: bool
) -> None:
    """After an access error had been raised and the permissions fixed, `close(20)` returned at once, with the last
    checkpoint on a node that goes away.
    """
    store = Denying()
    with opened(store, upload_timeout_s=1) as uploader:
        monkeypatch.setattr(failures, "RETRY_ACTION_S", 3600.0)
        save(uploader, 1)
        wait_until(lambda: len(uploader._engine.view().failures) == 2, uploader)
        if is_told:
            with pytest.raises(UploadFailedError, match=r"by the test.*ckpt-async drain"):
                uploader.raise_failures()
        store.denies = False
        match how:
            case "close":
                uploader.close(20)
            case "wait":
                uploader.wait(1, timeout_s=20)
            case _:
                assert uploader.flush(20).is_done
        assert decisions(store) == {CheckpointId(1, 1): "commit"}
        if how != "close":
            uploader.raise_failures()  # it has healed


@pytest.mark.fault("F50")
@pytest.mark.parametrize("how", ["close", "wait"])
def test_waiting_lasts_for_the_given_time_despite_failures(
    opened: Open, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The engine gives up a shard, loudly, several times during the wait; then the store accepts it."""
    store = Denying()
    with opened(store, upload_timeout_s=1) as uploader:
        monkeypatch.setattr(failures, "RETRY_ACTION_S", 3600.0)
        monkeypatch.setattr(failures, "RETRY_HURRIED_S", 0.01)
        save(uploader, 1)
        with pytest.raises(UploadFailedError, match="by the test"):
            uploader.wait(1)  # without a timeout: until it has failed for good

        def mend() -> None:
            wait_until(lambda: _counter(uploader, "ckpt_async_uploads_total", "failed") >= 5, uploader, 60)
            store.denies = False

        mending = threading.Thread(target=mend)
        mending.start()
        if how == "close":
            uploader.close(60)
        else:
            uploader.wait(1, timeout_s=60)
        mending.join(10)
    assert decisions(store) == {CheckpointId(1, 1): "commit"}


# --- wait --------------------------------------------------------------------------------------------------------


def test_wait_names_what_is_missing(opened: Open) -> None:
    """With 1,000 ranks, "timeout" is no help: the error must say whose part is missing."""
    store = Slow()
    never_came = pytest.raises(UploadFailedError, match="ranks 1, 2 never opened it")
    with never_came, opened(store, rank=0, world_size=3, generation=1) as uploader:
        with pytest.raises(SealedError, match=r"call seal\(step=1\) before wait"):
            uploader.wait(1)
        save(uploader, 1)
        with pytest.raises(CommitTimeoutError, match="0 of 2 shards of this rank are uploaded"):
            uploader.wait(1, timeout_s=0.05)
        store.go.set()
        wait_until(lambda: bool(store.keys(keys.RECEIPTS)), uploader)
        wait_until(lambda: bool(uploader._engine.view().missing_ranks(CheckpointId(1, 1))), uploader)
        with pytest.raises(CommitTimeoutError, match="nothing has arrived from rank 1, 2 yet"):
            uploader.wait(1, timeout_s=0.05)
        with pytest.raises(TimeoutError):  # for callers that do not know this package's errors
            uploader.wait(1, timeout_s=0.01)


@pytest.mark.fault("F104")
def test_a_store_that_does_not_say_who_is_absent_is_no_success(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` took it for "nobody", so that a job without a single checkpoint exited with 0."""

    class Silent(Meddled):
        async def before(self, operation: str, key: str) -> None:
            if operation == "list" and "members" in key and not is_open:
                await asyncio.Event().wait()

    monkeypatch.setattr(waits, "MEMBERS_TIMEOUT_S", 0.1)
    is_open = True
    unknown = pytest.raises(UploadFailedError, match="the store did not answer in time which ranks opened it")
    with unknown, opened(Silent(), rank=0, world_size=2, generation=1) as uploader:
        save(uploader, 1)
        is_open = False


def test_a_caller_that_leaves_no_time_to_find_out_who_is_absent_gets_no_error(opened: Open) -> None:
    class Silent(Meddled):
        async def before(self, operation: str, key: str) -> None:
            if operation == "list" and "members" in key and not is_open:
                await asyncio.Event().wait()

    is_open = True
    with opened(Silent(), rank=0, world_size=2, generation=1) as uploader:
        save(uploader, 1)
        is_open = False
        uploader.close(1.0)


@pytest.mark.fault("F35")
def test_an_exception_in_the_training_loop_takes_precedence_over_errors_of_close(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with opened(Meddled(), rank=0, world_size=2, generation=1) as uploader, uploader:
            save(uploader, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "closed_without_commit" in caplog.text


def test_steps_that_two_starts_have_left_are_told_apart(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """They were listed as `steps=[1, 1, 2]`."""
    bucket = MemoryBucket()
    for generation, steps in ((1, [1]), (2, [1, 2])):
        caplog.clear()
        with opened(
            Meddled(bucket), rank=0, world_size=2, generation=generation, on_error="warn"
        ) as uploader:
            for step in steps:
                save(uploader, step)
            uploader.close(1.0)
    assert "closed_with_unfinished steps=[1@g1, 1, 2] " in caplog.text


@pytest.mark.fault("F90")
@pytest.mark.parametrize(
    ("settings", "timeout_s", "raises"),
    [({}, None, True), ({"on_error": "warn"}, None, False), ({}, 1.0, False)],
)
def test_closing_with_something_not_in_the_store_is_an_error_unless_the_caller_said_how_long_to_wait(
    opened: Open,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    timeout_s: float | None,
    raises: bool,
) -> None:
    """A job that exits with status 0 would look as if its checkpoint were in the store."""
    store = Slow()
    with opened(store, **{**QUICK, "upload_timeout_s": 1, **settings}) as uploader:
        save(uploader, 1)
        uploader.enqueue(write(uploader, "unsealed.bin"), 2)
        try:
            if raises:
                with pytest.raises(
                    UploadFailedError, match=r"step 1 of this rank did not reach the store within 1 s .* left"
                ):
                    uploader.close(timeout_s)
            else:
                uploader.close(timeout_s)
        finally:
            store.go.set()
    assert "closed_with_unfinished steps=[1, 2]" in caplog.text


@pytest.mark.parametrize("settings", [{}, {"on_error": "warn"}])
def test_closing_is_an_error_while_the_store_takes_the_shards_but_not_the_decision(
    opened: Open, settings: dict[str, Any]
) -> None:
    """A job whose credentials may not write decisions exited with status 0, and nothing was committed."""
    store = Slow()
    store.start = keys.DECISIONS
    with opened(store, **{**QUICK, "upload_timeout_s": 1, **settings}) as uploader:
        save(uploader, 1)
        try:
            if settings:
                uploader.close()
            else:
                with pytest.raises(
                    UploadFailedError, match=r"step 1 .* was not committed within 1 s .*decisions/"
                ):
                    uploader.close()
        finally:
            store.go.set()


def test_the_store_s_slowness_to_commit_is_no_error_for_ranks_that_wait(opened: Open) -> None:
    """This rank has done its part: another one is late."""
    settings = {**QUICK, "upload_timeout_s": 1, "world_size": 2, "generation": 1}
    bucket = MemoryBucket()
    with opened(Meddled(bucket), rank=0, **settings) as zero, opened(Meddled(bucket), rank=1, **settings):
        save(zero, 1)
        zero.close()


def test_closing_before_the_time_is_over_does_not_say_that_it_is(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that currently has nothing to do ends the wait."""
    store = Slow()
    with opened(store) as uploader:
        save(uploader, 1)
        assert store.has_come.wait(10)
        monkeypatch.setattr(waits, "drain", lambda *_, **__: None)
        try:
            uploader.close()
        finally:
            store.go.set()


def test_wait_returns_in_every_thread_also_after_the_commit(opened: Open) -> None:
    """A checkpoint leaves the journal once it is done, but its commit must stay known."""
    store = Slow()
    with opened(store) as uploader:
        save(uploader, 1)
        done: list[str] = []

        def wait() -> None:
            uploader.wait(1, timeout_s=10)
            done.append("committed")

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        store.go.set()
        for thread in threads:
            thread.join(10)
        assert done == ["committed"] * 4
        uploader.flush(10)
        uploader.wait(1, timeout_s=0.01)


def test_calls_after_close_raise(opened: Open) -> None:
    """A callback that fires after the end of the training loop must not hang or write anywhere."""
    with opened(Meddled()) as uploader:
        save(uploader, 1)
        uploader.close()
        for call in (lambda: uploader.enqueue("x", 2), lambda: uploader.seal(2), lambda: uploader.wait(1)):
            with pytest.raises(UploaderClosedError, match="closed"):
                call()
        uploader.close()


@pytest.mark.fault("F23")
def test_pickling_an_uploader_is_rejected(opened: Open) -> None:
    """Otherwise a spawn-started dataloader would get a copy that shares lock and journal."""
    with opened(Meddled()) as uploader, pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(uploader)


# --- threads -----------------------------------------------------------------------------------------------------


def test_threads_may_enqueue_concurrently(opened: Open) -> None:
    """Frameworks save from threads of their own; every shard must arrive, each once."""
    store = Meddled()
    with opened(store) as uploader:
        barrier = threading.Barrier(8)

        def work(number: int) -> None:
            barrier.wait(10)
            for step in range(5):
                uploader.enqueue(write(uploader, f"step-{step}/{number}.pt", f"{number}".encode()), step)
                uploader.enqueue(uploader.folder / f"step-{step}/{number}.pt", step)  # again: changes nothing

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        sealers = [threading.Thread(target=uploader.seal, args=(step,)) for step in range(5)]
        for thread in sealers:
            thread.start()
        for thread in sealers:
            thread.join(10)
        for step in range(5):
            uploader.wait(step, timeout_s=10)
    assert len(store.keys("ckpt/")) == 40
    assert {count for (operation, key), count in store.asked.items() if key.startswith("ckpt/")} == {1}


def test_uploads_are_bounded_and_do_not_delay_enqueue(opened: Open) -> None:
    """The trainer continues whatever the store does, and the store never sees more uploads at once than configured."""
    store = Slow()
    with opened(store, num_concurrent_uploads=3) as uploader:
        started = time.monotonic()
        for step in range(5):
            save(uploader, step, *(f"{number}.pt" for number in range(10)))
        assert time.monotonic() - started < 10
        assert store.has_come.wait(10)
        assert uploader._engine.view().num_due > 3
        store.go.set()
        uploader.wait(4, timeout_s=20)
    assert store.most_held <= 3


# --- generations -------------------------------------------------------------------------------------------------


@pytest.mark.fault("F13")
def test_a_fenced_trainer_accepts_nothing_new_and_its_sealed_checkpoints_commit(
    opened: Open, tmp_path: Path
) -> None:
    """R11: after a split brain, the old trainer must stop; its sealed work is often the newest there is."""
    bucket = MemoryBucket()
    old_store = Slow()
    old_store.bucket, old_store._store = bucket, Meddled(bucket)._store
    with opened(old_store) as old:
        save(old, 1)
        assert old_store.has_come.wait(10)
        with opened(Meddled(bucket), folder=tmp_path / "other") as new:
            assert new.generation == old.generation + 1
            old_store.go.set()
            old.wait(1, timeout_s=10)
            wait_until(lambda: old._engine.view().fenced_by is not None, old)
            for call in (lambda: old.enqueue("x", 2), lambda: old.seal(2)):
                with pytest.raises(FencedError, match="generation 2 of this run has started"):
                    call()
            save(new, 1)
            new.wait(1, timeout_s=10)
    assert decisions(old_store) == {CheckpointId(1, 1): "commit", CheckpointId(2, 1): "commit"}
    latest = json.loads(bucket.objects[keys.LATEST].data)
    assert (latest["generation"], latest["step"]) == (2, 1)


@pytest.mark.fault("F13")
def test_a_superseded_trainer_is_fenced_even_if_its_uploads_make_no_progress(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: on a busy node, a trainer sealed 14 steps without noticing: it looked only after an upload, and none
    completed.
    """
    monkeypatch.setattr(decide, "SUCCESSOR_POLL_S", 0.1)
    bucket = MemoryBucket()
    store = Slow()
    store.bucket, store._store = bucket, Meddled(bucket)._store
    with opened(store) as old:
        save(old, 1)
        assert store.has_come.wait(10)
        with opened(Meddled(bucket), folder=tmp_path / "other"):
            wait_until(lambda: old._engine.view().fenced_by == 2, old)
            with pytest.raises(FencedError, match="generation 2 of this run has started"):
                old.enqueue(write(old, "step-2/a.pt"), 2)
            assert not decisions(store), "not a single commit later"
        store.go.set()


@pytest.mark.fault("F13")
def test_waiting_for_ranks_ends_when_a_newer_start_takes_over(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: the missing ranks may be part of it, and without a timeout this rank would wait forever."""
    monkeypatch.setattr(decide, "SUCCESSOR_POLL_S", 0.05)
    bucket = MemoryBucket()
    ended = pytest.raises(FencedError, match="nothing of generation 1 was committed")
    with ended, opened(Meddled(bucket), rank=0, world_size=2, generation=1, close_grace_s=0) as old:
        save(old, 1)
        new = opened(Meddled(bucket), folder=tmp_path / "other", rank=1, world_size=2, generation=2)
        with new, pytest.raises(FencedError, match="generation 2 of this run has started"):
            old.wait(1, timeout_s=20)


def test_an_unsealed_checkpoint_is_given_up_by_the_next_start(opened: Open) -> None:
    """Half a checkpoint of a dead trainer would keep the other ranks, and the disk, waiting forever."""
    store = Meddled()
    with opened(store) as uploader:
        uploader.enqueue(write(uploader, "step-1/a.pt"), 1)
    with opened(store) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=10)
        uploader.flush(10)
        assert not list((uploader.folder / ".ckpt-async/spool").rglob("*.pt"))
    assert decisions(store) == {CheckpointId(1, 1): "abort", CheckpointId(2, 1): "commit"}


@pytest.mark.parametrize("lost", ["the answer", "latest"])
def test_latest_is_moved_by_the_next_start_if_the_committer_died_before_it_could(
    opened: Open, lost: str
) -> None:
    """The last checkpoint of a run is committed, then the node is lost: no other process would ever move latest to
    it.
    """
    store = Slow()
    store.start = keys.LATEST

    async def die(operation: str, key: str) -> None:
        if operation == "put" and key.startswith(keys.DECISIONS) and lost == "the answer":
            raise trouble(FailureReason.OTHER)

    store.after = die  # type: ignore[method-assign]
    with opened(store, on_error="warn") as uploader:
        save(uploader, 1)
        wait_until(lambda: bool(decisions(store)), uploader)
        if lost == "latest":
            assert store.has_come.wait(10)
        uploader.close(timeout_s=0)
    assert keys.LATEST not in store.bucket.objects
    with opened(Meddled(store.bucket)):
        pass
    assert json.loads(store.bucket.objects[keys.LATEST].data)["step"] == 1


# --- what happens to the files -----------------------------------------------------------------------------------


def test_a_shard_slower_to_read_than_the_stall_timeout_is_uploaded(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store without parts gets 100 GB in one piece, so reading them for the checksum must count as progress."""
    original = source.Source.read_into

    def slow(self: source.Source, piece: memoryview, *args: Any) -> None:
        if len(piece) == source.SLICE_BYTES:  # as they are read for the checksum
            time.sleep(0.05)  # the disk
        original(self, piece, *args)

    monkeypatch.setattr(source.Source, "read_into", slow)
    monkeypatch.setattr(source, "CHECKSUM_BYTES", source.SLICE_BYTES)
    store = Meddled(capabilities=replace(CAPABILITIES, multipart=False))
    with opened(store, stall_timeout_s=0.3) as uploader:
        uploader.enqueue(write(uploader, "step-1/a.pt", bytes(10 * source.SLICE_BYTES)), 1)
        uploader.seal(1)
        uploader.wait(1, timeout_s=15)
        assert _counter(uploader, "ckpt_async_upload_attempt_failures_total") == 0


@pytest.mark.fault("F11", "F12")
@pytest.mark.parametrize("how", ["deleted", "truncated", "overwritten", "replaced"])
def test_changes_to_a_file_after_enqueue(opened: Open, how: str) -> None:
    """Rotation must cost nothing; a change in place must never be committed as if it were the checkpoint."""
    store = Slow()
    with opened(store, on_error="warn") as uploader:
        path = write(uploader, "step-1/a.pt", b"the checkpoint")
        uploader.enqueue(path, 1)
        uploader.seal(1)
        assert store.has_come.wait(10)
        match how:
            case "deleted":
                path.unlink()
            case "truncated":
                os.truncate(path, 3)
            case "overwritten":
                # File systems store times in ticks of milliseconds.
                later_ns = path.stat().st_mtime_ns + 10**7
                with path.open("r+b") as file:
                    file.write(b"AN")
                os.utime(path, ns=(later_ns, later_ns))
            case "replaced":
                write(uploader, "step-1/a.pt", b"another")
        store.go.set()
        if how in ("deleted", "replaced"):
            uploader.wait(1, timeout_s=10)
            assert store.bucket.objects["ckpt/step-1.g1/a.pt"].data == b"the checkpoint"
        else:
            with pytest.raises(CheckpointAbortedError, match=r"changed after it was enqueued|truncated"):
                uploader.wait(1, timeout_s=10)
            save(uploader, 2)
            uploader.wait(2, timeout_s=10)
            assert _counter(uploader, "ckpt_async_uploads_total", "source_changed") == 1


def test_a_predecessors_lost_shard_is_reported_and_does_not_end_the_successor(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """R12: the restarted trainer can do nothing about it, and has its own checkpoints to save."""
    store = Slow()
    with opened(store, generation=1, on_error="warn") as first:
        path = write(first, "step-1/a.pt", b"the checkpoint")
        first.enqueue(path, 1)
        first.seal(1)
        assert store.has_come.wait(10)
        first.close(timeout_s=0)
    with path.open("r+b") as file:
        file.write(b"AN")
    os.utime(path, ns=(1, 1))
    store.go.set()
    with caplog.at_level(logging.ERROR), opened(store, generation=2, on_error="raise") as second:
        wait_until(lambda: decisions(store) == {CheckpointId(1, 1): "abort"}, second)
        save(second, 2)
        second.wait(2, timeout_s=10)
        assert _counter(second, "ckpt_async_uploads_total", "source_changed") == 1
    assert "shard_failed generation 1 step 1" in caplog.text


@pytest.mark.fault("F12")
def test_without_hard_links_a_deleted_file_is_reported_as_lost(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems without links keep only the user's own file; losing it must not look like a commit."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = Slow()
    with opened(store, on_error="warn", num_concurrent_uploads=1) as uploader:
        uploader.enqueue(write(uploader, "step-1/a.pt", b"kept"), 1)
        uploader.seal(1)
        assert store.has_come.wait(10)
        lost = write(uploader, "step-2/a.pt", b"lost")
        uploader.enqueue(lost, 2)
        uploader.seal(2)
        lost.unlink()
        store.go.set()
        uploader.wait(1, timeout_s=10)
        with pytest.raises(CheckpointAbortedError, match="it was deleted before it was uploaded"):
            uploader.wait(2, timeout_s=10)


@pytest.mark.parametrize("keep", [-1, 0, 1, 3])
def test_local_retention_counts_committed_checkpoints_over_restarts(opened: Open, keep: int) -> None:
    """R7, R8: what is not committed is never removed; what an earlier launch committed counts too."""
    store = Slow()
    store.go.set()
    with opened(store, num_checkpoints_to_keep=keep) as uploader:
        for step in (1, 2):
            save(uploader, step)
            uploader.wait(step, timeout_s=10)
    store.go.clear()
    with opened(store, num_checkpoints_to_keep=keep) as uploader:
        folder = uploader.folder
        save(uploader, 3)
        save(uploader, 4)
        assert store.has_come.wait(10)
        before = {1, 2, 3, 4} if keep in (-1, 3) else {3, 4} if keep == 0 else {2, 3, 4}
        wait_until(lambda: _steps(folder) == before, uploader)
        replaced = write(uploader, "step-3/a.pt", b"the trainer's next file at the same path")
        store.go.set()
        for step in (3, 4):
            uploader.wait(step, timeout_s=10)
    after = {-1: {1, 2, 3, 4}, 0: {3}, 1: {3, 4}, 3: {2, 3, 4}}[keep]
    assert _steps(folder) == after
    assert replaced.read_bytes() == b"the trainer's next file at the same path"
    assert (folder / "step-3/b.pt").exists() == (keep in (-1, 3)), "its old files go, the new one stays"
    link = folder / "latest-rank0"
    assert link.is_symlink() == (keep != 0)
    if keep:
        assert os.readlink(link) == "step-4"


def test_a_file_that_two_checkpoints_have_goes_with_the_last_of_them(opened: Open) -> None:
    """A tokenizer, for example, that is written once and enqueued with every step."""
    with opened(Meddled(), num_checkpoints_to_keep=1) as uploader:
        every, old = write(uploader, "every.json"), write(uploader, "old.json")
        for step in (1, 2, 3):
            uploader.enqueue(every, step)
            if step < 3:
                uploader.enqueue(old, step)
            save(uploader, step, "a.pt")
            uploader.wait(step, timeout_s=10)
            if step == 2:
                wait_until(lambda: not (uploader.folder / "step-1").exists(), uploader)
                assert old.exists()
        wait_until(lambda: not old.exists() and not (uploader.folder / "step-2").exists(), uploader)
        assert every.exists()


def test_the_symlink_goes_if_the_newest_checkpoint_has_no_files_here(opened: Open) -> None:
    """It would lead to what retention removes."""
    with opened(Meddled(), num_checkpoints_to_keep=1) as uploader:
        _commit(uploader, 1)
        link = uploader.folder / "latest-rank0"
        wait_until(link.is_symlink, uploader)
        rotated_away = write(uploader, "step-2/a.pt")
        uploader.enqueue(rotated_away, 2)
        rotated_away.unlink()
        uploader.seal(2)
        uploader.wait(2, timeout_s=10)
    assert not (uploader.folder / "step-1").exists()
    assert not link.is_symlink()


def test_local_retention_works_with_a_symlink_in_a_folder_of_its_own(opened: Open) -> None:
    """That folder was never made, so the symlink was never moved, and nothing was ever removed."""
    with opened(Meddled(), num_checkpoints_to_keep=1, latest_filename="links/latest-rank{rank}") as uploader:
        _commit(uploader, 1, 2, 3)
        wait_until(lambda: _steps(uploader.folder) == {3}, uploader)
        assert os.readlink(uploader.folder / "links/latest-rank0") == "../step-3"


def _commit(uploader: Uploader, *steps: int) -> None:
    for step in steps:
        save(uploader, step)
        uploader.wait(step, timeout_s=10)


@pytest.mark.fault("F40")
def test_local_retention_covers_what_an_earlier_start_kept_for_good(opened: Open) -> None:
    """First -1, then 2: what the first launch kept counts and is removed in its turn, except files that were replaced
    or rotated away by the trainer. The times of the saves are remembered too, because `every-seconds` needs them.
    """
    store = Meddled()
    with opened(store, num_checkpoints_to_keep=-1) as uploader:
        _commit(uploader, 1, 2, 3, 4)
        folder, kept = uploader.folder, uploader.folder / keys.PRIVATE / "kept/rank-00000"
        wait_until(lambda: len(list(kept.glob("*.json"))) == 3, uploader)
        saved_at, later = (
            json.loads((kept / f"000001-00000000000{step}.json").read_bytes())["sealed_at"] for step in (1, 3)
        )
        assert time.time() - 60 < saved_at < later
    write(uploader, "step-1/a.pt", b"the trainer's next file at the same path")
    shutil.rmtree(folder / "step-2")
    with opened(store, num_checkpoints_to_keep=-1) as uploader:
        assert {path.stem[-1] for path in kept.iterdir()} == {"1", "3"}, "nothing of 2 is there any more"
    with opened(store, num_checkpoints_to_keep=2) as uploader:
        assert list(kept.iterdir()) == []
        local = journals.read(folder)[0].local()
        assert local.checkpoints[CheckpointId(1, 3)].sealed_at == later
        _commit(uploader, 5)
        wait_until(lambda: _steps(folder) == {1, 4, 5}, uploader)
    assert sorted(path.name for path in (folder / "step-1").iterdir()) == ["a.pt"]


@pytest.mark.fault("F56")
def test_a_start_with_a_remote_that_cannot_be_opened_forgets_nothing(tmp_path: Path) -> None:
    """After a mistyped URL, the next launch with the right one must still know what it keeps, and prune it in turn."""
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/remote"
    more: Any = QUICK | {"num_checkpoints_to_keep": 2}
    with Uploader(folder, remote, **more) as uploader:
        _commit(uploader, 1, 2)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        Uploader(folder, f"file://{tmp_path}/file/remote", **more)
    assert journals.read(folder)[0].local().newest_committed == CheckpointId(1, 2)
    with Uploader(folder, remote, **more) as uploader:
        _commit(uploader, 3)
        wait_until(lambda: _steps(folder) == {2, 3}, uploader)


@pytest.mark.fault("F56")
def test_a_start_with_another_remote_leaves_existing_files_to_the_user(tmp_path: Path) -> None:
    folder, more = tmp_path / "folder", QUICK | {"num_checkpoints_to_keep": 1}
    for name, step in (("a", 1), ("a", 2), ("b", 3)):
        with Uploader(folder, f"file://{tmp_path}/{name}", **more) as uploader:  # type: ignore[arg-type]
            assert uploader.generation == (2 if step == 2 else 1)
            _commit(uploader, step)
    assert _steps(folder) == {2, 3}


@pytest.mark.fault("O16")
def test_steps_never_sealed_are_reported_at_close(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    with opened(Meddled()) as uploader:
        _commit(uploader, 1)
        uploader.enqueue(write(uploader, "step-2/a.pt"), 2)
    assert "closed_without_seal steps=[2]" in caplog.text
    assert "closed_with_unfinished" not in caplog.text, "nobody will finish it"


def _steps(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}


def test_invalid_shards_are_rejected_before_anything_is_enqueued(opened: Open, tmp_path: Path) -> None:
    """A symlink or a FIFO in a checkpoint folder could lead anywhere, or hang the upload."""
    store = Meddled()
    with opened(store) as uploader:
        good = write(uploader, "step-1/a.pt")
        (uploader.folder / "step-1/link").symlink_to("/etc/passwd")
        for path in (good.parent, uploader.folder / "step-1/link", tmp_path / "outside", uploader.folder):
            with pytest.raises(InvalidShardError):
                uploader.enqueue(path, 1)
        os.mkfifo(uploader.folder / "fifo")
        with pytest.raises(InvalidShardError, match="FIFO"):
            uploader.enqueue(uploader.folder / "fifo", 1)
        uploader.enqueue(good, 1)
        uploader.seal(1)
        uploader.wait(1, timeout_s=10)
    assert store.keys("ckpt/") == ["ckpt/step-1.g1/a.pt"]


def test_files_must_be_a_collection_of_strings(opened: Open) -> None:
    """A single string would be taken letter by letter. A rejected call must not begin a checkpoint."""
    store = Meddled()
    with opened(store) as uploader:
        folder = write(uploader, "step-1/a").parent
        write(uploader, "step-1/b")
        for files in ("ab", b"ab", [Path("a")], [1]):
            with pytest.raises(InvalidNameError):
                uploader.enqueue(folder, 1, files=files)
        for name in (7, b"a", Path("a")):
            with pytest.raises(InvalidNameError):
                uploader.enqueue(folder, 1, name)  # type: ignore[arg-type]
        uploader.enqueue(folder, 1, files=(each for each in "a"))  # type: ignore[arg-type]
        uploader.seal(1)
        uploader.wait(1, timeout_s=10)
    assert store.keys("ckpt/") == ["ckpt/step-1.g1/a"]


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("launch_id", "", "launch_id, .* is ''"),
        ("folder", "", "folder is ''"),
        ("rank", 0, "but not WORLD_SIZE"),
        ("world_size", 2, "but not RANK"),
        ("generation", True, "generation=True"),
        ("generation", 1.5, "generation=1.5"),
        ("generation", 0, "generation=0"),
        ("metrics_address", "", "metrics_address is ''"),
        ("settings_file", "", "settings file ''"),
        ("settings_file", "a\0", r"settings file 'a\\x00'"),
        ("settings_file", sys.executable, "settings file .* cannot be read"),
    ],
)
def test_invalid_arguments_are_rejected(
    opened: Open, tmp_path: Path, name: str, wrong: Any, told: str
) -> None:
    """The error must name the argument before anything is created. Empty values come from variables left unset."""
    with pytest.raises(SettingsError, match=told), opened(Meddled(), **{name: wrong}):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_folder_cannot_be_its_own_remote(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for kind in (None, "weights"):
        with pytest.raises(SettingsError, match="is also the remote"):
            Uploader(tmp_path / "mine", f"file://{tmp_path}/link", kind=kind, rank=0, world_size=1)
    assert [each.name for each in tmp_path.iterdir()] == ["link"]


def test_timeouts_accept_any_number_of_seconds(opened: Open) -> None:
    """NaN would never expire; infinity is more than a lock can wait; a negative timeout means now."""
    with opened(Meddled()) as uploader:
        save(uploader, 1)
        calls = (uploader.flush, uploader.close, uploader.wait_for_predecessor, partial(uploader.wait, 1))
        for call in calls:
            with pytest.raises(SettingsError, match="timeout_s=nan"):
                call(float("nan"))
            with pytest.raises(SettingsError, match="timeout_s='3' must be a number of seconds"):
                call("3")
        uploader.wait(1, float("inf"))
        assert uploader.flush(float("inf")).is_done
        assert uploader.wait_for_predecessor(-1.0)
        uploader.close(float("inf"))


# --- the journal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["ckpt/step-1.g1/b.pt", keys.RECEIPTS, keys.DECISIONS])
def test_a_journal_deleted_between_two_starts_is_rebuilt_and_nothing_is_sent_twice(
    opened: Open, cut: str
) -> None:
    """R10: the journal is a cache. The spool has the shards, and the store knows what it has."""
    store = Slow()
    store.start = cut
    with opened(store, upload_timeout_s=1) as uploader:
        folder = uploader.folder
        save(uploader, 1)
        assert store.has_come.wait(10)
        wait_until(lambda: len(store.keys("ckpt/")) == (1 if cut.startswith("ckpt") else 2), uploader)
        wait_until(lambda: _is_durable(uploader), uploader)
        uploader.close(timeout_s=0)
    for path in (folder / ".ckpt-async").glob("journal-*"):
        path.unlink()
    again = Meddled(store.bucket)
    with opened(again) as uploader:
        assert uploader.generation == 2
        wait_until(lambda: decisions(again).get(CheckpointId(1, 1)) == "commit", uploader)
    sent = {key for (operation, key), _ in again.asked.items() if operation == "put" and key[:5] == "ckpt/"}
    assert sent == ({"ckpt/step-1.g1/b.pt"} if cut.startswith("ckpt") else set())


def _num_verified(uploader: Uploader) -> int:
    local = uploader._engine.view().fresh_local()
    return sum(
        shard.stored is not None for each in local.checkpoints.values() for shard in each.shards.values()
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_a_refused_journal_append_leaves_no_link(
    opened: Open, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """An `enqueue` that raises has enqueued nothing: no shard is uploaded, and no link holds space for files that the
    trainer deletes.
    """
    with opened(Meddled()) as uploader:
        step = uploader.folder / "step-1"
        step.mkdir()
        for name in ("a", "b", "c"):
            (step / name).write_bytes(name.encode())
        if not is_first:
            uploader.enqueue(step / "a", step=1)
        append = Journal.append

        def full(self: Journal, events: list[Event]) -> None:
            if any(isinstance(each, Enqueued) for each in events):
                raise JournalError("the disk is full")
            append(self, events)

        monkeypatch.setattr(Journal, "append", full)
        with pytest.raises(JournalError):
            uploader.enqueue(step, step=1)
        assert [(step / name).stat().st_nlink for name in "abc"] == [1 if is_first else 2, 1, 1]
        monkeypatch.undo()
        uploader.enqueue(step, step=1)
        assert [(step / name).stat().st_nlink for name in "abc"] == [2, 2, 2]


def _is_durable(uploader: Uploader) -> bool:
    local = uploader._engine.view().fresh_local()
    return all(each.is_seal_durable for each in local.checkpoints.values())


def test_a_shard_that_arrived_before_a_kill_is_not_sent_again(opened: Open) -> None:
    """A 100 GB shard whose last acknowledgement was lost with the process must cost one HEAD, not 100 GB."""
    store = Faulty()

    async def die(operation: str, key: str) -> None:
        if operation == "put" and key.startswith("ckpt/"):
            raise trouble(FailureReason.OTHER)

    store.after = die  # type: ignore[method-assign]
    with opened(store, on_error="warn") as uploader:
        save(uploader, 1, "a.pt")
        wait_until(lambda: bool(uploader._engine.view().failures), uploader)
        uploader.close(timeout_s=0)
    again = Meddled(store.bucket)
    with opened(again) as uploader:
        wait_until(lambda: decisions(again).get(CheckpointId(1, 1)) == "commit", uploader)
    assert again.asked["put", "ckpt/step-1.g1/a.pt"] == 0


def test_a_full_journal_disk_does_not_stop_uploads_in_progress(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress is noted only for people, so a failure to write it must not interrupt uploads."""
    from ckpt_async.local.folder import no_space

    def full(*_: object) -> None:
        raise no_space(Path("folder"))

    monkeypatch.setattr(Journal, "note_progress", full)
    monkeypatch.setattr(Journal, "compact", full)
    store = Slow()
    store.start = "ckpt/step-1.g1/b.pt"
    monkeypatch.setattr(engine_module, "POLL_S", 0.01)
    with opened(store) as uploader:
        save(uploader, 1)
        assert store.has_come.wait(10)
        engine = uploader._engine.view()
        rounds = engine.num_rounds
        wait_until(lambda: engine.num_rounds > rounds + 20, uploader)
        assert store.held == 1
        store.go.set()
        uploader.wait(1, timeout_s=10)
        assert _counter(uploader, "ckpt_async_engine_restarts_total") == 0
    assert store.asked["put", "ckpt/step-1.g1/b.pt"] == 1


def test_links_are_not_released_while_they_are_being_made_durable(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is faster than the disk's fsync is normal, and must not cause links to be left in the spool."""
    go, has_come = threading.Event(), threading.Event()
    original = on_disk.fsync_path

    def slow(path: Any) -> None:
        if "000001-000000000001" in str(path) and str(path).endswith(".pt"):
            has_come.set()
            assert go.wait(10)
        original(path)

    monkeypatch.setattr(on_disk, "fsync_path", slow)
    with opened(Meddled()) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=10)
        save(uploader, 2)  # step 1 is no longer the newest: it could be forgotten altogether
        uploader.wait(2, timeout_s=10)
        assert has_come.is_set()
        engine = uploader._engine.view()
        rounds = engine.num_rounds
        engine.wake()
        wait_until(lambda: engine.num_rounds > rounds + 1, uploader)
        spool = uploader.folder / ".ckpt-async/spool/rank-00000"
        assert (spool / "000001-000000000001/a.pt").exists()
        go.set()
        uploader.flush(10)
        wait_until(lambda: not list(spool.glob("000001-000000000001*")), uploader)


def test_retention_keeps_folders_of_steps_that_a_restarted_trainer_saves_again(opened: Open) -> None:
    """The trainer may just have created one; if it disappeared, the next write would fail and end training."""
    store = Meddled()
    with opened(store, num_checkpoints_to_keep=1) as uploader:
        for step in (1, 5):
            save(uploader, step)
            uploader.wait(step, timeout_s=10)
    with opened(store, num_checkpoints_to_keep=1) as uploader:
        save(uploader, 2)  # resumed from step 1
        uploader.wait(2, timeout_s=10)
        wait_until(lambda: not list((uploader.folder / "step-5").iterdir()), uploader)
        save(uploader, 5)
        save(uploader, 6)
        uploader.wait(6, timeout_s=10)
    assert _steps(uploader.folder) == {6}


# --- a remote that was wiped -------------------------------------------------------------------------------


def test_a_wiped_remote_is_refused_however_often_and_stays_as_it_is(opened: Open) -> None:
    """Each refused start claimed a generation, until there were enough for the next to be accepted silently."""
    store = Meddled()
    for step in (1, 2):
        with opened(store) as uploader:
            save(uploader, step)
    store.bucket.objects.clear()
    for _ in range(4):
        with (
            pytest.raises(JournalError, match="the remote was wiped") as refused,
            opened(store),
        ):
            pass
        assert "rank 0 has opened generation 2 of 'memory://test'" in str(refused.value)
        assert "with a new remote URL, or with another folder" in str(refused.value.hint)
    assert store.keys() == []


def test_every_rank_refuses_a_wiped_remote_in_which_another_has_begun_anew(
    opened: Open, tmp_path: Path
) -> None:
    """A rank of a replaced node has no journal. The others took its generations for their own."""
    store = Meddled()
    with (
        opened(store, rank=0, world_size=2, launch_id="1"),
        opened(store, rank=1, world_size=2, launch_id="1"),
    ):
        pass
    store.bucket.objects.clear()
    with opened(store, tmp_path / "replaced", rank=0, world_size=2, launch_id="2"):
        before = set(store.keys())
        for launch in ("2", "3"):
            with (
                pytest.raises(JournalError, match="the remote was wiped"),
                opened(store, rank=1, world_size=2, launch_id=launch),
            ):
                pass
        assert set(store.keys()) == before


def test_a_run_whose_older_places_were_swept_goes_on(opened: Open, tmp_path: Path) -> None:
    store = Meddled()
    with opened(store):
        pass
    with opened(store, tmp_path / "elsewhere"):
        pass
    (place,) = store.keys(keys.members_prefix(1))
    del store.bucket.objects[place]
    with opened(store) as uploader:
        assert uploader.generation == 3


# --- a remote that was put back to an older state of the same generation ------------------------------------


def _put_back(store: Meddled, *steps: int) -> None:
    """Remove every object of these steps of generation 1, as if an older backup had been restored."""
    for step in steps:
        for key in list(store.bucket.objects):
            if f"000001-{step:012d}" in key or f"/step-{step}.g1/" in key:
                del store.bucket.objects[key]


def _run(opened: Open, store: Meddled, *steps: int, **settings: Any) -> None:
    with opened(store, **settings) as uploader:
        for step in steps:
            save(uploader, step)
            uploader.wait(step, timeout_s=10)


@pytest.mark.fault("F101")
@pytest.mark.parametrize("kept", [2, -1])
@pytest.mark.parametrize("has_latest", [False, True])
def test_a_remote_that_was_put_back_is_refused_and_both_sides_stay_as_they_are(
    opened: Open, tmp_path: Path, kept: int, has_latest: bool
) -> None:
    """It resumed from step 2 without a word, and replaced the only copies of 3 and 4."""
    store = Meddled()
    _run(opened, store, 1, 2, 3, 4, num_checkpoints_to_keep=kept)
    _put_back(store, 3, 4)
    if not has_latest:
        del store.bucket.objects[keys.LATEST]
    before, local = store.keys(), _steps(tmp_path / "folder")
    for _ in range(2):
        with (
            pytest.raises(JournalError, match="was put back to an older state") as refused,
            opened(store, num_checkpoints_to_keep=kept),
        ):
            pass
        # Of what is kept for good, the journal names only the newest.
        assert f"has no record: steps {'3, 4' if kept == 2 else '4'}." in str(refused.value)
        assert "with a new remote URL, or with another folder" in str(refused.value.hint)
    assert (store.keys(), _steps(tmp_path / "folder")) == (before, local)
    assert local >= {3, 4}


def test_a_run_goes_on_in_another_folder_after_its_remote_was_put_back(opened: Open, tmp_path: Path) -> None:
    store = Meddled()
    _run(opened, store, 1, 2, 3, 4)
    _put_back(store, 3, 4)
    with opened(store, tmp_path / "other") as uploader:
        save(uploader, 3)
    assert decisions(store)[CheckpointId(2, 3)] == "commit"


@pytest.mark.fault("F101")
def test_each_kind_and_rank_asks_for_its_own_commits(opened: Open, tmp_path: Path) -> None:
    """Another rank, of a replaced node, may already have begun the next generation."""
    store = Meddled()
    with (
        opened(store, rank=0, world_size=2, launch_id="1", kind="weights") as zero,
        opened(store, rank=1, world_size=2, launch_id="1", kind="weights") as one,
    ):
        for step in (1, 2):
            save(zero, step, "a.pt")
            save(one, step, "b.pt")
            zero.wait(step, timeout_s=10)
            one.wait(step, timeout_s=10)
    _put_back(store, 2)
    with opened(store, tmp_path / "replaced", rank=0, world_size=2, launch_id="2", kind="weights"):
        before = set(store.keys())
        with (
            pytest.raises(JournalError, match=r"rank 1 knows of commits in generation 1 .* steps 2\."),
            opened(store, rank=1, world_size=2, launch_id="2", kind="weights"),
        ):
            pass
        assert set(store.keys()) == before


@pytest.mark.fault("F101")
@pytest.mark.parametrize("outcome", ["pruned", "aborted", "ephemeral", "collected"])
def test_what_was_pruned_given_up_or_collected_is_not_missed(opened: Open, outcome: str) -> None:
    store = Meddled()
    with opened(store, num_checkpoints_to_keep=1) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=10)
        if outcome == "aborted":
            uploader.enqueue(write(uploader, "step-2/a.pt"), 2)
            uploader.give_up(2, "by the test")
        elif outcome == "ephemeral":
            uploader.enqueue(write(uploader, "step-2/a.pt"), 2)
            uploader.seal(2, metrics={"ephemeral": 1})
            uploader.wait(2, timeout_s=10)
    newest = CheckpointId(1, 1)
    if outcome in ("pruned", "ephemeral"):
        newest = max(id_ for id_, each in decisions(store).items() if each == "commit")
        _decide(store, newest, "pruned")
    if outcome == "collected":
        with opened(store, Path(uploader.folder).parent / "elsewhere"):
            pass
        boundary = records.encode_boundary(Boundary(newest, number=1))
        there = store.bucket.objects.pop(keys.decision_key(newest))
        store.bucket.objects[keys.BOUNDARY] = replace(there, data=boundary)
    with opened(store) as uploader:
        assert uploader.generation == (3 if outcome == "collected" else 2)


def _decide(store: Meddled, id_: CheckpointId, outcome: str) -> None:
    key = keys.decision_key(id_)
    there = store.bucket.objects[key]
    found = {**json.loads(there.data), "outcome": outcome}
    store.bucket.objects[key] = replace(there, data=json.dumps(found).encode())


def test_the_question_for_the_newest_commit_is_one_request_and_an_error_is_no_answer(
    opened: Open,
) -> None:
    class Sick(Meddled):
        reason: FailureReason | None = None
        is_final = False

        async def before(self, operation: str, key: str) -> None:
            if self.reason is not None and key.startswith(keys.DECISIONS):
                reason, self.reason = self.reason, self.reason if self.is_final else None
                raise trouble(reason)

    store = Sick()
    _run(opened, store, 1, 2)
    store.asked.clear()
    with opened(store):
        asked = [each for each in store.asked if each[1].startswith((keys.DECISIONS, keys.BOUNDARY))]
        # The second one is for the number of the start.
        assert asked == [("head", keys.decision_key(CheckpointId(1, 2))), ("list", keys.DECISIONS)]
    _run(opened, store, 3)
    store.reason = FailureReason.THROTTLED
    with opened(store) as uploader:
        assert uploader.generation == 4
        save(uploader, 4)
    store.reason, store.is_final = FailureReason.AUTH, True
    with pytest.raises(StoreError, match="by the test"), opened(store, upload_timeout_s=1.0):
        pass


@pytest.mark.fault("F94")
def test_an_endpoint_that_lacks_the_newest_commit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that the same URL leads to may be late."""
    store = Meddled()
    monkeypatch.setattr("ckpt_async.transfer.patient.open_store", lambda *_, **__: store)
    settings: dict[str, Any] = QUICK | {"folder": tmp_path, "remote": "s3://bucket/run"}
    with Uploader(**settings) as uploader:
        for step in (1, 2):
            save(uploader, step)
            uploader.wait(step, timeout_s=10)
    decision = store.bucket.objects[keys.decision_key(CheckpointId(1, 2))]
    _put_back(store, 2)
    before = store.keys()
    options = StoreOptions(endpoint_url="http://replica.example")
    with pytest.raises(JournalError, match=r"the store at http://replica\.example has no record: steps 2"):
        Uploader(store_options=options, **settings)
    assert store.keys() == before
    store.bucket.objects[keys.decision_key(CheckpointId(1, 2))] = decision
    with Uploader(store_options=options, **settings) as uploader:
        assert uploader.generation == 2


def test_no_name_of_ours_holds_ckpt_(tmp_path: Path) -> None:
    """Lightning's SLURM requeue takes every name with `ckpt_` in it for a number, and the job falls."""
    places = (tmp_path / "folder", tmp_path / "remote", tmp_path / "pulled")
    seen: set[str] = set()
    with Uploader(
        places[0], f"file://{places[1]}", runner="process", **QUICK | {"upload_timeout_s": 60.0}
    ) as own:
        save(own, 1)
        own.wait(1, timeout_s=60)
        save(own, 2)
        seen |= {path.name for place in places for path in place.rglob("*")}
    restore.fetch(restore.find(f"file://{places[1]}"), places[2])
    seen |= {path.name for place in places for path in place.rglob("*")}
    assert keys.PRIVATE in seen
    assert not [name for name in {*seen, PARTIAL_FOLDER} if "ckpt_" in name]
