"""The engine's `save_checkpoint` with ZeRO 1 and 3 on 2 ranks, and `files_of_rank`."""

from pathlib import Path

import pytest
import torch

from ckpt_async import restore
from tests.compat.play import Job, ranks

SCRIPT = Path(__file__).with_name("train.py")


@pytest.mark.timeout(1800)  # on CPUs, DeepSpeed compiles an extension at its first start
@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_killed_run_goes_on_on_a_fresh_node(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
    job.check_kill_and_resume([*ranks(2), SCRIPT, stage])
    assert_same_weights(
        whole_of(f"{job.remote}/run", tmp_path), whole_of(f"{job.remote}/undisturbed", tmp_path)
    )


def whole_of(remote: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the newest checkpoint's model, made as docs/torch.md says: with DeepSpeed's own tool."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = restore.find(remote)
    assert found is not None
    checkpoints = folder / remote.rpartition("/")[2]
    restore.fetch(found, checkpoints / found.name)
    weights: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(
        str(checkpoints), tag=found.name
    )
    return weights


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert {name: tuple(value.shape) for name, value in one.items()} == {
        "0.weight": (16, 16),
        "0.bias": (16,),
        "2.weight": (16, 16),
        "2.bias": (16,),
    }
    assert all(torch.equal(value, other[name]) for name, value in one.items())
