"""The ranks of test_resume: real processes on gloo, with two ranks on each simulated node."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt_async import restore
from ckpt_async.torch.resume import fetch_together
from tests.ranks import become_ranks


def scenario(name: str, remote: str, base: Path, rank: int) -> dict[str, Any]:
    node = f"node-{rank // 2}"
    folder = base / name / node
    settings: dict[str, Any] = {"folder": folder, "node": node}
    destination: Any = lambda checkpoint: folder / checkpoint.name  # noqa: E731
    match name:
        case "wiped-node":
            settings["overwrite"] = True
        case "emptied":
            settings["folder"] = base / "truth"  # this folder's journal knows what was committed
        case "own-file":
            settings["files"] = [f"rank-{rank}.pt"]
        case "unwritable" if rank == 2:
            (folder / "step-2").parent.mkdir(parents=True, exist_ok=True)
            (folder / "step-2").write_text("in the way")
    try:
        found = fetch_together(remote, destination, **settings)
    except Exception as error:
        cause = type(error.__cause__).__name__
        return {"error": type(error).__name__, "message": str(error), "cause": cause}
    if found is None:
        return {"none": True}
    checkpoint, report = found
    whole = all(
        (base / "truth" / checkpoint.name / file).read_bytes() == path.read_bytes()
        for file, path in report.paths.items()
    )
    return {
        "step": checkpoint.step,
        "files": sorted(report.paths),
        "bytes_from": dict(report.bytes_from),
        "is_whole": whole,
        "passed_over": [each.reason for each in checkpoint.rejected],
    }


def main() -> None:
    remote, base, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    os.environ["RANK"] = str(become_ranks(int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    for name in names:
        where = remote if name != "fresh" else f"{remote}-nothing"
        if name == "emptied" and rank == 0:
            place = Path(remote.removeprefix("file://"))
            place.rename(f"{place}.away")
        dist.barrier()
        result = scenario(name, where, base, rank)
        (base / f"{name}-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
        # For the next scenario, damage the newest checkpoint in the store.
        if name == "all-wiped" and rank == 0:
            spoil(remote)
        dist.barrier()
    dist.destroy_process_group()


def spoil(remote: str) -> None:
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    path = Path(remote.removeprefix("file://")) / checkpoint.files["rank-1.pt"].key
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


if __name__ == "__main__":
    main()
