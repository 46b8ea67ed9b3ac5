"""What the child processes of these tests do. Each takes arguments and communicates over one pipe."""

import asyncio
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from ckpt_async import restore
from ckpt_async.core import keys
from ckpt_async.restore import destination as destinations
from ckpt_async.restore import session
from ckpt_async.restore.destination import Destination
from ckpt_async.stores.directory import DirectoryStore

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["ckpt_async.stores.s3.client", "tests.restore.plays"])
PATIENCE_S = 60.0


@contextmanager
def playing(play: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run a play in a process of its own, which is killed at the end if it is still running."""
    ours, theirs = _CONTEXT.Pipe()
    aws = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "CKPT_ASYNC_"))}
    process = _CONTEXT.Process(target=_play, args=(play, aws, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(PATIENCE_S)
        ours.close()


def _play(play: Callable[..., None], environment: dict[str, str], pipe: Connection, *arguments: Any) -> None:
    os.environ.update(environment)
    play(pipe, *arguments)


def told(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S), "it says nothing"
    return pipe.recv()


def fetches(
    pipe: Connection,
    checkpoint: Any,
    destination: str,
    options: dict[str, Any],
    patience_s: float = session.PATIENCE_S,
) -> None:
    """Fetch when told to; send the bytes fetched from each source, or the error's name and message."""
    session.PATIENCE_S = patience_s
    pipe.send("ready")
    pipe.recv()
    try:
        report = restore.fetch(checkpoint, destination, **options)
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))
    else:
        pipe.send(dict(report.bytes_from))


def fetches_by_pieces(
    pipe: Connection, checkpoint: Any, destination: str, range_bytes: int, num_pieces: int
) -> None:
    """Fetch from a folder in small ranges, and die by SIGKILL just before piece number `num_pieces` is taken from the
    store. Sends every range before it is read, and the report at the end.
    """
    destinations.RANGE_BYTES = range_bytes
    get_range, lock = DirectoryStore.get_range, threading.Lock()
    left = num_pieces

    async def counted(self: DirectoryStore, key: str, offset: int, size_bytes: int, sink: Any) -> Any:
        def cut(piece: memoryview) -> None:
            nonlocal left
            half = range_bytes // 2  # so that the process may also die between two pieces of one range
            for start in range(0, len(piece), half):
                with lock:
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                sink(piece[start : start + half])

        with lock:
            pipe.send((key, offset, size_bytes))
        return await get_range(self, key, offset, size_bytes, cut)

    DirectoryStore.get_range = counted  # type: ignore[method-assign]
    report = restore.fetch(checkpoint, destination)
    pipe.send(dict(report.bytes_from))


def fetches_a_few_files(pipe: Connection, checkpoint: Any, there: str, num_files: int) -> None:
    """Fetch, and die by SIGKILL when that many files are in their place and one more is about to be."""
    publish, lock, left = Destination.publish, threading.Lock(), num_files

    def counted(self: Destination, *arguments: Any) -> None:
        nonlocal left
        with lock:  # one at a time
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            publish(self, *arguments)

    Destination.publish = counted  # type: ignore[method-assign]
    restore.fetch(checkpoint, there)


def measures(pipe: Connection, checkpoint: Any, small: Any, destination: str) -> None:
    """Send the largest resident set size, in KiB, after a small fetch and after the whole
    one. Mapped files do not count.
    """
    restore.fetch(small, f"{destination}/small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    restore.fetch(checkpoint, f"{destination}/large")
    pipe.send((before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def holds(pipe: Connection, checkpoint: Any, ttl_s: float) -> None:
    """Open a reader with a short lease and keep it open."""
    session.LEASE_TTL_S = ttl_s
    with restore.open(checkpoint):
        pipe.send("open")
        pipe.recv()


def never_ends(pipe: Connection, checkpoint: Any, destination: str) -> None:
    """Fetch from a store that never answers; report how the fetch ends on Ctrl-C."""

    async def slow(store: DirectoryStore, *_: Any) -> Any:
        while not (await store.list(keys.LEASES)).objects:
            await asyncio.sleep(0)
        pipe.send("reading")
        await asyncio.Event().wait()

    DirectoryStore.get_range = slow  # type: ignore[method-assign]
    try:
        restore.fetch(checkpoint, destination, files=["rank-0.pt"])
    except KeyboardInterrupt:
        pipe.send("interrupted")
