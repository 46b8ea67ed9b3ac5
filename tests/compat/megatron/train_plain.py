"""megatron-core's dist_checkpointing, which knows nothing of ckpt_async: `train_plain.py sync|async|core NODE REMOTE`.

It saves as Megatron-LM's `checkpointing.py` does: `iter_NNNNNNN` and then, after a barrier,
`latest_checkpointed_iteration.txt`. `core` has no such file. megatron-core asks CUDA to synchronize and for its current
device, even when all tensors are on the CPU, so these two calls are replaced here.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from tests.compat.beside import FOLDER, say_left, say_resumed, say_saved, say_step

STEPS, INTERVAL, KEPT, WIDTH = 60, 5, 2, 16
TRACKER = "latest_checkpointed_iteration.txt"


class Saver:
    def __init__(self, folder: Path, mode: str) -> None:
        self._folder, self._mode = folder, mode
        self._calls = AsyncCallsQueue()

    def path(self, step: int) -> Path:
        return self._folder / f"iter_{step:07d}"

    def newest(self) -> int:
        """Find the newest step as Megatron-LM does, by its tracker; without one (a fresh node,
        `core`), by complete checkpoints.
        """
        tracker = self._folder / TRACKER
        if tracker.exists():
            return int(tracker.read_text())
        there = [each.parent.name for each in self._folder.glob("iter_*/metadata.json")]
        return max((int(name.removeprefix("iter_")) for name in there), default=0)

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._calls.maybe_finalize_async_calls(blocking=True)
        path = self.path(step)
        if dist.get_rank() == 0:
            path.mkdir(exist_ok=True)
        dist.barrier()
        if self._mode == "async":
            request = dist_checkpointing.save(state, str(path), async_sharded_save=True)
            request.add_finalize_fn(lambda: self._finish(step))
            self._calls.schedule_async_request(request)
        else:
            dist_checkpointing.save(state, str(path))
            self._finish(step)

    def poll(self, *, is_blocking: bool = False) -> None:
        self._calls.maybe_finalize_async_calls(blocking=is_blocking)

    def close(self) -> None:
        self.poll(is_blocking=True)
        self._calls.close()

    def _finish(self, step: int) -> None:
        """Finish a save on every rank once everything is written. Older ones go as with `--save-retain-interval`."""
        dist.barrier()
        if dist.get_rank() == 0:
            if self._mode != "core":
                (self._folder / TRACKER).write_text(str(step))
            say_saved(self.path(step))
            shutil.rmtree(self.path(step - KEPT * INTERVAL), ignore_errors=True)


def main(mode: str, node: str, _remote: str) -> None:
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    saver, first = Saver(Path(node, FOLDER), mode), 0
    if rank == 0:
        say_left(Path(node, FOLDER))
    weight, momentum = torch.full((WIDTH, 4), 1.0 + rank), torch.zeros(WIDTH, 4)

    def sharded(step: int) -> dict[str, Any]:
        place = (0, rank, world_size)
        return {
            "weight": ShardedTensor.from_rank_offsets("weight", weight, place),
            "momentum": ShardedTensor.from_rank_offsets("momentum", momentum, place),
            "step": step,
        }

    if newest := saver.newest():
        state = dist_checkpointing.load(sharded(0), str(saver.path(newest)))
        weight, momentum, first = state["weight"], state["momentum"], state["step"]
        if rank == 0:
            say_resumed(first)
    for step in range(first + 1, STEPS + 1):
        loss = (weight * float(step % 7)).square().mean()
        momentum = 0.9 * momentum + 0.01 * weight
        weight = weight - 0.1 * momentum
        dist.all_reduce(loss)
        if rank == 0:
            say_step(step, loss.item())
        saver.poll()
        if step % INTERVAL == 0:
            saver.save(step, sharded(step))
    saver.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
