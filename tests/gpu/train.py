"""Training on a GPU that tells how it goes: python -m tests.gpu.train FOLDER REMOTE NUM_BATCHES [KEY=VALUE ...].

A line for each: `loss BATCH HEX`, `saved BATCH`, `resumed BATCH`. With `sharded=1` by FSDP2, in a group of `backend`.
"""

import os
import sys
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckpt_async.torch as ckpt
from ckpt_async.saver import CheckpointSaver

WIDTH = 700


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # in one piece: threads tell things, too


def main() -> None:
    folder, remote, num_batches = sys.argv[1], sys.argv[2], int(sys.argv[3])
    options = dict(each.split("=") for each in sys.argv[4:])
    is_sharded, device = options.get("sharded") == "1", options.get("device", "cuda")
    torch.use_deterministic_algorithms(True)
    if is_sharded:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        store = f"file://{folder}-store-{os.getpid()}"
        dist.init_process_group(options["backend"], init_method=store, rank=0, world_size=1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 64)
    ).to(device)
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = 0

    def state() -> dict[str, Any]:
        if not is_sharded:
            parts: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        else:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            parts = {"model": of_model, "optimizer": of_optimizer}
        return {**parts, "batch": batch, "rng": ckpt.capture_rng()}

    with CheckpointSaver(
        folder,
        remote,
        save_interval="3ba",
        num_checkpoints_to_keep=3,
        sharded=is_sharded,
        runner=options.get("runner", "thread"),
        filename="ba{batch}." + options.get("suffix", "pt"),
        on_saved=lambda saved: tell("saved", saved.timestamp.batch),
        hooks_at_once=True,
    ) as saver:
        if is_sharded:
            saver.uploader.wait_for_predecessor(60)
            found: Any = state()
            if ckpt.load_latest(found, remote, folder=folder) is None:
                found = None
            else:
                set_state_dict(
                    model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
                )
        else:
            found = saver.load_latest(wait_s=60, map_location=options.get("map_location", "cpu"))
            if found is not None:
                model.load_state_dict(found["model"])
                optimizer.load_state_dict(found["optimizer"])
        if found is not None:
            batch = found["batch"]
            assert ckpt.restore_rng(found)
        tell("resumed", batch)
        while batch < num_batches:
            data = torch.randn(32, 64, device=device)
            with torch.autocast(device, torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(data), data)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            batch += 1
            tell("loss", batch, float(loss.detach()).hex())
            saver.step(state, batch)
    if is_sharded:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
