"""What the Ray job runs: `job.py FOLDER REMOTE`. The first launch is killed in the middle."""

import os
import signal
import sys
import time
from pathlib import Path

from ckpt_async import Uploader, restore

STEPS, KILLED_AT = 30, 15


def main(folder: Path, remote: str) -> None:
    found = restore.find(remote)
    first = 1 if found is None else found.step + 1
    print(f"FIRST {first}", flush=True)
    with Uploader(folder, remote, rank=0, world_size=1) as uploader:
        for step in range(first, STEPS + 1):
            path = folder / f"g{uploader.generation}-step-{step}" / "state.bin"
            path.parent.mkdir(parents=True)
            path.write_bytes(b"%d" % step)
            uploader.enqueue(path, step)
            uploader.seal(step)
            time.sleep(0.05)  # stands for training, while the sealed checkpoint is uploaded
            if first == 1 and step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
    print("DONE", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
