"""Ranges of a fetch: few at once while the cores bound them, as many as are allowed while they wait for the network."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import restore
from ckpt_async.restore import lanes as lanes_module
from ckpt_async.restore import partial
from ckpt_async.restore.lanes import LOOK_S, SLOW_BYTES_PER_S, Lanes
from ckpt_async.stores.directory import DirectoryStore
from tests.restore.runs import Run, content, is_whole

NUM_CORES = 2
PATIENCE_S = 30.0
FAST, SLOW = 2 * SLOW_BYTES_PER_S, SLOW_BYTES_PER_S // 2


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "_num_cores", lambda: NUM_CORES)


def _noted(lanes: Lanes, bytes_per_s: int, took_s: float) -> int:
    lanes.note(int(bytes_per_s * took_s), took_s)
    return lanes.limit


def test_lanes_grow_up_to_the_limit_while_they_wait_for_the_network(run: Any) -> None:
    async def main() -> None:
        lanes = Lanes(8)
        assert lanes.limit == NUM_CORES + 1
        assert [_noted(lanes, SLOW, LOOK_S) for _ in range(3)] == [6, 8, 8]
        assert Lanes(2).limit == 2

    run(main())


def test_lanes_stay_few_while_they_are_fast(run: Any) -> None:
    """And so do those of which too little is known; what was known before they became more is forgotten."""

    async def main() -> None:
        lanes = Lanes(16)
        assert _noted(lanes, FAST, 10 * LOOK_S) == 3
        assert [_noted(lanes, SLOW, LOOK_S / 2), _noted(lanes, 2 * FAST, LOOK_S / 2)] == [3, 3]
        assert [_noted(lanes, SLOW, LOOK_S), _noted(lanes, SLOW, LOOK_S / 2)] == [6, 6]

    run(main())


def test_a_lane_reports_its_bytes(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own thread; also the rest, and what is too short to be told by itself."""
    noted: list[tuple[int, float]] = []
    now_s = 100.0
    monkeypatch.setattr(lanes_module.time, "monotonic", lambda: now_s)

    async def main() -> None:
        nonlocal now_s
        lanes = Lanes(8)
        monkeypatch.setattr(lanes, "note", lambda *what: noted.append(what))
        brought = lanes.watch()
        for size_bytes, at_s in ((1, 100.001), (2, 101.0), (4, 101.001), (8, 102.0)):
            now_s = at_s
            await asyncio.to_thread(brought, size_bytes)
        now_s = 102.001
        brought(16, is_last=True)
        await asyncio.sleep(0)

    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: time.perf_counter())
    run(main())
    assert [size_bytes for size_bytes, _ in noted] == [3, 12, 16]
    assert [took_s for _, took_s in noted] == pytest.approx([1.0, 1.0, 0.001])


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], int]:
    """Fetches a file of eight ranges, all slow or none, and tells how many were on their way at once, at most."""
    monkeypatch.setattr(partial, "RANGE_BYTES", 1 << 10)
    files = {0: {"a": content(10, "a", 8 << 10)}}
    run_ = Run(f"file://{tmp_path / 'remote'}")
    run_.commit(10, files)

    def fetch(is_slow: bool) -> int:
        at_once = most = 0
        get_range = DirectoryStore.get_range

        async def noted(self: Any, key: str, offset: int, size_bytes: int, sink: Any) -> Any:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            arrived: list[bytes] = []
            found = await get_range(self, key, offset, size_bytes, lambda piece: arrived.append(bytes(piece)))
            data = memoryview(b"".join(arrived))
            give_up_at = time.monotonic() + PATIENCE_S
            # As over a slow link: a byte now and then, until all that may be are on their way.
            while is_slow and most < 8 and len(data) > 1 and time.monotonic() < give_up_at:
                await asyncio.to_thread(sink, data[:1])
                data = data[1:]
                await asyncio.sleep(lanes_module.TELL_S)
            await asyncio.to_thread(sink, data)
            at_once -= 1
            return found

        with monkeypatch.context() as patched:
            patched.setattr(DirectoryStore, "get_range", noted)
            if not is_slow:
                patched.setattr(lanes_module, "SLOW_BYTES_PER_S", 0)
            found = restore.fetch_latest(run_.url, tmp_path / f"there-{is_slow}")
        assert found is not None
        assert is_whole(found[1], files)
        return most

    return fetch


def test_a_fetch_begins_with_few_concurrent_ranges(fetched: Callable[[bool], int]) -> None:
    assert fetched(False) == NUM_CORES + 1


def test_a_network_bound_fetch_uses_the_full_concurrency(fetched: Callable[[bool], int]) -> None:
    assert fetched(True) == 8


@pytest.mark.parametrize("is_slow", [False, True])
def test_series_of_small_files_share_the_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    files = {0: {f"{number:03}": content(10, str(number), 10) for number in range(8 * 16)}}
    run_ = Run(f"file://{tmp_path / 'remote'}")
    run_.commit(10, files)
    at_once = most = 0
    are_all_there = threading.Event()
    get_many = DirectoryStore.get_many

    async def noted(self: Any, gets: Any, got: Callable[..., None]) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if most == 8:
            are_all_there.set()

        def late(*what: Any) -> None:
            if is_slow:
                are_all_there.wait(20 * lanes_module.TELL_S)
            got(*what)

        await get_many(self, gets, late)
        at_once -= 1

    monkeypatch.setattr(DirectoryStore, "get_many", noted)
    if not is_slow:
        monkeypatch.setattr(lanes_module, "SLOW_BYTES_PER_S", 0)
    found = restore.fetch_latest(run_.url, tmp_path / "there")
    assert found is not None
    assert is_whole(found[1], files)
    assert most == (8 if is_slow else NUM_CORES + 1)


def test_a_cancelled_reader_frees_its_lane(run: Any) -> None:
    async def main() -> None:
        lanes = Lanes(1)
        entered = asyncio.Event()

        async def stay() -> None:
            async with lanes.one():
                entered.set()
                await asyncio.Event().wait()

        staying = asyncio.ensure_future(stay())
        await entered.wait()
        staying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await staying
        async with asyncio.timeout(PATIENCE_S), lanes.one():
            pass

    run(main())


def test_cores_are_counted_by_the_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert lanes_module._num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert lanes_module._num_cores() == os.cpu_count()
