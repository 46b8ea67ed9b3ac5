"""The ranks of test_places: what one rank reads reaches all of them.

python -m tests.torch_side.broadcast_ranks WORLD_SIZE FOLDER
"""

import json
import os
import resource
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt_async.torch.formats as formats
from ckpt_async.errors import RankFailedError
from ckpt_async.torch import dump, load
from tests.ranks import become_ranks
from tests.torch_side import states

world_size, folder = int(sys.argv[1]), Path(sys.argv[2])
rank = become_ranks(world_size)
reads: list[str] = []
found: dict[str, Any] = {}
_load = formats._load


def counted(path: Path, how: Any) -> Any:
    reads.append(path.name)
    return _load(path, how)


def kinds(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (type(each), each.requires_grad, vars(each)) for name, each in tensors.items()}


formats._load = counted
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/rendezvous",
    rank=rank,
    world_size=world_size,
    timeout=timedelta(seconds=60),
)
if rank == 0:
    small = {**states.everything(), "composer": states.composer_state()}
    shared = torch.arange(3.0)
    small["tensors"]["leaf"] = torch.ones(2, requires_grad=True)
    small["twice"] = [shared, shared]
    dump(small, folder / "small.pt")
    dump({"big": torch.ones(16 << 20), "rng": 1}, folder / "big.pt")
    torch.save({"a": os.system}, folder / "evil.pt")
dist.barrier()
small = torch.load(folder / "small.pt", weights_only=False)
got = load(folder / "small.pt", on_one=True)
found["same"] = (
    got.keys() == small.keys()
    and states.is_same(got["arrays"], small["arrays"])
    and states.is_same(got["composer"], small["composer"])
    and got["tensors"]["view"].tolist() == [2, 4, 6]
)
found["tensors"] = kinds(got["tensors"]) == kinds(small["tensors"])
found["shared"] = got["twice"][0] is got["twice"][1]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
big = load(folder / "big.pt", on_one=True, ignore_keys=["rng"])
found["peak"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
found["without what is ignored"] = big.keys() == {"big"} and bool((big["big"] == 1).all())
found["reads"] = len(reads)
for name, path in {"error": "nothing.pt", "refused": "evil.pt"}.items():
    try:
        load(folder / path, on_one=True)
    except RankFailedError as error:
        found[name] = str(error)
(folder / f"found-{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
