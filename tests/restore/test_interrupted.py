"""Fetches survive kills, concurrent processes and bad networks, and never fetch again what they already have."""

import asyncio
import base64
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import restore
from ckpt_async.core import keys
from ckpt_async.errors import StoreError
from ckpt_async.restore import destination as destinations
from ckpt_async.restore.destination import PARTIAL_FOLDER
from ckpt_async.stores.checksums import checksum_of
from tests.faults.processes import SOAK
from tests.faults.proxy import Fault, FaultProxy
from tests.restore import plays
from tests.restore.relay import Relay
from tests.restore.runs import Run, content, files_of, is_whole, left_in, shard_key

MIB = 1 << 20


def _committed(run: Run, files: dict[int, dict[str, bytes]], step: int = 10) -> restore.Checkpoint:
    run.commit(step, files)
    checkpoint = restore.find(run.url)
    assert checkpoint is not None
    return checkpoint


def _recorded(there: Path, files: list[bytes], range_bytes: int) -> set[bytes]:
    """Return the ranges, as bytes, that the records of the partial files list as fetched."""
    known = {
        checksum_of(data[start : start + range_bytes], "crc64nvme").value: data[start : start + range_bytes]
        for data in files
        for start in range(0, len(data), range_bytes)
    }
    found = set()
    for record in (there / PARTIAL_FOLDER).glob("*.ranges"):
        for line in record.read_text().splitlines():
            found.add(known[line.partition(" ")[2]])
    return found


def _ranges(asked: list[tuple[int, int]]) -> set[int]:
    """Return the offsets of the ranges covered by these requests."""
    return {at for offset, size in asked for at in range(offset, offset + size, destinations.RANGE_BYTES)}


@pytest.mark.parametrize("num_kills", [20, pytest.param(500, marks=SOAK)])
def test_a_fetch_killed_repeatedly_resumes(run_: Run, tmp_path: Path, seed: int, num_kills: int) -> None:
    """SIGKILL may come between any two pieces. The fetch must finish byte-identical, and no
    recorded range may be requested again.
    """
    chance = random.Random(seed)
    range_bytes, num_ranges = 1000, 22 * num_kills
    files = {
        rank: {f"rank-{rank}.pt": content(rank, "x", range_bytes * num_ranges // 2 + rank)} for rank in (0, 1)
    }
    all_bytes = {shard_key(10, name): data for theirs in files.values() for name, data in theirs.items()}
    checkpoint = _committed(run_, files)
    there, had, num_died = tmp_path / "there", set(), 0
    while True:
        budget = 10**9 if num_died == num_kills else chance.randrange(41)
        with plays.playing(plays.fetches_by_pieces, checkpoint, str(there), range_bytes, budget) as (
            process,
            pipe,
        ):
            asked, report = [], None
            try:
                while report is None:
                    message = plays.told(pipe)
                    if isinstance(message, dict):
                        report = message
                    else:
                        asked.append(message)
            except EOFError:
                process.join(plays.PATIENCE_S)
                assert process.exitcode == -9
                num_died += 1
        wanted = [
            (key, at) for key, offset, size in asked for at in range(offset, offset + size, range_bytes)
        ]
        again = [(key, at) for key, at in wanted if all_bytes[key][at : at + range_bytes] in had]
        assert again == []
        if report is not None:
            break
        had = _recorded(there, list(all_bytes.values()), range_bytes)
        assert [path for path in left_in(there) if not path.startswith(PARTIAL_FOLDER)] == [
            name for name in sorted(checkpoint.files) if (there / name).exists()
        ]
    assert num_died == num_kills
    assert report.get("resumed", 0) + report.get("there", 0) > 0
    paths = {name: there / name for name in checkpoint.files}
    assert is_whole(restore.FetchReport(paths, report, 0.0), files)
    assert left_in(there) == sorted(checkpoint.files)
    assert sum(report.values()) == checkpoint.size_bytes


def test_a_fetch_from_s3_killed_repeatedly_resumes(
    counted_run: Run, relay: Relay, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are counted on the wire: no process may ask again for a recorded range."""
    chance = random.Random(seed)
    data = os.urandom(24 * destinations.RANGE_BYTES + 5)
    checkpoint = _committed(counted_run, {0: {"big.pt": data}})
    there, recorded = tmp_path / "there", set()
    # The last kill comes after twice as many bytes as can be in flight, so that some ranges are on record.
    for size_bytes in (*(chance.randrange(1, 24) * MIB for _ in range(3)), 4 * destinations.RANGE_BYTES):
        start = len(relay.asked("big.pt"))
        with (
            plays.playing(plays.fetches, checkpoint, str(there), {"num_concurrent_reads": 2}) as (
                process,
                pipe,
            ),
            relay.holding_after(size_bytes) as wait,
        ):
            plays.told(pipe)
            pipe.send("go")
            wait()
            process.kill()
            process.join(plays.PATIENCE_S)
        assert recorded.isdisjoint(_ranges(relay.asked("big.pt")[start:]))
        for record in (there / PARTIAL_FOLDER).glob("*.ranges"):
            recorded |= {int(line.split()[0]) for line in record.read_text().splitlines()}
    start = len(relay.asked("big.pt"))
    report = restore.fetch(checkpoint, there)
    assert recorded
    assert recorded.isdisjoint(_ranges(relay.asked("big.pt")[start:]))
    assert is_whole(report, {0: {"big.pt": data}})


def test_a_wrong_progress_record_is_not_trusted(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power loss may leave a record of bytes that never reached the disk, or half a line."""
    monkeypatch.setattr(destinations, "RANGE_BYTES", 1000)
    files = {0: {"a.pt": content(1, "a", 3000)}}
    checkpoint = _committed(run_, files)
    there = tmp_path / "there"

    def fail(self: destinations.PartialFile, target: Path, **options: int) -> None:
        raise OSError(5, "by the test")

    publish = destinations.PartialFile.publish
    monkeypatch.setattr(destinations.PartialFile, "publish", fail)
    with pytest.raises(restore.DestinationError):
        restore.fetch(checkpoint, there)
    (ranges,) = (there / PARTIAL_FOLDER).glob("*.ranges")
    path = ranges.with_suffix("")
    data = bytearray(path.read_bytes())
    assert data == files[0]["a.pt"]
    data[1500] ^= 1
    path.write_bytes(data)
    with path.with_name(f"{path.name}.ranges").open("ab") as record:
        record.write(b"\xff\x00 nonsense\n2000 AAAA\n99999 " + base64.b64encode(bytes(8)) + b"\n1000")
    monkeypatch.setattr(destinations.PartialFile, "publish", publish)
    report = restore.fetch(checkpoint, there)
    assert is_whole(report, files)
    assert report.bytes_from == {"resumed": 2000, "remote": 1000}


def test_leftovers_of_another_checkpoint_are_not_mixed_in(run_: Run, tmp_path: Path) -> None:
    """The names and sizes are the same, but the step is another."""
    first = _committed(run_, files_of(10))
    with plays.playing(plays.fetches_by_pieces, first, str(tmp_path / "there"), 1000, 3) as (process, _):
        process.join(plays.PATIENCE_S)
        assert process.exitcode == -9
    second = _committed(run_, files_of(20), 20)
    assert is_whole(restore.fetch(second, tmp_path / "there", overwrite=True), files_of(20))


def test_concurrent_processes_fetch_each_file_once(counted_run: Run, relay: Relay, tmp_path: Path) -> None:
    """Processes that want the same files wait for each other; the requests are counted on
    the wire. One process is killed.
    """
    files = {rank: {f"rank-{rank}.pt": os.urandom(6 * MIB)} for rank in range(4)}
    checkpoint = _committed(counted_run, files)
    with (
        plays.playing(plays.fetches, checkpoint, str(tmp_path / "there"), {}) as (_, first),
        plays.playing(plays.fetches, checkpoint, str(tmp_path / "there"), {}) as (_, second),
        plays.playing(plays.fetches, checkpoint, str(tmp_path / "there"), {}) as (_, third),
    ):
        for pipe in (first, second, third):
            assert plays.told(pipe) == "ready"
        for pipe in (first, second, third):
            pipe.send("go")
        reports = [plays.told(pipe) for pipe in (first, second, third)]
    assert sorted(relay.asked(".pt")) == [(0, 4 * MIB)] * 4 + [(4 * MIB, 2 * MIB)] * 4
    assert sum(report.get("remote", 0) for report in reports) == checkpoint.size_bytes
    assert all(sum(report.values()) == checkpoint.size_bytes for report in reports)
    paths = {name: tmp_path / "there" / name for name in checkpoint.files}
    assert is_whole(restore.FetchReport(paths, {}, 0.0), files)


def test_a_waiting_process_resumes_where_a_killed_one_stopped(run_: Run, tmp_path: Path) -> None:
    """The lock ends with the process that holds it."""
    files = {0: {"a.pt": content(1, "a", 100_000)}}
    checkpoint = _committed(run_, files)
    held = threading.Event()
    with plays.playing(plays.fetches_by_pieces, checkpoint, str(tmp_path / "there"), 10_000, 7) as (
        process,
        _,
    ):
        process.join(plays.PATIENCE_S)
        held.set()
    report = restore.fetch(checkpoint, tmp_path / "there")
    assert is_whole(report, files)
    assert held.is_set()


def test_fetch_memory_is_bounded(tmp_path: Path) -> None:
    """The file has 512 MiB, mostly holes. Beyond what a small fetch needs, a fetch may take only a few buffers."""
    run = Run(f"file://{tmp_path / 'remote'}")
    size_bytes = 512 * MIB
    run.commit(5, {0: {"small.pt": b"x" * 1000}})
    small = restore.find(run.url)
    digest_of_nothing = checksum_of(bytes(MIB), "crc64nvme")
    whole = destinations.combine([(digest_of_nothing, MIB)] * 512, "crc64nvme")
    path = tmp_path / "remote" / shard_key(10, "large.pt")
    run.commit(10, {0: {"large.pt": b""}})
    with path.open("r+b") as file:
        file.truncate(size_bytes)
    checkpoint = restore.Checkpoint(
        run.url,
        restore.checkpoint.CheckpointId(1, 10),
        "step-10",
        1,
        {"large.pt": restore.RemoteFile("large.pt", shard_key(10, "large.pt"), size_bytes, whole, (0,))},
    )
    with plays.playing(plays.measures, checkpoint, small, str(tmp_path)) as (_, pipe):
        before_kib, after_kib = plays.told(pipe)
    assert after_kib - before_kib < 64 * 1024
    assert (tmp_path / "large" / "large.pt").stat().st_size == size_bytes


FAULTS = [
    Fault("unavailable", times=6),
    Fault("cut_reply", times=6, after_bytes=300_000),
    Fault("cut_reply", times=6, after_bytes=10),
    Fault("drop_reply", times=6),
    Fault("silent", times=2),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.after_bytes}")
def test_a_bad_network_is_survived(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """After refusals, answers cut off anywhere, and dropped or silent connections, the fetch
    tries again and ends correctly.
    """
    monkeypatch.setattr(destinations, "RANGE_BYTES", MIB)
    monkeypatch.setenv("CKPT_ASYNC_STALL_TIMEOUT_S", "1")
    monkeypatch.setenv("CKPT_ASYNC_RETRY_INITIAL_S", "0.01")
    files = {0: {"a.pt": content(1, "a", 4 * MIB + 7), "b.pt": content(1, "b", 100)}}
    checkpoint = _committed(Run(s3_url), files)
    fault = Fault(fault.kind, "GET", "/ckpt/step-", times=fault.times, after_bytes=fault.after_bytes)
    proxy.add(fault)
    report = restore.fetch(checkpoint, tmp_path / "there", num_concurrent_reads=3)
    assert is_whole(report, files)
    assert fault.num_hits == fault.times


def test_lost_connections_are_survived(
    counted_run: Run, relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections break, at any byte, several times."""
    monkeypatch.setattr(destinations, "RANGE_BYTES", 4 * MIB)
    monkeypatch.setenv("CKPT_ASYNC_RETRY_INITIAL_S", "0.01")
    files = {0: {"a.pt": os.urandom(24 * MIB)}}
    checkpoint = _committed(counted_run, files)
    done = threading.Event()
    breaks = 0

    def break_all() -> None:
        nonlocal breaks
        for _ in range(4):
            try:
                relay.wait_for_bytes(4 * MIB)
            except AssertionError:
                return
            relay.break_all()
            breaks += 1

    thread = threading.Thread(target=break_all)
    thread.start()
    report: Any = restore.fetch(checkpoint, tmp_path / "there", num_concurrent_reads=4)
    thread.join()
    done.set()
    assert is_whole(report, files)
    assert breaks == 4


def test_a_store_that_stays_unavailable_raises(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises after the configured time; everything fetched so far is kept for the next call."""
    monkeypatch.setattr(destinations, "RANGE_BYTES", 1000)
    monkeypatch.setenv("CKPT_ASYNC_UPLOAD_TIMEOUT_S", "1")
    files = {0: {"a.pt": content(1, "a", 3000)}}
    checkpoint = _committed(Run(s3_url), files)
    refused = proxy.add(Fault("unavailable", "GET", "/ckpt/step-"))
    with pytest.raises(StoreError):
        restore.fetch(checkpoint, tmp_path / "there")
    assert refused.num_hits > 0
    proxy.heal()
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there"), files)
    assert Run(s3_url).keys(keys.DAMAGED) == []


@pytest.mark.fault("F61")
@pytest.mark.parametrize("kind", ["denied", "expired", "unavailable", "silent"])
def test_a_store_that_refuses_the_data_raises_when_the_retry_budget_ends(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """When records can be read but shards cannot, a fetch must not retry for the hour that an
    upload may take. Nothing is marked.
    """
    monkeypatch.setenv("CKPT_ASYNC_STALL_TIMEOUT_S", "0.3")
    monkeypatch.setenv("CKPT_ASYNC_RETRY_INITIAL_S", "0.05")
    files = {0: {"a.pt": content(1, "a", 3000)}}
    checkpoint = _committed(Run(s3_url), files)
    proxy.add(Fault(kind, "GET", "/ckpt/step-"))
    with plays.playing(plays.fetches, checkpoint, str(tmp_path / "there"), {}, 1.0) as (_, pipe):
        assert plays.told(pipe) == "ready"
        pipe.send("go")
        name, message = plays.told(pipe)
    assert name == "StoreError", message
    proxy.heal()
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there"), files)
    assert Run(s3_url).damages() == {}


def test_ctrl_c_ends_a_fetch_promptly(run_: Run, tmp_path: Path) -> None:
    """The fetch ends at once, and so does its lease."""
    checkpoint = _committed(run_, files_of(10))
    with plays.playing(plays.never_ends, checkpoint, str(tmp_path / "there")) as (process, pipe):
        assert plays.told(pipe) == "reading"
        assert len(run_.leases()) == 1
        assert process.pid
        os.kill(process.pid, signal.SIGINT)
        assert plays.told(pipe) == "interrupted"
        process.join(plays.PATIENCE_S)
    assert run_.leases() == []


@pytest.mark.parametrize("call", ["fetch", "read"])
def test_ctrl_c_ends_the_comparison_of_a_large_local_file(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """One of 100 GB takes minutes. Here it would take thousands of turns, of which a few may still begin.

    The signal arrives on another thread, which does not end what the main thread waits for. That happens to one that
    arrives just before the main thread begins to wait.
    """
    monkeypatch.setattr(destinations, "SHARE_BYTES", 64 << 10)
    monkeypatch.setattr(destinations, "READ_BYTES", 1 << 10)
    num_turns = itertools.count()

    class SlowDigest(destinations.Digest):
        def update(self, data: Any) -> None:
            if next(num_turns) == 0:
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            time.sleep(0.01)
            super().update(data)

    data = random.Random(1).randbytes(4 * MIB)
    checkpoint = _committed(run_, {0: {"a.pt": data}})
    folder = tmp_path / "folder" / checkpoint.name
    folder.mkdir(parents=True)
    (folder / "a.pt").write_bytes(data)
    monkeypatch.setattr(destinations, "Digest", SlowDigest)

    def read() -> None:
        with restore.open(checkpoint, folder=tmp_path / "folder") as reader:
            reader.read("a.pt", 0, 10)

    calls = {"fetch": lambda: restore.fetch(checkpoint, folder), "read": read}
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert next(num_turns) < len(data) // destinations.READ_BYTES


def test_a_forked_child_holds_no_lock(tmp_path: Path) -> None:
    """A dataloader worker forked during a fetch inherits a copy of the lock's descriptor."""

    async def main() -> None:
        async with destinations.locked(tmp_path / "x", 10, "crc64nvme"):
            context = multiprocessing.get_context("fork")
            stays, go = context.Event(), context.Event()
            child = context.Process(target=lambda: (stays.set(), go.wait()))
            child.start()
            assert await asyncio.to_thread(stays.wait, 30)
        try:
            async with asyncio.timeout(10), destinations.locked(tmp_path / "x", 10, "crc64nvme"):
                pass
        finally:
            go.set()
            child.join()

    with warnings.catch_warnings():
        # The warning of Python 3.12 is about exactly this.
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.run(main())
