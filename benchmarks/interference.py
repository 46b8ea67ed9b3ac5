"""How many seconds does training lose per GiB that is uploaded in the background?

A training loop on one thread, once in pure Python and once in torch on the CPU, runs in windows: alone, with
one shard uploading in the background, alone again, and so on. The loss is the duration of an upload minus the
time that the steps made during it take when run alone (before and after), per GiB. "slowest step" is the
longest single step during an upload, as a multiple of the median step when alone. Each run is a whole
process, and the clients take turns.

"core" is the part of the loss during which the training thread was ready to run but had no core (from the
kernel's schedstat, minus the same when alone): with two cores, a sink and an upload, that is due to the
machine, not the client. "lock" is the rest: the GIL, caches, memory. A run counts only if all bytes arrived.
The sink gets only the CPU time that the others leave, as if it were on another machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import peers
from _child import MIB, Work
from _compare import BUCKET, Server, key_of, parser_of, real_file, report, scratch, spread, turns

ALONE_S = 0.7
PEERS = ("obstore", "boto3")
RUNNERS: dict[str, dict[str, Any]] = {
    "ours, thread": {"runner": "thread"},
    "ours, process": {"runner": "process", "linger_s": 0},
    "ours, not niced": {"runner": "process", "linger_s": 0, "runner_nice": 0},
}
SMALL_CHANGE_BYTES = 1 * MIB

Upload = Callable[[int], None]


# --- the training ------------------------------------------------------------------------------------------


def python_step() -> Callable[[], object]:
    def step() -> int:
        total = 0
        for number in range(20_000):
            total += number * number % 7
        return total

    return step


def torch_step(device: str = "cpu") -> Callable[[], object]:
    import torch

    torch.set_num_threads(1)
    if device != "cpu":
        return accelerated_step(device)
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def accelerated_step(device: str) -> Callable[[], object]:
    """Return a step of some 150 small kernels, which is as sensitive to a busy interpreter as training is."""
    import torch

    layers = [torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU()) for _ in range(16)]
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(256, 2048, device=device, dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


LOOPS = {"python": python_step, "torch": torch_step}


def waited_for_core_s() -> float:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def window(step: Callable[[], object], is_over: Callable[[float], bool]) -> dict[str, Any]:
    """Train until `is_over(seconds so far)`."""
    took, core = [], waited_for_core_s()
    began = now = time.perf_counter()
    while not is_over(now - began):
        before = now
        step()
        now = time.perf_counter()
        took.append(now - before)
    return {
        "wall_s": now - began,
        "steps": len(took),
        "core_s": waited_for_core_s() - core,
        "median_s": statistics.median(took),
        "slowest_s": max(took),
    }


def lost(
    before: dict[str, Any], during: dict[str, Any], after: dict[str, Any], gib: float
) -> dict[str, float]:
    alone_s = before["wall_s"] + after["wall_s"]
    step_s = alone_s / (before["steps"] + after["steps"])
    core_s = during["core_s"] - (before["core_s"] + after["core_s"]) / alone_s * during["wall_s"]
    lost_s = during["wall_s"] - during["steps"] * step_s
    return {
        "lost": lost_s / gib,
        "core": core_s / gib,
        "lock": (lost_s - core_s) / gib,
        "slowest": during["slowest_s"] / statistics.median([before["median_s"], after["median_s"]]),
        "upload_s": during["wall_s"],
    }


# --- one client --------------------------------------------------------------------------------------------


def prepare_ours(work: Work, settings: dict[str, Any]) -> Upload:
    from ckpt_async import Uploader
    from ckpt_async.stores import StoreOptions

    folder = Path(work.path).parent / work.key
    folder.mkdir()
    uploader = Uploader(
        folder,
        f"s3://{BUCKET}/{work.key}",
        rank=0,
        world_size=1,
        store_options=StoreOptions(endpoint_url=work.endpoint_url),
        num_concurrent_uploads=work.concurrency,
        latest_filename="",
        **settings,
    )

    def upload(number: int) -> None:
        path = folder / f"step-{number}.bin"
        path.hardlink_to(work.path)
        uploader.enqueue(path, step=number)
        uploader.seal(number)
        uploader.wait(number, timeout_s=300)

    return upload


def prepare_peer(work: Work, name: str) -> Upload:
    prepare = peers.UPLOADS[name][1]
    assert prepare is not None
    run = prepare(work)
    return lambda _: run()


def child_main(name: str, work: Work, loops: list[str], windows: int) -> None:
    upload = prepare_ours(work, RUNNERS[name]) if name in RUNNERS else prepare_peer(work, name)
    found: dict[str, list[dict[str, float]]] = {}
    upload(0)  # the first upload is slower with every client: connections, imports
    number = 0
    for loop in loops:
        step = LOOPS[loop]()
        before = window(step, lambda spent_s: spent_s >= ALONE_S)
        for _ in range(windows):
            number += 1
            sending = threading.Thread(target=upload, args=(number,))
            sending.start()
            during = window(step, lambda _: not sending.is_alive())  # noqa: B023
            after = window(step, lambda spent_s: spent_s >= ALONE_S)
            found.setdefault(loop, []).append(lost(before, during, after, work.size_bytes / 2**30))
            before = after
    print(json.dumps(found), flush=True)
    os._exit(0)  # a client's exit must not hang


# --- the whole ---------------------------------------------------------------------------------------------


def environment(name: str) -> dict[str, str] | None:
    """Return the environment variables for a client, or None if the peer is not available. Ours and torch use
    the project's own packages; a peer's packages come before those.
    """
    if name in RUNNERS:
        return dict(os.environ)
    python = peers.install(peers.UPLOADS[name][0])
    if python is None:
        return None
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return {**os.environ, "PYTHONPATH": subprocess.check_output(where, text=True).strip()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=2, help="uploads per process and training loop")
    parser.add_argument("--mib", type=int, default=1024, help="size of the shard")
    parser.add_argument("--part-mib", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--server", choices=("sink", "tls"), default="sink")
    parser.add_argument(
        "--server-takes-cores",
        action="store_true",
        help="the sink competes with training, as no server elsewhere does",
    )
    parser.add_argument("--loops", nargs="+", choices=[*LOOPS], default=[*LOOPS])
    parser.add_argument("--clients", nargs="+", choices=[*RUNNERS, *PEERS], default=[*RUNNERS, *PEERS])
    arguments = parser.parse_args()
    there = {name: environment(name) for name in arguments.clients}
    names = [name for name, each in there.items() if each is not None]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with scratch() as folder:
        path = real_file(folder / "shards" / "shard.bin", arguments.mib * MIB)
        with Server(arguments.server, folder, is_idle=not arguments.server_takes_cores) as server:
            part_bytes, size_bytes = arguments.part_mib * MIB, arguments.mib * MIB
            work = Work(str(path), size_bytes, server.url, BUCKET, "", part_bytes, arguments.concurrency)
            for number, name in turns(names, arguments.rounds):
                keyed = asdict(replace(work, key=key_of(number, name)))
                before = server.stats()
                told = [json.dumps(each) for each in (keyed, arguments.loops, arguments.windows)]
                env = {**(there[name] or {}), **server.environment()}
                answer = subprocess.check_output([sys.executable, __file__, "--child", name, *told], env=env)
                moved = (server.stats() - before).bytes_in
                sent = size_bytes * (1 + arguments.windows * len(arguments.loops))
                if not 0 <= moved - sent < SMALL_CHANGE_BYTES:
                    raise RuntimeError(f"{name}: {moved} bytes arrived of {sent}")
                for loop, each in json.loads(answer).items():
                    found.setdefault((loop, name), []).extend(each)
    rows = {
        f"{loop}: {name}": {
            "lost s/GiB": spread(each["lost"] for each in found[loop, name]),
            "core": statistics.median(each["core"] for each in found[loop, name]),
            "lock": statistics.median(each["lock"] for each in found[loop, name]),
            "slowest step": statistics.median(each["slowest"] for each in found[loop, name]),
            "MiB/s": statistics.median(arguments.mib / each["upload_s"] for each in found[loop, name]),
        }
        for loop in arguments.loops
        for name in names
    }
    title = (
        f"training beside uploads of {arguments.mib} MiB, {arguments.concurrency} in flight,"
        f" {arguments.rounds} rounds of {arguments.windows}{' over TLS' * (arguments.server == 'tls')}"
    )
    report(arguments, title, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_main(
            sys.argv[2], Work(**json.loads(sys.argv[3])), json.loads(sys.argv[4]), json.loads(sys.argv[5])
        )
    else:
        main()
