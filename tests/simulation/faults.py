"""A store over a bad network, for one process: the fault of each request is drawn from the seed.

Everything here is what a real, strongly consistent S3 may do to a client. A listing that was cut short is an error
(`store.py`), and the pages of a complete one may still come from different moments.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_async.core.model import Checksum
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.interface import Body, BytesBody, Capabilities, Condition, Enough, Listing, ObjectInfo
from tests.simulation.processes import Process
from tests.stores.memory import CAPABILITIES, MemoryBucket, MemoryStore, collected

URL = "memory://simulated/run"
# Parts are small, since their number matters, not their size.
PART_BYTES = 48
PARTS = replace(CAPABILITIES, min_part_size_bytes=PART_BYTES)
# A request that its client has given up on still arrives within this time.
LATEST_ARRIVAL_S = 100.0

# What happens to a request, and how often in a schedule with faults.
KINDS = {
    "error_before": 4,  # a reset connection: nothing has happened
    "error_after": 4,  # it happened, but the reply is lost
    "slow_before": 4,
    "slow_after": 4,  # the reply is outdated when it arrives
    "stall_before": 1,
    "stall_after": 1,  # it happened, but no reply ever comes
    "stall_midway": 1,  # the body stops moving
    "late": 2,  # it happens long after the client has given up
    "throttled": 3,
    "torn": 3,  # a listing whose pages are from different moments
}
REASONS = {"auth": FailureReason.AUTH, "down": FailureReason.TRANSIENT, "slow_down": FailureReason.THROTTLED}


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which every request fails."""

    kind: str
    begins_at: float
    ends_at: float


@dataclass(slots=True)
class Network:
    """The network between all processes and the one bucket. `rate` is the share of requests that suffer a fault."""

    bucket: MemoryBucket
    rng: random.Random
    on_effect: Callable[[], None]
    rate: float = 0.0
    windows: tuple[Window, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[tuple[float, str, str, str, str]] = field(default_factory=list)
    late: set[asyncio.Task[None]] = field(default_factory=set)

    def heal(self) -> None:
        self.rate, self.windows = 0.0, ()

    def fault_of(self, operation: str, now: float) -> str:
        for window in self.windows:
            if window.begins_at <= now < window.ends_at:
                return window.kind
        if self.rng.random() >= self.rate:
            return ""
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        can_happen = {
            "torn": operation == "list",
            "stall_midway": operation in ("put", "put_part"),
            "late": operation not in ("open", "get", "head", "list", "list_parts", "list_multiparts"),
        }
        return kind if can_happen.get(kind, True) else ""


class FaultyStore:
    """One process's view of the bucket."""

    url = URL

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self._store = MemoryStore(network.bucket, url=URL, capabilities=PARTS)

    @property
    def capabilities(self) -> Capabilities:
        return PARTS

    def moved(self) -> None:
        pass

    async def open(self, **options: Any) -> None:
        await self._request("open", "", lambda: self._store.open(**options))

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    # --- requests ----------------------------------------------------------------------------------------

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        async def make(body: Body) -> ObjectInfo:
            return await self._store.put(key, body, checksum, condition=condition)

        return await self._send("put", key, body, make)

    async def put_part(self, key: str, upload_id: str, number: int, body: Body, checksum: Checksum) -> Any:
        async def make(body: Body) -> Any:
            return await self._store.put_part(key, upload_id, number, body, checksum)

        return await self._send("put_part", key, body, make)

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        async def make() -> Listing:
            return await self._store.list(prefix, start_after=start_after, enough=enough)

        return await self._request("list", prefix, make)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._request("delete", keys[0], lambda: self._store.delete(keys))

    def __getattr__(self, operation: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._store, operation)

        def request(key: str, *arguments: Any, **more: Any) -> Awaitable[Any]:
            return self._request(operation, key, lambda: method(key, *arguments, **more))

        return request

    # --- what becomes of them ----------------------------------------------------------------------------

    async def _send(
        self, operation: str, key: str, body: Body, make: Callable[[Body], Awaitable[Any]]
    ) -> Any:
        """Send a request with a body, which may stop moving, or may already be completely on its way when the client
        dies.
        """

        async def stop() -> None:
            await _forever()

        async def arrive() -> Callable[[], Awaitable[Any]]:
            data = await collected(body)
            return lambda: make(BytesBody(data))

        return await self._request(operation, key, lambda: make(body), stop=stop, arrive=arrive)

    async def _request(
        self,
        operation: str,
        key: str,
        make: Callable[[], Awaitable[Any]],
        *,
        stop: Callable[[], Awaitable[None]] | None = None,
        arrive: Callable[[], Awaitable[Callable[[], Awaitable[Any]]]] | None = None,
    ) -> Any:
        self._process.check_alive()
        network, loop = self._network, asyncio.get_running_loop()
        phase = "before"
        fault = network.fault_of(operation, loop.time())
        network.trace.append((loop.time(), self._process.name, operation, key, fault))
        if fault:
            network.counts[f"fault {fault}"] += 1
        await asyncio.sleep(self._delay_s(fault == "slow_before"))
        match fault:
            case "error_before":
                raise _trouble(FailureReason.TRANSIENT, operation, key)
            case "throttled":
                raise _trouble(FailureReason.THROTTLED, operation, key)
            case "auth" | "down" | "slow_down":
                raise _trouble(REASONS[fault], operation, key)
            case "stall_before":
                await _forever()
            case "stall_midway":
                assert stop is not None
                await stop()
            case "late":
                sent = await arrive() if arrive else make
                self._arrive_late(sent)
                await _forever()
        result = await make()
        network.on_effect()  # nothing else has run in between
        if fault == "torn":
            result = await self._tear(result, make)
        phase = "after"
        if operation == "list_parts" and result:
            network.counts["multipart resumed"] += 1
        if fault == "stall_after":
            await _forever()
        await asyncio.sleep(self._delay_s(fault == "slow_after"))
        if fault == "error_after":
            raise _trouble(FailureReason.TIMEOUT, operation, key)
        del phase  # it is read from the frame when the process is killed
        return result

    def _delay_s(self, is_slow: bool) -> float:
        rng = self._network.rng
        return rng.uniform(1, 15) if is_slow else max(0.0, rng.uniform(-0.05, 0.05))

    def _arrive_late(self, make: Callable[[], Awaitable[Any]]) -> None:
        network = self._network
        delay_s = network.rng.uniform(1, LATEST_ARRIVAL_S)

        async def arrive() -> None:
            await asyncio.sleep(delay_s)
            try:
                await make()
            except StoreError:
                return
            network.on_effect()

        task = asyncio.Task(arrive())  # belongs to no process: it continues when the client is killed
        network.late.add(task)
        task.add_done_callback(network.late.discard)

    async def _tear(self, first: Listing, make: Callable[[], Awaitable[Listing]]) -> Listing:
        """Return the keys up to some point as they are now, and the rest as they are later, with the first page's
        time.
        """
        rng, listed = self._network.rng, [each.key for each in first.objects]
        last = rng.choice(listed) if listed else ""
        await asyncio.sleep(rng.uniform(0.1, 5))
        second = await make()
        pages = [each for each in first.objects if each.key <= last]
        pages += [each for each in second.objects if each.key > last]
        return Listing(tuple(pages), first.server_time)


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


def _trouble(reason: FailureReason, operation: str, key: str) -> StoreError:
    return StoreError("by the simulation", reason=reason, operation=operation, key=key)
