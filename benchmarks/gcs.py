"""How fast, and with how much CPU, does one file go to Google Cloud Storage and come back, compared with other clients?

This never runs against Google: the server is a sink on loopback that speaks Google's API (the tests' own
peer, which here counts and drops the bytes of parts, and answers with zeros). It is written in Python and
uses some of the cores, equally for every client, so read the ratios. As in `upload` and `download`, each run
is a whole process, the clients take turns, and a run counts only if every byte of the file was transferred
once. `ours` verifies what it sent and got with CRC32C; obstore sends no checksum and verifies none; Google's
transfer manager runs with its defaults, in threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import quote

import peers
from _child import MIB
from _cloud import Cloud, sink_of
from _compare import BUCKET

STATS = "/__stats"


def serve() -> None:
    import threading

    from ckpt_async.core.model import Checksum
    from ckpt_async.stores.checksums import combine
    from tests.stores import gcs_peer
    from tests.stores.gcs_peer import Answer, GcsPeer, Request

    zeros, local = memoryview(bytes(64 * MIB)), threading.local()

    class Hole(bytes):
        """Stands for a body whose bytes were dropped."""

        size_bytes, crc32c = 0, ""

    class Sink(GcsPeer):
        bytes_in = bytes_out = 0

        def receive(self, request: Request, source: IO[bytes], size_bytes: int) -> bool:
            if not request.is_part:
                return super().receive(request, source, size_bytes)
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(MIB))
            left = size_bytes
            while left and (count := source.readinto(local.buffer[: min(left, MIB)])):  # type: ignore[attr-defined]
                left -= count
            request.query["size"] = str(size_bytes - left)
            return not left

        def serve(self, request: Request) -> Answer:
            query = request.query
            if request.raw_path == STATS:
                return Answer(200, f"{self.bytes_in} {self.bytes_out}".encode())
            if request.is_part:
                hole = Hole()
                hole.size_bytes = int(query["size"])
                self.bytes_in += hole.size_bytes
                self.uploads[query["uploadId"]].parts[int(query["partNumber"])] = hole
                wanted = request.headers.get("x-goog-hash", "")
                hole.crc32c = wanted.removeprefix("crc32c=")
                told = [("x-goog-hash", wanted)] if wanted else []
                return Answer(200, b"", [("ETag", f'"{query["partNumber"]}"'), *told])
            if request.method == "POST" and "uploadId" in query:
                upload = self.uploads.pop(query["uploadId"])
                whole = Hole()
                parts = [each for _, each in sorted(upload.parts.items()) if isinstance(each, Hole)]
                whole.size_bytes = sum(each.size_bytes for each in parts)
                facts: dict[str, object] = {"size": str(whole.size_bytes)}
                if all(each.crc32c for each in parts):
                    summed = [(Checksum("crc32c", each.crc32c), each.size_bytes) for each in parts]
                    facts["crc32c"] = combine(summed, "crc32c").value
                self.put(upload.name, whole, facts)
                return gcs_peer.as_xml("CompleteMultipartUploadResult", '<ETag>"e"</ETag>')
            name = request.path.partition("/o/")[2] or request.path.removeprefix(f"/{self.bucket}/")
            is_media = request.raw_path.startswith(("/download/", f"/{self.bucket}/"))
            found = self.objects.get(name)
            if is_media and request.method in ("GET", "HEAD") and found and isinstance(found.data, Hole):
                return self.media(request, found.data.size_bytes, str(found.generation))
            if is_media and request.method == "GET" and "uploadId" not in query:
                request.raw_path = f"/download/storage/v1/b/{self.bucket}/o/{quote(name, safe='')}"
            return super().serve(request)

        def resource(self, name: str) -> dict[str, object]:
            found, facts = super().resource(name), self.objects[name].metadata
            if "size" in facts:
                del found["crc32c"]  # computed over the empty `Hole`
                found |= facts
            return found

        def media(self, request: Request, total: int, generation: str) -> Answer:
            first, _, last = request.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or total - 1), total - 1)
            headers = [("ETag", '"e"'), ("x-goog-generation", generation), ("Content-Type", "x/y")]
            headers += [("Last-Modified", "Sat, 21 Nov 2026 04:00:00 GMT")]
            if request.method == "HEAD":
                return Answer(200, zeros[:total] if total < len(zeros) else zeros, headers)
            if "range" not in request.headers:
                assert total <= len(zeros)
                return Answer(200, zeros[:total], headers)
            self.bytes_out += end - start + 1
            headers.append(("Content-Range", f"bytes {start}-{end}/{total}"))
            return Answer(206, zeros[: end - start + 1], headers)

    sink = Sink(BUCKET)
    print(sink.url, flush=True)
    sink.serve_forever()


@contextlib.contextmanager
def sink(_: Path) -> Iterator[str]:
    with sink_of(__file__) as (url,):
        os.environ["STORAGE_EMULATOR_HOST"] = url
        yield url


if __name__ == "__main__":
    Cloud(
        name="Google Cloud Storage",
        remote=f"gs://{BUCKET}",
        program=__file__,
        servers={"sink": sink},
        stats=STATS,
        uploads=peers.GCS_UPLOADS,
        downloads=peers.GCS_DOWNLOADS,
        serve=serve,
    ).main(__doc__)
