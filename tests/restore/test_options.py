"""A misspelt option is refused by the type checker and at run time, wherever options are handed on."""

import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_async.torch
from ckpt_async import restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.core.settings_options import SettingsOptions
from ckpt_async.saver import CheckpointSaver

CHECKPOINT = restore.Checkpoint("memory://none", CheckpointId(1, 1), "step-1", 1, {})
SCRIPT = """
from ckpt_async import Uploader, restore
from ckpt_async.saver import CheckpointSaver
from ckpt_async.torch import fetch_together, load, load_latest, load_remote

saver = CheckpointSaver("folder", "s3://b/r", num_checkpoints_to_keep=3, rank=0, world_size=1)
found = restore.find("s3://b/r", step=3)
assert found is not None
restore.fetch(found, "d", ranks=[1], overwrite=True)
restore.find("s3://b/r", setp=3)  # refused
restore.find("s3://b/r", overwrite=True)  # refused
restore.fetch(found, "d", overwrit=True)  # refused
restore.fetch(found, "d", step=3)  # refused
restore.fetch_latest("s3://b/r", "d", peer=())  # refused
restore.open(found, local_cach="d")  # refused
fetch_together("s3://b/r", "d", drain_timeout=3)  # refused
load("a.pt", map_locaton="cpu")  # refused
load_remote(found, "a.pt", weights_onyl=True)  # refused
load_latest({}, "s3://b/r", chek_nan=True)  # refused
saver.find(steps=3)  # refused
saver.load_latest(alow=())  # refused
CheckpointSaver("folder", num_checkpoint_to_keep=3)  # refused
Uploader("folder", "s3://b/r", runer="process")  # refused
Uploader("folder", "s3://b/r", runner=3)  # refused
"""


def test_type_checker_refuses_misspelt_options(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", str(script)]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    refused = {int(line.split(":")[1]) for line in told.splitlines() if ": error: " in line}
    marked = {number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# refused" in line}
    assert refused == marked, told


def test_setting_keywords_are_the_settings() -> None:
    assert typing.get_type_hints(SettingsOptions) == typing.get_type_hints(Settings)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: restore.find("memory://none", setp=3), "step"),
        (lambda: restore.fetch(CHECKPOINT, "d", overwrit=True), "overwrite"),
        (lambda: restore.fetch_latest("memory://none", "d", rank=[1]), "ranks"),
        (lambda: restore.open(CHECKPOINT, local_cach="d"), "local_cache"),
        (
            lambda: ckpt_async.torch.fetch_together("memory://none", "d", drain_timeout=3),
            "drain_timeout_s",
        ),
        (lambda: ckpt_async.torch.load("a.pt", map_locaton="cpu"), "map_location"),
        (lambda: ckpt_async.torch.load_remote(CHECKPOINT, "a", weights_onyl=True), "weights_only"),
        (lambda: ckpt_async.torch.load_latest({}, "memory://none", chek_nan=True), "check_nan"),
        (lambda: ckpt_async.torch.CkptAsyncReader(CHECKPOINT, repicas=None), "replicas"),
        (lambda: ckpt_async.torch.unshard(CHECKPOINT, "a.pt", peer=()), "peers"),
    ],
)
def test_misspelt_option_names_the_one_meant(call: Callable[[], Any], meant: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean '{meant}'"):
        call()


def test_saver_names_the_option_meant(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path, None, run_name="run", saves_last=False) as saver:
        with pytest.raises(TypeError, match="did you mean 'allow'"):
            saver.load_latest(alow=())
        with pytest.raises(TypeError, match="did you mean 'step'"):
            saver.find(setp=1)
