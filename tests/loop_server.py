"""A server on an event loop of its own, in a thread, for tests that block."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Self


class LoopServer(ABC):
    """The server, as a context manager. Methods that begin with an underscore run on the loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    @abstractmethod
    async def _start(self) -> None:
        """Start listening."""

    @abstractmethod
    async def _stop(self) -> None:
        """Break all connections, and stop listening."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, coroutine: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)
