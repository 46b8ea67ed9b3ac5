"""Bodies whose checksum follows them, so that their bytes are read once: as aws-chunked, with a trailer.

The form is that of S3's "Signature calculations for trailing headers (chunked uploads)"
(https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming-trailers.html), unsigned: for TLS only, which guards
what the signature does not cover.
"""

from __future__ import annotations

from typing import Protocol

from ckpt_async.core.model import Checksum
from ckpt_async.stores.checksums import Digest, checksum_of
from ckpt_async.stores.interface import BodyWriter

# S3 takes no less than 8 KiB but at the end, MinIO no more than 16 MiB. With 1 MiB, as the SDK cuts, an upload takes
# 2 % more CPU.
CHUNK_BYTES = 8 << 20


class SummedBody(Protocol):
    """A body that a worker thread can send."""

    @property
    def size_bytes(self) -> int: ...

    def send_in_thread(self, outgoing: BodyWriter, digest: Digest) -> None:
        """`digest` is given all bytes, at the latest when the last of them is written."""
        ...


class AwsChunkedBody:
    """A body in frames, and its checksum."""

    def __init__(self, body: SummedBody, algorithm: str) -> None:
        self._body, self._algorithm = body, algorithm

    def send_in_thread(self, outgoing: BodyWriter) -> None:
        digest, frames = Digest(self._algorithm), _Frames(outgoing, self._body.size_bytes)
        self._body.send_in_thread(frames, digest)
        frames.end(digest.checksum())


def trailed_size(size_bytes: int, algorithm: str) -> int:
    """What a body of this size comes to."""
    num_whole, rest = divmod(size_bytes, CHUNK_BYTES)
    chunks = [CHUNK_BYTES] * num_whole + [rest] * bool(rest)
    return (
        size_bytes
        + sum(len(b"%x\r\n\r\n" % each) for each in chunks)
        + len(_end(checksum_of(b"", algorithm)))
    )


def _end(checksum: Checksum) -> bytes:
    return f"0\r\nx-amz-checksum-{checksum.algorithm}:{checksum.value}\r\n\r\n".encode()


class _Frames:
    """The way to a store for what stands in chunks."""

    takes_files = False

    def __init__(self, outgoing: BodyWriter, size_bytes: int) -> None:
        self._outgoing, self._left_bytes = outgoing, size_bytes
        self._chunk_bytes = 0  # of the chunk that has begun
        self._end_of_chunk = b""

    def write(self, piece: memoryview) -> None:
        while piece:
            if not self._chunk_bytes:
                self._chunk_bytes = min(CHUNK_BYTES, self._left_bytes)
                self._outgoing.write(memoryview(b"%s%x\r\n" % (self._end_of_chunk, self._chunk_bytes)))
                self._end_of_chunk = b"\r\n"
            now, piece = piece[: self._chunk_bytes], piece[self._chunk_bytes :]
            self._outgoing.write(now)
            self._chunk_bytes -= len(now)
            self._left_bytes -= len(now)

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> int:
        raise NotImplementedError("the checksum needs the bytes")

    def end(self, checksum: Checksum) -> None:
        self._outgoing.write(memoryview(self._end_of_chunk + _end(checksum)))
