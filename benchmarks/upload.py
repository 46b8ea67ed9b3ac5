"""How fast, and with how much CPU and memory, is one cached file uploaded to S3, compared with other clients?

Every client sends the same file. Each run is a whole process, and the clients take turns; the tables show medians and
ratios, which a noisy machine distorts least. Time and CPU are counted from the moment the client is ready (imported
and connected) until the object is stored; memory is the peak of anonymous memory above that of the ready process (for
s5cmd, of the whole process). A run counts only if the server has exactly the bytes of the file and the sink received
them once.

`sendfile` is not a client but the upper bound: eight sockets, `os.sendfile`, no checksum. With `--server tls` the
sink decrypts on the cores on which the client encrypts, so CPU seconds say more than MiB/s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import peers
from _child import MIB, Measured, Work, child_main
from _compare import BUCKET, Clients, Server, compared, key_of, parser_of, real_file, report, scratch, turns

# What an upload may send besides the file: probes, generation, receipt, decision, latest.
SMALL_CHANGE_BYTES = 1 * MIB


def _knobs(work: Work) -> dict[str, Any]:
    """Return the options of `work` as our settings."""
    return peers.given(work, "part_size_bytes", "num_concurrent_uploads")


def prepare_transfer(work: Work, runner: asyncio.Runner | None = None) -> Callable[[], None]:
    from ckpt_async.core.model import FileIdentity
    from ckpt_async.core.settings import Settings
    from ckpt_async.stores import StoreOptions
    from ckpt_async.transfer import upload
    from ckpt_async.transfer.patient import connect
    from ckpt_async.transfer.source import Source

    settings = Settings(**_knobs(work))
    options = StoreOptions(endpoint_url=work.endpoint_url, max_connections=max(64, work.concurrency + 16))
    runner = runner or asyncio.Runner()
    store = connect(f"s3://{BUCKET}", options, settings)
    runner.run(store.open())

    async def send() -> None:
        descriptor = os.open(work.path, os.O_RDONLY)
        facts = os.fstat(descriptor)
        identity = FileIdentity(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        source = Source(descriptor, identity, work.path)
        await upload.upload(
            store,
            source,
            work.key,
            smallest_part_bytes=settings.part_size_bytes,
            resume=None,
            opened=lambda _: None,
            sent=lambda _: None,
        )

    return lambda: runner.run(send())


def prepare_transfer_uvloop(work: Work) -> Callable[[], None]:
    import uvloop

    return prepare_transfer(work, asyncio.Runner(loop_factory=uvloop.new_event_loop))


def prepare_transfer_slices(work: Work) -> Callable[[], None]:
    """Upload without sendfile: the bytes pass through the process, slice by slice."""
    from ckpt_async.stores.http import uploads

    uploads.Exchange.takes_files = property(lambda _: False)  # type: ignore[assignment,method-assign]
    return prepare_transfer(work)


def prepare_uploader(work: Work) -> Callable[[], None]:
    from ckpt_async import Uploader
    from ckpt_async.stores import StoreOptions

    # Each run has its own folder and journal, as the previous ones did; the file is the same one, still
    # cached.
    folder = Path(work.path).parent / work.key
    folder.mkdir()
    path = folder / "shard.bin"
    path.hardlink_to(work.path)
    uploader = Uploader(
        folder,
        f"s3://{BUCKET}/{work.key}",
        rank=0,
        world_size=1,
        store_options=StoreOptions(endpoint_url=work.endpoint_url),
        **_knobs(work),
        latest_filename="",
    )

    def run() -> None:
        uploader.enqueue(path, step=1, name="step")
        uploader.seal(1)
        uploader.wait(1, timeout_s=300)

    return run


def prepare_sendfile(work: Work) -> Callable[[], None]:
    host, port = urlsplit(work.endpoint_url).hostname, urlsplit(work.endpoint_url).port
    offsets = iter(range(0, work.size_bytes, work.part_bytes))
    taking = threading.Lock()

    def send() -> None:
        with open(work.path, "rb") as file, socket.create_connection((host, port)) as connection:
            while True:
                with taking:
                    offset = next(offsets, None)
                if offset is None:
                    return
                left = min(work.part_bytes, work.size_bytes - offset)
                head = (
                    f"PUT /{BUCKET}/{work.key}.{offset} HTTP/1.1\r\nHost: x\r\nContent-Length: {left}\r\n\r\n"
                )
                connection.sendall(head.encode())
                while left:
                    count = os.sendfile(connection.fileno(), file.fileno(), offset, left)
                    offset, left = offset + count, left - count
                connection.recv(4096)

    def run() -> None:
        threads = [threading.Thread(target=send) for _ in range(work.concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


OURS = {
    "ours": prepare_transfer,
    "ours, slices": prepare_transfer_slices,
    "ours, uvloop": prepare_transfer_uvloop,
    "ours, Uploader": prepare_uploader,
    "sendfile": prepare_sendfile,
}
DEFAULT = ["ours", "ours, Uploader", *peers.UPLOADS, "sendfile"]


@contextlib.contextmanager
def checked(server: Server, name: str, work: Work) -> Iterator[None]:
    """Raise unless the work done inside transfers exactly the bytes of the file."""
    before = server.stats()
    yield
    moved = (server.stats() - before).bytes_in
    if server.is_sink and not 0 <= moved - work.size_bytes < SMALL_CHANGE_BYTES:
        raise RuntimeError(f"{name}: {moved} bytes arrived of a file of {work.size_bytes}")
    # Take the largest object, since what the Uploader writes beside the shard is small. With `sendfile`, the
    # parts are objects.
    if name != "sendfile" and (size := max(server.sizes(work.key).values(), default=0)) != work.size_bytes:
        raise RuntimeError(f"{name}: the object has {size} bytes of {work.size_bytes}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--part-mib", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8, help="parts in flight")
    parser.add_argument("--clients", nargs="+", choices=[*OURS, *peers.UPLOADS], default=DEFAULT)
    parser.add_argument("--server", choices=("sink", "tls", "seaweed"), default="sink")
    parser.add_argument("--verify", action="store_true", help="let the sink check every checksum it can")
    arguments = parser.parse_args()
    # `sendfile` does not sign requests, and s3torchconnector does not trust our certificate.
    only = {"sendfile": {"sink"}, "s3torchconnector": {"sink", "seaweed"}}
    wanted = [name for name in arguments.clients if arguments.server in only.get(name, {arguments.server})]
    clients = Clients(wanted, peers.UPLOADS)
    runs: dict[str, list[Measured]] = {name: [] for name in clients.names}
    with scratch() as folder:
        path = real_file(folder / "shards" / "shard.bin", arguments.mib * MIB)
        options = {"verify": True} if arguments.verify else {}
        with Server(arguments.server, folder, **options) as server:
            for number, client in turns(clients.names, arguments.rounds):
                work = Work(
                    str(path),
                    path.stat().st_size,
                    server.url,
                    BUCKET,
                    key_of(number, client),
                    arguments.part_mib * MIB,
                    arguments.concurrency,
                )
                with checked(server, client, work):
                    runs[client].append(clients.run(client, __file__, work))
                server.clear()
    rows = compared(runs, arguments.mib, "ours")
    title = (
        f"upload of {arguments.mib} MiB, parts of {arguments.part_mib} MiB, {arguments.concurrency} in flight,"
        f" {arguments.rounds} rounds, to {arguments.server}"
    )
    report(arguments, title, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_main(OURS)
    else:
        main()
