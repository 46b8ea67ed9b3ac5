"""A trainer for the Slurm play: `train.py FOLDER REMOTE STEPS SHARED`. Without torch: its state is a chain of hashes.

As in real training, no rank gets ahead of the others, and a rank that has lost another waits until it is killed.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from ckpt_async import Uploader, restore


def newest(remote: str, shared: Path) -> str | None:
    """Return the step from which all ranks resume, as found by rank 0."""
    start = shared / f"start-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    if os.environ["SLURM_PROCID"] == "0":
        found = restore.find(remote)
        start.with_suffix(".part").write_text(json.dumps(found and found.step))
        start.with_suffix(".part").rename(start)
    while not start.exists():
        time.sleep(0.05)
    return json.loads(start.read_text())


def meet(shared: Path, rank: int, step: int) -> None:
    """Wait until all ranks of this launch are here, as in an all-reduce."""
    start = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    (shared / f"at-{start}-{rank}-{step}").touch()
    ranks = range(int(os.environ["SLURM_NTASKS"]))
    while not all((shared / f"at-{start}-{each}-{step}").exists() for each in ranks):
        time.sleep(0.01)


def main(folder: Path, remote: str, steps: int, shared: Path) -> None:
    rank = int(os.environ["SLURM_PROCID"])
    state, done = b"begin", 0
    if (step := newest(remote, shared)) is not None:
        found = restore.find(remote, step=step)
        report = restore.fetch(found, folder / "resumed", files=[f"rank-{rank}.bin"], overwrite=True)
        state, done = Path(report.paths[f"rank-{rank}.bin"]).read_bytes(), found.step
    with (shared / f"log-{rank}").open("a", buffering=1) as log, Uploader(folder, remote) as uploader:
        log.write(f"START {done} {os.environ['SLURMD_NODENAME']}\n")
        for step in range(done + 1, steps + 1):
            time.sleep(0.1)
            meet(shared, rank, step)
            state = hashlib.sha256(state + b"%d" % rank).hexdigest().encode()
            path = folder / f"g{uploader.generation}-step-{step}" / f"rank-{rank}.bin"
            path.parent.mkdir(parents=True)
            path.write_bytes(state)
            uploader.enqueue(path, step)
            uploader.seal(step)
            log.write(f"SAVED {step}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
