"""Threads for blocking file systems that may hang: a caller that gives up leaves the thread behind."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from ckpt_async.errors import CkptAsyncError
from ckpt_async.stores.bodies import LocalWriter, WriterCancelledError

T = TypeVar("T")

FileSystem = Any  # fsspec.AbstractFileSystem, which has no types

# The limit of what is in transit between the two threads.
_HELD_BYTES = 8 << 20


class Lanes:
    """Threads that each have their own file system object, and thus connections: most are not made to be shared.

    `make` connects, in the lane's thread. Belongs to one event loop.
    """

    def __init__(self, make: Callable[[], FileSystem], most: int) -> None:
        self._make = make
        self._at_once = asyncio.Semaphore(most)
        self._idle: list[_Lane] = []
        self._is_closed = False

    async def call(self, work: Callable[[FileSystem], T]) -> T:
        """Run `work` in a thread of its own; return or raise what it does. When cancelled, return at once: the
        connection is broken off and the result discarded, so `work` must not use anything that belongs to the caller.
        """
        async with self._at_once:
            lane = self._idle.pop() if self._idle else _Lane(self._make)
            try:
                result = await lane.do(work)
            except (FileNotFoundError, CkptAsyncError):
                self._put_back(lane)  # that is an answer, so the connection works
                raise
            except BaseException as error:
                lane.leave()
                if isinstance(error, Exception):
                    self._leave_idle()  # whatever broke one connection has broken the others too
                raise
            self._put_back(lane)
            return result

    def close(self) -> None:
        self._is_closed = True
        self._leave_idle()

    def _put_back(self, lane: _Lane) -> None:
        if self._is_closed:
            lane.leave()
        else:
            self._idle.append(lane)

    def _leave_idle(self) -> None:
        idle, self._idle = self._idle, []
        for lane in idle:
            lane.leave()


class _Lane:
    """One thread and its file system object. The thread is a daemon: if it hangs, the process can still end."""

    def __init__(self, make: Callable[[], FileSystem]) -> None:
        self._make = make
        self._file_system: FileSystem = None
        self._work: queue.SimpleQueue[tuple[Callable[[FileSystem], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="ckpt-async-fsspec", daemon=True).start()

    def do(self, work: Callable[[FileSystem], T]) -> asyncio.Future[T]:
        done: Future[T] = Future()
        self._work.put((work, done))
        return asyncio.wrap_future(done)

    def leave(self) -> None:
        """Give up the lane. Its thread ends after its current work, soon if the file system can be disconnected."""
        self._work.put(None)
        disconnect(self._file_system)

    def _run(self) -> None:
        while (each := self._work.get()) is not None:
            work, done = each
            if not done.set_running_or_notify_cancel():
                continue
            try:
                if self._file_system is None:
                    self._file_system = self._make()
                result = work(self._file_system)
            except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
                done.set_exception(error)
            else:
                done.set_result(result)
            del each, work, done
        disconnect(self._file_system)


def disconnect(file_system: FileSystem) -> None:
    """Close the connections, which fsspec cannot do: paramiko, ftplib and webdav4 keep them in these attributes."""
    client = getattr(file_system, "client", None)
    for each in (client, getattr(client, "http", None), getattr(file_system, "ftp", None)):
        if (close := getattr(each, "close", None)) is not None:
            with contextlib.suppress(Exception):
                close()


class PipeBrokenError(CkptAsyncError):
    """Nobody will send the rest."""


class Pipe:
    """Bytes in transit from the thread of a body to that of a file system. They are copied, so that the body's buffer
    and file are released as soon as an attempt ends, wherever the file system may hang.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0
        self._has_ended = self._is_broken = False

    def put(self, piece: memoryview) -> None:
        """Add a piece, blocking while too much is in transit. WriterCancelledError once nobody takes it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._held_bytes < _HELD_BYTES or self._is_broken)
            if self._is_broken:
                raise WriterCancelledError
            self._pieces.append(bytes(piece))
            self._held_bytes += len(piece)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def break_off(self) -> None:
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._has_ended or self._is_broken)
                if self._is_broken:
                    raise PipeBrokenError("the body was broken off")
                if not self._pieces:
                    return
                piece = self._pieces.popleft()
                self._held_bytes -= len(piece)
                self._changed.notify_all()
            yield piece


class PipeWriter(LocalWriter):
    """A writer that writes a body into a pipe."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe.put)
        self._pipe = pipe

    def cancel(self) -> bool:
        self._pipe.break_off()
        return super().cancel()
