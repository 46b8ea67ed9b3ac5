"""The training script that `ckpt-chaos` breaks (docs/reliability.md has the command and what came of it).

    python chaos_trainer.py OUT

Each rank keeps a state that is hashed on with every step, saves it, and goes on from the newest committed checkpoint,
which rank 0 chooses for both: it looks at the store's files alone, as any reader would.
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
    """Step and data folder of the newest commit, by the decisions; 0 if there is none."""
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
    """What rank 0 finds once both ranks have finished what their predecessors left."""
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
    os.environ["CKPT_ASYNC_LAUNCH_ID"] = os.environ["MASTER_PORT"]  # a new one for every start
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
