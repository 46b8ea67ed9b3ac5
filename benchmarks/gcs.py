"""How fast, and with how much CPU, does one file go to Google Cloud Storage and come back, compared with other clients?

Never run against Google: the server is a sink on loopback that speaks its API (the tests' own peer, which here counts
and drops the bytes of parts, and answers zeros). It is written in Python and takes its share of the cores, the same
for every client, so read the ratios. As in `upload` and `download`, each run is a whole process, clients take turns,
and a run counts only if every byte of the file has passed once. `ours` compares what it sent and got with CRC32C;
obstore sends no checksum and compares none; Google's transfer manager runs with its defaults, in threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

import peers
from _child import MIB, Measured, Work, child_main
from _compare import BUCKET, Clients, compared, key_of, parser_of, real_file, report, scratch, turns

ROOT = Path(__file__).resolve().parent.parent
RUN = "run"
STATS = "/__stats"


# --- the sink, in a process of its own ---------------------------------------------------------------------


def serve() -> None:
    import threading

    from ckpt_async.core.model import Checksum
    from ckpt_async.stores.checksums import combine
    from tests.stores import gcs_peer
    from tests.stores.gcs_peer import Answer, GcsPeer, Request

    zeros, local = memoryview(bytes(64 * MIB)), threading.local()

    class Hole(bytes):
        """What was dropped."""

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
                return gcs_peer.as_json(200, [self.bytes_in, self.bytes_out])
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
                whole.size_bytes = sum(each.size_bytes for each in upload.parts.values())
                parts = [each for _, each in sorted(upload.parts.items())]
                facts = {"size": str(whole.size_bytes)}
                if all(each.crc32c for each in parts):
                    told = [(Checksum("crc32c", each.crc32c), each.size_bytes) for each in parts]
                    facts["crc32c"] = combine(told, "crc32c").value
                self.put(upload.name, whole, facts)
                return gcs_peer.as_xml("CompleteMultipartUploadResult", '<ETag>"e"</ETag>')
            name = request.path.partition("/o/")[2] or request.path.removeprefix(f"/{self.bucket}/")
            is_media = request.raw_path.startswith(("/download/", f"/{self.bucket}/"))
            found = self.objects.get(name)
            if is_media and request.method in ("GET", "HEAD") and found and isinstance(found.data, Hole):
                return self.media(request, found.data.size_bytes, str(found.generation))
            if is_media and request.method == "GET" and "uploadId" not in query:
                request.raw_path = f"/download/storage/v1/b/{self.bucket}/o/{gcs_peer.object_path(name)}"
            return super().serve(request)

        def resource(self, name: str) -> dict[str, object]:
            found, facts = super().resource(name), self.objects[name].metadata
            if "size" in facts:
                del found["crc32c"]  # of nothing
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


class Server:
    """The sink's process; a context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True, env=environment("")
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def moved(self) -> tuple[int, int]:
        import urllib.request

        with urllib.request.urlopen(f"{self.url}{STATS}") as answer:
            bytes_in, bytes_out = json.loads(answer.read())
        return bytes_in, bytes_out


def environment(url: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "STORAGE_EMULATOR_HOST": url}


# --- ours --------------------------------------------------------------------------------------------------


def put_ours(work: Work) -> Callable[[], None]:
    from ckpt_async.core.model import FileIdentity
    from ckpt_async.core.settings import Settings
    from ckpt_async.stores import StoreOptions
    from ckpt_async.transfer import upload
    from ckpt_async.transfer.patient import connect
    from ckpt_async.transfer.source import Source

    settings = Settings(num_concurrent_uploads=work.concurrency, part_size_bytes=work.part_bytes)
    runner = asyncio.Runner()
    store = connect(f"gs://{work.bucket}", StoreOptions(endpoint_url=work.endpoint_url), settings)
    runner.run(store.open())

    async def send() -> None:
        descriptor = os.open(work.path, os.O_RDONLY)
        facts = os.fstat(descriptor)
        identity = FileIdentity(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        await upload.upload(
            store,
            Source(descriptor, identity, work.path),
            work.key,
            smallest_part_bytes=work.part_bytes,
            resume=None,
            opened=lambda _: None,
            sent=lambda _: None,
        )

    return lambda: runner.run(send())


def get_ours(work: Work) -> Callable[[], None]:
    from ckpt_async import restore
    from ckpt_async.stores import StoreOptions

    options = StoreOptions(endpoint_url=work.endpoint_url)
    checkpoint = restore.find(f"gs://{work.bucket}/{RUN}", store_options=options)
    assert checkpoint is not None
    path = Path(work.path)

    def run() -> None:
        fetched = restore.fetch(checkpoint, path.parent, num_concurrent_reads=work.concurrency)
        os.rename(fetched.paths["shard.bin"], path)

    return run


OURS = {"put ours": put_ours, "get ours": get_ours}


def commit_one(folder: Path, path: Path, url: str) -> str:
    from ckpt_async import Uploader
    from ckpt_async.stores import StoreOptions

    options = StoreOptions(endpoint_url=url)
    with Uploader(folder, f"gs://{BUCKET}/{RUN}", rank=0, world_size=1, store_options=options) as uploader:
        uploader.enqueue(path, step=1, name="step")
        uploader.seal(1)
        uploader.wait(1, timeout_s=600)
        return f"{RUN}/ckpt/step-1.g{uploader.generation}/shard.bin"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--part-mib", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8, help="parts or ranges in flight")
    parser.add_argument("--direction", choices=("put", "get"), default="put")
    parser.add_argument("--clients", nargs="+", default=["ours", *peers.GCS_UPLOADS])
    arguments = parser.parse_args()
    verb, is_put = arguments.direction, arguments.direction == "put"
    table = peers.GCS_UPLOADS if is_put else peers.GCS_DOWNLOADS
    clients = Clients(arguments.clients, table)
    runs: dict[str, list[Measured]] = {name: [] for name in clients.names}
    with scratch() as folder, scratch(None if is_put else "/dev/shm") as destination, Server() as server:
        size_bytes = arguments.mib * MIB
        path = real_file(folder / "run" / "shard.bin", size_bytes, is_zero=not is_put)
        os.environ |= environment(server.url)
        key = "" if is_put else commit_one(folder / "run", path, server.url)
        for number, client in turns(clients.names, arguments.rounds):
            target = path
            if not is_put:
                target = destination / key_of(number, client) / "file"
                target.parent.mkdir()
            work = Work(
                str(target),
                size_bytes,
                server.url,
                BUCKET,
                key or key_of(number, client),
                arguments.part_mib * MIB,
                arguments.concurrency,
            )
            before = server.moved()[not is_put]
            name = f"{verb} ours" if client == "ours" else client
            measured = clients.run(name, __file__, work)
            moved = server.moved()[not is_put] - before
            if moved != size_bytes or target.stat().st_size != size_bytes:
                raise RuntimeError(f"{client}: {moved} bytes of {size_bytes}")
            runs[client].append(measured)
            if not is_put:
                target.unlink()
    rows: dict[str, dict[str, Any]] = compared(runs, arguments.mib, "ours")
    title = (
        f"{verb} {arguments.mib} MiB, parts of {arguments.part_mib} MiB, {arguments.concurrency} in flight,"
        f" {arguments.rounds} rounds, Google Cloud Storage's API on loopback"
    )
    report(arguments, title, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_main(OURS)
    elif sys.argv[1:2] == ["--serve"]:
        serve()
    else:
        main()
