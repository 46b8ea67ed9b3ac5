"""An object in one request: first its metadata, then its bytes (`multipart/related`).

So the name, checksum and storage class arrive before any byte, and the condition in the query holds for all of them
(https://cloud.google.com/storage/docs/uploading-objects#uploading-an-object, "multipart upload" of the JSON API).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping

from ckpt_async.stores.bodies import PassingWriter, check_complete
from ckpt_async.stores.interface import Body, BodyWriter


class RelatedBody:
    """A body preceded by its metadata."""

    def __init__(self, metadata: Mapping[str, object], body: Body) -> None:
        boundary = secrets.token_hex(16)  # random, so practically never in a file
        self.content_type = f"multipart/related; boundary={boundary}"
        self._body = body
        self.before = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(metadata)}\r\n"
            f"--{boundary}\r\nContent-Type: {metadata['contentType']}\r\n\r\n"
        ).encode()
        self.after = f"\r\n--{boundary}--\r\n".encode()

    @property
    def size_bytes(self) -> int:
        return len(self.before) + self._body.size_bytes + len(self.after)

    def send(self, writer: BodyWriter) -> None:
        writer.write(memoryview(self.before))
        counting = _CountingWriter(writer)
        self._body.send(counting)
        # Some servers store an object that looks complete even if the request is not.
        check_complete(self._body, counting.written_bytes)
        writer.write(memoryview(self.after))


class _CountingWriter(PassingWriter):
    """A writer that counts what it passes on."""

    def __init__(self, writer: BodyWriter) -> None:
        super().__init__(writer)
        self.takes_files = writer.takes_files
        self.written_bytes = 0

    def write(self, piece: memoryview) -> None:
        self.written_bytes += len(piece)
        super().write(piece)

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> int:
        count = self._writer.send_file(descriptor, offset, size_bytes)
        self.written_bytes += count
        return count
