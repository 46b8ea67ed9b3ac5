"""The event loop that engines run on."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from ckpt_async.politeness import BulkThreads

# Threads for disk work: reading and checksumming shards release the GIL.
NUM_THREADS = 8


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop for engines, with threads for disk work: uvloop's if it is installed (`ckpt_async[uvloop]`). The
    process's event loop policy is not touched.
    """
    try:
        import uvloop
    except ImportError:
        loop = asyncio.new_event_loop()
    else:

        class Loop(uvloop.Loop):
            """Looks up names in Python's threads. libuv would in threads of its own, which it joins when the process
            exits: in a forked child, where there are none, that is a SIGSEGV (`uv__threadpool_cleanup`).
            """

            async def getaddrinfo(self, host: Any, port: Any, **more: Any) -> Any:
                return await self.run_in_executor(None, lambda: socket.getaddrinfo(host, port, **more))

            async def getnameinfo(self, address: Any, flags: int = 0) -> Any:
                return await self.run_in_executor(None, socket.getnameinfo, address, flags)

        loop = Loop()
    loop.set_default_executor(BulkThreads(NUM_THREADS, "ckpt-async-disk"))
    return loop
