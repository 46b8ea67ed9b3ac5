"""One rank that takes snapshots of sharded tensors and saves them: `python staged_ranks.py 2 FOLDER`."""

import dataclasses
import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

import ckpt_async.torch as ckpt
from ckpt_async import Uploader
from ckpt_async.errors import FormatError, RankFailedError, SettingsError
from ckpt_async.torch import dcp_writer, snapshot
from tests.ranks import become_ranks

world_size, root = int(sys.argv[1]), Path(sys.argv[2])
rank = become_ranks(world_size)
warnings.simplefilter("ignore")
os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)


def trained(
    shard: Callable[[torch.nn.Module], torch.nn.Module],
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = shard(torch.nn.Sequential(torch.nn.Linear(900, 700), torch.nn.Linear(700, 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 900)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def fsdp1(model: torch.nn.Module) -> torch.nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def local(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "local_shards"):
        return next((each.tensor.reshape(-1) for each in tensor.local_shards()), torch.empty(0))
    return torch.as_tensor(tensor.to_local() if hasattr(tensor, "to_local") else tensor)


def leaves(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {place: each for name in value for place, each in leaves(value[name], f"{key}/{name}").items()}
    return {key: value} if isinstance(value, torch.Tensor) else {}


def is_independent_and_equal(state: dict[str, Any]) -> None:
    buffers = ckpt.SnapshotBuffers()
    taken = buffers.take(state, keeps_sharing=False)
    assert leaves(taken).keys() == leaves(state).keys()
    mine, its = ({key: local(each) for key, each in leaves(of).items()} for of in (state, taken))
    before = {key: each.clone() for key, each in mine.items()}
    assert buffers.size_bytes == sum(each.nbytes for each in mine.values())
    for each in mine.values():
        each.detach().zero_()
    assert all(torch.equal(its[key], before[key]) for key in before)
    with torch.no_grad():
        for key, each in mine.items():
            each.copy_(before[key])
    assert all(type(leaves(taken)[key]) is type(each) for key, each in leaves(state).items())
    places = {each.data_ptr() for each in its.values() if each.nbytes}
    again = {key: local(each) for key, each in leaves(buffers.take(state, keeps_sharing=False)).items()}
    assert {each.data_ptr() for each in again.values() if each.nbytes} == places


def copying_finish(finish: Callable[..., None]) -> Callable[..., None]:
    """As torch 2.11 does it."""
    return lambda self, metadata, results: finish(self, dataclasses.replace(metadata), results)


model, optimizer = trained(fully_shard)
of_model, of_optimizer = get_state_dict(model, optimizer)
state: dict[str, Any] = {"model": of_model, "optim": of_optimizer}
is_independent_and_equal(state)
assert max(local(each).nbytes for each in leaves(state).values()) > snapshot.MAPPED_BYTES

model, optimizer = trained(fsdp1)
FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
state_1 = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
assert any(hasattr(each, "local_shards") for each in leaves(state_1).values())
is_independent_and_equal(state_1)

FileSystemWriter.finish = copying_finish(FileSystemWriter.finish)  # type: ignore[method-assign]
kept = ckpt.SnapshotBuffers()
with Uploader(root / "local", f"file://{root}/remote", launch_id=ckpt.launch_id()) as uploader:
    group = ckpt.own_group()
    for number, each in enumerate((state, state_1), 1):
        metadata = ckpt.async_save(each, number, uploader, process_group=group, buffers=kept).result()
        assert metadata.storage_data
        uploader.wait(number)
        state_dict_saver.save(each, checkpoint_id=root / "torch" / str(number))
    # What one rank cannot copy, no rank begins to write, and no rank waits for. The next save is not affected.
    odd = {**state, "lock": threading.Lock() if rank else 0}
    with pytest.raises(
        FormatError if rank else RankFailedError, match=r"'state/lock' is a _thread\.lock that cannot"
    ):
        ckpt.async_save(odd, 3, uploader, process_group=group, buffers=kept)
    ckpt.async_save(state, 3, uploader, process_group=group, buffers=kept).result()
    kept.reader = None if rank else Future()
    with pytest.raises(RankFailedError if rank else SettingsError, match="still reads"):
        ckpt.async_save(state, 4, uploader, process_group=group, buffers=kept)
    metadata = ckpt.save(state, 4, uploader)
    assert dcp_writer.files_of_rank(metadata, rank)
    uploader.wait(4)
dist.barrier()
dist.destroy_process_group()
