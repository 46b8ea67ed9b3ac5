"""What all requests of one store share: limits on concurrent requests, bytes in flight and bytes per second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

from ckpt_async.core import order
from ckpt_async.core.settings import Settings
from ckpt_async.stores.interface import Moved
from ckpt_async.transfer import concurrency
from ckpt_async.transfer.concurrency import Concurrency, Request
from ckpt_async.transfer.link import Direction, KnownLink, Node

logger = logging.getLogger(__name__)

# Receipts, decisions and latest never queue behind shards: this many requests are reserved for them (restic exempts its
# lock files from the connection limit for the same reason).
CONTROL_REQUESTS = 16


class Budgets:
    """The limits of one store's requests, shared by all its users on one event loop.

    `few`: see `Concurrency`. `direction` is that of the bytes, for the node's account of its link. `known` is what an
    earlier process has found out about the link. `num_records` is how many requests for records are made at once.
    """

    def __init__(
        self,
        settings: Settings,
        few: int = 0,
        direction: Direction = "up",
        known: KnownLink | None = None,
        num_records: int = CONTROL_REQUESTS,
    ) -> None:
        self.control = asyncio.Semaphore(num_records)
        self.bulk = Lane(
            settings.num_concurrent_uploads, settings.max_concurrent_uploads, few, Node(direction)
        )
        if known is not None:
            self.bulk.concurrency = concurrency.remembered(
                self.bulk.concurrency, known.num_connections, known.connection_bytes_per_s
            )
        self.bytes = ByteBudget(settings.max_inflight_bytes)
        self.bandwidth = Bandwidth(settings.max_bytes_per_s)

    def close(self) -> None:
        """Release the process's place on the node's link now, not only once nobody has the budgets. Idempotent."""
        self.bulk.close()


class Bandwidth:
    """A token bucket that may go into debt. It holds a tenth of a second's worth. Thread-safe.

    Whoever takes more than is left waits until the debt is paid back, so that a slice larger than the bucket needs no
    special case.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s  # 0: no cap
        self.is_capped = bytes_per_s > 0
        self._free = self._burst = bytes_per_s / 10
        self._counted_at = float("-inf")
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int, now: float) -> float:
        """Take `size_bytes` and return for how many seconds the taker must wait before it sends them."""
        if not self._bytes_per_s:
            return 0.0
        with self._lock:
            self._free = min(self._burst, self._free + max(0.0, now - self._counted_at) * self._bytes_per_s)
            self._counted_at = max(self._counted_at, now)  # threads' clocks differ; no moment counts twice
            self._free -= size_bytes
            return max(0.0, -self._free / self._bytes_per_s)

    def give_back(self, size_bytes: int) -> None:
        """Return what was reserved but is not sent after all."""
        with self._lock:
            self._free = min(self._burst, self._free + size_bytes)


class Watched(Protocol):
    """An attempt that says how much of it has arrived, when it began, by the loop's clock, and how long it has waited
    since all has arrived, and can be told to begin again.
    """

    began_s: float

    @property
    def waited_s(self) -> float: ...

    def arrived_bytes(self) -> int: ...

    def begin_again(self) -> None: ...


class _Moving:
    """The progress of a request, remembered from when it had a quarter to a half of its present age."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._earlier = self._later = (0.0, 0)
        self._arrived_s = 0.0  # when all had arrived

    def look(self, arrived_bytes: int, took_s: float) -> Request:
        if took_s >= 2 * self._later[0]:
            self._earlier, self._later = self._later, (took_s, arrived_bytes)
        if arrived_bytes < self._size_bytes:
            self._arrived_s = took_s
        earlier_s, earlier_bytes = self._earlier
        late_bytes_per_s = (arrived_bytes - earlier_bytes) / max(took_s - earlier_s, 1e-6)
        return Request(self._size_bytes, arrived_bytes, took_s, late_bytes_per_s, took_s - self._arrived_s)


# Small requests are made in series, which share the fixed cost of one. Far from the store, series are shorter, because
# otherwise connections added later would find no requests left; so are the first ones, when the distance is unknown.
MAX_SERIES, FIRST_SERIES, SERIES_S = 64, 2, 0.5
# How many of the last completed requests, besides those under way, determine what rate is usual.
ENDED = 16
# How often the bytes moved are measured while requests are under way: during the search, and after it.
LOOK_S, SELDOM_S = 0.05, 0.2
# For how long buffers fill at first: the other side's kernel acknowledges bytes that its program has not read yet.
SEND_BUFFERS_FILL_S = 0.15


_NONE = object()  # no group; `None` is one


class Lane:
    """Admission by number of requests.

    The number adapts to what `movers` report (see `concurrency`). Owners take turns, so that a rank with 10,000 shards
    does not keep others that share its event loop waiting.
    """

    def __init__(self, start: int, most: int, few: int = 0, node: Node | None = None) -> None:
        fills_s = 0.0 if few else SEND_BUFFERS_FILL_S
        self.concurrency = Concurrency(limit=start, most=max(start, most), few=few, fills_s=fills_s)
        self.movers: list[Callable[[], Moved | None]] = []  # of all stores whose requests are admitted here
        self._node = node
        self._next_look: asyncio.TimerHandle | None = None
        self._looked = (0.0, 0.0)  # the time of the last look, and the process's CPU time then
        self._running = self._num_for_many = 0
        self._watched: dict[Watched, _Moving] = {}
        self._rates: deque[float] = deque(maxlen=ENDED)  # of the requests that ended last
        self._others: Sequence[int] = ()  # requests under way in other processes on the link
        self._small_s = 0.0  # duration of a small request; 0: not known yet
        # By owner, in the order of their turns, and by group of an owner's requests.
        self._waiting: dict[Hashable, dict[Hashable, deque[asyncio.Future[None]]]] = {}
        self._running_of: Counter[tuple[Hashable, Hashable]] = Counter()  # by owner and group
        # By owner: the place of a group among the owner's own. Equal ones are admitted as they come.
        self.urgency: dict[Hashable, Callable[[Any], int]] = {}
        # Owners that would make more requests if more were admitted, and the callback that makes them do so.
        self.have_more: dict[Hashable, Callable[[], None]] = {}

    @contextlib.asynccontextmanager
    async def hold(
        self, owner: Hashable, group: Hashable = None, *, is_for_many: bool = False
    ) -> AsyncIterator[None]:
        """Hold a place for one request, or (`is_for_many`) for several, one after the other."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {}).setdefault(group, deque()).append(turn)
        self._num_for_many += is_for_many
        self._admit()
        try:
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave(owner, group)
                else:
                    self._drop(owner, group, turn)
                raise
            try:
                yield
            finally:
                self._leave(owner, group)
        finally:
            self._num_for_many -= is_for_many

    def close(self) -> None:
        if self._node is not None:
            self._node.close()

    @contextlib.contextmanager
    def watching(self, progress: Watched, size_bytes: int) -> Iterator[None]:
        """Watch a request, which is to begin again if its connection is slow. With 0 bytes, it is not watched."""
        if size_bytes:
            self._watched[progress] = _Moving(size_bytes)
        try:
            yield
            self.concurrency = concurrency.answered(self.concurrency, progress.waited_s)
            if size_bytes:
                took_s = asyncio.get_running_loop().time() - progress.began_s
                self._rates.append(size_bytes / max(took_s, 1e-6))
        finally:
            self._watched.pop(progress, None)

    def took_each(self, durations_s: Sequence[float], size_bytes: int) -> None:
        """Take note of how long the small requests of a series took, with `size_bytes` in all.

        The shortest one shows how far away the store is, since others also waited for our own cores.
        """
        if durations_s:
            self._small_s = min(durations_s)
            each_bytes = size_bytes / len(durations_s)
            far = concurrency.far_away(
                self.concurrency, small_s=self._small_s, small_bytes=each_bytes, others=self._others
            )
            self._change(far)

    def series_length(self) -> int:
        """Return how many small requests one connection should make before others may take its place."""
        return max(1, min(MAX_SERIES, int(SERIES_S / self._small_s))) if self._small_s else FIRST_SERIES

    def longest_series(self) -> int:
        """Return how many one connection should make at most if it leaves to others what it has not begun."""
        return MAX_SERIES if self._small_s else FIRST_SERIES

    def throttled(self, began_s: float, now_s: float, answers_s: float = 0.0) -> None:
        self.concurrency = concurrency.throttled(
            self.concurrency, began_s=began_s, now_s=now_s, answers_s=answers_s
        )

    def _look(self) -> None:
        self._next_look = None
        moved = [each for mover in self.movers if (each := mover()) is not None]
        if not moved or not self._running:
            return
        loop = asyncio.get_running_loop()
        (looked_s, cpu_s), self._looked = self._looked, (loop.time(), time.process_time())
        moved_bytes = sum(each.size_bytes for each in moved)
        if self._node is not None:
            moved_bytes, self._others = self._node.tell(moved_bytes, self._running, time.monotonic())
        found = concurrency.observed(
            self.concurrency,
            moved_bytes=moved_bytes,
            round_trip_s=max(each.round_trip_s for each in moved),
            is_full=self._running == self.concurrency.limit and self._has_more(),
            now_s=loop.time(),
            busy_cores=(self._looked[1] - cpu_s) / max(self._looked[0] - looked_s, 1e-6),
            others=self._others,
        )
        self._look_for_stragglers(loop.time())
        self._change(found)

    def _change(self, found: Concurrency) -> None:
        is_more, self.concurrency = found.limit > self.concurrency.limit, found
        self._admit()
        if is_more:
            for ask in list(self.have_more.values()):
                ask()

    def _has_more(self) -> bool:
        """Return whether more requests would be made if they were admitted.

        At the highest possible limit, none are left waiting, so that counts as well.
        """
        return bool(self._waiting or self.have_more) or self.concurrency.limit == self.concurrency.most

    def _look_for_stragglers(self, now_s: float) -> None:
        watched = list(self._watched.items())
        requests = [seen.look(each.arrived_bytes(), now_s - each.began_s) for each, seen in watched]
        known = self.concurrency.connection_bytes_per_s
        usual = concurrency.usual_rate(requests, self._rates, known)
        for number in concurrency.stragglers(requests, usual, self._rates):
            slow = requests[number]
            logger.info(
                "connection_slow arrived_bytes=%d in_s=%.1f; retrying on another connection",
                slow.arrived_bytes,
                slow.took_s,
            )
            watched[number][0].begin_again()

    def _next_group(self, owner: Hashable) -> Hashable:
        """Return the owner's most urgent group that waits; none while a more urgent one is under way, because they
        would share the link.
        """
        groups, place_of = self._waiting[owner], self.urgency.get(owner)
        if place_of is None:
            return next(iter(groups))
        first = min(groups, key=place_of)
        under_way = (group for (each, group), num in self._running_of.items() if each == owner and num)
        return first if order.may_share(place_of(first), map(place_of, under_way)) else _NONE

    def _leave(self, owner: Hashable, group: Hashable) -> None:
        self._running -= 1
        self._running_of[owner, group] -= 1
        if not self._running_of[owner, group]:
            del self._running_of[owner, group]
        limit = self.concurrency.limit
        num_waiting = sum(len(turns) for groups in self._waiting.values() for turns in groups.values())
        # The last ones start together: after all others they would be too few to fill the link.
        is_end = not self.have_more and not self._num_for_many and num_waiting <= limit
        self._admit(min(limit + num_waiting, self.concurrency.most) if is_end else limit)
        if self._running < limit:
            for ask in list(self.have_more.values()):
                ask()

    def is_moving(self, owner: Hashable, group: Hashable) -> bool:
        """Return whether a request of this group is under way, or waits for its turn."""
        return bool(self._running_of[owner, group] or self._waiting.get(owner, {}).get(group))

    def _drop(self, owner: Hashable, group: Hashable, turn: asyncio.Future[None]) -> None:
        """Forget one that does not wait any more."""
        groups = self._waiting.get(owner, {})
        with contextlib.suppress(KeyError, ValueError):
            groups[group].remove(turn)
            if not groups[group]:
                del groups[group]
        if not groups:
            self._waiting.pop(owner, None)

    def _admit(self, limit: int = 0) -> None:
        while self._waiting and self._running < (limit or self.concurrency.limit):
            next_ones = ((owner, self._next_group(owner)) for owner in self._waiting)
            owner, group = next((each for each in next_ones if each[1] is not _NONE), (None, _NONE))
            if group is _NONE:
                break
            groups = self._waiting.pop(owner)
            turn = groups[group].popleft()
            if not groups[group]:
                del groups[group]
            if groups:
                self._waiting[owner] = groups  # behind the other owners
            if not turn.done():
                self._running += 1
                self._running_of[owner, group] += 1
                turn.set_result(None)
        if self._next_look is None and self._running and self.movers:
            is_finding = self.concurrency.is_searching or self.concurrency.before is not None
            pause_s = LOOK_S if is_finding else SELDOM_S
            self._next_look = asyncio.get_running_loop().call_later(pause_s, self._look)


class ByteBudget:
    """Admission by bytes. An item larger than the whole budget is admitted when nothing else is."""

    def __init__(self, size_bytes: int) -> None:
        self._free = self._size_bytes = size_bytes
        self._changed = asyncio.Condition()

    @property
    def held_bytes(self) -> int:
        return self._size_bytes - self._free

    @contextlib.asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        size_bytes = min(size_bytes, self._size_bytes)
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= size_bytes)
            self._free -= size_bytes
        try:
            yield
        finally:
            self._free += size_bytes
            async with self._changed:
                self._changed.notify_all()
