"""How many small files per second are downloaded from S3, and with how many requests each, compared with s5cmd?

A checkpoint of `--files` files of 64 KiB. Ours is `restore.fetch`, including the lease, the comparison of every
file's checksum with the receipt's, fsync and rename (fsync is free on tmpfs, the default; `--to disk` writes to a
disk); s5cmd copies all objects below the checkpoint's key. Each run is a whole process, and they take turns. The sink
logs every request: a run counts only if each file was requested by exactly one GET and all files have the bytes that
were sent. "other" counts all other requests (ours: finding the checkpoint, lease, decision); it must not grow with
the files.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import peers
from _child import Measured, Work, child_main, measure, measure_command
from _compare import BUCKET, Server, add_ratio, key_of, parser_of, report, scratch, spread, turns
from sink import Link

RUN = "run"
FILE_BYTES = 64 << 10
# Requests that are not for files, independent of the number of files: the lease, the decision, and s5cmd's
# listings.
MOST_OTHER_REQUESTS = 20


def prepare_ours(work: Work) -> Callable[[], None]:
    from ckpt_async import restore
    from ckpt_async.stores import StoreOptions

    options = StoreOptions(endpoint_url=work.endpoint_url)
    checkpoint = restore.find(f"s3://{BUCKET}/{RUN}", store_options=options)
    assert checkpoint is not None

    def run() -> None:
        restore.fetch(checkpoint, work.path, num_concurrent_reads=work.concurrency)

    return run


OURS = {"ours": prepare_ours}


def s5cmd(python: Path, work: Work) -> Measured:
    program = str(python.with_name("s5cmd"))
    copy = [program, "--endpoint-url", work.endpoint_url, "cp", f"s3://{BUCKET}/{work.key}/*"]
    return measure_command([*copy, f"{work.path}/"], [program, "version"], {})


def commit_all(folder: Path, num_files: int, url: str) -> tuple[str, dict[str, bytes]]:
    """Commit a checkpoint of this many files; return its location and its contents."""
    from ckpt_async import Uploader
    from ckpt_async.stores import StoreOptions

    files = {f"{number:06d}.bin": os.urandom(FILE_BYTES) for number in range(num_files)}
    (folder / "step").mkdir(parents=True)
    for name, data in files.items():
        (folder / "step" / name).write_bytes(data)
    options = StoreOptions(endpoint_url=url)
    with Uploader(folder, f"s3://{BUCKET}/{RUN}", rank=0, world_size=1, store_options=options) as uploader:
        uploader.enqueue(folder / "step", step=1, name="step")
        uploader.seal(1)
        uploader.wait(1, timeout_s=600)
        return f"{RUN}/ckpt/step-1.g{uploader.generation}", files


def checked(name: str, lines: list[str], target: Path, files: dict[str, bytes]) -> int:
    """Return the number of requests besides those for files. Raises unless each file was requested once, and
    all are there.
    """
    asked: Counter[str] = Counter()
    others = 0
    for line in lines:
        method, _, path = line.partition("?")[0].partition(" ")
        if path.endswith(".bin"):
            asked[path.rpartition("/")[2]] += 1
            if method != "GET":
                raise RuntimeError(f"{name}: {line}")
        else:
            others += 1
    if asked != dict.fromkeys(files, 1):
        raise RuntimeError(f"{name}: {len(asked)} of {len(files)} files, by {asked.total()} GETs")
    if {path.name: path.read_bytes() for path in target.rglob("*.bin")} != files:
        raise RuntimeError(f"{name}: what is in {target} is not what was sent")
    if others > MOST_OTHER_REQUESTS:
        raise RuntimeError(f"{name}: {others} requests besides those for files")
    return others


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=int, default=0, help="before every answer")
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument(
        "--concurrency", type=int, default=128, help="most concurrent requests of ours; s5cmd makes 256"
    )
    parser.add_argument("--clients", nargs="+", choices=[*OURS, "s5cmd"], default=[*OURS, "s5cmd"])
    parser.add_argument("--to", choices=("tmpfs", "disk"), default="tmpfs")
    arguments = parser.parse_args()
    python = peers.install("s3") if "s5cmd" in arguments.clients else None
    names = [name for name in arguments.clients if name in OURS or python is not None]
    runs: dict[str, list[Measured]] = {name: [] for name in names}
    others: dict[str, int] = dict.fromkeys(names, 0)
    place = "/dev/shm" if arguments.to == "tmpfs" else None
    with scratch() as folder, scratch(place) as destination:
        log = folder / "requests"
        with Server("sink", folder, link=Link(delay_ms=arguments.delay_ms), log=log) as server:
            key, files = commit_all(folder / "run", arguments.files, server.url)
            size_bytes = arguments.files * FILE_BYTES
            work = Work("", size_bytes, server.url, BUCKET, key, 0, arguments.concurrency)
            for number, name in turns(names, arguments.rounds):
                target = destination / key_of(number, name)
                target.mkdir()
                seen = len(log.read_text().splitlines())
                if name in OURS:
                    measured = measure(
                        sys.executable, Path(__file__), name, replace(work, path=str(target)), {}
                    )
                else:
                    assert python is not None
                    measured = s5cmd(python, replace(work, path=str(target)))
                lines = log.read_text().splitlines()[seen:]
                others[name] = max(others[name], checked(name, lines, target, files))
                runs[name].append(measured)
                shutil.rmtree(target)
    rows: dict[str, dict[str, object]] = {}
    for name in names:
        rows[name] = {
            "files/s": spread(arguments.files / each.wall_s for each in runs[name]),
            "CPU ms/file": spread(each.cpu_s * 1000 / arguments.files for each in runs[name]),
            "GET/file": 1,
            "other": others[name],
        }
    add_ratio(rows, "files/s", "s5cmd")
    title = f"{arguments.files} files of 64 KiB to {arguments.to}, {arguments.rounds} rounds, from the sink"
    report(arguments, title, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_main(OURS)
    else:
        main()
