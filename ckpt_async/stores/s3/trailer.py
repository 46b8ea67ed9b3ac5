"""Bodies followed by their checksum, so that their bytes are read only once: aws-chunked encoding with a trailer.

The format is S3's "Signature calculations for trailing headers (chunked uploads)"
(https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming-trailers.html), unsigned. It is only for TLS, which
protects what the signature does not cover.
"""

from __future__ import annotations

from ckpt_async.core.model import Checksum
from ckpt_async.stores.bodies import PassingWriter
from ckpt_async.stores.checksums import Digest, checksum_of
from ckpt_async.stores.interface import Body, BodyWriter

# S3 accepts no chunk below 8 KiB except the last, MinIO none above 16 MiB. With chunks of 1 MiB, the SDK's size, an
# upload takes 2 % more CPU.
CHUNK_BYTES = 8 << 20


class AwsChunkedBody:
    """A body in chunks, followed by its checksum: that of `digest`, which is updated as the bytes are sent."""

    def __init__(self, body: Body, digest: Digest) -> None:
        self._body, self._digest = body, digest

    @property
    def size_bytes(self) -> int:
        return chunked_size(self._body.size_bytes, self._digest.algorithm)

    def send(self, writer: BodyWriter) -> None:
        chunks = _ChunkWriter(writer, self._body.size_bytes, self._digest)
        self._body.send(chunks)
        chunks.end()


def chunked_size(size_bytes: int, algorithm: str) -> int:
    """Return the encoded size of a body of this size."""
    num_whole, rest = divmod(size_bytes, CHUNK_BYTES)
    chunks = [CHUNK_BYTES] * num_whole + [rest] * bool(rest)
    return (
        size_bytes
        + sum(len(b"%x\r\n\r\n" % each) for each in chunks)
        + len(_end(checksum_of(b"", algorithm)))
    )


def _end(checksum: Checksum) -> bytes:
    return f"0\r\nx-amz-checksum-{checksum.algorithm}:{checksum.value}\r\n\r\n".encode()


class _ChunkWriter(PassingWriter):
    """A writer that frames what it passes on in chunks."""

    def __init__(self, writer: BodyWriter, size_bytes: int, digest: Digest) -> None:
        super().__init__(writer)
        self._left_bytes, self._digest = size_bytes, digest
        self._chunk_bytes = 0  # bytes left of the current chunk
        self._end_of_chunk = b""

    def write(self, piece: memoryview) -> None:
        self._digest.update(piece)  # before it is encrypted, while it is in the cache
        while piece:
            if not self._chunk_bytes:
                self._chunk_bytes = min(CHUNK_BYTES, self._left_bytes)
                self._writer.write(memoryview(b"%s%x\r\n" % (self._end_of_chunk, self._chunk_bytes)))
                self._end_of_chunk = b"\r\n"
            now, piece = piece[: self._chunk_bytes], piece[self._chunk_bytes :]
            self._writer.write(now)
            self._chunk_bytes -= len(now)
            self._left_bytes -= len(now)

    def end(self) -> None:
        self._writer.write(memoryview(self._end_of_chunk + _end(self._digest.checksum())))
