"""Admission of requests that carry bytes: adaptive, and fair among the owners that share a lane."""

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import MIB
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.interface import Moved, Store
from ckpt_async.transfer import concurrency
from ckpt_async.transfer.budgets import LOOK_S, Lane
from ckpt_async.transfer.concurrency import Concurrency
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.progress import Progress
from tests.stores.memory import MemoryStore
from tests.stores.misbehaving import trouble
from tests.virtual_time import run


def test_owners_take_turns() -> None:
    """A rank with many shards must not keep the other ranks of its node waiting."""

    async def main() -> None:
        lane, order = Lane(1, 1), []

        async def work(owner: int) -> None:
            async with lane.hold(owner):
                order.append(owner)
                await asyncio.sleep(1)

        await asyncio.gather(*(work(owner) for owner in (0, 0, 0, 0, 1, 1, 2)))
        assert order == [0, 0, 1, 2, 0, 1, 0]

    run(main())


def test_a_cancelled_waiter_leaves_the_queue() -> None:
    async def main() -> None:
        lane, done = Lane(1, 1), []

        async def work(name: str) -> None:
            async with lane.hold(0):
                await asyncio.sleep(1)
                done.append(name)

        tasks = [asyncio.create_task(work(name)) for name in "abcd"]
        await asyncio.sleep(0.5)
        tasks[0].cancel()  # is running
        tasks[1].cancel()  # is waiting, and would be next
        await asyncio.gather(*tasks, return_exceptions=True)
        assert done == ["c", "d"]

    run(main())


def test_a_waiter_cancelled_on_its_turn_passes_it_on() -> None:
    async def main() -> None:
        lane, done = Lane(1, 1), []

        async def work(name: str) -> None:
            async with lane.hold(0):
                done.append(name)

        async with lane.hold(0):
            first, second = asyncio.create_task(work("first")), asyncio.create_task(work("second"))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(first.cancel)  # in the same step that admits it
        await asyncio.gather(first, second, return_exceptions=True)
        assert done == ["second"]

    run(main())


def test_concurrency_follows_what_the_stores_say_has_moved() -> None:
    """Two stores share the lane; a third cannot tell what it has moved."""

    async def main() -> None:
        lane, limits, looks = Lane(8, 64), [], []
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        def moved() -> Moved:
            looks.append(loop.time())
            return Moved(round((loop.time() - began_s) * 1000 * min(lane.concurrency.limit, 40)), 0.0)

        lane.movers += [moved, moved, lambda: None]

        async def work() -> None:
            async with lane.hold(0):
                limits.append(lane.concurrency.limit)
                await asyncio.sleep(1)

        await asyncio.gather(*(work() for _ in range(400)))
        assert limits[0] == 8
        assert max(limits) > 32
        num_looks = len(looks)
        assert num_looks <= 2 * (loop.time() - began_s) / LOOK_S + 2
        await asyncio.sleep(10)
        assert len(looks) <= num_looks + 2  # an idle lane does not look

    run(main())


def test_the_last_few_are_let_in_with_the_first_that_ends() -> None:
    """They would run alone once all others have ended. Not done at the beginning, nor while more is to come."""

    async def most_at_once(
        num_requests: int, most: int = 64, *, has_more: bool = False, is_for_many: bool = False
    ) -> int:
        lane, counts = Lane(8, most), [0]

        async def work(number: int) -> None:
            async with lane.hold(0, is_for_many=is_for_many):
                counts.append(lane._running)
                await asyncio.sleep(1 + number / 100)

        if has_more:
            lane.have_more[1] = lambda: None
        await asyncio.gather(*(work(number) for number in range(num_requests)))
        return max(counts)

    assert run(most_at_once(8 + 8 + 5)) == 15  # 8; then 5 more one by one; the last 8 all at once
    assert run(most_at_once(8 + 8)) == 15
    assert run(most_at_once(8 + 9)) == 15
    assert run(most_at_once(8 + 4)) == 11
    assert run(most_at_once(8 + 4, most=9)) == 9
    assert run(most_at_once(8 + 4, has_more=True)) == 8
    assert run(most_at_once(8 + 4, is_for_many=True)) == 8  # each would go on as long as there is work


def test_who_makes_as_many_requests_as_there_may_be_learns_of_the_link_too() -> None:
    """No request waits then, and yet the limit is what bounds the rate."""

    async def main() -> None:
        lane = Lane(8, 8, few=2)
        loop = asyncio.get_running_loop()
        lane.movers.append(lambda: Moved(round(loop.time() * 1e9), 0.0))

        async def work() -> None:
            async with lane.hold(0, is_for_many=True):
                await asyncio.sleep(2)

        await asyncio.gather(*(work() for _ in range(8)))
        assert lane.concurrency.connection_bytes_per_s > 0

    run(main())


def test_who_has_more_is_asked_for_it_when_more_are_let_in() -> None:
    async def main() -> None:
        lane, asked_at = Lane(8, 64), []
        loop = asyncio.get_running_loop()
        lane.movers.append(lambda: Moved(round(loop.time() * 1e6 * lane.concurrency.limit), 0.0))

        async def work() -> None:
            async with lane.hold(0):
                await asyncio.sleep(9)

        def ask() -> None:
            asked_at.append(lane.concurrency.limit)
            del lane.have_more[0]

        lane.have_more[0] = ask
        await asyncio.gather(*(work() for _ in range(8)))
        assert asked_at == [64]

    run(main())


def test_a_series_is_as_long_as_the_store_is_near() -> None:
    lane = Lane(8, 64)
    unknown = lane.series_length()
    lane.took_each([0.0005] * 8, 8 << 20)
    near = lane.series_length()
    lane.took_each([0.05, 0.4, 0.05], 3 << 20)
    assert (unknown, near, lane.series_length()) == (2, 64, 10)
    lane.took_each([3.0], 1 << 20)
    assert lane.series_length() == 1


def test_who_waits_far_away_for_answers_to_small_requests_lets_in_many_at_once() -> None:
    """They are admitted without the steps of a search, each of which takes longer than all the requests might."""

    async def main() -> None:
        lane, asked_at = Lane(8, 128), list[int]()
        lane.have_more[0] = lambda: asked_at.append(lane.concurrency.limit)
        lane.took_each([0.05, 0.4], 8 << 10)
        lane.took_each([0.02], 4 << 10)
        assert asked_at == [125], "and never fewer again by this"

    run(main())


@pytest.mark.parametrize(
    ("small_s", "small_bytes", "others", "limit"),
    [
        (0.02, 4 << 10, (), 50),
        (0.05, 256 << 10, (), 32),  # more could fill the link
        (0.05, 1 << 20, (), 8),
        (0.0101, 4 << 10, (), 26),
        (0.0099, 4 << 10, (), 8),  # the store is near
        (0.05, 4 << 10, (8,), 8),  # each of many processes would do the same
    ],
)
def test_as_many_small_requests_are_right_at_once_as_no_link_notices(
    small_s: float, small_bytes: int, others: tuple[int, ...], limit: int
) -> None:
    state = Concurrency(8, 128)
    found = concurrency.far_away(state, small_s=small_s, small_bytes=small_bytes, others=others)
    assert found.limit == limit
    slowed = concurrency.throttled(state, began_s=1.0, now_s=1.0)
    assert concurrency.far_away(slowed, small_s=0.05, small_bytes=1.0) == slowed, (
        "the store said it is too much"
    )


async def moving(
    store: PatientStore, num: int, size_bytes: int, rate: Callable[[int, int], int]
) -> Counter[int]:
    """Run `num` requests at once, each at the bytes/s that `rate` gives for its number and attempt; count their
    attempts.
    """
    moved, attempts = 0, Counter[int]()
    store._budgets.bulk.movers.append(lambda: Moved(moved, 0.0))
    store._budgets.bulk._node = None  # its clock is not the test's

    async def request(number: int) -> None:
        async def attempt(_: Store, progress: Progress) -> None:
            nonlocal moved
            attempts[number] += 1
            each = rate(number, attempts[number]) // 10
            while progress.moved_bytes < size_bytes:
                await asyncio.sleep(0.1)
                moved, progress.moved_bytes = moved + each, progress.moved_bytes + each
                progress.moved()

        await store.bulk("upload_part", size_bytes, attempt)

    await asyncio.gather(*(request(number) for number in range(num)))
    return attempts


def test_a_slow_connection_is_seen_though_no_request_has_to_wait() -> None:
    """With eight parts on eight connections the link is not probed, so the other connections' rate is the usual one."""

    async def main() -> None:
        store = PatientStore(MemoryStore(), Settings())

        def rate(number: int, attempt: int) -> int:
            return 200_000 if (number, attempt) == (3, 1) else 2_000_000

        attempts = await moving(store, 8, 4_000_000, rate)
        assert attempts == Counter({**dict.fromkeys(range(8), 1), 3: 2})

    run(main())


def test_a_request_that_has_ended_is_watched_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = PatientStore(MemoryStore(), Settings())
        await moving(store, 2, 1_000_000, lambda *_: 1_000_000)
        await moving(store, 4, 20_000_000, lambda *_: 1_000_000)

    with caplog.at_level("INFO"):
        run(main())
    assert "connection_slow" not in caplog.text


def test_the_time_to_send_is_no_time_that_a_request_waits_for_its_answer() -> None:
    """A request that is slower than others, but not too slow, began again when all its bytes had arrived."""

    async def main() -> None:
        store, moved, attempts = PatientStore(MemoryStore(), Settings()), 0, Counter[int]()
        store._budgets.bulk.movers.append(lambda: Moved(moved, 0.0))
        store._budgets.bulk._node = None  # its clock is not the test's

        async def request(number: int) -> None:
            async def attempt(_: Store, progress: Progress) -> None:
                nonlocal moved
                attempts[number] += 1
                each = 90_000 if number == 3 else 200_000
                while progress.moved_bytes < 4_000_000:
                    await asyncio.sleep(0.1)
                    moved, progress.moved_bytes = moved + each, progress.moved_bytes + each
                    progress.moved(is_last=progress.moved_bytes >= 4_000_000)
                await asyncio.sleep(2 if number == 3 else 0)

            await store.bulk("upload_part", 4_000_000, attempt)

        await asyncio.gather(*(request(number) for number in range(8)))
        assert set(attempts.values()) == {1}

    run(main())


def test_a_request_whose_piece_the_kernel_has_not_taken_yet_is_not_slow() -> None:
    """All but its end is handed over at once, as one large piece; what counts is how much of it was acknowledged."""

    async def main() -> None:
        store, loop, attempts = (
            PatientStore(MemoryStore(), Settings()),
            asyncio.get_running_loop(),
            Counter[int](),
        )
        store._budgets.bulk.movers.append(lambda: Moved(int(loop.time() * 1e6), 0.0))
        store._budgets.bulk._node = None  # its clock is not the test's

        async def request(number: int) -> None:
            await asyncio.sleep(
                number % 4
            )  # few are old enough to be judged; were they many, the link would be slow

            async def attempt(_: Store, progress: Progress) -> None:
                attempts[number] += 1
                began_s, progress.moved_bytes = loop.time(), 8_000_000
                writer: Any = SimpleNamespace(
                    queued_bytes=lambda: 0,
                    acknowledged_bytes=lambda: int((loop.time() - began_s) * 2_000_000),
                )
                progress.sends_through(writer)
                progress.moved()
                await asyncio.sleep(5)

            await store.bulk("upload_part", 10_000_000, attempt)

        await asyncio.gather(*(request(number) for number in range(8)))
        assert set(attempts.values()) == {1}

    run(main())


def test_slow_down_halves_the_concurrency() -> None:
    """Sixteen requests throttled at the same time are one reason to slow down, not sixteen."""

    async def main() -> None:
        settings = Settings(num_concurrent_uploads=16, retry_initial_s=1.0)
        store = PatientStore(MemoryStore(), settings)
        now = 0
        refused = set()

        async def attempt(number: int) -> None:
            nonlocal now
            now += 1
            try:
                await asyncio.sleep(1)
                if number < 16 and number not in refused:
                    refused.add(number)
                    raise trouble(FailureReason.THROTTLED)
            finally:
                now -= 1

        tasks = [
            asyncio.create_task(store.bulk("put", 1, lambda *_, number=number: attempt(number)))
            for number in range(48)
        ]
        await asyncio.sleep(0.5)
        assert now == 16
        await asyncio.sleep(1)
        assert (now, store.concurrency) == (8, 8)
        await asyncio.gather(*tasks)

    run(main())


class Forwarder:
    """A proxy that accepts every byte at once, and forwards `rate` bytes/s, in equal shares."""

    def __init__(self, rate: float) -> None:
        self.accepted_bytes, self._rate = 0, rate
        self._left: dict[object, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for each in self._left:
                self._left[each] -= 0.5 * self._rate / len(self._left)

    async def attempt(self, progress: Progress, size_bytes: int) -> None:
        request = object()
        self._left[request] = size_bytes
        self.accepted_bytes += size_bytes
        progress.moved_bytes = size_bytes
        progress.moved(is_last=True)
        try:
            while self._left[request] > 0:
                await asyncio.sleep(0.5)
        finally:
            del self._left[request]


async def forwarded(proxy: Forwarder, num: int, size_bytes: int, **settings: int) -> PatientStore:
    store = PatientStore(MemoryStore(), Settings(**settings))  # type: ignore[arg-type]
    store._budgets.bulk.movers.append(lambda: Moved(proxy.accepted_bytes, 0.0))
    store._budgets.bulk._node = None  # its clock is not the test's
    forwarding = asyncio.create_task(proxy.run())
    await asyncio.gather(
        *(
            store.bulk("upload_part", size_bytes, lambda _, progress: proxy.attempt(progress, size_bytes))
            for _ in range(num)
        )
    )
    forwarding.cancel()
    return store


@pytest.mark.fault("F86a")
@pytest.mark.parametrize(
    ("num", "size_mib", "rate_mib", "longer", "sent"),
    [
        (8, 8, 1, 1.02, 1.0),
        (24, 16, 5, 1.02, 1.0),
        (3, 8, 1, 1.05, 1.0),  # a few, none of which counts as slow before others are answered
        (256, 16, 5, 1.6, 2.0),  # more under way than may wait
        (8, 8, 0.5, 2.5, 3.0),  # less than the minimum rate
    ],
)
def test_what_a_proxy_forwards_slowly_is_not_sent_again_and_again(
    num: int, size_mib: int, rate_mib: float, longer: float, sent: float
) -> None:
    """The bytes that it accepted passed for the link's rate, and the requests that it had accepted all ended together:
    six times the bytes were sent, and the upload never ended.
    """

    async def main() -> None:
        proxy = Forwarder(rate_mib * MIB)
        async with asyncio.timeout(5000):
            await forwarded(proxy, num, size_mib * MIB)
        assert asyncio.get_running_loop().time() <= longer * num * size_mib / rate_mib
        assert proxy.accepted_bytes <= sent * num * size_mib * MIB

    run(main())


@pytest.mark.fault("F86a")
def test_a_store_that_takes_all_bytes_and_falls_silent_is_given_up() -> None:
    """However much is under way, no request waits longer than four times the time for its own bytes."""

    async def main() -> None:
        proxy = Forwarder(0.0)
        with pytest.raises(StoreError, match="no answer"):
            await forwarded(proxy, 64, 16 * MIB, upload_timeout_s=1, num_concurrent_uploads=64)
        assert asyncio.get_running_loop().time() <= 4 * 46 + 2

    run(main())


def test_a_request_on_a_slow_connection_begins_again_and_no_other_does() -> None:
    """It restarts at once, at most twice, and this does not count as a failed attempt."""

    async def main() -> None:
        failed: list[FailureReason] = []
        observer, settings = Observer(), Settings(num_concurrent_uploads=9, max_concurrent_uploads=9)
        observer.attempt_failed = failed.append  # type: ignore[method-assign]
        store = PatientStore(MemoryStore(), settings, observer)

        def rate(number: int, attempt: int) -> int:
            return 80_000 if (number, attempt) == (3, 1) or number == 5 else 400_000

        attempts = await moving(store, 27, 2_000_000, rate)
        assert attempts == Counter({**dict.fromkeys(range(27), 1), 3: 2, 5: 3})
        assert failed == []

    run(main())
