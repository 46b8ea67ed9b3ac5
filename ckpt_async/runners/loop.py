"""The event loop that engines run on."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from ckpt_async.errors import RunnerError
from ckpt_async.niceness import BulkThreads

# Threads for disk work: reading and checksumming shards release the GIL.
NUM_THREADS = 8
# An idle engine uses about eight descriptors; each upload takes one for its shard and one for its connection.
MIN_FREE_DESCRIPTORS = 24


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for engines, with threads for disk work: uvloop's if it is installed
    (`ckpt_async[uvloop]`). The process's event loop policy is not touched.

    Raises RunnerError if there are too few descriptors, or not enough memory for the threads.
    """
    _check_descriptors()  # without descriptors, libuv aborts the process silently
    try:
        threads = BulkThreads(NUM_THREADS, "ckpt-async-disk", starts_at_once=True)
    except OSError as error:
        raise RunnerError(
            f"the engine cannot be started: {error.strerror}", hint="see `ulimit -v` and `ulimit -u`"
        ) from error
    loop: Any
    try:
        import uvloop
    except ImportError:
        loop = asyncio.new_event_loop()
    else:

        class Loop(uvloop.Loop):
            """An event loop that resolves host names in Python's threads. libuv would use threads of its own, which
            it joins when the process exits: in a forked child, where those threads do not exist, that is a SIGSEGV
            (`uv__threadpool_cleanup`).
            """

            async def getaddrinfo(self, host: Any, port: Any, **more: Any) -> Any:
                return await self.run_in_executor(None, lambda: socket.getaddrinfo(host, port, **more))

            async def getnameinfo(self, address: Any, flags: int = 0) -> Any:
                return await self.run_in_executor(None, socket.getnameinfo, address, flags)

        loop = Loop()
    loop.set_default_executor(threads)
    shut_down = loop.shutdown_default_executor

    async def shut_down_without_memory(*timeout_s: float) -> None:
        try:
            await shut_down(*timeout_s)
        except RuntimeError:  # the thread that waits for the executor could not be started
            threads.shutdown()

    loop.shutdown_default_executor = shut_down_without_memory
    return loop  # type: ignore[no-any-return]


def _check_descriptors() -> None:
    taken: list[int] = []
    try:
        taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(taken) < MIN_FREE_DESCRIPTORS:
            taken.append(os.dup(taken[0]))
    except OSError as error:
        raise RunnerError(
            f"the engine cannot be started: it needs {MIN_FREE_DESCRIPTORS} free file descriptors, but only"
            f" {len(taken)} are available: {error.strerror}",
            hint="raise the open file limit (`ulimit -n`), or close some files",
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)
