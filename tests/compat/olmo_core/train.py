"""OLMo-core's Trainer as docs/integrations.md shows it: a tiny OLMo, FSDP on gloo ranks."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from olmo_core.data.data_loader import TextDataLoaderBase
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import (
    Duration,
    LoadStrategy,
    Trainer,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import Callback, CheckpointerCallback, ConfigSaverCallback
from olmo_core.train.train_module.transformer import (
    TransformerDataParallelConfig,
    TransformerTrainModule,
)

from ckpt_async.integrations.olmo_core import CkptAsyncCallback, newest_checkpoint, use_node_folders

STEPS, SAVE_INTERVAL, VOCABULARY, LENGTH = 100, 10, 64, 16


class Data(TextDataLoaderBase):
    """Random tokens, which depend only on the batch's number and not on what happened before."""

    total_batches = 1000

    def state_dict(self) -> dict[str, Any]:
        return {"batches_processed": self.batches_processed, "epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches_processed, self._epoch = state_dict["batches_processed"], state_dict["epoch"]

    def reshuffle(self, epoch: int | None = None, **kwargs: Any) -> None:
        self._epoch = epoch

    def _iter_batches(self) -> Iterable[dict[str, Any]]:
        while self.batches_processed < self.total_batches:
            yield self._batch(self.batches_processed)

    def get_mock_batch(self) -> dict[str, Any]:
        return self._batch(0)

    def _batch(self, number: int) -> dict[str, Any]:
        numbers = torch.Generator().manual_seed(1000 * number + self.dp_rank)
        return {"input_ids": torch.randint(0, VOCABULARY, (2, LENGTH), generator=numbers)}


def _record_what_all_ranks_have(
    self: Trainer, name: str, *args: Any, record: Any = Trainer.record_metric, **kwargs: Any
) -> None:
    """Drop a metric that OLMo-core 3.0 does not record at the same step on all ranks.

    It records how long an asynchronous save took at whatever step each rank has reached by then, and reduces the
    metrics of all ranks as if they had the same ones: now and then it waits forever, or gloo aborts.
    """
    if name != "checkpoint/save_async_duration_s":
        record(self, name, *args, **kwargs)


Trainer.record_metric = _record_what_all_ranks_have  # type: ignore[method-assign]


class Losses(Callback):
    """Calls `say` with every step and its loss, on rank 0."""

    def __init__(self, say: Any) -> None:
        self.say = say

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if get_rank() == 0 and "train/CE loss" in metrics:
            self.say(step, metrics["train/CE loss"])


def trainer_of(node: str, steps: int, checkpointer: CheckpointerCallback) -> Trainer:
    """Return a trainer that saves below NODE/checkpoints. Called on each rank, after `prepare_training_environment`."""
    torch.manual_seed(1)
    model = TransformerConfig.llama_like(
        d_model=32,
        n_layers=1,
        n_heads=2,
        vocab_size=VOCABULARY,
        hidden_size_multiple_of=8,
        attn_backend=AttentionBackendName.torch,
    ).build(init_device="cpu")
    train_module = TransformerTrainModule(
        model,
        AdamWConfig(lr=1e-2),
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp),
        device=torch.device("cpu"),
    )
    data = Data(
        collator=None,  # not used, because batches come complete
        work_dir=str(Path(node, "work")),
        global_batch_size=2 * LENGTH * get_world_size(),
        dp_world_size=get_world_size(),
        dp_rank=get_rank(),
    )
    trainer = (
        TrainerConfig(
            save_folder=str(Path(node, "checkpoints")),
            save_overwrite=True,
            work_dir=str(Path(node, "work")),
            max_duration=Duration.steps(steps),
            metrics_collect_interval=1,
        )
        .with_callback("checkpointer", checkpointer)
        .with_callback("config_saver", ConfigSaverCallback())
        .build(train_module, data)
    )
    trainer.callbacks["config_saver"].config = {"model": "tiny"}
    return trainer


def train(
    node: str,
    remote: str,
    say: Any,
    *,
    steps: int = STEPS,
    save_async: bool = True,
    others: dict[str, Callback] | None = None,
    close_timeout_s: float = 60,
    has_node_folders: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    prepare_training_environment(backend="cpu:gloo", shared_filesystem=True)
    checkpointer = CheckpointerCallback(save_interval=SAVE_INTERVAL, save_async=save_async)
    trainer = trainer_of(node, steps, checkpointer)
    ours = {"ckpt_async": CkptAsyncCallback(remote, settings, close_timeout_s), "losses": Losses(say)}
    for name, callback in {**ours, **(others or {})}.items():
        trainer.add_callback(name, callback)
    if has_node_folders:
        trainer.load_strategy = LoadStrategy.never
        use_node_folders(trainer)
    resumed_from = newest_checkpoint(str(trainer.save_folder), remote)
    if has_node_folders and resumed_from is not None:
        trainer.load_checkpoint(resumed_from)
    trainer.fit()
    teardown_training_environment()
    return {
        "resumed_from": resumed_from,
        "step": trainer.global_step,
        "is_closed": trainer.callbacks["ckpt_async"].uploader is None,
    }


if __name__ == "__main__":
    from tests.compat.play import say_loss

    train(*sys.argv[1:], say_loss)
