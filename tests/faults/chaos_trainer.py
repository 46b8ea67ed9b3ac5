"""The training script that `ckpt-chaos` breaks (docs/reliability.md has the command and its results).

    python chaos_trainer.py OUT

Each rank keeps a state that is hashed again at every step, saves it, and resumes from the newest committed checkpoint.
Rank 0 chooses that checkpoint for both ranks, by looking only at the store's files, as any reader would.
"""

import hashlib
import os
import sys
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

from ckpt_async import Uploader
from ckpt_async.core import keys, records
from ckpt_async.core.model import Outcome

NUM_STEPS = 4


def newest_committed(remote: Path) -> tuple[int, str]:
    """Return the step and data folder of the newest commit according to the decisions; step 0 if there is none."""
    found = []
    for path in (remote / keys.DECISIONS).glob("*.json"):
        id_ = keys.parse_decision_key(f"{keys.DECISIONS}{path.name}")
        assert id_ is not None
        decision = records.decode_decision(path.read_bytes(), id_)
        if decision.outcome is Outcome.COMMIT:
            found.append((id_, decision.name))
    if not found:
        return 0, ""
    id_, name = max(found)
    return id_.step, str(remote / keys.data_prefix(name, id_.generation))


def agree(remote: Path, rank: int) -> tuple[int, str]:
    """Return what rank 0 finds once both ranks have finished the uploads of their predecessors."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with Listener(address) as listener, listener.accept() as other:
            other.recv()
            found = newest_committed(remote)
            other.send(found)
            return found
    while True:
        try:
            with Client(address) as other:
                other.send("ready")
                step, place = other.recv()
                return step, place
        except ConnectionRefusedError:
            time.sleep(0.02)


def main(out: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder, remote = out / f"node-{rank}", out / "remote"
    os.environ["CKPT_ASYNC_LAUNCH_ID"] = os.environ["MASTER_PORT"]  # every launch has a new one
    with Uploader(folder, f"file://{remote}", rank=rank, world_size=world_size) as uploader:
        uploader.wait_for_predecessor(timeout_s=20)
        first, place = agree(remote, rank)
        state = Path(place, f"rank-{rank}.bin").read_bytes() if first else bytes(32)
        print(f"resumed from step {first}", flush=True)
        for step in range(first + 1, NUM_STEPS + 1):
            state = hashlib.sha256(state + f"{rank}/{step}".encode()).digest()
            temporary = folder / "writing"
            temporary.write_bytes(state)
            path = folder / f"step-{step}" / f"rank-{rank}.bin"
            path.parent.mkdir(exist_ok=True)
            temporary.replace(path)
            uploader.enqueue(path, step)
            uploader.seal(step)
            uploader.wait(step, timeout_s=20)
    (out / f"final-{rank}").write_bytes(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
