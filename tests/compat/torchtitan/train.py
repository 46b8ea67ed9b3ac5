"""torchtitan's CheckpointManager with what its Trainer gives it: an FSDP model, and torchtitan's own containers of
optimizers and schedulers. The Trainer itself needs an accelerator: where torch has none, it takes CUDA for granted.
"""

import sys
from pathlib import Path
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
    """What torchtitan's trainer saves of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def main(mode: str, node: str, remote: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizers = default_adamw(lr=0.01).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=STEPS
    )
    state = TrainState()
    config = CkptAsyncManager.Config(
        enable=True,
        folder="checkpoint",
        interval=10,
        keep_latest_k=2,
        async_mode=mode,
        last_save_model_only=False,
        remote=remote,
    )
    checkpointer = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=str(Path(node, "outputs")),
    )
    checkpointer.load(step=-1)
    while state.step < STEPS:
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
            say_loss(state.step, whole.item())
        checkpointer.save(state.step, last_step=state.step == STEPS)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
