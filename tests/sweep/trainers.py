"""Trainers as processes that are killed and leave work behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class Trainers:
    """Starts trainers and makes sure that none outlives the test."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def start(
        self,
        folder: Path,
        remote: str,
        *steps: int,
        sealed: tuple[int, ...] | None = None,
        rank: int = 0,
        world_size: int = 1,
        generation: int = 1,
        put_args: Json | None = None,
        **settings: Any,
    ) -> subprocess.Popen[str]:
        """Start a trainer, and return when everything it saved is safe on disk."""
        told = {
            "folder": str(folder),
            "remote": remote,
            "steps": steps,
            "sealed": steps if sealed is None else sealed,
            "rank": rank,
            "world_size": world_size,
            "generation": generation,
            "put_args": put_args or {},
            "settings": settings,
        }
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        return process

    def kill(self, *processes: subprocess.Popen[str]) -> None:
        """Send SIGKILL, as the kernel does when it is out of memory."""
        for process in processes or self._running:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)

    def die(self, *args: Any, **more: Any) -> None:
        """Start a trainer and kill it."""
        self.kill(self.start(*args, **more))


# A trainer whose uploads never make progress. It reports when everything it saved would survive a power loss,
# and then lives until it is killed or its input ends.
TRAINER = """
import asyncio, json, sys
from pathlib import Path
from ckpt_async import StoreOptions, Uploader
from ckpt_async.engine.loop import Engine

async def never(self, action):
    await asyncio.Event().wait()

told = json.loads(sys.argv[1])
Engine._upload = never
folder = Path(told["folder"])
uploader = Uploader(folder, told["remote"], rank=told["rank"], world_size=told["world_size"],
                    generation=told["generation"], store_options=StoreOptions(put_args=told["put_args"]),
                    **told["settings"])
for step in told["steps"]:
    (folder / f"step-{step}").mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}" / f"rank{told['rank']}.bin"
    path.write_bytes(f"{step} {told['rank']}".encode() * 1000)
    uploader.enqueue(path, step=step)
    if step in told["sealed"]:
        uploader.seal(step)

def is_durable():
    found = uploader._engine.view().local.checkpoints.values()
    return set(told["steps"]) <= {each.id.step for each in found} and all(
        all(shard.is_durable for shard in each.shards.values())
        and each.is_seal_durable == (each.id.step in told["sealed"]) for each in found
        if each.id.generation == told["generation"])

while not uploader._engine.changed.wait(60, unless=is_durable):
    pass
print("saved", flush=True)
sys.stdin.read()
"""
