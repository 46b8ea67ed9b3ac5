"""The demo's training script, one process a rank under torchrun: a byte-level transformer on Python's own sources,
sharded with FSDP2, that resumes from the newest committed checkpoint and saves through the public API.

What matters is in `save`: write, `enqueue`, `seal`, go on. No rank waits for an upload or for another rank.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import os
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt_async import Uploader
from ckpt_async.demo import resume
from ckpt_async.demo.log import Counted, Log, Saved, Started, Stepped, Written
from ckpt_async.demo.place import Place
from ckpt_async.model import CheckpointId

# 6.3 million parameters: with Adam's two moments a checkpoint is 76 MB, and a step still takes 0.15 s of one core.
WIDTH, NUM_LAYERS, NUM_HEADS, LENGTH, BATCH = 320, 5, 5, 64, 2
CORPUS_BYTES = 4 << 20
# A faster machine waits for the rest of it, so that saves come equally often everywhere.
MIN_STEP_S = 0.25
# Of the time between two saves: long enough to be killed in the middle, short enough not to pile up.
UPLOAD_SHARE = 0.8
NUM_CHECKPOINTS_TO_KEEP = 2
# How long a restarted rank lets the uploader finish what its predecessor had sealed.
PREDECESSOR_S = 20.0
FLUSH_S = 60.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, NUM_HEADS, WIDTH // NUM_HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Predicts the next byte; `forward` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text[:, :-1]) + self.positions(torch.arange(text.shape[1] - 1))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


class Trainer:
    """The model and its optimizer, sharded over all ranks."""

    def __init__(self, seed: int) -> None:
        self.rank, self.seed = dist.get_rank(), seed
        torch.manual_seed(seed)
        self.model = Transformer()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
        self.step = 0

    @property
    def state_size_bytes(self) -> int:
        """Of this rank's shards, nearly: parameters and two moments, four bytes each."""
        return sum(local(parameter).numel() for parameter in self.model.parameters()) * 3 * 4

    def train_step(self) -> float:
        """One step on a batch that only (seed, step, rank) decide; returns this rank's loss."""
        self.step += 1
        chance = torch.Generator().manual_seed((self.seed * 1_000_003 + self.step) * 1009 + self.rank)
        starts = torch.randint(0, len(self.text) - LENGTH - 1, (BATCH,), generator=chance)
        batch = torch.stack([self.text[start : start + LENGTH + 1] for start in starts]).long()
        loss: Tensor = self.model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """This rank's part of everything, by shard: plain tensors that plain torch can load."""
        named = dict(self.model.named_parameters())
        yield "model", {"step": self.step, "model": {name: local(each) for name, each in named.items()}}
        moments = {
            name: {key: local(value) for key, value in self.optimizer.state[each].items()}
            for name, each in named.items()
        }
        yield "optimizer", {"step": self.step, "optimizer": moments}

    @torch.no_grad()
    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        for name, parameter in self.model.named_parameters():
            local(parameter).copy_(model["model"][name])
            self.optimizer.state[parameter] = {
                key: value if key == "step" else sharded_like(parameter, value)
                for key, value in optimizer["optimizer"][name].items()
            }
        self.step = model["step"]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded. Shares its memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def sharded_like(parameter: Tensor, part: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def corpus() -> bytes:
    """Python's own sources: real text that is on every machine."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    return text[:CORPUS_BYTES]


def save(trainer: Trainer, uploader: Uploader, log: Log) -> Saved:
    """Write this rank's shards, hand them over, and return without waiting for anything."""
    step, rank, started = trainer.step, trainer.rank, time.perf_counter()
    folder = uploader.folder / f"step-{step}"
    folder.mkdir(exist_ok=True)
    paths = []
    for part, state in trainer.state():
        path = folder / f"rank-{rank}-{part}.pt"
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getbuffer()
        digest = hashlib.sha256(data).hexdigest()
        tmp = path.with_suffix(".tmp")
        tmp.write_bytes(data)
        tmp.replace(path)  # never in place: the spool may hold a link to the file that was there
        log.append(Written(rank, uploader.generation, step, path.name, len(data), digest))
        paths.append(path)
    written = time.perf_counter()
    for path in paths:
        uploader.enqueue(path, step)
    uploader.seal(step)
    blocked_s = time.perf_counter() - written
    saved = Saved(rank, uploader.generation, step, written - started, blocked_s, time.time())
    log.append(saved)
    return saved


def load_newest(
    trainer: Trainer, uploader: Uploader, place: Place
) -> tuple[CheckpointId | None, str]:
    """Resume from the newest committed checkpoint; returns which, and where this rank's shards came from."""
    resume.await_predecessor(place.folder, uploader.generation, PREDECESSOR_S)
    dist.barrier()  # before training, ranks may wait for each other
    found: list[CheckpointId | None] = [None]
    if trainer.rank == 0:  # one rank looks, so that all agree
        found = [asyncio.run(resume.newest_committed(uploader.remote))]
    dist.broadcast_object_list(found)
    checkpoint = found[0]
    if checkpoint is None:
        return None, ""
    into = place.tmp / f"fetched-{trainer.rank}"
    paths = asyncio.run(
        resume.fetch(uploader.remote, checkpoint, trainer.rank, folder=place.folder, into=into)
    )
    model, optimizer = (torch.load(path, weights_only=True) for path in paths)
    trainer.load(model, optimizer)
    is_fetched = [path.is_relative_to(into) for path in paths]
    for path in paths:
        if path.is_relative_to(into):
            path.unlink()
    return checkpoint, "the store" if all(is_fetched) else "both" if any(is_fetched) else "the local files"


def scrape(url: str) -> dict[str, float]:
    """What a metrics endpoint says: the sum over all labels of every sample, by name."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  our own http:// address
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--remote", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
