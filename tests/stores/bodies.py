"""Request bodies for store tests."""

from ckpt_async.errors import FailureReason, SourceError
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BodyWriter, BytesBody


def crc(data: bytes):
    return checksum_of(data, "crc64nvme")


async def put(store, key: str, data: bytes, **condition):
    """Put a small object with its correct checksum."""
    checksum = checksum_of(data, store.capabilities.checksum_algorithm)
    return await store.put(key, BytesBody(data), checksum, **condition)


class ReusingBody:
    """A body that, like one read from a file, reuses a single buffer and overwrites it between slices."""

    def __init__(self, data: bytes, slice_bytes: int) -> None:
        self.data = data
        self.slice_bytes = slice_bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def send(self, writer: BodyWriter) -> None:
        buffer = bytearray(self.slice_bytes)
        for start in range(0, len(self.data), self.slice_bytes):
            piece = self.data[start : start + self.slice_bytes]
            buffer[: len(piece)] = piece
            writer.write(memoryview(buffer)[: len(piece)])
            buffer[:] = b"\xff" * self.slice_bytes


class ChangedBody:
    """A body whose file turns out to have been replaced after `good_bytes`."""

    def __init__(self, size_bytes: int, good_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.good_bytes = good_bytes
        self.error = SourceError("the file was overwritten", reason=FailureReason.SOURCE_CHANGED)

    def send(self, writer: BodyWriter) -> None:
        writer.write(memoryview(bytes(self.good_bytes)))
        raise self.error


class ShortBody(BytesBody):
    """A body that promises one byte more than it has."""

    @property
    def size_bytes(self) -> int:
        return len(self.data) + 1
