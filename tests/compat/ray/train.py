"""A TorchTrainer with 2 workers, as docs/integrations.md shows it. Each worker has a state of its own, and the loss
depends on both, so a checkpoint made of two steps would show.

Each worker records the SHA-256 of every file before it reports it. At each launch, and at the end, every checkpoint
that Ray has registered is fetched from the store and compared.
"""

import hashlib
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
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer

from ckpt_async import restore
from ckpt_async.integrations.ray import checkpoint_of, newest_checkpoint, open_in_ray, upload_fn
from tests.compat.play import say, say_loss

WIDTH, KEEP, WORKERS = 8, 2, 2
# An upload takes 0.5 s, time enough to kill a worker in it.
BALLAST_BYTES, MAX_BYTES_PER_S = 512 << 10, 1 << 20


def digest(path: Path, step: int) -> str:
    return f"{step}-{path.name}-{hashlib.sha256(path.read_bytes()).hexdigest()}"


def check(pointer: Checkpoint, written: str) -> None:
    """Fail unless the pointer leads to the files of all workers, from one step and one
    start, byte for byte as written.
    """
    found = checkpoint_of(pointer)
    with tempfile.TemporaryDirectory() as folder:
        paths = restore.fetch(found, folder).paths.values()
        digests = {digest(Path(path), found.step) for path in paths}
        assert len(digests) == WORKERS, f"{pointer} leads to {digests}"
        assert digests <= set(os.listdir(written)), f"{pointer} leads to bytes that nobody wrote: {digests}"
        states = [torch.load(path, weights_only=True) for path in paths]
    assert {(each["step"], each["generation"]) for each in states} == {(found.step, found.generation)}


def train_func(config: dict[str, Any]) -> None:
    folder, remote = config["folder"], config["remote"]
    rank = train.get_context().get_world_rank()
    torch.manual_seed(1)
    model = train.torch.prepare_model(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    own, first = torch.full((1,), rank + 1.0), 0
    if rank == 0:
        registered = train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
        for each in registered:
            check(each.checkpoint, config["written"])
        say(f"CHECKED {len(registered)}", config["stdout"])
    # Must come before newest_checkpoint, whose uploads of what was left would hide what was not committed.
    dist.barrier()
    if (newest := newest_checkpoint(folder, remote)) is not None:
        state = torch.load(Path(newest, f"rank-{rank}.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        own, first = state["own"], state["step"] + 1
    settings = {"num_checkpoints_to_keep": 2, "max_bytes_per_s": MAX_BYTES_PER_S}
    with open_in_ray(folder, remote, **settings) as uploader:
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
                    "generation": uploader.generation,
                    "ballast": torch.rand(BALLAST_BYTES // 4),
                }
                saved = tempfile.mkdtemp(dir=folder)
                path = Path(saved, f"rank-{rank}.pt")
                torch.save(state, path)
                Path(config["written"], digest(path, step)).touch()
                metrics = {"step": step, "loss": both.item()}
                train.report(
                    metrics,
                    Checkpoint.from_directory(saved),
                    checkpoint_upload_mode=CheckpointUploadMode(config["mode"]),
                    checkpoint_upload_fn=upload_fn(uploader, step, metrics),
                )


def main(steps: str, mode: str, kills: str, node: str, remote: str) -> None:
    ray.init(
        num_cpus=4, include_dashboard=False, _temp_dir=os.environ["RAY_PLAY_FOLDER"], configure_logging=False
    )
    folder, written = Path(node, "checkpoints"), Path(node).with_name("written")  # shared by all nodes
    folder.mkdir(exist_ok=True)
    written.mkdir(exist_ok=True)
    trainer = TorchTrainer(
        train_func,
        train_loop_config={
            "folder": str(folder),
            "remote": remote,
            "written": str(written),
            "steps": int(steps),
            "mode": mode,
            "stdout": f"/proc/{os.getpid()}/fd/1",
        },
        scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="play",
            storage_path=f"{node}/ray",
            failure_config=FailureConfig(max_failures=int(kills)),
            checkpoint_config=CheckpointConfig(num_to_keep=KEEP),
        ),
    )
    result = trainer.fit()
    pointers = [each for each, _ in result.best_checkpoints or []]
    assert len(pointers) == KEEP
    storage = Path(node, "ray", "play")
    kept = {path.parent.name for path in storage.glob("checkpoint_*/.metadata.json")}
    assert {Path(each.path).name for each in pointers} <= kept, "Ray lost a pointer that it should keep"
    # Includes those that Ray was never told of, because a worker died just after the commit.
    for name in kept:
        check(Checkpoint.from_directory(str(storage / name)), str(written))
    say(f"CHECKED {len(kept)}")
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
