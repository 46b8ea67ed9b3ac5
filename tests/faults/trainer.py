"""What the trainers of the fault tests do: each function is played by a process of its own.

They report in whole lines on stdout, before and after each promise of the uploader. The test that reads these lines
acts as the oracle and outlives them.
"""

import hashlib
import logging
import multiprocessing
import os
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from ckpt_async import CkptAsyncError, Uploader


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def content(generation: int, step: int, rank: int, number: int, size_bytes: int = 5000) -> bytes:
    """Return the bytes of a shard, which are different for every place they could turn up in."""
    seed = f"{generation}/{step}/{rank}/{number}".encode()
    return hashlib.shake_128(seed).digest(size_bytes)


def shard_name(rank: int, number: int) -> str:
    return f"rank-{rank}-{number}.pt"


def write_shards(
    folder: Path, generation: int, step: int, rank: int, num_shards: int, size_bytes: int = 5000
) -> Path:
    """Write shards as a careful trainer does: complete files, moved into place, with the
    same paths again after a restart.
    """
    place = folder / f"step-{step}" / f"rank-{rank}"
    place.mkdir(parents=True, exist_ok=True)
    for number in range(num_shards):
        temporary = folder / f"writing-{rank}"
        temporary.write_bytes(content(generation, step, rank, number, size_bytes))
        temporary.replace(place / shard_name(rank, number))
    return place


def saves(
    *,
    folder: str,
    remote: str,
    rank: int,
    world_size: int,
    steps: list[int],
    num_shards: int = 2,
    size_bytes: int = 5000,
    train_s: float = 0.0,
    settings: dict[str, Any] | None = None,
) -> None:
    """Save the steps, training for up to `train_s` before each step and before each seal; then follow commands: `save
    STEP`, `wait STEP [SECONDS]`, `stop`.
    """
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(levelname)s %(message)s")
    say("opening")
    uploader = Uploader(folder, remote, rank=rank, world_size=world_size, **(settings or {}))
    generation = uploader.generation
    say("opened", generation)

    def save(step: int) -> None:
        place = write_shards(Path(folder), generation, step, rank, num_shards, size_bytes)
        say("enqueueing", generation, step)
        uploader.enqueue(place, step)
        say("enqueued", generation, step)
        time.sleep(random.uniform(0.0, train_s))
        uploader.seal(step)
        say("sealed", generation, step)

    for step in steps:
        time.sleep(random.uniform(0.0, train_s))
        save(step)
    say("saved")
    for line in sys.stdin:
        command, *rest = line.split()
        try:
            match command:
                case "save":
                    save(int(rest[0]))
                case "wait":
                    uploader.wait(int(rest[0]), timeout_s=float(rest[1]) if rest[1:] else 60.0)
                case "stop":
                    break
        except CkptAsyncError as error:
            say("error", type(error).__name__, error)
        else:
            say("done", line.strip())
    uploader.close()
    say("closed")


def forks(*, folder: str, remote: str, how: str, fifo: str) -> None:
    """Fork while uploads run. The child tries to use the uploader, then stays until somebody opens the FIFO."""
    uploader = Uploader(folder, remote)
    place = write_shards(Path(folder), uploader.generation, 1, 0, 200)
    uploader.enqueue(place, 1)
    uploader.seal(1)

    def child() -> None:
        started = time.monotonic()
        for call in (lambda: uploader.enqueue(place, 2), lambda: uploader.seal(2), lambda: uploader.wait(1)):
            try:
                call()
            except CkptAsyncError as error:
                say("child", type(error).__name__, error)
        uploader.close()  # a dataloader worker that closes the uploader it inherited does no harm
        say("child took", time.monotonic() - started)
        with Path(fifo).open() as file:
            say("child pid", os.getpid())
            file.read()

    with warnings.catch_warnings():
        # The warning of Python 3.12 is about exactly this.
        warnings.simplefilter("ignore", DeprecationWarning)
        if how == "os.fork":
            pid = os.fork()
            if pid == 0:
                child()
                os._exit(0)
            wait_for_child = lambda: os.waitpid(pid, 0)  # noqa: E731
        else:
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            wait_for_child = process.join  # type: ignore[assignment]
    say("forked")
    sys.stdin.readline()
    wait_for_child()
    uploader.wait(1, timeout_s=60)
    uploader.close()
    say("closed")
