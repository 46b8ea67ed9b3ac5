"""How many small shards per second are uploaded to S3, and with how many requests each, compared with s5cmd?

A folder of `--shards` files of 64 KiB. Ours runs from `enqueue` of the folder to the commit, including links,
journal, fsync of every file, checksums and receipt; s5cmd copies the folder. Each run is a whole process, and they
take turns. The sink logs every request: a run counts only if each shard was sent by exactly one PUT and all its bytes
arrived. "other" counts all other requests (ours: receipt, decision, latest, listings); it must not grow with the
shards.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import peers
from _child import Measured, Work, child_main, measure, measure_command
from _compare import BUCKET, Server, add_ratio, key_of, parser_of, report, scratch, spread, turns
from sink import Link

SHARD_BYTES = 64 << 10
# Requests that are not for shards, independent of their number: opening and closing a rank with one
# checkpoint.
MOST_OTHER_REQUESTS = 40


def prepare_ours(work: Work) -> Callable[[], None]:
    return _prepare(work, "thread")


def prepare_ours_process(work: Work) -> Callable[[], None]:
    return _prepare(work, "process")


def _prepare(work: Work, runner: str) -> Callable[[], None]:
    from ckpt_async import Uploader
    from ckpt_async.stores import StoreOptions

    # Each run has its own folder and journal; the files are the same ones, still in the page cache.
    folder = Path(work.path).parent / work.key
    (folder / "step").mkdir(parents=True)
    for path in Path(work.path).iterdir():
        (folder / "step" / path.name).hardlink_to(path)
    uploader = Uploader(
        folder,
        f"s3://{BUCKET}/{work.key}",
        rank=0,
        world_size=1,
        store_options=StoreOptions(endpoint_url=work.endpoint_url),
        latest_filename="",
        runner=runner,
    )

    def run() -> None:
        uploader.enqueue(folder / "step", step=1, name="step")
        uploader.seal(1)
        uploader.wait(1, timeout_s=600)

    return run


OURS = {"ours": prepare_ours, "ours, process": prepare_ours_process}


def s5cmd(python: Path, work: Work) -> Measured:
    program = str(python.with_name("s5cmd"))
    copy = [program, "--endpoint-url", work.endpoint_url, "cp", f"{work.path}/"]
    return measure_command([*copy, f"s3://{BUCKET}/{work.key}/"], [program, "version"], {})


def checked(name: str, log: Path, seen: int, num_shards: int) -> tuple[int, int]:
    """Return the requests for shards, and the others, since line `seen`. Raises unless every shard was sent
    by exactly one PUT.
    """
    shards: dict[str, int] = {}
    others = 0
    for line in log.read_text().splitlines()[seen:]:
        method, _, target = line.partition(" ")
        path = target.partition("?")[0]
        if path.endswith(".bin"):
            shards[path] = shards.get(path, 0) + 1
            if method != "PUT":
                raise RuntimeError(f"{name}: {line}")
        else:
            others += 1
    if len(shards) != num_shards or set(shards.values()) != {1}:
        raise RuntimeError(f"{name}: {len(shards)} of {num_shards} shards, by {sum(shards.values())} PUTs")
    return sum(shards.values()), others


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=int, default=0, help="before every answer")
    parser.add_argument("--shards", type=int, default=2000)
    parser.add_argument("--clients", nargs="+", choices=[*OURS, "s5cmd"], default=[*OURS, "s5cmd"])
    arguments = parser.parse_args()
    python = peers.install("s3") if "s5cmd" in arguments.clients else None
    names = [name for name in arguments.clients if name in OURS or python is not None]
    runs: dict[str, list[Measured]] = {name: [] for name in names}
    others: dict[str, int] = dict.fromkeys(names, 0)
    with scratch() as folder:
        (folder / "shards").mkdir()
        for number in range(arguments.shards):
            (folder / "shards" / f"{number:06d}.bin").write_bytes(os.urandom(SHARD_BYTES))
        os.sync()
        log = folder / "requests"
        with Server("sink", folder, link=Link(delay_ms=arguments.delay_ms), log=log) as server:
            size_bytes = arguments.shards * SHARD_BYTES
            work = Work(str(folder / "shards"), size_bytes, server.url, BUCKET, "", 0, 0)
            for number, name in turns(names, arguments.rounds):
                before, seen = server.stats(), len(log.read_text().splitlines())
                keyed = replace(work, key=key_of(number, name))
                if name in OURS:
                    measured = measure(sys.executable, Path(__file__), name, keyed, {})
                else:
                    assert python is not None
                    measured = s5cmd(python, keyed)
                _, other = checked(name, log, seen, arguments.shards)
                moved = (server.stats() - before).bytes_in
                # Besides the shards, only small records are sent; the receipt has some 200 bytes for each
                # shard.
                if not 0 <= moved - size_bytes < 400 * arguments.shards + (64 << 10):
                    raise RuntimeError(f"{name}: {moved} bytes arrived of {size_bytes}")
                if name in OURS and other > MOST_OTHER_REQUESTS:
                    raise RuntimeError(f"{name}: {other} requests besides those for shards")
                runs[name].append(measured)
                others[name] = max(others[name], other)
    rows: dict[str, dict[str, object]] = {}
    for name in names:
        rows[name] = {
            "shards/s": spread(arguments.shards / each.wall_s for each in runs[name]),
            "CPU ms/shard": spread(each.cpu_s * 1000 / arguments.shards for each in runs[name]),
            "PUT/shard": 1,
            "other": others[name],
        }
    add_ratio(rows, "shards/s", "s5cmd")
    report(arguments, f"{arguments.shards} shards of 64 KiB, {arguments.rounds} rounds, to the sink", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_main(OURS)
    else:
        main()
