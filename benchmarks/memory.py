"""How much anonymous memory does an upload take, depending on the shard's size, with 16 requests in flight?

Sparse files of each size go through an `Uploader`, in the trainer's process (`thread`) and in its own process
(`process`: both processes count), over plain HTTP, where the kernel sends the file's pages, and over TLS, where the
bytes pass through the process. The value is the peak of RssAnon during the upload, sampled every 5 ms, minus that of
the idle uploader; the page cache does not count, because the kernel reclaims it on demand. A run counts only if all
bytes of the file arrived.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from _child import MIB, anonymous_bytes
from _compare import BUCKET, Server, parser_of, report, scratch, spread, turns

SAMPLE_S = 0.005
SMALL_CHANGE_BYTES = 1 * MIB
RUNNERS = ("thread", "process")


def child_main(settings: dict[str, Any]) -> None:
    from ckpt_async import Uploader

    path = Path(settings["path"])
    with Uploader(
        path.parent,
        settings["remote"],
        rank=0,
        world_size=1,
        num_concurrent_uploads=settings["concurrency"],
        max_concurrent_uploads=settings["concurrency"],
        latest_filename="",
        runner=settings["runner"],
    ) as uploader:
        # The first upload is small: whatever any upload needs is allocated before the second.
        for step in (1, 2):
            print("ready", flush=True)
            sys.stdin.readline()
            uploader.enqueue(path if step == 2 else path.with_name("first.bin"), step=step)
            uploader.seal(step)
            uploader.wait(step, timeout_s=600)
            print("done", flush=True)
            sys.stdin.readline()


def family(mark: str) -> list[int]:
    """Return the processes with this mark in their environment: the child, and those that it started and detached."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def anonymous_mib(pids: list[int]) -> float:
    return sum(map(anonymous_bytes, pids)) / MIB


def sample(pids: list[int], sampled: list[float], is_done: threading.Event) -> None:
    while not is_done.wait(SAMPLE_S):
        sampled.append(anonymous_mib(pids))


def measure(settings: dict[str, Any]) -> tuple[float, float, float]:
    """Return the MiB of the idle processes, the peak in MiB above that, and the seconds."""
    command = [sys.executable, __file__, "--child", json.dumps(settings)]
    mark = f"CKPT_BENCH_{uuid.uuid4().hex}"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, mark: ""}) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for _ in range(2):
            if child.stdout.readline() != "ready\n":
                raise RuntimeError("the uploader did not get ready")
            pids = family(mark)
            sampled = [anonymous_mib(pids)]
            is_done = threading.Event()
            sampling = threading.Thread(target=sample, args=(pids, sampled, is_done))
            sampling.start()
            started = time.perf_counter()
            child.stdin.write("\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            seconds = time.perf_counter() - started
            is_done.set()
            sampling.join()
            if answer != "done\n":
                raise RuntimeError("the uploader failed")
            child.stdin.write("\n")
            child.stdin.flush()
    if len(pids) != 1 + (settings["runner"] == "process"):
        raise RuntimeError(f"not the processes that were expected: {pids}")
    if child.returncode:
        raise RuntimeError(f"the uploader exited with {child.returncode}")
    return sampled[0], max(sampled) - sampled[0], seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, nargs="+", default=[1024, 4096], help="sizes of the shard")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight")
    parser.add_argument("--servers", nargs="+", choices=("sink", "tls"), default=["sink", "tls"])
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {}
    for kind in arguments.servers:
        names = [f"{runner}, {mib} MiB" for runner in RUNNERS for mib in arguments.mib]
        with scratch() as folder, Server(kind, folder) as server:
            for number, name in turns(names, arguments.rounds):
                runner, mib = name.removesuffix(" MiB").split(", ")
                path = folder / f"{number}-{runner}-{mib}" / "shard.bin"
                path.parent.mkdir()
                path.with_name("first.bin").write_bytes(bytes(MIB))
                with path.open("wb") as file:
                    file.truncate(int(mib) * MIB)
                before = server.stats()
                settings = {
                    "path": str(path),
                    "remote": f"s3://{BUCKET}/{path.parent.name}",
                    "runner": runner,
                    "concurrency": arguments.concurrency,
                }
                row = found.setdefault(f"{name}, {'http' if kind == 'sink' else 'https'}", [])
                row.append(measure(settings))
                moved = (server.stats() - before).bytes_in
                if not 0 <= moved - (int(mib) + 1) * MIB < SMALL_CHANGE_BYTES:
                    raise RuntimeError(f"{name}: {moved} bytes arrived of a shard of {mib} MiB")
                path.unlink()
    rows = {
        name: {
            "anon MiB over idle": spread(over for _, over, _ in each),
            "idle MiB": max(idle for idle, _, _ in each),
            "MiB/s": spread(int(name.split()[1]) / seconds for _, _, seconds in each),
        }
        for name, each in found.items()
    }
    title = f"memory of an upload, {arguments.concurrency} requests in flight, {arguments.rounds} rounds"
    report(arguments, title, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_main(json.loads(sys.argv[2]))
    else:
        main()
