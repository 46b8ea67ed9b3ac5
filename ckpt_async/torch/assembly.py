"""Assembles whole tensors from the parts in which they were saved, in bounded memory.

A tensor is cut into blocks that follow each other in C order. What a part contributes to a block is one stretch of its
bytes, so each part is read from beginning to end as the blocks go by. Only the block is held in memory, and the CRC-32
that torch saved with each record is compared with what was read.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import IO, cast

import torch

from ckpt_async.errors import DamagedCheckpointError, FormatError, UnsafePickleError
from ckpt_async.restore import Reader, ReadInto
from ckpt_async.threads import outcome
from ckpt_async.torch import flashpoint
from ckpt_async.torch.torchfile import RandomAccess, Record, read_layout

Box = tuple[int, ...]

# The number of blocks that may be in memory at once: one being written, two read ahead, the parts of one, and
# what the allocator and the readers' buffers hold at the same time.
BLOCKS_IN_MEMORY = 6
_WINDOW_BYTES = 64 << 10
# The sizes of the head and the tail of what torch writes for one tensor: they contain all but its elements.
_HEAD_BYTES, _TAIL_BYTES = 2 << 10, 2 << 10
# A part up to this size is read as a whole together with head and tail, or each of many small tensors would
# need a request of its own.
_SMALL_BYTES = 64 << 10
# Memory that a part takes while it is read, besides its elements: head, tail, and objects.
_PART_BYTES = 8 << 10
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, whose elements follow each other in C order in `file`, starting at `offset`.

    With `strides` they are in another order. If `saved_bytes` is set, only the archive is known yet: torch has written
    the part by itself into that many bytes from `offset` on.
    """

    starts: Box
    sizes: Box
    file: str
    offset: int
    record: Record | None = None  # the record that contains the elements
    strides: Box | None = None
    saved_bytes: int | None = None
    is_optimised: bool = False  # written by ML Flashpoint, in its own form


@dataclass(slots=True)
class Whole:
    """A tensor to be assembled.

    `box` is its shape, or the number of its elements if they were saved as stretches of a flat tensor. `stand_in`, on
    the meta device, takes its place in the state.
    """

    name: str
    stand_in: torch.Tensor
    box: Box
    parts: list[Part] = field(default_factory=list)
    content: torch.Tensor | None = None  # the value, if it was not a separate tensor in the checkpoint

    @property
    def dtype(self) -> torch.dtype:
        return self.stand_in.dtype

    @property
    def size_bytes(self) -> int:
        return self.stand_in.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Block:
    starts: Box
    sizes: Box


def blocks(box: Box, max_elements: int) -> Iterator[Block]:
    """Cut a box into blocks of at most `max_elements` (at least one), in the order of its elements. Pure."""
    if math.prod(box) <= max_elements or not box:
        if math.prod(box):
            yield Block((0,) * len(box), box)
        return
    inner = math.prod(box[1:])
    if inner > max_elements:
        for first in range(box[0]):
            for each in blocks(box[1:], max_elements):
                yield Block((first, *each.starts), (1, *each.sizes))
        return
    step = max(1, max_elements // max(1, inner))
    for first in range(0, box[0], step):
        count = min(step, box[0] - first)
        yield Block((first, *(0,) * (len(box) - 1)), (count, *box[1:]))


def overlap(block: Block, part: Part) -> Block | None:
    """Return the intersection of both, positioned within the tensor; None if it is empty. Pure."""
    starts = tuple(map(max, block.starts, part.starts))
    ends = tuple(
        min(a + b, c + d)
        for a, b, c, d in zip(block.starts, block.sizes, part.starts, part.sizes, strict=True)
    )
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return Block(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def first_element(inside: Block, part: Part) -> int:
    """Return the position in the part at which `inside` begins. Pure.

    If `inside` is a block's share of the part, its elements follow each other there.
    """
    found = 0
    for start, own, size in zip(inside.starts, part.starts, part.sizes, strict=True):
        found = found * size + start - own
    return found


@dataclass(slots=True)
class _Progress:
    """How far a record has been read, and the CRC-32 up to there."""

    position: int
    crc32: int = 0


class Assembler:
    """Reads through `reader`, in requests for many stretches at once. Not thread-safe."""

    def __init__(self, reader: Reader, max_memory_bytes: int) -> None:
        self._reader = reader
        self._block_bytes = max(1 << 16, max_memory_bytes // BLOCKS_IN_MEMORY)
        self._records: dict[tuple[str, Record], _Progress] = {}

    def stream(self, wholes: Sequence[Whole]) -> Iterator[tuple[Whole, memoryview]]:
        """Yield the bytes of these tensors, one after the other, each in pieces. The next batch is read ahead.

        Raises DamagedCheckpointError if a part is missing or is not what was saved. After an error, Ctrl-C included,
        the reader is closed.
        """
        batches = self._batches(wholes)
        with ThreadPoolExecutor(1, thread_name_prefix="ckpt-async-unshard") as ahead:
            try:
                reading = [ahead.submit(self._read, batch) for batch in _first(batches)]
                while reading:
                    found = outcome(reading.pop())
                    ready = deque(found)
                    reading = [ahead.submit(self._read, batch) for batch in _first(batches)]
                    while ready:
                        whole, data = ready.popleft()
                        yield whole, memoryview(data)
                        del data
            except BaseException:
                self._reader.close()  # else this would wait for what is being read
                raise

    def finish(self) -> None:
        """Check the rest of the records that were begun: the padding between and after the parts."""
        for (file, record), progress in self._records.items():
            while progress.position < record.size_bytes:
                count = min(self._block_bytes, record.size_bytes - progress.position)
                data = bytearray(count)
                self._reader.read_into([ReadInto(file, record.start + progress.position, memoryview(data))])
                self._take(file, record, progress.position, data)
        self._records.clear()

    # --- batches -------------------------------------------------------------------------------------------

    def _batches(self, wholes: Sequence[Whole]) -> Iterator[list[tuple[Whole, Block]]]:
        """Yield blocks that are read together: a single one of a large tensor, or many of small ones."""
        batch: list[tuple[Whole, Block]] = []
        batch_bytes = 0
        for whole in wholes:
            count = self._block_bytes // whole.dtype.itemsize if whole.content is None else 1 << 62
            for block in blocks(whole.box, count):
                size_bytes = math.prod(block.sizes) * whole.dtype.itemsize + len(whole.parts) * _PART_BYTES
                if batch and batch_bytes + size_bytes > self._block_bytes:
                    yield batch
                    batch, batch_bytes = [], 0
                batch.append((whole, block))
                batch_bytes += size_bytes
        if batch:
            yield batch

    def _read(self, batch: list[tuple[Whole, Block]]) -> list[tuple[Whole, bytearray]]:
        archives = self._locate([(whole, block) for whole, block in batch if whole.content is None])
        targets: list[tuple[Whole, bytearray]] = []
        shares: list[_Share] = []
        for whole, block in batch:
            if whole.content is not None:
                targets.append((whole, bytearray(_bytes_of(whole.content))))
                continue
            target = bytearray(math.prod(block.sizes) * whole.dtype.itemsize)
            targets.append((whole, target))
            there = [(part, found) for part in whole.parts if (found := overlap(block, part)) is not None]
            _check_cover(whole, block, [found for _, found in there])
            shares += [_Share(whole, block, part, found, target) for part, found in there]
        wants: list[ReadInto] = []
        for share in shares:
            if (archive := archives.get(id(share.part))) is not None:
                share.take(*archive)
            elif share.part.strides is None:
                wants.append(share.want)
        self._reader.read_into(wants)
        for share in shares:
            if share.part.strides is not None:
                share.data[:] = self._turned(share)
            elif share.part.record is not None:
                start = share.want.offset - share.part.record.start
                self._take(share.part.file, share.part.record, start, share.data)
            if share.data is not share.target:
                _put(share.data, share.found, share.target, share.block, share.whole.dtype)
        return targets

    def _turned(self, share: _Share) -> memoryview:
        """Return the bytes of a share whose part has its elements in another order. The part is read as a whole."""
        part, dtype = share.part, share.whole.dtype
        assert part.strides is not None
        last = sum((size - 1) * stride for size, stride in zip(part.sizes, part.strides, strict=True))
        data = bytearray((last + 1) * dtype.itemsize)
        self._reader.read_into([ReadInto(part.file, part.offset, memoryview(data))])
        if part.record is not None:
            self._take(part.file, part.record, part.offset - part.record.start, data)
        same = _SAME_WIDTH.get(dtype.itemsize, dtype)
        whole = torch.frombuffer(data, dtype=same).as_strided(part.sizes, part.strides)
        inside = _inside(whole, share.found, Block(part.starts, part.sizes))
        return memoryview(_bytes_of(inside))

    # --- locating parts ------------------------------------------------------------------------------------

    def _locate(self, batch: list[tuple[Whole, Block]]) -> dict[int, tuple[int, bytearray]]:
        """Find the elements in the archives that torch has written.

        The ends of the archives are read for all parts at once. Returns the archives that were read as a whole, and
        their places in the file, by the part's `id`.
        """
        wanted = [
            (whole, number)
            for whole, block in batch
            for number, part in enumerate(whole.parts)
            if part.saved_bytes is not None and overlap(block, part) is not None
        ]
        ends: list[tuple[CheckpointFile, list[tuple[int, bytearray]]]] = []
        wants: list[ReadInto] = []
        for whole, number in wanted:
            part = whole.parts[number]
            size_bytes = part.saved_bytes or 0
            file = CheckpointFile(self._reader, part.file, part.offset, size_bytes)
            places = {0: size_bytes if size_bytes <= _SMALL_BYTES else _HEAD_BYTES}
            if not part.is_optimised and size_bytes > _SMALL_BYTES:
                tail_bytes = min(_TAIL_BYTES, size_bytes - _HEAD_BYTES)
                places[size_bytes - tail_bytes] = tail_bytes
            read = [(at, bytearray(count)) for at, count in places.items()]
            wants += [ReadInto(part.file, part.offset + at, memoryview(data)) for at, data in read]
            ends.append((file, read))
        self._reader.read_into(wants)
        archives: dict[int, tuple[int, bytearray]] = {}
        for (whole, number), (file, read) in zip(wanted, ends, strict=True):
            file.known(read)
            saved, part = whole.parts[number], _located(whole, whole.parts[number], file)
            whole.parts[number] = part
            if saved.saved_bytes == len(read[0][1]) and part.strides is None:
                archives[id(part)] = saved.offset, read[0][1]
        return archives

    def _take(self, file: str, record: Record, position: int, data: bytearray) -> None:
        """Continue the record's CRC-32. Skipped bytes are read for it; bytes that are read again count once."""
        if record.crc32 == 0:
            return
        progress = self._records.setdefault((file, record), _Progress(0))
        while position > progress.position:
            gap = bytearray(min(self._block_bytes, position - progress.position))
            self._reader.read_into([ReadInto(file, record.start + progress.position, memoryview(gap))])
            progress.crc32 = zlib.crc32(gap, progress.crc32)
            progress.position += len(gap)
        new = memoryview(data)[progress.position - position :]
        progress.crc32 = zlib.crc32(new, progress.crc32)
        progress.position += len(new)
        if progress.position == record.size_bytes and progress.crc32 != record.crc32:
            raise DamagedCheckpointError(
                f"{file}: bytes {record.start}+{record.size_bytes} have a different CRC-32 from the one that"
                " torch saved",
                hint="fetch it again, or take an older checkpoint",
            )


@dataclass(slots=True)
class _Share:
    """A part's share of a block, and the buffer for it: the block itself if the share is all of it."""

    whole: Whole
    block: Block
    part: Part
    found: Block
    target: bytearray
    data: bytearray = field(init=False)
    want: ReadInto = field(init=False)

    def __post_init__(self) -> None:
        itemsize = self.whole.dtype.itemsize
        is_all = self.found == self.block
        self.data = self.target if is_all else bytearray(math.prod(self.found.sizes) * itemsize)
        offset = self.part.offset + first_element(self.found, self.part) * itemsize
        self.want = ReadInto(self.part.file, offset, memoryview(self.data))

    def take(self, start: int, archive: bytearray) -> None:
        """Copy the share from the archive that begins at `start` in the file."""
        at = self.want.offset - start
        self.data[:] = memoryview(archive)[at : at + len(self.data)]


def _located(whole: Whole, part: Part, file: CheckpointFile) -> Part:
    what = f"{part.file}: the part of {whole.name!r} at byte {part.offset}"
    try:
        if part.is_optimised and (head := file.read(8))[:4] != b"PK\x03\x04":
            header_bytes = int.from_bytes(head[:4], "little")
            if header_bytes > (part.saved_bytes or 0):
                raise FormatError("it is cut short")
            file.seek(4)
            header = flashpoint.read_header(file.read(header_bytes))
            shape, dtype = tuple(header["shape"]), str(header["dtype"]).removeprefix("torch.")
            found = Part(part.starts, shape, part.file, part.offset + 4 + header_bytes)
            size_bytes = 4 + header_bytes + math.prod(shape) * whole.dtype.itemsize
            if size_bytes != part.saved_bytes or f"torch.{dtype}" != str(whole.dtype):
                raise FormatError(f"it has {part.saved_bytes} bytes for {dtype} of shape {shape}")
        else:
            file.seek(0)
            layout = read_layout(cast(IO[bytes], file), what)
            if not isinstance(layout.state, torch.Tensor) or layout.state.dtype != whole.dtype:
                raise FormatError(f"it is not a tensor of {whole.dtype}")
            found = part_of(layout.state, layout.record_of(layout.state), part.file, part.starts, part.offset)
    except (FormatError, UnsafePickleError, LookupError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{what} differs from what was saved: {error}") from error
    if found.sizes != part.sizes:
        raise DamagedCheckpointError(f"{what} has the shape {found.sizes} instead of {part.sizes}")
    return found


def _first(batches: Iterator[list[tuple[Whole, Block]]]) -> Iterable[list[tuple[Whole, Block]]]:
    found = next(batches, None)
    return [] if found is None else [found]


def _check_cover(whole: Whole, block: Block, found: Sequence[Block]) -> None:
    """Check that every element of the block is in exactly one of these."""
    is_whole = sum(math.prod(each.sizes) for each in found) == math.prod(block.sizes)
    if is_whole and len(found) == 1:
        return
    seen = torch.zeros(block.sizes, dtype=torch.bool)
    for each in found if is_whole else ():
        _inside(seen, each, block).fill_(1)
    if not is_whole or not seen.all():
        raise DamagedCheckpointError(
            f"the saved parts of {whole.name!r} are incomplete or overlap",
            hint="a rank's file is missing or belongs to another checkpoint",
        )


def _inside(whole: torch.Tensor, part: Block, block: Block) -> torch.Tensor:
    for dimension, (start, origin, size) in enumerate(
        zip(part.starts, block.starts, part.sizes, strict=True)
    ):
        whole = whole.narrow(dimension, start - origin, size)
    return whole


def _put(data: bytearray, part: Block, target: bytearray, block: Block, dtype: torch.dtype) -> None:
    """Copy the elements as integers of the same width, so that none is interpreted."""
    same = _SAME_WIDTH.get(dtype.itemsize, dtype)
    source = torch.frombuffer(data, dtype=same).reshape(part.sizes)
    _inside(torch.frombuffer(target, dtype=same).reshape(block.sizes), part, block).copy_(source)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).untyped_storage()) if flat.numel() else b""


class CheckpointFile(RandomAccess):
    """A stretch of a checkpoint's file with random access: what `Records` needs of an archive."""

    def __init__(self, reader: Reader, name: str, start: int = 0, size_bytes: int | None = None) -> None:
        super().__init__(reader.files[name].size_bytes - start if size_bytes is None else size_bytes)
        self._reader, self._name, self._start = reader, name, start
        self._windows: list[tuple[int, bytes | bytearray]] = []
        self._prefetched: dict[int, bytes] = {}

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Read at once those of the (offset, size) ranges that are not known yet, and remember them."""
        inside = [
            (at, count)
            for at, size in ranges
            if 0 <= at < self.size_bytes
            and self._remembered(at, count := min(size, self.size_bytes - at)) is None
        ]
        if not inside:
            return
        buffers = [bytearray(size) for _, size in inside]
        self._reader.read_into(
            [
                ReadInto(self._name, self._start + at, memoryview(buffer))
                for (at, _), buffer in zip(inside, buffers, strict=True)
            ]
        )
        self._prefetched |= {at: bytes(buffer) for (at, _), buffer in zip(inside, buffers, strict=True)}

    def known(self, windows: Sequence[tuple[int, bytes | bytearray]]) -> None:
        """Set what was read already, by its offsets."""
        self._windows = list(windows)

    def get(self, at: int, size: int) -> bytes | bytearray:
        if (found := self._remembered(at, size)) is not None:
            return found
        # Read around it, because an archive's directory is at its end and is read backwards.
        start = max(0, min(at, self.size_bytes - _WINDOW_BYTES))
        end = min(self.size_bytes, max(at + size, start + _WINDOW_BYTES))
        data = self._reader.read(self._name, self._start + start, end - start)
        self._windows = [*self._windows[-1:], (start, data)]
        return data[at - start : at - start + size]

    def _remembered(self, at: int, size: int) -> bytes | bytearray | None:
        found: bytes | bytearray = self._prefetched.get(at, b"")
        if len(found) >= size:
            return found[:size]
        for start, data in self._windows:
            if start <= at and at + size <= start + len(data):
                return data[at - start : at - start + size]
        return None


def part_of(
    tensor: torch.Tensor, record: Record, file: str, starts: Box | None = None, offset: int = 0
) -> Part:
    """Return where the elements of a tensor on the meta device are. `offset` is that of its archive in the file."""
    if offset:
        record = replace(record, start=offset + record.start)
    shape = tuple(tensor.shape)
    return Part(
        starts or (0,) * len(shape),
        shape,
        file,
        record.start + int(tensor.storage_offset()) * tensor.dtype.itemsize,
        record,
        None if tensor.is_contiguous() else tuple(tensor.stride()),
    )
