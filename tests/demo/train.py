"""The demo's trainer: a small transformer language model, FSDP2 on gloo, one of two ranks.

What a user of ckpt_async writes is marked with `# <-`; the rest is training, and a log for the check at the end.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import sysconfig
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ckpt_async.saver import CheckpointSaver  # <-
from tests.demo.config import Config

CONTEXT, BATCH, TEXT_BYTES = 96, 4, 2 << 20


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = max(1, width // 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def text() -> Tensor:
    """Return Python's own sources: real text that exists on every machine."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= TEXT_BYTES:
            break
    return torch.frombuffer(data[:TEXT_BYTES], dtype=torch.uint8).long()


def sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return this rank's part of every parameter and of the optimizer's state, by name."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[name] = _local(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}/{key}"] = _local(value)
    return state


def load_sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """Load what `sharded_state` returned, on the same number of ranks."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _local(parameter).copy_(state[name])
            slots = optimizer.state[parameter]
            slots["step"] = state[f"{name}/step"].clone()
            for key in ("exp_avg", "exp_avg_sq"):
                slots[key] = torch.zeros_like(parameter)
                _local(slots[key]).copy_(state[f"{name}/{key}"])


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Log:
    """This rank's own record, outside of the system under test."""

    def __init__(self, config: Config, rank: int) -> None:
        self._path, self._rank = config.log(rank), rank

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "rank": self._rank, "at": time.time(), **fields})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class Saved:
    """The state to save, and its oracle: the SHA-256 of what torch.save itself would write of the live state. The
    oracle is on disk before the saver sees the state, so whenever the rank is killed, every shard has one.
    """

    def __init__(
        self, log: Log, model: nn.Module, optimizer: torch.optim.Optimizer, picker: torch.Generator
    ) -> None:
        self._log, self._model, self._optimizer, self._picker = log, model, optimizer, picker
        self.oracle_s = self.torch_save_s = 0.0  # the times of the newest one

    def state(self, step: int, generation: int) -> dict[str, Any]:
        state = {
            "step": step,
            "generation": generation,
            "picker": self._picker.get_state(),
            "tensors": sharded_state(self._model, self._optimizer),
        }
        started, file = time.perf_counter(), io.BytesIO()
        torch.save(state, file)
        self.torch_save_s = time.perf_counter() - started
        key, written = f"ckpt/step-{step}.g{generation}/rank-{dist.get_rank()}.pt", file.getvalue()
        self._log.write("state", key=key, size_bytes=len(written), sha256=hashlib.sha256(written).hexdigest())
        self.oracle_s = time.perf_counter() - started
        return state


def main() -> None:
    if os.getpgrp() != os.getpid():
        # As torchrun does: each rank is a process group of its own, which the demo kills as a whole.
        os.setsid()
    config = Config.read(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config.pid_file(rank).write_text(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    dist.init_process_group("gloo")
    log = Log(config, rank)
    mesh = init_device_mesh("cpu", (world_size,))
    model = Transformer(config.width, config.depth)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = text()

    picker = torch.Generator().manual_seed(config.seed + 1000 * rank)
    saved = Saved(log, model, optimizer, picker)
    with CheckpointSaver(  # <-
        config.folder,
        config.remote,
        filename="step-{step}/rank-{rank}.pt",
        checkpoint_name="step-{step}",
        save_interval=f"{config.save_every}ba",
        saves_last=False,
        is_writer=True,
        on_saved=lambda each: log.write("sealed", step=each.step, generation=generation),
        hooks_at_once=True,
        num_checkpoints_to_keep=config.keep,
        max_bytes_per_s=config.max_bytes_per_s,
        metrics_port=0 if rank == 0 else None,
    ) as saver:
        generation, metrics_url = saver.uploader.generation, saver.uploader.metrics_url
        state = saver.load_latest(wait_s=60)  # <- first finishes what a killed launch had sealed
        first_step = 0
        if state is not None:
            load_sharded_state(model, optimizer, state["tensors"])
            picker.set_state(state["picker"])
            first_step = state["step"]
            log.write("resumed", step=first_step, generation=state["generation"])
        log.write("started", generation=generation, first_step=first_step, metrics_url=metrics_url)
        if rank == 0:
            say(f"generation {generation}: training from step {first_step}; metrics at {metrics_url}")
        for step in range(first_step + 1, config.steps + 1):
            starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=picker)
            batch = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
            loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            optimizer.step()
            optimizer.zero_grad()
            log.write("loss", step=step, loss=loss.item())
            if rank == 0:
                say(f"  step {step}: loss {loss.item():.3f}")
            started = time.perf_counter()
            if saver.step(partial(saved.state, step, generation), step):  # <- after every step
                blocked_s = time.perf_counter() - started - saved.oracle_s
                log.write("saving", step=step, torch_save_s=saved.torch_save_s, blocked_s=blocked_s)
                if rank == 0:
                    say(
                        f"  step {step}: saved beside training, which was blocked for {blocked_s * 1e3:.1f} ms"
                    )
        saver.wait(120)  # <- optional: until it is committed
        if metrics_url is not None:
            with urllib.request.urlopen(metrics_url, timeout=10) as response:
                log.write("metrics", text=response.read().decode())
    log.write("finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
