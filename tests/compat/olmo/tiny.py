"""A tiny OLMo 0.6 on CPU, and its ranks: what the plays train."""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from olmo.config import (
    DistributedStrategy,
    FSDPWrapStrategy,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    SchedulerType,
    ShardedCheckpointerType,
    TrainConfig,
)
from olmo.model import OLMo
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import become_ranks

VOCABULARY, LENGTH = 64, 16


def config(
    save_folder: str,
    remote: str | None,
    *,
    is_ddp: bool,
    name: str = "torch_new",
    dropout: float = 0.1,
    **more: Any,
) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            d_model=32,
            n_heads=2,
            n_layers=1,
            mlp_ratio=2,
            vocab_size=VOCABULARY,
            embedding_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pad_token_id=0,
            eos_token_id=1,
            init_device="cpu",
            attention_dropout=dropout,
            residual_dropout=dropout,
            embedding_dropout=dropout,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        scheduler=SchedulerConfig(name=SchedulerType.constant, t_warmup=0),
        precision="fp32",
        save_folder=save_folder,
        remote_save_folder=remote,
        sharded_checkpointer=ShardedCheckpointerType[name],
        distributed_strategy=DistributedStrategy.ddp if is_ddp else DistributedStrategy.fsdp,
        **more,
    )


def wrapped(model: OLMo, *, is_ddp: bool) -> Any:
    if is_ddp:
        return DistributedDataParallel(model)
    return FullyShardedDataParallel(
        model,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        auto_wrap_policy=model.get_fsdp_wrap_policy(FSDPWrapStrategy.by_block),
    )


def start_ranks(world_size: int) -> None:
    """Fork into the ranks and return in each of them; forking saves importing OLMo again, which takes long."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    rank = become_ranks(world_size)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo")
