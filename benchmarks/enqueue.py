"""How long does `enqueue` of a 1 GiB shard block the trainer (p50 and p99) while other shards are written?

One process per rank, all in one folder, each calling `enqueue` and `seal` for step after step. Beside each rank a
writer process writes real data as fast as the disk allows (to a few files that are deleted and recreated, at most
`--write-gib` in all), and each rank's engine uploads to the sink. The shards are sparse files of 1 GiB, since
`enqueue` never reads their content and hundreds of real ones would not fit on the disk; `--real` writes 64 MiB of
real data for each instead. What is not uploaded at the end is counted and left.

Times are in ms, of the calling thread. "core" is time during which the thread was ready to run but had no core (from
the kernel's schedstat): with more processes than cores that is due to the machine, not the code. "held" is the time
beyond CPU and "core": locks, the disk, the GIL. Operations are timed by wrapping the functions that are called.
"floor" is a call of its own, half a pause later, without this package: a folder, a link and a write of 200 bytes,
the least that survives SIGKILL and the deletion of the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _compare import parser_of, quantile, report, scratch
from sink import Link, SinkServer

MIB = 1 << 20
OPERATIONS = {
    "walk": ("ckpt_async.local.folder", "Folder", "walk"),
    "link": ("ckpt_async.local.folder", "Folder", "link"),
    "journal": ("ckpt_async.local.journal", "Journal", "append"),
    "wake": ("ckpt_async.engine.loop", "Engine", "wake"),
}


# --- one rank ----------------------------------------------------------------------------------------------


class Clock:
    """The time that operations took within one call, in seconds, counting only the calling thread."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(OPERATIONS, 0.0)
        self._caller = threading.get_ident()
        for name, (module, cls, method) in OPERATIONS.items():
            owner = getattr(__import__(module, fromlist=[cls]), cls)
            setattr(owner, method, self._wrapped(name, getattr(owner, method)))

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._caller:
                return function(*args, **kwargs)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[name] += time.perf_counter() - started

        return timed


def waited_for_core_s() -> float:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def floor_s(path: Path, notes: int) -> float:
    """Return what the file system alone costs a thread that keeps a file and writes a note of it."""
    kept = path.with_suffix(".kept")
    started = time.perf_counter()
    kept.mkdir()
    os.link(path, kept / "0")
    os.write(notes, bytes(200))
    return time.perf_counter() - started


def keep_the_gil() -> None:
    for _ in itertools.count():
        pass


def rank_main(settings: dict[str, Any]) -> None:
    from ckpt_async import Uploader

    folder, rank = Path(settings["folder"]), settings["rank"]
    clock = Clock()
    uploader = Uploader(
        folder,
        "s3://ckpt/run",
        rank=rank,
        world_size=settings["ranks"],
        generation=1,
        on_error="warn",
        latest_filename="",
    )
    print("ready", flush=True)
    sys.stdin.readline()
    if settings["busy"]:
        threading.Thread(target=keep_the_gil, daemon=True).start()
    block = os.urandom(MIB)
    notes = os.open(folder / f"notes-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    samples = []
    for step in range(1, settings["count"] + 1):
        path = folder / f"step-{step}" / f"rank-{rank}.bin"
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            if settings["real"]:
                for _ in range(settings["mib"]):
                    file.write(block)
            else:
                file.truncate(settings["mib"] * MIB)
        clock.spent = dict.fromkeys(OPERATIONS, 0.0)
        core, cpu, started = waited_for_core_s(), time.thread_time(), time.perf_counter()
        uploader.enqueue(path, step=step)
        wall = time.perf_counter() - started
        cpu, core = time.thread_time() - cpu, waited_for_core_s() - core
        sample = {"wall": wall, "cpu": cpu, "core": core, "held": max(0.0, wall - cpu - core), **clock.spent}
        uploader.seal(step)
        time.sleep(settings["pause_s"] / 2)
        samples.append({**sample, "floor": floor_s(path, notes)})
        time.sleep(settings["pause_s"] / 2)
    print(json.dumps(samples), flush=True)
    os._exit(0)  # what has not been uploaded by now does not matter


# --- the writer beside it ----------------------------------------------------------------------------------


def writer_main(settings: dict[str, Any]) -> None:
    """Write until killed, or until the limit is reached."""
    block = os.urandom(8 * MIB)
    left = settings["write_bytes"]
    for number in itertools.cycle(range(4)):
        path = Path(settings["folder"]) / f"noise-{settings['rank']}-{number}"
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            for _ in range(16):
                file.write(block)
                left -= len(block)
                if left <= 0:
                    return


# --- the whole ---------------------------------------------------------------------------------------------


def run(ranks: int, arguments: argparse.Namespace) -> tuple[list[dict[str, float]], int]:
    """Return the samples of all ranks, and the bytes that reached the sink during the run."""
    processes: list[subprocess.Popen[str]] = []
    link = Link(20, 400, 30) if arguments.link else None
    with scratch(arguments.folder) as folder, SinkServer(link=link, is_idle=arguments.link) as sink:

        def start(kind: str, rank: int) -> subprocess.Popen[str]:
            settings = {
                "folder": str(folder / kind),
                "rank": rank,
                "ranks": ranks,
                "count": max(1, arguments.total // ranks),
                "mib": arguments.mib,
                "real": arguments.real,
                "busy": arguments.busy,
                "pause_s": arguments.pause_ms / 1000,
                "write_bytes": int(arguments.write_gib * 1024 * MIB / ranks),
            }
            command = [sys.executable, __file__, f"--{kind}", json.dumps(settings)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = subprocess.Popen(command, **pipes, env={**os.environ, **sink.environment()})
            processes.append(process)
            return process

        try:
            (folder / "rank").mkdir()
            (folder / "writer").mkdir()
            members = [start("rank", rank) for rank in range(ranks)]
            for each in members:
                if each.stdout is None or each.stdout.readline() != "ready\n":
                    raise RuntimeError("a rank did not start")
            if not arguments.quiet:
                for rank in range(ranks):
                    start("writer", rank)
            for each in members:
                assert each.stdin is not None
                each.stdin.write("\n")
                each.stdin.flush()
            samples = [sample for each in members for sample in json.loads(each.communicate()[0])]
            return samples, sink.stats().bytes_in
        finally:
            for process in processes:
                process.kill()
                process.wait()


def rows_of(title: str, samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the rows, in ms. The last row says what the slowest hundredth of the calls (at least three)
    spent their time on.
    """
    tail = sorted(samples, key=lambda each: each["wall"])[-max(3, len(samples) // 100) :]
    columns = list(samples[0])
    rows = {
        f"{title}, {name}": {
            column: quantile([each[column] for each in samples], q) * 1000 for column in columns
        }
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }
    rows[f"{title}, tail"] = {
        column: statistics.mean(each[column] for each in tail) * 1000 for column in columns
    }
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--total", type=int, default=240, help="shards enqueued, over all ranks")
    parser.add_argument("--real", action="store_true", help="64 MiB of real data per shard (total 80)")
    parser.add_argument("--pause-ms", type=float, default=100.0, help="pause of a rank between two steps")
    parser.add_argument(
        "--write-gib", type=float, default=24.0, help="limit of what the writers write in all"
    )
    parser.add_argument("--quiet", action="store_true", help="no writers")
    parser.add_argument("--busy", action="store_true", help="each rank has a thread that runs only Python")
    parser.add_argument(
        "--link",
        action="store_true",
        help="the sink is elsewhere: 20 MiB/s a connection, 400 in all, 30 ms to an answer, and no core of ours",
    )
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    arguments = parser.parse_args()
    arguments.mib = 64 if arguments.real else 1024
    if arguments.real:
        arguments.total = min(arguments.total, 80)
    rows: dict[str, dict[str, float]] = {}
    bytes_at_sink = {}
    for ranks in arguments.ranks:
        samples, bytes_at_sink[ranks] = run(ranks, arguments)
        if not bytes_at_sink[ranks]:
            raise RuntimeError("nothing was uploaded meanwhile")
        rows |= rows_of(f"{ranks} ranks" if ranks > 1 else "1 rank", samples)
    beside = "nothing" if arguments.quiet else "a writer for each rank"
    beside += ", and a thread of pure Python in it," if arguments.busy else ""
    kind = "real" if arguments.real else "sparse"
    title = f"ms of an `enqueue` of {arguments.mib} MiB, {kind}, {beside} beside it"
    report(arguments, title, rows, bytes_at_sink=bytes_at_sink)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["--writer"]:
        writer_main(json.loads(sys.argv[2]))
    else:
        main()
