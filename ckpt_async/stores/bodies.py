"""Sending a body to something other than a connection of ours: memory, a file, or another library's HTTP client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from ckpt_async.errors import FailureReason, SourceError
from ckpt_async.stores.interface import Body, BodyWriter
from ckpt_async.threads import result_of


class WriterCancelledError(Exception):
    """Nobody wants the body any more."""


class PassingWriter:
    """A writer that passes on what it is given to another one. To see every byte, it takes no files."""

    takes_files = False

    def __init__(self, writer: BodyWriter) -> None:
        self._writer = writer

    def write(self, piece: memoryview) -> None:
        self._writer.write(piece)

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> int:
        raise NotImplementedError("takes no files")

    def wait(self, duration_s: float) -> None:
        self._writer.wait(duration_s)

    def queued_bytes(self) -> int:
        return self._writer.queued_bytes()

    def acknowledged_bytes(self) -> int | None:
        return self._writer.acknowledged_bytes()


class LocalWriter:
    """A writer that hands each piece to `take` until `cancel` is called from another thread."""

    takes_files = False

    def __init__(self, take: Callable[[memoryview], object]) -> None:
        self._take = take
        self._is_cancelled = threading.Event()
        self.written_bytes = 0

    def write(self, piece: memoryview) -> None:
        self.wait(0)
        self._take(piece)
        self.written_bytes += len(piece)

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> int:
        raise NotImplementedError("takes no files")

    def wait(self, duration_s: float) -> None:
        if self._is_cancelled.wait(duration_s):
            raise WriterCancelledError

    def queued_bytes(self) -> int:
        return 0

    def acknowledged_bytes(self) -> int | None:
        return None

    def cancel(self) -> bool:
        self._is_cancelled.set()
        return True


async def send_in_thread(body: Body, writer: LocalWriter) -> None:
    """Have the body write itself in a thread. By the time this returns or raises (on cancellation too), the thread has
    let go of both the body and the writer.
    """
    work = asyncio.ensure_future(asyncio.to_thread(body.send, writer))
    await result_of(work, writer.cancel)
    check_complete(body, writer.written_bytes)


def check_complete(body: Body, written_bytes: int) -> None:
    """Raise SourceError if the body has written more or less than it promised."""
    if written_bytes != body.size_bytes:
        raise SourceError(
            f"a body gave {written_bytes} of {body.size_bytes} bytes", reason=FailureReason.SOURCE_CHANGED
        )
