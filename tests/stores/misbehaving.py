"""Stores that misbehave on purpose: a MemoryStore plus whatever a test wants to happen around its requests."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.interface import Capabilities, ObjectInfo, SmallPut, Store
from ckpt_async.stores.one_by_one import put_one_by_one
from tests.stores.memory import CAPABILITIES, MemoryBucket, MemoryStore


class Meddled:
    """A store whose every request passes `before` and `after`, which may wait or raise; it counts requests."""

    def __init__(
        self, bucket: MemoryBucket | None = None, *, capabilities: Capabilities = CAPABILITIES
    ) -> None:
        self.bucket = bucket or MemoryBucket()
        self._store: Store = MemoryStore(self.bucket, url="memory://test", capabilities=capabilities)
        self.asked: Counter[tuple[str, str]] = Counter()
        self.url = self._store.url

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def moved(self) -> None:
        pass

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        whole: Any = self
        await put_one_by_one(whole, puts, stored)

    async def before(self, operation: str, key: str) -> None: ...
    async def after(self, operation: str, key: str) -> None: ...

    def __getattr__(self, operation: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._store, operation)

        async def request(*args: Any, **kwargs: Any) -> Any:
            key = args[0] if args and isinstance(args[0], str) else ""
            self.asked[operation, key] += 1
            await self.before(operation, key)
            result = await method(*args, **kwargs)
            await self.after(operation, key)
            return result

        return request

    def keys(self, start: str = "") -> list[str]:
        return sorted(key for key in self.bucket.objects if key.startswith(start))


class Faulty(Meddled):
    """A store that fails the first `times` puts of keys that launch with `start`, before they have any effect."""

    start, times, error = "", 0, BaseException()

    async def before(self, operation: str, key: str) -> None:
        if self.times and operation in ("put", "put_part") and key.startswith(self.start):
            self.times -= 1
            raise self.error


class Ambiguous(Meddled):
    """A store that loses the answer to the first PUT of each key, although the object was stored."""

    async def after(self, operation: str, key: str) -> None:
        if operation == "put" and self.asked[operation, key] == 1:
            raise trouble(FailureReason.TIMEOUT)


class Slow(Meddled):
    """A store that holds PUTs of keys that launch with `start` until `go` is set, and counts how many it holds."""

    start = "ckpt/"

    def __init__(self) -> None:
        super().__init__()
        self.go, self.held, self.most_held = threading.Event(), 0, 0
        self.has_come = threading.Event()

    async def before(self, operation: str, key: str) -> None:
        if operation == "put" and key.startswith(self.start) and not self.go.is_set():
            self.held += 1
            self.most_held = max(self.most_held, self.held)
            self.has_come.set()
            try:
                while not self.go.is_set():
                    await asyncio.sleep(0.002)
            finally:
                self.held -= 1


def trouble(reason: FailureReason) -> StoreError:
    return StoreError("by the test", reason=reason)
