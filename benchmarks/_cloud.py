"""Sends one file to a store with an API of its own, and fetches it back: what `gcs` and `azure_blob` have in common."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from _child import MIB, Measured, Prepare, Work, child_main
from _compare import Clients, Table, compared, key_of, parser_of, real_file, report, scratch, turns

ROOT = Path(__file__).resolve().parent.parent
RUN = "run"


@dataclass(frozen=True)
class Cloud:
    """A kind of store, with the servers that stand in for it. Each server gets a folder of its own; its
    context manager points the environment at it and yields its endpoint. The server called `sink` counts
    bytes.
    """

    name: str
    remote: str  # URL of the bucket
    program: str
    servers: Mapping[str, Callable[[Path], AbstractContextManager[str]]]
    stats: str  # path at the sink that reports the bytes of parts received and sent
    uploads: Table
    downloads: Table
    serve: Callable[[], None]

    @property
    def bucket(self) -> str:
        return self.remote.rpartition("/")[2]

    def main(self, doc: str | None) -> None:
        sys.path.insert(0, str(ROOT))
        if sys.argv[1:2] == ["--child"]:
            child_main({"put ours": self._put_ours, "get ours": self._get_ours})
        elif sys.argv[1:2] == ["--serve"]:
            self.serve()
        else:
            os.environ["PYTHONPATH"] = str(ROOT)
            parser = parser_of(doc)
            self._add_arguments(parser)
            self._compare(parser.parse_args())

    def _add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument("--mib", type=int, default=1024, help="size of the file")
        parser.add_argument("--part-mib", type=int, default=16)
        parser.add_argument("--concurrency", type=int, default=8, help="parts or ranges in flight")
        parser.add_argument("--direction", choices=("put", "get"), default="put")
        parser.add_argument("--server", choices=(*self.servers,), default="sink")
        parser.add_argument("--clients", nargs="+", default=["ours", *self.uploads])

    def _compare(self, arguments: Any) -> None:
        verb, is_put, is_sink = arguments.direction, arguments.direction == "put", arguments.server == "sink"
        clients = Clients(arguments.clients, self.uploads if is_put else self.downloads)
        runs: dict[str, list[Measured]] = {name: [] for name in clients.names}
        size_bytes = arguments.mib * MIB
        with ExitStack() as stack:
            folder = stack.enter_context(scratch())
            destination = stack.enter_context(scratch(None if is_put else "/dev/shm"))
            url = stack.enter_context(self.servers[arguments.server](folder))
            path = real_file(folder / "run" / "shard.bin", size_bytes, is_zero=not is_put)
            key = "" if is_put else self._commit(folder / "run", path)
            for number, client in turns(clients.names, arguments.rounds):
                target = path
                if not is_put:
                    target = destination / key_of(number, client) / "file"
                    target.parent.mkdir()
                work = Work(
                    str(target),
                    size_bytes,
                    url,
                    self.bucket,
                    key or key_of(number, client),
                    arguments.part_mib * MIB,
                    arguments.concurrency,
                )
                before = self._moved(url) if is_sink else (0, 0)
                name = f"{verb} ours" if client == "ours" else client
                measured = clients.run(name, self.program, work)
                if is_sink:
                    passed = [now - then for now, then in zip(self._moved(url), before, strict=True)][
                        not is_put
                    ]
                else:
                    passed = self._stored_size(work.key)
                # Our client also transfers its records, which are less than a MiB.
                if not 0 <= passed - size_bytes < MIB or target.stat().st_size != size_bytes:
                    raise RuntimeError(f"{client}: {passed} bytes of {size_bytes}")
                runs[client].append(measured)
                if not is_put:
                    target.unlink()
        rows: dict[str, dict[str, Any]] = compared(runs, arguments.mib, "ours")
        title = (
            f"{verb} {arguments.mib} MiB, parts of {arguments.part_mib} MiB, {arguments.concurrency} in flight,"
            f" {arguments.rounds} rounds, {self.name}'s API on loopback ({arguments.server})"
        )
        report(arguments, title, rows)

    def _moved(self, url: str) -> tuple[int, int]:
        """Return how many bytes of parts the sink has received and sent."""
        parts = urlsplit(url)
        with urllib.request.urlopen(f"{parts.scheme}://{parts.netloc}{self.stats}") as answer:
            received, sent = map(int, answer.read().split())
        return received, sent

    def _stored_size(self, key: str) -> int:
        from ckpt_async.stores import open_store

        async def ask() -> int:
            store = open_store(self.remote)
            await store.open(is_read_only=True)
            try:
                return (await store.head(key)).size_bytes
            finally:
                await store.close()

        return asyncio.run(ask())

    def _commit(self, folder: Path, path: Path) -> str:
        from ckpt_async import Uploader

        with Uploader(folder, f"{self.remote}/{RUN}", rank=0, world_size=1) as uploader:
            uploader.enqueue(path, step=1, name="step")
            uploader.seal(1)
            uploader.wait(1, timeout_s=600)
            return f"{RUN}/ckpt/step-1.g{uploader.generation}/shard.bin"

    @property
    def _put_ours(self) -> Prepare:
        def prepare(work: Work) -> Callable[[], None]:
            from ckpt_async.core.model import FileIdentity
            from ckpt_async.core.settings import Settings
            from ckpt_async.transfer import upload
            from ckpt_async.transfer.patient import connect
            from ckpt_async.transfer.source import Source

            settings = Settings(num_concurrent_uploads=work.concurrency, part_size_bytes=work.part_bytes)
            runner = asyncio.Runner()
            store = connect(self.remote, None, settings)
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

        return prepare

    @property
    def _get_ours(self) -> Prepare:
        def prepare(work: Work) -> Callable[[], None]:
            from ckpt_async import restore

            checkpoint = restore.find(f"{self.remote}/{RUN}")
            assert checkpoint is not None
            path = Path(work.path)

            def run() -> None:
                fetched = restore.fetch(checkpoint, path.parent, num_concurrent_reads=work.concurrency)
                os.rename(fetched.paths["shard.bin"], path)

            return run

        return prepare


@contextmanager
def sink_of(program: str) -> Iterator[list[str]]:
    """Run the sink in a process of its own; yields the words of its first line."""
    command = [sys.executable, program, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()
        finally:
            process.kill()
