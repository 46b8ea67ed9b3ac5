"""Fault F11: a trainer that changes a shard in place right after `enqueue`, tested on a
real file system with real times.
"""

import contextlib
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from ckpt_async import CheckpointAbortedError, Uploader
from tests.faults.oracle import verified
from tests.faults.small_disk import on_small_disk

NUM_SHARDS = 150
CLOCK_REALTIME_COARSE = 5  # <linux/time.h>; Python has no name for it
SETTINGS = {"on_error": "warn", "decision_poll_s": 0.02, "close_grace_s": 0.0}


def tick() -> int:
    """Return the time of the clock that stamps files. If it is equal before and after, both were within one tick."""
    return time.clock_gettime_ns(CLOCK_REALTIME_COARSE)


def tells_changes_within_a_tick(path: Path) -> bool:
    """Return whether the kernel distinguishes changes within a tick. Linux does since 6.13 on ext4, xfs, btrfs and
    tmpfs: it does not give out a time again that has been looked at.
    """
    path.write_bytes(b"a")
    for _ in range(20):
        before = path.stat().st_mtime_ns
        flip(path, 0)
        if path.stat().st_mtime_ns == before:
            return False
    return True


def flip(path: Path, offset: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 1]), offset)
    finally:
        os.close(descriptor)


def is_aborted(uploader: Uploader, step: int) -> bool:
    with contextlib.suppress(CheckpointAbortedError):
        uploader.wait(step, timeout_s=60)
        return False
    return True


@pytest.mark.fault("F11")
def test_a_change_within_the_same_mtime_tick_is_never_committed(tmp_path: Path, seed: int) -> None:
    """One bit or the end of the file changes. Either the file's times reveal the change, or it came too late and
    the enqueued bytes are committed.
    """
    if not tells_changes_within_a_tick(tmp_path / "probe"):
        pytest.skip("this kernel stamps by ticks: such a change leaves no trace (docs/reliability.md)")
    rng, store = random.Random(seed), tmp_path / "store"
    contents = [rng.randbytes(rng.choice((10, 5000, 300_000))) for _ in range(NUM_SHARDS)]
    num_within = 0
    with Uploader(tmp_path / "folder", f"file://{store}", rank=0, world_size=1, **SETTINGS) as uploader:
        for step, content in enumerate(contents):
            path = uploader.folder / f"{step}.pt"
            began = tick()
            path.write_bytes(content)
            uploader.enqueue(path, step)
            if rng.random() < 0.5:
                flip(path, rng.randrange(len(content)))
            else:
                os.truncate(path, rng.randrange(len(content)))
            num_within += tick() == began
            uploader.seal(step)
        aborted = {step for step in range(NUM_SHARDS) if is_aborted(uploader, step)}
    print(f"{num_within} of {NUM_SHARDS} within a tick, {len(aborted)} found out")
    for step in set(range(NUM_SHARDS)) - aborted:
        assert (store / f"ckpt/step-{step}.g1/{step}.pt").read_bytes() == contents[step]
    result = verified(f"file://{store}")
    assert (result.violations, result.num_committed) == ([], NUM_SHARDS - len(aborted))
    assert num_within > NUM_SHARDS / 10
    assert len(aborted) > NUM_SHARDS / 2


@pytest.mark.fault("F11")
def test_where_times_are_coarse_no_mixture_is_committed(tmp_path: Path) -> None:
    """A file changes twice within the second in which it was enqueued, so that its time does not show it."""
    if os.geteuid():
        pytest.skip("only root may mount an image")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(50 << 20)
    made = subprocess.run(
        ["mkfs.ext3", "-q", "-F", "-I", "128", image], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no ext3 here: {made.stderr}")
    done = on_small_disk(
        tmp_path,
        """
        settings = dict(on_error="warn", decision_poll_s=0.02, close_grace_s=0.0, num_checkpoints_to_keep=10)
        fates = []
        with Uploader(disk / "folder", remote, **settings) as uploader:
            for step in range(1, 5):
                time.sleep(1.02 - time.time() % 1)
                path = uploader.folder / f"{step}.pt"
                path.write_bytes(bytes(10_000))
                uploader.enqueue(path, step)
                uploader.seal(step)
                before = path.stat().st_mtime_ns
                with open(path, "r+b", buffering=0) as file:
                    file.write(b"1" * 5000)
                    time.sleep(0.5)
                    file.write(b"1" * 5000)
                assert path.stat().st_mtime_ns == before
                try:
                    uploader.wait(step, 20)
                    fates.append(len(set((tmp / f"remote/ckpt/step-{step}.g1/{step}.pt").read_bytes())))
                except CheckpointAbortedError:
                    fates.append(0)
        print(fates)
        """,
        image=image,
    )
    assert done.stdout in ("[1, 1, 1, 1]\n", "[0, 0, 0, 0]\n"), done.stderr
