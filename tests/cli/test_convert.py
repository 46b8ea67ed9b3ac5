"""`ckpt-async convert`: whole files from checkpoints stored anywhere, and a one-sentence error where that is
impossible.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async import Uploader, cli
from ckpt_async.torch import dump, load
from tests.torch_side import foreign_files

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(12.0).reshape(3, 4)},
    "optim": {"m": torch.ones(4), "lr": 0.1},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Provide an OLMo-core run on this node."""
    for step in (10, 20):
        foreign_files.olmo_core(tmp_path / "run" / f"step{step}", STATE, {0: {"global_step": step}})
    return tmp_path / "run"


def test_a_run_a_checkpoint_and_a_file_are_converted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {
        str(run): 20,
        f"file://{run}": 20,
        str(run / "step10"): 10,
        str(run / "step10" / "model_and_optim"): None,
    }
    for number, (source, step) in enumerate(sources.items()):
        target = tmp_path / f"{number}.pt"
        assert cli.main(["convert", source, str(target)]) == 0
        assert str(target) in capsys.readouterr().out
        state = load(target)
        assert torch.equal(state["model"]["w"], STATE["model"]["w"])
        assert state.get("train") == (None if step is None else {"global_step": step})
    again = tmp_path / "again.safetensors"
    assert cli.main(["convert", str(tmp_path / "0.pt"), str(again)]) == 0
    assert torch.equal(load(again)["w"], STATE["model"]["w"])
    assert cli.main(["convert", str(again), str(tmp_path / "back.pt")]) == 0
    assert torch.equal(load(tmp_path / "back.pt")["w"], STATE["model"]["w"])


def test_json_says_what_was_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(run), str(tmp_path / "whole"), "--step", "10", "--ignore", "optim", "--json"]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["step"], told["name"], told["tensors"]) == ("olmo-core", 10, "step10", 1)
    assert told["files"] == [str(tmp_path / "whole" / name) for name in ("model.pt", "train.pt")]
    assert told["size_bytes"] == sum(Path(each).stat().st_size for each in told["files"])


def test_our_own_run_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote = f"file://{tmp_path}/remote"
    with Uploader(tmp_path / "ckpts", remote) as uploader:
        dump(STATE, tmp_path / "ckpts" / "ep0-ba3-rank0.pt")
        uploader.enqueue(tmp_path / "ckpts" / "ep0-ba3-rank0.pt", step=3)
        uploader.seal(step=3)
        uploader.wait(step=3, timeout_s=60)
    assert cli.main(["convert", remote, str(tmp_path / "model.safetensors"), "--max-memory", "2MiB"]) == 0
    assert "1 tensor" in capsys.readouterr().out
    assert torch.equal(load(tmp_path / "model.safetensors")["w"], STATE["model"]["w"])


def test_the_kind_and_the_generation_that_are_asked_for_are_converted(tmp_path: Path) -> None:
    remote, target = f"file://{tmp_path}/remote", tmp_path / "whole.pt"
    for value, more in enumerate(({"generation": 1}, {"generation": 2}, {"kind": "ema"}), start=1):
        with Uploader(tmp_path / f"{value}", remote, **more) as uploader:
            path = tmp_path / f"{value}" / "rank-0.pt"
            dump(STATE | {"model": {"w": torch.tensor([value])}}, path)
            uploader.enqueue(path, step=3)
            uploader.seal(step=3)
    for value, which in enumerate((["--step", "3@g1"], ["--step", "3@g2"], ["--kind", "ema"]), start=1):
        assert cli.main(["convert", remote, str(target), "--overwrite", *which]) == 0
        assert load(target)["model"]["w"].item() == value


def test_a_damaged_checkpoint_that_was_passed_over_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise an older state would pass for the newest one."""
    remote = f"file://{tmp_path}/remote"
    with Uploader(tmp_path / "ckpts", remote) as uploader:
        for step in (1, 2):
            dump(STATE, tmp_path / "ckpts" / f"step{step}-rank0.pt")
            uploader.enqueue(tmp_path / "ckpts" / f"step{step}-rank0.pt", step)
            uploader.seal(step)
    (tmp_path / "remote/ckpt/step-2.g1/step2-rank0.pt").unlink()
    assert cli.main(["convert", remote, str(tmp_path / "whole.pt")]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("passed over ")
    assert "step 2" in first
    assert last.startswith("step-1 ")


def test_one_of_two_parts_is_converted(tmp_path: Path) -> None:
    for part in ("model", "optim"):
        foreign_files.dcp(tmp_path / "run/step20" / part, {part: torch.ones(2)})
    (tmp_path / "run/step20/config.yaml").write_text("model: {}")
    target = tmp_path / "part.pt"
    assert cli.main(["convert", str(tmp_path / "run/step20"), str(target), "--subfolder", "optim"]) == 0
    assert torch.equal(load(target)["optim"], torch.ones(2))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "x.pt"], 3, "nowhere does not exist"),
        (["{run}", "s3://bucket/x.pt"], 2, "is a remote; convert to a local file"),
        (["{run}", "x.pt.gz"], 1, "unknown format '.gz'"),
        (["{run}", "x.pt", "--step", "7"], 3, "has no complete checkpoint of step 7"),
        (["{run}", "x.pt", "--max-memory", "much"], 2, "is not a size"),
        (["{run}", "x.pt", "--max-memory", "1KiB"], 2, "is not a number of at least 1 MiB"),
        (["{run}/step10/train", "x.pt"], 3, "has no complete checkpoint; to convert a single file"),
        (["{run}/step10/.metadata.json", "x.pt"], 1, "has 0 torch or safetensors files"),
        (["{run}", "{run}/taken.pt"], 1, "--overwrite"),
        (["{run}/zero", "x.pt"], 3, "zero_to_fp32"),
    ],
)
def test_errors_are_one_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    (run / "taken.pt").write_text("mine")
    (run / "zero" / "global_step5").mkdir(parents=True)
    (run / "zero" / "global_step5" / "mp_rank_00_model_states.pt").touch()
    assert cli.main(["convert", *(each.format(run=run) for each in arguments)]) == code
    lines = [each for each in capsys.readouterr().err.splitlines() if "WARNING no_checkpoint" not in each]
    assert len(lines) == 1
    assert message in lines[0]
    assert not Path("x.pt").exists()


def test_help_tells_what_may_be_converted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(each in told for each in ("SOURCE", "DESTINATION", "OLMo-core", ".safetensors", "examples:"))
