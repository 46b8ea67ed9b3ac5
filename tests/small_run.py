"""A run of one rank with two small files a step, saved by an Uploader."""

from pathlib import Path

from ckpt_async import Uploader


def save(folder: Path, remote: str, *steps: int, kind: str = "") -> None:
    folder.mkdir(exist_ok=True)
    with Uploader(folder, remote, rank=0, world_size=1, kind=kind or None, generation=None) as uploader:
        for step in steps:
            for name in ("a", "b"):
                path = folder / f"{step}-{name}"
                path.write_bytes(f"{kind} {step} {name}".encode() * 1000)
                uploader.enqueue(path, step=step, name=f"step-{step}")
            uploader.seal(step=step)
