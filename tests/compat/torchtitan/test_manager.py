"""What `CkptAsyncManager` loads and refuses, on one rank."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_async.errors import SettingsError, UploadFailedError
from ckpt_async.integrations.torchtitan import CkptAsyncManager


class Value:
    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.tensor(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def manager(node: Path, state: Value, **settings: Any) -> CkptAsyncManager:
    config = CkptAsyncManager.Config(
        enable=True, interval=1, folder="checkpoint", remote=f"file://{node}/store", uploader=settings
    )
    return config.build(
        dataloader=Value(0),
        model_parts=[torch.nn.Linear(2, 2)],
        optimizers=Value(0),
        lr_schedulers=Value(0),
        states={"state": state},
        sd_adapter=None,
        base_folder=str(node),
    )


def test_a_local_folder_that_was_never_committed_is_not_loaded(tmp_path: Path) -> None:
    first = manager(tmp_path, Value(1))
    first.load()
    assert first.save(1)
    first.close()
    shutil.copytree(tmp_path / "checkpoint" / "step-1", tmp_path / "checkpoint" / "step-3")
    state = Value(0)
    second = manager(tmp_path, state)
    with pytest.raises(FileNotFoundError, match=r"load_step=3: no committed checkpoint of this step"):
        second.load(step=3)
    assert second.load()
    assert state.value == 1
    second.close()


def test_what_is_wrong_is_seen_before_training(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="num_checkpoints_to_kep"):
        manager(tmp_path, Value(1), num_checkpoints_to_kep=3)
    wrong = manager(tmp_path, Value(1), num_checkpoints_to_keep="three")
    with pytest.raises(SettingsError, match="must be a whole number"):
        wrong.load()


def test_the_end_says_that_nothing_was_committed(tmp_path: Path) -> None:
    broken = manager(tmp_path, Value(1))
    broken.load()
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("not a folder any more")
    broken.save(1)
    broken._managed._close_timeout_s = 1.0
    with pytest.raises(UploadFailedError, match="the newest checkpoint, step 1, is not committed"):
        broken.close()
