"""How long, and how many requests, does a commit take after the last `seal`, if everything is uploaded by then?

1 to 64 ranks, each an `Uploader` with its own folder, in up to 8 processes. All shards are in the store before any
rank seals. "last": all ranks but one have sealed and stored their receipts; then the last one seals. "together": all
ranks seal at the same moment, the hardest case, because several may find that they are the last. The sink sleeps
before each answer, to imitate a distant store. The time is from the last `seal` until the first rank knows of the
commit, in ms and in round trips; a round trip is the median time of one small PUT in the same run.

Requests are counted in the sink's log, over all ranks, from the first `seal` until every rank knows of the commit,
and divided by the number of ranks. A commit counts only if there is one decision and a receipt of every rank.
"""

from __future__ import annotations

import asyncio
import collections
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _compare import BUCKET, Server, parser_of, report, scratch, spread
from sink import Link

PUTS = 20  # for the median that is one round trip
WAYS = ("last", "together")
TARGET_ROUND_TRIPS = 6


# --- the ranks of one process ------------------------------------------------------------------------------


async def round_trip_s(remote: str) -> float:
    from ckpt_async.stores import open_store
    from ckpt_async.stores.checksums import checksum_of
    from ckpt_async.stores.interface import BytesBody

    store = open_store(f"{remote}-round-trip")
    await store.open()
    took = []
    for number in range(PUTS):
        data = b"x" * 300
        body, checksum = BytesBody(data), checksum_of(data, store.capabilities.checksum_algorithm)
        began = time.monotonic()
        await store.put(f"x/{number}", body, checksum)
        took.append(time.monotonic() - began)
    await store.close()
    return statistics.median(took)


def ranks_main(settings: dict[str, Any]) -> None:
    """Obey the lines `enqueue STEP`, `seal STEP RANK…` and `wait STEP RANK…`; answer each with one line of JSON."""
    from ckpt_async import Uploader

    def open_rank(rank: int) -> Uploader:
        folder = Path(settings["folder"]) / str(rank)
        (folder / "shards").mkdir(parents=True)
        return Uploader(
            folder,
            settings["remote"],
            rank=rank,
            world_size=settings["world_size"],
            generation=1,
            latest_filename="",
        )

    def enqueue(rank: int, step: int) -> None:
        path = uploaders[rank].folder / "shards" / f"rank-{rank}-{step}.bin"
        path.write_bytes(b"a small shard")
        uploaders[rank].enqueue(path, step=step)

    def seal(rank: int, step: int) -> float:
        sealed_at = time.monotonic()
        uploaders[rank].seal(step)
        return sealed_at

    def wait(rank: int, step: int) -> float:
        uploaders[rank].wait(step, timeout_s=60)
        return time.monotonic()

    verbs: dict[str, Callable[[int, int], float | None]] = {"enqueue": enqueue, "seal": seal, "wait": wait}
    threads = ThreadPoolExecutor(len(settings["ranks"]))
    uploaders = dict(zip(settings["ranks"], threads.map(open_rank, settings["ranks"]), strict=True))
    print(json.dumps(asyncio.run(round_trip_s(settings["remote"]))), flush=True)
    for line in sys.stdin:
        verb, step, *ranks = line.split()
        mine = [rank for rank in map(int, ranks) if rank in uploaders]
        print(json.dumps([*threads.map(lambda rank: verbs[verb](rank, int(step)), mine)]), flush=True)  # noqa: B023
    for each in uploaders.values():
        each.close()


# --- the whole ---------------------------------------------------------------------------------------------


class Ranks:
    """All ranks, in their processes."""

    def __init__(self, num_ranks: int, num_processes: int, folder: Path, remote: str) -> None:
        self.all = range(num_ranks)
        self._processes: list[subprocess.Popen[str]] = []
        for number in range(num_processes):
            ranks = [*self.all[number::num_processes]]
            settings = {"folder": str(folder), "remote": remote, "world_size": num_ranks, "ranks": ranks}
            command = [sys.executable, __file__, "--ranks-of-one-process", json.dumps(settings)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._processes.append(subprocess.Popen(command, **pipes))
        self.round_trip_s = statistics.median(self._answers())

    def tell(self, verb: str, step: int, *ranks: int) -> list[float]:
        for each in self._processes:
            assert each.stdin is not None
            each.stdin.write(f"{verb} {step} {' '.join(map(str, ranks))}\n")
            each.stdin.flush()
        return [at for answer in self._answers() for at in answer]

    def _answers(self) -> list[Any]:
        lines = [each.stdout.readline() for each in self._processes if each.stdout is not None]
        if not all(lines):
            raise RuntimeError("a rank failed")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for each in self._processes:
            if each.stdin is not None:
                each.stdin.close()
        if any(each.wait(60) for each in self._processes):
            raise RuntimeError("a rank failed at its end")


def wait_for(server: Server, prefix: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(server.sizes(prefix)) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(server.sizes(prefix))} of {count} objects under {prefix}")
        time.sleep(0.05)


def commit(ranks: Ranks, way: str, step: int, server: Server, run: str, log: Path) -> tuple[float, list[str]]:
    """Return the seconds from the last seal to the commit, and the log lines of all requests of the commit."""
    from ckpt_async.core import keys
    from ckpt_async.core.model import CheckpointId

    id_ = CheckpointId(1, step)
    ranks.tell("enqueue", step, *ranks.all)
    wait_for(server, f"{run}/{keys.data_prefix(f'step-{step}', 1)}", len(ranks.all))
    time.sleep(5 * ranks.round_trip_s)  # so that the answers reach the ranks
    seen = len(log.read_text().splitlines())
    last = ranks.all[-1]
    receipts = f"{run}/{keys.receipts_prefix(id_)}"
    if way == "last" and last:
        ranks.tell("seal", step, *ranks.all[:-1])
        wait_for(server, receipts, last)
        time.sleep(5 * ranks.round_trip_s)
        sealed = ranks.tell("seal", step, last)
        known = ranks.tell("wait", step, last)  # the others ask at their own pace
    else:
        sealed = ranks.tell("seal", step, *ranks.all)
        known = []
    known += ranks.tell("wait", step, *ranks.all)
    lines = [
        line for line in log.read_text().splitlines()[seen:] if keys.PRIVATE in line or "list-type" in line
    ]
    if len(server.sizes(f"{run}/{keys.decision_key(id_)}")) != 1 or len(server.sizes(receipts)) != len(
        ranks.all
    ):
        raise RuntimeError(f"step {step} has no decision, or not a receipt of every rank")
    return min(known) - max(sealed), lines


def kind(line: str) -> str:
    """Return what a request in the log is about; listings name their prefix in the query."""
    method, _, target = line.partition(" ")
    what = next(
        (word for word in ("receipts", "decisions", "generations", "latest", "boundary") if word in target),
        "",
    )
    return f"{'LIST' if 'list-type' in target else method} {what}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument(
        "--processes", type=int, default=8, help="number of processes at most; the ranks are spread over them"
    )
    parser.add_argument(
        "--delay-ms", type=int, default=50, help="the sink sleeps this long before every answer"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for num_ranks in arguments.ranks:
        with scratch() as folder:
            log = folder / "requests"
            with Server("sink", folder, link=Link(delay_ms=arguments.delay_ms), log=log) as server:
                url = f"s3://{BUCKET}/run"
                ranks = Ranks(num_ranks, min(num_ranks, arguments.processes), folder / "ranks", url)
                for number, way in enumerate(arguments.ways):
                    steps = range(1 + number * arguments.rounds, 1 + (number + 1) * arguments.rounds)
                    found = [commit(ranks, way, step, server, "run", log) for step in steps]
                    trip_s = ranks.round_trip_s
                    kinds = collections.Counter(kind(line) for _, lines in found for line in lines)
                    rows[f"{num_ranks} ranks, {way}"] = {
                        "ms": spread(took * 1000 for took, _ in found),
                        "round trips": spread(took / trip_s for took, _ in found),
                        "round trip ms": trip_s * 1000,
                        "requests/rank": spread(len(lines) / num_ranks for _, lines in found),
                        "GET receipts/commit": kinds["GET receipts"] / len(found),
                        "kinds": {each: count / len(found) for each, count in kinds.most_common()},
                    }
                    print(".", end="", file=sys.stderr, flush=True)
                ranks.close()
    print(file=sys.stderr)
    title = f"from the last seal to the commit, {arguments.delay_ms} ms of delay, {arguments.rounds} rounds"
    if not arguments.json:
        for row in rows.values():
            del row["kinds"]
    report(arguments, title, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks-of-one-process"]:
        ranks_main(json.loads(sys.argv[2]))
    else:
        main()
