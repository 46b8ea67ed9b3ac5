"""How long after its last byte is written is a shard durable, if it is uploaded while it is being written?

Writing the shard takes as long as sending it: the writer is limited to `--mib-per-s`, and so is the upload to the
sink (by `max_bytes_per_s`). Once the shard is written to a file and then enqueued, once it is written through
`Uploader.open`. The time is from the last byte written to the commit; bytes are counted at the sink.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from _compare import parser_of, report, spread, turns
from sink import SinkServer

MIB = 1 << 20
BLOCK = 4 * MIB
# What is sent besides the shard: probes, generation, receipt, decision, latest.
SMALL_CHANGE_BYTES = 1 * MIB


def write(file: BinaryIO, size_bytes: int, bytes_per_s: float) -> None:
    block, began = os.urandom(BLOCK), time.perf_counter()
    for written in range(0, size_bytes, BLOCK):
        time.sleep(max(0.0, began + written / bytes_per_s - time.perf_counter()))
        file.write(block[: size_bytes - written])


def run(way: str, number: int, arguments: argparse.Namespace, sink: SinkServer) -> float:
    """Return the seconds from the last byte to the commit."""
    from ckpt_async import Uploader

    size_bytes, rate = arguments.mib * MIB, arguments.mib_per_s * MIB
    before = sink.stats()
    with (
        tempfile.TemporaryDirectory(prefix="ckpt-overlap-", dir=arguments.folder) as folder,
        Uploader(
            folder,
            f"s3://ckpt/{way}-{number}",
            rank=0,
            world_size=1,
            generation=1,
            latest_filename="",
            max_bytes_per_s=rate,
        ) as uploader,
    ):
        WAYS[way](uploader, Path(folder), size_bytes, rate)
        written = time.perf_counter()
        # After `open`, this call changes nothing.
        uploader.enqueue(Path(folder) / "step-1" / "shard.bin", step=1)
        uploader.seal(1)
        uploader.wait(1, timeout_s=600)
        took_s = time.perf_counter() - written
    moved = (sink.stats() - before).bytes_in
    if not 0 <= moved - size_bytes < SMALL_CHANGE_BYTES:
        sys.exit(f"{way}: {moved} bytes arrived of a shard of {size_bytes}")
    return took_s


def write_then_enqueue(_: object, folder: Path, size_bytes: int, rate: float) -> None:
    (folder / "step-1").mkdir()
    with (folder / "step-1" / "shard.bin").open("wb") as file:
        write(file, size_bytes, rate)


def open_and_write(uploader: object, _: Path, size_bytes: int, rate: float) -> None:
    with uploader.open(1, "shard.bin") as file:  # type: ignore[attr-defined]
        write(file, size_bytes, rate)


WAYS: dict[str, Callable[..., None]] = {"enqueue": write_then_enqueue, "open": open_and_write}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="size of the shard")
    parser.add_argument("--mib-per-s", type=int, default=256, help="speed of the writer and of the upload")
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    arguments = parser.parse_args()
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    with SinkServer() as sink:
        os.environ.update(sink.environment())
        for number, way in turns(list(WAYS), arguments.rounds):
            took[way].append(run(way, number, arguments, sink))
    base = spread(took["enqueue"])["median"]
    rows = {
        way: {"s to commit": spread(each), "of enqueue": spread(each)["median"] / base}
        for way, each in took.items()
    }
    title = f"{arguments.mib} MiB written and sent at {arguments.mib_per_s} MiB/s, {arguments.rounds} rounds"
    report(arguments, title, rows)


if __name__ == "__main__":
    main()
