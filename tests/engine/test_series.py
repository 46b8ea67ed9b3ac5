"""Many small shards sent as one series: each arrives complete and once; what fails is left to single uploads that
retry.
"""

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import CheckpointAbortedError, Uploader
from ckpt_async.core import decide, failures
from ckpt_async.core.model import CheckpointId, Verified
from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.engine import uploading
from ckpt_async.engine.loop import Engine
from ckpt_async.errors import FailureReason, JournalError
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.monitor.metrics import Metrics
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.transfer import budgets
from ckpt_async.transfer import upload as transfer
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.source import Source
from ckpt_async.transfer.upload import SmallShard, upload_many
from tests.stores.misbehaving import Meddled, Slow, trouble
from tests.trainer.uploads import QUICK, decisions, wait_until, write

NAMES = ["a", "b", "c", "d", "e"]
WRONG = checksum_of(b"something else", "crc64nvme")


def data_of(name: str) -> bytes:
    return name.encode() * 3000


def right(name: str) -> Any:
    return checksum_of(data_of(name), "crc64nvme")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    for name in NAMES:
        (tmp_path / name).write_bytes(data_of(name))
    return Folder(tmp_path)


@pytest.fixture
def shards(folder: Folder) -> list[SmallShard]:
    """Return the shards as they are when they are enqueued."""
    linked = folder.link([(name, name) for name in NAMES], "spool")

    def opened(name: str, identity: Any) -> Source:
        return Source(folder.open_source(name, None, identity), identity, name)

    return [
        SmallShard(f"ckpt/{name}", identity.size_bytes, functools.partial(opened, name, identity))
        for name, (identity, _) in zip(NAMES, linked, strict=True)
    ]


class Counted(Observer):
    def __init__(self) -> None:
        self.finished: list[str] = []

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:
        self.finished += [operation] * len(durations_s)


@pytest.fixture
def observer() -> Counted:
    return Counted()


@pytest.fixture
def send(run: Any, shards: list[SmallShard], observer: Counted) -> Callable[[Any], Any]:
    async def upload(store: Any) -> Any:
        settings = Settings(retry_initial_s=0.01, retry_max_s=0.02, upload_timeout_s=1.0)
        return await upload_many(PatientStore(store, settings, observer), shards)

    return lambda store: run(upload(store))


class Refusing(Meddled):
    """A store that refuses one object."""

    async def before(self, operation: str, key: str) -> None:
        if (operation, key) == ("put", "ckpt/c"):
            raise trouble(FailureReason.THROTTLED)


class Saying(Meddled):
    """A store that reports the given checksum for what it has stored; None reports no checksum."""

    def __init__(self, said: Any) -> None:
        super().__init__()
        self._said = said

    async def put_many(self, puts: Any, stored: Callable[[ObjectInfo], None]) -> None:
        await super().put_many(puts, lambda info: stored(replace(info, checksum=self._said)))


def test_each_shard_is_read_on_its_turn_and_sent_as_read(
    send: Any, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting shards take no memory, and what changes in a file after it was read does not matter."""
    events: list[str] = []
    read = Source.read

    def noting(source: Source) -> bytes:
        data = read(source)
        events.append(f"read {source.path}")
        return data

    class Changing(Meddled):
        async def before(self, operation: str, key: str) -> None:
            events.append(f"{operation} {key}")
            (folder.path / key.removeprefix("ckpt/")).write_bytes(b"changed")

    monkeypatch.setattr(Source, "read", noting)
    store = Changing()
    assert send(store) == [right(name) for name in NAMES]
    assert events == [event for name in NAMES for event in (f"read {name}", f"put ckpt/{name}")]
    assert [store.bucket.objects[f"ckpt/{name}"].data for name in NAMES] == [data_of(name) for name in NAMES]


def test_a_series_uploads_all_its_shards(send: Any, observer: Counted) -> None:
    store = Meddled()
    assert send(store) == [right(name) for name in NAMES]
    assert {key: each.data for key, each in store.bucket.objects.items()} == {
        f"ckpt/{name}": data_of(name) for name in NAMES
    }
    assert set(store.asked.values()) == {1}
    assert observer.finished == ["put"] * 5


def test_shards_before_the_first_refusal_count_as_sent(send: Any, observer: Counted) -> None:
    """The rest is not even tried, since the store may be busy or unavailable."""
    store = Refusing()
    assert send(store) == [right("a"), right("b"), None, None, None]
    assert sorted(store.bucket.objects) == ["ckpt/a", "ckpt/b"]
    assert store.asked["put", "ckpt/c"] == 1
    assert ("put", "ckpt/d") not in store.asked
    assert observer.finished == ["put"] * 3


def test_unconfirmed_shards_are_looked_up(send: Any) -> None:
    """Rule R1: sent does not mean stored."""
    store = Saying(None)
    assert send(store) == [right(name) for name in NAMES]
    assert [store.asked["head", f"ckpt/{name}"] for name in NAMES] == [1] * 5


def test_an_object_with_other_content_does_not_count_as_sent(send: Any) -> None:
    assert send(Saying(WRONG)) == [None] * 5


@pytest.mark.parametrize("reason", [FailureReason.AUTH, FailureReason.OTHER, FailureReason.NOT_FOUND])
def test_a_shard_whose_lookup_fails_does_not_count_as_sent(send: Any, reason: FailureReason) -> None:
    class Closed(Saying):
        async def before(self, operation: str, key: str) -> None:
            if (operation, key) == ("head", "ckpt/b"):
                raise trouble(reason)

    assert send(Closed(None)) == [right("a"), None, *(right(name) for name in "cde")]


@pytest.mark.parametrize("how", ["overwritten", "truncated", "gone", "replaced"])
def test_a_replaced_file_is_left_out_of_the_series(
    send: Any, folder: Folder, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other files are sent, and nothing of the replaced one."""
    path = folder.path / "b"
    match how:
        case "overwritten":
            with path.open("r+b") as file:
                file.write(b"x")
            os.utime(path, ns=(1, 1))
        case "truncated":
            os.truncate(path, 5)
        case "gone":
            path.unlink()
        case "replaced":
            path.unlink()
            path.write_bytes(data_of("b"))
    store = Meddled()
    assert send(store) == [right("a"), None, *(right(name) for name in "cde")]
    assert "ckpt/b" not in store.bucket.objects


@pytest.mark.parametrize("how", ["overwritten", "truncated"])
def test_a_file_that_changes_while_it_is_read_is_left_out_of_the_series(
    send: Any, folder: Folder, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Source.read

    def meddled(source: Source) -> bytes:
        if source.path == "d" and how == "truncated":
            os.truncate(folder.path / "d", 5)
        data = read(source)
        if source.path == "d":
            os.utime(folder.path / "d", ns=(1, 1))
        return data

    monkeypatch.setattr(Source, "read", meddled)
    assert send(Meddled()) == [*(right(name) for name in "abc"), None, right("e")]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), OSError(5, "Input/output error")])
def test_disk_errors_are_left_to_the_single_upload_with_retries(
    send: Any, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """A disk error must not be mistaken for a bug, which would stop the engine."""
    open_source = Folder.open_source

    def meddled(folder: Folder, source: str, *rest: Any) -> int:
        if source != "a":
            raise error
        return open_source(folder, source, *rest)

    monkeypatch.setattr(Folder, "open_source", meddled)
    assert send(Meddled()) == [right("a"), None, None, None, None]


def test_a_series_with_nothing_left_to_send_sends_nothing(send: Any, folder: Folder) -> None:
    for name in NAMES:
        (folder.path / name).unlink()
    store = Meddled()
    assert send(store) == [None] * 5
    assert not store.asked


def test_a_cancelled_series_sends_no_more(run: Any, shards: list[SmallShard]) -> None:
    store = Slow()

    async def main() -> None:
        patient = PatientStore(store, Settings())
        sending = asyncio.ensure_future(upload_many(patient, shards))
        while not store.held:
            await asyncio.sleep(0.001)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        store.go.set()
        assert not store.bucket.objects
        again = await asyncio.wait_for(upload_many(patient, shards), 10)  # the slot is free again
        assert again == [right(name) for name in NAMES]

    run(main())


# --- by the engine -------------------------------------------------------------------------------------------------

Open = Callable[..., Any]
LOTS = [f"{number:03d}.pt" for number in range(100)]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Provide `with opened(store, **settings) as uploader`, with two upload slots."""
    monkeypatch.setattr(failures, "RETRY_ACTION_S", 0.05)
    settings = QUICK | {"num_concurrent_uploads": 2, "max_concurrent_uploads": 2}

    @contextmanager
    def opened(store: Meddled, **more: Any) -> Iterator[Uploader]:
        monkeypatch.setattr("ckpt_async.transfer.patient.open_store", lambda *_, **__: store)
        uploader = Uploader(tmp_path / "folder", "memory://test", **settings | more)  # type: ignore[arg-type]
        try:
            yield uploader
        except BaseException:
            uploader.close(timeout_s=0)
            raise
        uploader.close()

    return opened


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collect the keys of every series that is started."""
    found: list[list[str]] = []

    async def noting(store: PatientStore, shards: list[SmallShard]) -> Any:
        found.append([each.key for each in shards])
        return await upload_many(store, shards)

    monkeypatch.setattr(transfer, "upload_many", noting)
    return found


def save(uploader: Uploader, step: int, names: list[str] = LOTS) -> None:
    """Write and enqueue all files together, so that they are due at the same time."""
    folder = uploader.folder / f"step-{step}"
    for name in names:
        write(uploader, f"step-{step}/{name}", f"{step} {name}".encode())
    uploader.enqueue(folder, step)
    uploader.seal(step)


def test_many_small_shards_of_a_checkpoint_are_sent_in_series(opened: Open, series: list[list[str]]) -> None:
    """The series end at about the same time, each shard is sent once, and few appends record them all."""
    store, appends = Meddled(), []
    append = Journal.append

    def noting(journal: Journal, events: Any) -> None:
        events = list(events)
        appends.append(sum(isinstance(each, Verified) for each in events))
        append(journal, events)

    with pytest.MonkeyPatch.context() as patch, opened(store) as uploader:
        patch.setattr(Journal, "append", noting)
        patch.setattr(budgets, "FIRST_SERIES", 32)
        save(uploader, 1)
        uploader.wait(1, timeout_s=30)
        assert uploader.metrics.registry.get_sample_value(
            "ckpt_async_uploads_total", {"result": "ok"} | labels(uploader)
        ) == len(LOTS)
    asked = {key: num for (operation, key), num in store.asked.items() if key.startswith("ckpt/")}
    assert asked.pop("ckpt/step-1.g1/") == 1  # they are listed before the commit
    assert asked == {f"ckpt/step-1.g1/{name}": 1 for name in LOTS}
    assert sum(map(len, series)) > 90  # the last ones are sent singly
    assert max(map(len, series)) == 32
    assert sum(appends) == len(LOTS)
    assert len([each for each in appends if each]) <= len(series) + 10
    assert decisions(store) == {CheckpointId(1, 1): "commit"}


def labels(uploader: Uploader) -> dict[str, str]:
    """Return the labels that all of the uploader's metrics share."""
    sample = next(
        each
        for metric in uploader.metrics.registry.collect()
        for each in metric.samples
        if each.name == "ckpt_async_uploads_total"
    )
    return {name: value for name, value in sample.labels.items() if name != "result"}


def test_large_shards_are_not_sent_in_series(opened: Open, series: list[list[str]]) -> None:
    small, large = [f"{number}.pt" for number in range(20)], ["x.pt", "y.pt", "z.pt"]
    with opened(store := Meddled()) as uploader:
        for name in small + large:
            size_bytes = transfer.SMALL_BYTES + (name in large)
            write(uploader, f"step-1/{name}", os.urandom(1) * size_bytes)
        uploader.enqueue(uploader.folder / "step-1", 1)
        uploader.seal(1)
        uploader.wait(1, timeout_s=30)
    sizes = {key: len(each.data) for key, each in store.bucket.objects.items()}
    assert series
    for each in series:
        assert not {key.rpartition("/")[2] for key in each} & set(large)
        assert sum(sizes[key] for key in each) <= transfer.SERIES_BYTES


def test_shards_a_series_could_not_send_are_uploaded_singly_within_limits(
    opened: Open, series: list[list[str]]
) -> None:
    """In an outage, two upload slots must not turn into sixty uploads that wait with their files open."""
    num_open = most_open = 0

    class Away(Meddled):
        is_away = True

        async def before(self, operation: str, key: str) -> None:
            if self.is_away and key.startswith("ckpt/"):
                raise trouble(FailureReason.TRANSIENT)

    class Counting(Source):
        def __init__(self, *arguments: Any) -> None:
            nonlocal num_open, most_open
            super().__init__(*arguments)
            num_open += 1
            most_open = max(most_open, num_open)

        def close(self) -> None:
            nonlocal num_open
            num_open -= 1
            super().close()

    store = Away()
    with pytest.MonkeyPatch.context() as patch, opened(store) as uploader:
        patch.setattr(uploading, "Source", Counting)
        save(uploader, 1)
        wait_until(lambda: max(store.asked.values(), default=0) > 5, uploader)
        assert 0 < most_open <= 2
        num_series = len(series)
        assert num_series <= 2  # they are not retried one after the other without a pause
        store.is_away = False
        uploader.wait(1, timeout_s=30)
    assert len(series) > num_series  # back to series after the outage
    assert decisions(store) == {CheckpointId(1, 1): "commit"}


def test_shards_of_a_series_without_memory_are_uploaded_singly_by_the_same_engine(
    opened: Open, series: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scarce memory is no bug, and while closing, a crash of the engine is final."""
    read, refused = Source.read, []

    def scarce(source: Source) -> bytes:
        if series and not refused:
            refused.append(source.path)
            raise MemoryError
        return read(source)

    monkeypatch.setattr(Source, "read", scarce)
    with opened(store := Meddled()) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=30)
        assert refused
        assert uploader.metrics.total("ckpt_async_engine_restarts_total").get("", 0) == 0
    assert decisions(store) == {CheckpointId(1, 1): "commit"}


def test_a_repeatedly_refused_shard_delays_no_other(opened: Open) -> None:
    class Picky(Meddled):
        is_picky = True

        async def before(self, operation: str, key: str) -> None:
            if self.is_picky and key.endswith("010.pt"):
                raise trouble(FailureReason.TRANSIENT)

    store = Picky()
    with opened(store) as uploader:
        save(uploader, 1)
        wait_until(lambda: len(store.keys("ckpt/")) == len(LOTS) - 1, uploader)
        store.is_picky = False
        uploader.wait(1, timeout_s=30)
    sent = {key: num for (operation, key), num in store.asked.items() if key.startswith("ckpt/")}
    assert {num for key, num in sent.items() if not key.endswith("010.pt")} == {1}


def test_a_shard_that_changed_fails_its_checkpoint_only(opened: Open) -> None:
    store = Slow()
    with opened(store, on_error="warn") as uploader:
        save(uploader, 1)
        assert store.has_come.wait(10)
        path = uploader.folder / "step-1" / LOTS[-1]
        with path.open("r+b") as file:
            file.write(b"AN")
        os.utime(path, ns=(1, 1))
        store.go.set()
        with pytest.raises(CheckpointAbortedError, match=r"099\.pt.* changed after it was enqueued"):
            uploader.wait(1, timeout_s=30)
        save(uploader, 2)
        uploader.wait(2, timeout_s=30)
    assert decisions(store) == {CheckpointId(1, 1): "abort", CheckpointId(1, 2): "commit"}


def test_a_series_never_mixes_checkpoints(opened: Open, series: list[list[str]]) -> None:
    store = Slow()
    with opened(store) as uploader:
        for step in (1, 2, 3):
            save(uploader, step)
        assert store.has_come.wait(10)
        store.go.set()
        for step in (1, 2, 3):
            uploader.wait(step, timeout_s=30)
    assert all(len({key.rpartition("/")[0] for key in each}) == 1 for each in series)


def test_an_engine_stopped_in_the_middle_of_a_series_resumes(opened: Open) -> None:
    """What was sent but not recorded is looked up in the store, not sent again."""

    class Stopping(Slow):
        async def before(self, operation: str, key: str) -> None:
            if self.asked["put", key] and key.endswith(("020.pt", "070.pt")):
                await super().before(operation, key)

    store = Stopping()
    with opened(store, generation=1) as uploader:
        save(uploader, 1)
        assert store.has_come.wait(10)
        uploader.close(timeout_s=0)
    there = store.keys("ckpt/")
    assert 0 < len(there) < len(LOTS)
    store.go.set()
    before = dict(store.asked)
    with opened(store, generation=2) as uploader:
        wait_until(lambda: decisions(store) == {CheckpointId(1, 1): "commit"}, uploader)
    assert {key: store.asked["put", key] - before["put", key] for key in there} == dict.fromkeys(there, 0)
    assert len(store.keys("ckpt/")) == len(LOTS)


def test_a_full_journal_disk_loses_no_shard(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be recorded is sent again later."""
    append, is_full = Journal.append, threading.Event()

    def refusing(journal: Journal, events: Any) -> None:
        events = list(events)
        if is_full.is_set() and any(isinstance(each, Verified) for each in events):
            raise JournalError("by the test")
        append(journal, events)

    monkeypatch.setattr(Journal, "append", refusing)
    monkeypatch.setattr(Metrics, "engine_restarted", lambda _: restarts.append(1))
    restarts: list[int] = []
    store = Meddled()
    is_full.set()
    with opened(store) as uploader:
        save(uploader, 1)
        wait_until(lambda: max(store.asked.values(), default=0) > 2, uploader)
        is_full.clear()
        uploader.wait(1, timeout_s=30)
    assert decisions(store) == {CheckpointId(1, 1): "commit"}
    assert not restarts


def test_a_backlog_of_checkpoints_with_shards_of_the_same_names_is_looked_up_quickly() -> None:
    """With colliding hashes, every round during an outage would compare every checkpoint with every other."""
    uploads = [decide.Upload(CheckpointId(1, step), "rank0.pt") for step in range(0, 100_000, 100)]
    assert len({hash(each) for each in uploads}) > 990


def test_a_stopping_engine_begins_no_single_uploads_after_a_series(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an upload would continue after the rank's lock was released."""
    perform, work = Engine._perform_series, Engine.run
    left: list[int] = []
    ended = threading.Event()

    async def stopping(engine: Engine, actions: Any) -> None:
        await perform(engine, actions)
        engine.state.is_stopping = True
        engine._woken.set()  # stop it before it learns that this series has ended

    async def noting(engine: Engine) -> None:
        try:
            await work(engine)
        finally:
            left.append(len(engine._in_flight.running))
            ended.set()

    class Busy(Meddled):
        async def before(self, operation: str, key: str) -> None:
            if operation == "put" and key.startswith("ckpt/"):
                raise trouble(FailureReason.THROTTLED)

    monkeypatch.setattr(Engine, "_perform_series", stopping)
    monkeypatch.setattr(Engine, "run", noting)
    with opened(Busy()) as uploader:
        save(uploader, 1)
        assert ended.wait(30)
        uploader.close(timeout_s=0)
    assert left == [0]
