"""A checkpoint being read is kept for as long as it is read, however aggressive retention is, and no longer."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Self

import pytest

from ckpt_async import restore
from ckpt_async.core.model import CheckpointId, Lease, Outcome
from ckpt_async.core.retention import parse
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.protocol import steps, sweep_plan
from ckpt_async.protocol.sweep_plan import Ages
from ckpt_async.restore import fetching, session
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.sweep.remote import RemoteSweep
from tests.faults.processes import SOAK
from tests.restore import plays
from tests.restore.runs import Run, files_of, is_whole

KEEP_ONE = parse("last=1")


def _find(run: Run) -> restore.Checkpoint:
    checkpoint = restore.find(run.url)
    assert checkpoint is not None
    return checkpoint


def _sweep(run: Run) -> None:
    async def main() -> None:
        async with run.opened() as store:
            await RemoteSweep(store, KEEP_ONE, Ages(), clock=time.time).run(is_dry_run=False)

    asyncio.run(main())


class _Churn(threading.Thread):
    """A trainer that commits as fast as it can, with a sweeper that keeps only one checkpoint."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self._run, self._is_over = run, threading.Event()
        self.step, self.error = 0, None

    def run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self.error = error

    async def _work(self) -> None:
        async with self._run.opened() as store:
            while not self._is_over.is_set():
                await self._run.commit_in_loop(self.step + 1, files_of(self.step + 1))
                self.step += 1
                await RemoteSweep(store, KEEP_ONE, Ages(), clock=time.time).run(is_dry_run=False)

    def __enter__(self) -> Self:
        self.start()
        deadline = time.monotonic() + 30
        while not self.step and time.monotonic() < deadline and self.error is None:
            self._is_over.wait(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join(60)
        assert self.error is None


@pytest.mark.parametrize(
    ("num_loads", "limit_s"), [(300, 8.0), pytest.param(300, 3600.0, marks=SOAK)], ids=["short", "all"]
)
def test_a_reader_never_sees_a_missing_shard(
    run_: Run, tmp_path: Path, num_loads: int, limit_s: float
) -> None:
    """A checkpoint is found and then read piece by piece long after retention would have removed it, and every read is
    right. It may disappear only between `find` and the lease, and that is reported.
    """
    num_read = num_gone = 0
    began = time.monotonic()
    with _Churn(run_) as churn:
        while num_read < num_loads and (time.monotonic() - began < limit_s or num_read < 5):
            checkpoint = _find(run_)
            try:
                reader = restore.open(checkpoint)
            except restore.CheckpointGoneError:
                num_gone += 1
                continue
            with reader:
                opened_at = churn.step
                for rank, files in files_of(checkpoint.step).items():
                    for name, data in files.items():
                        assert reader.read(name, 1, 10) == data[1:11], (rank, name)
                        wait_for_step = min(churn.step, opened_at) + 1  # so that retention has run in between
                        while churn.step < wait_for_step and churn.is_alive():
                            time.sleep(0.001)
                        assert reader.read(name) == data
            num_read += 1
    print(f"{num_read} loads, {num_gone} gone before the lease, {churn.step} commits")
    assert run_.damages() == {}
    assert run_.leases() == []
    _sweep(run_)
    assert len(run_.keys("ckpt/")) == 4


def test_a_checkpoint_pruned_before_the_lease_is_refused(any_run: Run, tmp_path: Path) -> None:
    """The reader gets an error and leaves no lease behind."""
    id_ = any_run.commit(10)
    checkpoint = _find(any_run)
    any_run.commit(20)
    any_run.prune(id_)
    with pytest.raises(restore.CheckpointGoneError):
        restore.fetch(checkpoint, tmp_path / "there")
    with pytest.raises(restore.CheckpointGoneError):
        restore.open(checkpoint)
    assert any_run.leases() == []
    assert any_run.damages() == {}


def test_a_checkpoint_pruned_after_find_falls_back(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_.commit(10)
    take, pruned = steps.take_lease, []

    async def prune_first(store: Any, lease: Any) -> Any:
        if not pruned:
            pruned.append(lease.checkpoint)
            await run_.commit_in_loop(20)
            await run_.prune_in_loop(lease.checkpoint)
        return await take(store, lease)

    monkeypatch.setattr(steps, "take_lease", prune_first)
    found = restore.fetch_latest(run_.url, tmp_path / "there")
    assert found is not None
    assert (found[0].step, pruned) == (20, [CheckpointId(1, 10)])
    assert is_whole(found[1], files_of(20))
    assert run_.damages() == {}


def test_bytes_come_while_the_lease_is_taken(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking a lease takes three round trips, so reading starts at once; what was read
    counts only once the lease is taken.
    """
    run_.commit(10)
    take, read, events = steps.take_lease, DirectoryStore.get_range, []
    is_read = asyncio.Event()

    async def take_late(store: Any, lease: Any) -> Any:
        async with asyncio.timeout(10):
            await is_read.wait()
        decision = await take(store, lease)
        events.append("taken")
        return decision

    async def note(*args: Any) -> Any:
        info = await read(*args)
        events.append("read")
        is_read.set()
        return info

    monkeypatch.setattr(steps, "take_lease", take_late)
    monkeypatch.setattr(DirectoryStore, "get_range", note)
    assert is_whole(restore.fetch(_find(run_), tmp_path / "there"), files_of(10))
    assert events[0] == "read"
    assert "taken" in events
    assert run_.leases() == []


def test_what_was_read_of_a_checkpoint_pruned_meanwhile_does_not_count(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_.commit(10)
    checkpoint = _find(run_)
    run_.commit(20)
    take, sync = steps.take_lease, fetching._Fetching._bring_all
    is_read = asyncio.Event()

    async def prune_first(store: Any, lease: Any) -> Any:
        async with asyncio.timeout(10):
            await is_read.wait()
        await run_.prune_in_loop(lease.checkpoint)
        return await take(store, lease)

    async def note(self: Any, *rest: Any) -> None:
        await sync(self, *rest)
        is_read.set()

    monkeypatch.setattr(steps, "take_lease", prune_first)
    monkeypatch.setattr(fetching._Fetching, "_bring_all", note)
    with pytest.raises(restore.CheckpointGoneError):
        restore.fetch(checkpoint, tmp_path / "there")
    assert not list(tmp_path.glob("there/*.pt"))
    assert run_.leases() == []
    assert run_.damages() == {}


def test_a_lease_that_cannot_be_taken_ends_what_reads(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease's own error must be raised, without the long retries of a read."""
    run_.commit(10)
    asked = []

    async def refused(*_: Any) -> Any:
        raise StoreError("away", reason=FailureReason.TRANSIENT, operation="put")

    async def away(*_: Any) -> Any:
        asked.append(1)
        raise StoreError("broken", reason=FailureReason.TRANSIENT, operation="get")

    monkeypatch.setattr(steps, "take_lease", refused)
    monkeypatch.setattr(DirectoryStore, "get_range", away)
    with pytest.raises(StoreError, match="away"):
        restore.fetch(_find(run_), tmp_path / "there")
    assert len(asked) <= len(files_of(10))
    assert run_.damages() == {}


def test_a_reader_that_is_interrupted_gives_back_a_lease_that_it_may_have(
    run_: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was written, but the request that confirms it never returns."""
    run_.commit(10)
    checkpoint = _find(run_)

    is_written = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> Any:
        is_written.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(steps, "read_settled", hang)

    async def main() -> float:
        clock = asyncio.get_running_loop().time
        async with session.session(checkpoint.remote, None) as opened:
            reading = asyncio.ensure_future(_held(opened, checkpoint))
            await is_written.wait()
            began = clock()
            reading.cancel()
            await asyncio.wait([reading])
        return clock() - began

    assert asyncio.run(main()) < session.DROP_TIMEOUT_S / 2
    assert run_.leases() == []


def test_ctrl_c_while_a_reader_is_opened_ends_its_thread_and_gives_back_the_lease(
    run_: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, which goes on after Ctrl-C, the lease was renewed for ever."""
    run_.commit(10)
    checkpoint = _find(run_)

    async def interrupted(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(steps, "read_settled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            restore.open(checkpoint)
    assert "ckpt-async-reader" not in [each.name for each in threading.enumerate()]
    assert run_.leases() == []


async def _held(opened: session.Session, checkpoint: restore.Checkpoint) -> None:
    async with session.leased(opened, checkpoint):
        await asyncio.Event().wait()


def _short(monkeypatch: pytest.MonkeyPatch, ttl_s: float) -> None:
    monkeypatch.setattr(session, "LEASE_TTL_S", ttl_s)


def _no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the store's clock fully, because here it is this machine's."""
    monkeypatch.setattr(sweep_plan, "LEASE_MARGIN_S", 0.0)


@pytest.mark.parametrize("is_late", [False, True], ids=["leased first", "pruned at the same time"])
def test_renewal_extends_a_lease_beyond_its_term(
    run_: Run, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """This must also hold if the sweeper listed the leases before this one was taken: a checkpoint in the state
    `pruning` waits for the leases that exist.
    """
    _short(monkeypatch, 1.5)
    _no_margin(monkeypatch)
    id_ = run_.commit(10)
    checkpoint = _find(run_)
    run_.commit(20)
    times: list[float] = []
    renewed = threading.Event()
    renew = session.HeldLease._renew

    async def noted(self: session.HeldLease) -> bool:
        times.append(time.monotonic())
        is_kept = await renew(self)
        if times[-1] - times[0] > 2 * 1.5:
            renewed.set()
        return is_kept

    monkeypatch.setattr(session.HeldLease, "_renew", noted)
    with restore.open(checkpoint) as reader:
        if is_late:
            run_.prune(id_, finish=False)
        assert renewed.wait(60)
        _sweep(run_)
        assert reader.read("rank-0.pt") == files_of(10)[0]["rank-0.pt"]
        assert run_.decision(id_).outcome is Outcome.PRUNING
    assert run_.leases() == []
    _sweep(run_)
    assert run_.decision(id_).outcome is Outcome.PRUNED


def test_a_lease_is_renewed_twice_before_it_may_run_out(run_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    id_, pauses, sleep = run_.commit(10), list[float](), asyncio.sleep

    async def noted(pause_s: float) -> None:
        if pause_s < 1.0:
            return await sleep(pause_s)
        pauses.append(pause_s)
        raise asyncio.CancelledError

    async def main() -> None:
        async with session.session(run_.url, None) as opened:
            held = session.HeldLease(opened, Lease(id_, "reader", session.LEASE_TTL_S))
            with contextlib.suppress(asyncio.CancelledError):
                await held.keep()

    monkeypatch.setattr(asyncio, "sleep", noted)
    asyncio.run(main())
    assert pauses == [session.LEASE_TTL_S / 3]


@pytest.mark.parametrize("ttl_s", [0.0, 900.0])
def test_a_lease_that_has_run_out_holds_up_no_pruning(run_: Run, ttl_s: float) -> None:
    """The sweeper may not have seen it, and may be deleting."""
    id_ = run_.commit(10)

    async def main() -> bool:
        async with session.session(run_.url, None) as opened:
            held = session.HeldLease(opened, Lease(id_, "reader", ttl_s))
            await held.taken()
            assert await steps.begin_prune(opened.store, id_)
            return await held._renew()

    assert asyncio.run(main()) is (ttl_s > 0)


def test_without_renewal_reading_stops_before_the_lease_expires(
    run_: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store stops accepting renewals, an error is better than a shard that vanishes under the reader."""
    _short(monkeypatch, 1.0)
    run_.commit(10)
    checkpoint = _find(run_)
    with restore.open(checkpoint) as reader:

        async def refused(*_: Any) -> bool:
            raise StoreError("no", reason=FailureReason.TRANSIENT, operation="put")

        monkeypatch.setattr(session.HeldLease, "_renew", refused)
        deadline = time.monotonic() + 30

        def read_on() -> None:
            while time.monotonic() < deadline:
                reader.read("rank-0.pt", 0, 1)

        with pytest.raises(restore.CheckpointGoneError, match="its lease expired"):
            read_on()


def test_a_killed_readers_lease_expires(run_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a dead reader blocks retention for its term, and no longer."""
    _no_margin(monkeypatch)
    id_ = run_.commit(10)
    checkpoint = _find(run_)
    run_.commit(20)
    with plays.playing(plays.holds, checkpoint, 3.0) as (process, pipe):
        assert plays.told(pipe) == "open"
        process.kill()
        process.join(plays.PATIENCE_S)
    assert [lease.checkpoint for lease in run_.leases()] == [id_]
    _sweep(run_)
    assert run_.decision(id_).outcome is Outcome.PRUNING
    deadline = time.monotonic() + 30
    while run_.decision(id_).outcome is not Outcome.PRUNED:
        assert time.monotonic() < deadline
        _sweep(run_)


def test_a_sweepers_wrong_clock_does_not_end_a_lease(run_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store (here its file system) tells how old a lease is, so a sweeper whose clock is two hours ahead
    prunes nothing under a reader.
    """
    id_ = run_.commit(10)
    checkpoint = _find(run_)
    run_.commit(20)
    now = time.time
    with restore.open(checkpoint) as reader:
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: now() + 7200)
            _sweep(run_)
            _sweep(run_)
        assert run_.decision(id_).outcome is Outcome.PRUNING
        for files in files_of(10).values():
            for name, data in files.items():
                assert reader.read(name) == data
    _sweep(run_)
    assert run_.decision(id_).outcome is Outcome.PRUNED


@pytest.mark.parametrize("reason", [FailureReason.AUTH, FailureReason.DISK])
def test_read_only_credentials_read_without_a_lease_and_log_it(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, reason: FailureReason
) -> None:
    run_.commit(10)

    async def refused(*_: Any, **__: Any) -> Any:
        raise StoreError("read-only", reason=reason, operation="put")

    monkeypatch.setattr(DirectoryStore, "put", refused)
    with caplog.at_level(logging.WARNING):
        assert is_whole(restore.fetch(_find(run_), tmp_path / "there"), files_of(10))
    assert "reading_without_lease" in caplog.text


def test_pruning_beneath_a_reader_without_a_lease_is_reported(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader must report that the checkpoint is gone, not that it is damaged."""
    id_ = run_.commit(10)
    checkpoint = _find(run_)
    run_.commit(20)
    bring = fetching._Fetching._bring

    async def prune_first(self: Any, *rest: Any) -> None:
        await run_.prune_in_loop(id_)
        await bring(self, *rest)

    async def refused(*_: Any) -> Any:
        raise StoreError("no", reason=FailureReason.AUTH, operation="put")

    monkeypatch.setattr(steps, "take_lease", refused)
    monkeypatch.setattr(fetching._Fetching, "_bring", prune_first)
    with pytest.raises(restore.CheckpointGoneError):
        restore.fetch(checkpoint, tmp_path / "there")
    assert run_.damages() == {}
