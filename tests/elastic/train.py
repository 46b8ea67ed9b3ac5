"""A trainer for the play on several nodes: `train.py FOLDER REMOTE STEPS LOGS`, under torchrun.

Its state is a chain of hashes, one for each rank; every step is an all-reduce, as in real training.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ckpt_async import Uploader, restore


def main(folder: Path, remote: str, steps: int, logs: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    newest = [restore.find(remote) if rank == 0 else None]
    dist.broadcast_object_list(newest)
    state, done = b"begin", 0
    if (found := newest[0]) is not None:
        name = f"rank-{rank}.bin"
        report = restore.fetch(found, folder / "resumed", files=[name], overwrite=True)
        state, done = report.paths[name].read_bytes(), found.step
    node = os.environ["PLAY_NODE"]
    with (logs / "log").open("a", buffering=1) as log, Uploader(folder, remote) as uploader:
        log.write(f"START {rank} {done} {node} {os.getpid()}\n")
        for step in range(done + 1, steps + 1):
            time.sleep(0.1)
            dist.all_reduce(torch.ones(1))
            state = hashlib.sha256(state + b"%d" % rank).hexdigest().encode()
            path = folder / f"g{uploader.generation}-step-{step}" / f"rank-{rank}.bin"
            path.parent.mkdir(parents=True)
            path.write_bytes(state)
            uploader.enqueue(path, step)
            uploader.seal(step)
            log.write(f"SAVED {rank} {step} {node} {os.getpid()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
