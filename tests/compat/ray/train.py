"""A TorchTrainer with 2 workers, as docs/integrations.md shows it. Each worker has a state of its own, and the loss
depends on both: a checkpoint made of two steps would show.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer

from ckpt_async import restore
from ckpt_async.integrations.ray import checkpoint_of, newest_checkpoint, open_in_ray, upload_fn
from tests.compat.play import say_loss

WIDTH, KEEP = 8, 2


def train_func(config: dict[str, Any]) -> None:
    folder, remote = config["folder"], config["remote"]
    rank = train.get_context().get_world_rank()
    torch.manual_seed(1)
    model = train.torch.prepare_model(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    own, first = torch.full((1,), rank + 1.0), 0
    if (reported := train.get_checkpoint()) is not None:  # what Ray knows of can be had
        assert len(checkpoint_of(reported).files) == 2
    if (newest := newest_checkpoint(folder, remote)) is not None:
        state = torch.load(Path(newest, f"rank-{rank}.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        own, first = state["own"], state["step"] + 1
    with open_in_ray(folder, remote, num_checkpoints_to_keep=2) as uploader:
        for step in range(first, config["steps"]):
            optimizer.zero_grad()
            own = own * 1.01
            loss = model(torch.full((4, WIDTH), float(step % 7))).square().mean()
            loss.backward()
            optimizer.step()
            both = loss.detach() + own
            dist.all_reduce(both)
            if rank == 0:
                say_loss(step, both.item(), config["stdout"])
            if step % 5 == 4:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "own": own,
                    "step": step,
                }
                saved = tempfile.mkdtemp(dir=folder)
                torch.save(state, Path(saved, f"rank-{rank}.pt"))
                metrics = {"step": step, "loss": both.item()}
                train.report(
                    metrics,
                    Checkpoint.from_directory(saved),
                    checkpoint_upload_mode=CheckpointUploadMode(config["mode"]),
                    checkpoint_upload_fn=upload_fn(uploader, step, metrics),
                )


def main(steps: str, mode: str, node: str, remote: str) -> None:
    ray.init(
        num_cpus=4, include_dashboard=False, _temp_dir=os.environ["RAY_PLAY_FOLDER"], configure_logging=False
    )
    folder = Path(node, "checkpoints")
    folder.mkdir(exist_ok=True)
    trainer = TorchTrainer(
        train_func,
        train_loop_config={
            "folder": str(folder),
            "remote": remote,
            "steps": int(steps),
            "mode": mode,
            "stdout": f"/proc/{os.getpid()}/fd/1",
        },
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="play",
            storage_path=f"{node}/ray",
            failure_config=FailureConfig(max_failures=1000),
            checkpoint_config=CheckpointConfig(num_to_keep=KEEP),
        ),
    )
    result = trainer.fit()
    pointers = [each for each, _ in result.best_checkpoints or []]
    assert len(pointers) == KEEP
    kept = sorted(path.name for path in Path(node, "ray", "play").glob("checkpoint_*") if path.is_dir())
    # A worker that died just after the commit leaves a pointer that Ray was never told of.
    assert {Path(each.path).name for each in pointers} <= set(kept), "Ray lost a pointer that it should keep"
    for pointer in pointers:
        found = checkpoint_of(pointer)
        report = restore.fetch(found, Path(node, "again", found.name))
        steps_of = {torch.load(path, weights_only=True)["step"] for path in report.paths.values()}
        assert (len(report.paths), steps_of) == (2, {found.step})
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
