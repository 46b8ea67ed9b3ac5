"""How fast and with how much CPU and memory does one shard in the page cache reach S3, against other clients?

Every client sends the same file, in whole processes that take turns; medians are printed, and ratios, which is what
a noisy machine can be asked for. Time and CPU are counted from when the client is ready (imported, connected) until
the object is there; memory is the most anonymous memory above that of the ready process (of s5cmd: of the whole
process). A run counts only if the server has exactly the bytes of the file, and the sink saw them arrive once.

`sendfile` is no client but the limit: eight sockets, `os.sendfile`, no checksum.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import peers
from _child import MIB, Measured, Work, child_main, measure, measure_command
from sink import SinkServer

BUCKET = "ckpt"
# What an upload may send besides the file: probes, generation, receipt, decision, latest.
SMALL_CHANGE_BYTES = 1 * MIB


def prepare_transfer(work: Work, runner: asyncio.Runner | None = None) -> Callable[[], None]:
    from ckpt_async import transfer
    from ckpt_async.model import FileIdentity
    from ckpt_async.observe import NullObserver
    from ckpt_async.requests import Requests
    from ckpt_async.settings import Settings
    from ckpt_async.stores import StoreOptions, open_store

    settings = Settings(num_concurrent_uploads=work.concurrency, part_size_bytes=work.part_bytes)
    options = StoreOptions(endpoint_url=work.endpoint_url, max_connections=max(64, work.concurrency + 16))
    runner = runner or asyncio.Runner()
    store = open_store(f"s3://{BUCKET}", options)
    runner.run(store.open())

    async def send() -> None:
        requests = Requests(settings, NullObserver(), store.url)
        descriptor = os.open(work.path, os.O_RDONLY)
        facts = os.fstat(descriptor)
        identity = FileIdentity(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        source = transfer.Source(descriptor, identity, work.path)
        await transfer.upload(
            store,
            requests,
            source,
            work.key,
            smallest_part_bytes=work.part_bytes,
            resume=None,
            opened=lambda _: None,
            sent=lambda _: None,
        )

    return lambda: runner.run(send())


def prepare_transfer_uvloop(work: Work) -> Callable[[], None]:
    import uvloop

    return prepare_transfer(work, asyncio.Runner(loop_factory=uvloop.new_event_loop))


def prepare_transfer_slices(work: Work) -> Callable[[], None]:
    """As over TLS, though without encryption: the bytes pass through the process, slice by slice."""
    from ckpt_async import transfer

    del transfer.FileBody.send_file
    return prepare_transfer(work)


def prepare_uploader(work: Work) -> Callable[[], None]:
    from ckpt_async import Uploader
    from ckpt_async.stores import StoreOptions

    # A folder and a journal of its own, as the runs before had; the file is the same one, still cached.
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
        num_concurrent_uploads=work.concurrency,
        part_size_bytes=work.part_bytes,
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
DEFAULT = ["ours", "ours, Uploader", *peers.CLIENTS, "s5cmd", "sendfile"]


class Target:
    """The server the clients send to, and what it says has arrived."""

    def __init__(self, kind: str, folder: Path, *, verify: bool) -> None:
        self._kind = kind
        if kind == "sink":
            self.server = SinkServer(verify=verify)
        else:
            from ckpt_async.demo.seaweed import SeaweedServer

            self.server = SeaweedServer(folder / "seaweed", bucket=BUCKET)

    def environment(self) -> dict[str, str]:
        own = self.server.environment()
        return {**own, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.server.url}

    @contextlib.contextmanager
    def checked(self, name: str, work: Work) -> Iterator[None]:
        """Raise unless what is done inside brings exactly the file's bytes."""
        before = self.server.stats() if isinstance(self.server, SinkServer) else None
        yield
        if before is not None:
            moved = (self.server.stats() - before).bytes_in
            if not 0 <= moved - work.size_bytes < SMALL_CHANGE_BYTES:
                raise RuntimeError(f"{name}: {moved} bytes arrived of a file of {work.size_bytes}")
        if name != "sendfile" and (size := asyncio.run(self._size(work.key))) != work.size_bytes:
            raise RuntimeError(f"{name}: the object has {size} bytes of {work.size_bytes}")

    def clear(self) -> None:
        """Delete every object, so that a server that stores them does not fill the disk."""
        if not isinstance(self.server, SinkServer):
            asyncio.run(self._clear())

    async def _size(self, prefix: str) -> int:
        """Of the largest object there: what the Uploader writes beside the shard is small."""
        async with self._store() as store:
            return max((each.size_bytes for each in (await store.list(prefix)).objects), default=0)

    async def _clear(self) -> None:
        async with self._store() as store:
            await store.delete([each.key for each in (await store.list("")).objects])

    @contextlib.asynccontextmanager
    async def _store(self):
        from ckpt_async.stores import StoreOptions, open_store

        store = open_store(f"s3://{BUCKET}", StoreOptions(endpoint_url=self.server.url))
        await store.open()
        try:
            yield store
        finally:
            await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--part-mib", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8, help="parts in flight")
    parser.add_argument("--clients", nargs="+", default=DEFAULT, choices=[*OURS, *peers.CLIENTS, "s5cmd"])
    parser.add_argument("--server", choices=("sink", "seaweed"), default="sink")
    parser.add_argument("--verify", action="store_true", help="let the sink check every checksum it can")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    pythons = {group: peers.install(group) for group in _groups(arguments.clients)}
    clients = [name for name in arguments.clients if _is_there(name, pythons)]
    runs: dict[str, list[Measured]] = {name: [] for name in clients}
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as name:
        folder = Path(name)
        path = _file(folder / "shards" / "shard.bin", arguments.mib * MIB)
        target = Target(arguments.server, folder, verify=arguments.verify)
        if arguments.server == "seaweed":
            (folder / "seaweed").mkdir()
        with target.server:
            os.environ.update(target.environment())
            for number in range(arguments.rounds):
                order = list(itertools.islice(itertools.cycle(clients), number, number + len(clients)))
                for client in order:
                    key = f"{number}-{client.replace(', ', '-').replace('+', '-')}"
                    work = Work(
                        str(path),
                        path.stat().st_size,
                        target.server.url,
                        BUCKET,
                        key,
                        arguments.part_mib * MIB,
                        arguments.concurrency,
                    )
                    with target.checked(client, work):
                        runs[client].append(_run(client, work, pythons))
                    target.clear()
                    if not arguments.json:
                        print(".", end="", file=sys.stderr, flush=True)
    _report(arguments, runs)


def _groups(clients: list[str]) -> list[str]:
    groups = {peers.CLIENTS[name][0] for name in clients if name in peers.CLIENTS}
    return sorted(groups | ({"s3"} if "s5cmd" in clients else set()))


def _is_there(name: str, pythons: dict[str, Path | None]) -> bool:
    return name in OURS or pythons["s3" if name == "s5cmd" else peers.CLIENTS[name][0]] is not None


def _run(name: str, work: Work, pythons: dict[str, Path | None]) -> Measured:
    if name == "s5cmd":
        return measure_command(*peers.s5cmd(Path(str(pythons["s3"])), work), {})
    if name in peers.CLIENTS:
        return measure(str(pythons[peers.CLIENTS[name][0]]), Path(peers.__file__), name, work, {})
    return measure(sys.executable, Path(__file__), name, work, {})


def _file(path: Path, size_bytes: int) -> Path:
    """Real bytes, written and so in the page cache, and on the disk so that nothing writes beside the runs."""
    path.parent.mkdir()
    block = os.urandom(8 * MIB)
    with path.open("wb") as file:
        for offset in range(0, size_bytes, len(block)):
            file.write(block[: size_bytes - offset])
        os.fsync(file.fileno())
    return path


def _report(arguments: argparse.Namespace, runs: dict[str, list[Measured]]) -> None:
    gib = arguments.mib / 1024
    rows = {
        name: {
            "mib_per_s": statistics.median(arguments.mib / each.wall_s for each in measured),
            "mib_per_s_low": min(arguments.mib / each.wall_s for each in measured),
            "mib_per_s_high": max(arguments.mib / each.wall_s for each in measured),
            "cpu_s_per_gib": statistics.median(each.cpu_s / gib for each in measured),
            "anonymous_mib": max(each.anonymous_bytes for each in measured) / MIB,
        }
        for name, measured in runs.items()
    }
    if arguments.json:
        print(json.dumps({"settings": vars(arguments), "clients": rows}))
        return
    print(
        f"\n{arguments.mib} MiB, parts of {arguments.part_mib} MiB, {arguments.concurrency} in flight,"
        f" {arguments.rounds} rounds, to {arguments.server}; medians, memory: the most of all rounds"
    )
    ours = rows.get("ours")
    print(
        f"{'':20} {'MiB/s':>7} {'from … to':>13} {'CPU s/GiB':>10} {'anon MiB':>9} {'ours/it':>8} {'CPU':>6}"
    )
    for name, row in rows.items():
        faster = f"{ours['mib_per_s'] / row['mib_per_s']:7.2f}x" if ours else ""
        cpu = f"{ours['cpu_s_per_gib'] / row['cpu_s_per_gib']:5.2f}x" if ours and row["cpu_s_per_gib"] else ""
        spread = f"{row['mib_per_s_low']:.0f} … {row['mib_per_s_high']:.0f}"
        print(
            f"{name:20} {row['mib_per_s']:7.0f} {spread:>13} {row['cpu_s_per_gib']:10.2f}"
            f" {row['anonymous_mib']:9.0f} {faster:>8} {cpu:>6}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_main(OURS)
    else:
        main()
