"""torchtitan's CheckpointManager with what its Trainer gives it: an FSDP model, and torchtitan's own containers of
optimizers and schedulers. The Trainer itself needs an accelerator: where torch has none, it assumes CUDA.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from ckpt_async.integrations.torchtitan import CkptAsyncManager
from tests.compat.play import say_loss

STEPS, WIDTH = 150, 16


class TrainState:
    """What torchtitan's trainer saves of its own state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def train(config: Any, node: str, num_steps: int, say: Any, begun: Any = None, saved: Any = None) -> None:
    """Train with a CheckpointManager of this `config`. `begun` is called with the step, `saved`
    with the manager and each step.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizers = default_adamw(lr=0.01).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=num_steps
    )
    state = TrainState()
    checkpointer = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=node,
    )
    checkpointer.load(step=-1)
    if begun is not None:
        begun(state.step)
    while state.step < num_steps:
        state.step += 1
        optimizers.zero_grad()
        loss = model(torch.full((4, WIDTH), float(state.step % 7 + dist.get_rank()))).square().mean()
        loss.backward()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        if dist.get_rank() == 0:
            say(state.step, whole.item())
        checkpointer.save(state.step, last_step=state.step == num_steps)
        if saved is not None:
            saved(checkpointer, state.step)
    checkpointer.close()
    dist.destroy_process_group()


def main(mode: str, node: str, remote: str) -> None:
    config = CkptAsyncManager.Config(
        enable=True,
        folder="outputs/checkpoint",
        interval=10,
        keep_latest_k=2,
        async_mode=mode,
        last_save_model_only=False,
        remote=remote,
    )
    train(config, node, STEPS, say_loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
