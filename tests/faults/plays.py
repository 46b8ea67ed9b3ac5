"""Further plays for the processes of the fault tests, beside `trainer.saves`."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from ckpt_async import CkptAsyncError, Uploader
from ckpt_async.core.decide import MakeDurable, Upload
from ckpt_async.core.settings import Settings
from ckpt_async.engine import on_disk
from ckpt_async.engine.loop import Engine
from ckpt_async.engine.state import State
from ckpt_async.sweep.sweeper import Sweeper
from tests.faults.trainer import saves, say, write_shards


def sweeps(*, folder: str, remote: str, settings: dict[str, Any] | None = None) -> None:
    """Sweep a folder and its remote once."""
    report = asyncio.run(Sweeper([folder], [remote], settings=Settings(**(settings or {}))).sweep())
    say("swept", report.is_clean, report.remotes[0].error, *(each.error for each in report.folders))


def obeys(*, folder: str, remote: str, settings: dict[str, Any]) -> None:
    """Carry out one uploader call per line of input: `enqueue STEP`, `seal STEP`, `wait STEP`, `fenced`, `stop`."""
    uploader = Uploader(folder, remote, rank=0, world_size=1, **settings)
    say("opened", uploader.generation)
    for line in sys.stdin:
        command, *steps = line.split()
        try:
            match command, *map(int, steps):
                case "enqueue", int(step):
                    uploader.enqueue(write_shards(Path(folder), uploader.generation, step, 0, 2), step)
                case "seal", int(step):
                    uploader.seal(step)
                case "wait", int(step):
                    uploader.wait(step, timeout_s=60)
                case ("fenced",):
                    text = generate_latest(uploader.metrics.registry).decode()
                    say(*(line for line in text.splitlines() if line.startswith("ckpt_async_fenced{")))
                case ("stop",):
                    break
        except CkptAsyncError as error:
            say("error", type(error).__name__, error)
        else:
            say("done", line.strip())
    uploader.close()
    say("closed")


async def _never(self: Engine, action: Upload) -> None:
    await asyncio.Event().wait()


def saves_between_cuts(*, boot: str, is_held: bool, **arguments: Any) -> None:
    """Play `saves` on a machine booted as `boot`, and say `durable` for each sealed checkpoint once it would survive
    power loss. With `is_held`, upload nothing.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("ckpt_async.") and hasattr(module, "boot_id"):
            module.boot_id = lambda: boot
    if is_held:
        Engine._upload = _never  # type: ignore[method-assign]
    make_durable = on_disk.make_durable

    async def loudly(state: State, action: MakeDurable) -> None:
        await make_durable(state, action)
        checkpoint = state.fresh_local().checkpoints[action.checkpoint]
        if checkpoint.is_seal_durable and all(each.is_durable for each in checkpoint.shards.values()):
            say("durable", action.checkpoint.generation, action.checkpoint.step)

    on_disk.make_durable = loudly
    saves(**arguments)


def saves_and_dies(
    *, folder: str, remote: str, rank: int, world_size: int, steps: list[int], settings: dict[str, Any]
) -> None:
    """Seal the steps and enqueue one more, without uploading anything, and then die by SIGKILL."""
    Engine._upload = _never  # type: ignore[method-assign]
    uploader = Uploader(folder, remote, rank=rank, world_size=world_size, **settings)
    generation = uploader.generation
    for step in [*steps, max(steps) + 1]:
        say("enqueueing", generation, step)
        uploader.enqueue(write_shards(Path(folder), generation, step, rank, 2), step)
        if step in steps:
            uploader.seal(step)
            say("sealed", generation, step)
    os.kill(os.getpid(), signal.SIGKILL)
