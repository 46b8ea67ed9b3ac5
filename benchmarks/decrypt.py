"""How fast do the threads of one interpreter decrypt TLS, compared with one process each?

Each worker decrypts records that were encrypted beforehand, from memory to memory, as `stores.http.tls` does: there is
no network, no server and no disk. What threads lose is what they wait for the GIL after each record of 16 KiB.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import ssl
import threading
import time
from typing import Any

import trustme
from _compare import parser_of, report, spread

CHUNK_BYTES = 256 << 10


class Worker:
    """A TLS connection in memory, whose server has already sent `size_bytes`."""

    def __init__(self, size_bytes: int) -> None:
        authority = trustme.CA()
        trusting, serving = ssl.create_default_context(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.configure_trust(trusting)
        authority.issue_cert("localhost").configure_cert(serving)
        self._arrived, leaving, to_server, from_server = (ssl.MemoryBIO() for _ in range(4))
        self._client = trusting.wrap_bio(self._arrived, leaving, server_hostname="localhost")
        server = serving.wrap_bio(to_server, from_server, server_side=True)
        for _ in range(3):
            for end in (self._client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
                to_server.write(leaving.read())
                self._arrived.write(from_server.read())
        chunk, self._chunks = os.urandom(CHUNK_BYTES), []
        for _ in range(size_bytes // CHUNK_BYTES):
            server.write(chunk)
            self._chunks.append(from_server.read())

    def decrypt(self) -> None:
        room = memoryview(bytearray(CHUNK_BYTES))
        for chunk in self._chunks:
            self._arrived.write(chunk)
            filled = 0
            while filled < CHUNK_BYTES:
                filled += self._client.read(CHUNK_BYTES, room[filled:])  # type: ignore[operator]


def with_threads(num_workers: int, size_bytes: int) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds, that threads take."""
    threads = [threading.Thread(target=Worker(size_bytes).decrypt) for _ in range(num_workers)]
    began, cpu_began = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began, time.process_time() - cpu_began


def with_processes(num_workers: int, size_bytes: int) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds, that processes take, once all are ready."""
    context = multiprocessing.get_context("fork")
    are_ready, results = context.Barrier(num_workers), context.Queue()
    processes = [
        context.Process(target=_process, args=(size_bytes, are_ready, results)) for _ in range(num_workers)
    ]
    for process in processes:
        process.start()
    told = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    began, ended, cpu_s = zip(*told, strict=True)
    return max(ended) - min(began), sum(cpu_s)


def _process(size_bytes: int, are_ready: Any, results: Any) -> None:
    worker = Worker(size_bytes)
    are_ready.wait()
    began, cpu_began = time.perf_counter(), time.process_time()
    worker.decrypt()
    results.put((began, time.perf_counter(), time.process_time() - cpu_began))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="what each worker decrypts")
    arguments = parser.parse_args()
    num_cores = len(os.sched_getaffinity(0))
    ways = {f"{number} threads": (with_threads, number) for number in sorted({1, 2, num_cores, 8})}
    ways |= {f"{number} processes": (with_processes, number) for number in sorted({1, 2, num_cores})}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, (decrypt, number) in ways.items():
            wall_s, cpu_s = decrypt(number, arguments.mib << 20)
            gib = number * arguments.mib / 1024
            taken[name].append((gib / wall_s, cpu_s / gib))
    rows = {
        name: {"GiB/s": spread(rate for rate, _ in each), "CPU s/GiB": spread(cpu for _, cpu in each)}
        for name, each in taken.items()
    }
    report(arguments, f"decrypting TLS in memory, {arguments.rounds} rounds", rows)


if __name__ == "__main__":
    main()
