"""JAX with Orbax, which knows nothing of ckpt_async: `train.py MODE NODE REMOTE`.

The modes are `manager`, a CheckpointManager that saves asynchronously; `sync`, one that does not; `commit_file`, one
that renames nothing, as on object stores; and `checkpointer`, an AsyncCheckpointer alone.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath

from tests.compat.beside import FOLDER, say_left, say_resumed, say_saved, say_step

STEPS, INTERVAL, WIDTH = 60, 5, 64


def begin() -> dict[str, Any]:
    return {"step": 0, "w": jnp.ones((WIDTH, WIDTH)), "momentum": jnp.zeros((WIDTH, WIDTH))}


@jax.jit
def advance(w: jax.Array, momentum: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: ((w @ jnp.full(WIDTH, step / 100.0)) ** 2).mean())(w)
    momentum = 0.9 * momentum + 1e-4 * gradient
    return w - momentum, momentum, loss


class Manager:
    """A CheckpointManager, which most users use."""

    def __init__(self, folder: Path, mode: str) -> None:
        is_commit_file = mode == "commit_file"
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            enable_async_checkpointing=mode != "sync",
            temporary_path_class=CommitFileTemporaryPath if is_commit_file else None,
        )
        self._manager = ocp.CheckpointManager(folder, options=options)

    def restore(self, like: Any) -> Any:
        newest = self._manager.latest_step()
        return like if newest is None else self._manager.restore(newest, args=ocp.args.StandardRestore(like))

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def wait(self) -> None:
        self._manager.wait_until_finished()


class Checkpointer:
    """An AsyncCheckpointer alone; the script does the rotation."""

    def __init__(self, folder: Path, _: str) -> None:
        self._folder = folder
        self._checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def restore(self, like: Any) -> Any:
        steps = sorted(int(each.name) for each in self._folder.iterdir() if each.name.isdecimal())
        if not steps:
            return like
        path = self._folder / str(steps[-1])
        return self._checkpointer.restore(path, args=ocp.args.StandardRestore(like))

    def save(self, step: int, state: Any) -> None:
        self._checkpointer.save(self._folder / str(step), args=ocp.args.StandardSave(state), force=True)
        shutil.rmtree(self._folder / str(step - 3 * INTERVAL), ignore_errors=True)

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()


def main(mode: str, node: str, _remote: str) -> None:
    folder = Path(node, FOLDER).resolve()
    folder.mkdir(exist_ok=True)
    say_left(folder)
    checkpoints = Checkpointer(folder, mode) if mode == "checkpointer" else Manager(folder, mode)
    state = checkpoints.restore(begin())
    if state["step"]:
        say_resumed(int(state["step"]))
    for step in range(int(state["step"]) + 1, STEPS + 1):
        w, momentum, loss = advance(state["w"], state["momentum"], jnp.float32(step))
        state = {"step": step, "w": w, "momentum": momentum}
        say_step(step, float(loss))
        if step % INTERVAL == 2 and step > INTERVAL:  # two steps ran while it was being saved
            checkpoints.wait()
            say_saved(folder / str(step - 2))
        if step % INTERVAL == 0:
            checkpoints.save(step, state)
    checkpoints.wait()
    say_saved(folder / str(STEPS))


if __name__ == "__main__":
    main(*sys.argv[1:])
