"""torchft as docs/integrations.md shows it: a lighthouse and two replicas, the first of which saves. `train.py NODE
REMOTE`.

Each replica dies once by SIGKILL, is started again, loads the newest checkpoint, and gets newer state from the other.
"""

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from ckpt_async import Uploader, restore
from tests.compat.play import say_loss

STEPS, INTERVAL, REPLICAS, WIDTH = 150, 10, 2, 8
HOST = "127.0.0.1"


class Replica:
    def __init__(self, index: int, lighthouse: str) -> None:
        torch.manual_seed(1)
        model = torch.nn.Linear(WIDTH, WIDTH)
        self.has_healed = False
        self._model, optimizer = model, torch.optim.Adam(model.parameters(), lr=0.01)
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
            load_state_dict=self._heal,
            state_dict=self.state,
            min_replica_size=1,
            use_async_quorum=False,
            replica_id=f"replica-{index}",
            store_addr=HOST,
            store_port=self._store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            hostname=HOST,
            init_sync=False,  # both start with the same weights
        )
        self._ddp = DistributedDataParallel(self.manager, model)
        self._optimizer = Optimizer(self.manager, optimizer)

    def state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _heal(self, state: dict[str, Any]) -> None:
        self.has_healed = True
        self.load(state)

    def train(self) -> tuple[int, float] | None:
        """Train for one step; return it and its loss, or None if a replica was lost in the middle."""
        self._optimizer.zero_grad()  # finds out which replicas are there
        step = self.manager.current_step()
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (self._ddp(batch) - batch.flip(-1)).square().mean()
        loss.backward()
        self._optimizer.step()
        return (step, loss.item()) if self.manager.current_step() > step else None


def run_replica(index: int, life: int, lighthouse: str, node: str, remote: str) -> None:
    dies_from = random.randrange(20, 50) + 40 * index if life == 0 else STEPS
    folder = Path(node, f"replica-{index}")
    folder.mkdir(exist_ok=True)
    replica = Replica(index, lighthouse)
    manager = replica.manager
    found = restore.fetch_latest(
        remote,
        lambda checkpoint: folder / checkpoint.name,
        folder=folder if index == 0 else None,
        drain_timeout_s=30,
        overwrite=True,
    )
    if found is not None:
        state = torch.load(folder / found[0].name / "state.pt", weights_only=True)
        replica.load(state)
        manager.load_state_dict(state["torchft"])
    uploader = Uploader(folder, remote, rank=0, world_size=1) if index == 0 else None
    while manager.current_step() < STEPS:
        trained = replica.train()
        if trained is None:
            continue
        step, loss = trained
        say_loss(step, loss)
        if uploader is not None and step % INTERVAL == INTERVAL - 1:
            path = folder / f"step-{step}" / "state.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save(replica.state() | {"torchft": manager.state_dict()}, path)
            uploader.enqueue(path, step)
            uploader.seal(step)
        if manager.num_participants() == 1:
            time.sleep(1)  # so that the other replica is back before the end
        elif step >= dies_from:
            os.kill(os.getpid(), signal.SIGKILL)
    if uploader is not None:
        uploader.close()
    manager.shutdown(wait=False)
    if life > 0 and not replica.has_healed:
        raise RuntimeError(f"replica {index} came back, and got nothing from the other")


def main(node: str, remote: str) -> None:
    lighthouse = LighthouseServer(
        bind=f"{HOST}:0",
        min_replicas=1,
        join_timeout_ms=500,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=2000,
    )
    address = f"http://{HOST}:{lighthouse.address().rpartition(':')[2]}"

    def supervise(index: int) -> None:
        life, code = 0, -signal.SIGKILL
        while code == -signal.SIGKILL:
            replica = [sys.executable, __file__, "replica", str(index), str(life), address, node, remote]
            code, life = subprocess.call(replica), life + 1
        if code != 0:
            raise RuntimeError(f"replica {index} ended with {code}")

    with ThreadPoolExecutor() as threads:
        list(threads.map(supervise, range(REPLICAS)))
    lighthouse.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        run_replica(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    else:
        main(*sys.argv[1:])
