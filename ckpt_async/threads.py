"""Between blocking code and an event loop: neither outlives whoever asked for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# A signal that arrives just before a thread begins to wait is not seen until that wait ends.
CTRL_C_S = 0.5


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, which Ctrl-C ends within CTRL_C_S: by itself, it may sleep on until the next timeout."""

    async def awake() -> T:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            loop.call_later(CTRL_C_S, tick)

        tick()
        return await work

    return asyncio.run(awake())


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a worker thread; when cancelled, wait for it all the same before leaving: descriptors and
    buffers are in use, and a closed descriptor's number is soon another file's.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # seen: the cancellation is what counts
        raise
