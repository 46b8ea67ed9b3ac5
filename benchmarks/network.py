"""How fast is one shard on a link that behaves like S3's: slow connections, late answers, one cable for all?

The sink models the link (`sink.Link`): the throughput of one connection, of all connections together, and the
delay of each answer. Every client sends or fetches one shard through it, with its own settings if the column
says "default", else with as many parts in flight as the column says. A row's `link` is the share of the bytes
that the link could have transferred in the same time, `connections` how many were open at once. Each run has
a sink of its own. The row `ceiling` shows what machine and sink achieve without limits. To add a real
bottleneck in the kernel, run the benchmark under `cable.sh`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import download
import peers
import upload
from _child import MIB, Measured, Work
from _compare import BUCKET, Clients, Server, key_of, parser_of, real_file, report, scratch, spread, turns
from sink import Link

# Models of a real network: Link(MiB/s of one connection, MiB/s of all, ms until an answer).
LINKS = {
    "5 MiB/s each, 50 ms": Link(5, 0, 50),
    "5 of 100 MiB/s, 50 ms": Link(5, 100, 50),
    "20 of 400 MiB/s, 30 ms": Link(20, 400, 30),
    "60 of 400 MiB/s, 30 ms": Link(60, 400, 30),
    "60 of 400 MiB/s, 5 ms": Link(60, 400, 5),
    "20 of 200 MiB/s, 100 ms": Link(20, 200, 100),
    "20 of 400 MiB/s, 30 ms, one of 8 slow": Link(20, 400, 30, slow_every=8),
    "ceiling": Link(),  # the limit of the machine with the sink on it
}

READY_S = 120  # within which all engines of a run get ready, because they must begin together


def one_run(
    way: str, clients: Clients, client: str, number: int, link: Link, settings: Any, folder: Path
) -> tuple[Measured, int]:
    """Run one transfer, or one in each of several processes at once, through a sink of its own. Return the
    measurement, until the last one ended, and the number of connections.
    """
    size_bytes = settings.mib * MIB
    knobs = (settings.part_mib * MIB, settings.concurrency)
    program = str(upload.__file__ if way == "up" else download.__file__)
    with Server(settings.server, folder, link=link) as server:
        works = []
        for engine in range(settings.engines):
            place, key = folder / key_of(number, client) / str(engine), f"{engine}-{key_of(number, client)}"
            path = real_file(place / "shard.bin", size_bytes, is_zero=True)
            if way == "down":
                key = download.commit_one(place, path, server.url)
                path = place / "got" / "file"
                path.parent.mkdir()
            works.append(Work(str(path), size_bytes, server.url, BUCKET, key, *knobs))
        before = server.stats()
        all_ready = Barrier(settings.engines, timeout=READY_S)
        with ThreadPoolExecutor(settings.engines) as engines:
            measured = list(
                engines.map(lambda work: clients.run(client, program, work, at_start=all_ready.wait), works)
            )
        after = server.stats()
        moved = after.bytes_in - before.bytes_in if way == "up" else after.bytes_out - before.bytes_out
        if moved < size_bytes * settings.engines:
            raise RuntimeError(f"{client}: {moved} bytes of {size_bytes * settings.engines} passed the link")
    for work in works:
        Path(work.path).unlink()
    together = Measured(
        max(each.wall_s for each in measured),
        sum(each.cpu_s for each in measured) / settings.engines,
        sum(each.anonymous_bytes for each in measured),
    )
    return together, after.connections


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--way", choices=("up", "down"), default="up")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--mib", type=int, default=1024, help="size of the shard")
    parser.add_argument("--engines", type=int, default=1, help="processes at once, with a shard each")
    parser.add_argument("--part-mib", type=int, default=0, help="0: the client's default")
    parser.add_argument("--concurrency", type=int, default=0, help="parts in flight; 0: the client's default")
    parser.add_argument("--clients", nargs="+", default=["ours", "obstore", "boto3", "boto3+crt", "s5cmd"])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--server", choices=("sink", "tls"), default="sink")
    arguments = parser.parse_args()
    clients = Clients(arguments.clients, peers.UPLOADS if arguments.way == "up" else peers.DOWNLOADS)
    rows: dict[str, dict[str, Any]] = {}
    mib = arguments.mib * arguments.engines
    for name in arguments.links:
        link = LINKS[name]
        runs: dict[str, list[tuple[Measured, int]]] = {client: [] for client in clients.names}
        with scratch("/dev/shm") as folder:
            for number, client in turns(clients.names, arguments.rounds):
                runs[client].append(one_run(arguments.way, clients, client, number, link, arguments, folder))
        ours = spread(mib / each.wall_s for each, _ in runs["ours"])["median"] if "ours" in runs else 0
        for client, measured in runs.items():
            rate = spread(mib / each.wall_s for each, _ in measured)
            rows[f"{name}: {client}"] = {
                "MiB/s": rate,
                "link": rate["median"] / link.total_mib_s if link.total_mib_s else None,
                "ours/it": ours / rate["median"] if ours else None,
                "connections": max(connections for _, connections in measured),
                "CPU s/GiB": spread(each.cpu_s * 1024 / arguments.mib for each, _ in measured),
            }
    how = f"{arguments.concurrency} in flight" if arguments.concurrency else "defaults"
    report(
        arguments,
        f"{arguments.engines} x {arguments.mib} MiB {arguments.way}, {how}, {arguments.rounds} rounds",
        rows,
    )


if __name__ == "__main__":
    main()
