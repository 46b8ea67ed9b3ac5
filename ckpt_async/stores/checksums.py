"""Full-object checksums as defined by S3, computed by awscrt at memory speed with the GIL released."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable

from awscrt import checksums as crt

from ckpt_async.core.model import Checksum

Function = Callable[[bytes | memoryview, int], int]
Join = Callable[[int, int, int], int]

# name: (the function, a function that combines two results given the size of the second, width in bytes)
_ALGORITHMS: dict[str, tuple[Function, Join, int]] = {
    "crc64nvme": (crt.crc64nvme, crt.combine_crc64nvme, 8),
    "crc32c": (crt.crc32c, crt.combine_crc32c, 4),
}


class Digest:
    """A running checksum."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm
        self._function, _, self._width = _ALGORITHMS[algorithm]
        self._value = 0

    def update(self, data: bytes | memoryview) -> None:
        self._value = self._function(data, self._value)

    def checksum(self) -> Checksum:
        return _checksum(self.algorithm, self._value, self._width)


def checksum_of(data: bytes | memoryview, algorithm: str) -> Checksum:
    """Return the checksum of data in memory, computed in the caller's thread."""
    function, _, width = _ALGORITHMS[algorithm]
    return _checksum(algorithm, function(data, 0), width)


def stated(algorithm: str, value: object) -> Checksum | None:
    """Return the checksum that a store states. One of the wrong length is not of that kind, and counts as missing."""
    is_right = isinstance(value, str) and len(value) == -(-_ALGORITHMS[algorithm][2] // 3) * 4
    return Checksum(algorithm, str(value)) if is_right else None


def combine(parts: Iterable[tuple[Checksum, int]], algorithm: str) -> Checksum:
    """Return the checksum of the whole from those of its parts, given in order with their sizes in bytes."""
    _, join, width = _ALGORITHMS[algorithm]
    whole = 0
    for checksum, size_bytes in parts:
        whole = join(whole, int.from_bytes(b64decode(checksum.value), "big"), size_bytes)
    return _checksum(algorithm, whole, width)


def _checksum(algorithm: str, value: int, width: int) -> Checksum:
    return Checksum(algorithm, b64encode(value.to_bytes(width, "big")).decode())
