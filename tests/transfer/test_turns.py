"""When connections are closed so that other processes get theirs, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

from ckpt_async.core.settings import Settings
from ckpt_async.stores.http.connections import MAX_IDLE_S
from ckpt_async.stores.http.turns import LEAVE_S, SCARCE_S, TURN_S, WAITED_S
from ckpt_async.stores.memory import MemoryStore
from ckpt_async.transfer.patient import PatientStore
from tests.virtual_time import run

EVERY_S = 0.5


class Pooled(MemoryStore):
    """Requests over keep-alive connections, of which it knows since when each is open, and how long each was."""

    def __init__(self) -> None:
        super().__init__()
        self.idle: list[float] = []
        self.were_open_s: list[float] = []
        self.num_opened = 0

    def drop_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        self.were_open_s += [now - since for since in self.idle]
        self.idle.clear()

    async def request(self, takes_s: float = 0.02) -> None:
        if self.idle:
            since = self.idle.pop()
        else:
            since, self.num_opened = asyncio.get_running_loop().time(), self.num_opened + 1
        await asyncio.sleep(takes_s)
        self.idle.append(since)


def used(work: Callable[[Pooled, PatientStore], Awaitable[None]]) -> Pooled:
    async def main() -> Pooled:
        store = Pooled()
        await work(store, PatientStore(store, Settings()))
        return store

    return run(main())


async def poll(
    store: Pooled, patient: PatientStore, for_s: float, takes_s: float = 0.02, pause_s: float = EVERY_S
) -> int:
    """Return the number of requests."""
    loop = asyncio.get_running_loop()
    until, num_requests = loop.time() + for_s, 0
    while loop.time() < until:
        num_requests += 1
        await patient.control("get", lambda: store.request(takes_s))
        await asyncio.sleep(pause_s)
    return num_requests


def test_who_polls_gives_up_its_connections_now_and_then() -> None:
    """Also those that carry a request when the turn ends."""

    async def work(store: Pooled, patient: PatientStore) -> None:
        await asyncio.gather(poll(store, patient, 60), poll(store, patient, 60, 0.9 * WAITED_S))

    store = used(work)
    assert max(store.were_open_s) <= TURN_S + EVERY_S + WAITED_S
    assert store.num_opened <= 60 / TURN_S * 6, "not at every request"


def test_after_a_turn_others_have_a_moment() -> None:
    """Otherwise only what they have already asked for would be served before the next turn."""

    async def work(store: Pooled, patient: PatientStore) -> None:
        await poll(store, patient, TURN_S + LEAVE_S, pause_s=LEAVE_S / 10)

    assert used(work).num_opened > 5


def test_a_connection_that_is_idle_only_between_slow_requests_is_given_up_too() -> None:
    async def work(store: Pooled, patient: PatientStore) -> None:
        await poll(store, patient, 60, 0.9 * WAITED_S, 0.9 * MAX_IDLE_S)

    assert max(used(work).were_open_s) <= TURN_S + MAX_IDLE_S + WAITED_S


def test_after_a_long_wait_no_connection_is_kept() -> None:
    async def work(store: Pooled, patient: PatientStore) -> None:
        await patient.control("get", lambda: store.request(WAITED_S))
        assert not store.idle
        await asyncio.sleep(MAX_IDLE_S)
        store.idle.append(0.0)  # it has carried a shard
        before = store.num_opened
        assert await poll(store, patient, SCARCE_S - MAX_IDLE_S - EVERY_S) == store.num_opened - before
        assert not store.idle
        await asyncio.sleep(SCARCE_S)
        before = store.num_opened
        await poll(store, patient, TURN_S / 2)
        assert store.num_opened == before + 1, "kept again"

    used(work)


def test_requests_far_apart_and_those_of_shards_keep_theirs() -> None:
    """Connections that are idle for longer are closed anyway; to carry shards over new ones would be slow."""

    async def work(store: Pooled, patient: PatientStore) -> None:
        for _ in range(20):
            await patient.control("get", store.request)
            await asyncio.sleep(TURN_S)
            slow = asyncio.create_task(patient.control("get", lambda: store.request(0.9 * WAITED_S)))
            await asyncio.sleep(0.1)
            await patient.control("get", store.request)
            await slow
            await patient.bulk("put", 1, lambda *_: store.request(TURN_S))
            await asyncio.sleep(TURN_S)
            await patient.control("complete", lambda: store.request(2 * WAITED_S))

    assert not used(work).were_open_s
