"""How fast, and with how much CPU and memory, is a shard downloaded to a file, compared with other clients?

Every client fetches the same object to a file of its own and ends with an fsync (free on tmpfs, the default; `--to
disk` writes to a disk). Each run is a whole process, and the clients take turns. "ours" is `restore.fetch` of a
committed checkpoint: lease, ranges, every byte compared with the receipt's checksum, fsync, rename. "offloaded" is the
same with two processes that decrypt, which machines with few cores do not start by themselves. Of the others
only boto3 and CRT can verify a checksum, and neither does so for a multipart object that is read by ranges. The sink
stores no large bodies and answers with zeros, so the shard consists of zeros: its checksum is correct and really
compared.

`recv` is not a client but the upper bound: eight sockets, each received into one buffer and written to the file,
without a checksum.
"""

from __future__ import annotations

import http.client
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import peers
from _child import MIB, Measured, Work, child_main
from _compare import BUCKET, Clients, Server, compared, key_of, parser_of, real_file, report, scratch, turns

RUN = "run"


def prepare_fetch(work: Work) -> Callable[[], None]:
    from ckpt_async import restore
    from ckpt_async.stores import StoreOptions

    options = StoreOptions(endpoint_url=work.endpoint_url)
    checkpoint = restore.find(f"s3://{BUCKET}/{RUN}", store_options=options)
    assert checkpoint is not None
    path = Path(work.path)

    def run() -> None:
        knobs = peers.given(work, "", "num_concurrent_reads")
        fetched = restore.fetch(checkpoint, path.parent, **knobs)
        os.rename(fetched.paths["shard.bin"], path)

    return run


def prepare_offloaded(work: Work) -> Callable[[], None]:
    """As many processes decrypt as on a machine with eight cores."""
    from ckpt_async.stores.http import offload

    offload.possible_processes = lambda: 2
    return prepare_fetch(work)


def prepare_recv(work: Work) -> Callable[[], None]:
    host = urlsplit(work.endpoint_url).netloc
    offsets = iter(range(0, work.size_bytes, work.part_bytes))
    taking = threading.Lock()
    descriptor = os.open(work.path, os.O_WRONLY | os.O_CREAT)

    def receive() -> None:
        connection, buffer = http.client.HTTPConnection(host), memoryview(bytearray(MIB))
        while True:
            with taking:
                offset = next(offsets, None)
            if offset is None:
                return
            end = min(offset + work.part_bytes, work.size_bytes)
            connection.request("GET", f"/{BUCKET}/{work.key}", headers={"Range": f"bytes={offset}-{end - 1}"})
            answer = connection.getresponse()
            while count := answer.readinto(buffer):
                os.pwrite(descriptor, buffer[:count], offset)
                offset += count

    def run() -> None:
        os.truncate(descriptor, work.size_bytes)
        threads = [threading.Thread(target=receive) for _ in range(work.concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.fsync(descriptor)

    return run


OURS = {"ours": prepare_fetch, "offloaded": prepare_offloaded, "recv": prepare_recv}
DEFAULT = ["ours", *peers.DOWNLOADS, "recv"]


def commit_one(folder: Path, path: Path, url: str) -> str:
    """Commit a checkpoint of this one shard, and return the shard's key."""
    from ckpt_async import Uploader
    from ckpt_async.stores import StoreOptions

    options = StoreOptions(endpoint_url=url)
    with Uploader(folder, f"s3://{BUCKET}/{RUN}", rank=0, world_size=1, store_options=options) as uploader:
        uploader.enqueue(path, step=1, name="step")
        uploader.seal(1)
        uploader.wait(1, timeout_s=300)
        return f"{RUN}/ckpt/step-1.g{uploader.generation}/shard.bin"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--part-mib", type=int, default=16, help="range size of the others; ours uses 32 MiB")
    parser.add_argument("--concurrency", type=int, default=8, help="ranges in flight")
    parser.add_argument("--clients", nargs="+", choices=[*OURS, *peers.DOWNLOADS], default=DEFAULT)
    parser.add_argument("--server", choices=("sink", "tls", "seaweed"), default="sink")
    parser.add_argument("--to", choices=("tmpfs", "disk"), default="tmpfs")
    arguments = parser.parse_args()
    # `recv` does not sign requests, and s3torchconnector does not trust our certificate.
    only = {"offloaded": {"tls"}, "recv": {"sink"}, "s3torchconnector": {"sink", "seaweed"}}
    wanted = [name for name in arguments.clients if arguments.server in only.get(name, {arguments.server})]
    clients = Clients(wanted, peers.DOWNLOADS)
    runs: dict[str, list[Measured]] = {name: [] for name in clients.names}
    place = "/dev/shm" if arguments.to == "tmpfs" else None
    with scratch() as folder, scratch(place) as destination:
        path = real_file(
            folder / "run" / "shard.bin", arguments.mib * MIB, is_zero=arguments.server != "seaweed"
        )
        with Server(arguments.server, folder) as server:
            key = commit_one(folder / "run", path, server.url)
            assert server.sizes(key)[key] == path.stat().st_size
            for number, client in turns(clients.names, arguments.rounds):
                target = destination / key_of(number, client) / "file"
                target.parent.mkdir()
                work = Work(
                    str(target),
                    path.stat().st_size,
                    server.url,
                    BUCKET,
                    key,
                    arguments.part_mib * MIB,
                    arguments.concurrency,
                )
                before = server.stats()
                runs[client].append(clients.run(client, __file__, work))
                moved = (server.stats() - before).bytes_out
                if target.stat().st_size != work.size_bytes or (server.is_sink and moved < work.size_bytes):
                    raise RuntimeError(f"{client}: {moved} bytes left for a file of {target.stat().st_size}")
                target.unlink()
    title = (
        f"download of {arguments.mib} MiB to {arguments.to}, {arguments.concurrency} in flight,"
        f" {arguments.rounds} rounds, from {arguments.server}"
    )
    report(arguments, title, compared(runs, arguments.mib, "ours"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_main(OURS)
    else:
        main()
