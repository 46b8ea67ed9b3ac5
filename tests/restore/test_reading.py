"""Partial reads: every byte that is wanted, few that are not, from any thread."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async import restore
from ckpt_async.errors import InvalidNameError
from ckpt_async.restore import reading
from ckpt_async.restore.reading import MAX_RUN_BYTES, WASTE_DIVISOR, ReadInto, coalesce, scatter
from ckpt_async.stores.directory import DirectoryStore
from tests.restore.relay import Relay
from tests.restore.runs import Run, content, files_of, shard_key

UNIT = 1 << 18  # ranges are whole units, so that they meet, overlap, and reach the longest run


def _committed(run: Run, files: Any = None) -> restore.Checkpoint:
    run.commit(10, files)
    checkpoint = restore.find(run.url)
    assert checkpoint is not None
    return checkpoint


small = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 400)), max_size=40)
large = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 160)), max_size=12).map(
    lambda wants: [(offset * UNIT, size * UNIT) for offset, size in wants]
)


@given(large | small)
def test_ranges_are_merged_with_few_requests_and_little_waste(wants: list[tuple[int, int]]) -> None:
    """Each run covers its ranges, respects the size limit, and consists to at least 20/21 of wanted bytes."""
    nothing = memoryview(bytes(max([size for _, size in wants], default=0)))
    runs = coalesce([(offset, nothing[:size]) for offset, size in wants])
    asked = set()
    for run in runs:
        assert 0 < run.size_bytes <= MAX_RUN_BYTES
        end = run.offset + run.size_bytes
        covered, position = 0, run.offset
        for offset, buffer in sorted(run.wants, key=lambda want: want[0]):
            assert run.offset <= offset
            assert offset + len(buffer) <= end
            covered += max(0, offset + len(buffer) - max(position, offset))
            position = max(position, offset + len(buffer))
        assert (run.size_bytes - covered) * WASTE_DIVISOR <= covered
        asked |= {(offset, len(buffer)) for offset, buffer in run.wants}
    assert sum(len(buffer) for run in runs for _, buffer in run.wants) == sum(size for _, size in wants)
    assert {offset for offset, size in wants if size} <= {offset for offset, _ in asked}


@given(small, st.integers(1, 500))
def test_every_wanted_byte_is_delivered(wants: list[tuple[int, int]], piece_bytes: int) -> None:
    """Data may arrive in pieces of any size, and overlapping ranges each get their own copy."""
    data = content(1, "data", 3400)
    buffers = [bytearray(size) for _, size in wants]
    runs = coalesce(
        [(offset, memoryview(buffer)) for (offset, _), buffer in zip(wants, buffers, strict=True)]
    )
    for run in runs:
        for _ in range(2):  # a failed attempt, and the next one
            sink = scatter(run)
            stretch = data[run.offset : run.offset + run.size_bytes]
            for start in range(0, len(stretch), piece_bytes):
                sink(memoryview(stretch[start : start + piece_bytes]))
    assert [bytes(each) for each in buffers] == [data[offset : offset + size] for offset, size in wants]


def test_adjacent_ranges_are_read_together(run_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand small tensors with padding in between take a single request."""
    data = bytes(1 << 20)
    nothing = memoryview(bytearray(1000))
    assert len(coalesce([(start, nothing) for start in range(0, len(data), 1024)])) == 1


def test_reading_from_many_threads(any_run: Run) -> None:
    checkpoint = _committed(any_run)
    whole = {name: data for theirs in files_of(10).values() for name, data in theirs.items()}
    with restore.open(checkpoint, num_concurrent_reads=4) as reader:
        assert reader.files == checkpoint.files

        def read(number: int) -> bool:
            name = sorted(whole)[number % 4]
            offset, size = number * 37 % 2000, number * 91 % 1000
            buffers = [bytearray(size), bytearray(7)]
            reader.read_into(
                [ReadInto(name, offset, memoryview(buffers[0])), ReadInto(name, 5, memoryview(buffers[1]))]
            )
            return (
                bytes(buffers[0]) == whole[name][offset : offset + size] and buffers[1] == whole[name][5:12]
            )

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(read, range(64)))
        assert reader.read("rank-0.pt") == whole["rank-0.pt"]
        assert set(reader.bytes_from) == {"remote"}
        for name, offset, size in (("nothing", 0, 1), ("rank-0.pt", 2999, 2), ("rank-0.pt", -1, 1)):
            with pytest.raises(InvalidNameError):
                reader.read(name, offset, size)
    assert any_run.leases() == []


def test_only_the_needed_bytes_are_transferred(counted_run: Run, relay: Relay) -> None:
    """For a tenth of a file in scattered tensors, at most 1.1 times their bytes may be
    transferred, counted on the wire.
    """
    size_bytes = 24 << 20
    data = content(1, "big", size_bytes)
    checkpoint = _committed(counted_run, {0: {"big.pt": data}})
    tensor = 48 << 10
    wants = [(start, tensor) for start in range(0, size_bytes - tensor, 10 * tensor)]
    buffers = [bytearray(size) for _, size in wants]
    with restore.open(checkpoint) as reader:
        before = relay.bytes_back
        reader.read_into(
            [
                ReadInto("big.pt", offset, memoryview(buffer))
                for (offset, _), buffer in zip(wants, buffers, strict=True)
            ]
        )
        moved_bytes = relay.bytes_back - before
    wanted_bytes = tensor * len(wants)
    assert [bytes(each) for each in buffers] == [data[offset : offset + size] for offset, size in wants]
    assert wanted_bytes <= moved_bytes <= 1.1 * wanted_bytes
    assert sum(size for _, size in relay.asked("big.pt")) <= 1.05 * wanted_bytes


def test_a_local_copy_is_read(run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is used if it is right and for as long as it is not modified; after that, the store is read again."""
    checkpoint = _committed(run_)
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.pt").write_bytes(content(10, "rank-0.pt"))
    looks, look = [], reading.checksum_of_file
    monkeypatch.setattr(
        reading, "checksum_of_file", lambda path, *rest: looks.append(path) or look(path, *rest)
    )
    with restore.open(checkpoint, folder=tmp_path) as reader:
        for name in ("rank-0.pt", "rank-1.pt"):
            for _ in range(3):
                assert reader.read(name, 10, 100) == content(10, name)[10:110]
        assert reader.bytes_from == {"local": 300, "remote": 300}
        assert len(looks) == 2
        (tmp_path / "rank-0.pt").write_bytes(bytes(3000))
        assert reader.read("rank-0.pt", 10, 100) == content(10, "rank-0.pt")[10:110]
        assert reader.bytes_from == {"local": 300, "remote": 400}


def test_large_reads_of_a_local_copy_go_straight_to_their_buffers(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extra copy would take time, and small reads share a system call. If the local file
    ends early, the store is read.
    """
    data = content(1, "large", 1 << 20)
    checkpoint = _committed(run_, {0: {"large.pt": data}})
    (tmp_path / "large.pt").write_bytes(data)
    runs, preadv, scatter = [], os.preadv, reading.scatter
    monkeypatch.setattr(reading, "scatter", lambda run: runs.append(len(run.wants)) or scatter(run))

    def read(reader: restore.Reader, *wants: tuple[int, int]) -> None:
        buffers = [bytearray(size) for _, size in wants]
        reader.read_into(
            [ReadInto("large.pt", at, memoryview(b)) for (at, _), b in zip(wants, buffers, strict=True)]
        )
        assert [bytes(each) for each in buffers] == [data[at : at + size] for at, size in wants]

    with restore.open(checkpoint, folder=tmp_path) as reader:
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:99_999]], at))
        read(reader, (17, 300_000), (400_000, 300_001), (0, 200_000))
        assert runs == []
        read(reader, *((at, 100) for at in range(0, 100_000, 100)))
        assert runs == [1000]
        counts = [0]
        monkeypatch.setattr(
            os, "preadv", lambda fd, views, at: counts.pop() if counts else preadv(fd, views, at)
        )
        read(reader, (0, 1 << 20))
        assert reader.bytes_from == {"local": 700_018, "remote": 1 << 20}


def test_a_closed_reader_raises(run_: Run) -> None:
    checkpoint = _committed(run_)
    reader = restore.open(checkpoint)
    reader.close()
    reader.close()
    with pytest.raises(restore.CheckpointGoneError, match="closed"):
        reader.read("rank-0.pt")


def test_close_aborts_reads_in_progress(run_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread may wait forever, whenever reading and closing meet."""
    checkpoint = _committed(run_)
    began = threading.Event()

    async def endless(*_: Any) -> Any:
        import asyncio

        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(DirectoryStore, "get_range", endless)
    reader = restore.open(checkpoint)
    with ThreadPoolExecutor(4) as threads:
        reads = [threads.submit(reader.read, "rank-0.pt") for _ in range(4)]
        assert began.wait(30)
        reader.close()
        for each in reads:
            with pytest.raises(restore.CheckpointGoneError, match="closed"):
                each.result(30)
    assert run_.leases() == []


@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_damage_raises(run_: Run, damage: str) -> None:
    """The checkpoint is marked as well, as by `fetch`."""
    checkpoint = _committed(run_)
    run_.delete(shard_key(10, "rank-0.pt"))
    if damage == "cut short":
        run_.put(shard_key(10, "rank-0.pt"), bytes(100))
    with restore.open(checkpoint) as reader, pytest.raises(restore.DamagedCheckpointError):
        reader.read("rank-0.pt")
    assert list(run_.damages()) == [checkpoint.id]


def test_an_error_of_the_sink_is_raised_unchanged(run_: Run) -> None:
    """That a buffer is read-only is not a failure of the store."""
    checkpoint = _committed(run_)
    with restore.open(checkpoint) as reader, pytest.raises(TypeError, match="read-only"):
        reader.read_into([ReadInto("rank-0.pt", 0, memoryview(bytes(10)))])
