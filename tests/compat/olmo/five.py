"""Save with each of OLMo's five checkpointers, lose the local folder, and restore into another model.

    python five.py NODE REMOTE

The folder is moved away before restoring; only the full checkpointer gets it, as `local_cache`.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from olmo import util
from olmo.config import TrainConfig
from olmo.model import OLMo
from olmo.optim import build_optimizer

from ckpt_async import restore
from ckpt_async.errors import SettingsError
from ckpt_async.integrations import olmo as ours
from ckpt_async.torch import load, unshard
from tests.compat.olmo.tiny import LENGTH, VOCABULARY, config, start_ranks, wrapped
from tests.stores.objects import objects


def built(cfg: TrainConfig, seed: int, *, is_ddp: bool) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = wrapped(OLMo(cfg.model), is_ddp=is_ddp)
    return model, build_optimizer(cfg, model)


def losses(model: Any, optim: Any) -> list[float]:
    """Return the losses of 3 steps, with the same random numbers every time."""
    torch.manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    found = []
    for _ in range(3):
        optim.zero_grad()
        loss = model(tokens).logits.square().mean()
        loss.backward()
        optim.step()
        found.append(loss.item())
    return found


def check_copies(cfg: TrainConfig, folder: Path, url: str, *, is_ddp: bool) -> None:
    """OLMo's own tools find in the store what the local folder has."""
    run = f"{cfg.remote_save_folder}/kinds/unsharded" if is_ddp else str(cfg.remote_save_folder)
    copied = f"{run}/{folder.name}"
    here = {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    assert objects(copied) == here
    assert util.find_latest_checkpoint(run) == copied
    assert is_ddp or copied == url


def check(cfg: TrainConfig, name: str, step: int) -> None:
    is_ddp = name == "full"
    checkpointer = (
        ours.FullCheckpointer(cfg, publish_copies=True)
        if is_ddp
        else ours.build_sharded_checkpointer(cfg, publish_copies=True)
    )
    folder = Path(cfg.save_folder, f"step{step}-unsharded" if is_ddp else f"step{step}")
    url = f"{cfg.remote_save_folder}/{folder.name}"
    model, optim = built(cfg, 1, is_ddp=is_ddp)
    losses(model, optim)
    state = {"global_step": step, "rng": np.random.get_state(), "checkpoints": [folder]}
    checkpointer.save_checkpoint(folder, model, optim, state, upload_to=url)
    expected = losses(model, optim)
    ours.close_uploads()
    dist.barrier()
    check_copies(cfg, folder, url, is_ddp=is_ddp)
    assert ours.find_latest_checkpoint(str(cfg.remote_save_folder)) == url
    found = restore.find(str(cfg.remote_save_folder), step=step, kind=checkpointer.kind)
    assert found is not None
    if not is_ddp:
        assert {rank for file in found.files.values() for rank in file.ranks} == {0, 1}
    cache = Path(cfg.save_folder).with_name("cache") / folder.name
    if dist.get_rank() == 0:
        shutil.move(folder, cache)
    dist.barrier()

    other, its_optim = built(cfg, 2, is_ddp=is_ddp)
    restored = checkpointer.restore_checkpoint(url, other, its_optim, local_cache=cache if is_ddp else None)
    assert (restored["global_step"], restored["checkpoints"]) == (step, [folder])
    assert losses(other, its_optim) == expected
    if name in ("torch_legacy", "local", "olmo_core"):
        weights = checkpointer.unshard_checkpoint(url)[0]
        shapes = {key: value.shape for key, value in OLMo(cfg.model).state_dict().items()}
        assert {key: value.shape for key, value in weights.items()} == shapes
        if dist.get_rank() == 0:  # `unshard` does it without OLMo
            unshard(found, path := Path(f"{name}.safetensors"))
            ours_whole = load(path)
            assert ours_whole.keys() == weights.keys()
            assert all(torch.equal(value, weights[key]) for key, value in ours_whole.items())
    if is_ddp:
        weights, optim_state = checkpointer.load_checkpoint(url)
        assert weights
        assert optim_state["state"]
    dist.barrier()


def main(node: str, remote: str) -> None:
    start_ranks(2)
    for step, name in enumerate(["full", "torch_new", "torch_legacy", "local", "olmo_core"], 1):
        is_ddp = name == "full"
        save_folder = str(Path(node, "checkpoints"))
        check(config(save_folder, remote, is_ddp=is_ddp, name="torch_new" if is_ddp else name), name, step)
    cfg = config(str(Path(node, "checkpoints")), remote, is_ddp=False)
    try:
        ours.build_sharded_checkpointer(cfg).save_checkpoint(
            Path(cfg.save_folder, "step9"), None, None, {}, upload_to="s3://x/step8"
        )
    except SettingsError:
        return
    raise AssertionError("another name was taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
