"""Splits what a load reads into batches, and reads the next ones while one is copied into its tensors."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed.checkpoint.planner import ReadItem

from ckpt_async.threads import outcome

# Size of a batch. Besides the state itself, a load holds one batch more than are read ahead. What was saved
# as one piece is read as one, so a larger piece makes a larger batch.
BATCH_BYTES = 64 << 20
BATCHES_AHEAD = 3
# For files on this node, where reads do not wait: small enough to stay in the core's cache until used.
LOCAL_BATCH_BYTES, LOCAL_BATCHES_AHEAD = 16 << 20, 2
# torch's alignment of tensors within what it saves.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a file that was saved as one tensor or object, and all items that this rank takes from it."""

    file: str
    offset: int
    size_bytes: int
    items: tuple[ReadItem, ...]
    is_optimised: bool = False  # in ML Flashpoint's form, without any checksum


def batched(pieces: Iterable[Piece], *, is_local: bool = False) -> Iterator[list[Piece]]:
    """Group the pieces: as many as fit into a batch, and at least one."""
    most_bytes = _batch_bytes(is_local=is_local)
    batch: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        if batch and size_bytes + _room(piece) > most_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(piece)
        size_bytes += _room(piece)
    if batch:
        yield batch


Views = Sequence[memoryview]
T = TypeVar("T")


def read_ahead(
    batches: Iterable[Sequence[Piece]],
    read: Callable[[Sequence[Piece], Views], Iterable[T]],
    num_ahead: int,
    *,
    abort: Callable[[], object],
    is_local: bool = False,
) -> Generator[tuple[Sequence[Piece], Sequence[T]], None, None]:
    """Yield each batch with the content of its pieces, which is valid until the next batch is requested.

    `read` fills the views that it is given, and yields these, others, or what they hold. It is called in threads, in
    order, up to `num_ahead` at once. After an error, Ctrl-C included, or when the caller closes this generator, these
    end after the piece at which they are; `abort` is called to end their wait for bytes.
    """
    waiting, reading = deque(batches), deque[tuple[Sequence[Piece], mmap.mmap, Future[Sequence[T]]]]()
    free: list[mmap.mmap] = []
    is_over = False

    def fill(batch: Sequence[Piece], views: Views) -> Sequence[T]:
        contents = []
        for content in read(batch, views):
            if is_over:
                raise CancelledError
            contents.append(content)
        return contents

    def begin() -> None:
        batch = waiting.popleft()
        size_bytes = max(_batch_bytes(is_local=is_local), sum(map(_room, batch)))
        memory = next((each for each in free if len(each) >= size_bytes), None)
        if memory is None:
            memory = _memory(size_bytes)
        else:
            free.remove(memory)
        reading.append((batch, memory, threads.submit(fill, batch, _cut(memory, batch))))

    threads = ThreadPoolExecutor(num_ahead, thread_name_prefix="ckpt-async-load")
    try:
        while waiting or reading:
            while waiting and len(reading) < num_ahead:
                begin()
            batch, memory, filled = reading.popleft()
            contents = outcome(filled)
            if waiting:
                begin()
            yield batch, contents
            free.append(memory)
    except BaseException:
        is_over = True
        threads.shutdown(wait=False, cancel_futures=True)
        abort()
        raise
    finally:
        threads.shutdown()


def _batch_bytes(*, is_local: bool) -> int:
    return LOCAL_BATCH_BYTES if is_local else BATCH_BYTES


def _memory(size_bytes: int) -> mmap.mmap:
    """Allocate memory that is reused: touching memory for the first time costs more than reading into it."""
    memory = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _cut(memory: mmap.mmap, batch: Sequence[Piece]) -> list[memoryview]:
    views, at = [], 0
    for piece in batch:
        views.append(memoryview(memory)[at : at + piece.size_bytes])
        at += _room(piece)
    return views


def _room(piece: Piece) -> int:
    return -(-piece.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
