"""How much a reader requests at once, and in how many requests: little until the link's throughput is known."""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import restore
from ckpt_async.core.units import MIB
from ckpt_async.restore import destination as destinations
from ckpt_async.restore import session as lanes_module
from ckpt_async.restore import session as session_module
from ckpt_async.restore.session import (
    CONCURRENT_READS_AT_FIRST,
    MAX_CONCURRENT_READS,
    MAX_REQUEST_BYTES,
    Pace,
)
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.stores.interface import Moved
from ckpt_async.transfer import link
from ckpt_async.transfer.budgets import FIRST_SERIES, MAX_SERIES
from tests.restore.runs import Run, content, is_whole

RANGE_BYTES = 1 << 10


def test_requests_are_small_until_a_connection_is_known() -> None:
    pace = Pace()
    assert pace.request_bytes(1 << 40, 8) == 0
    pace.took(4 * MIB, 0.8)
    assert pace.request_bytes(1 << 40, 8) == 5 * MIB


def test_requests_take_about_a_second_and_are_never_larger_than_32_mib() -> None:
    pace = Pace()
    pace.took(4 * MIB, 0.2)
    assert pace.request_bytes(1 << 40, 8) == 20 * MIB
    for _ in range(20):
        pace.took(20 * MIB, 0.1)
    assert pace.request_bytes(1 << 40, 8) == MAX_REQUEST_BYTES


def test_the_last_requests_are_small_so_that_all_end_together() -> None:
    pace = Pace()
    pace.took(40 * MIB, 1.0)
    assert [pace.request_bytes(left * MIB, 8) // MIB for left in (1024, 256, 64, 16)] == [32, 16, 4, 4]


def test_the_last_requests_are_not_so_small_that_a_fast_connection_would_wait_for_answers() -> None:
    pace = Pace()
    pace.took(200 * MIB, 1.0)
    assert pace.request_bytes(16 * MIB, 8) == 20 * MIB


def test_one_odd_request_says_little_of_the_link() -> None:
    pace = Pace()
    for size_bytes in (8, 8, 80):
        pace.took(size_bytes * MIB, 1.0)
    assert pace.request_bytes(1 << 40, 8) == 26 * MIB


def test_cores_are_counted_by_the_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lanes_module.num_of_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert lanes_module.num_of_cores() == os.cpu_count()


class Slow:
    """A folder store with slow connections. `most` is the highest number of transfers that
    were running at the same time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self._at_once = self._moved_bytes = 0
        self.series: list[int] = []
        get_range, get_many, slow = DirectoryStore.get_range, DirectoryStore.get_many, self

        async def trickling(store: Any, key: str, offset: int, size_bytes: int, sink: Any) -> Any:
            arrived: list[bytes] = []
            found = await get_range(
                store, key, offset, size_bytes, lambda piece: arrived.append(bytes(piece))
            )
            data = memoryview(b"".join(arrived))
            with slow._under_way():
                for at in range(0, len(data), 256):
                    await slow._moves(256)
                    await asyncio.to_thread(sink, data[at : at + 256])
            return found

        async def one_by_one(store: Any, gets: Any, got: Any) -> None:
            slow.series.append(0)
            number = len(slow.series) - 1
            with slow._under_way():
                for get in gets:
                    slow.series[number] += 1
                    await slow._moves(get.size_bytes)
                    await get_many(store, [get], got)

        monkeypatch.setattr(DirectoryStore, "get_range", trickling)
        monkeypatch.setattr(DirectoryStore, "get_many", one_by_one)
        monkeypatch.setattr(DirectoryStore, "moved", lambda _: Moved(slow._moved_bytes, 0.0))

    async def _moves(self, size_bytes: int) -> None:
        await asyncio.sleep(0.01)
        self._moved_bytes += size_bytes

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        self._at_once += 1
        self.most = max(self.most, self._at_once)
        try:
            yield
        finally:
            self._at_once -= 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    monkeypatch.setattr(destinations, "RANGE_BYTES", RANGE_BYTES)
    return Slow(monkeypatch)


def _committed(tmp_path: Path, files: dict[int, dict[str, bytes]]) -> restore.Checkpoint:
    run = Run(f"file://{tmp_path / 'remote'}")
    run.commit(10, files)
    checkpoint = restore.find(run.url)
    assert checkpoint is not None
    return checkpoint


def test_a_fetch_over_slow_connections_uses_many(slow: Slow, tmp_path: Path) -> None:
    files = {0: {"a": content(10, "a", 500 * RANGE_BYTES)}}
    assert is_whole(restore.fetch(_committed(tmp_path, files), tmp_path / "there"), files)
    assert slow.most > CONCURRENT_READS_AT_FIRST


def test_a_fetch_notes_in_the_folder_what_it_has_found_and_begins_with_what_is_noted(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {0: {"a": content(10, "a", 300 * RANGE_BYTES)}}
    checkpoint = _committed(tmp_path, files)
    begun: list[int] = []
    opened = session_module.Session

    def session(*values: Any) -> session_module.Session:
        begun.append(opened(*values).bulk.concurrency)
        return opened(*values)

    monkeypatch.setattr(session_module, "Session", session)
    folder = tmp_path / "folder"
    noted = folder / ".ckpt-async" / "link-down.json"
    noted.parent.mkdir(parents=True)
    restore.fetch(checkpoint, tmp_path / "first", folder=folder)
    assert link.recall_known(noted, checkpoint.remote, time.time()) is not None
    link.note_known(noted, checkpoint.remote, link.KnownLink(24, 1e4), time.time())
    restore.fetch(checkpoint, tmp_path / "second", folder=folder)
    restore.fetch(checkpoint, tmp_path / "third")
    assert begun == [CONCURRENT_READS_AT_FIRST, 24, CONCURRENT_READS_AT_FIRST]


def test_small_files_soon_come_over_many_connections(slow: Slow, tmp_path: Path) -> None:
    """Each takes the next file when it has received one, so that none is idle before the end."""
    files = {0: {f"{number:04}": content(10, str(number), 10) for number in range(1000)}}
    assert is_whole(restore.fetch(_committed(tmp_path, files), tmp_path / "there"), files)
    assert slow.most > CONCURRENT_READS_AT_FIRST
    assert sum(slow.series) == 1000
    assert slow.series[:CONCURRENT_READS_AT_FIRST] == [FIRST_SERIES] * CONCURRENT_READS_AT_FIRST
    assert max(slow.series) <= MAX_SERIES
    assert len(slow.series) <= CONCURRENT_READS_AT_FIRST + 1000 // MAX_SERIES + MAX_CONCURRENT_READS


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_requests_are_made_at_once_than_the_caller_allows(
    slow: Slow, tmp_path: Path, most: int
) -> None:
    files = {rank: {f"{rank}": content(10, str(rank), 40 * RANGE_BYTES)} for rank in range(3)}
    report = restore.fetch(_committed(tmp_path, files), tmp_path / "there", num_concurrent_reads=most)
    assert is_whole(report, files)
    assert slow.most == most


def test_a_low_limit_on_open_files_limits_the_connections(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of what is left goes to them. (The event loop takes about three first.)"""
    files = {0: {f"{number}": content(10, str(number), 10) for number in range(100)}}
    checkpoint, limits = _committed(tmp_path, files), resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + 3 + 14
    monkeypatch.setattr(session_module.resource, "getrlimit", lambda _: (most, limits[1]))
    assert is_whole(restore.fetch(checkpoint, tmp_path / "there"), files)
    assert slow.most == 3
