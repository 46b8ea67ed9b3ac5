"""Row F11: a trainer that changes a shard in place right after `enqueue`, tested on a
real file system with real times.
"""

import contextlib
import os
import random
import time
from pathlib import Path

import pytest

from ckpt_async import CheckpointAbortedError, Uploader
from tests.faults.oracle import verified

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
