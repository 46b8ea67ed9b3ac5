"""What ranks save asynchronously is what they had: DTensors, and the ShardedTensors of FSDP 1."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.ranks import run_ranks


def as_one_file(folder: Path, file: Path) -> Any:
    dcp_to_torch_save(folder, file)
    return torch.load(file, weights_only=False)


def check_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            check_equal(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)


def test_snapshots_of_sharded_states_are_what_torch_saves(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("staged_ranks.py"), 2, tmp_path)
    for number in (1, 2):
        ours = as_one_file(tmp_path / "local" / f"step-{number}", tmp_path / "ours.pt")
        check_equal(ours, as_one_file(tmp_path / "torch" / str(number), tmp_path / "torch.pt"))
        assert ours["model"]["0.weight"].shape == (700, 900)


def test_a_single_rank_gets_a_group_of_its_own(tmp_path: Path) -> None:
    """Its default group may be NCCL's, with which torch saves nothing asynchronously."""
    script = (
        "import sys, torch.distributed as dist, ckpt_async.torch as ckpt\n"
        "assert ckpt.own_group() is None\n"
        "dist.init_process_group('gloo', init_method=sys.argv[1], rank=0, world_size=1)\n"
        "group = ckpt.own_group()\n"
        "assert group not in (None, dist.group.WORLD) and dist.get_backend(group) == 'gloo'\n"
    )
    subprocess.run([sys.executable, "-c", script, f"file://{tmp_path}/store"], check=True)
