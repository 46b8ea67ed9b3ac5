"""What does a small durable write from an event loop cost: with one hop to a thread, or with aiofiles' hop per call?

The write is that of a manifest or a record of the directory store: 4 KiB to a temporary file, fsync, rename,
fsync of the folder. `to_thread` runs `durable.write_durably` as a whole; `aiofiles` awaits each of the same
steps. "read" reads the file back. The variants take turns. On tmpfs an fsync is free, so only the hops
remain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiofiles
import aiofiles.os

from ckpt_async.local.durable import fsync_path, write_durably

DATA = b"x" * 4096
Work = Callable[[Path], Awaitable[object]]


async def write_to_thread(path: Path) -> None:
    await asyncio.to_thread(write_durably, path, DATA)


async def write_aiofiles(path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    async with aiofiles.open(temporary, "wb") as file:
        await file.write(DATA)
        await file.flush()
        await asyncio.to_thread(fsync_path, temporary)  # aiofiles has no fsync
    await aiofiles.os.replace(temporary, path)
    await asyncio.to_thread(fsync_path, path.parent)


async def read_to_thread(path: Path) -> bytes:
    return await asyncio.to_thread(path.read_bytes)


async def read_aiofiles(path: Path) -> bytes:
    async with aiofiles.open(path, "rb") as file:
        return await file.read()


WORKS: dict[str, Work] = {
    "write, to_thread": write_to_thread,
    "write, aiofiles": write_aiofiles,
    "read, to_thread": read_to_thread,
    "read, aiofiles": read_aiofiles,
}


async def measure(work: Work, folder: Path, num_files: int, at_once: int) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds of this process, per file."""
    paths = [folder / f"{number}" for number in range(num_files)]
    began, cpu_began = time.perf_counter(), time.process_time()
    for start in range(0, num_files, at_once):
        await asyncio.gather(*(work(path) for path in paths[start : start + at_once]))
    return (time.perf_counter() - began) / num_files, (time.process_time() - cpu_began) / num_files


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    parser.add_argument("--files", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for _ in range(options.rounds):
            for at_once in (1, 16):
                for name, work in WORKS.items():
                    result = asyncio.run(measure(work, Path(folder), options.files, at_once))
                    taken.setdefault((name, at_once), []).append(result)
        for (name, at_once), results in sorted(taken.items(), key=lambda each: (each[0][1], each[0][0])):
            wall_s, cpu_s = (statistics.median(values) for values in zip(*results, strict=True))
            found[f"{name}, {at_once} at once"] = {"wall_us": wall_s * 1e6, "cpu_us": cpu_s * 1e6}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print("| | µs/file | CPU µs/file |\n|---|--:|--:|")
    for name, values in found.items():
        print(f"| {name} | {values['wall_us']:.0f} | {values['cpu_us']:.0f} |")


if __name__ == "__main__":
    main()
