"""How fast, and with how much CPU, does one file go to Azure Blob Storage and come back, compared with other clients?

Never run against Azure: the server is a sink on loopback that speaks its API (the tests' own peer, which computes the
CRC64 of what arrives, as Azure does, and drops it; it answers zeros), or Azurite. Either takes its share of the cores,
the same for every client, so read the ratios. As in `upload` and `download`, each run is a whole process, clients take
turns, and a run counts only if every byte of the file has passed once (Azurite: if the blob has the file's size).
`ours` has each block compared by the service (CRC64; MD5 by Azurite); the others send no checksum and compare none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import peers
from _child import MIB, Measured, Work, child_main
from _compare import Clients, compared, key_of, parser_of, real_file, report, scratch, turns

ROOT = Path(__file__).resolve().parent.parent
CONTAINER, RUN = "ckpt", "run"


def serve() -> None:
    from tests.stores.azure_peer import AzurePeer

    with AzurePeer(is_kept=False) as peer:
        print(peer.url, peer.environment()["AZURE_STORAGE_CONNECTION_STRING"], flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def sink() -> Iterator[str]:
    """The sink's process, which the environment leads to; its endpoint."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, os.environ["AZURE_STORAGE_CONNECTION_STRING"] = process.stdout.readline().strip().split(" ", 1)
        try:
            yield url
        finally:
            process.kill()


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    from tests.azurite import AzuriteServer

    with AzuriteServer(folder / "azurite") as server:
        os.environ |= server.environment()
        yield server.url


def moved(url: str) -> tuple[int, int]:
    """What the sink has received of parts, and sent."""
    parts = urlsplit(url)
    with urllib.request.urlopen(f"{parts.scheme}://{parts.netloc}/stats") as answer:
        received, sent = map(int, answer.read().split())
    return received, sent


# --- ours --------------------------------------------------------------------------------------------------


def put_ours(work: Work) -> Callable[[], None]:
    from ckpt_async.core.model import FileIdentity
    from ckpt_async.core.settings import Settings
    from ckpt_async.transfer import upload
    from ckpt_async.transfer.patient import connect
    from ckpt_async.transfer.source import Source

    settings = Settings(num_concurrent_uploads=work.concurrency, part_size_bytes=work.part_bytes)
    runner = asyncio.Runner()
    store = connect(f"az://{work.bucket}", None, settings)
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

    checkpoint = restore.find(f"az://{work.bucket}/{RUN}")
    assert checkpoint is not None
    path = Path(work.path)

    def run() -> None:
        fetched = restore.fetch(checkpoint, path.parent, num_concurrent_reads=work.concurrency)
        os.rename(fetched.paths["shard.bin"], path)

    return run


OURS = {"put ours": put_ours, "get ours": get_ours}


def commit_one(folder: Path, path: Path) -> str:
    from ckpt_async import Uploader

    with Uploader(folder, f"az://{CONTAINER}/{RUN}", rank=0, world_size=1) as uploader:
        uploader.enqueue(path, step=1, name="step")
        uploader.seal(1)
        uploader.wait(1, timeout_s=600)
        return f"{RUN}/ckpt/step-1.g{uploader.generation}/shard.bin"


def stored_size(key: str) -> int:
    from ckpt_async.stores import open_store

    async def ask() -> int:
        store = open_store(f"az://{CONTAINER}")
        await store.open(is_read_only=True)
        try:
            return (await store.head(key)).size_bytes
        finally:
            await store.close()

    return asyncio.run(ask())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--part-mib", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8, help="parts or ranges in flight")
    parser.add_argument("--direction", choices=("put", "get"), default="put")
    parser.add_argument("--server", choices=("sink", "azurite"), default="sink")
    parser.add_argument("--clients", nargs="+", default=["ours", *peers.AZURE_UPLOADS])
    arguments = parser.parse_args()
    verb, is_put, is_sink = arguments.direction, arguments.direction == "put", arguments.server == "sink"
    clients = Clients(arguments.clients, peers.AZURE_UPLOADS if is_put else peers.AZURE_DOWNLOADS)
    runs: dict[str, list[Measured]] = {name: [] for name in clients.names}
    os.environ["PYTHONPATH"] = str(ROOT)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        destination = stack.enter_context(scratch(None if is_put else "/dev/shm"))
        url = stack.enter_context(sink() if is_sink else azurite(folder))
        size_bytes = arguments.mib * MIB
        path = real_file(folder / "run" / "shard.bin", size_bytes, is_zero=not is_put)
        key = "" if is_put else commit_one(folder / "run", path)
        for number, client in turns(clients.names, arguments.rounds):
            target = path
            if not is_put:
                target = destination / key_of(number, client) / "file"
                target.parent.mkdir()
            work = Work(
                str(target),
                size_bytes,
                url,
                CONTAINER,
                key or key_of(number, client),
                arguments.part_mib * MIB,
                arguments.concurrency,
            )
            before = moved(url) if is_sink else (0, 0)
            measured = clients.run(f"{verb} ours" if client == "ours" else client, __file__, work)
            if is_sink:
                passed = [now - then for now, then in zip(moved(url), before, strict=True)][not is_put]
            else:
                passed = stored_size(work.key)
            if not 0 <= passed - size_bytes < MIB or target.stat().st_size != size_bytes:
                raise RuntimeError(f"{client}: {passed} bytes of {size_bytes}")
            runs[client].append(measured)
            if not is_put:
                target.unlink()
    rows: dict[str, dict[str, Any]] = compared(runs, arguments.mib, "ours")
    title = (
        f"{verb} {arguments.mib} MiB, parts of {arguments.part_mib} MiB, {arguments.concurrency} in flight,"
        f" {arguments.rounds} rounds, Azure Blob Storage's API on loopback ({arguments.server})"
    )
    report(arguments, title, rows)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--child"]:
        child_main(OURS)
    elif sys.argv[1:2] == ["--serve"]:
        serve()
    else:
        main()
