"""How requests are admitted, timed and retried, with up to an hour of failures in virtual time."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import MIB
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.protocol.cas import advance, create_once, read
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody, Create, Store
from ckpt_async.transfer import patient, progress
from ckpt_async.transfer.budgets import Bandwidth, Budgets
from ckpt_async.transfer.patience import MAX_CHECKSUM_ATTEMPTS
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.progress import Progress, Series
from tests.stores.memory import MemoryBucket, MemoryStore
from tests.stores.misbehaving import Ambiguous, Meddled, trouble
from tests.virtual_time import run


class Counting(Observer):
    def __init__(self) -> None:
        self.failures: list[FailureReason] = []
        self.finished: list[str] = []

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:
        assert all(each >= 0 for each in durations_s)
        self.finished += [operation] * len(durations_s)

    def attempt_failed(self, reason: FailureReason) -> None:
        self.failures.append(reason)


def wire(queued_bytes: Callable[[], int], acknowledged_bytes: Callable[[], int | None] = lambda: None) -> Any:
    """Return what a body is written to, as far as it tells what has become of the bytes."""
    return SimpleNamespace(queued_bytes=queued_bytes, acknowledged_bytes=acknowledged_bytes)


def make(store: Store | None = None, **settings: float) -> PatientStore:
    return PatientStore(store or MemoryStore(), Settings(**settings), Counting())  # type: ignore[arg-type]


class Gauge:
    """Attempts of one second each, recording how many requests and bytes are in flight at once."""

    def __init__(self) -> None:
        self.now = self.most = self.bytes_now = self.most_bytes = 0

    async def attempt(self, size_bytes: int) -> None:
        self.now, self.bytes_now = self.now + 1, self.bytes_now + size_bytes
        self.most, self.most_bytes = max(self.most, self.now), max(self.most_bytes, self.bytes_now)
        await asyncio.sleep(1)
        self.now, self.bytes_now = self.now - 1, self.bytes_now - size_bytes


def test_bulk_requests_are_bounded_by_number() -> None:
    """A checkpoint of 10,000 shards must not open 10,000 connections."""

    async def main() -> None:
        gauge, store = Gauge(), make(num_concurrent_uploads=3, max_concurrent_uploads=3)
        await asyncio.gather(*(store.bulk("put", 1, lambda *_: gauge.attempt(1)) for _ in range(20)))
        assert gauge.most == 3
        assert asyncio.get_running_loop().time() == pytest.approx(7)

    run(main())


def test_bulk_requests_are_bounded_by_bytes_and_an_oversized_one_still_runs() -> None:
    """Bytes in flight are bounded whatever the sizes of the shards, but none may wait forever because of its size."""

    async def main() -> None:
        gauge, store = Gauge(), make(num_concurrent_uploads=8, max_inflight_bytes=10 * MIB)
        sizes = [4 * MIB] * 6 + [50 * MIB] + [1 * MIB] * 6
        await asyncio.gather(
            *(
                store.bulk("put", size, lambda *_, size=size: gauge.attempt(min(size, 10 * MIB)))  # type: ignore[misc]
                for size in sizes
            )
        )
        assert gauge.most_bytes == 10 * MIB
        assert gauge.bytes_now == 0

    run(main())


def test_a_cancelled_bulk_request_gives_its_bytes_back() -> None:
    """A leaking budget would stop all uploads after a while."""

    async def main() -> None:
        store = make(max_inflight_bytes=MIB, stall_timeout_s=3600, request_timeout_s=3600)
        never = asyncio.create_task(store.bulk("put", MIB, lambda *_: asyncio.Event().wait()))
        waiting = asyncio.create_task(store.bulk("put", MIB, lambda *_: asyncio.Event().wait()))
        await asyncio.sleep(1)
        for task in (waiting, never):
            task.cancel()
        await asyncio.gather(never, waiting, return_exceptions=True)
        assert (
            await asyncio.wait_for(store.bulk("put", MIB, lambda *_: asyncio.sleep(0, "sent")), 1) == "sent"
        )

    run(main())


def test_control_requests_never_wait_behind_bulk() -> None:
    """A receipt that waits behind a terabyte of shards would keep every other rank waiting."""

    async def main() -> None:
        store = make(num_concurrent_uploads=1, max_inflight_bytes=MIB, stall_timeout_s=600)
        stuck = [
            asyncio.create_task(store.bulk("put", MIB, lambda *_: asyncio.Event().wait())) for _ in "abc"
        ]
        await asyncio.sleep(1)
        assert await asyncio.wait_for(store.control("put", lambda: asyncio.sleep(0, "sent")), 0.1) == "sent"
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    run(main())


def test_a_series_takes_one_slot_and_counts_each_request() -> None:
    """Otherwise each slot would send 32 small shards at a time, or their requests would be missing from the metrics."""

    async def main() -> None:
        gauge, store = Gauge(), make(num_concurrent_uploads=3, max_concurrent_uploads=3)

        async def attempt(_: Store, __: Progress, series: Series) -> None:
            series.begins()
            await gauge.attempt(1)
            for _ in range(5):
                series.answered(1)

        await asyncio.gather(*(store.series("put", 5, 1, attempt) for _ in range(9)))
        assert gauge.most == 3
        assert asyncio.get_running_loop().time() == pytest.approx(3)
        assert store._observer.finished == ["put"] * 45

    run(main())


@pytest.mark.parametrize("reason", FailureReason)
def test_a_series_is_attempted_once_and_its_failure_counted(reason: FailureReason) -> None:
    """The caller sends the rest as single requests, which are retried; a busy store gets less to do."""

    async def main() -> None:
        store, num_attempts = make(num_concurrent_uploads=8), 0

        async def attempt(_: Store, __: Progress, series: Series) -> None:
            nonlocal num_attempts
            num_attempts += 1
            series.begins()
            series.answered(1)
            series.answered(1)
            raise trouble(reason)

        with pytest.raises(StoreError) as caught:
            await store.series("put", 5, 1, attempt)
        assert caught.value.reason is reason
        assert num_attempts == 1
        assert store._observer.finished == ["put"] * 3  # the refused request counts as one
        is_answer = reason in (FailureReason.PRECONDITION, FailureReason.NOT_FOUND)
        assert store._observer.failures == ([] if is_answer else [reason])
        assert store.concurrency == (4 if reason is FailureReason.THROTTLED else 8)

    run(main())


def test_a_series_that_never_began_counts_nothing() -> None:
    async def main() -> None:
        store = make()

        async def attempt(*_: object) -> None:
            raise trouble(FailureReason.DISK)  # while reading the file to be sent

        with pytest.raises(StoreError):
            await store.series("put", 5, 1, attempt)
        assert store._observer.finished == []

    run(main())


def test_each_request_of_a_series_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes ten seconds for each of ten requests is slow, not silent; but silence ends the series (rule
    R14).
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=loop.time))
        store = make(request_timeout_s=30, stall_timeout_s=20)

        async def attempt(_: Store, __: Progress, series: Series, num_answers: int = 10) -> None:
            series.begins()
            for _ in range(num_answers):
                await asyncio.sleep(10)
                series.answered(1)
            if num_answers < 10:
                await asyncio.Event().wait()

        await store.series("put", 10, 1, attempt)
        assert loop.time() == pytest.approx(100)
        with pytest.raises(StoreError) as caught:
            await store.series("put", 10, 1, lambda *each: attempt(*each, num_answers=3))
        assert caught.value.reason is FailureReason.TIMEOUT
        assert loop.time() == pytest.approx(100 + 30 + 20)

    run(main())


def test_a_thread_reports_progress_without_waking_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wake-up takes the GIL from training.

    The watchdog still learns of progress, and of the last byte, after which it waits longer.
    """

    async def main() -> None:
        loop, woken = asyncio.get_running_loop(), []
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=loop.time))
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *_: woken.append(loop.time()))
        store = make(stall_timeout_s=2, request_timeout_s=60, upload_timeout_s=1)

        async def attempt(_: Store, progress: Progress, ends: bool) -> None:
            for number in range(1, 31):
                await asyncio.sleep(1)
                progress.moved_in_thread(is_last=ends and number == 30)
            await asyncio.sleep(10)  # the store is preparing its answer

        await store.bulk("put", 1, lambda *each: attempt(*each, True))
        assert (loop.time(), woken) == (40, [])
        with pytest.raises(StoreError, match="no progress"):
            await store.bulk("put", 1, lambda *each: attempt(*each, False))
        assert (loop.time(), woken) == (40 + 30 + 2, [])

    run(main())


async def _moving(progress: Progress, bytes_per_s: int, size_bytes: int) -> None:
    while progress.moved_bytes < size_bytes:
        await asyncio.sleep(1)
        progress.moved_bytes = min(size_bytes, progress.moved_bytes + bytes_per_s)
        progress.moved(is_last=progress.moved_bytes == size_bytes)


@pytest.mark.fault("F86")
def test_on_a_thin_link_a_request_that_gets_on_is_not_begun_again() -> None:
    """Eight parts of 16 MiB share 2 MiB/s: previously all hit their deadline and were restarted, forever."""

    async def main() -> None:
        loop, store, num_attempts = asyncio.get_running_loop(), make(), 0

        async def attempt(_: Store, progress: Progress) -> None:
            nonlocal num_attempts
            num_attempts += 1
            await _moving(progress, MIB // 4, 16 * MIB)

        await asyncio.gather(*(store.bulk("put", 16 * MIB, attempt) for _ in range(8)))
        assert (loop.time(), num_attempts) == (64, 8)
        assert store.concurrency == 8

    run(main())


@pytest.mark.fault("F86")
@pytest.mark.parametrize(
    ("bytes_per_s", "size_bytes", "ends_s"),
    [
        (MIB // 32, 16 * MIB, 46),  # 1.4 of 16 MiB
        (MIB // 8, 16 * MIB, 128),  # 5.75 by the first deadline
        (MIB // 16, 4 * MIB, 64),
    ],
)
def test_a_request_that_hardly_gets_on_ends_and_fewer_are_made_at_once(
    bytes_per_s: int, size_bytes: int, ends_s: float
) -> None:
    async def main() -> None:
        loop, store = asyncio.get_running_loop(), make(upload_timeout_s=1)
        going = store.bulk("put", size_bytes, lambda _, progress: _moving(progress, bytes_per_s, size_bytes))
        if bytes_per_s * 46 >= size_bytes / 8:
            await going
        else:
            with pytest.raises(StoreError, match=f"only {bytes_per_s * 45} of {size_bytes} bytes") as caught:
                await going
            assert caught.value.reason is FailureReason.TIMEOUT
        assert loop.time() == pytest.approx(ends_s)
        assert store.concurrency == (8 if ends_s > 46 else 4)

    run(main())


@pytest.mark.fault("F86")
@pytest.mark.parametrize(("stops_s", "ends_s"), [(30, 30 + 20), (60, 60 + 20), (50, 50 + 20)])
def test_a_late_request_still_ends_when_no_byte_moves(stops_s: int, ends_s: float) -> None:
    async def main() -> None:
        loop, store = asyncio.get_running_loop(), make(upload_timeout_s=1)

        async def attempt(_: Store, progress: Progress) -> None:
            for _ in range(stops_s):
                await asyncio.sleep(1)
                progress.moved_bytes += MIB // 4
                progress.moved()
            await asyncio.Event().wait()

        with pytest.raises(StoreError):
            await store.bulk("put", 16 * MIB, attempt)
        assert loop.time() == ends_s

    run(main())


def test_a_request_that_got_on_once_but_hardly_does_any_more_ends() -> None:
    async def main() -> None:
        loop, store = asyncio.get_running_loop(), make(upload_timeout_s=1)

        async def attempt(_: Store, progress: Progress) -> None:
            await _moving(progress, MIB // 4, 8 * MIB)  # takes 32 s
            progress.moved_bytes += MIB
            while True:
                await asyncio.sleep(1)
                progress.moved_bytes += 1
                progress.moved()

        with pytest.raises(StoreError, match="only 94"):
            await store.bulk("put", 16 * MIB, attempt)
        assert loop.time() == 46 + 46
        assert store.concurrency == 4

    run(main())


def test_who_has_moved_nothing_at_all_says_nothing_of_the_link() -> None:
    """It may have been reading from a slow disk, for example."""

    async def main() -> None:
        loop, store = asyncio.get_running_loop(), make(upload_timeout_s=1)

        async def attempt(_: Store, progress: Progress) -> None:
            while True:
                await asyncio.sleep(1)
                progress.moved()

        with pytest.raises(StoreError, match="no answer"):
            await store.bulk("put", 16 * MIB, attempt)
        assert (loop.time(), store.concurrency) == (46, 8)

    run(main())


@pytest.mark.parametrize(("takes_s", "is_in_time"), [(40, True), (60, False)])
def test_the_store_has_time_to_answer_after_the_last_byte(takes_s: float, is_in_time: bool) -> None:
    """Bytes that the kernel has accepted may still be in transit for a long time."""

    async def main() -> None:
        loop, store = asyncio.get_running_loop(), make(upload_timeout_s=1, stall_timeout_s=3600)

        async def attempt(_: Store, progress: Progress) -> str:
            await _moving(progress, MIB // 2, 16 * MIB)
            await asyncio.sleep(takes_s)
            return "answer"

        going = store.bulk("put", 16 * MIB, attempt)
        if is_in_time:
            assert await going == "answer"
        else:
            with pytest.raises(StoreError, match="no answer"):
                await going
            assert loop.time() == 32 + 46

    run(main())


@pytest.mark.fault("F86a")
@pytest.mark.parametrize(("is_arrived", "concurrency"), [(True, 4), (False, 8)])
def test_a_socket_that_waits_in_vain_for_an_answer_is_a_late_request_too(
    is_arrived: bool, concurrency: int
) -> None:
    """Its own patience may be shorter. The requests of a slow proxy were then repeated for ever, as many at once."""

    async def main() -> None:
        store = make(upload_timeout_s=1)

        async def attempt(_: Store, progress: Progress) -> None:
            progress.moved_bytes = 16 * MIB
            progress.moved(is_last=is_arrived)
            await asyncio.sleep(10)
            raise trouble(FailureReason.TIMEOUT)

        with pytest.raises(StoreError):
            await store.bulk("put", 16 * MIB, attempt)
        assert store.concurrency == concurrency

    run(main())


@pytest.mark.fault("F86")
@pytest.mark.parametrize(
    ("bytes_per_s", "ends_s"),
    [
        (MIB // 4, 64.0),  # it continues, and is answered
        (MIB // 64, 46.0),  # less than an eighth of it within the deadline
        (0, 5.0 + 20.0),  # seen after 5 s; nothing has arrived 20 s later
    ],
)
def test_what_the_kernel_has_taken_is_watched_until_it_has_arrived(bytes_per_s: int, ends_s: float) -> None:
    """On a link that many requests share, the buffers of each take minutes to empty."""

    async def main() -> None:
        loop, store = asyncio.get_running_loop(), make(upload_timeout_s=1)

        async def attempt(_: Store, progress: Progress) -> str:
            began, progress.moved_bytes = loop.time(), 16 * MIB
            progress.sends_through(wire(lambda: max(0, 16 * MIB - int((loop.time() - began) * bytes_per_s))))
            progress.moved(is_last=True)
            await asyncio.sleep(64 if bytes_per_s else 3600)
            return "answer"

        going = store.bulk("put", 16 * MIB, attempt)
        if ends_s == 64:
            assert await going == "answer"
        else:
            with pytest.raises(StoreError, match="only" if bytes_per_s else "no progress"):
                await going
            assert store.concurrency == (4 if bytes_per_s else 8)
            assert store.link.answers_s == 0.0, "it is not known how long answers take"
        assert loop.time() == ends_s

    run(main())


@pytest.mark.parametrize(
    ("acknowledged", "ends_s"),
    [
        (lambda now: int(now * 1000), 60.0),  # it moves, however slowly
        (lambda _: 4 * MIB, 20.0),
        (lambda now: min(int(now), 30), 30.0 + 20.0),  # stops after 30 s
        (lambda _: None, 20.0),  # nobody knows
        (lambda now: 4 * MIB if now > 7 else None, 20.0),  # known only later: that shows no movement
        (lambda now: 4 * MIB if now < 7 else None, 20.0),
    ],
)
def test_a_call_that_takes_long_to_hand_over_a_piece_has_not_stalled(
    acknowledged: Callable[[float], int | None], ends_s: float
) -> None:
    """The thread is in the kernel, or in OpenSSL, and cannot report."""

    async def main() -> None:
        loop, store = asyncio.get_running_loop(), make(upload_timeout_s=1, request_timeout_s=3600)

        async def attempt(_: Store, progress: Progress) -> None:
            # Its queue is filled up again and again.
            progress.sends_through(wire(lambda: 4 * MIB, lambda: acknowledged(loop.time())))
            progress.moved()
            await asyncio.sleep(60)

        [error] = await asyncio.gather(store.bulk("put", 64 * MIB, attempt), return_exceptions=True)
        assert loop.time() == ends_s
        assert ("no progress" in str(error)) == (ends_s < 60)

    run(main())


@pytest.mark.parametrize(
    ("acknowledged", "arrived_bytes"),
    [
        ([1000, 1000], 0),
        ([1000, 1000 + MIB], MIB),
        ([1000, 1000 + 9 * MIB], 8 * MIB),  # encrypted, they are more
        ([1000, None], 3 * MIB),  # then the length of the kernel's queue must do
        ([None, MIB], 3 * MIB),
    ],
)
def test_what_has_arrived_is_what_was_acknowledged_since_the_body_began(
    acknowledged: list[int | None], arrived_bytes: int
) -> None:
    """A piece counts as moved when it is handed to the kernel, which may take it only seconds later."""

    writer = wire(lambda: 5 * MIB, iter(acknowledged).__next__)

    async def main() -> None:
        async def attempt(_: Store, progress: Progress) -> None:
            progress.sends_through(writer)
            progress.moved_bytes = 8 * MIB
            assert progress.arrived_bytes() == arrived_bytes

        await make().bulk("put", 16 * MIB, attempt)

    run(main())


def test_the_store_has_time_to_answer_once_all_has_arrived() -> None:
    """It has this time however long the bytes took to arrive, but no more than this."""

    async def main() -> None:
        loop, store = asyncio.get_running_loop(), make(upload_timeout_s=1)

        async def attempt(_: Store, progress: Progress) -> None:
            began, progress.moved_bytes = loop.time(), 16 * MIB
            progress.sends_through(wire(lambda: max(0, 16 * MIB - int((loop.time() - began) * MIB // 4))))
            progress.moved(is_last=True)
            await asyncio.Event().wait()

        with pytest.raises(StoreError, match="no answer"):
            await store.bulk("put", 16 * MIB, attempt)
        assert 64 + 46 <= loop.time() <= 64 + 46 + 5  # it is checked every five seconds

    run(main())


def test_a_thread_that_goes_on_after_the_last_byte_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a range is read again, for example, the event loop must re-arm the timer put off until the deadline."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=loop.time))
        store = make(stall_timeout_s=2, request_timeout_s=60, upload_timeout_s=1)

        async def attempt(_: Store, progress: Progress) -> None:
            progress.moved_in_thread(is_last=True)
            await asyncio.sleep(10)
            progress.moved_in_thread()
            await asyncio.Event().wait()

        with pytest.raises(StoreError, match="no progress"):
            await store.bulk("put", 1, attempt)
        assert loop.time() == 12

    run(main())


@pytest.mark.parametrize("is_simulated", [False, True], ids=["sleeps", "leaps"])
def test_a_thread_reads_the_clock_by_which_its_deadline_is_kept(
    is_simulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop's clock stands still while it sleeps, until long after a byte has moved; a simulated clock leaps ahead."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        asleep, real = 0.0, 0.0
        monkeypatch.setattr(loop, "time", lambda: asleep)
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 70.0 + real))
        watched = Progress(1, 1, Settings(), Budgets(Settings()))
        asleep, real = (30.0, 1.0) if is_simulated else (0.0, 30.0)
        watched.moved_in_thread()
        assert watched.moved_at == 30.0

    run(main())


@pytest.mark.parametrize("reason", FailureReason)
@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_retries_depend_on_the_class_of_error(reason: FailureReason, lane: str) -> None:
    """Errors that another attempt may fix are retried; all others are reported at once."""

    async def main() -> None:
        store, num_attempts = make(), 0

        async def attempt(*_: object) -> str:
            nonlocal num_attempts
            num_attempts += 1
            if num_attempts < 4:
                raise trouble(reason)
            return "healed"

        going = store.control("put", attempt) if lane == "control" else store.bulk("put", 1, attempt)
        if reason.is_retryable:
            assert await going == "healed"
            assert store._observer.failures == [reason] * 3
        else:
            with pytest.raises(StoreError) as caught:
                await going
            assert caught.value.reason is reason
            assert num_attempts == 1

    run(main())


@pytest.mark.fault("F6")
def test_an_hour_of_outage_costs_few_requests_and_is_then_reported() -> None:
    """Back-off is capped and jittered and ends at `upload_timeout_s`: there is no request storm, and no endless
    retrying.
    """

    async def main() -> None:
        store, num_attempts = make(upload_timeout_s=3600, retry_max_s=20), 0

        async def attempt() -> None:
            nonlocal num_attempts
            num_attempts += 1
            raise trouble(FailureReason.TRANSIENT)

        with pytest.raises(StoreError):
            await store.control("put", attempt)
        assert 3600 <= asyncio.get_running_loop().time() <= 3620
        assert 3600 / 20 < num_attempts < 700

    run(main())


def test_a_wrong_checksum_is_given_up_after_a_few_attempts() -> None:
    """If the client computes wrong checksums, sending a terabyte for an hour helps nobody."""

    async def main() -> None:
        store, num_attempts = make(), 0

        async def attempt(*_: object) -> None:
            nonlocal num_attempts
            num_attempts += 1
            raise trouble(FailureReason.CHECKSUM)

        with pytest.raises(StoreError):
            await store.bulk("put", 1, attempt)
        assert num_attempts == MAX_CHECKSUM_ATTEMPTS

    run(main())


@pytest.mark.parametrize("away_s", [20, 3600])
def test_a_store_unavailable_at_the_start_is_reported_at_once(
    away_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The report has a hint, because the cause may be a typo; but a store that merely restarts must not end a job."""
    warned_at: list[float] = []

    class Away(MemoryStore):
        async def open(self, **_: Any) -> None:
            warned_at.extend([loop.time()] * (len(caplog.records) - len(warned_at)))
            if loop.time() < away_s:
                raise StoreError("refused", reason=FailureReason.TRANSIENT, hint="is the endpoint right?")

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(patient, "time", SimpleNamespace(monotonic=loop.time))
        opening = make(Away(MemoryBucket(), url="memory://away")).open(60.0)
        if away_s < 60:
            await opening
            assert away_s <= loop.time() <= away_s + 5
        else:
            with pytest.raises(StoreError, match="refused"):
                await opening
            assert 55 <= loop.time() <= 60

    loop: Any = None
    run(main())
    assert len(warned_at) == 1
    assert warned_at[0] <= 0.2
    assert "trying_for_s=60 error=refused (is the endpoint right?)" in caplog.text


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_an_unanswered_attempt_ends_at_its_deadline(lane: str) -> None:
    """R14: the SDK's own timeouts do not run while a body is being sent; ours always do."""

    async def main() -> None:
        settings = {"request_timeout_s": 30, "stall_timeout_s": 20, "upload_timeout_s": 1}
        store = make(**settings)
        silence = asyncio.Event()
        if lane == "control":
            going = store.control("put", silence.wait)
        else:
            going = store.bulk("put", 1000 * MIB, lambda *_: silence.wait())
        with pytest.raises(StoreError) as caught:
            await going
        assert caught.value.reason is FailureReason.TIMEOUT
        assert asyncio.get_running_loop().time() == pytest.approx(30 if lane == "control" else 20)

    run(main())


def test_slow_but_steady_transfers_may_use_the_whole_deadline() -> None:
    """The watchdog checks whether bytes move, not how fast; but even a trickle must end eventually."""

    async def main() -> None:
        store = make(
            request_timeout_s=30, stall_timeout_s=20, minimum_rate_bytes_per_s=MIB, upload_timeout_s=1
        )
        loop = asyncio.get_running_loop()

        async def trickle(progress: Progress, num_slices: int) -> str:
            for _ in range(num_slices):
                await asyncio.sleep(19)
                progress.moved()
            return "sent"

        # 1000 MiB at 1 MiB/s: the deadline is 1030 s.
        assert await store.bulk("put", 1000 * MIB, lambda _, progress: trickle(progress, 54)) == "sent"
        started = loop.time()
        with pytest.raises(StoreError):
            await store.bulk("put", 1000 * MIB, lambda _, progress: trickle(progress, 60))
        assert loop.time() - started == pytest.approx(1030)

    run(main())


def test_bytes_that_move_set_no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each timer takes the GIL from training, and the stall deadline moves with every slice."""

    async def main() -> None:
        store, loop = make(stall_timeout_s=20, upload_timeout_s=1), asyncio.get_running_loop()
        call_at, timers = loop.call_at, list[float]()

        def counted(at: float, *more: Any, **context: Any) -> asyncio.TimerHandle:
            timers.append(at)
            return call_at(at, *more, **context)

        monkeypatch.setattr(loop, "call_at", counted)

        async def attempt(_: Store, progress: Progress) -> str:
            for _ in range(1000):
                progress.moved()
            return "sent"

        assert await store.bulk("put", MIB, attempt) == "sent"
        assert len(timers) == 1

    run(main())


def test_the_store_has_time_to_respond_after_the_last_byte() -> None:
    """A store needs a while to checksum a large body; during that time only the deadline counts."""

    async def main() -> None:
        store = make(request_timeout_s=30, stall_timeout_s=5, upload_timeout_s=1)

        async def attempt(_: Store, progress: Progress) -> str:
            progress.moved(is_last=True)
            await asyncio.sleep(25)
            return "sent"

        assert await store.bulk("put", MIB, attempt) == "sent"

    run(main())


def test_an_outage_is_one_warning_and_one_line_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """A minute without S3 deserves neither a thousand log lines nor none."""

    async def main() -> None:
        store, loop = make(retry_max_s=2), asyncio.get_running_loop()

        async def attempt(*_: object) -> None:
            if loop.time() < 60:
                raise trouble(FailureReason.TRANSIENT)

        going = [store.control("list", attempt), *(store.bulk("put", 1, attempt) for _ in range(8))]
        await asyncio.gather(*going)

    with caplog.at_level(logging.INFO, "ckpt_async"):
        run(main())
    assert [(each.levelname, each.getMessage().split()[0]) for each in caplog.records] == [
        ("WARNING", "store_failing"),
        ("INFO", "store_recovered"),
    ]


@pytest.mark.fault("F112")
def test_a_store_that_only_answers_reads_is_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """It is over its quota, or the right to write was withdrawn: what is listed meanwhile proves nothing."""

    async def main() -> None:
        store, loop = make(retry_max_s=2), asyncio.get_running_loop()

        async def write(*_: object) -> None:
            if loop.time() < 60:
                raise trouble(FailureReason.AUTH)

        async def read() -> None:
            pass

        writing = asyncio.ensure_future(store.bulk("put", 1, write))
        while not writing.done():
            await store.control("list", read)
            await asyncio.sleep(1)
        await writing

    with caplog.at_level(logging.INFO, "ckpt_async"):
        run(main())
    assert [each.getMessage().split()[0] for each in caplog.records] == ["store_failing", "store_recovered"]


def test_a_short_hiccup_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """503 SlowDown is routine for S3."""

    async def main() -> None:
        store, loop = make(retry_max_s=1), asyncio.get_running_loop()

        async def attempt() -> None:
            if loop.time() < 3:
                raise trouble(FailureReason.THROTTLED)

        await store.control("put", attempt)

    with caplog.at_level(logging.INFO, "ckpt_async"):
        run(main())
    assert not caplog.records


def test_a_conditional_write_with_a_lost_reply_is_recognised_as_ours() -> None:
    """R13: the retry of our own successful write looks as if someone else had won."""

    async def main() -> None:
        store = Ambiguous()
        assert await create_once(make(store), "a", b"mine") == b"mine"
        assert store.asked["put", "a"] == 2
        assert await create_once(make(store), "a", b"another") == b"mine"
        moved = Ambiguous(store.bucket)
        assert await advance(make(moved), "a", lambda there: b"next") == b"next"
        assert moved.asked["put", "a"] == 2

    run(main())


def test_a_lost_conditional_write_returns_the_winner() -> None:
    """The answer is the same, but here a competitor really wrote between our two attempts."""

    class Raced(Meddled):
        async def before(self, operation: str, key: str) -> None:
            if operation == "put" and self.asked[operation, key] == 1:
                theirs = BytesBody(b"theirs")
                checksum = checksum_of(theirs.data, self.capabilities.checksum_algorithm)
                await self._store.put(key, theirs, checksum, condition=Create())

    async def main() -> None:
        assert await create_once(make(Raced()), "a", b"mine") == b"theirs"
        raced = make(Raced())
        seen: list[bytes | None] = []

        def change(there: bytes | None) -> bytes | None:
            seen.append(there)
            return b"mine"

        assert await advance(raced, "a", change) == b"mine"
        assert seen == [None, b"theirs"]
        there = await read(raced, "a")
        assert there is not None
        assert there[0] == b"mine"

    run(main())


def test_a_cancelled_request_returns_its_reserved_bandwidth() -> None:
    """A superseded checkpoint that stops uploading must not delay the one it made room for."""

    async def main() -> None:
        store = make(max_bytes_per_s=MIB, stall_timeout_s=3600, request_timeout_s=3600)
        cancelled = [
            asyncio.create_task(store.bulk("put", MIB, lambda _, progress: progress.may_send(10 * MIB)))
            for _ in range(3)
        ]
        await asyncio.sleep(1)
        for each in cancelled:
            each.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        await store.bulk("put", MIB, lambda _, progress: progress.may_send(2 * MIB))
        assert 1 < asyncio.get_running_loop().time() < 3.1

    run(main())


def test_no_moment_counts_twice_where_clocks_differ() -> None:
    """Each request's thread tracks the loop's time itself, and may be off by a few milliseconds."""
    bandwidth = Bandwidth(1000.0)
    waits = [bandwidth.reserve(10, now) for now in [1.0, 0.95] * 100]
    assert waits[-1] == pytest.approx((200 * 10 - 100) / 1000)


def test_a_thread_that_is_held_back_does_not_stall() -> None:
    """Nor is it charged for bytes that it does not send in the end."""

    async def main() -> None:
        store = make(max_bytes_per_s=MIB, stall_timeout_s=2, request_timeout_s=5)
        waits: list[float] = []

        async def attempt(_: Store, progress: Progress) -> None:
            progress.may_send_in_thread(10 * MIB, waits.append)
            await asyncio.sleep(waits[-1])

        await store.bulk("put", MIB, attempt)
        assert 9.8 < waits[0] < 10

        def broken(_: float) -> None:
            raise ConnectionResetError

        async def cut_off(_: Store, progress: Progress) -> None:
            with pytest.raises(ConnectionResetError):
                progress.may_send_in_thread(10 * MIB, broken)
            progress.may_send_in_thread(10 * MIB, waits.append)
            progress.not_sent(9 * MIB)
            progress.may_send_in_thread(MIB, waits.append)

        await store.bulk("put", MIB, cut_off)
        assert waits[1] < 10.1
        assert waits[2] < 2.1

    run(main())


@pytest.mark.fault("F88")
@pytest.mark.parametrize("outage_s", [60, 3])
def test_when_the_store_answers_again_nobody_sits_out_the_rest_of_a_pause(outage_s: float) -> None:
    """A part that fails now and then while others succeed keeps its pause."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        store = make(retry_initial_s=60, retry_max_s=60, num_concurrent_uploads=16)
        ended: list[float] = []

        async def attempt(*_: object) -> None:
            if loop.time() < outage_s:
                raise trouble(FailureReason.TRANSIENT)
            ended.append(loop.time())

        async def ask_again() -> None:
            await asyncio.sleep(outage_s)
            await store.control("get", attempt)

        await asyncio.gather(*(store.bulk("put", 1, attempt) for _ in range(9)), ask_again())
        return ended

    ended = run(main())
    if outage_s == 60:
        assert ended == [pytest.approx(60, abs=1)] * 10
    else:
        assert max(ended) > 5


# --- a reader's patience -----------------------------------------------------------------------------------


@pytest.mark.fault("F61")
@pytest.mark.parametrize(
    "reason", [FailureReason.AUTH, FailureReason.THROTTLED, FailureReason.TRANSIENT, None]
)
def test_a_request_without_progress_ends_with_the_retry_budget(reason: FailureReason | None) -> None:
    """Refused, throttled, broken or silent, it ends after a minute, not after the hour that an upload may take."""

    async def main() -> None:
        store = PatientStore(MemoryStore(), Settings(), silence_s=60)

        async def attempt(*_: object) -> None:
            if reason is None:
                await asyncio.Event().wait()
            assert reason
            raise StoreError("no", reason=reason)

        began = asyncio.get_running_loop().time()
        with pytest.raises(StoreError) as caught:
            await store.bulk("get", 1, attempt)
        assert caught.value.reason is (reason or FailureReason.TIMEOUT)
        assert 30 < asyncio.get_running_loop().time() - began < 85

    run(main())


def test_progress_renews_the_retry_budget() -> None:
    """An attempt that moves some bytes and then breaks is not silence; the hour limits it nevertheless."""

    async def main() -> None:
        store = PatientStore(MemoryStore(), Settings(), silence_s=60)

        async def attempt(_: Store, progress: Progress) -> None:
            await asyncio.sleep(1)
            progress.moved()
            raise StoreError("broken", reason=FailureReason.TRANSIENT)

        began = asyncio.get_running_loop().time()
        with pytest.raises(StoreError, match="broken"):
            await store.bulk("get", 1, attempt)
        assert 3600 <= asyncio.get_running_loop().time() - began < 3700

    run(main())


@pytest.mark.fault("F61")
@pytest.mark.parametrize("reason", [FailureReason.THROTTLED, FailureReason.AUTH])
def test_the_retry_budget_with_a_store_busy_with_others(reason: FailureReason) -> None:
    """A store busy with others will get to this request too, but one that refuses this request will not."""

    async def main() -> None:
        store = PatientStore(MemoryStore(), Settings(), silence_s=60)
        loop = asyncio.get_running_loop()

        async def refused_for_long(*_: object) -> None:
            if loop.time() < 300:
                raise StoreError("not now", reason=reason)

        async def fine(*_: object) -> None:
            await asyncio.sleep(1)

        async def others() -> None:
            while True:
                await store.bulk("get", 1, fine)

        going_on = asyncio.ensure_future(others())
        waiting = asyncio.ensure_future(store.bulk("get", 1, refused_for_long))
        await asyncio.wait({waiting})
        going_on.cancel()
        assert (waiting.exception() is None) == (reason is FailureReason.THROTTLED)
        assert 300 <= loop.time() < 350 or reason is FailureReason.AUTH
        assert loop.time() < 350

    run(main())
